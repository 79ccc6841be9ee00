"""Handles of trainers, supervised or attached, with one way to stop them."""

import contextlib
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping

from podwatch.domain.errors import Busy
from podwatch.domain.process import ExitStatus, ProcessIdentity, ProcessSample, attached_id
from podwatch.domain.snapshot import Reading, SensorState, Supervision, observed, unobserved
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock
from podwatch.system.procfs import is_alive, patiently
from podwatch.trainer.base import Saving, StopReport
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


def started_wall(identity: ProcessIdentity, clock: Clock) -> float:
    """Return the epoch second of the process's start, from its start ticks and the clock as it is now: a clock that was
    set since (a pod that boots with a wrong one) must not make a start look older than its patience."""
    return clock.wall() - identity.age(clock.boottime())


class _Trainer(ABC):
    """The common part of supervised and attached trainers."""

    def __init__(
        self,
        *,
        start_id: str,
        supervision: Supervision,
        launcher: ProcessIdentity,
        started_wall: float,
        local: LocalTree,
        roles: Roles,
        worker: Worker,
        clock: Clock,
    ) -> None:
        self.start_id = start_id
        self.supervision = supervision
        self.launcher = launcher
        self.started_wall = started_wall
        self._local, self._roles = local, roles
        self._worker = worker
        self._clock = clock
        self._swept_at = float("-inf")

    @property
    def age(self) -> float:
        return self.launcher.age(self._clock.boottime())

    @abstractmethod
    async def exit_status(self) -> ExitStatus | None: ...

    @abstractmethod
    async def release(self) -> None: ...

    async def _living(self, *, sweep: bool) -> tuple[ProcessSample, ...]:
        return await patiently(self._worker, lambda: self._local.living(sweep=sweep), timeout=_PROC_DEADLINE)

    async def tree(self, *, sweep: bool = False) -> Reading[tuple[ProcessSample, ...]]:
        now = self._clock.monotonic()
        sweep = sweep or now - self._swept_at >= _SWEEP_EVERY
        try:
            living = await self._living(sweep=sweep)
        except TimeoutError as error:
            return unobserved(SensorState.BLIND, now, f"reading the process tree hangs: {error}")
        if sweep:
            self._swept_at = now
        return observed(living, now)

    @property
    def warnings(self) -> tuple[str, ...]:
        return ()

    @property
    def ended(self) -> Mapping[tuple[int, int], ExitStatus]:
        return {}

    @property
    def terminal_used(self) -> float | None:
        return None

    async def stop(self, *, grace: float, save_grace: float, saving: Saving, max_kill_wait: float = 30.0) -> StopReport:
        """Send SIGTERM to every process of the tree, new ones included unless a save is in flight (they may belong to
        it); after the grace send SIGKILL, repeatedly. Not SIGINT: it makes prime-rl's orchestrator write an orphan
        checkpoint.
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
        return StopReport(
            seconds=self._clock.monotonic() - started,
            killed=len(killed),
            survivors=survivors,
            exit=await self.exit_status(),
        )


class SupervisedTrainer(_Trainer):
    """A trainer under a supervisor. It continues as an attached one if its supervisor is killed."""

    def __init__(
        self,
        record: SupervisorRecord,
        *,
        roles: Roles,
        worker: Worker,
        clock: Clock,
        users: frozenset[int] | None = None,
    ) -> None:
        super().__init__(
            start_id=record.start_id,
            supervision=Supervision.SUPERVISED,
            launcher=record.launcher,
            started_wall=started_wall(record.launcher, clock),
            local=LocalTree(record.launcher, roles, record=record, own_session=True, users=users),
            roles=roles,
            worker=worker,
            clock=clock,
        )
        self.record = record
        self._state = SupervisorState()
        self._missed_since: float | None = None
        self.supervisor_lives()

    def supervisor_lives(self) -> bool:
        alive = is_alive(self.record.supervisor)
        with contextlib.suppress(OSError):  # whether it recorded the end is not known then
            if not alive and read_exit(self.record.directory, self.start_id) is None:
                self.supervision = Supervision.ATTACH
        return alive

    async def exit_status(self) -> ExitStatus | None:
        self.supervisor_lives()
        try:
            found = await self._worker.call(read_exit, self.record.directory, self.start_id, timeout=_PROC_DEADLINE)
        except OSError:
            if is_alive(self.launcher):
                return None  # the state directory cannot be read now: the process shows it
            raise
        if found is not None:
            return found
        now = self._clock.monotonic()
        while not is_alive(self.launcher):
            if not self.supervisor_lives():
                # it may have recorded the end between our two reads
                return read_exit(self.record.directory, self.start_id) or ExitStatus(at_wall=self._clock.wall())
            if self._missed_since is None:
                self._missed_since = now
            if self._clock.monotonic() - self._missed_since >= _EXIT_RECORD_WAIT:
                return ExitStatus(at_wall=self._clock.wall())
            await self._clock.sleep(0.02)
            found = await self._worker.call(read_exit, self.record.directory, self.start_id, timeout=_PROC_DEADLINE)
            if found is not None:
                return found
        return None

    @property
    def ended(self) -> Mapping[tuple[int, int], ExitStatus]:
        return self._state.ended

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._state.warnings

    async def _living(self, *, sweep: bool) -> tuple[ProcessSample, ...]:
        lives = self.supervisor_lives()  # it adopts all orphans of the tree: then there is nothing else to search
        living = await super()._living(sweep=sweep and not lives)
        with contextlib.suppress(OSError, TimeoutError):  # what it shows is detail; the processes are what counts
            await self.read_state()
        return living

    async def read_state(self) -> None:
        """Read the supervisor's warnings and what it reaped. Raises OSError or TimeoutError."""
        state = await self._worker.call(read_state, self.record.directory, self.start_id, timeout=_PROC_DEADLINE)
        self._state = state or self._state

    async def release(self) -> None:
        """Wait until the supervisor has ended: it does once it has recorded that nothing of the tree lives. A process
        that has ended only in part (its main thread is gone, another one still frees memory in the driver) keeps it for
        a moment longer. Raises Busy while a process of the tree still runs."""
        started = self._clock.monotonic()
        while self.supervisor_lives():
            if await super()._living(sweep=False):
                where = str(self.record.directory)
                raise Busy("the trainer has not ended completely", where=where, fix="stop it first")
            if self._clock.monotonic() - started >= _EXIT_RECORD_WAIT:
                await self._worker.call(self._local.signal, [self.record.supervisor], signal.SIGKILL)
            await self._clock.sleep(0.01)
        await self._worker.call(self._retire, timeout=_PROC_DEADLINE)

    def _retire(self) -> None:
        found = read_record(self.record.directory)
        if found is not None and found.start_id == self.start_id:
            retire_record(self.record.directory)


