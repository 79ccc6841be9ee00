"""The steps of a restart, each one journaled: stop, fetch, set aside, start (DESIGN section 4)."""

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from podwatch.checkpoints.layouts import tracker_files
from podwatch.checkpoints.layouts.base import Tracker
from podwatch.domain.counted import counted
from podwatch.domain.errors import Busy, HostError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.domain.intent import IntentKind, IntentState
from podwatch.domain.run import Lineage, RunRecord
from podwatch.domain.secrets import scrub, scrub_argv, secret_values
from podwatch.domain.wandb import FROM_STORE
from podwatch.journal import Journal, PublishedSave
from podwatch.judgement.choose import Choice
from podwatch.judgement.lineage import returned
from podwatch.recovery import litter, plan, quarantine, release
from podwatch.recovery.attempt import Attempt
from podwatch.recovery.choosing import Choosing
from podwatch.recovery.lineages import opened
from podwatch.recovery.memory import Memory
from podwatch.recovery.state import Phase, Tools, newest_step
from podwatch.system.child import run_child
from podwatch.system.patience import patiently
from podwatch.trainer.base import CannotExecute, TrainerHandle
from podwatch.trainer.environment import for_training

STUCK_RETRY = 15.0
LITTER_SECONDS = 30.0
"""A start is not held up for longer by what may lie about."""
STOP_ALSO_DEADLINE = 60.0
"""Seconds for one command of ``trainer.stop_also``; `ray stop` takes up to sixteen."""
FIRST_BASE_AT_MOST = 4 << 30
"""Bytes that may be in use before our very first start without being taken for a leftover engine (a desktop, another
small service). An engine that outlived its run holds far more."""


class StartFailed(HostError):  # noqa: N818
    """The command could not be executed: a failed start, and the checkpoint is not to blame. ``needs_person``: it will
    fail in the same way until somebody mends it."""

    needs_person = False


