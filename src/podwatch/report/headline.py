"""The first line of every report: one sentence about the state of training. Pure."""

from podwatch.domain.finding import Severity
from podwatch.domain.outcome import ENDS_ON_ITS_OWN
from podwatch.domain.status_document import (
    Overall,
    PauseDocument,
    RecoveryView,
    Status,
    TrainingDocument,
    TrainingState,
)
from podwatch.domain.times import ago, local, span

NOT_BACKED_UP = "NOT BACKED UP: checkpoints exist on this pod only"
_HEALTHY = (TrainingState.RUNNING, TrainingState.STARTING, TrainingState.FINISHED)


def headline(status: Status) -> str:
    """What training does now, and what podwatch does about it. Where training is well and something else is critical,
    that comes first."""
    training, recovery = status.training, status.recovery
    if training is None or recovery is None:
        return "STATE OF TRAINING UNKNOWN: podwatch runs but cannot observe the trainer"
    text = _of_training(status, training, recovery)
    if status.overall is Overall.CRITICAL and training.state in _HEALTHY and training.trainer_ended_at is None:
        worst = next((r.summary for r in status.reasons if r.severity is Severity.CRITICAL), "")
        text = f"{worst}; {text}" if worst else text
    pause = None if status.daemon is None else status.daemon.pause
    return text if pause is None else f"{text}; {_paused(pause, status.time)}"


def age(status: Status, at: float | None) -> float | None:
    """Seconds from ``at`` to the status's own time, negative for the future; None if one of them is unknown."""
    return None if at is None or status.time is None else status.time - at


def _paused(pause: PauseDocument, now: float | None) -> str:
    if pause.held_by:
        end = f"until the GPUs are free (in use by {pause.held_by})"
    elif pause.until is None or now is None:
        end = "until `podwatch unpause`"
    else:
        end = f"until {local(pause.until, now)}"
    by = f" by {pause.by}" if pause.by else ""
    return f"podwatch is PAUSED {end}{by}{f' ({pause.reason})' if pause.reason else ''}"


def _of_training(status: Status, training: TrainingDocument, recovery: RecoveryView) -> str:
    match training.state:
        case TrainingState.RUNNING | TrainingState.STARTING | TrainingState.DOWN if training.trainer_ended_at:
            ended, step = ago(age(status, training.trainer_ended_at)), training.step
            last = "" if step is None else f", last step {step}"
            return f"TRAINER PROCESS ENDED {ended}, its launcher still runs{last}{_ending(recovery)}"
        case TrainingState.STARTING:
            up = age(status, training.started_at)
            return f"TRAINING IS STARTING{_from(recovery)}" + (f" (for {span(up)}, no step yet)" if up else "")
        case TrainingState.RUNNING:
            return _of_running(status, training, recovery)
        case TrainingState.RECOVERING:
            return _of_restart(status, training, recovery)
        case TrainingState.DOWN | TrainingState.GAVE_UP | TrainingState.BLOCKED:
            return _of_outage(status, training.state, recovery)
        case TrainingState.FINISHED:
            return _of_finish(status, training, recovery)
        case TrainingState.EVALUATING:
            return _of_evaluation(recovery)
        case TrainingState.STOPPED:
            why = f" ({recovery.detail})" if recovery.detail else ""
            return f"TRAINING IS STOPPED{why}; to start it: `podwatch start`"
        case TrainingState.UNKNOWN:
            return "STATE OF TRAINING UNKNOWN: podwatch runs but cannot observe the trainer"


def _of_running(status: Status, training: TrainingDocument, recovery: RecoveryView) -> str:
    since = age(status, training.step_at)
    if training.step_late and since is not None:
        usual = training.median_step_seconds
        pace = "" if usual is None else f" (usually {span(usual)})"
        saving = "; a checkpoint is being saved" if training.saving else ""
        late = f"NO STEP FOR {span(since)}{pace}; the trainer is alive, last step {training.step}{saving}"
        return late + _ending(recovery)
    at_step = "" if training.step is None else f" at step {training.step} ({ago(since)})"
    return f"TRAINING IS RUNNING{at_step}{_ending(recovery)}"


def _of_restart(status: Status, training: TrainingDocument, recovery: RecoveryView) -> str:
    again = age(status, recovery.next_try_at)
    if recovery.waiting and again is not None:
        return f"TRAINING IS DOWN; podwatch restarts it in {span(-again)}"
    if recovery.phase == "confirming" and training.alive:
        return f"TRAINING IS RESTARTING{_from(recovery)}; no step since the restart yet"
    doing = {"looking": "choosing the checkpoint", "stopping": "stopping processes"}.get(recovery.phase, recovery.phase)
    return f"TRAINING IS DOWN; podwatch is restarting it{_from(recovery)}" + (f" ({doing})" if doing else "")


def _of_outage(status: Status, state: TrainingState, recovery: RecoveryView) -> str:
    """Training is down, and podwatch does not restart it now."""
    if state is TrainingState.GAVE_UP:
        again = age(status, recovery.next_try_at)
        later = f"; podwatch tries again in {span(-again)}" if again is not None and again < 0 else ""
        return f"TRAINING IS DOWN and podwatch GAVE UP: fix the cause, then run `podwatch start`{later}"
    if state is TrainingState.BLOCKED:
        detail = recovery.detail or "something still holds the GPUs"
        if status.overall is Overall.WARNING:  # within the patience of a start
            return f"TRAINING IS NOT STARTED YET: {detail}"
        return f"TRAINING IS DOWN and BLOCKED: {detail}"
    why = next((r.summary for r in status.reasons if r.severity is Severity.CRITICAL), "")
    return "TRAINING IS DOWN" + (f": {why}" if why else "")


def _of_finish(status: Status, training: TrainingDocument, recovery: RecoveryView) -> str:
    waits = f": {recovery.detail}" if recovery.waiting else ""
    saved = None if status.checkpoints is None else status.checkpoints.newest_complete_step
    if training.step is not None:
        return f"TRAINING IS FINISHED (last step {training.step}){waits}"
    return f"TRAINING IS FINISHED{'' if saved is None else f' (newest checkpoint: step {saved})'}{waits}"


def _of_evaluation(recovery: RecoveryView) -> str:
    """While training is stopped for an evaluation; recovery's detail names it."""
    if recovery.phase == "stopping":
        return f"TRAINING STOPS {recovery.detail}; podwatch starts it again after that"
    why = recovery.detail.removeprefix("training is stopped ") or "for an evaluation"
    return f"TRAINING IS STOPPED {why}; podwatch then starts it again{_from(recovery)}"


def _from(recovery: RecoveryView) -> str:
    return "" if recovery.resumed_step is None else f" from step {recovery.resumed_step}"


def _ending(recovery: RecoveryView) -> str:
    if recovery.phase == "ending" and recovery.detail.endswith(ENDS_ON_ITS_OWN):
        return "; its last checkpoint is saved, and it ends on its own"
    ending = {"ending": "; podwatch STOPS it after its next save", "stopping": "; podwatch stops it"}
    return ending.get(recovery.phase, "")