class AttachedTrainer(_Trainer):
    """A trainer that podwatch did not start: its exit status stays unknown. Only processes of
    ``users`` are signalled (None: any)."""

    def __init__(
        self,
        launcher: ProcessIdentity,
        *,
        started_wall: float,
        roles: Roles,
        worker: Worker,
        clock: Clock,
        users: frozenset[int] | None = None,
    ) -> None:
        super().__init__(
            start_id=attached_id(launcher),
            supervision=Supervision.ATTACH,
            launcher=launcher,
            started_wall=started_wall,
            local=LocalTree(launcher, roles, own_session=leads_session(launcher), users=users),
            roles=roles,
            worker=worker,
            clock=clock,
        )
        self._ended_wall: float | None = None
        self._terminal = terminal_of(launcher.pid)
        self._typed: float | None = None

    @property
    def terminal_used(self) -> float | None:
        """Epoch second of the last key typed in the trainer's terminal, as last seen (the terminal may be gone by now).
        None without a terminal."""
        if self._terminal is not None:
            self._typed = self._terminal.used_wall() or self._typed
        return self._typed

    async def exit_status(self) -> ExitStatus | None:
        if is_alive(self.launcher) and not self._local.turned:
            return None
        if self._ended_wall is None:
            self._ended_wall = self._clock.wall()
        return ExitStatus(at_wall=self._ended_wall)

    async def release(self) -> None:
        """Nothing to release."""


def _describe(process: ProcessSample) -> str:
    stuck = ", stuck in the kernel (state D)" if process.state == "D" else f", state {process.state}"
    return f"{process.identity.pid} {process.name}{stuck}"
