"""A trainer that runs or has just ended: its processes, how it ended, and the one way to stop it."""

import contextlib
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from podwatch.domain.errors import Busy
from podwatch.domain.process import ExitStatus, ProcessIdentity, ProcessSample, attached_id
from podwatch.domain.snapshot import Reading, SensorState, Supervision, observed, unobserved
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock
from podwatch.system.procfs import is_alive, patiently, send_signal
from podwatch.trainer.operator_terminal import terminal_of
from podwatch.trainer.process_roles import Roles
from podwatch.trainer.process_tree import LocalTree, leads_session
from podwatch.trainer.supervisor_files import (
    SupervisorRecord,
    SupervisorState,
    read_exit,
    read_record,
    read_state,
    retire_record,
)

_PROC_DEADLINE = 10.0
_SWEEP_EVERY = 10.0
"""Seconds between two searches for the start marker while nothing is being stopped; each reads every process."""
_EXIT_RECORD_WAIT = 5.0
"""A living supervisor records its child's end within milliseconds; after this it counts as stuck."""

Saving: TypeAlias = Callable[[], bool]
"""Whether the trainer writes a checkpoint now."""


@dataclass(frozen=True, slots=True)
class StopReport:
    """The result of a stop. ``survivors`` are processes that even SIGKILL did not end (D state), as text."""

    seconds: float
    killed: int
    survivors: tuple[str, ...] = ()
    exit: ExitStatus | None = None


def started_wall(identity: ProcessIdentity, clock: Clock) -> float:
    """Return the epoch second of the process's start, from its start ticks and the clock as it is now: a clock that was
    set since (a pod that boots with a wrong one) must not make a start look older than its patience."""
    return clock.wall() - identity.age(clock.boottime())


