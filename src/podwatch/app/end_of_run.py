"""The end of a run: decided once, its last data stored, reported, and turned into an exit code (docs/jobs.md).

``EndOfRun`` is the one place where it is decided that the run has ended here; ``job/exit_code.py`` decides how, and
which code that is. In job mode (`podwatch run --job`) podwatch's init (``trainer/supervise.py``) is the engine's
process: it ends the trainer and returns the code.
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from podwatch.app.backup.upload_queue import Unstored
from podwatch.app.backup_findings import cannot_be_used
from podwatch.app.job_mode import in_job
from podwatch.app.lost_saves import to_wait_for
from podwatch.app.sensing import LAG
from podwatch.app.variables_of_own_processes import JOB_PROCESS
from podwatch.domain.checkpoint import newest_complete
from podwatch.domain.errors import ExitCode
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.domain.lease import LeaseAction
from podwatch.domain.snapshot import Desired
from podwatch.job.exit_code import PERMANENT, JobEnd, Outcome, Situation, Verdict, ended, judge, of_error, withdrawn
from podwatch.journal import Journal
from podwatch.recovery.state import Phase
from podwatch.system.clock import until_beat

if TYPE_CHECKING:
    from podwatch.app.ask_and_record_attempts import JobVerdicts
    from podwatch.app.backup.post_mortem import PostMortem
    from podwatch.app.build import Components
    from podwatch.app.end_pod import PodEnder
    from podwatch.app.store_jobs import StoreJobs
    from podwatch.hooks.evaluation import Evaluations
    from podwatch.hooks.hook_runner import Hooks

LOOK_SECONDS: Final = 1.0
PROGRESS_SECONDS: Final = 60.0
"""Between two lines of progress of the final sync: an engine's log stays readable, and shows within a minute that the
job is alive."""
SETTLE_SECONDS: Final = 60.0
"""How long the final sync waits for a checkpoint that is not complete although its trainer has ended: its settle time
is over by then, and nothing will be added to it."""
ANSWER_SECONDS: Final = 180.0
"""Limit of one look at what is not stored: the verification of a large checkpoint can be before it in the queue."""
KEEP_SECONDS: Final = 10.0
"""Time for recording a verdict in the store."""

STUCK: Final = "end.stuck"
"""Journal key, in job mode: {"job": its process, "since": monotonic second since which it cannot train}. A daemon that
init starts again continues the standby."""
CLAIMING: Final = (LeaseAction.CLAIM, LeaseAction.SETTLE)
NOT_OURS: Final = (LeaseAction.WATCH, LeaseAction.REFUSE, LeaseAction.SUPERSEDED)
"""This pod must not publish, so a final sync would change nothing."""
STORING: Final = (Outcome.FINISHED, Outcome.STOPPED, Outcome.GAVE_UP, Outcome.BLOCKED)
"""The ends that leave time for a final sync. An end by a signal has its grace (app/preemption.py)."""
_ENDED: Final = {
    Outcome.FINISHED: "the run is finished",
    Outcome.STOPPED: "training is stopped",
    Outcome.GAVE_UP: "podwatch gave up",
}
WITHOUT: Final = "training cannot start"


@dataclass(frozen=True, slots=True)
class FinalState:
    """The result of a final sync. ``unstored``: names of what is not in the store; ``also``: of what is missing without
    being a part of the run."""

    unstored: tuple[str, ...] = ()
    also: str = ""


class FinalSync:
    """Stores what a run has left when it ends here, within ``[recovery] final_sync``. ``left``: the names of what the
    last look found missing."""

    def __init__(self, parts: "Components", artifacts: "PostMortem | None") -> None:
        self._parts, self._artifacts = parts, artifacts
        self.left: tuple[str, ...] = ()

    async def run(self, outcome: Outcome, holds: Callable[[], bool], *, evidence: bool = True) -> FinalState | None:
        """Wait until everything is stored, the time is over, or another pod holds the run. None once the end does not
        hold any more. ``evidence``: store logs and incident bundles, too."""
        parts, clock, finished = self._parts, self._parts.run.clock, outcome is Outcome.FINISHED
        if parts.store.elsewhere:
            return FinalState()
        if finished and not parts.settings.sync.store:
            return FinalState(also="NOT BACKED UP: no store is configured")
        began = clock.monotonic()
        most, told = parts.settings.recovery.final_sync, began - PROGRESS_SECONDS
        while True:
            left = await self._left(clock.monotonic() - began, finished=finished)
            self.left = (*left.pending, *left.refused)
            if not holds():
                return None
            if not left.pending or clock.monotonic() - began >= most:
                break
            why = "" if parts.backup is None else parts.backup.why_not_ours()
            if why:
                self.left = (*(f"{name} ({why})" for name in left.pending), *left.refused)
                text = f"{_ENDED.get(outcome, WITHOUT)}; podwatch stores nothing more: {why}"
                self._parts.bus.say(EventName.FINAL_SYNC, text, Severity.WARNING, seconds_left=0)
                break
            if clock.monotonic() - told >= PROGRESS_SECONDS:
                told = clock.monotonic()
                self._progress(_ENDED.get(outcome, WITHOUT), left, began + most - told)
            await clock.sleep(LOOK_SECONDS)
        return FinalState(self.left, await self._evidence() if evidence else "")

    async def check(self) -> FinalState:
        """What is not stored now, without waiting for it."""
        left = await self._left(SETTLE_SECONDS, finished=False)
        return FinalState((*left.pending, *left.refused))

    async def _left(self, waited: float, *, finished: bool) -> Unstored:
        """What is not stored now. A disk or a store that hangs does not hold the end of the run."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._find_left(waited, finished=finished)
        except TimeoutError:
            return Unstored(("the last checkpoint, as far as podwatch can see: the disk or the store hangs",))

    async def _find_left(self, waited: float, *, finished: bool) -> Unstored:
        parts = self._parts
        sets = await parts.checkpoints.rescans.rescan()
        if parts.backup is None:
            why = parts.store.refused or "no store is configured"
            newest = newest_complete(sets)
            name = "the last checkpoint" if newest is None else f"the checkpoint of step {newest.step}"
            return Unstored(refused=(f"{name} ({why})",) if finished or newest is not None else ())
        parts.backup.run_ended()
        left = await parts.backup.unstored()
        step = to_wait_for(sets, parts.backup.status().last_step, settled=waited >= SETTLE_SECONDS)
        return left if step is None else Unstored((*left.pending, f"the checkpoint of step {step}"), left.refused)

    def _progress(self, why: str, left: Unstored, seconds: float) -> None:
        backup = self._parts.backup
        text = f"{why}; podwatch stores {', '.join(left.pending)}"
        if backup is not None:
            sync = backup.status()
            if sync.uploading_step is not None and sync.total_bytes:
                text += f" ({100 * sync.uploaded_bytes // sync.total_bytes} % of {sync.total_bytes / 1e9:.1f} GB sent)"
            elif sync.settles_in is not None:
                text += f" (this pod's claim of the run is decided in {sync.settles_in:.0f} s)"
            elif sync.error:
                text += f" ({cannot_be_used(sync.error)})"
        text += f". It waits at most {seconds / 60:.0f} min more"
        self._parts.bus.say(EventName.FINAL_SYNC, text, seconds_left=round(seconds))

    async def _evidence(self) -> str:
        """Store logs and incident bundles; returns what is missing, in words."""
        if self._artifacts is None:
            return ""
        await self._artifacts.store()
        problem = self._artifacts.problem
        return f"logs and incident bundles are not in the store ({problem})" if problem else ""


