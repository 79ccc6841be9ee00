"""One operation at a time: started, retried when it fails, cancelled for an operator's request.

Each operation is a task that can be cancelled at any point. A cancelled operation leaves the same open intents in the
journal as a killed podwatch, and the same code continues after both.

``reconcile`` and ``adopt`` continue from what an earlier podwatch or a cancelled operation left: the run record, the
running trainer, the open intents.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Protocol

from podwatch.domain.errors import ConfigurationError, HostError, InternalError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import FindingKind, Severity
from podwatch.domain.run import Intent, IntentKind, IntentState, Lineage, RunRecord
from podwatch.domain.snapshot import Supervision
from podwatch.journal import Journal
from podwatch.recovery import quarantine, start_plan
from podwatch.recovery.context import Attempt, RecoveryContext
from podwatch.recovery.resume_point import StoreUnknown
from podwatch.recovery.state import Phase
from podwatch.system.pinned_directories import RootReplaced
from podwatch.trainer.base import Candidate, Look, TrainerHandle


async def read_record(context: RecoveryContext, *, adopt_existing: bool) -> None:
    tools = context.tools
    run_id = tools.settings.run_id
    try:
        record = await tools.blocking(tools.record.load)
    except RootReplaced:
        raise  # another user's directory: the record is read after the repair
    except HostError as error:
        tools.record.problem = str(error)  # the desired state is unknown, so nothing is started (see UnusableState)
        return
    if record is not None and record.run_id != run_id and not adopt_existing:
        raise ConfigurationError(
            f"the output directory belongs to run {record.run_id!r}, not to {run_id!r}",
            where=str(tools.record.path),
            fix="use another output_dir, the old run_id, or `podwatch run --adopt-existing`",
        )
    if record is None or record.run_id != run_id:
        new = RunRecord(run_id, Lineage(start_plan.new_id()), first_seen_wall=tools.clock.wall())
        try:
            await context.save_record(new)
        except RootReplaced:
            raise
        except HostError as error:
            tools.record.problem, tools.record.current = str(error), new


async def recall(context: RecoveryContext) -> None:
    if context.tools.record.current is None:
        await read_record(context, adopt_existing=context.memory.adopted)


async def adopt(context: RecoveryContext, handle: TrainerHandle) -> None:
    """Watch a trainer under a keeper, alive or ended (the sensing loop then judges its end)."""
    tools, record = context.tools, context.tools.record.current
    age = max(0.0, tools.clock.wall() - handle.started_wall)
    attempt = Attempt(handle.start_id, tools.clock.monotonic() - age, known=False)
    start = record.last_start if record is not None else None
    if start is not None and start.start_id == handle.start_id:
        first = None if start.step is None else await tools.blocking(tools.layout.first_step_after, start.step)
        attempt = Attempt(handle.start_id, attempt.started_at, start.step, first)
        # Otherwise a run of days that ends before its next step would look like a checkpoint that fails to load.
        attempt.made_step = context.memory.confirmed == handle.start_id
        open_incident = await tools.journal.run(Journal.current_incident)
        attempt.incident_id = open_incident.id if open_incident is not None else None
    context.watch(handle, attempt, adopted=True)
    tools.begin_start(attempt.started_at, handle.start_id)
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


def show_watching(context: RecoveryContext, detail: str) -> None:
    """Show the phase of a watched trainer on which no operation works."""
    handle, attempt = context.handle, context.attempt
    if handle is None or handle.supervision is Supervision.ATTACH:
        context.show(Phase.ATTACHED, detail)
        return
    confirmed = attempt is None or not attempt.known or context.memory.confirmed == handle.start_id
    context.show(Phase.RUNNING if confirmed else Phase.CONFIRMING, detail)


async def reconcile(context: RecoveryContext, look: Look) -> Intent | None:
    """Settle the intents that an earlier process (or a cancelled operation) left open. Return the STOP intent that is
    to be finished, if its trainer still runs."""
    journal, found = context.tools.journal, look.handle
    start_id = found.start_id if found is not None else ""
    stop: Intent | None = None
    for intent in await journal.run(Journal.open_intents):
        if intent.kind is IntentKind.STOP:
            if (start_id and intent.data.get("start_id") == start_id) or meant_by(intent, look) is not None:
                stop = intent
                continue
            state, text = IntentState.DONE, "the trainer has ended"
        elif intent.kind is IntentKind.START:
            happened = start_id != "" and intent.data.get("start_id") == start_id
            state = IntentState.DONE if happened else IntentState.UNDONE
            text = "it was started" if happened else "it never started"
            if happened:
                context.memory.wanted, context.memory.fresh = None, False
                await context.remember()
        elif intent.kind is IntentKind.QUARANTINE:
            alive = found is not None and await found.exit_status() is None
            if context.held():
                continue  # it moves files, which a held podwatch must not do
            if alive or look.candidates or look.pending:
                # The files there now may be new ones of the running trainer.
                state, text = IntentState.DONE, "left as it was: a trainer is running"
            else:
                moved = await context.tools.blocking(quarantine.carry_out, context.tools.workspace, intent)
                state, text = IntentState.DONE, f"finished after an interruption: {moved} more moved"
                await context.tools.blocking(context.tools.catalogue.rescan)
        elif intent.kind is IntentKind.RESTORE:
            state, text = IntentState.FAILED, "interrupted; fetched again when it is needed"
        elif intent.kind is IntentKind.EVALUATION:
            state, text = IntentState.UNDONE, "interrupted; training starts without it"
        else:
            continue
        await journal.run(Journal.settle, intent.id, state, text)
    return stop


def meant_by(stop: Intent, look: Look) -> Candidate | None:
    """Return the attached trainer that podwatch was stopping, if it still runs. Found by pid and start time, because it
    may no longer look like a trainer."""
    pid, ticks, boot = (stop.data.get(name) for name in ("pid", "ticks", "boot"))
    for candidate in (*look.candidates, *look.pending):
        if (candidate.launcher.pid, candidate.launcher.start_ticks) == (pid, ticks):
            return candidate
    for identity in look.eligible:
        if boot and (identity.pid, identity.start_ticks, identity.boot_id) == (pid, ticks, boot):
            return Candidate(identity, "", "podwatch was stopping it")
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

    async def interrupt(self) -> Intent | None:
        """Cancel the current operation, wait until it has ended, settle its open intents, and look at the pod again.
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
        elif look.handle is None and mine is not None and mine.supervision is Supervision.KEEPER:
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