class TrainerHandle:
    """One trainer. ``record``: of its supervisor; None if podwatch only attached to it, so that its exit status stays
    unknown. ``supervision`` becomes ATTACH when a supervisor is killed before it recorded the end. Only processes of
    ``users`` are signalled (None: any)."""

    def __init__(
        self,
        launcher: ProcessIdentity,
        *,
        roles: Roles,
        worker: Worker,
        clock: Clock,
        record: SupervisorRecord | None = None,
        users: frozenset[int] | None = None,
    ) -> None:
        self.launcher, self.record = launcher, record
        self.start_id = attached_id(launcher) if record is None else record.start_id
        self.started_wall = started_wall(launcher, clock)
        self.supervision = Supervision.ATTACH if record is None else Supervision.SUPERVISED
        own_session = record is not None or leads_session(launcher)
        self._local = LocalTree(launcher, roles, record=record, own_session=own_session, users=users)
        self._worker, self._clock = worker, clock
        self._swept_at = float("-inf")
        self._state = SupervisorState()
        self._missed_since: float | None = None
        self._ended_wall: float | None = None
        self._terminal = terminal_of(launcher.pid) if record is None else None
        self._typed: float | None = None
        self.supervisor_lives()

    @property
    def age(self) -> float:
        """Seconds since the launcher's start, by the boot's clock, which nobody sets."""
        return self.launcher.age(self._clock.boottime())

    @property
    def warnings(self) -> tuple[str, ...]:
        """Problems of the start that did not prevent it."""
        return self._state.warnings

    @property
    def ended(self) -> Mapping[tuple[int, int], ExitStatus]:
        """How processes of the tree ended, by (pid, start ticks): those that the supervisor reaped, because their own
        parent had ended before."""
        return self._state.ended

    @property
    def terminal_used(self) -> float | None:
        """Epoch second of the last key typed in the terminal of an attached trainer, as last seen (the terminal may be
        gone by now). None without one. Never blocks."""
        if self._terminal is not None:
            self._typed = self._terminal.used_wall() or self._typed
        return self._typed

    def supervisor_lives(self) -> bool:
        """Return whether a supervisor runs this trainer."""
        if self.record is None:
            return False
        alive = is_alive(self.record.supervisor)
        with contextlib.suppress(OSError):  # whether it recorded the end is not known then
            if not alive and read_exit(self.record.directory, self.start_id) is None:
                self.supervision = Supervision.ATTACH
        return alive

    # -- its end

    async def exit_status(self) -> ExitStatus | None:
        """Return how the launcher ended; None while it lives."""
        if self.record is not None:
            return await self._recorded_exit(self.record)
        if is_alive(self.launcher) and not self._local.turned:
            return None
        if self._ended_wall is None:
            self._ended_wall = self._clock.wall()
        return ExitStatus(at_wall=self._ended_wall)

    async def _recorded_exit(self, record: SupervisorRecord) -> ExitStatus | None:
        self.supervisor_lives()
        try:
            found = await self._worker.call(read_exit, record.directory, self.start_id, timeout=_PROC_DEADLINE)
        except OSError:
            if is_alive(self.launcher):
                return None  # the state directory cannot be read now: the process shows it
            raise
        while found is None and not is_alive(self.launcher):
            now = self._clock.monotonic()
            if not self.supervisor_lives():
                # it may have recorded the end between our two reads
                return read_exit(record.directory, self.start_id) or ExitStatus(at_wall=self._clock.wall())
            if self._missed_since is None:
                self._missed_since = now
            if now - self._missed_since >= _EXIT_RECORD_WAIT:
                return ExitStatus(at_wall=self._clock.wall())
            await self._clock.sleep(0.02)
            found = await self._worker.call(read_exit, record.directory, self.start_id, timeout=_PROC_DEADLINE)
        return found

    # -- its processes

    async def tree(self, *, sweep: bool = False) -> Reading[tuple[ProcessSample, ...]]:
        """Return every living descendant ever seen, the launcher first, re-parented orphans included. ``sweep``: search
        all processes for others of this start now, not only every few seconds."""
        now = self._clock.monotonic()
        sweep = sweep or now - self._swept_at >= _SWEEP_EVERY
        try:
            living = await self._living(sweep=sweep)
        except TimeoutError as error:
            return unobserved(SensorState.BLIND, now, f"reading the process tree hangs: {error}")
        if sweep:
            self._swept_at = now
        return observed(living, now)

    async def _living(self, *, sweep: bool) -> tuple[ProcessSample, ...]:
        sweep = sweep and not self.supervisor_lives()  # it adopts all orphans: then there is nothing else to search
        living = await patiently(self._worker, lambda: self._local.living(sweep=sweep), timeout=_PROC_DEADLINE)
        with contextlib.suppress(OSError, TimeoutError):  # what it shows is detail; the processes are what counts
            await self.read_state()
        return living

    async def read_state(self) -> None:
        """Read the supervisor's warnings and what it reaped. Raises OSError or TimeoutError."""
        if self.record is not None:
            state = await self._worker.call(read_state, self.record.directory, self.start_id, timeout=_PROC_DEADLINE)
            self._state = state or self._state

    # -- stopping it

    def ask_to_end(self) -> bool:
        """Send SIGTERM to the supervisor, which passes it on, outlives podwatch, and kills what does not end. Return
        False if none runs. Raises PermissionDenied."""
        return (
            self.record is not None and self.supervisor_lives() and send_signal(self.record.supervisor, signal.SIGTERM)
        )

    async def stop(self, *, grace: float, save_grace: float, saving: Saving, max_kill_wait: float = 30.0) -> StopReport:
        """SIGTERM the whole tree, wait ``grace`` seconds (``save_grace`` while ``saving()``), SIGKILL what is left.

        New processes get SIGTERM, too, unless a save is in flight (they may belong to it). Not SIGINT: it makes
        prime-rl's orchestrator write an orphan checkpoint. Idempotent. Returns when nothing of the tree is left, or the
        rest is stuck in the kernel.
        """
        started = self._clock.monotonic()
        told: set[ProcessIdentity] = set()
        killed: set[ProcessIdentity] = set()
        kill_since: float | None = None
        survivors: tuple[str, ...] = ()
        pause = 0.02
        while True:
            living = await self._living(sweep=not told or pause >= 0.2)
            if not living and not (living := await self._living(sweep=True)):
                break
            now = self._clock.monotonic()
            if kill_since is None and now - started >= (max(grace, save_grace) if saving() else grace):
                kill_since, pause = now, 0.02
            if kill_since is None:
                fresh = [p.identity for p in living if p.identity not in told]
                if fresh and not (told and saving()):
                    await self._worker.call(self._local.signal, fresh, signal.SIGTERM, timeout=_PROC_DEADLINE)
                    told.update(fresh)
            elif now - kill_since >= max_kill_wait:
                survivors = tuple(_describe(p) for p in living)
                break
            else:
                targets = [p.identity for p in living]
                await self._worker.call(self._local.signal, targets, signal.SIGKILL, timeout=_PROC_DEADLINE)
                killed.update(targets)
            await self._clock.sleep(pause)
            pause = min(pause * 1.5, 0.25)
        seconds = self._clock.monotonic() - started
        return StopReport(seconds, len(killed), survivors, await self.exit_status())

    async def release(self) -> None:
        """Wait until the supervisor has ended, so that the run lock is free: it ends once it has recorded that nothing
        of the tree lives. A process that has ended only in part (its main thread is gone, another one still frees
        memory in the driver) keeps it for a moment longer. Raises Busy while a process of the tree still runs."""
        if self.record is None:
            return
        started = self._clock.monotonic()
        while self.supervisor_lives():
            if await self._living(sweep=False):
                where = str(self.record.directory)
                raise Busy("the trainer has not ended completely", where=where, fix="stop it first")
            if self._clock.monotonic() - started >= _EXIT_RECORD_WAIT:
                await self._worker.call(self._local.signal, [self.record.supervisor], signal.SIGKILL)
            await self._clock.sleep(0.01)
        await self._worker.call(self._retire, self.record, timeout=_PROC_DEADLINE)

    def _retire(self, record: SupervisorRecord) -> None:
        found = read_record(record.directory)
        if found is not None and found.start_id == self.start_id:
            retire_record(record.directory)


def _describe(process: ProcessSample) -> str:
    stuck = ", stuck in the kernel (state D)" if process.state == "D" else f", state {process.state}"
    return f"{process.identity.pid} {process.name}{stuck}"
