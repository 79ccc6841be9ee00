"""The operations, one at a time: carry on, recover, start, restart, hand over."""

import json
from typing import Final

from podwatch.detection.merge import reported
from podwatch.domain.errors import Busy, HostError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.lease import LeaseAction
from podwatch.domain.run import Mutation
from podwatch.domain.snapshot import Desired, Supervision
from podwatch.incidents import plain
from podwatch.journal import Journal
from podwatch.policy.errors_in_output import LOG_LINES_KEPT
from podwatch.policy.resume import Choice
from podwatch.recovery import gpus_and_ports_free
from podwatch.recovery.context import BLOCKED_POLL, RecoveryContext
from podwatch.recovery.failure import GIVEN_UP_FIX, Failures
from podwatch.recovery.manual_starts import PERSON_POLL, ManualStarts
from podwatch.recovery.operation_runner import adopt, meant_by, recall, reconcile, show_watching
from podwatch.recovery.resume_point import NothingToResume, NotKnownNow, ResumeChooser, unfit
from podwatch.recovery.start import Starter, StartFailed
from podwatch.recovery.start_checks import StartChecks
from podwatch.recovery.state import GangStart, Phase
from podwatch.recovery.stop import Stops
from podwatch.sensors.base import Wakeable
from podwatch.trainer.base import Look

FREE_POLL: Final = 0.5


