"""One operation at a time: started, retried when it fails, cancelled for an operator's request.

Each operation is a task that can be cancelled at any point. A cancelled operation leaves the same run.json as a killed
podwatch, and the same code continues after both.

``reconcile`` and ``adopt`` continue from what an earlier podwatch or a cancelled operation left: run.json, the running
trainer, the unfinished quarantine.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, Final, Protocol

from podwatch.domain.errors import HostError, InternalError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import FindingKind, Severity
from podwatch.domain.process import ProcessIdentity
from podwatch.domain.run_state import Stopping
from podwatch.domain.snapshot import Supervision
from podwatch.domain.starts import StartedBy
from podwatch.journal import Journal
from podwatch.recovery import quarantine
from podwatch.recovery.context import Attempt, RecoveryContext
from podwatch.recovery.resume_point import StoreUnknown
from podwatch.recovery.start_entries import enter_running, first_start
from podwatch.recovery.state import Phase
from podwatch.trainer.base import Look, TrainerHandle

ADOPT: Final = "--adopt-existing"
"""Kind of request: a flag of `podwatch run`."""


async def recall(context: RecoveryContext) -> None:
    """Read run.json if it is not known yet, and begin it where this run has none. Raises HostError while it cannot be
    read or written: then nothing may be started, because the desired state is unknown. The operator's
    `--adopt-existing` is executed here, once; it also replaces what belongs to another run."""
    run_file, wanted, changes = context.tools.run_file, context.adopt, dict[str, Any]()
    await read_run(context)
    adopts = bool(wanted) and context.run.executed.get(ADOPT) != wanted
    if adopts:
        await replace_other_run(context)
    elif wanted:
        run_file.other_run = ""
    run_file.refuse_other_run()
    starts = context.run.starts
    if not starts:
        starts = changes["starts"] = (await first_start(context.tools),)
    if adopts:
        changes |= {"adopted": starts[-1].id, "executed": {**context.run.executed, ADOPT: wanted}}
    if changes:
        await context.edit(**changes)
    context.recalled = True


async def read_run(context: RecoveryContext) -> None:
    """Read run.json if it is not known yet. Raises HostError while it cannot be read."""
    if not context.tools.run_file.known:
        await context.tools.blocking(context.tools.run_file.load)


async def replace_other_run(context: RecoveryContext) -> None:
    """Where output_dir belongs to another run, let this one begin in it; the next edit records that."""
    if context.tools.run_file.other_run:
        context.tools.run_file.other_run = ""
        context.note(starts=(await first_start(context.tools),))


async def adopt(context: RecoveryContext, handle: TrainerHandle) -> None:
    """Watch a trainer under a supervisor, alive or ended (the sensing loop then judges its end). For one that is
    watched already, only read what run.json knows of its start: what was seen of it stays known."""
    tools, watched = context.tools, context.handle
    if watched is not None and (watched.start_id, watched.launcher) == (handle.start_id, handle.launcher):
        context.attempt = await _attempt_of(context, handle, context.attempt)
        show_watching(context, "adopted")
        return
    attempt = await _attempt_of(context, handle)
    context.watch(handle, attempt, adopted=True)
    tools.begin_start(attempt.started_at, handle.start_id)
    with contextlib.suppress(HostError):  # recorded at the next chance: training is watched without it
        await enter_running(tools, handle)
    show_watching(context, "adopted")
    status = await handle.exit_status()
    pid = handle.launcher.pid
    tools.say(
        EventName.TRAINER_ADOPTED,
        f"took over the running trainer (pid {pid})"
        if status is None
        else f"the trainer (pid {pid}) ended while podwatch was not running ({status.describe()})",
        start_id=handle.start_id,
        pid=pid,
    )


async def _attempt_of(context: RecoveryContext, handle: TrainerHandle, seen: Attempt | None = None) -> Attempt:
    """The start of this trainer as run.json knows it, with the steps that were ``seen`` of it."""
    tools, start = context.tools, context.run.start(handle.start_id)
    age = max(0.0, tools.clock.wall() - handle.started_wall)
    attempt = seen or Attempt(handle.start_id, tools.clock.monotonic() - age, known=False)
    if attempt.known or start is None or start.by is not StartedBy.PODWATCH or not start.proved:
        return attempt
    step = start.from_step
    first = None if step is None else await tools.blocking(tools.layout.first_step_after, step)
    open_incident = await tools.journal.run(Journal.current_incident)
    return replace(
        attempt,
        known=True,
        resumed_from=step,
        first_step=first,
        # Otherwise a run of days that ends before its next step would look like a checkpoint that fails to load.
        made_step=attempt.made_step or start.confirmed,
        incident_id=open_incident.id if open_incident is not None else None,
    )


def show_watching(context: RecoveryContext, detail: str) -> None:
    """Show the phase of a watched trainer on which no operation works."""
    handle, attempt = context.handle, context.attempt
    if handle is None or handle.supervision is Supervision.ATTACH:
        context.show(Phase.ATTACHED, detail)
        return
    confirmed = attempt is None or not attempt.known or context.is_confirmed(handle.start_id)
    context.show(Phase.RUNNING if confirmed else Phase.CONFIRMING, detail)


async def reconcile(context: RecoveryContext, look: Look) -> Stopping | None:
    """Finish or drop what an earlier process (or a cancelled operation) left half done. Return the stop that is to be
    finished, if its trainer still runs."""
    found, run = look.handle, context.run
    start = None if found is None else run.start(found.start_id)
    if start is not None and not start.seen:
        await context.start_was_seen(start.id)
    await _finish_quarantine(context, look)
    stop = run.stopping
    if stop is None or (found is not None and stop.start_id == found.start_id) or meant_by(stop, look) is not None:
        return stop
    await context.edit(stopping=None)  # the trainer has ended
    return None


async def _finish_quarantine(context: RecoveryContext, look: Look) -> None:
    """Finish the moves that were interrupted, unless a trainer runs: the files there now may be its new ones."""
    tools = context.tools
    unfinished = await tools.blocking(quarantine.unfinished, tools.workspace)
    if not unfinished or context.held() or look.kept:
        return  # nothing is moved while podwatch is held, or while another supervisor holds the run
    alive = look.handle is not None and await look.handle.exit_status() is None
    for data in unfinished:
        if alive or look.trees:
            await tools.blocking(quarantine.leave_as_it_is, tools.workspace, data)
        else:
            await tools.blocking(quarantine.carry_out, tools.workspace, data)
    await tools.blocking(tools.catalogue.rescan)


def meant_by(stop: Stopping, look: Look) -> ProcessIdentity | None:
    """Return the attached trainer that podwatch was stopping, if it still runs. Found by pid and start time, because it
    may no longer look like a trainer."""
    for tree in look.trees:
        if (tree.launcher.pid, tree.launcher.start_ticks) == (stop.pid, stop.ticks):
            return tree.launcher
    for identity in look.stoppable:
        if stop.boot and (identity.pid, identity.start_ticks, identity.boot_id) == (stop.pid, stop.ticks, stop.boot):
            return identity
    return None


PROBLEM_RETRY: Final = 30.0
STORE_RETRY: Final = 60.0

Operation = Callable[[], Awaitable[None]]


class CarriesOn(Protocol):
    async def carry_on(self) -> None:
        """Do what the journal and the state of the pod require now."""
        ...


class OperationRunner:
    """Runs at most one operation; the sensing loop and the requests start them."""

    def __init__(self, context: RecoveryContext, operations: CarriesOn) -> None:
        self.context, self._operations = context, operations
        self.task: asyncio.Task[None] | None = None
        self.closed = False
        self._interrupted: asyncio.Task[None] | None = None
        self._requests = asyncio.Lock()

    @property
    def acting(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def ready(self) -> bool:
        """Whether podwatch can start an operation on its own: none runs, no operator's request is pending, no exit is
        pending."""
        return not (self.acting or self.context.request_pending or self.closed)

    def spawn(self, operation: Operation) -> None:
        """Start an operation; the caller has made sure that none runs. Does nothing once podwatch is exiting."""
        self.context.by_request, self.context.request_pending = self.context.request_pending, False
        if not self.closed:
            self.task = asyncio.create_task(self._guarded(operation), name="podwatch-recovery")

    @contextlib.asynccontextmanager
    async def by_hand(self) -> AsyncIterator[None]:
        """Handle one operator request at a time. After ``interrupt`` no operation starts on its own until the request
        has become one. If the request fails halfway, the interrupted work is resumed; otherwise training would be
        unguarded."""
        async with self._requests:
            self._interrupted = None
            try:
                yield
            except BaseException:
                if self.context.request_pending and (self._interrupted is not None or self.context.handle is None):
                    self.context.request_pending = False
                    self.spawn(self._take_up_again)
                raise
            finally:
                self.context.request_pending = False

    async def _take_up_again(self) -> None:
        if self._interrupted is not None:
            await asyncio.wait([self._interrupted])
        await self._operations.carry_on()

    async def interrupt(self) -> Stopping | None:
        """Cancel the current operation, wait until it has ended, settle what it left, and look at the pod again.
        Returns the stop that it had started, if the trainer still runs."""
        self.context.request_pending = True
        task, self.task = self.task, None
        if task is not None and not task.done():
            self._interrupted = task
            task.cancel()
            await asyncio.wait([task])
        look = await self.context.tools.launcher.look()
        stop = await reconcile(self.context, look)
        mine = self.context.handle
        if look.handle is not None and (mine is None or mine.start_id != look.handle.start_id):
            await adopt(self.context, look.handle)  # the cancelled operation had just started it
        elif look.handle is None and mine is not None and mine.supervision is Supervision.SUPERVISED:
            self.context.forget()  # the cancelled operation had just stopped it
        return stop

    async def _guarded(self, operation: Operation) -> None:
        """Run an operation. One that fails is retried from the journal and the state of the pod, as after a restart of
        podwatch."""
        try:
            await self._until_done(operation)
        finally:
            self.context.by_request = False

    async def _until_done(self, operation: Operation) -> None:
        while True:
            problem: PodwatchError
            try:
                await operation()
            except PodwatchError as error:
                problem = error
            except OSError as error:
                problem = _refused(error)
            except Exception as error:  # a bug must not leave training unguarded
                problem = InternalError(f"{type(error).__name__}: {error}", fix="please report this")
            else:
                return
            self.context.by_request = False
            self.context.show(Phase.BLOCKED, str(problem))
            self.context.notes.add(FindingKind.BLOCKED, Severity.CRITICAL, problem.what, problem.fix)
            self.context.tools.say(EventName.RECOVERY_BLOCKED, str(problem), Severity.CRITICAL)
            await self.context.tools.clock.sleep(STORE_RETRY if isinstance(problem, StoreUnknown) else PROBLEM_RETRY)
            operation = self._operations.carry_on


def _refused(error: OSError) -> PodwatchError:
    """Return the error as one line that includes the path: a finding shows no other location."""
    where = f"{error.filename}: " if error.filename else ""
    fix = "nothing: podwatch retries automatically"
    if isinstance(error, PermissionError):
        fix = "give podwatch's user access to it, or run podwatch as the user that training runs as"
    return PodwatchError(f"{where}{error.strerror or error}", fix=fix)
