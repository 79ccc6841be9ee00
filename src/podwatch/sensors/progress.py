"""Signs of progress: pings, markers and checkpoint steps in files, step lines in logs."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.layouts.base import StepSeen
from podwatch.domain.process import ProcessRole
from podwatch.domain.reading import Reading, observed
from podwatch.domain.snapshot import ProgressSample, ProgressSource
from podwatch.sensors import logs
from podwatch.sensors.loglines import LogLine, clean, has_finish_line, parse_step, role_of_file
from podwatch.sensors.pings import PingInbox
from podwatch.sensors.polling import Poller
from podwatch.system.clock import Clock

__all__ = ["PingInbox", "ProgressSensor"]

POLL = 2.0
"""Seconds. A finish line must be known before the exit that follows it is judged."""
DEADLINE = 15.0
"""Seconds. Listing step directories on a network volume takes seconds at times; a hung mount never answers."""
TICK = 0.05
"""Seconds that a file's time may lie behind the clock it was written at: the kernel stamps files once per tick."""
LINES_KEPT = 50
LINE_SHOWN = 500
"""Lines kept per log file to be shown, and characters of each."""


@dataclass(frozen=True, slots=True)
class _Look:
    """What the thread found. ``boundary`` says for which start it looked."""

    boundary: int
    first: bool
    began: float
    files: tuple[StepSeen, ...]
    news: tuple[logs.FileNews, ...]


@dataclass(frozen=True, slots=True)
class _LineAt:
    """Where the newest step line of a role was read."""

    path: str
    step: int