class Procedure(Choosing):
    """The acts themselves, without deciding when."""

    def __init__(self, tools: Tools, memory: Memory, show: Callable[[Phase, str], None]) -> None:
        super().__init__(tools, memory, show)
        self.waited = 0.0
        """Seconds until GPUs and ports were free, before the start that is made now."""
        self.stuck: tuple[str, ...] = ()
        """What even SIGKILL did not end, in words: nothing is started beside it."""
        self.quarantine_number: int | None = None
        """Where the last start moved what was ahead of it; None where nothing was."""

    # -- stop ---------------------------------------------------------------------------------------------------------

    async def stop_tree(
        self, handle: TrainerHandle, why: str, *, before: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Intent, ``before`` (evidence), then stop until nothing of the tree is left, then let the keeper go."""
        tools = self.tools
        intent = await tools.journal.run(
            Journal.open_intent,
            IntentKind.STOP,
            {
                "start_id": handle.start_id,
                "why": why,
                "pid": handle.launcher.pid,
                "ticks": handle.launcher.start_ticks,
                "boot": handle.launcher.boot_id,
            },
        )
        if before is not None:
            await before()
        await self.finish_stop(handle, intent.id, why)

    async def finish_stop(self, handle: TrainerHandle, intent_id: int, why: str) -> None:
        """The stop itself; also what a new process does with a STOP intent it finds open."""
        tools, trainer = self.tools, self.tools.settings.trainer
        self.show(Phase.STOPPING, why)
        tools.say(EventName.TRAINER_STOPPING, f"stopping training: {why}", start_id=handle.start_id)
        while True:
            report = await handle.stop(
                grace=trainer.stop_grace, save_grace=trainer.save_grace, saving=lambda: tools.catalogue.saving
            )
            self.stuck = report.survivors
            if not report.survivors:
                break
            # Never start beside a process that is still there (promise 4), even if it is stuck in the kernel.
            self.show(Phase.BLOCKED, "cannot be ended: " + "; ".join(report.survivors))
            tools.say(
                EventName.RECOVERY_BLOCKED,
                "processes of the old trainer are stuck in the kernel: " + "; ".join(report.survivors),
                Severity.CRITICAL,
            )
            await tools.clock.sleep(STUCK_RETRY)
        ended = report.exit.at_wall if report.exit is not None else 0.0
        self.memory.ended_wall = ended or tools.clock.wall()
        await self.stop_also()
        await handle.release()
        self.writers_ended = True
        await self.descend(handle)
        await tools.journal.run(
            Journal.settle, intent_id, IntentState.DONE, f"{report.seconds:.1f} s, {report.killed} killed"
        )
        tools.track(None)
        tools.say(
            EventName.TRAINER_STOPPED,
            f"training stopped in {report.seconds:.1f} s",
            start_id=handle.start_id,
            killed=report.killed,
            seconds=round(report.seconds, 3),
        )

    async def stop_also(self) -> None:
        """End what belongs to training and lives outside its tree, by its owner's own commands. One that fails is told
        and does not hold the restart up: whether the pod is free is looked at next in any case."""
        tools, trainer = self.tools, self.tools.settings.trainer
        for command in trainer.stop_also:
            try:
                done = await run_child(
                    command,
                    timeout=STOP_ALSO_DEADLINE,
                    env=for_training(tools.environment()),
                    cwd=plan.working_directory(tools.settings),
                    user=trainer.user,
                )
            except HostError as error:
                said = str(error)
            else:
                if done.ok:
                    continue
                last = (done.output.strip().splitlines() or [""])[-1][:200]
                how = f"{STOP_ALSO_DEADLINE:.0f} s were not enough" if done.timed_out else f"ended with {done.code}"
                said = f"{how}: {scrub(last)}"
            text = f"trainer.stop_also: {shlex.join(scrub_argv(command))[:200]} {said}"
            tools.say(EventName.TRAINER_STOPPING, text, Severity.WARNING)

    async def clear_litter(self) -> None:
        """What the last start left in /dev/shm and /tmp and nobody uses: the next one would hang on it."""
        tools = self.tools
        last = tools.record.current.last_start if tools.record.current is not None else None
        if last is None:
            return
        try:
            found = await patiently(
                tools.files, litter.look, litter.owner_id(last.user), last.wall, timeout=LITTER_SECONDS
            )
        except TimeoutError:
            return
        # Removed by a thread that did not look: one that hung and comes back must find nothing to do any more.
        gone = await tools.blocking(litter.remove, found.stale)
        if gone:
            names = ", ".join(str(path) for path in gone[:5]) + (", ..." if len(gone) > 5 else "")
            text = f"cleared {len(gone)} stale entries of the last start: {names}"
            tools.say(EventName.TRAINER_STARTING, text, cleared=len(gone))

    # -- is the pod free ----------------------------------------------------------------------------------------------

    def free(self, since: float) -> release.Free:
        tools, gpu = self.tools, self.tools.settings.gpu
        reading = tools.gpus.latest()
        base = self.memory.gpu_base or {
            i: min(used, FIRST_BASE_AT_MOST) for i, used in release.memory_now(reading).items()
        }
        return release.look(
            reading,
            since=since,
            configured=(*gpu.inference, *gpu.trainer),
            base=base,
            margin=gpu.release_margin,
            ports=tools.ports(),
        )

    # -- fetch --------------------------------------------------------------------------------------------------------

    async def fetch(self, choice: Choice) -> None:
        """Bring the chosen set from the store; what lies in its place here is set aside first."""
        tools = self.tools
        if tools.restore is None or choice.step is None:
            raise HostError("no store to fetch from", fix="set [sync] store")
        steps = await tools.blocking(tools.layout.steps)
        present = [p.path for p in steps.get(choice.step, ()) if p.required and p.path.exists()]
        await self.set_aside(choice.step, tuple(present), f"step {choice.step} is not whole here")
        intent = await tools.journal.run(
            Journal.open_intent, IntentKind.RESTORE, {"step": choice.step, "save_id": choice.save_id}
        )
        fetching = f"fetching step {choice.step} from the store"
        self.restoring = choice.step
        self.show(Phase.STARTING, fetching)

        def progress(done: int, total: int) -> None:
            if self.restoring == choice.step:
                self.show(Phase.STARTING, f"{fetching}: {done / 1e9:.1f} of {total / 1e9:.1f} GB")

        try:
            await tools.restore.fetch(choice.step, progress)
        except (PodwatchError, OSError) as error:
            self.failed_fetches += 1
            await tools.journal.run(Journal.settle, intent.id, IntentState.FAILED, str(error))
            raise
        finally:
            self.restoring = None
        self.failed_fetches = 0
        await tools.journal.run(Journal.settle, intent.id, IntentState.DONE)
        tools.say(EventName.RESTORED, f"step {choice.step} fetched from the store", step=choice.step)
        await tools.blocking(tools.catalogue.rescan)

    # -- set aside ----------------------------------------------------------------------------------------------------

    async def set_aside(self, step: int | None, paths: tuple[Path, ...], why: str) -> None:
        if not paths:
            return
        tools = self.tools
        record = tools.record.current
        known = {s.step: str(s.completeness) for s in tools.catalogue.sets if step is None or s.step > step}
        data = quarantine.plan(
            paths,
            step=step,
            steps=known,
            lineage=record.lineage.id if record is not None else "",
            wall=tools.clock.wall(),
            number=await tools.blocking(quarantine.free_number, tools.workspace),
        )
        intent = await tools.journal.run(Journal.open_intent, IntentKind.QUARANTINE, data)
        moved = await tools.blocking(quarantine.carry_out, tools.workspace, intent)
        await tools.journal.run(Journal.settle, intent.id, IntentState.DONE, f"{moved} moved")
        number = self.quarantine_number = quarantine.number_of(intent)
        tools.say(
            EventName.QUARANTINED,
            f"set aside {counted(len(paths), 'entry', 'entries')}: {why};"
            f" `podwatch quarantine return {number}` puts them back",
            quarantine=number,
            step=step,
            entries=len(paths),
        )
        await tools.blocking(tools.catalogue.rescan)

    # -- start --------------------------------------------------------------------------------------------------------

    async def start(self, choice: Choice) -> tuple[TrainerHandle, Attempt]:
        """Set aside, record, start. Raises Busy when another keeper holds the run, StartFailed when the command
        cannot be executed, HostError when something could not be recorded or set aside."""
        tools = self.tools
        step = choice.step
        # Nothing is started in a directory that another user put in the place of output_dir.
        await tools.blocking(tools.workspace.check)
        prepared = await tools.blocking(self.prepare, step)
        before = newest_step(tools.catalogue.sets)
        ahead = await tools.blocking(tools.layout.ahead_of, step)
        trackers = await tools.blocking(tools.layout.trackers, step)
        self.quarantine_number = None
        fresh_or_from = "a fresh start" if step is None else f"a start from step {step}"
        await self.set_aside(step, ahead, f"ahead of {fresh_or_from}")
        self.show(Phase.STARTING, fresh_or_from)
        now = release.memory_now(tools.gpus.latest())
        self.memory.gpu_base = release.merge_base(self.memory.gpu_base, now)
        record = self._record_for(choice, before, await tools.journal.run(Journal.published))
        intent = await tools.journal.run(
            Journal.open_intent,
            IntentKind.START,
            {
                "start_id": prepared.plan.start_id,
                "step": step,
                "first_step": prepared.first_step,
                "lineage": record.lineage.id,
                "trackers": [str(t.path) for t in trackers],
            },
        )
        try:
            await self._repair(trackers, fresh_or_from)
        except (OSError, HostError) as error:
            await tools.journal.run(Journal.settle, intent.id, IntentState.FAILED, str(error))
            raise
        self.memory.yielded = False  # what is started now is ours to end
        await self.remember()
        if step is None and await tools.journal.run(Journal.learned, FROM_STORE):
            await tools.journal.run(Journal.learn, FROM_STORE, {})
        await self.save_record(replace(self._as_wanted(record), last_start=prepared.record, wandb=dict(prepared.wandb)))
        if prepared.removed:
            tools.say(
                EventName.TRAINER_STARTING,
                "resume flags in the configured command were taken out: " + " ".join(scrub_argv(prepared.removed)),
                Severity.WARNING,
            )
        tools.say(
            EventName.TRAINER_STARTING,
            fresh_or_from,
            start_id=prepared.plan.start_id,
            step=step,
            waited_seconds=round(self.waited, 3),
        )
        began = tools.clock.monotonic()
        self.writers_ended = False
        tools.begin_start(began, prepared.plan.start_id)
        starting = asyncio.ensure_future(tools.launcher.start(prepared.plan))
        try:
            handle = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # Half a start must not be left behind unseen: whoever comes next finds it by its intent.
            await asyncio.wait([starting])
            raise
        except PodwatchError as error:
            # It quotes a command of ``trainer.start_before``, which may carry a token.
            secrets = secret_values(prepared.plan.env)
            what, where, fix = (scrub(text, secrets) for text in (error.what, error.where, error.fix))
            failed = StartFailed(what, where=where, fix=fix)
            await tools.journal.run(Journal.settle, intent.id, IntentState.FAILED, str(failed))
            if isinstance(error, Busy):
                raise
            failed.needs_person = isinstance(error, CannotExecute)
            raise failed from error
        tools.track(handle)
        await tools.journal.run(Journal.settle, intent.id, IntentState.DONE)
        self.memory.wanted, self.memory.fresh = None, False
        await self.remember()
        tools.say(
            EventName.TRAINER_STARTED,
            f"training started: {fresh_or_from} (pid {handle.launcher.pid})",
            start_id=handle.start_id,
            step=step,
            pid=handle.launcher.pid,
        )
        for warning in handle.warnings:
            tools.say(EventName.START_WARNING, warning, Severity.WARNING, start_id=handle.start_id)
        return handle, Attempt(handle.start_id, began, step, prepared.first_step)

    def _as_wanted(self, record: RunRecord) -> RunRecord:
        """``record`` with what is wanted by now: a stop may have been asked for since it was made."""
        now = self.tools.record.current or record
        return replace(
            record,
            desired=now.desired,
            desired_wall=now.desired_wall,
            stop_above=now.stop_above,
            stop_of=now.stop_of,
        )

    async def _repair(self, trackers: Sequence[Tracker], why: str) -> None:
        """The trainer's own "latest" files say the same as the step that is passed; doing it again does no harm."""
        tools = self.tools
        written = await tools.blocking(tracker_files.repair, trackers, tools.workspace.tree)
        if written:
            names = ", ".join(path.name for path in written)
            tools.say(EventName.TRAINER_STARTING, f"{names} set right for {why}", trackers=len(written))

    def prepare(self, step: int | None) -> plan.Prepared:
        """Blocks. Raises ConfigurationError."""
        record = self.tools.record.current
        return plan.prepare(
            self.tools.settings,
            self.tools.layout,
            step=step,
            environment=self.tools.environment(),
            wandb=(record.wandb if record is not None else {}) or self.tools.journal.sync.learned(FROM_STORE, {}),
            wall=self.tools.clock.wall(),
        )

    def _record_for(self, choice: Choice, newest: int | None, published: list[PublishedSave]) -> RunRecord:
        """The record with its line of descent: going back on purpose, by step-back, or fresh opens a new one."""
        record = self.tools.record.current
        if record is None:
            raise HostError("there is no run record", where=str(self.tools.record.path), fix="restart podwatch")
        old, memory = record.lineage, self.memory
        has_past = record.last_start is not None or newest is not None
        if choice.step is None:
            if not has_past:
                return record
            return opened(record, memory, None)
        # What a refused or unsound step leaves behind is another future too: the store may already hold that step.
        back = memory.wanted is not None or memory.below is not None
        if record.last_start is None:
            # The first start on this pod goes on with the line of the save it starts from, where that is known.
            known = next((p.lineage for p in published if (p.step, p.save_id) == (choice.step, choice.save_id)), "")
            known = known or (self._followed if choice.source == "store" else "")
            if known and known != old.id:
                record, old = replace(record, lineage=Lineage(known)), Lineage(known)
        if not back:
            return record
        home, earlier = returned(self.tools.catalogue.sets, record.lineage, record.earlier, choice.step)
        return opened(record, memory, choice.step, parent=home, earlier=earlier)
