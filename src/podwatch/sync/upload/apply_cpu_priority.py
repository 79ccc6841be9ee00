"""Gives the upload process as much of a busy machine as the backup needs (judged in policy/choose_cpu_priority.py).

While an upload runs, its rate and its CPU waits are measured every few seconds. A change goes to the running child: the
weights of its unit under systemd, else autogroup and nice value. Without CAP_SYS_NICE a nice value cannot be lowered,
and inside a CPU group (a container) only the nice value counts; then another child replaces it, which sends the parts
that the store does not have yet.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.journal.async_journal import AsyncJournal
from podwatch.journal.journal import Journal
from podwatch.policy import choose_cpu_priority as policy
from podwatch.policy.choose_cpu_priority import Change, Level, Look, Standing, Timing
from podwatch.sync.interfaces import Tell, UploadPace
from podwatch.sync.upload.start_child import Children
from podwatch.system.child import cpu_waits, waited_share
from podwatch.system.clock import Clock

RATES = "sync.rates"
"""Journal key: the best rate of each of the last uploads, bytes per second."""
RATES_KEPT = 8
"""The best rate of so many uploads is the line's capacity: a slow upload or an outage alone shows nothing."""
LEAST_SECONDS, LEAST_BYTES = 1.0, 8 << 20
"""A shorter upload shows little about the line."""
WINDOW = 3
"""Measurements over which the rate is taken."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """Facts from other parts that make a backup urgent. None: not known."""

    next_save_in: float | None = None
    """Seconds."""
    save_seconds: float | None = None
    """Seconds from one save to the next."""
    steps_at_risk: int | None = None
    """Steps that are not in the store."""
    steps_per_save: int | None = None
    newer_waits: bool = False
    nothing_stored: bool = False
    disk_waits: bool = False
    training_over: bool = False


class Watched(Protocol):
    """The part of the upload that this needs."""

    @property
    def pid(self) -> int | None: ...
    async def started(self) -> None:
        """Return when the child has its process."""
        ...

    @property
    def done_bytes(self) -> int: ...
    @property
    def line_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def step(self) -> int: ...
    async def give(self, level: Level) -> bool:
        """Set the running child's level; False where that did not fully work."""
        ...

    def replace(self) -> None:
        """End the running child; another one, at the new level, continues."""
        ...


