"""Recovery: keep one trainer in the state that its operator wants."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

from podwatch.config.settings import Settings
from podwatch.detection.one_failure import cost
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.errors import ConfigurationError, HostError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Finding, FindingKind, Severity, Verdict
from podwatch.domain.policy import Policies
from podwatch.domain.run import IntentKind, Lineage, RunRecord
from podwatch.domain.snapshot import Desired, Snapshot
from podwatch.journal import Journal
from podwatch.policy.restart import MACHINE_FAULTS, MACHINE_RULES, ConfirmationState, succeeded
from podwatch.recovery import quarantine, start_plan
from podwatch.recovery import remembered as memory_module
from podwatch.recovery.requests import Requests
from podwatch.recovery.start import Procedure
from podwatch.recovery.state import Phase, Tools, newest_step
from podwatch.system.pinned import RootReplaced
from podwatch.trainer.base import Candidate

REMEMBER_EVERY = 60.0
"""Seconds between two journal records that a step was made; losing a minute only delays the end of a failure streak."""


class Recovery(Requests):
    """One per run: call ``begin`` once, ``consider`` at every tick of the sensing loop, ``close`` at the end.

    ``exit_requested`` is set, with ``exit_code`` 86, when the run was given up and ``on_give_up = "exit"``.
    """

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self.opening = ""
        """The first line that podwatch prints about this run; set by ``begin``."""
        self._remembered_at = 0.0
        self._reported: set[str] = set()

    # -- life ---------------------------------------------------------------------------------------------------------

    async def begin(self, *, adopt_existing: bool = False, by_hand: str = "") -> None:
        """Continue what an earlier podwatch left, then adopt, attach or start as wanted. Returns soon: longer work
        continues as an act. ``by_hand``: id of the `podwatch run` that an operator typed; the first begin
        with it does not wait out a backoff. Raises ConfigurationError when output_dir belongs to another run."""
        tools = self.tools
        self.memory = await memory_module.load(tools.journal, tools.clock)
        self.procedure = Procedure(tools, self.memory, self._show)
        if adopt_existing:
            self.memory.adopted = True
            await self.procedure.remember()
        if by_hand and by_hand != self.memory.by_hand:
            self.memory.by_hand = by_hand
            self.memory.next_try_wall = None
            self.memory.history = replace(self.memory.history, gave_up_at=None)
            await self.procedure.remember()
        if tools.settings.recovery.on_give_up == "exit" and self.memory.history.gave_up:
            # Whoever starts podwatch again on this machine wants another try now, not in an hour.
            self.memory.history = replace(self.memory.history, gave_up_at=None)
            self.memory.next_try_wall = None
        with contextlib.suppress(RootReplaced):  # ``carry_on`` reads it later, before any start
            await self._record(adopt_existing)
        await tools.blocking(quarantine.make_spare, tools.workspace)
        _, foreign = await self.procedure.ours()
        if tools.record.current is not None and any(s.complete for s in foreign):
            steps = ", ".join(str(s.step) for s in foreign if s.complete)
            self.note(
                FindingKind.FOREIGN_CHECKPOINTS,
                Severity.WARNING,
                f"podwatch does not use checkpoints from before its first start here: step {steps}",
                "run `podwatch run --adopt-existing` to use them, or `podwatch clean` to move them to quarantine",
            )
        self._show(Phase.LOOKING)
        look = await tools.launcher.look()
        intents = await tools.journal.run(Journal.open_intents)
        self.seen_here = look.handle is not None or any(i.kind in (IntentKind.STOP, IntentKind.START) for i in intents)
        stops = {str(i.data.get("start_id")) for i in intents}
        if look.handle is not None and look.handle.start_id not in stops:
            # The common case, an upgrade: watch again before anything else happens.
            await self.reconcile(look)
            await self.adopt(look.handle)
            status = await look.handle.exit_status()
            self.opening = (
                f"took over the running trainer (pid {look.handle.launcher.pid})"
                if status is None
                else f"training ended while podwatch was not running ({status.describe()})"
            )
            if self.desired is not Desired.RUNNING:
                self.spawn(self.as_recorded)
            return
        self.opening = self._opening(bool(look.handle), len(look.candidates), look.pending)
        self.spawn(self.carry_on)

    def _opening(self, half_stopped: bool, candidates: int, pending: Sequence[Candidate] = ()) -> str:
        if half_stopped:
            return "finishing an interrupted stop or start"
        beside = f" (trainers that podwatch did not start: {candidates}; see `podwatch status`)" if candidates else ""
        if self.desired is Desired.STOPPED:
            return f"training is stopped and stays stopped until `podwatch start`{beside}"
        if self.desired is Desired.FINISHED:
            return f"training has finished; `podwatch start` continues it{beside}"
        if candidates == 1:
            return "watching a trainer that podwatch did not start"
        if candidates:
            return f"{candidates} running trainers could be this run's: see `podwatch status`"
        if pending and not self.held():
            return f"not starting training yet beside pid {pending[0].launcher.pid}: {pending[0].reason}"
        if self.held():
            return f"no training is running, and podwatch starts none ({self.held()})"
        if self.memory.history.gave_up:
            return "podwatch gave up restarting training; it still guards the checkpoints"
        return "no training is running: starting it"

    def owns(self, found: CheckpointSet) -> bool:
        """Return whether this checkpoint belongs to the run; others are not uploaded either."""
        return self.procedure.owns(found)

    @property
    def fetched(self) -> frozenset[tuple[int, str]]:
        """(step, save_id) of every checkpoint that came from the store, as last read from the journal."""
        return self.procedure.fetched

    async def recall(self) -> None:
        if self.tools.record.current is None:
            await self._record(self.memory.adopted)

    def read_again(self) -> None:
        """Read the run record, now that podwatch's own directory is back; needed even if nothing is to be started."""
        if self.tools.record.current is None and self.ready:
            self.spawn(self.recall)

    async def _record(self, adopt_existing: bool) -> None:
        tools = self.tools
        run_id = tools.settings.run_id
        try:
            record = await tools.blocking(tools.record.load)
        except RootReplaced:
            raise  # another user's directory: the record is read after the repair
        except HostError as error:
            tools.record.problem = str(error)  # the desired state is unknown, so nothing is started (see Footing)
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
                await self.procedure.save_record(new)
            except RootReplaced:
                raise
            except HostError as error:
                tools.record.problem, tools.record.current = str(error), new

    async def close(self) -> None:
        """Stop watching; training continues. The next podwatch finishes interrupted work."""
        self._closed = True
        for task in (self._comparing, self._descending):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        task, self._act = self._act, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])
        await self.procedure.remember()
        self.tools.files.close()
        self.tools.evidence.close()

    def reconfigure(self, settings: Settings, policies: Policies) -> None:
        """Use new settings from the next act on; the current act keeps the old ones."""
        observed = self.tools.settings.mode == "observe"
        self.tools = self.procedure.tools = replace(self.tools, settings=settings, policies=policies)
        self.command_looked_at = float("-inf")
        if observed and settings.mode == "act" and self.handle is None and self.ready:
            self.spawn(self.carry_on)  # mode observe only reported it

    # -- the sensing loop ---------------------------------------------------------------------------------------------

    @property
    def asks_whose(self) -> bool:
        """Whether a start waits to be confirmed by a save or a file that another process may have written."""
        return self._phase is Phase.CONFIRMING and self.attempt is not None and bool(self.attempt.unproven)

    def findings(self) -> tuple[Finding, ...]:
        """Return recovery's own findings."""
        stuck = self.procedure.stuck if self.acting else ()
        if not stuck:
            return tuple(self._notes.values())
        text = "podwatch cannot end the old trainer; these processes are stuck: " + "; ".join(stuck)
        fix = "wait: training starts when they are gone; if they stay, reboot or use another machine"
        return (
            *self._notes.values(),
            Finding(FindingKind.BLOCKED, Severity.CRITICAL, text, self._since, fix, subject="stuck"),
        )

    def consider(self, snapshot: Snapshot, findings: Sequence[Finding]) -> None:
        """Run one tick: update the current attempt, and act on a confirmed verdict. Never blocks."""
        self.snapshots.append(snapshot)
        self._watch_attempt(snapshot)
        self.compare_soon(snapshot.at)
        self.descend_soon()
        self.holds_again()
        sample = snapshot.trainer.value
        if self.handle is not None and sample is not None and sample.start_id == self.handle.start_id:
            self.hear_of_death(tuple(findings))
            self._see_machine(findings)
        if not self.ready or self.handle is None:
            return self.look_out(snapshot)
        if self.must_yield():
            return self.spawn(self.yield_act)
        if sample is None or sample.start_id != self.handle.start_id:
            return None  # a snapshot of another start: its findings do not apply to this one
        for finding in findings:
            if finding.verdict is Verdict.NONE or not finding.confirmed:
                continue
            if self.held():
                self._only_report(finding)
            elif finding.verdict is Verdict.FINISH:
                return self.spawn(lambda f=finding: self.finish_act(f))  # type: ignore[misc]
            elif finding.verdict is Verdict.STOP:
                if self.desired is Desired.RUNNING:
                    return self.spawn(lambda f=finding: self.stop_sick_act(f))  # type: ignore[misc]
            elif self.desired is not Desired.RUNNING:
                return self.spawn(lambda: self.stop_act("the trainer ended, and training is not wanted any more"))
            elif self.tools.settings.trainer.command:
                return self.spawn(lambda f=finding: self.recover_act(f))  # type: ignore[misc]
            else:
                self.note(
                    FindingKind.UNGUARDED,
                    Severity.CRITICAL,
                    f"{finding.summary}; podwatch cannot restart training: [trainer] command is not configured",
                    "set [trainer] command",
                )
        return self.look_out(snapshot)

    def _see_machine(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            rule = finding.subject if finding.kind is FindingKind.LOG_RULE else ""
            if finding.kind in MACHINE_FAULTS or rule in MACHINE_RULES:
                self.machine_fault = finding.summary

    def _only_report(self, finding: Finding) -> None:
        mark = f"{self.handle.start_id if self.handle else ''}:{finding.key}"
        if mark not in self._reported:
            self._reported.add(mark)
            self.tools.say(
                EventName.FINDING_RAISED,
                f"{self.held()}: would {finding.verdict} because {finding.summary}",
                Severity.WARNING,
                kind=str(finding.kind),
            )

    def _watch_attempt(self, snapshot: Snapshot) -> None:
        attempt, settings = self.attempt, self.tools.settings
        if attempt is None:
            return
        sample = snapshot.trainer.value
        if sample is not None and sample.start_id not in ("", attempt.start_id):
            return
        gpus = (*settings.gpu.inference, *settings.gpu.trainer)
        if attempt.see(snapshot, self.memory.gpu_base, gpus, self.tools.pod.beside):
            self._step_made()
        if self._phase is Phase.CONFIRMING and self.ready:
            self._confirm(snapshot)
        if self.unconfirmed and (newest_step(self.tools.catalogue.sets) or -1) > (self.unconfirmed_above or -1):
            self.unconfirmed = False
            self.clear(FindingKind.RESUME_UNCONFIRMED)

    def _step_made(self) -> None:
        memory, now = self.memory, self.tools.clock.monotonic()
        changed = not memory.history.ever_worked or memory.below is not None or memory.history.gave_up
        memory.history = replace(succeeded(memory.history, now, self.tools.policies.restart), gave_up_at=None)
        memory.below = None
        self.clear(FindingKind.GAVE_UP)
        if changed or now - self._remembered_at >= REMEMBER_EVERY:
            self._remembered_at = now
            self.remember_soon()

    def _confirm(self, snapshot: Snapshot) -> None:
        attempt = self.attempt
        if attempt is None:
            return
        answer = attempt.confirmation(snapshot.at, self.tools.settings.trainer.startup_patience)
        if answer.state is ConfirmationState.CONFIRMED:
            self._confirmed(answer.step)
        elif answer.state is ConfirmationState.UNCONFIRMED:
            self.cause = None
            self.unconfirmed = True
            self.unconfirmed_above = newest_step(self.tools.catalogue.sets)
            self._show(Phase.RUNNING, "podwatch found no step number: it deletes nothing before the next save")
            start = (
                "the fresh start" if attempt.resumed_from is None else f"the resume from step {attempt.resumed_from}"
            )
            self.note(
                FindingKind.RESUME_UNCONFIRMED,
                Severity.WARNING,
                f"podwatch could not confirm {start}: it found no step number in the trainer's output. It deletes no"
                " checkpoint on this pod before the next save",
                "check `podwatch logs` for the step; set [trainer] logs if the trainer writes its steps elsewhere",
            )
        elif answer.state is ConfirmationState.RESUMED_WRONG:
            text = (
                f"training should continue from step {attempt.resumed_from}, but reported step {answer.step}"
                f" ({', '.join(answer.sources)})"
            )
            if self.held():
                self.note(
                    FindingKind.RESUMED_WRONG, Severity.CRITICAL, f"{text}; podwatch does not stop it ({self.held()})"
                )
                return
            self.spawn(lambda: self.resumed_wrong_act(text))

    def _confirmed(self, step: int | None) -> None:
        attempt, tools = self.attempt, self.tools
        if attempt is None:
            return
        where = "the beginning" if attempt.resumed_from is None else f"step {attempt.resumed_from}"
        source = f"started from {where}" if attempt.resumed_from is None else f"resumed from {where}"
        self._show(Phase.RUNNING, f"the start is confirmed at step {step} ({source})")
        self.memory.confirmed = attempt.start_id
        cause_wall = self.cause_wall if self.cause is not None else None
        self.cause = None
        self.clear(FindingKind.RESUMED_WRONG, FindingKind.BLOCKED)
        self.remember_soon()
        lost = None
        if attempt.step_at_death is not None and not self.uncounted(attempt.resumed_from):
            lost = attempt.step_at_death - (attempt.resumed_from or 0)
            lost = lost if lost >= 0 else None  # the checkpoint is above every step seen: the loss is unknown
        text = f"Training continues at step {step} ({source})"
        if attempt.resumed_from == step:  # a trainer that first reports the step it loaded
            text = f"Training continues from step {step}"
        if attempt.incident_id is not None:
            down = None if cause_wall is None else max(0.0, tools.clock.wall() - cause_wall)
            text += cost(lost, attempt.lost_seconds, down)
        tools.say(EventName.TRAINER_CONFIRMED, text, step=step)
        if attempt.incident_id is not None:
            self.close_incident(
                attempt.incident_id,
                f"restarted from {where}",
                resumed=attempt.resumed_from,
                lost=lost,
                message=text,
            )
