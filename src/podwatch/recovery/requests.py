"""Operator requests: each validates, edits run.json once, wakes the loop's hand, and answers; the next decision carries
it out.
"""

import asyncio
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Protocol

from podwatch.checkpoints.trackers import wrong_trackers
from podwatch.domain.errors import Busy, PodwatchError, UsageError
from podwatch.domain.facts import PendingEvaluation
from podwatch.domain.finding import FindingKind
from podwatch.domain.lease import LeaseAction
from podwatch.domain.process import FoundTree
from podwatch.domain.run_state import RestartHistory, RunState, Stopping
from podwatch.domain.secrets import scrub_argv
from podwatch.domain.snapshot import Desired, SensorState, Supervision
from podwatch.recovery import start_plan
from podwatch.recovery.actions import Phase
from podwatch.recovery.choose import Ask, Choice, Pending, choose_start
from podwatch.recovery.command_changed import CommandWatch
from podwatch.recovery.context import RecoveryContext
from podwatch.recovery.decide import NO_CHECKPOINT, TAKE_OVER_FIX, listed
from podwatch.recovery.observe import Observer, recall
from podwatch.recovery.perform import Cleaned, Evaluating, Outcome, Performer, Work, stopping
from podwatch.recovery.start import Starter
from podwatch.recovery.state import newest_step
from podwatch.trainer.rules import TrainerChoice, choose_trainer
from podwatch.trainer.trainer_handle import TrainerHandle

CLEAN_SECONDS: Final = 600.0
"""For the answer to `podwatch clean`; what it moves is renamed."""
_RUNS_NONE: Final = {Phase.FINISHED: Desired.FINISHED, Phase.STOPPED: Desired.STOPPED}


@dataclass(frozen=True, slots=True)
class Started:
    """Answer to a start request. ``choose_from``: nothing was started; the operator has to choose one of these."""

    message: str
    choose_from: tuple[FoundTree, ...] = ()


class Hand(Protocol):
    """The loop's hand."""

    @property
    def busy(self) -> bool: ...

    def wake(self) -> None: ...

    async def decided(self) -> None: ...


