"""Recovery's acts, one at a time: recover, start, stop, finish.

Each act is a task that can be cancelled at any point. A cancelled act leaves the same open intents in the journal as a
killed podwatch, and the same code continues after both.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Final

from podwatch.detection.one_failure import reported
from podwatch.domain.errors import Busy, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.process import ProcessSample
from podwatch.domain.snapshot import Desired, Supervision
from podwatch.incidents import capture, decisive, plain, scrub, secret_values, since
from podwatch.journal import Journal
from podwatch.policy.restart import LOG_LINES_KEPT, Decision, Failure, after_failure
from podwatch.policy.resume import Choice
from podwatch.recovery import resources
from podwatch.recovery.attempt import Attempt
from podwatch.recovery.context import BLOCKED_POLL, meant_by
from podwatch.recovery.handover import Yielding
from podwatch.recovery.manual_start import PERSON_POLL
from podwatch.recovery.resume_point import NothingToResume, unfit
from podwatch.recovery.start import StartFailed
from podwatch.recovery.state import Phase
from podwatch.sensors.base import Wakeable
from podwatch.trainer.base import Look, TrainerHandle

EVIDENCE_SECONDS: Final = 10.0
"""Limit for the incident bundle. The restart does not wait longer: idle GPUs cost money."""
LOGS_SECONDS: Final = 5.0
"""Share of EVIDENCE_SECONDS for reading the ends of the logs."""
FREE_POLL: Final = 0.5
SAYS_WHY: Final = frozenset({FindingKind.TRAINER_EXITED, FindingKind.REQUIRED_CHILD_EXITED, FindingKind.SILENT_DEATH})
"""Kinds where a process ended: the last error in its logs is the reason. A hang logs none."""
LINE_SHOWN: Final = 150
GIVEN_UP_FIX: Final = "fix the cause, then run `podwatch start`"


class Acts(Yielding):
    """The acts. Only one runs at a time, and only it calls the methods here."""

    async def carry_on(self) -> None:
        """Finish interrupted work, then bring the pod to the desired state."""
        launcher = self.tools.launcher
        await self.recall()
        look = await launcher.look()
        stop = await self.reconcile(look)
        if stop is not None and self.waits:
            await self.cleared("the interrupted stop")
            return await self.carry_on()  # time has passed: look again
        if stop is not None and not self.held():
            handle = look.handle
            if handle is None:  # an attached trainer, found again by its process
                meant = meant_by(stop, look)
                if meant is None:
                    raise Busy(
                        "the trainer that podwatch was stopping has ended", fix="nothing: podwatch checks the pod again"
                    )
                handle = await launcher.attach(meant)
            await self.procedure.finish_stop(handle, stop.id, str(stop.data.get("why", "")))
            self.forget()
            look = await launcher.look()
        await self.per_desired(look)
        return None

    async def per_desired(self, look: Look) -> None:
        """Adopt a trainer that runs here; else start one, if training is wanted and a start is allowed."""
        settings = self.tools.settings
        if look.handle is not None:
            await self.adopt(look.handle)
            if look.handle.supervision is Supervision.KEEPER:
                await self.as_recorded()
        elif self.desired is not Desired.RUNNING:
            finished = self.desired is Desired.FINISHED
            self._show(
                Phase.FINISHED if finished else Phase.STOPPED,
                "training has finished" if finished else "stopped before podwatch started",
            )
            await self.notice(look)
        elif await self.take_over(look):
            return
        elif settings.mode == "observe":
            self._show(Phase.OBSERVING, "mode observe: podwatch starts nothing")
        elif settings.trainer.supervise == "attach" and self.memory.counted == "":
            await self._await_candidate()
        else:
            await self.wait_and_start()

    async def as_recorded(self) -> None:
        """Carry out a stop or a completion that an earlier podwatch recorded and did not finish."""
        if self.desired is Desired.RUNNING or not await self.cleared("the recorded stop"):
            return
        if self.desired is Desired.STOPPED:
            record = self.tools.record.current
            await self.stop_act("stop requested", above=record.stop_above if record is not None else None)
        elif self.desired is Desired.FINISHED:
            await self.finish_act(Finding(FindingKind.FINISHED, Severity.INFO, "training has finished", 0.0))

    async def _await_candidate(self) -> None:
        self._show(Phase.IDLE, "supervise = attach: podwatch waits until you start a trainer")
        while True:
            await self.tools.clock.sleep(BLOCKED_POLL)
            look = await self.tools.launcher.look()
            if look.handle is not None:
                return await self.adopt(look.handle)
            if await self.take_over(look):
                return None

    # -- recover ------------------------------------------------------------------------------------------------------

    async def recover_act(self, finding: Finding) -> None:
        """Restart training after a confirmed finding, or give up."""
        handle, attempt = self.handle, self.attempt
        if handle is None or self.held():
            return  # held since the decision: the finding comes again once podwatch can act
        await self.close_open_incident("training failed again after this restart")
        self.failed(finding, attempt)
        lines = tuple(self.tools.sensors.logs.last_lines(LOG_LINES_KEPT))
        tails = await self._log_tails(lines)
        self._find_log_line(finding, tails)
        decision = None
        if self.memory.counted != handle.start_id:
            decision = await self._count(handle.start_id, attempt, finding.kind, lines)
        incident = await self.tools.journal.run(
            Journal.open_incident,
            str(finding.kind),
            finding.summary + (f" ({self.cause_log})" if self.cause_log else ""),
            json.dumps(plain(finding.evidence)),
            self.cause_wall,
        )
        self._last_incident = incident.id
        healing = self.healing()
        told = (finding if healing is None else reported(healing)).summary
        gave_up = self.memory.history.gave_up
        self.tools.say(
            EventName.INCIDENT_OPENED,
            f"{told}. podwatch gave up restarting" if gave_up else told,
            Severity.CRITICAL,
            incident=incident.id,
            kind=str(finding.kind),
            gave_up=gave_up,
        )
        if decision is not None:
            self._report(decision, told, lines, attempt)

        async def evidence() -> None:
            await self._capture(incident.id, finding, handle, tails)

        await self.procedure.stop_tree(handle, finding.summary, before=evidence)
        seen = attempt.last_step if attempt is not None and attempt.steps_read else None
        self.forget()
        await self.wait_and_start(incident_id=incident.id, step_at_death=seen)

    def _find_log_line(self, finding: Finding, tails: Mapping[str, Sequence[str]]) -> None:
        """Keep the log line that explains the failure, for status and notifications. Only for a process that ended;
        lines of an earlier start do not count."""
        before, self._tails_before = self._tails_before, {name: tuple(lines[-3:]) for name, lines in tails.items()}
        if finding.kind not in SAYS_WHY:
            return
        best = decisive({name: since(before.get(name, ()), lines) for name, lines in tails.items()})
        if best is not None:
            name, line = best
            line = scrub(line, secret_values(self.tools.pod.environment()))
            shown = line if len(line) <= LINE_SHOWN else _cut(line[:LINE_SHOWN])
            self.cause_log = f'{name}: "{shown}"'

    async def _count(
        self,
        start_id: str,
        attempt: Attempt | None,
        kind: FindingKind,
        lines: tuple[str, ...],
        needs_person: str = "",
    ) -> Decision:
        """Decide what follows this failure and record it, once per start. ``_report`` reports it."""
        tools, memory = self.tools, self.memory
        failure = Failure(
            kind=kind,
            at=tools.clock.monotonic(),
            loaded=attempt is not None and attempt.loaded,
            made_step=attempt is not None and attempt.made_step and kind is not FindingKind.RESUMED_WRONG,
            resumed_from=attempt.resumed_from if attempt is not None else None,
            last_lines=lines,
            needs_person=needs_person,
            machine_fault=self.machine_fault,
        )
        decision = after_failure(memory.history, failure, tools.policies.restart, tools.jitter.random())
        memory.history, memory.counted = decision.history, start_id
        memory.next_try_wall = tools.clock.wall() + decision.delay_seconds if decision.delay_seconds > 0 else None
        if decision.step_back and failure.resumed_from is not None:
            memory.below = failure.resumed_from
        self.why_gave_up = decision.reason if memory.history.gave_up else ""
        await self.procedure.remember()
        self._show(self._phase, decision.reason)
        return decision

    def _report(self, decision: Decision, cause: str, lines: tuple[str, ...], attempt: Attempt | None) -> None:
        """Report the decision. ``cause``: the failure as a sentence without its full stop."""
        step = attempt.resumed_from if attempt is not None else None
        if decision.step_back and step is not None:
            self.tools.say(
                EventName.STEPPED_BACK,
                f"podwatch resumes from a checkpoint below step {step}: {decision.reason}. Step"
                f" {step} is moved to quarantine; `podwatch quarantine list` shows it",
                Severity.WARNING,
                step=step,
            )
        if decision.history.gave_up:
            self.note(FindingKind.GAVE_UP, Severity.CRITICAL, *given_up(decision.reason, lines))
            text = f"{cause}. podwatch gave up: {decision.reason}. To continue: {GIVEN_UP_FIX}"
            self.tools.say(EventName.GAVE_UP, text, Severity.CRITICAL)

    async def _capture(
        self, incident_id: int, finding: Finding | None, handle: TrainerHandle, tails: Mapping[str, Sequence[str]]
    ) -> None:
        """Write the incident bundle. A failure here never delays the restart."""
        tools = self.tools
        environment = tools.pod.environment()
        tree: tuple[ProcessSample, ...] = ()
        try:
            async with asyncio.timeout(EVIDENCE_SECONDS):
                reading = await handle.tree()
            tree = reading.value or ()
            path = await tools.evidence.call(
                lambda: capture(
                    tools.incidents_dir / str(incident_id),
                    snapshots=tuple(self.snapshots),
                    finding=finding,
                    tree=tree,
                    log_tails=tails,
                    gpu_state=tools.gpus.latest(),
                    environment_names=tuple(environment),
                    secrets=secret_values(environment),
                ),
                timeout=EVIDENCE_SECONDS,
            )
        except (OSError, PodwatchError, ValueError) as error:  # a timeout is an OSError
            tools.say(EventName.INCIDENT_OPENED, f"cannot write the incident bundle: {error}", Severity.WARNING)
            return
        await tools.journal.run(Journal.update_incident, incident_id, bundle=str(path))

    async def _log_tails(self, lines: tuple[str, ...]) -> dict[str, Sequence[str]]:
        """Return the end of every log: the next start overwrites the engine's. If the disk hangs, only the logs are
        missing from the bundle."""
        found: Mapping[str, Sequence[str]] = {}
        try:
            found = await self.tools.evidence.call(self.tools.sensors.logs.log_tails, timeout=LOGS_SECONDS)
        except TimeoutError:
            self.tools.evidence.renew()
        except (OSError, PodwatchError):
            pass
        return {"trainer.log": lines, **found}

    # -- start --------------------------------------------------------------------------------------------------------

    async def wait_and_start(self, *, incident_id: int | None = None, step_at_death: int | None = None) -> None:
        """Wait out the backoff, then start. Returns without a start when no further try is allowed."""
        if await self._found_while_blocked():
            return
        if await self.cleared("the start") and await self._pause():
            await self.start_act(incident_id=incident_id, step_at_death=step_at_death)

    async def _found_while_blocked(self) -> bool:
        """Wait while no restart can be recorded. Return True if podwatch now watches a trainer that an operator
        started."""
        began = self.tools.clock.monotonic()
        while self.blocked() and self.held() == self.blocked():
            self._show(Phase.BLOCKED, f"the start is pending: {self.blocked()}")
            await self.tools.clock.sleep(BLOCKED_POLL)
            if self.tools.clock.monotonic() - began >= PERSON_POLL:
                began = self.tools.clock.monotonic()
                if await self.take_over(await self.tools.launcher.look()):
                    return True
        return False

    async def _pause(self) -> bool:
        """Wait until the next try is due. Return whether there is one."""
        tools, memory = self.tools, self.memory
        due = memory.next_try_wall
        if memory.history.gave_up:
            why = self.why_gave_up or "podwatch gave up restarting"
            self._show(Phase.GAVE_UP, why)
            await self._settle_given_up(why)
            if FindingKind.GAVE_UP not in {f.kind for f in self._notes.values()}:
                self.note(FindingKind.GAVE_UP, Severity.CRITICAL, "podwatch gave up restarting", GIVEN_UP_FIX)
            if tools.settings.recovery.on_give_up == "exit":
                self.exit_code = 86
                self.exit_requested.set()
                return False
            if due is None:
                return False
        if due is not None:
            most = max(tools.policies.restart.backoff_max_seconds, tools.policies.restart.retry_after_give_up_seconds)
            pause = min(max(0.0, due - tools.clock.wall()), most)
            if pause > 0:
                if not memory.history.gave_up:
                    self._show(Phase.BACKOFF, self._detail)
                    tools.say(
                        EventName.RECOVERY_BACKOFF,
                        f"podwatch tries to start training again in {pause:.0f} s",
                        seconds=round(pause, 1),
                    )
                if await self._started_meanwhile(pause):
                    return False
            memory.next_try_wall = None
            await self.procedure.remember()
        return True

    async def _settle_given_up(self, why: str) -> None:
        """Close the incident: nothing more is in progress. A later try that succeeds is recorded in it."""
        incident = await self.tools.journal.run(Journal.current_incident)
        if incident is not None:
            self.close_incident(incident.id, f"podwatch gave up: {why}", over=False)

    async def _started_meanwhile(self, pause: float) -> bool:
        """Wait ``pause`` seconds. Return True as soon as podwatch watches a trainer that an operator started
        meanwhile."""
        clock = self.tools.clock
        end = clock.monotonic() + pause
        while (left := end - clock.monotonic()) > 0:
            await clock.sleep(min(left, PERSON_POLL))
            if left > PERSON_POLL and await self.someone_there(await self.tools.launcher.look()):
                self.clear(FindingKind.GAVE_UP)
                return True
        return False

    async def start_act(self, *, incident_id: int | None = None, step_at_death: int | None = None) -> None:
        """Wait until GPUs and ports are free, choose the step, prepare and start; or take over a trainer that an
        operator started meanwhile."""
        try:
            await self._start_act(incident_id, step_at_death)
        finally:
            self.chosen = None

    async def _start_act(self, incident_id: int | None, step_at_death: int | None) -> None:
        while True:
            if not await self.cleared("the start") or await self.elsewhere() or await self._until_free():
                return
            if self.tools.record.current is None:  # unreadable when podwatch started: its desired state counts
                await self.recall()
                if self.desired is not Desired.RUNNING:
                    await self.per_desired(await self.tools.launcher.look())
                    return
            self._show(Phase.LOOKING, "choosing the step to start from")
            choice = await self._choose()
            if choice is None:
                return
            self.chosen = choice.step
            if self.held():
                continue
            if choice.source == "store":
                await self.procedure.fetch(choice)
                why = await self.procedure.misfit(choice.step)
                if why and self.memory.wanted is None:
                    self._needs_person(NothingToResume(unfit(choice, why)))
                    return
            # The download may have taken an hour: look again before touching the trainer's files.
            if await self.someone_there(await self.tools.launcher.look()):
                return
            if not await self.procedure.still_there(choice):
                continue  # pruned just before it was protected: choose again
            if self.held() or self.not_here():
                continue  # paused, or the run belongs to another pod now: wait, then choose again
            lost_seconds = self.lost_seconds(choice.step)
            try:
                handle, attempt = await self.procedure.start(choice)
            except Busy as error:
                self._show(Phase.BLOCKED, str(error))
                await self.tools.clock.sleep(BLOCKED_POLL)
                continue
            except StartFailed as error:
                incident_id = await self._could_not_start(error, choice.step)
                if not await self._pause():
                    return
                continue
            break
        if incident_id is None:  # an earlier podwatch may have opened one and ended before the restart
            current = await self.tools.journal.run(Journal.current_incident)
            incident_id = current.id if current is not None else None
        attempt.incident_id, attempt.step_at_death = incident_id, step_at_death
        attempt.lost_seconds = lost_seconds
        self.clear(FindingKind.BLOCKED, FindingKind.FOREIGN_CHECKPOINTS, FindingKind.RESUME_UNCONFIRMED)
        self.unconfirmed = False
        self._say_stepped_back(choice)
        self.watch(handle, attempt)
        self._show(Phase.CONFIRMING, f"started from step {choice.step}" if choice.step is not None else "started fresh")

    def _say_stepped_back(self, choice: Choice) -> None:
        """Report the skipped checkpoint and its quarantine, while training runs from the older one."""
        below, number = self.memory.below, self.procedure.quarantine_number
        self.clear(FindingKind.STEPPED_BACK)
        if below is None or choice.step is None or number is None:
            return
        self.note(
            FindingKind.STEPPED_BACK,
            Severity.WARNING,
            f"resuming from step {below} failed, so training continues from step {choice.step}. Step {below} is kept"
            f" in quarantine {number}",
            f"nothing to do; to return to it: `podwatch stop-training`, `podwatch quarantine return {number}`,"
            f" `podwatch start --step {below}`",
        )

    async def _choose(self) -> Choice | None:
        """Return the step to start from; None if the operator has to decide, which is then reported."""
        memory = self.memory
        try:
            return await self.procedure.choose(wanted=memory.wanted, fresh=memory.fresh, below=memory.below)
        except NothingToResume as error:
            problem = error
        if memory.below is not None and memory.wanted is None:
            # No older checkpoint is usable: the one that failed is better than none.
            memory.below = None
            return await self._choose()
        self._needs_person(problem)
        return None

    def _needs_person(self, problem: NothingToResume) -> None:
        kind = FindingKind.FOREIGN_CHECKPOINTS if self._foreign(problem) else FindingKind.BLOCKED
        self._show(Phase.BLOCKED, str(problem))
        self.note(kind, Severity.CRITICAL, problem.what, problem.fix)
        self.tools.say(EventName.RECOVERY_BLOCKED, str(problem), Severity.CRITICAL)

    async def _could_not_start(self, error: StartFailed, step: int | None) -> int:
        """Record that the command did not run: a failed start, not a bad checkpoint. Return the incident's id."""
        self._asked_for = False  # the next tries are podwatch's own, not the operator's request
        await self.close_open_incident("the command could not be started")
        start_id = f"failed-{self.tools.clock.wall():.3f}"
        attempt = Attempt(start_id, self.tools.clock.monotonic(), step)
        incident = await self.tools.journal.run(Journal.open_incident, "start-failed", str(error))
        self._last_incident = incident.id
        needs_person = error.what if error.needs_person else ""
        decision = await self._count(start_id, attempt, FindingKind.TRAINER_EXITED, (str(error),), needs_person)
        gave_up = self.memory.history.gave_up
        self.tools.say(EventName.INCIDENT_OPENED, str(error), Severity.CRITICAL, incident=incident.id, gave_up=gave_up)
        self.note(FindingKind.BLOCKED, Severity.CRITICAL, error.what, error.fix)
        self._report(decision, f"The training command could not be started: {error.what}", (str(error),), attempt)
        return incident.id

    @staticmethod
    def _foreign(error: NothingToResume) -> bool:
        return error.choice.unowned

    async def _until_free(self) -> bool:
        """Wait until GPU memory and ports are free. Return True if a trainer was found instead."""
        tools = self.tools
        began, told = tools.clock.monotonic(), ""
        patience = tools.settings.gpu.release_wait
        configured = bool(tools.settings.gpu.inference or tools.settings.gpu.trainer)
        while True:
            if isinstance(tools.gpus, Wakeable):  # its next poll may be seconds away, and idle GPUs cost money
                tools.gpus.wake()
            look = await tools.launcher.look()
            if await self.someone_there(look):
                return True
            free = self.procedure.free(self._free_since)
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
                free = await tools.blocking(resources.named, free, look.holders)
            held = "; ".join(free.holders) or "GPU memory has not been observed yet"
            self._show(Phase.BLOCKED if over else Phase.STARTING, f"waiting: {held}")
            if over:
                text, by_hand = f"cannot start training yet: {held}", "end the process that holds it"
                fix = f"{by_hand}, or run `podwatch clean --gpu`" if free.holders else "run `podwatch check`"
                self.note(FindingKind.BLOCKED, Severity.CRITICAL, text, fix)
                if told != held:
                    tools.say(EventName.RECOVERY_BLOCKED, text, Severity.CRITICAL)
                told = held
            await tools.clock.sleep(BLOCKED_POLL if over else FREE_POLL)
        self.clear(FindingKind.BLOCKED)
        self.procedure.waited = tools.clock.monotonic() - began
        await self.procedure.clear_litter()
        return False

    # -- again --------------------------------------------------------------------------------------------------------

    async def restart_act(self, why: str) -> None:
        """Restart because the operator requested it: not counted as a failure."""
        if self.handle is not None:
            await self.procedure.stop_tree(self.handle, why)
        self.forget()
        await self.start_act()

    async def resumed_wrong_act(self, summary: str) -> None:
        """Stop a trainer that did not continue from the step it was given. Keep that step and those above, and never
        resume from them automatically."""
        if self.held():
            return
        attempt = self.attempt
        step = attempt.resumed_from if attempt is not None else None
        if step is not None:
            known = {s.step for s in self.tools.catalogue.sets if s.step >= step} | {step}
            self.memory.refused.update(dict.fromkeys(known, f"training resumed wrongly from step {step}"))
            await self.procedure.remember()
        self.note(
            FindingKind.RESUMED_WRONG,
            Severity.CRITICAL,
            summary,
            "check the checkpoint and [trainer] resume_args; `podwatch start --step N` resumes from it anyway",
        )
        now = self.tools.clock.monotonic()
        await self.recover_act(Finding(FindingKind.RESUMED_WRONG, Severity.CRITICAL, summary, now, confirmed=True))


def _cut(text: str) -> str:
    """Cut ``text`` after its last whole sentence if that keeps a third of it, else after its last whole word."""
    sentence = text.rpartition(". ")[0]
    if 3 * len(sentence) >= len(text):
        return f"{sentence}. ..."
    return f"{text.rpartition(' ')[0] or text} ..."


def given_up(reason: str, lines: Sequence[str]) -> tuple[str, str]:
    """Summary and suggestion of the finding ``gave-up``. ``lines``: the trainer's last output."""
    shown = "".join(f"\n  {line}" for line in lines[-LOG_LINES_KEPT:])
    return (
        f"podwatch gave up: {reason}",
        f"{GIVEN_UP_FIX}; podwatch still guards the checkpoints"
        + (f". The trainer's last lines:{shown}" if shown else ""),
    )