class Operations:
    """Only one runs at a time (see ``OperationRunner``), and only it calls the methods here."""

    def __init__(
        self,
        context: RecoveryContext,
        *,
        stops: Stops,
        manual: ManualStarts,
        checks: StartChecks,
        chooser: ResumeChooser,
        starter: Starter,
        failures: Failures,
        gang: GangStart | None,
    ) -> None:
        self.context, self._gang = context, gang
        self.stops, self.manual, self.checks = stops, manual, checks
        self.chooser, self.starter, self.failures = chooser, starter, failures

    async def carry_on(self) -> None:
        """Finish interrupted work, then bring the pod to the desired state."""
        while True:
            launcher = self.context.tools.launcher
            try:
                await recall(self.context)
            except HostError:
                await self._watch_meanwhile()
                raise
            look = await launcher.look()
            stop = await reconcile(self.context, look)
            if stop is None or not self.context.waits:
                break
            await self.context.cleared("the interrupted stop")  # time has passed: look again
        if stop is not None and not self.context.held():
            handle = look.handle
            if handle is None:  # an attached trainer, found again by its process
                meant = meant_by(stop, look)
                if meant is None:
                    raise Busy(
                        "the trainer that podwatch was stopping has ended", fix="nothing: podwatch checks the pod again"
                    )
                handle = await launcher.attach(meant)
            await self.stops.finish_stop(handle, stop.why)
            self.context.forget()
            look = await launcher.look()
        await self.per_desired(look)

    async def _watch_meanwhile(self) -> None:
        """Without run.json nothing is started or stopped, but what runs here is watched."""
        if self.context.handle is not None:
            return
        look = await self.context.tools.launcher.look()
        if look.handle is not None:
            await adopt(self.context, look.handle)
        elif self.manual.attaches and (tree := self.manual.choose(look).attach) is not None:
            await self.manual.guard(tree)

    async def per_desired(self, look: Look) -> None:
        """Adopt a trainer that runs here; else start one, if training is wanted and a start is allowed."""
        settings, mine = self.context.tools.settings, self.context.handle
        attached = mine is not None and mine.supervision is Supervision.ATTACH and await mine.exit_status() is None
        if look.handle is None and attached:  # an interrupted operation had just attached to it
            show_watching(self.context, "attached")
            await self.as_recorded()
        elif look.handle is not None:
            await adopt(self.context, look.handle)
            if look.handle.supervision is Supervision.SUPERVISED:
                await self.as_recorded()
        elif self.context.desired is not Desired.RUNNING:
            finished = self.context.desired is Desired.FINISHED
            self.context.show(
                Phase.FINISHED if finished else Phase.STOPPED,
                "training has finished" if finished else "stopped before podwatch started",
            )
            if await self.manual.notice(look):
                await self.as_recorded()
        elif await self.manual.take_over(look):
            return
        elif settings.mode == "observe":
            self.context.show(Phase.OBSERVING, "mode observe: podwatch starts nothing")
        elif settings.trainer.supervise == "attach" and not any(s.counted for s in self.context.run.starts):
            await self._await_candidate()
        else:
            await self.wait_and_start()

    async def as_recorded(self) -> None:
        """Carry out a stop or a completion that an earlier podwatch recorded and did not finish."""
        if self.context.desired is Desired.RUNNING or not await self.context.cleared("the recorded stop"):
            return
        if self.context.desired is Desired.STOPPED:
            await self.stops.stop("stop requested", above=self.context.run.stop_above)
        elif self.context.desired is Desired.FINISHED:
            await self.stops.finish(Finding(FindingKind.FINISHED, Severity.INFO, "training has finished", 0.0))

    async def _await_candidate(self) -> None:
        self.context.show(Phase.IDLE, "supervise = attach: podwatch waits until you start a trainer")
        while True:
            await self.context.tools.clock.sleep(BLOCKED_POLL)
            look = await self.context.tools.launcher.look()
            if look.handle is not None:
                return await adopt(self.context, look.handle)
            if await self.manual.take_over(look):
                return None

    # -- recover ------------------------------------------------------------------------------------------------------

    async def recover(self, finding: Finding) -> None:
        """Restart training after a confirmed finding, or give up."""
        handle, attempt = self.context.handle, self.context.attempt
        if handle is None or self.context.held():
            return  # held since the decision: the finding comes again once podwatch can act
        await self.context.close_open_incident("training failed again after this restart")
        failure = self.context.failed(finding, attempt)
        lines = tuple(self.context.tools.sensors.logs.last_lines(LOG_LINES_KEPT))
        tails = await self.failures.log_tails(lines)
        line = self.failures.find_log_line(failure, tails)
        own = self.failures.lines_of_this_start(lines)
        decision = None
        if not self.context.is_counted(handle.start_id):
            decision = await self.failures.count(handle.start_id, attempt, finding.kind, own, explained_by=line)
        healing = self.context.healing()
        lost_steps = None if healing is None else healing.lost_steps
        incident = await self.context.tools.journal.run(
            Journal.open_incident,
            str(finding.kind),
            finding.summary + (f" ({failure.log})" if failure.log else ""),
            json.dumps(plain(finding.evidence)),
            failure.wall,
            lost_steps,
        )
        self.context.last_incident = incident.id
        told = (finding if healing is None else reported(healing)).summary
        gave_up = self.context.run.history.gave_up
        self.context.tools.say(
            EventName.INCIDENT_OPENED,
            f"{told}. podwatch gave up restarting" if gave_up else told,
            Severity.CRITICAL,
            incident=incident.id,
            kind=str(finding.kind),
            began=round(failure.wall, 3),
            gave_up=gave_up,
            lost_steps=lost_steps,
            lost_seconds=None if healing is None or healing.lost_seconds is None else round(healing.lost_seconds, 1),
        )
        if decision is not None:
            self.failures.report(decision, told, lines, attempt)

        async def evidence() -> None:
            await self.failures.capture(incident.id, finding, handle, tails)

        await self.stops.stop_tree(handle, finding.summary, before=evidence)
        seen = None if attempt is None else attempt.counted_step
        self.context.forget()
        await self.wait_and_start(incident_id=incident.id, step_at_death=seen)

    # -- start --------------------------------------------------------------------------------------------------------

    async def wait_and_start(self, *, incident_id: int | None = None, step_at_death: int | None = None) -> None:
        """Wait out the backoff, then start. Returns without a start when no further try is allowed."""
        if await self._found_while_blocked():
            return
        if await self.context.cleared("the start") and await self._pause():
            await self.start(incident_id=incident_id, step_at_death=step_at_death)

    async def _found_while_blocked(self) -> bool:
        """Wait while no restart can be recorded. Return True if podwatch now watches a trainer that an operator
        started."""
        began = self.context.tools.clock.monotonic()
        while self.context.blocked() and self.context.held() == self.context.blocked():
            self.context.show(Phase.BLOCKED, f"the start is pending: {self.context.blocked()}")
            await self.context.tools.clock.sleep(BLOCKED_POLL)
            if self.context.tools.clock.monotonic() - began >= PERSON_POLL:
                began = self.context.tools.clock.monotonic()
                if await self.manual.take_over(await self.context.tools.launcher.look()):
                    return True
        return False

    async def _pause(self) -> bool:
        """Wait until the next try is due. Return whether there is one."""
        tools, run = self.context.tools, self.context.run
        due = run.next_try_wall
        if run.history.gave_up:
            why = self.failures.why_gave_up or "podwatch gave up restarting"
            self.context.show(Phase.GAVE_UP, why)
            await self.failures.settle_given_up(why)
            if FindingKind.GAVE_UP not in {f.kind for f in self.context.notes.all}:
                self.context.notes.add(
                    FindingKind.GAVE_UP, Severity.CRITICAL, "podwatch gave up restarting", GIVEN_UP_FIX
                )
            if due is None or tools.settings.recovery.on_give_up == "exit":
                return False  # daemon/end_of_run.py ends podwatch
        if due is not None:
            most = max(tools.settings.recovery.backoff_max, tools.settings.recovery.retry_after_give_up)
            pause = min(max(0.0, due - tools.clock.wall()), most)
            if pause > 0:
                if not run.history.gave_up:
                    self.context.show(Phase.BACKOFF, self.context.detail)
                    tools.say(
                        EventName.RECOVERY_BACKOFF,
                        f"podwatch tries to start training again in {pause:.0f} s",
                        seconds=round(pause, 1),
                    )
                if await self._started_meanwhile(pause):
                    return False
            await self.context.edit(next_try_wall=None)
        return True

    async def _started_meanwhile(self, pause: float) -> bool:
        """Wait ``pause`` seconds. Return True as soon as podwatch watches a trainer that an operator started
        meanwhile."""
        clock = self.context.tools.clock
        end = clock.monotonic() + pause
        while (left := end - clock.monotonic()) > 0:
            await clock.sleep(min(left, PERSON_POLL))
            if left > PERSON_POLL and await self.checks.someone_there(await self.context.tools.launcher.look()):
                self.context.notes.clear(FindingKind.GAVE_UP)
                return True
        return False

    async def start(self, *, incident_id: int | None = None, step_at_death: int | None = None) -> None:
        """Wait until GPUs and ports are free, choose the step, prepare and start; or take over a trainer that an
        operator started meanwhile."""
        try:
            await self._start(incident_id, step_at_death)
        finally:
            self.context.chosen = None

    async def _start(self, incident_id: int | None, step_at_death: int | None) -> None:
        while True:
            if not await self.context.cleared("the start") or await self.checks.elsewhere() or await self._until_free():
                return
            if not self.context.tools.run_file.known:  # unreadable when podwatch started: its desired state counts
                await recall(self.context)
                if self.context.desired is not Desired.RUNNING:
                    await self.per_desired(await self.context.tools.launcher.look())
                    return
            choice = await self._choice()
            if choice is None:
                return
            self.context.chosen = choice.step
            if self.context.held():
                continue
            if choice.source == "store":
                try:
                    if not await self.starter.fetch(choice):
                        continue
                except NothingToResume as error:
                    self._needs_person(error)
                    return
                why = await self.chooser.misfit(choice.step)
                if why and self.context.run.wanted is None:
                    self._needs_person(NothingToResume(unfit(choice, why)))
                    return
            # The download may have taken an hour: look again before touching the trainer's files.
            if await self.checks.someone_there(await self.context.tools.launcher.look()):
                return
            if not self.context.tools.follows and not await self.chooser.still_holds(choice):
                continue  # pruned just before it was protected, or a newer one has appeared: choose again
            if self.context.held() or self.checks.not_here():
                continue  # paused, or the run belongs to another pod now: wait, then choose again
            lost_seconds = self.context.lost_seconds(choice.step)
            try:
                handle, attempt = await self.starter.start(choice)
            except Busy as error:
                self.context.show(Phase.BLOCKED, str(error))
                await self.context.tools.clock.sleep(BLOCKED_POLL)
                continue
            except StartFailed as error:
                lost = self.context.lost_steps(step_at_death, choice.step)
                incident_id = await self.failures.could_not_start(error, choice.step, lost)
                step_at_death = None  # its steps are in the incident that ends here
                if not await self._pause():
                    return
                continue
            break
        if incident_id is None:  # an earlier podwatch may have opened one and ended before the restart
            current = await self.context.tools.journal.run(Journal.current_incident)
            incident_id = current.id if current is not None else None
        attempt.incident_id, attempt.step_at_death = incident_id, step_at_death
        attempt.lost_seconds = lost_seconds
        self.context.notes.clear(FindingKind.BLOCKED, FindingKind.FOREIGN_CHECKPOINTS, FindingKind.RESUME_UNCONFIRMED)
        self.context.unconfirmed = False
        self._say_stepped_back(choice)
        self.context.watch(handle, attempt)
        self.context.show(
            Phase.CONFIRMING, f"started from step {choice.step}" if choice.step is not None else "started fresh"
        )

    def _say_stepped_back(self, choice: Choice) -> None:
        """Report the skipped checkpoint and its quarantine, while training runs from the older one."""
        below, number = self.context.run.below, self.starter.quarantine_number
        self.context.notes.clear(FindingKind.STEPPED_BACK)
        self._say_damaged_in_store(choice)
        if below is None or choice.step is None or number is None:
            return
        self.context.notes.add(
            FindingKind.STEPPED_BACK,
            Severity.WARNING,
            f"resuming from step {below} failed, so training continues from step {choice.step}. Step {below} is kept"
            f" in quarantine {number}",
            f"nothing to do; to return to it: `podwatch stop-training`, `podwatch quarantine return {number}`,"
            f" `podwatch start --step {below}`",
        )

    def _say_damaged_in_store(self, choice: Choice) -> None:
        """Report a newer checkpoint that the store has and that is damaged, as long as training runs from an older
        one."""
        than = -1 if choice.step is None else choice.step
        newer = [(step, why) for (step, _), why in self.chooser.damaged_in_store.items() if step > than]
        if not newer or self.context.run.wanted is not None:
            return
        step, why = max(newer)
        self.context.notes.add(
            FindingKind.STEPPED_BACK,
            Severity.WARNING,
            f"step {step} is damaged in the store ({why}), so training continues from step {choice.step}",
            f"nothing to do; to try it all the same: `podwatch stop-training`, `podwatch start --step {step}`",
            subject="damaged in the store",
        )

    async def _choice(self) -> Choice | None:
        """As ``_choose``; of several nodes, rank 0 chooses once all of them are here, and the others follow it."""
        gang = self._gang
        if gang is not None and self.context.tools.follows:
            try:
                step, files = await gang.awaited()
                await self.starter.until_visible(step, files)
            except PodwatchError as error:
                gang.cannot_start(str(error))
                raise
            return Choice(step, "fresh" if step is None else "local", "", "rank 0 has chosen this step")
        if gang is not None:
            await gang.gather()
        self.context.show(Phase.LOOKING, "choosing the step to start from")
        return await self._choose()

    async def _choose(self) -> Choice | None:
        """Return the step to start from; None if the operator has to decide, which is then reported."""
        while True:
            run = self.context.run
            try:
                return await self.chooser.choose(wanted=run.wanted, fresh=run.fresh, below=run.below)
            except NotKnownNow as error:
                self._needs_person(error)
                while self.context.tools.guard.blocked_reason(Mutation.FRESH_START):
                    await self.context.tools.clock.sleep(BLOCKED_POLL)
                self.context.notes.clear(FindingKind.BLOCKED, FindingKind.FOREIGN_CHECKPOINTS)
                continue
            except NothingToResume as error:
                if run.below is None or run.wanted is not None:
                    self._needs_person(error)
                    return None
            # No older checkpoint is usable: the one that failed is better than none.
            self.context.note(below=None)

    def _needs_person(self, problem: NothingToResume) -> None:
        kind = FindingKind.FOREIGN_CHECKPOINTS if problem.choice.unowned else FindingKind.BLOCKED
        self.context.show(Phase.BLOCKED, str(problem))
        self.context.notes.add(kind, Severity.CRITICAL, problem.what, problem.fix)
        self.context.tools.say(EventName.RECOVERY_BLOCKED, str(problem), Severity.CRITICAL)

    async def _until_free(self) -> bool:
        """Wait until GPU memory and ports are free. Return True if a trainer was found instead."""
        tools = self.context.tools
        began, told = tools.clock.monotonic(), ""
        patience = tools.settings.gpu.release_wait
        configured = bool(tools.settings.gpu.inference or tools.settings.gpu.trainer)
        while True:
            if isinstance(tools.gpus, Wakeable):  # its next poll may be seconds away, and idle GPUs cost money
                tools.gpus.wake()
            look = await tools.launcher.look()
            if await self.checks.someone_there(look):
                return True
            free = self.starter.free(self.context.free_since)
            over = tools.clock.monotonic() - began >= patience
            if free.free and (free.observed or over):
                break
            if over and not configured and not free.ports:
                tools.say(
                    EventName.RECOVERY_BLOCKED,
                    "GPU memory is held, but no GPU is configured for this run: starting anyway",
                    Severity.WARNING,
                )
                break
            if over and free.holders:
                free = await tools.blocking(gpus_and_ports_free.named, free, look.holders)
            held = "; ".join(free.holders) or "GPU memory has not been observed yet"
            self.context.show(Phase.BLOCKED if over else Phase.STARTING, f"waiting: {held}")
            if over:
                text, by_hand = f"podwatch cannot start training yet: {held}", "end the process that holds it"
                fix = f"{by_hand}, or run `podwatch clean --gpu`" if free.holders else "run `podwatch check`"
                self.context.notes.add(FindingKind.BLOCKED, Severity.CRITICAL, text, fix)
                if told != held:
                    tools.say(EventName.RECOVERY_BLOCKED, text, Severity.CRITICAL)
                told = held
            await tools.clock.sleep(BLOCKED_POLL if over else FREE_POLL)
        self.context.notes.clear(FindingKind.BLOCKED)
        self.starter.waited = tools.clock.monotonic() - began
        await self.starter.clear_litter()
        return False

    # -- again --------------------------------------------------------------------------------------------------------

    async def restart(self, why: str) -> None:
        """Restart because the operator requested it: not counted as a failure."""
        if self.context.handle is not None:
            await self.stops.stop_tree(self.context.handle, why)
        self.context.forget()
        await self.start()

    async def resumed_wrong(self, summary: str) -> None:
        """Stop a trainer that did not continue from the step it was given. Keep that step and those above, and never
        resume from them automatically."""
        if self.context.held():
            return
        attempt = self.context.attempt
        step = attempt.resumed_from if attempt is not None else None
        if step is not None:
            known = {s.step for s in self.context.tools.catalogue.sets if s.step >= step} | {step}
            why = f"training resumed wrongly from step {step}"
            await self.context.edit(refused={**self.context.run.refused, **dict.fromkeys(known, why)})
        self.context.notes.add(
            FindingKind.RESUMED_WRONG,
            Severity.CRITICAL,
            summary,
            "check that the training script uses its resume argument ([trainer] resume_args), then `podwatch start`",
        )
        now = self.context.tools.clock.monotonic()
        await self.recover(Finding(FindingKind.RESUMED_WRONG, Severity.CRITICAL, summary, now, confirmed=True))

    async def hand_over(self) -> None:
        """Stop training because another pod owns the run. The desired state stays: training can continue here once the
        other pod is gone."""
        standing = self.context.tools.standing
        if self.context.held() or not standing.stop:
            return
        if self.context.handle is not None:
            await self.stops.stop_tree(self.context.handle, standing.why_not)
        self.context.forget()
        await self.stops.handed_over()
        await self.context.close_open_incident(standing.why_not)
        self.context.show(Phase.STOPPED, standing.why_not)
        if standing.act is not LeaseAction.SUPERSEDED:
            await self.carry_on()  # waits until this pod can train again
