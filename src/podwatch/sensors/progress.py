"""Progress of training: pings, markers and checkpoint steps in files, step lines in logs."""

import asyncio
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from podwatch.checkpoints.shapes import StepSeen
from podwatch.domain.process import ProcessRole
from podwatch.domain.snapshot import ProgressSample, ProgressSource, Reading, SensorState, observed, unobserved
from podwatch.sensors import log_tail
from podwatch.sensors.base import PolledSensor, Read
from podwatch.sensors.log_tail import LogLine, has_finish_line, role_of_file
from podwatch.sensors.read_step_lines import StepReader
from podwatch.system.clock import Clock

# -- progress pings --------------------------------------------------------------------------------------------------
# A GET after every step, without a number, such as prime-rl's ``--trainer.heartbeat.url``.

_ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")


class PingInbox:
    """The newest ping of each role. Thread-safe. The HTTP server checks the token."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._newest: dict[str, float] = {}

    def ping(self, role: str) -> bool:
        """Record a ping now. False if the role is refused (invalid characters, or too many roles)."""
        if _ROLE.fullmatch(role) is None:
            return False
        with self._lock:
            # Pings come from the network and must not fill the memory
            if role not in self._newest and len(self._newest) >= 16:
                return False
            self._newest[role] = self._clock.monotonic()
            return True

    def newest(self) -> tuple[tuple[str, float], ...]:
        """(role, monotonic second of its newest ping), by role."""
        with self._lock:
            return tuple(sorted(self._newest.items()))


# -- sensor ----------------------------------------------------------------------------------------------------------

POLL = 4.0
"""Seconds. Steps take longer, and the end of the trainer or of one of its processes triggers a read (``look_again``): a
finish line must be known before the exit that follows it is judged."""
DEADLINE = 15.0
"""Seconds. Listing step directories on a network volume sometimes takes seconds; a hung mount never answers."""
TICK = 0.05
"""Seconds by which a file's time can lag behind the clock: the kernel stamps files once per tick."""
LINE_SHOWN = 500
"""Characters of a line that are kept for display."""


@dataclass(frozen=True, slots=True)
class _Look:
    """The result of the thread. ``boundary`` identifies the start. ``found`` are the results or errors of the other
    readers, in their order."""

    boundary: int
    first: bool
    began: float
    files: tuple[StepSeen, ...]
    news: tuple[log_tail.FileNews, ...]
    found: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class _LineAt:
    """Where the newest step line of a role was read."""

    path: str
    step: int


