"""The trainer's process tree, and how the processes ended that had a role in it."""

import asyncio
import os
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from podwatch.domain.process import ExitStatus, ProcessIdentity, ProcessRole, ProcessSample
from podwatch.domain.snapshot import ProcessEnd, Reading, SensorState, TrainerSample, observed, unobserved
from podwatch.sensors.base import end_task, slot
from podwatch.sensors.progress import ProgressSensor
from podwatch.system.clock import Clock, until_beat
from podwatch.system.procfs import exit_of, open_pidfd
from podwatch.trainer.process_roles import RolePatterns
from podwatch.trainer.trainer_handle import TrainerHandle

# -- ends that are seen at once --------------------------------------------------------------------------------------
# A descriptor of each process of the run (pidfd) becomes readable when it ends, which costs an idle daemon nothing. The
# exit status is known where the kernel provides it (Linux 6.15) or the supervisor reaped the process.

KEPT = 16
STATUS_SECONDS = 10.0
"""Seconds after an end during which the exit status is requested: the parent can take a moment to reap the process."""
_DEAD = frozenset("ZXx")


@dataclass(slots=True)
class _Followed:
    role: ProcessRole
    fd: int | None
    gone_at: float | None = None
    missed: bool = False
    """A reading of the tree did not show it any more."""


class Ends:
    """Belongs to the event loop; never blocks. ``told`` hears of the end of a followed process at once, where the
    kernel reports it (Linux 5.3)."""

    def __init__(self, clock: Clock, told: "ProcessSensor") -> None:
        self._clock, self._told = clock, told
        self._followed: dict[ProcessIdentity, _Followed] = {}
        self._known: deque[ProcessEnd] = deque(maxlen=KEPT)
        self.missed = 0
        """Followed processes that the readings of the tree no longer show."""

    @property
    def known(self) -> tuple[ProcessEnd, ...]:
        """The newest ends whose exit status is known, oldest first."""
        return tuple(self._known)

    def look(self, tree: Iterable[ProcessSample], ended: Mapping[tuple[int, int], ExitStatus]) -> None:
        """Process one reading of the tree. ``ended`` has the exit status of processes that the supervisor reaped, by
        (pid, ticks)."""
        now = self._clock.monotonic()
        living = set()
        for sample in tree:
            if sample.role is ProcessRole.OTHER or sample.state in _DEAD:
                continue
            living.add(sample.identity)
            # Engine workers, servers, orchestrator and trainer ranks of one machine
            if sample.identity not in self._followed and len(self._followed) < 64:
                self._follow(sample)
        for identity, found in list(self._followed.items()):
            if identity in living:
                continue
            if not found.missed:
                found.missed, self.missed = True, self.missed + 1
            if found.gone_at is None:
                found.gone_at = now
            status = self._status(identity, found, ended)
            if status is not None:
                self._known.append(ProcessEnd(identity, found.role, status, found.gone_at))
            if status is not None or now - found.gone_at > STATUS_SECONDS:
                self._leave(identity)

    def clear(self) -> None:
        """Forget everything, at another start or when there is none."""
        for identity in list(self._followed):
            self._leave(identity)
        self._known.clear()
        self.missed = 0

    def _follow(self, sample: ProcessSample) -> None:
        fd = open_pidfd(sample.identity)
        self._followed[sample.identity] = _Followed(sample.role, fd)
        if fd is not None:
            asyncio.get_running_loop().add_reader(fd, self._ended, sample.identity)

    def _ended(self, identity: ProcessIdentity) -> None:
        found = self._followed.get(identity)
        if found is None or found.fd is None or found.gone_at is not None:
            return
        asyncio.get_running_loop().remove_reader(found.fd)  # it stays readable forever
        found.gone_at = self._clock.monotonic()
        self._told.on_end(found.role)

    def _status(
        self, identity: ProcessIdentity, found: _Followed, ended: Mapping[tuple[int, int], ExitStatus]
    ) -> ExitStatus | None:
        if (reaped := ended.get((identity.pid, identity.start_ticks))) is not None:
            return reaped
        how = exit_of(found.fd) if found.fd is not None else None
        return ExitStatus(how[0], how[1], self._clock.wall()) if how is not None else None

    def _leave(self, identity: ProcessIdentity) -> None:
        found = self._followed.pop(identity)
        if found.fd is not None:
            asyncio.get_running_loop().remove_reader(found.fd)
            os.close(found.fd)


