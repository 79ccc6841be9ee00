"""The steps of a restart, each one journaled: stop, choose, fetch, set aside, start (DESIGN section 4)."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.errors import Busy, HostError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.domain.intent import IntentKind, IntentState
from podwatch.domain.run import Lineage, RunRecord
from podwatch.journal import Journal, PublishedSave
from podwatch.judgement.choose import Choice, RemoteSave, choose
from podwatch.recovery import memory as memory_module
from podwatch.recovery import plan, quarantine, release
from podwatch.recovery.attempt import Attempt
from podwatch.recovery.memory import Memory
from podwatch.recovery.state import Phase, Tools, newest_step
from podwatch.trainer.base import CannotExecute, TrainerHandle

STUCK_RETRY = 15.0
FETCH_TRIES = 3
"""Then an older step that is here is better than waiting for the store: training goes on losing GPU time."""
FIRST_BASE_AT_MOST = 4 << 30
"""Bytes that may be in use before our very first start without being taken for a leftover engine (a desktop, another
small service). An engine that outlived its run holds far more."""


class StoreUnknown(PodwatchError):  # noqa: N818
    """Nothing usable is here and the store could not be asked: a fresh start could throw a run away."""


class StartFailed(HostError):  # noqa: N818
    """The command could not be executed: a failed start, and the checkpoint is not to blame. ``needs_person``: it will
    fail in the same way until somebody mends it."""

    needs_person = False


class NothingToResume(PodwatchError):  # noqa: N818
    """Something is here, but none of it may be used: a person has to decide."""

    def __init__(self, choice: Choice) -> None:
        super().__init__(
            choice.reason, fix="see `podwatch checkpoints`; `podwatch start --step N` or `--fresh` decides"
        )
        self.choice = choice


class Procedure:
    """The acts themselves, without deciding when. ``show`` tells phase and detail to whoever displays them."""

    def __init__(self, tools: Tools, memory: Memory, show: Callable[[Phase, str], None]) -> None:
        self.tools = tools
        self.memory = memory
        self.show = show
        self.restoring: int | None = None
        self.failed_fetches = 0
        self._followed = ""

    async def remember(self) -> None:
        await memory_module.save(self.tools.journal, self.tools.clock, self.memory)

    async def save_record(self, record: RunRecord) -> None:
        await self.tools.blocking(self.tools.record.save, record)

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
        await handle.release()
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
            ports=tools.ports,
        )

    # -- choose -------------------------------------------------------------------------------------------------------

    async def ours(self) -> tuple[list[CheckpointSet], list[CheckpointSet]]:
        """(sets of this run, sets of nobody knows whom), after a fresh rescan.

        Ours: saved since podwatch guards this directory, taken by a person, fetched from our store, or at or below
        the step that we started from last (everything above it was set aside then).
        """
        tools = self.tools
        sets = await tools.blocking(tools.catalogue.rescan)
        record = tools.record.current
        if self.memory.adopted or record is None:
            return list(sets), []
        stored = {(p.step, p.save_id) for p in await tools.journal.run(Journal.published)}
        last = record.last_start.step if record.last_start is not None else None
        ours = [
            s
            for s in sets
            if s.changed_wall >= record.first_seen_wall
            or (s.step, s.save_id) in stored
            or (last is not None and s.step <= last)
        ]
        return ours, [s for s in sets if s not in ours]

    async def choose(self, *, wanted: int | None = None, fresh: bool = False, below: int | None = None) -> Choice:
        """Raises StoreUnknown or NothingToResume instead of starting fresh by accident."""
        tools = self.tools
        if fresh:
            return Choice(None, "fresh", "", "a fresh start was asked for")
        record = tools.record.current
        lineage = record.lineage if record is not None and record.last_start is not None else None
        unsound: dict[int, str] = {}
        while True:
            ours, foreign = await self.ours()
            remote, trouble = await self._remote()
            use = ours or foreign
            choice = choose(
                [s for s in use if s.step not in unsound],
                remote,
                lineage=lineage,
                refused=self.memory.refused,
                adopted=bool(ours) or not foreign,
                wanted=wanted,
                below=below,
                ancestry=self.memory.ancestry,
            )
            if choice.source == "none":
                raise NothingToResume(choice)
            if choice.source == "fresh":
                self.failed_fetches = 0  # without anything here, only the store can help: ask it again
                if trouble and not await self._store_must_be_empty():
                    raise StoreUnknown(
                        f"no checkpoint of this run is here and the store could not be asked: {trouble}",
                        fix="mend the store, or decide: `podwatch start --fresh`",
                    )
                if unsound:
                    step, reason = max(unsound.items())
                    raise NothingToResume(replace(choice, source="none", reason=f"step {step}: {reason}"))
                return choice
            if choice.source == "store" or choice.step is None:
                self._followed = next((r.lineage for r in remote if r.step == choice.step), "")
                return choice
            reasons = await tools.blocking(tools.catalogue.verify, choice.step)
            if not reasons:
                return choice
            unsound[choice.step] = f"damaged: {reasons[0]}"
            tools.say(
                EventName.CHECKPOINT_DAMAGED,
                f"step {choice.step} is damaged and not used: {reasons[0]}",
                Severity.WARNING,
                step=choice.step,
            )

    async def still_there(self, choice: Choice) -> bool:
        """The chosen set is here and whole, now that it is protected. A fetched one was verified just now, and the
        catalogue waits until it has settled."""
        if choice.step is None or choice.source == "store":
            return True
        return any(s.step == choice.step and s.complete for s in await self.tools.blocking(self.tools.catalogue.rescan))

    async def _remote(self) -> tuple[tuple[RemoteSave, ...], str]:
        if self.tools.restore is None:
            return (), ""
        if self.failed_fetches >= FETCH_TRIES:
            return (), f"{self.failed_fetches} fetches failed"
        try:
            newest = await self.tools.restore.newest(frozenset(self.memory.refused))
        except (PodwatchError, OSError) as error:  # a call that hangs ends in a TimeoutError
            return (), str(error)
        return ((newest,) if newest is not None else ()), ""

    async def _store_must_be_empty(self) -> bool:
        """This pod has trained before and never published or fetched anything: the store has nothing of this run that
        we would lose."""
        record = self.tools.record.current
        started = record is not None and record.last_start is not None
        return started and not await self.tools.journal.run(Journal.published)

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
        self.restoring = choice.step
        self.show(Phase.STARTING, f"fetching step {choice.step} from the store")
        try:
            await tools.restore.fetch(choice.step, None)
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

    def roots(self) -> tuple[Path, ...]:
        directory = self.tools.settings.trainer.checkpoint_dir
        return (directory,) if directory is not None else ()

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
        moved = await tools.blocking(quarantine.carry_out, tools.workspace, intent, self.roots())
        await tools.journal.run(Journal.settle, intent.id, IntentState.DONE, f"{moved} moved")
        number = quarantine.number_of(intent)
        tools.say(
            EventName.QUARANTINED,
            f"set aside {len(paths)} entries: {why}; `podwatch quarantine return {number}` puts them back",
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
        prepared = await tools.blocking(self.prepare, step)
        before = newest_step(tools.catalogue.sets)
        ahead = await tools.blocking(tools.layout.ahead_of, step)
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
            },
        )
        await self.remember()
        await self.save_record(replace(record, last_start=prepared.record, wandb=dict(prepared.wandb)))
        if prepared.removed:
            tools.say(
                EventName.TRAINER_STARTING,
                "resume flags in the configured command were taken out: " + " ".join(prepared.removed),
                Severity.WARNING,
            )
        tools.say(EventName.TRAINER_STARTING, fresh_or_from, start_id=prepared.plan.start_id, step=step)
        began = tools.clock.monotonic()
        tools.begin_start(began)
        starting = asyncio.ensure_future(tools.launcher.start(prepared.plan))
        try:
            handle = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # Half a start must not be left behind unseen: whoever comes next finds it by its intent.
            await asyncio.wait([starting])
            raise
        except PodwatchError as error:
            await tools.journal.run(Journal.settle, intent.id, IntentState.FAILED, str(error))
            if isinstance(error, Busy):
                raise
            failed = StartFailed(error.what, where=error.where, fix=error.fix)
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
        return handle, Attempt(handle.start_id, began, step, prepared.first_step)

    def prepare(self, step: int | None) -> plan.Prepared:
        """Blocks. Raises ConfigurationError."""
        record = self.tools.record.current
        return plan.prepare(
            self.tools.settings,
            self.tools.layout,
            step=step,
            environment=self.tools.environment(),
            wandb=record.wandb if record is not None else {},
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
            memory.ancestry = {}
            return replace(record, lineage=Lineage(plan.new_id(), old.id, None))
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
        memory.ancestry = {line: min(last, choice.step) for line, last in memory.ancestry.items()}
        memory.ancestry[old.id] = choice.step
        return replace(record, lineage=Lineage(plan.new_id(), old.id, choice.step))