class ProgressSensor(PolledSensor[_Look, tuple[ProgressSample, ...]]):
    """The newest progress of the present start, one sample per source and role.

    Times of files are wall time; they are converted into monotonic time once, when first seen, and limited to the time
    between the last poll and this one, so that a jump of the wall clock changes at most one interval.

    A reading is BLIND when the files did not answer, even if pings arrive: the other sources would be stale, and a
    stale source must not look like a trainer without progress.
    """

    name = "progress"

    def __init__(
        self,
        clock: Clock,
        files: Callable[[], tuple[StepSeen, ...]],
        *,
        steps: Callable[[], StepReader],
        logs: log_tail.Sources,
        inbox: PingInbox,
        finish_lines: tuple[str, ...] = (),
        poll: float = POLL,
        deadline: float = DEADLINE,
        readers: tuple[log_tail.LogReader[Any], ...] = (),
        figures: log_tail.Sources | None = None,
    ) -> None:
        """``files`` is a layout's progress(): it can block. The single paths of ``logs`` come first for last_lines():
        pass the supervisor's log there. ``steps`` creates the reader of one file's step lines. ``readers`` get all new
        lines too, and those of ``figures``: the trainer's files of metrics."""
        super().__init__(clock, poll=poll, deadline=deadline)
        self._files = files
        self._sources = logs
        self._extra = frozenset(str(path) for path in logs.paths)
        self.inbox = inbox
        self._finish_lines = finish_lines
        self._other_readers, self._figures = readers, figures
        self._make_reader = steps
        self._readers: dict[str, StepReader] = {}
        self._positions: dict[str, log_tail.Position] = {}
        self._shown: dict[str, deque[str]] = {}
        self._written: dict[str, float] = {}
        self._scanned = False
        self._boundary = 0
        self._start_id = ""
        self._recalled: dict[str, Any] = {}
        self._going_on = False
        self._remembered: dict[str, object] = {}
        self._absorbed = asyncio.Event()
        self._reset(clock.wall())

    def begin_start(self, wall: float, start_id: str = "") -> None:
        """Record a start of the trainer at epoch second ``wall`` (in the past for one that was taken over): from now on
        only newer progress counts.

        Call it before the trainer is started: lines that are in the logs at the next poll count as old, because log
        lines have no date. Exception: lines of the recalled start that an earlier podwatch had not read yet count.
        """
        self._remembered = self.remembered
        self._boundary += 1
        self._start_id = start_id
        self._reset(wall)
        recalled, self._recalled = self._recalled, {}
        positions = log_tail.from_json(recalled.get("files")) if recalled.get("start_id") == start_id != "" else None
        self._going_on = positions is not None
        if positions is not None:
            self._positions = positions
            finished = recalled.get("finished")
            self._finished.update(set(self._finish_lines) & set(finished if isinstance(finished, list) else ()))
        self.wake()

    def recall(self, document: object) -> None:
        """Load the state that an earlier podwatch saved. Call it before the first ``begin_start``."""
        self._recalled = document if isinstance(document, dict) else {}

    @property
    def remembered(self) -> dict[str, object]:
        """State to save: how far the logs of the present start are read, and which finish lines were seen;
        JSON-safe."""
        if self._start_id and not self._first:
            self._remembered = {
                "start_id": self._start_id,
                "finished": sorted(self._finished),
                "files": log_tail.to_json(self._positions),
            }
        return self._remembered

    async def look_again(self) -> None:
        """Return once a read that starts after this call is processed: the last lines of a trainer that ended must be
        known before its end is judged, however busy the machine is. Without it if the files do not answer now."""
        asked = self._clock.monotonic()
        while self._first or self._looked_at < asked:
            blind = super().latest().state is SensorState.BLIND
            if blind and self._clock.monotonic() > asked + 3.0:  # time for a read after one that failed
                return
            self._absorbed.clear()
            self.wake()
            await self._clock.wait(self._absorbed, 0.5)

    def latest(self) -> Reading[tuple[ProgressSample, ...]]:
        reading = super().latest()
        if reading.value is None:
            return reading
        if self._first:
            return unobserved(SensorState.PENDING, reading.at, "no reading since this start")
        pings = tuple(
            ProgressSample(ProgressSource.HEARTBEAT, role, at)
            for role, at in self.inbox.newest()
            if at >= self._boundary_at
        )
        return Reading(reading.state, reading.at, self._in_order() + pings, reading.detail)

    @property
    def finish_line_seen(self) -> bool:
        """Whether all of the layout's finish lines were printed since the start."""
        return bool(self._finish_lines) and self._finished == set(self._finish_lines)

    @property
    def finished_roles(self) -> frozenset[ProcessRole]:
        """Roles whose own finish line was printed since the start ("Orchestrator finished.")."""
        roles = (ProcessRole.ORCHESTRATOR, ProcessRole.TRAINER)
        return frozenset(role for role in roles for line in self._finished if role.value in line.lower())

    def last_lines(self, n: int = 30) -> tuple[str, ...]:
        """The last lines of the trainer's log, without colours; secrets are not removed. At most
        ``log_tail.LINES_SHOWN``.

        From the first extra log that has lines, else from the log file written last.
        """
        for path in self._sources.paths:
            if shown := self._shown.get(str(path)):
                return tuple(shown)[-n:]
        newest = max((p for p in self._shown if self._shown[p]), key=lambda p: self._written.get(p, 0.0), default=None)
        return tuple(self._shown[newest])[-n:] if newest is not None else ()

    def log_tails(self) -> dict[str, tuple[str, ...]]:
        """The last lines of every log of the run, as ``logs.tails``. Blocks."""
        return log_tail.tails(self._sources)

    def _reset(self, wall: float) -> None:
        now = self._clock.monotonic()
        self._boundary_wall = wall - TICK
        self._boundary_at = now - max(0.0, self._clock.wall() - wall)
        self._first = True
        self._looked_at = self._boundary_at
        self._seen: dict[str, StepSeen] = {}
        """By role: its highest step, and when its newest file was written."""
        self._samples: dict[tuple[ProgressSource, str], ProgressSample] = {}
        self._line_at: dict[str, _LineAt] = {}
        self._readers = {}
        self._finished: set[str] = set()
        for reader in self._other_readers:
            reader.reset()

    def prepare(self) -> Read[_Look]:
        boundary, first, began = self._boundary, self._first, self._clock.monotonic()
        positions, wall = dict(self._positions), self._boundary_wall if self._scanned else None
        readers, go_on = self._other_readers, self._going_on
        if go_on:
            wall = self._boundary_wall

        def look() -> _Look:
            read = partial(log_tail.look, positions=positions, from_end=first, since_wall=wall, go_on=go_on)
            news = read(self._sources)
            rows = read(self._figures) if self._figures is not None else ()
            news += tuple(replace(item, figures=True) for item in rows)
            return _Look(boundary, first, began, self._files(), news, tuple(_found(reader, news) for reader in readers))

        return look

    def absorb(self, look: _Look) -> Reading[tuple[ProgressSample, ...]]:
        now, wall = self._clock.monotonic(), self._clock.wall()
        present = look.boundary == self._boundary
        self._scanned = True
        if present or not self._going_on:
            self._positions = log_tail.known(look.news)
        logs = [item for item in look.news if not item.figures]
        for item in logs:
            self._take_log(item, now, wall, counts=present)
        gone = self._shown.keys() - {item.path for item in logs}
        for path in gone:
            del self._shown[path]
            self._written.pop(path, None)
            self._readers.pop(path, None)
        if present:
            for seen in look.files:
                self._take_file(seen, now, wall)
            self._first = self._going_on = False
            self._looked_at = look.began
        self._absorbed.set()
        errors = [item.error for item in logs if item.error]
        for other, found in zip(self._other_readers, look.found, strict=True):
            if isinstance(found, Exception):  # an error there must not blind the sensing of steps
                errors.append(f"{other.name}: {type(found).__name__}: {found}")
            else:
                other.take(found if present else None, now)
        reading = observed(self._in_order(), now)
        return replace(reading, detail="; ".join(errors))

    def _in_order(self) -> tuple[ProgressSample, ...]:
        return tuple(self._samples[key] for key in sorted(self._samples))

    def _take_file(self, seen: StepSeen, now: float, wall: float) -> None:
        last = self._seen.get(seen.role, StepSeen(seen.role, -1, float("-inf")))
        self._seen[seen.role] = StepSeen(seen.role, max(last.step, seen.step), max(last.wall, seen.wall))
        written_since = seen.wall >= self._boundary_wall
        # A role that appears later with an old time was restored, not made: a restore keeps recorded times. A higher
        # number counts as progress even if its time is old: the wall clock can have been set back meanwhile. A lower
        # one counts if it was written later: training began again below.
        higher = 0 <= last.step < seen.step
        later = seen.wall > last.wall
        if not (higher or (later and written_since)):
            return
        source = ProgressSource.CHECKPOINT if "checkpoint" in seen.role else ProgressSource.MARKER
        at = self._when(seen.wall, now, wall)
        self._samples[(source, seen.role)] = ProgressSample(source, seen.role, at, seen.step)

    def _take_log(self, item: log_tail.FileNews, now: float, wall: float, *, counts: bool) -> None:
        if not (item.lines or item.old):
            return
        shown = self._shown.setdefault(item.path, deque(maxlen=log_tail.LINES_SHOWN))
        self._written[item.path] = item.mtime
        reader = self._readers.setdefault(item.path, self._make_reader())
        for line in item.old:
            shown.append(_readable(line))
            reader.read(line)  # the reader learns which bar is that of training
        file_role = "" if item.path in self._extra else role_of_file(item.name)
        at = self._when(item.mtime, now, wall)
        for line in item.lines:
            shown.append(_readable(line))
            if not counts:
                continue
            self._finished.update(f for f in self._finish_lines if f not in self._finished and has_finish_line(line, f))
            step = reader.read(line, file_role)
            if step is not None:
                self._take_line(item.path, step.step, step.role or "trainer", at, own=item.path in self._extra)

    def _take_line(self, path: str, step: int, role: str, at: float, *, own: bool = False) -> None:
        """Record a step line. The newest number of one file counts for that file; another file that lags must not lower
        it."""
        last = self._line_at.get(role)
        if last is not None and step < last.step and path != last.path:
            return
        before = self._samples.get((ProgressSource.STEP_LINE, role))
        own = own or (before is not None and before.own and before.step == step)  # the same line, copied by a launcher
        self._line_at[role] = _LineAt(path, step)
        self._samples[(ProgressSource.STEP_LINE, role)] = ProgressSample(
            ProgressSource.STEP_LINE, role, at, step, own=own
        )

    def _when(self, written: float, now: float, wall: float) -> float:
        """Monotonic time of something written at epoch second ``written`` that the last poll had not seen yet."""
        return min(now, max(self._looked_at, now - (wall - written)))


def _found(reader: log_tail.LogReader[Any], news: Sequence[log_tail.FileNews]) -> Any:
    try:
        return reader.look(news)
    except Exception as error:  # reported by ``absorb``
        return error


def _readable(line: LogLine) -> str:
    text = f"[{line.prefix}] {line.text}" if line.prefix else line.text
    return text[:LINE_SHOWN]
