"""What is seen of the current attempt to train: whether it makes steps, and whether its start is confirmed.

It runs in the sensing loop and never blocks; what follows from it is decided by the table (``decide.py``).
"""

from dataclasses import replace

from podwatch.checkpoints.second_writer import Beside
from podwatch.detection.merge import cost
from podwatch.domain.event import EventName
from podwatch.domain.finding import Finding, FindingKind, Severity, Verdict
from podwatch.domain.run_state import RunState
from podwatch.domain.snapshot import Snapshot
from podwatch.recovery.actions import Phase
from podwatch.recovery.confirm_resume import ConfirmationState
from podwatch.recovery.context import RecoveryContext
from podwatch.recovery.restart_budget import succeeded
from podwatch.recovery.state import newest_step

REMEMBER_EVERY = 60.0
"""Seconds between two records that a step was made; losing a minute only delays the end of a failure streak."""


class AttemptFollower:
    """Follows the current attempt to train: steps made, and whether the start is confirmed."""

    def __init__(self, context: RecoveryContext) -> None:
        self.context = context
        self._remembered_at = 0.0
        self.resumed_wrong: Finding | None = None
        """About the watched trainer."""

    def watch(self, snapshot: Snapshot, beside: Beside) -> None:
        """Update the current attempt; never blocks."""
        attempt, settings = self.context.attempt, self.context.tools.settings
        self.resumed_wrong = None
        if attempt is None:
            return
        sample = snapshot.trainer.value
        if sample is not None and sample.start_id not in ("", attempt.start_id):
            return
        gpus = (*settings.gpu.inference, *settings.gpu.trainer)
        run = self.context.run
        made = attempt.see(snapshot, run.gpu_base, gpus, beside)
        # A step that is read only after its start was counted as failed was made before that: it proves nothing.
        if made and (not attempt.start_id or not self.context.is_counted(attempt.start_id)):
            self._step_made()
        start = run.start(attempt.start_id)
        held = self.context.phase in (Phase.PAUSED, Phase.OBSERVING) and (start is None or not start.confirmed)
        if self.context.phase is Phase.CONFIRMING or (held and not self.context.unconfirmed):
            self._confirm(snapshot)
        if self.context.unconfirmed and (newest_step(self.context.tools.catalogue.sets) or -1) > (
            self.context.unconfirmed_above or -1
        ):
            self.context.unconfirmed = False
            self.context.notes.clear(FindingKind.RESUME_UNCONFIRMED)

    def _step_made(self) -> None:
        run, now = self.context.run, self.context.tools.clock.monotonic()
        changed = not run.history.ever_worked or run.below is not None or run.history.gave_up
        recovery = self.context.tools.settings.recovery

        def made(run: RunState) -> RunState:
            history = replace(succeeded(run.history, now, recovery), gave_up_at=None)
            return replace(run, history=history, below=None if changed else run.below)

        self.context.notes.clear(FindingKind.GAVE_UP)
        self.context.tools.run_file.note(made)
        if changed or now - self._remembered_at >= REMEMBER_EVERY:
            self._remembered_at = now
            self.context.tools.run_file.record_soon()

    def _confirm(self, snapshot: Snapshot) -> None:
        attempt = self.context.attempt
        if attempt is None:
            return
        answer = attempt.confirmation(snapshot.at, self.context.tools.settings.trainer.startup_patience)
        if answer.state is ConfirmationState.CONFIRMED:
            self._confirmed(answer.step)
        elif answer.state is ConfirmationState.UNCONFIRMED:
            self.context.failure = None
            self.context.unconfirmed = True
            self.context.unconfirmed_above = newest_step(self.context.tools.catalogue.sets)
            self.context.show(Phase.RUNNING, "podwatch found no step number: it deletes nothing before the next save")
            start = (
                "the fresh start" if attempt.resumed_from is None else f"the resume from step {attempt.resumed_from}"
            )
            self.context.notes.add(
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
            now = self.context.tools.clock.monotonic()
            kind, critical = FindingKind.RESUMED_WRONG, Severity.CRITICAL
            if self.context.held():
                self.context.notes.add(kind, critical, f"{text}; podwatch does not stop it ({self.context.held()})")
            self.resumed_wrong = Finding(kind, critical, text, now, verdict=Verdict.RESTART, confirmed=True)

    def _confirmed(self, step: int | None) -> None:
        attempt, tools = self.context.attempt, self.context.tools
        if attempt is None:
            return
        where = "the beginning" if attempt.resumed_from is None else f"step {attempt.resumed_from}"
        source = f"started from {where}" if attempt.resumed_from is None else f"resumed from {where}"
        self.context.show(Phase.RUNNING, f"the start is confirmed at step {step} ({source})")
        cause_wall = self.context.failure.wall if self.context.failure is not None else None
        self.context.failure = None
        self.context.notes.clear(FindingKind.RESUMED_WRONG, FindingKind.BLOCKED)
        self.context.tools.run_file.note(lambda run: run.with_start(attempt.start_id, confirmed=True))
        self.context.tools.run_file.record_soon()
        lost = self.context.lost_steps(attempt.step_at_death, attempt.resumed_from)
        text = f"Training continues at step {step} ({source})"
        if attempt.resumed_from == step:  # a trainer that first reports the step it loaded
            text = f"Training continues from step {step}"
        if attempt.incident_id is not None:
            down = None if cause_wall is None else max(0.0, tools.clock.wall() - cause_wall)
            text += cost(lost, attempt.lost_seconds, down)
        tools.say(EventName.TRAINER_CONFIRMED, text, step=step)
        if attempt.incident_id is not None:
            self.context.close_incident(
                attempt.incident_id,
                f"restarted from {where}",
                resumed=attempt.resumed_from,
                lost=lost,
                message=text,
            )