class ProgressSensor:
    """The newest sign of progress of the present start, one sample per source and role.

    Times of files are wall time; they are turned into monotonic time once, when first seen, and kept between the last
    look and this one, so that a jump of the wall clock shows as at most one interval.

    A reading is BLIND when the files did not answer, even if pings come: the other sources would be stale, and a
    stale source must not look like a trainer that stands still.
    """

    name = "progress"

    def __init__(
        self,
        clock: Clock,
        files: Callable[[], tuple[StepSeen, ...]],
        *,
        output_dir: Path,
        inbox: PingInbox,
        log_globs: tuple[str, ...] = (),
        extra_logs: tuple[Path, ...] = (),
        finish_lines: tuple[str, ...] = (),
        poll: float = POLL,
        deadline: float = DEADLINE,
    ) -> None:
        """``files`` is a layout's progress(): it may block. ``extra_logs`` come first for last_lines(): the keeper's
        log belongs there. ``log_globs`` are relative to ``output_dir`` or absolute."""
        self._clock = clock
        self._files = files
        self._sources = logs.Sources(output_dir, log_globs, extra_logs)
        self._extra = frozenset(str(path) for path in extra_logs)
        self._inbox = inbox
        self._finish_lines = finish_lines
        self._positions: dict[str, logs.Position] = {}
        self._shown: dict[str, deque[str]] = {}
        self._written: dict[str, float] = {}
        self._scanned = False
        self._boundary = 0
        self._settled = asyncio.Event()
        self._poller: Poller[_Look, tuple[ProgressSample, ...]] = Poller(
            self.name, clock, poll=poll, deadline=deadline, prepare=self._prepare, absorb=self._absorb
        )
        self._deadline = deadline
        self._reset(clock.wall())

    async def start(self) -> None:
        self._poller.start()

    async def stop(self) -> None:
        await self._poller.stop()

    def begin_start(self, wall: float) -> None:
        """A start of the trainer at epoch second ``wall`` (in the past for one that was taken over): from now on only
        what is newer counts.

        Call it before the trainer is started: what stands in the logs when the next look comes is taken for old, as
        log lines have no date.
        """
        self._boundary += 1
        self._reset(wall)
        self._poller.wake()

    async def mark_start(self, wall: float) -> bool:
        """begin_start(), and wait until the logs have really been cut there, so that not even the first line of a
        very fast trainer is lost. False if the files do not answer in time."""
        self.begin_start(wall)
        try:
            await asyncio.wait_for(self._settled.wait(), self._deadline)
        except TimeoutError:
            return False
        return True

    def refresh(self) -> None:
        """Look again now instead of at the next turn."""
        self._poller.wake()

    def latest(self) -> Reading[tuple[ProgressSample, ...]]:
        reading = self._poller.latest()
        if reading.value is None:
            return reading
        pings = tuple(
            ProgressSample(ProgressSource.HEARTBEAT, role, at)
            for role, at in self._inbox.newest()
            if at >= self._boundary_at
        )
        return Reading(reading.state, reading.at, self._in_order() + pings, reading.detail)

    @property
    def finish_line_seen(self) -> bool:
        """Every one of the layout's finish lines was printed since the start."""
        return bool(self._finish_lines) and self._finished == set(self._finish_lines)

    @property
    def finished_roles(self) -> frozenset[ProcessRole]:
        """Roles whose own finish line was printed since the start ("Orchestrator finished.")."""
        roles = (ProcessRole.ORCHESTRATOR, ProcessRole.TRAINER)
        return frozenset(role for role in roles for line in self._finished if role.value in line.lower())

    def last_lines(self, n: int = 30) -> tuple[str, ...]:
        """The last lines of the trainer's log, without colours, not scrubbed of secrets. At most LINES_KEPT.

        From the first extra log that has any, else from the log file written last.
        """
        for path in self._sources.paths:
            if shown := self._shown.get(str(path)):
                return tuple(shown)[-n:]
        newest = max((p for p in self._shown if self._shown[p]), key=lambda p: self._written.get(p, 0.0), default=None)
        return tuple(self._shown[newest])[-n:] if newest is not None else ()

    def _reset(self, wall: float) -> None:
        now = self._clock.monotonic()
        self._boundary_wall = wall - TICK
        self._boundary_at = now - max(0.0, self._clock.wall() - wall)
        self._first = True
        self._looked_at = self._boundary_at
        self._seen: dict[str, StepSeen] = {}
        self._samples: dict[tuple[ProgressSource, str], ProgressSample] = {}
        self._line_at: dict[str, _LineAt] = {}
        self._finished: set[str] = set()
        self._settled.clear()

    def _prepare(self) -> Callable[[], _Look]:
        boundary, first, began = self._boundary, self._first, self._clock.monotonic()
        positions, wall = dict(self._positions), self._boundary_wall if self._scanned else None

        def look() -> _Look:
            news = logs.look(self._sources, positions, from_end=first, since_wall=wall)
            return _Look(boundary, first, began, self._files(), news)

        return look

    def _absorb(self, look: _Look) -> Reading[tuple[ProgressSample, ...]]:
        now, wall = self._clock.monotonic(), self._clock.wall()
        present = look.boundary == self._boundary
        self._scanned = True
        self._positions = logs.known(look.news)
        for item in look.news:
            self._take_log(item, now, wall, counts=present)
        gone = self._shown.keys() - {item.path for item in look.news}
        for path in gone:
            del self._shown[path]
            self._written.pop(path, None)
        if present:
            for seen in look.files:
                self._take_file(seen, now, wall, first=look.first)
            self._first = False
            self._looked_at = look.began
            self._settled.set()
        errors = "; ".join(item.error for item in look.news if item.error)
        reading = observed(self._in_order(), now)
        return Reading(reading.state, now, reading.value, errors) if errors else reading

    def _in_order(self) -> tuple[ProgressSample, ...]:
        return tuple(self._samples[key] for key in sorted(self._samples))

    def _take_file(self, seen: StepSeen, now: float, wall: float, *, first: bool) -> None:
        last = self._seen.get(seen.role)
        self._seen[seen.role] = seen
        written_since = seen.wall >= self._boundary_wall
        # A role that turns up later with an old time was put there, not made: a restore keeps recorded times. A higher
        # number is news even if its time is not: the wall clock may have been set back meanwhile.
        higher = last is not None and seen.step > last.step
        later = last is None or seen.wall > last.wall
        if not (higher or (later and written_since)):
            return
        source = ProgressSource.CHECKPOINT if "checkpoint" in seen.role else ProgressSource.MARKER
        at = self._when(seen.wall, now, wall)
        self._samples[(source, seen.role)] = ProgressSample(source, seen.role, at, seen.step)

    def _take_log(self, item: logs.FileNews, now: float, wall: float, *, counts: bool) -> None:
        if item.lines or item.old:
            shown = self._shown.setdefault(item.path, deque(maxlen=LINES_KEPT))
            self._written[item.path] = item.mtime
            for raw in item.old[-LINES_KEPT:]:
                shown.append(_readable(clean(raw)))
        else:
            return
        file_role = "" if item.path in self._extra else role_of_file(item.name)
        at = self._when(item.mtime, now, wall)
        for raw in item.lines:
            line = clean(raw)
            shown.append(_readable(line))
            if not counts:
                continue
            self._finished.update(f for f in self._finish_lines if f not in self._finished and has_finish_line(line, f))
            step = parse_step(line, file_role)
            if step is not None:
                self._take_line(item.path, step.step, step.role or "trainer", at)

    def _take_line(self, path: str, step: int, role: str, at: float) -> None:
        """The newest number of one file is the truth about that file; another file that lags must not take it back."""
        last = self._line_at.get(role)
        if last is not None and step < last.step and path != last.path:
            return
        self._line_at[role] = _LineAt(path, step)
        self._samples[(ProgressSource.STEP_LINE, role)] = ProgressSample(ProgressSource.STEP_LINE, role, at, step)

    def _when(self, written: float, now: float, wall: float) -> float:
        """Monotonic time of something written at epoch second ``written`` that the last look had not seen yet."""
        return min(now, max(self._looked_at, now - (wall - written)))


def _readable(line: LogLine) -> str:
    text = f"[{line.prefix}] {line.text}" if line.prefix else line.text
    return text[:LINE_SHOWN]
