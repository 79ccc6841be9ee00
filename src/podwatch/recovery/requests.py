"""Operator requests: start, restart, stop, dry run. Each one is durable before it is answered."""

import shlex
from dataclasses import dataclass, replace

from podwatch.checkpoints.layouts import shared_rules
from podwatch.domain.errors import Busy, PodwatchError, UsageError
from podwatch.domain.event import EventName
from podwatch.domain.finding import FindingKind
from podwatch.domain.secrets import scrub_argv
from podwatch.domain.snapshot import Desired, Supervision
from podwatch.policy.lease import LeaseAction
from podwatch.policy.restart import RestartHistory
from podwatch.recovery import handover, start_plan
from podwatch.recovery.manual_start import listed
from podwatch.recovery.restart import Acts
from podwatch.recovery.resume_point import NothingToResume
from podwatch.trainer.base import Candidate, Look


@dataclass(frozen=True, slots=True)
class Started:
    """Answer to a start request. ``choose_from``: nothing was started; the operator has to choose one of these."""

    message: str
    choose_from: tuple[Candidate, ...] = ()


class Requests(Acts):
    """Implements `podwatch start`, `restart`, `stop-training` and `restart --dry-run`."""

    async def request_start(
        self, step: int | None = None, fresh: bool = False, attach: int | None = None, beside: int | None = None
    ) -> Started:
        """Record that training is wanted, then return. If an operator's trainer runs here, podwatch takes it over,
        names it in the answer and starts no second one; of several, ``attach`` (a pid) chooses one. ``beside`` is the
        pid of a process that is not this run's training, whatever it looks like: podwatch ignores it from now on.
        Raises Busy while a trainer is watched already, UsageError when the step or the pid does not exist,
        ConfigurationError without a command."""
        async with self.by_hand():
            if self.handle is not None and await self.handle.exit_status() is None:
                raise Busy(
                    f"training is running already (pid {self.handle.launcher.pid})",
                    fix="`podwatch restart` starts it again, `podwatch stop-training` stops it",
                )
            look = await self._of_persons()
            if beside is not None:
                look = await self._ignore(look, beside)
            there = self.sift(look)
            if there.successors or attach is not None:
                return await self._start_with(look, step, fresh, attach)
            await self._want(step, fresh)
            self.spawn(lambda: self.restart_act("start requested"))
            if waits := (*there.rivals, *there.pending):
                return Started(f"the request is recorded; podwatch does not start training beside {listed(waits)}")
            if (standing := self.tools.standing).why_not and standing.act is not LeaseAction.ASK:
                return Started(f"the request is recorded; training does not start yet: {standing.why_not}")
            return Started("podwatch starts training")

    async def _ignore(self, look: Look, pid: int) -> Look:
        """Record that process ``pid`` is not this run's training."""
        seen = (*look.candidates, *look.pending)
        meant = [c for c in seen if c.launcher.pid == pid]
        if not meant:
            known = f"seen: {listed(seen)}" if seen else "podwatch waits for no process"
            raise UsageError(f"podwatch does not wait for process {pid}", fix=known)
        self.memory.ignored = (*self.memory.ignored[-15:], meant[0].start_id)
        await self.procedure.remember()
        return look

    async def _of_persons(self) -> Look:
        """Return the trainers here that podwatch does not watch; leftovers of the watched one do not count."""
        look = await self.tools.launcher.look()
        if look.handle is not None:
            return Look()
        old = self.handle
        left = {p.identity for p in (await old.tree()).value or ()} | {old.launcher} if old is not None else set()
        return Look(
            candidates=tuple(c for c in look.candidates if c.launcher not in left),
            pending=tuple(c for c in look.pending if c.launcher not in left),
        )

    async def _start_with(self, look: Look, step: int | None, fresh: bool, attach: int | None) -> Started:
        there = self.sift(look).successors
        if attach is not None:  # an operator's decision needs no proof, but a terminal is never a trainer
            there = (*look.candidates, *(c for c in look.pending if c.attachable))
        chosen = there if attach is None else tuple(c for c in there if c.launcher.pid == attach)
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
        if self.tools.settings.trainer.supervise == "keeper":
            raise Busy(said, where='[trainer] supervise = "keeper"', fix='stop it, or set supervise = "auto"')
        await self.interrupt()
        self._forgive(None, False)
        self.memory.ignored = tuple(name for name in self.memory.ignored if name != one.start_id)
        await self.procedure.remember()
        await self.set_desired(Desired.RUNNING)
        self.spawn(lambda: self._attach_act(one))
        return Started(f"{said}: podwatch watches it from now on and starts no second one ({one.reason})")

    async def _attach_act(self, one: Candidate) -> None:
        if self.handle is not None:
            self.forget()
        if not await self.guard(one):
            await self.start_act()

    async def request_restart(self, step: int | None = None) -> None:
        """Stop the trainer and start from ``step`` (None: the usual choice). Not counted as a failure."""
        async with self.by_hand():
            await self._want(step, False)
            self.spawn(lambda: self.restart_act("restart requested"))

    async def request_stop(self, after_save: bool = False) -> None:
        """Stop training until the next `podwatch start`. The request survives restarts of podwatch and of the pod."""
        async with self.by_hand():
            await self._stop_soon(self.newest() if after_save else None)
            if after_save:
                await self.tools.blocking(self.tools.catalogue.rescan)
            above = self.newest() if after_save else None
            await self.set_desired(Desired.STOPPED, above=above, of=self.watched)
            self.memory.next_try_wall = None
            await self.procedure.remember()
            self.spawn(lambda: self.stop_act("stop requested", above=above))

    async def _stop_soon(self, above: int | None) -> None:
        """Record the stop, then interrupt the current act: a start in progress (``trainer.start_before``) can take
        minutes, in which podwatch or the pod may end. If the interruption fails, the record is undone and the operator
        gets the error; if it is cancelled, the record stays."""
        before = self.tools.record.current
        await self.set_desired(Desired.STOPPED, above=above, of=self.watched)
        try:
            await self.interrupt()
        except Exception:
            now = self.tools.record.current
            if before is not None and now is not None and before.desired is not Desired.STOPPED:
                old = replace(
                    now,
                    desired=before.desired,
                    desired_wall=before.desired_wall,
                    stop_above=before.stop_above,
                    stop_of=before.stop_of,
                )
                await self.procedure.save_record(old)
                text = (
                    f"podwatch could not carry out the stop request: training stays {before.desired}; request it again"
                )
                self.tools.say(EventName.DESIRED_CHANGED, text, desired=str(before.desired))
            raise

    async def _want(self, step: int | None, fresh: bool) -> None:
        if step is not None and fresh:
            raise UsageError("a step and a fresh start exclude each other", fix="give one of --step and --fresh")
        standing = self.tools.standing
        if standing.stop:
            raise Busy(standing.why_not, fix=handover.FIX)
        await self.tools.blocking(self.procedure.prepare, None)
        if step is not None:
            try:
                await self.procedure.choose(wanted=step)
            except NothingToResume as error:
                raise UsageError(error.what, fix="choose a step from `podwatch checkpoints`") from error
        await self.interrupt()
        self._forgive(step, fresh)
        await self.procedure.remember()
        await self.set_desired(Desired.RUNNING)

    def _forgive(self, step: int | None, fresh: bool) -> None:
        """Reset the failure history for an operator's start."""
        memory = self.memory
        self.cause = None
        memory.wanted, memory.fresh, memory.below, memory.next_try_wall = step, fresh, None, None
        memory.history = RestartHistory(ever_worked=memory.history.ever_worked)
        if fresh:
            memory.refused = {}  # steps of the lineage that is left; the new one reaches these numbers again
        if step is not None:
            memory.refused = {n: why for n, why in memory.refused.items() if n != step}
        self.clear(FindingKind.GAVE_UP, FindingKind.RESUMED_WRONG, FindingKind.BLOCKED)
        self.exit_code = None

    async def dry_run(self, step: int | None = None) -> dict[str, object]:
        """Return what a restart would do now, JSON-safe and without secrets. Changes nothing."""
        tools, record = self.tools, self.tools.record.current
        changed = await tools.blocking(start_plan.changed_configs, record.last_start if record is not None else None)
        difference = await self.difference()
        answer: dict[str, object] = {
            "command_difference": list(difference.lines),
            "changed_since_last_start": sorted({*changed, *difference.files}),
        }
        try:
            below = None if step is not None else self.memory.below
            choice = await self.procedure.choose(wanted=step, below=below, wait=False)
        except PodwatchError as error:
            return {**answer, "possible": False, "reason": str(error)}
        prepared = await tools.blocking(self.procedure.prepare, choice.step)
        ahead = await tools.blocking(tools.layout.ahead_of, choice.step)
        trackers = await tools.blocking(tools.layout.trackers, choice.step)
        wrong = await tools.blocking(shared_rules.wrong, trackers)
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
            "running": self.handle is not None,
            "supervision": str(self.handle.supervision if self.handle is not None else Supervision.NONE),
        }
