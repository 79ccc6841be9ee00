"""Operator requests: start, restart, stop, dry run. Each one is durable before it is answered."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from podwatch.checkpoints.trackers import wrong_trackers
from podwatch.domain.errors import Busy, PodwatchError, UsageError
from podwatch.domain.event import EventName
from podwatch.domain.finding import FindingKind
from podwatch.domain.lease import LeaseAction
from podwatch.domain.process import FoundTree
from podwatch.domain.run_state import RestartHistory
from podwatch.domain.secrets import scrub_argv
from podwatch.domain.snapshot import Desired, Supervision
from podwatch.recovery import start_checks, start_plan
from podwatch.recovery.command_changed import CommandWatch
from podwatch.recovery.context import RecoveryContext
from podwatch.recovery.manual_starts import listed
from podwatch.recovery.operation_runner import OperationRunner, show_watching
from podwatch.recovery.restart import Operations
from podwatch.recovery.resume_point import NothingToResume
from podwatch.recovery.state import Phase
from podwatch.trainer.base import Look, TrainerHandle


@dataclass(frozen=True, slots=True)
class Started:
    """Answer to a start request. ``choose_from``: nothing was started; the operator has to choose one of these."""

    message: str
    choose_from: tuple[FoundTree, ...] = ()


class Requests:
    """Implements `podwatch start`, `restart`, `stop-training` and `restart --dry-run`."""

    def __init__(
        self, context: RecoveryContext, runner: OperationRunner, operations: Operations, command: CommandWatch
    ) -> None:
        self.context, self.runner, self.operations, self.command = context, runner, operations, command
        self.stops, self.manual = operations.stops, operations.manual
        self.chooser, self.starter = operations.chooser, operations.starter

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
        async with self.runner.by_hand():
            look = await self._of_persons()  # a restarted podwatch may take a trainer over meanwhile
            if (running := await self._running()) is not None:
                plain = step is None and not fresh and attach is None and ignore is None
                if not plain or not self._stop_waits():
                    raise self._runs_already(running)
                if kept := await self._keep(executed):
                    return kept
            more: dict[str, Any] = {"executed": {**self.context.run.executed, **executed}} if executed else {}
            if ignore is not None:
                more["ignored"] = self._with_ignored(look, ignore)
            choice = self.manual.choose(look, ignored=more.get("ignored"))
            if attach is not None or choice.attach is not None or choice.unclear:
                return await self._start_with(look, step, fresh, attach, more)
            await self._want(step, fresh, beside_one=False, **more)
            self.runner.spawn(lambda: self.operations.restart("start requested"))
            if waits := choice.waits_for:
                return Started(f"the request is recorded; podwatch does not start training beside {listed(waits)}")
            if (standing := self.context.tools.standing).why_not and standing.act is not LeaseAction.ASK:
                return Started(f"the request is recorded; training does not start yet: {standing.why_not}")
            return Started("podwatch starts training")

    async def _running(self) -> TrainerHandle | None:
        """The watched trainer, if it has not ended."""
        handle = self.context.handle
        return handle if handle is not None and await handle.exit_status() is None else None

    def _stop_waits(self) -> bool:
        """Whether a stop was recorded and not started: it waits for a save, for the end of a pause, or
        because podwatch only observes."""
        return self.context.desired is Desired.STOPPED and self.context.phase is not Phase.STOPPING

    def _runs_already(self, handle: TrainerHandle) -> Busy:
        if self.context.desired is Desired.STOPPED:
            return Busy(f"podwatch stops training (pid {handle.launcher.pid})", fix="try again when training has ended")
        return Busy(
            f"training is running already (pid {handle.launcher.pid})",
            fix="`podwatch restart` starts it again, `podwatch stop-training` stops it",
        )

    async def _keep(self, executed: Mapping[str, str]) -> Started | None:
        """Cancel a stop that is recorded and not started. None if training has just ended."""
        stop = await self.runner.interrupt()
        if (handle := await self._running()) is None:
            return None
        await self.stops.set_desired(
            Desired.RUNNING,
            stop_cancelled_for=handle.start_id,
            stop_requested_for="",
            executed={**self.context.run.executed, **executed},
        )
        if stop is not None:  # the save came at this moment
            self.runner.spawn(self.operations.carry_on)
            return Started("training is being stopped already: podwatch starts it again after that")
        show_watching(self.context, "the request to stop is cancelled")
        return Started(f"the request to stop is cancelled: training continues (pid {handle.launcher.pid})")

    def _only_on_node_0(self, command: str) -> None:
        if self.context.tools.follows:
            raise UsageError(
                f"this node follows node 0 of the run, which `podwatch {command}` is for",
                fix=f"run `podwatch {command}` on node 0",
            )

    def _with_ignored(self, look: Look, pid: int) -> tuple[str, ...]:
        """Return the starts that are not this run's training, process ``pid`` among them. Raises UsageError."""
        meant = [tree for tree in look.trees if tree.launcher.pid == pid]
        if not meant:
            known = f"seen: {listed(look.trees)}" if look.trees else "podwatch waits for no process"
            raise UsageError(f"podwatch does not wait for process {pid}", fix=known)
        return (*self.context.run.ignored[-15:], meant[0].start_id)

    async def _of_persons(self) -> Look:
        """Return the trainers here that podwatch does not watch; leftovers of the watched one do not count."""
        look = await self.context.tools.launcher.look()
        if look.handle is not None:
            return Look()
        old = self.context.handle
        left = {p.identity for p in (await old.tree()).value or ()} | {old.launcher} if old is not None else set()
        return Look(trees=tuple(tree for tree in look.trees if tree.launcher not in left))

    async def _start_with(
        self, look: Look, step: int | None, fresh: bool, attach: int | None, more: dict[str, Any]
    ) -> Started:
        choice = self.manual.choose(look, ignored=more.get("ignored"))
        there = choice.unclear if choice.attach is None else (choice.attach,)
        if attach is not None:  # an operator's decision needs no proof, but a terminal is never a trainer
            there = tuple(tree for tree in look.trees if tree.attachable)
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
        await self.runner.interrupt()
        attached = await self._running()
        ignored = more.get("ignored", self.context.run.ignored)
        more["ignored"] = tuple(name for name in ignored if name != one.start_id)
        await self._forgive(None, False, **more)
        if attached is not None and attached.start_id == one.start_id:  # by the operation that was interrupted
            show_watching(self.context, f"watching pid {one.launcher.pid}, which podwatch did not start")
        else:
            self.runner.spawn(lambda: self._attach(one))
        return Started(f"{said}: podwatch watches it from now on and starts no second one ({one.reason})")

    async def _attach(self, one: FoundTree) -> None:
        if self.context.handle is not None:
            self.context.forget()
        if not await self.manual.guard(one):
            await self.operations.start()

    async def restart(self, step: int | None = None) -> None:
        """Stop the trainer and start from ``step`` (None: the usual choice). Not counted as a failure. Raises
        UsageError for one of several nodes."""
        if self.context.tools.place is not None:
            raise UsageError(
                "podwatch cannot restart one of several nodes",
                fix="let the engine start all of them again (docs/nodes.md)",
            )
        async with self.runner.by_hand():
            await self._want(step, False)
            self.runner.spawn(lambda: self.operations.restart("restart requested"))

    async def stop(self, after_save: bool = False) -> None:
        """Stop training until the next `podwatch start`. The request survives restarts of podwatch and of the pod."""
        self._only_on_node_0("stop-training")
        async with self.runner.by_hand():
            await self._stop_soon(self.stops.newest() if after_save else None)
            if after_save:
                await self.context.tools.blocking(self.context.tools.catalogue.rescan)
            above = self.stops.newest() if after_save else None
            await self._record_stop(above)
            self.runner.spawn(lambda: self.stops.stop("stop requested", above=above))

    async def _stop_soon(self, above: int | None) -> None:
        """Record the stop, then interrupt the current operation: a start (``trainer.start_before``) can take
        minutes, in which podwatch or the pod may end. If the interruption fails, the record is undone and the operator
        gets the error; if it is cancelled, the record stays."""
        before = self.context.run
        await self._record_stop(above)
        try:
            await self.runner.interrupt()
        except Exception:
            if before.desired is not Desired.STOPPED:
                await self.context.edit(
                    desired=before.desired,
                    desired_wall=before.desired_wall,
                    stop_above=before.stop_above,
                    stop_of=before.stop_of,
                    stop_requested_for=before.stop_requested_for,
                    next_try_wall=before.next_try_wall,
                )
                text = (
                    f"podwatch could not carry out the stop request: training stays {before.desired}; request it again"
                )
                self.context.tools.say(EventName.DESIRED_CHANGED, text, desired=str(before.desired))
            raise

    async def _record_stop(self, above: int | None) -> None:
        of = self.context.watched
        await self.stops.set_desired(Desired.STOPPED, above=above, of=of, next_try_wall=None, stop_requested_for=of)

    async def _want(self, step: int | None, fresh: bool, *, beside_one: bool = True, **more: Any) -> None:
        """Record that training is wanted, and ``more``. ``beside_one`` False: Busy if a trainer was taken over
        meanwhile, which the start would stop."""
        if step is not None and fresh:
            raise UsageError("a step and a fresh start exclude each other", fix="give one of --step and --fresh")
        standing = self.context.tools.standing
        if standing.stop:
            raise Busy(standing.why_not, fix=start_checks.FIX)
        await self.context.tools.blocking(self.starter.prepare, None)
        if step is not None:
            try:
                await self.chooser.choose(wanted=step)
            except NothingToResume as error:
                raise UsageError(error.what, fix="choose a step from `podwatch checkpoints`") from error
        await self.runner.interrupt()
        if not beside_one and (running := await self._running()) is not None:
            raise self._runs_already(running)
        await self._forgive(step, fresh, **more)

    async def _forgive(self, step: int | None, fresh: bool, **more: Any) -> None:
        """Record an operator's start in one edit: training is wanted, its failure history is reset, and ``more``. A
        podwatch that is killed here has taken the whole request or nothing of it."""
        run = self.context.run
        # A fresh start leaves the lineage of the refused steps; the new one reaches these numbers again.
        refused = {} if fresh else {n: why for n, why in run.refused.items() if n != step}
        history = RestartHistory(ever_worked=run.history.ever_worked)
        await self.stops.set_desired(
            Desired.RUNNING,
            wanted=step,
            fresh=fresh,
            below=None,
            next_try_wall=None,
            history=history,
            refused=refused,
            **more,
        )
        self.context.failure = None
        self.context.notes.clear(FindingKind.GAVE_UP, FindingKind.RESUMED_WRONG, FindingKind.BLOCKED)

    async def dry_run(self, step: int | None = None) -> dict[str, object]:
        """Return what a restart would do now, JSON-safe and without secrets. Changes nothing."""
        tools = self.context.tools
        changed = await tools.blocking(start_plan.changed_configs, self.context.run.last_start)
        difference = await self.command.difference()
        answer: dict[str, object] = {
            "command_difference": list(difference.lines),
            "changed_since_last_start": sorted({*changed, *difference.files}),
        }
        try:
            below = None if step is not None else self.context.run.below
            choice = await self.chooser.choose(wanted=step, below=below, wait=False)
        except PodwatchError as error:
            return {**answer, "possible": False, "reason": str(error)}
        prepared = await tools.blocking(self.starter.prepare, choice.step)
        ahead = await tools.blocking(tools.layout.ahead_of, choice.step)
        trackers = await tools.blocking(tools.layout.trackers, choice.step)
        wrong = await tools.blocking(wrong_trackers, trackers)
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
            "running": self.context.handle is not None,
            "supervision": str(
                self.context.handle.supervision if self.context.handle is not None else Supervision.NONE
            ),
        }