class ProcessSensor:
    """Reads the tree and the exit status of the watched handle every ``poll`` seconds.

    The handle has its own threads for calls that can block; here each request has a deadline, and no second request is
    made while one is pending. With nothing to watch the reading is still good: a TrainerSample without supervision.
    """

    name = "processes"

    def __init__(
        self,
        clock: Clock,
        poll: float = 2.0,
        *,
        deadline: float = 5.0,
        logs: ProgressSensor | None = None,
        roles: RolePatterns | None = None,
    ) -> None:
        """An end is shown only after ``logs`` have been read once more. ``roles`` are the operator's own patterns."""
        self._clock = clock
        self._poll = poll
        self._deadline = deadline
        self._logs = logs
        self._roles = roles
        self._ends_read = 0
        self._handle: TrainerHandle | None = None
        self._base = TrainerSample()
        self._seen_to_end = Ends(clock, self)
        self.engine_ended = asyncio.Event()
        """Set at once when an engine process ends, not only at the next poll."""
        self._reading: Reading[TrainerSample] = unobserved(SensorState.PENDING, clock.monotonic(), "not observed yet")
        self._turned_at = clock.monotonic()
        self._asked: asyncio.Task[tuple[ExitStatus | None, Reading[tuple[ProcessSample, ...]]]] | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    @property
    def handle(self) -> TrainerHandle | None:
        """The watched trainer."""
        return self._handle

    def watch(self, handle: TrainerHandle | None) -> None:
        """Watch this trainer from now on (None: none). A new start_id starts without memory of the last."""
        now = self._clock.monotonic()
        if handle is None or handle.start_id != self._base.start_id:
            self._seen_to_end.clear()
        self._handle = handle
        self._ends_read = 0
        if handle is None:
            self._base = TrainerSample()
            self._reading = observed(self._base, now)
        else:
            self._base = TrainerSample(
                start_id=handle.start_id,
                supervision=handle.supervision,
                started_at=now - max(0.0, self._clock.wall() - handle.started_wall),
                launcher=handle.launcher,
            )
            self._reading = unobserved(SensorState.PENDING, now, "not observed yet")
        self._turned_at = now
        self._drop_question()
        self._wake.set()

    async def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="sensor processes")

    async def stop(self) -> None:
        task, self._task = self._task, None
        self._drop_question()
        if task is not None:
            await end_task(task)
        self._seen_to_end.clear()

    def wake(self) -> None:
        """Read again now instead of at the next poll."""
        self._wake.set()

    def on_end(self, role: ProcessRole) -> None:
        if role is ProcessRole.ENGINE:
            self._wake.set()
            self.engine_ended.set()

    def latest(self) -> Reading[TrainerSample]:
        now = self._clock.monotonic()
        silence = now - self._turned_at
        if self._reading.ok and silence > self._poll + 2 * self._deadline:
            return unobserved(SensorState.BLIND, now, f"no reading for {silence:.0f} s")
        return self._reading

    def _drop_question(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None and not asked.cancel() and not asked.cancelled():
            asked.exception()  # read, so that asyncio does not report it as never retrieved

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            await self._turn()
            rest = until_beat(self._clock.monotonic(), self._poll, slot(self.name) * self._poll)
            await self._clock.wait(self._wake, rest)

    async def _turn(self) -> None:
        handle = self._handle
        if handle is None:
            self._turned_at = self._clock.monotonic()
            self._reading = observed(self._base, self._turned_at)
            return
        if self._asked is None:
            self._asked = asyncio.create_task(self._ask(handle), name="sensor processes: question")
        asked = self._asked
        await asyncio.wait({asked}, timeout=self._deadline)
        if handle is not self._handle or asked is not self._asked:
            return  # watch() was called meanwhile: the answer is about another trainer
        now = self._clock.monotonic()
        if not asked.done():
            text = f"the trainer's process tree gave no answer within {self._deadline:g} s"
            self._reading = unobserved(SensorState.BLIND, now, text)
            return
        self._asked = None
        self._turned_at = now
        try:
            exit_status, tree = asked.result()
            if self._roles is not None and tree.value is not None:
                tree = replace(tree, value=self._roles.applied(tree.value, handle.launcher))
            ends = self._ends_so_far(handle, exit_status, tree)
            if ends > self._ends_read and self._logs is not None:
                self._ends_read = ends
                await self._logs.look_again()
                if handle is not self._handle:
                    return
            self._reading = self._judge(handle, exit_status, tree, now)
        except asyncio.CancelledError:
            self._reading = unobserved(SensorState.BLIND, now, "reading the process tree was cancelled")
        except Exception as error:  # a bug must show as a blind sensor, not end the sensing
            self._reading = unobserved(SensorState.BLIND, now, f"{type(error).__name__}: {error}")

    @staticmethod
    async def _ask(handle: TrainerHandle) -> tuple[ExitStatus | None, Reading[tuple[ProcessSample, ...]]]:
        """Read the tree first, then the exit: so a dead launcher is never taken for a living one without children. A
        launcher that is alive needs no second read."""
        tree = await handle.tree()
        if any(p.identity == handle.launcher and p.state not in _DEAD for p in tree.value or ()):
            return None, tree
        return await handle.exit_status(), tree

    def _ends_so_far(
        self, handle: TrainerHandle, exit_status: ExitStatus | None, tree: Reading[tuple[ProcessSample, ...]]
    ) -> int:
        """Process one reading; returns the number of ends to show, including the end of the trainer itself."""
        if exit_status is None and tree.value is not None:
            self._seen_to_end.look(tree.value, handle.ended)
        return self._seen_to_end.missed + (exit_status is not None)

    def _judge(
        self,
        handle: TrainerHandle,
        exit_status: ExitStatus | None,
        tree: Reading[tuple[ProcessSample, ...]],
        now: float,
    ) -> Reading[TrainerSample]:
        if exit_status is None and tree.value is None:
            return unobserved(tree.state, now, tree.detail or "the process tree cannot be read")
        descendants = tree.value or ()
        sample = replace(
            self._base,
            supervision=handle.supervision,  # changes when a supervisor ends
            alive=exit_status is None,
            exit=exit_status,
            descendants=descendants,
            finish_line=self._logs is not None and self._logs.finish_line_seen,
            finished=self._logs.finished_roles if self._logs is not None else frozenset(),
            terminal_used_wall=handle.terminal_used,
            ends=self._seen_to_end.known,
        )
        return Reading(SensorState.OK, now, sample, "" if tree.ok else tree.detail)
