"""Continue from what an earlier podwatch or a cancelled operation left: the run record, the running trainer, the open
intents."""

from podwatch.domain.errors import ConfigurationError, HostError
from podwatch.domain.event import EventName
from podwatch.domain.run import Intent, IntentKind, IntentState, Lineage, RunRecord
from podwatch.journal import Journal
from podwatch.recovery import quarantine, start_plan
from podwatch.recovery.attempt import Attempt
from podwatch.recovery.context import RecoveryContext
from podwatch.recovery.state import Phase
from podwatch.system.pinned import RootReplaced
from podwatch.trainer.base import Candidate, Look, TrainerHandle


async def read_record(context: RecoveryContext, *, adopt_existing: bool) -> None:
    tools = context.tools
    run_id = tools.settings.run_id
    try:
        record = await tools.blocking(tools.record.load)
    except RootReplaced:
        raise  # another user's directory: the record is read after the repair
    except HostError as error:
        tools.record.problem = str(error)  # the desired state is unknown, so nothing is started (see StartupChecks)
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
    confirmed = context.memory.confirmed == handle.start_id or not attempt.known
    context.show(Phase.RUNNING if confirmed else Phase.CONFIRMING, "adopted")
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