class Requests:
    """One per run."""

    def __init__(
        self, context: RecoveryContext, observer: Observer, performer: Performer, command: CommandWatch, hand: Hand
    ) -> None:
        self.context, self.observer, self.performer, self.command = context, observer, performer, command
        self.starter: Starter = observer.starter
        self._hand, self._lock = hand, asyncio.Lock()

    async def start(
        self,
        step: int | None = None,
        fresh: bool = False,
        attach: int | None = None,
        ignore: int | None = None,
        executed: Mapping[str, str] = MappingProxyType({}),
    ) -> Started:
        """Record that training is wanted, then return. If an operator's trainer runs here, podwatch takes it over,
        names it in the answer and starts no second one; of several, ``attach`` (a pid) chooses one. ``ignore`` is the
        pid of a process that is not this run's training, whatever it looks like: podwatch ignores it from now on.
        A stop that still waits for the next save is cancelled. ``executed`` (a flag of `podwatch run` -> its id) is
        recorded in the edit that carries the request out. Raises Busy while a trainer is watched already, UsageError
        when the step or the pid does not exist, ConfigurationError without a command."""
        self._only_on_node_0("start")
        async with self._lock:
            await recall(self.context)
            await self.observer.search_pod()
            more: dict[str, Any] = {"executed": {**self.context.run.executed, **executed}} if executed else {}
            plain = step is None and not fresh and attach is None and ignore is None
            if (running := await self._running()) is not None:
                if not plain or not self._stop_waits():
                    raise self._runs_already(running)
                return await self._keep(running, more)
            if self.observer.acting == "start" and self.context.desired is Desired.RUNNING:
                if plain:
                    return Started("podwatch is starting training already")
                raise Busy("podwatch is starting training", fix="try again once `podwatch status` shows the start")
            if self.context.handle is not None:  # it has ended: what follows is this request, and no failure
                more["stopping"] = stopping(self.context.handle, "start requested")
            if ignore is not None:
                more["ignored"] = self._with_ignored(ignore)
            choice = self._trees(more.get("ignored"))
            if attach is not None or choice.attach is not None or choice.unclear:
                return await self._start_with(choice, step, fresh, attach, more)
            await self._want(step, fresh, **more)
            if waits := choice.waits_for:
                return Started(f"the request is recorded; podwatch does not start training beside {listed(waits)}")
            if (standing := self.context.tools.standing).why_not and standing.act is not LeaseAction.ASK:
                return Started(f"the request is recorded; training does not start yet: {standing.why_not}")
            return Started("podwatch starts training")

    async def restart(self, step: int | None = None) -> None:
        """Stop the trainer and start from ``step`` (None: the usual choice). Not counted as a failure. Raises
        UsageError for one of several nodes."""
        if self.context.tools.place is not None:
            raise UsageError(
                "podwatch cannot restart one of several nodes",
                fix="let the engine start all of them again (docs/nodes.md)",
            )
        async with self._lock:
            await recall(self.context)
            handle, more = self.context.handle, dict[str, Any]()
            last = self.context.run.starts[-1]
            if handle is not None:
                more["stopping"] = stopping(handle, "restart requested")
            elif self.observer.acting == "start" and last.trains and not last.seen:
                more["stopping"] = Stopping(last.id, "restart requested")
            await self._want(step, False, **more)

    async def stop(self, after_save: bool = False) -> None:
        """Stop training until the next `podwatch start`. The request survives restarts of podwatch and of the pod."""
        self._only_on_node_0("stop-training")
        async with self._lock:
            await recall(self.context)
            if after_save:
                await self.context.tools.blocking(self.context.tools.catalogue.rescan)
            newest = newest_step(self.context.tools.catalogue.sets)
            above = (NO_CHECKPOINT if newest is None else newest) if after_save else None
            await self.performer.want(
                Desired.STOPPED, stop_above=above, requested=True, next_try_wall=None, attach="", despite_store=False
            )
            await self._answered()

    async def clean(self) -> Cleaned:
        """Move what an old run left to quarantine. Raises Busy, and changes nothing, while training runs."""
        async with self._lock:
            await recall(self.context)
            await self.refuse_while_running()
            done = self.performer.cleaned = asyncio.get_running_loop().create_future()
            await self.context.edit(clean=True, requested=True)
            await self._answered()
        try:
            async with asyncio.timeout(CLEAN_SECONDS):
                return await asyncio.shield(done)
        except TimeoutError:
            await self.context.edit(clean=False, requested=False)
            raise Busy("podwatch could not move the old run's files yet", fix="see `podwatch status`") from None

    async def refuse_while_running(self) -> None:
        """Raises Busy while something trains here, or may."""
        await self.observer.search_pod()
        if (handle := await self._running()) is not None:
            raise Busy(
                f"training is running (pid {handle.launcher.pid})", where="clean", fix="`podwatch stop-training` first"
            )
        look = self.observer.look
        if look.trees:
            pids = ", ".join(f"{tree.launcher.pid} ({tree.reason})" for tree in look.trees)
            raise Busy(
                f"a process that may be this run's training is running, and podwatch did not start it: {pids}",
                where="clean",
                fix="stop it first",
            )
        if look.kept:
            raise Busy(look.kept, where="clean", fix="stop that training first")

    # -- evaluations

    @property
    def idle(self) -> bool:
        """Whether no training runs and none is wanted, so that an evaluation needs no stop."""
        context = self.context
        return context.handle is None and _RUNS_NONE.get(context.phase) is context.desired

    def why_no_evaluation(self) -> str:
        """Why podwatch cannot stop training for an evaluation now; empty if it can. Never blocks."""
        context, tools = self.context, self.context.tools
        reading, handle = tools.gpus.latest(), context.handle
        if tools.place is not None:
            return "training runs on several nodes"
        if self.performer.evaluating is not None or self._hand.busy:
            return "podwatch is stopping or starting training"
        if held := context.held():
            return held if held != "paused" else "podwatch is paused"
        if not reading.ok and reading.state is not SensorState.ABSENT:
            return "GPU memory cannot be read, so podwatch cannot see whether the GPUs are free"
        if self.idle:
            return ""
        if context.desired is not Desired.RUNNING:
            return f"training is {context.desired}"
        if tools.standing.why_not:
            return tools.standing.why_not
        if handle is None:
            return "no training is running"
        if handle.supervision is Supervision.ATTACH:
            return f"podwatch did not start the trainer (pid {handle.launcher.pid}), so it does not stop it"
        if not tools.settings.trainer.command:
            return "[trainer] command is not configured, so podwatch could not start training again"
        if context.phase is not Phase.RUNNING:
            return "the last start of training is not confirmed by a step yet"
        last, saved = tools.policies.max_steps, newest_step(tools.catalogue.sets)
        if last is not None and saved is not None and saved >= last:
            return "training has saved its last step and is about to end"
        return ""

    async def evaluate(self, work: Work) -> Outcome:
        """Stop training, run the work, and start training again; where none is wanted, only run it. Returns once the
        work is over."""
        await self._hand.decided()  # about what has just been found
        if why := self.why_no_evaluation() or (await self._may_train_here() if self.idle else ""):
            return Outcome(why)
        if self.context.handle is not None and await self._running() is None:
            return Outcome("training has ended")
        try:
            if not self.idle:  # a start that must fail is no reason to stop
                await self.context.tools.blocking(self.starter.prepare, None)
        except (PodwatchError, OSError) as error:
            return Outcome(f"training could not be started again: {error}")
        over: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.performer.evaluating = Evaluating(work, over)
        self.observer.evaluation = PendingEvaluation(work.title, due=True, idle=self.idle)
        self.context.evaluation = work.title
        self._hand.wake()
        return await over

    # -- parts

    async def _may_train_here(self) -> str:
        """What an operator may be starting here, beside which nothing uses training's GPUs; empty if nothing."""
        await self.observer.search_pod()
        look = self.observer.look
        trees = f"a process that may train this run is running: {listed(look.trees)}" if look.trees else ""
        return look.kept or trees

    async def _answered(self) -> None:
        """What was found before the request does not hold it back."""
        self.observer.question = None
        self._hand.wake()
        await self._hand.decided()

    async def _running(self) -> TrainerHandle | None:
        """The watched trainer, if it has not ended."""
        handle = self.context.handle
        return handle if handle is not None and await handle.exit_status() is None else None

    def _stop_waits(self) -> bool:
        """Whether a stop is recorded: it waits for a save, for the end of a pause, or has begun."""
        return self.context.desired is Desired.STOPPED

    def _runs_already(self, handle: TrainerHandle) -> Busy:
        if self.context.desired is Desired.STOPPED:
            return Busy(f"podwatch stops training (pid {handle.launcher.pid})", fix="try again when training has ended")
        return Busy(
            f"training is running already (pid {handle.launcher.pid})",
            fix="`podwatch restart` starts it again, `podwatch stop-training` stops it",
        )

    async def _keep(self, handle: TrainerHandle, more: Mapping[str, Any]) -> Started:
        """Cancel a stop that is recorded and not started."""
        recorded = self.context.run.stopping
        stops = recorded is not None and recorded.start_id == handle.start_id
        await self.performer.want(Desired.RUNNING, stop_cancelled_for=handle.start_id, requested=stops, **more)
        await self._answered()
        if stops:
            return Started("training is being stopped already: podwatch starts it again after that")
        return Started(f"the request to stop is cancelled: training continues (pid {handle.launcher.pid})")

    def _only_on_node_0(self, command: str) -> None:
        if self.context.tools.follows:
            raise UsageError(
                f"this node follows node 0 of the run, which `podwatch {command}` is for",
                fix=f"run `podwatch {command}` on node 0",
            )

    def _with_ignored(self, pid: int) -> tuple[str, ...]:
        """Return the starts that are not this run's training, process ``pid`` among them. Raises UsageError."""
        trees = self.observer.look.trees
        meant = [tree for tree in trees if tree.launcher.pid == pid]
        if not meant:
            known = f"seen: {listed(trees)}" if trees else "podwatch waits for no process"
            raise UsageError(f"podwatch does not wait for process {pid}", fix=known)
        return (*self.context.run.ignored[-15:], meant[0].start_id)

    def _trees(self, ignored: tuple[str, ...] | None = None) -> TrainerChoice:
        """What else may train here, and what podwatch does about it."""
        run, search = self.context.run, self.observer.search.value
        ended = None if run.ended_wall is None else self.context.tools.clock.wall() - run.ended_wall
        trees = () if search is None else search.trees
        return choose_trainer(trees, ended_ago=ended, ignored=run.ignored if ignored is None else ignored)

    async def _start_with(
        self, choice: TrainerChoice, step: int | None, fresh: bool, attach: int | None, more: dict[str, Any]
    ) -> Started:
        there = choice.unclear if choice.attach is None else (choice.attach,)
        search = self.observer.search.value
        if attach is not None:  # an operator's decision needs no proof, but a terminal is never a trainer
            there = tuple(tree for tree in (search.trees if search is not None else ()) if tree.attachable)
        chosen = there if attach is None else tuple(tree for tree in there if tree.has(attach))
        if not chosen:
            known = (
                f"running: {listed(there)}" if there else "no trainer runs here; without --attach, podwatch starts one"
            )
            raise UsageError(f"process {attach} is not a trainer of this run", fix=known)
        if len(chosen) > 1:
            return Started(f"several running trainers could be this run's: {listed(there)}", there)
        (one,) = chosen
        said = f"a trainer that podwatch did not start is running (pid {one.launcher.pid}: {one.command[:80]})"
        if step is not None or fresh:
            raise Busy(said, where="start", fix="stop it first: two would train at once")
        if self.context.tools.settings.trainer.supervise == "start":
            raise Busy(said, where='[trainer] supervise = "start"', fix='stop it, or set supervise = "auto"')
        ignored = more.get("ignored", self.context.run.ignored)
        more["ignored"] = tuple(name for name in ignored if name != one.start_id)
        await self._forgive(None, False, attach=one.start_id, **more)
        return Started(f"{said}: podwatch watches it from now on and starts no second one ({one.reason})")

    async def _want(self, step: int | None, fresh: bool, **more: Any) -> None:
        """Record that training is wanted, and ``more``."""
        if step is not None and fresh:
            raise UsageError("a step and a fresh start exclude each other", fix="give one of --step and --fresh")
        standing = self.context.tools.standing
        if standing.stop:
            raise Busy(standing.why_not, fix=TAKE_OVER_FIX)
        await self.context.tools.blocking(self.starter.prepare, None)
        if step is not None:
            chosen = await self._chosen(lambda run: replace(run, wanted=step))
            if isinstance(chosen, Ask):
                raise UsageError(chosen.why, fix="choose a step from `podwatch checkpoints`")
            if isinstance(chosen, Pending) and chosen.fix:
                raise Busy(chosen.why, fix=chosen.fix)
        more["despite_store"] = standing.act is LeaseAction.ASK
        await self._forgive(step, fresh, **more)

    async def _chosen(self, changed: Any) -> Choice | Pending | Ask:
        """The step of a start from run.json as ``changed``, by a new list and the store's answer."""
        run = changed(self.context.run)
        sets = await self.context.rescan()
        inventory = await self.observer.ask_store(run.wanted)
        facts = await self.observer.facts()
        return choose_start(replace(facts, run=run, inventory=inventory, question=None, checkpoints=sets))

    async def _forgive(self, step: int | None, fresh: bool, **more: Any) -> None:
        """Record an operator's start in one edit: training is wanted, its failure history is reset, and ``more``. A
        podwatch that is killed here has taken the whole request or nothing of it."""
        history = RestartHistory(ever_worked=self.context.run.history.ever_worked)
        await self.performer.want(
            Desired.RUNNING, wanted=step, fresh=fresh, below=None, next_try_wall=None, history=history, refused={},
            requested=True, evaluation="", clean=False, **{"attach": "", **more},
        )  # fmt: skip
        self.context.failure = None
        self.context.notes.clear(FindingKind.GAVE_UP, FindingKind.RESUMED_WRONG, FindingKind.BLOCKED)
        self.performer.withdraw_clean(Busy("`podwatch start` has replaced this request", where="clean"))
        await self._answered()

    async def dry_run(self, step: int | None = None) -> dict[str, object]:
        """Return what a restart would do now, JSON-safe and without secrets. Changes nothing."""
        tools = self.context.tools
        changed = await tools.blocking(start_plan.changed_configs, self.context.run.last_start)
        difference = await self.command.difference()
        answer: dict[str, object] = {
            "command_difference": list(difference.lines),
            "changed_since_last_start": sorted({*changed, *difference.files}),
        }

        def asked(run: RunState) -> RunState:
            below = None if step is not None else run.below
            return replace(run, wanted=step, fresh=False, below=below)

        try:
            choice = await self._chosen(asked)
        except PodwatchError as error:
            return {**answer, "possible": False, "reason": str(error)}
        if not isinstance(choice, Choice):
            return {**answer, "possible": False, "reason": f"{choice.why}: {choice.fix}" if choice.fix else choice.why}
        prepared = await tools.blocking(self.starter.prepare, choice.step)
        ahead = await tools.blocking(tools.layout.ahead_of, choice.step)
        trackers = await tools.blocking(tools.layout.trackers, choice.step)
        wrong = await tools.blocking(wrong_trackers, trackers, tools.workspace.tree)
        handle = self.context.handle
        return {
            **answer,
            "possible": True,
            "step": choice.step,
            "source": choice.source,
            "reason": choice.reason,
            "rejected": [{"step": n, "reason": why} for n, why in choice.rejected],
            "set_aside": [str(path) for path in ahead],
            "trackers_set_right": [str(path) for path in wrong],
            "argv": list(scrub_argv(prepared.plan.argv)),
            "removed_flags": list(scrub_argv(prepared.removed)),
            "start_before": [shlex.join(scrub_argv(command)) for command in tools.settings.trainer.start_before],
            "stop_also": [shlex.join(scrub_argv(command)) for command in tools.settings.trainer.stop_also],
            "cwd": prepared.plan.cwd,
            "user": prepared.plan.user,
            "environment_names": list(prepared.record.environment_names),
            "running": handle is not None,
            "supervision": str(handle.supervision if handle is not None else Supervision.NONE),
        }