class EndOfRun:
    """Watches for the end of the run here. ``Exit.verdict`` is set once it is decided."""

    def __init__(
        self,
        parts: "Components",
        final: FinalSync,
        verdicts: "JobVerdicts | None" = None,
        pod: "PodEnder | None" = None,
        heartbeat: "StoreJobs | None" = None,
        evaluations: "Evaluations | None" = None,
        hooks: "Hooks | None" = None,
    ) -> None:
        self._parts, self._final, self._verdicts, self._pod = parts, final, verdicts, pod
        self._heartbeat, self._evaluations, self._hooks = heartbeat, evaluations, hooks
        self._job = in_job(os.environ)
        self._process = os.environ.get(JOB_PROCESS, "") if self._job else ""
        self._stuck_since: float | None = None
        self._last: JobEnd | None = None
        """The end that ``leaving`` decided."""
        self._storing: JobEnd | None = None
        """The decided end whose last data is being stored, or was."""
        self._look_again_at = float("-inf")

    @property
    def verdict(self) -> Verdict | None:
        return self._parts.exit.verdict

    @property
    def not_before_wall(self) -> float | None:
        """Training starts no earlier (epoch seconds); known after ``forbidden``."""
        return self._verdicts.not_before_wall if self._verdicts is not None else None

    async def follow(self) -> None:
        """In job mode: keep the store's record of this attempt up to date. Never returns there."""
        if self._job and self._verdicts is not None:
            await self._verdicts.watch()

    async def forbidden(self) -> bool:
        """In job mode, before training starts: whether the store forbids this attempt. The job then ends."""
        if not self._job or self._verdicts is None:
            return False
        end = await self._verdicts.forbids()
        if end is not None:
            await self._conclude(end)
        return end is not None

    async def watch(self) -> None:
        """Wait for the end, store what is left, and end podwatch if this end asks for it. An operator's start after an
        end that podwatch stayed for withdraws the verdict."""
        clock, concluded = self._parts.run.clock, None
        await self.recall()
        while True:
            now, standby = self.situation(), self._parts.settings.recovery.standby
            end = ended(now, standby)
            gang = self._parts.gang
            if end is None and gang is not None and self._nothing_trains():
                end = gang.over  # known while this node waited for the others
            if end is None:
                if concluded is None or withdrawn(concluded, now, standby):
                    self._parts.exit.verdict = concluded = self._storing = None
            elif end.outcome is not concluded and (final := await self._settled(end)) is not None:
                concluded = end.outcome
                if await self._conclude(final):
                    return
            elif end.outcome is concluded is Outcome.FINISHED:
                await self._stored_later(end)
            await clock.sleep(self._pause())

    async def _stored_later(self, end: JobEnd) -> None:
        """Where podwatch stayed after a finished run that was not all stored: correct the verdict once it is."""
        now, verdict = self._parts.run.clock.monotonic(), self.verdict
        if verdict is None or verdict.code != ExitCode.UNAVAILABLE or now < self._look_again_at:
            return
        self._look_again_at = now + PROGRESS_SECONDS
        if not (await self._final.check()).unstored:
            await self._conclude(JobEnd(end.outcome, end.reason))

    def _pause(self) -> float:
        """Seconds to the next look: while all is well, just after a turn of the sensing loop."""
        recovery, poll = self._parts.recovery, self._parts.settings.gpu.poll
        if self._stuck_since is not None or recovery.state.phase is not Phase.RUNNING:
            return LOOK_SECONDS
        return until_beat(self._parts.run.clock.monotonic(), poll, 2 * LAG * poll)

    def _nothing_trains(self) -> bool:
        """Whether no trainer runs here, and none is being stopped."""
        recovery = self._parts.recovery
        return recovery.handle is None and recovery.state.phase not in (Phase.STOPPING, Phase.ENDING)

    async def _settled(self, end: JobEnd) -> JobEnd | None:
        """The end that counts on all nodes, once its last data is stored; None if an operator or recovery has started
        the run again meanwhile. The nodes agree first, unless the run is finished: until they know of this end, they
        take the silence of this node's training for a failure."""
        gang, self._storing = self._parts.gang, None
        if end.outcome is Outcome.FINISHED:
            final = await self._finished(end)
            if final is None or gang is None:
                return final
            agreed = await gang.agree(final)
            return replace(agreed, unstored=final.unstored) if agreed.outcome is Outcome.FINISHED else agreed
        if gang is not None:
            end = await gang.agree(end, storing=self._parts.settings.recovery.final_sync)
        return await self._stored(end)

    async def _finished(self, end: JobEnd) -> JobEnd | None:
        stored = await self._final.run(end.outcome, lambda: self._holds(end))
        if stored is None or not await self._evaluated():
            return None
        if self._evaluations is not None and not stored.unstored and (await self._final.check()).unstored:
            # The evaluation at the end has pinned another checkpoint as the best one.
            stored = await self._final.run(end.outcome, lambda: self._holds(end))
            if stored is None:
                return None
        reason = "; ".join(text for text in (end.reason, stored.also) if text)
        return JobEnd(end.outcome, reason, unstored=stored.unstored)

    async def _stored(self, end: JobEnd) -> JobEnd | None:
        """After any other end that takes the machine or podwatch away. The end stays what it is, whatever is stored."""
        if end.outcome not in STORING or end.lease_unknown or not self._leaves(end.outcome):
            return end
        if self._parts.recovery.context.tools.standing.act in NOT_OURS:
            return end
        self._storing = end  # a signal from here on ends podwatch with this end
        await self._foretell(end)
        evidence = self._ends_pod(end.outcome)
        stored = await self._final.run(end.outcome, lambda: self._holds(end), evidence=evidence)
        self._storing = None if stored is None else replace(end, unstored=stored.unstored)
        return self._storing

    def _holds(self, end: JobEnd) -> bool:
        """Whether the run has not been started again since this end. The end of several nodes is final."""
        standby = self._parts.settings.recovery.standby
        return self._parts.gang is not None or not withdrawn(end.outcome, self.situation(), standby)

    async def _evaluated(self) -> bool:
        """Wait for the evaluation at the end, if this end takes the machine or podwatch away. False if the run is no
        longer finished: an operator started it meanwhile. Several nodes do not wait: each would hold the others."""
        if self._evaluations is None or self._parts.gang is not None or not self._leaves(Outcome.FINISHED):
            return True
        return await self._waited_for(self._evaluations.owed, Outcome.FINISHED, lambda: self.situation().finished)

    async def _hooks_ran(self, end: JobEnd) -> bool:
        """Wait for the hooks of what was reported, as ``_evaluated`` does for the evaluation."""
        if self._hooks is None or not self._leaves(end.outcome):
            return True
        return await self._waited_for(self._hooks.owed, end.outcome, lambda: self._holds(end))

    async def _waited_for(
        self, owed: Callable[[], Awaitable[str]], outcome: Outcome, holds: Callable[[], bool]
    ) -> bool:
        """Wait until nothing is owed, for ``final_sync`` at most. False once the end does not hold any more."""
        clock, parts, ended = self._parts.run.clock, self._parts, _ENDED.get(outcome, WITHOUT)
        end, said = clock.monotonic() + self._parts.settings.recovery.final_sync, ""
        try:
            while what := await owed():
                left = end - clock.monotonic()
                if not holds():
                    return False
                if left <= 0:
                    text = f"{ended}; [recovery] final_sync is over, podwatch no longer waits for {what}"
                    parts.bus.say(EventName.FINAL_SYNC, text, Severity.WARNING, seconds_left=0)
                    return True
                parts.exit.waits_for = f"podwatch waits for {what}"
                if what != said:
                    said = what
                    text = f"{ended}; {parts.exit.waits_for}, at most {left / 60:.0f} min"
                    parts.bus.say(EventName.FINAL_SYNC, text, seconds_left=round(left))
                await clock.sleep(LOOK_SECONDS)
        finally:
            parts.exit.waits_for = ""
        return True

    async def _conclude(self, end: JobEnd) -> bool:
        """Report the end between the hooks of what came before it and its own, then end the machine or podwatch;
        returns whether podwatch exits with this end."""
        if end.outcome is Outcome.FINISHED:
            self._storing = end  # a signal from here on ends podwatch with this end
        verdict = judge(await self._keep(end), job=self._job)
        if not await self._hooks_ran(end):
            return False
        self._parts.exit.verdict = verdict
        # An operator knows that they stopped the run; on a plain pod, what podwatch stays for has findings of its own.
        expected = end.outcome is Outcome.STOPPED or not self._job
        well = verdict.code == 0 or (expected and not end.unstored)
        severity = Severity.INFO if well else Severity.CRITICAL
        self._parts.bus.say(
            EventName.RUN_ENDED, verdict.sentence, severity, outcome=str(verdict.outcome), exit_code=int(verdict.code)
        )
        if not await self._hooks_ran(end):
            return False
        if self._pod is not None and self._ends_pod(end.outcome):
            stored = await self._all_stored(end)
            await self._say_last()
            await self._pod.end_pod(end.outcome, stored=stored, recheck=lambda: self._all_stored(end, again=True))
        exits = self._exits(verdict.outcome)
        if exits:
            self._parts.exit.leave(int(verdict.code))
        return exits

    async def _say_last(self) -> None:
        """The machine can be gone a second after the command: then nothing else says how the run ended."""
        if self._heartbeat is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KEEP_SECONDS):
                    await self._heartbeat.say_leaving()

    def _ends_pod(self, outcome: Outcome) -> bool:
        """Whether podwatch ends this machine after this end: then no hourly retry is waited for after giving up."""
        return self._pod is not None and not self._job and self._pod.wants(outcome)

    async def _all_stored(self, end: JobEnd, *, again: bool = False) -> bool:
        """Whether the store has what this machine's disk has, after the final sync; with ``again``, later."""
        if not self._parts.settings.sync.store:
            return False
        settled = end.outcome is Outcome.FINISHED or self._storing is not None
        if settled and not (again and self._parts.backup is not None):
            return not end.unstored
        return not (await self._final.check()).unstored  # it must not publish, so that waiting would change nothing

    async def _foretell(self, end: JobEnd) -> None:
        """Record the end before its last data is stored: the machine can be gone before that is done, and the next
        attempt must not start what an operator stopped. Not for a finished run: its next attempt stores the rest."""
        if self._verdicts is not None and self._job:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KEEP_SECONDS):
                    await self._verdicts.foretell(end)

    async def _keep(self, end: JobEnd) -> JobEnd:
        """Only in job mode: a pod whose podwatch stays has no attempts."""
        if self._verdicts is None or not self._job:
            return end
        try:
            async with asyncio.timeout(KEEP_SECONDS):
                return await self._verdicts.keep(end)
        except TimeoutError:
            return end

    def _leaves(self, outcome: Outcome) -> bool:
        """Whether this end takes podwatch or the machine away."""
        return self._exits(outcome) or self._ends_pod(outcome)

    def _exits(self, outcome: Outcome) -> bool:
        recovery = self._parts.settings.recovery
        on_its_own = {Outcome.FINISHED: recovery.on_finished, Outcome.GAVE_UP: recovery.on_give_up}
        return self._job or on_its_own.get(outcome) == "exit"

    async def leaving(self) -> None:
        """Called when podwatch stops: in job mode a stop without a verdict is a preemption, or a permanent error; any
        other error is retried by init. During the final sync of a run that is not finished, the decided end counts: an
        engine must not run a job again that an operator stopped."""
        leaving = self._parts.exit
        if not self._job:
            return
        if leaving.verdict is not None:  # decided: what was still waited for does not change it
            if leaving.first == 0 or leaving.preempted:
                leaving.code = int(leaving.verdict.code)
            return
        if self._parts.gang is not None and self._parts.gang.over is not None:
            self._last = self._parts.gang.over
        elif self._storing is not None and (leaving.first == 0 or leaving.preempted):
            self._last = replace(self._storing, unstored=self._final.left)
        elif leaving.first == 0 or leaving.preempted:
            self._last = JobEnd(Outcome.PREEMPTED, leaving.preempted or "podwatch was asked to stop")
        elif leaving.first in PERMANENT:
            self._last = of_error(leaving.first, "see the last lines above")
        else:
            return
        if self._parts.gang is not None:
            self._parts.gang.stopping(self._last)
        verdict = judge(self._last)
        leaving.verdict, leaving.code = verdict, int(verdict.code)
        self._parts.bus.say(
            EventName.RUN_ENDED,
            verdict.sentence,
            Severity.WARNING,
            outcome=str(verdict.outcome),
            exit_code=int(verdict.code),
        )

    async def record(self) -> None:
        """Record a verdict that ``leaving`` reached in the store; within the caller's time."""
        if self._last is not None:
            await self._keep(self._last)

    async def recall(self) -> None:
        """Continue the standby that an earlier daemon of this job began."""
        known = await self._parts.run.journal.run(Journal.learned, STUCK)
        if not self._process or not isinstance(known, dict) or known.get("job") != self._process:
            return
        since, now = known.get("since"), self._parts.run.clock.monotonic()
        if self._stuck_since is None and isinstance(since, float) and since <= now:
            self._stuck_since = since

    def _waited(self, *, stuck: bool) -> float:
        """Seconds for which this pod has been stuck without a break."""
        now, before = self._parts.run.clock.monotonic(), self._stuck_since
        self._stuck_since = (now if before is None else before) if stuck else None
        if self._process and self._stuck_since != before:
            kept = None if self._stuck_since is None else {"job": self._process, "since": self._stuck_since}
            self._parts.run.journal.post(Journal.learn, STUCK, kept)
        return 0.0 if self._stuck_since is None else now - self._stuck_since

    def situation(self) -> Situation:
        """As of now."""
        recovery = self._parts.recovery
        state, standing = recovery.state, recovery.context.tools.standing
        superseded = standing.act is LeaseAction.SUPERSEDED
        leaseless = bool(standing.why_not) and not superseded and not standing.ordered and recovery.handle is None
        # While its own claim is decided, this pod still waits, but nothing shows that another one has the run.
        unanswered = leaseless and standing.act is LeaseAction.ASK
        held = leaseless and not unanswered and standing.act not in CLAIMING
        blocked, gave_up = state.phase is Phase.BLOCKED and not leaseless, state.phase is Phase.GAVE_UP
        return Situation(
            finished=state.phase is Phase.FINISHED and recovery.desired is Desired.FINISHED,
            stopped=standing.ordered or (state.phase is Phase.STOPPED and recovery.desired is Desired.STOPPED),
            gave_up=gave_up,
            superseded=superseded,
            held=held,
            unanswered=unanswered,
            blocked=blocked,
            settled=recovery.settled or (gave_up and self._ends_pod(Outcome.GAVE_UP)),
            paused=state.phase is Phase.PAUSED,
            why=standing.why_not if leaseless or superseded or standing.ordered else state.detail,
            waited=self._waited(stuck=superseded or leaseless or blocked),
            blame=recovery.context.blame,
        )