class Priority:
    """Loop-side object. ``outlook`` is called at each measurement."""

    def __init__(
        self,
        clock: Clock,
        journal: AsyncJournal,
        children: Children,
        tell: Tell,
        *,
        max_rate: float = 0.0,
        timing: Timing | None = None,
    ) -> None:
        self._clock, self._journal, self._children, self._tell = clock, journal, children, tell
        self._max_rate, self.timing = max_rate, timing or Timing()
        self.outlook: Callable[[], Outlook] = Outlook
        self.fixed: Level | None = None
        """A fixed level, whatever is needed: for benchmarks."""
        self._standing = Standing()
        self._rates: list[float] | None = None
        self._pace = UploadPace()
        self._partly, self._urgent = False, True
        self._looks = self._starved = 0
        self._best = self._began = 0.0

    @property
    def level(self) -> Level:
        if self.fixed is not None:
            return self.fixed
        return self._standing.level if self._urgent else Level.LOWEST

    @property
    def pace(self) -> UploadPace:
        """For status."""
        at, standing = self._clock.monotonic(), self._standing
        slow = self._pace.step is not None and policy.slow_because_of_cpu(standing, at, self.timing)
        since = standing.pressed_since if slow else None
        reason = standing.reason if self.level > Level.LOWEST else ""
        return replace(self._pace, level=self.level.word, reason=reason, cpu_since=since)

    @property
    def starved(self) -> bool:
        """Did the last upload wait for a CPU, rather than for the line, most of the time?"""
        return 2 * self._starved > self._looks

    async def begin(self, *, urgent: bool) -> None:
        """Call before an upload's first child is taken. Unless ``urgent``, the priority stays at the lowest."""
        self._urgent = urgent
        if self._rates is None:
            self._rates = _numbers(await self._journal.run(Journal.learned, RATES, []))
        self._began = self._clock.monotonic()
        self._best, self._partly, self._looks, self._starved = 0.0, False, 0, 0
        if urgent:
            judged = policy.begin(self._standing, self._began, self.timing)
            self._standing = judged.standing
            if judged.change is not None:
                self._say(judged.change, None)
        self._children.level = self.level

    def end(self, sent_bytes: int, *, whole: bool) -> None:
        """Call when no child of the upload runs any more. ``sent_bytes`` over the line; ``whole``: it was finished."""
        at = self._clock.monotonic()
        seconds = at - self._began
        if whole and seconds >= LEAST_SECONDS and sent_bytes >= LEAST_BYTES:
            self._best = max(self._best, sent_bytes / seconds)
        if self._best > 0:
            self._rates = [*(self._rates or []), self._best][-RATES_KEPT:]
            self._journal.post(Journal.learn, RATES, self._rates)
        self._pace, self._urgent = UploadPace(), True
        self._children.level = self.level
        if self.outlook().newer_waits:
            self._standing = replace(self._standing, pressed_since=None, eased_since=None)
        else:
            self._standing = policy.ended(self._standing, at)

    async def watch(self, upload: Watched) -> None:
        """Measure one child until cancelled."""
        samples: deque[tuple[float, int]] = deque(maxlen=WINDOW + 1)
        before: tuple[float, dict[int, int]] | None = None
        await upload.started()
        while True:
            at = self._clock.monotonic()
            pid = upload.pid
            waits = cpu_waits(pid) if pid is not None else None
            share = waited_share(before[1], waits, at - before[0]) if before is not None and waits is not None else None
            samples.append((at, upload.line_bytes))
            if len(samples) > 1 and await self._look(upload, samples, share):
                samples = deque([samples[-1]], maxlen=WINDOW + 1)  # earlier samples say nothing about the new child
            before = (at, dict(waits)) if waits is not None else None
            await self._clock.sleep(self.timing.look)

    async def _look(self, upload: Watched, samples: "deque[tuple[float, int]]", share: float | None) -> bool:
        """Whether the priority changes."""
        (began, first), (at, last) = samples[0], samples[-1]
        rate = (last - first) / (at - began) if at > began else None
        if rate is not None and at - began >= self.timing.settle:
            self._best = max(self._best, rate)
        usual = max([self._best, *(self._rates or [])])
        usual = min(usual, self._max_rate) if self._max_rate > 0 else usual
        left = max(0, upload.total_bytes - upload.done_bytes)
        self._pace = UploadPace(upload.step, rate, usual or None, left, share)
        if not self._urgent or self.fixed is not None:
            return False
        outlook = self.outlook()
        look = Look(
            at=at,
            left_bytes=left,
            rate=rate,
            usual_rate=usual or None,
            cpu_wait=share,
            next_save_in=outlook.next_save_in,
            newer_waits=outlook.newer_waits,
            nothing_stored=outlook.nothing_stored,
            steps_at_risk=outlook.steps_at_risk,
            steps_per_save=outlook.steps_per_save,
            disk_waits=outlook.disk_waits,
            training_over=outlook.training_over,
            partly=self._partly,
        )
        judged = policy.step(self._standing, look, self.timing)
        self._standing = judged.standing
        self._looks += 1
        self._starved += share is not None and share >= self.timing.waits and bool(judged.standing.needs)
        if judged.change is not None:
            await self._carry_out(judged.change, upload)
        return judged.change is not None

    async def _carry_out(self, change: Change, upload: Watched) -> None:
        """An autogroup takes effect at once, and where it counts the nice value does not: so a child is replaced only
        if it still waits for a CPU after that."""
        self._children.level = change.level
        again = change.replace
        if not again:
            took = await upload.give(change.level)
            self._partly = not took and change.level > change.before
        self._say(change, upload.step, replaced=again)
        if again:
            self._partly = False
            upload.replace()

    def _say(self, change: Change, step: int | None, *, replaced: bool = False) -> None:
        which = "the next upload" if step is None else f"the upload of step {step}"
        text = f"{which} runs at {_WORDS[change.level]} priority: {change.reason}"
        if change.level is change.before:
            text = f"{which} continues in a new process: {change.reason}"
        fields: dict[str, str | int | float | bool] = {
            "level": change.level.word, "before": change.before.word, "new_process": replaced,
        }  # fmt: skip
        if step is not None:
            fields["step"] = step
        self._tell(EventName.UPLOAD_PRIORITY, text, Severity.INFO, **fields)


_WORDS = {Level.LOWEST: "the lowest", Level.RAISED: "a raised", Level.ORDINARY: "ordinary"}


def _numbers(kept: object) -> list[float]:
    if not isinstance(kept, list):
        return []
    return [float(r) for r in kept if isinstance(r, int | float) and r > 0][-RATES_KEPT:]


async def watched(priority: Priority, upload: Watched, work: Awaitable[None]) -> None:
    """Await ``work`` while ``priority`` watches ``upload``. Raises what ``work`` raises."""
    task = asyncio.create_task(priority.watch(upload), name="upload priority")
    try:
        await work
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
