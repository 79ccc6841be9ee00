"""The first line of the status, one sentence about the state of training; and how the fields of a status document are
read. Pure.

The document can be of any version of the daemon: unknown and missing fields are ignored. Control characters are removed
from every value, because the trainer wrote some of them.
"""

from collections.abc import Mapping
from typing import Any

from podwatch.client.times_and_sizes import ago, from_rfc3339, local, span

# -- the document ------------------------------------------------------------------------------------------------------

Document = Mapping[str, Any]


def clean(value: object) -> str:
    """One line without control characters."""
    text = "" if value is None else str(value)
    return "".join(c if c.isprintable() else " " for c in text).strip()


def now_of(document: Document) -> float | None:
    return from_rfc3339(document.get("time"))


def age_of(document: Document, at: object) -> float | None:
    """Seconds from ``at`` to the document's own time; negative for the future."""
    then, now = from_rfc3339(at), now_of(document)
    return None if then is None or now is None else now - then


def section(document: Document, key: str) -> dict[str, Any]:
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def entries(document: Document, key: str) -> list[dict[str, Any]]:
    value = document.get(key)
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


# -- the sentence ------------------------------------------------------------------------------------------------------

NOT_BACKED_UP = "NOT BACKED UP: checkpoints exist on this pod only"


def not_backed_up(document: Document) -> bool:
    return "sync" in document and not section(document, "sync").get("store_url")


def verdict(document: Document) -> str:
    """One sentence: the current state of training."""
    if not document.get("running"):
        return _verdict_without_daemon(document)
    return _verdict(document) + _paused(document)


def _paused(document: Document) -> str:
    pause = section(section(document, "daemon"), "pause")
    if not pause:
        return ""
    until, now = from_rfc3339(pause.get("until")), now_of(document)
    if pause.get("held_by"):
        end = f"until the GPUs are free (in use by {clean(pause['held_by'])})"
    elif until is None or now is None:
        end = "until `podwatch unpause`"
    else:
        end = f"until {local(until, now)}"
    by = f" by {clean(pause['by'])}" if pause.get("by") else ""
    reason = f" ({clean(pause['reason'])})" if pause.get("reason") else ""
    return f"; podwatch is PAUSED {end}{by}{reason}"


def _verdict(document: Document) -> str:
    match section(document, "training").get("state"):
        case "running" | "starting" | "down" if _trainer_ended(document) is not None:
            return _verdict_of_launcher(document)
        case "running" | "starting" as state:
            return _verdict_of_trainer(document, starting=state == "starting")
        case "recovering":
            return _verdict_of_restart(section(document, "recovery"), document)
        case "down" | "gave-up" | "blocked" as state:
            return _verdict_of_outage(state, document)
        case "finished":
            step = section(document, "training").get("step")
            recovery = section(document, "recovery")
            waits = f": {clean(recovery.get('detail') or '')}" if recovery.get("waiting") else ""
            saved = section(document, "checkpoints").get("newest_complete_step")
            last = f" (newest checkpoint: step {saved})" if step is None and saved is not None else ""
            return "TRAINING IS FINISHED" + (last if step is None else f" (last step {step})") + waits
        case "evaluating":
            return _verdict_of_evaluation(section(document, "recovery"))
        case "stopped":
            why = clean(section(document, "recovery").get("detail") or "")
            return f"TRAINING IS STOPPED{f' ({why})' if why else ''}; to start it: `podwatch start`"
    return "STATE OF TRAINING UNKNOWN: podwatch runs but cannot observe the trainer"


def _trainer_ended(document: Document) -> float | None:
    """Seconds since the trainer process ended while its launcher still runs; None if it did not."""
    return age_of(document, section(document, "training").get("trainer_ended_at"))


def _verdict_of_launcher(document: Document) -> str:
    step = section(document, "training").get("step")
    last = "" if step is None else f", last step {step}"
    ended = ago(_trainer_ended(document))
    return f"TRAINER PROCESS ENDED {ended}, its launcher still runs{last}{_ending(section(document, 'recovery'))}"


def _verdict_of_trainer(document: Document, *, starting: bool) -> str:
    """The verdict for a living trainer."""
    training, recovery = section(document, "training"), section(document, "recovery")
    if starting:
        up = age_of(document, training.get("started_at"))
        return f"TRAINING IS STARTING{_source(recovery)}" + (
            f" (for {span(up)}, no step yet)" if up is not None else ""
        )
    age, step = age_of(document, training.get("step_at")), training.get("step")
    if training.get("step_late") and age is not None:
        return _late(training, age) + _ending(recovery)
    at_step = "" if step is None else f" at step {step} ({ago(age)})"
    return f"TRAINING IS RUNNING{at_step}{_ending(recovery)}"


def _verdict_of_restart(recovery: Document, document: Document) -> str:
    again = age_of(document, recovery.get("next_try_at"))
    if recovery.get("waiting") and again is not None:
        return f"TRAINING IS DOWN; podwatch restarts it in {span(-again)}"
    if recovery.get("phase") == "confirming" and section(document, "training").get("alive"):
        return f"TRAINING IS RESTARTING{_source(recovery)}; no step since the restart yet"
    phase = clean(recovery.get("phase") or "")
    doing = {"looking": "choosing the checkpoint", "stopping": "stopping processes"}.get(phase, phase)
    return f"TRAINING IS DOWN; podwatch is restarting it{_source(recovery)}" + (f" ({doing})" if doing else "")


def _verdict_of_outage(state: str, document: Document) -> str:
    """The verdict for training that is down while podwatch does not restart it."""
    recovery = section(document, "recovery")
    if state == "gave-up":
        again = age_of(document, recovery.get("next_try_at"))
        later = f"; podwatch tries again in {span(-again)}" if again is not None and again < 0 else ""
        return f"TRAINING IS DOWN and podwatch GAVE UP: fix the cause, then run `podwatch start`{later}"
    if state == "blocked":
        detail = clean(recovery.get("detail") or "something still holds the GPUs")
        if document.get("overall") == "warning":  # within the patience of a start
            return f"TRAINING IS NOT STARTED YET: {detail}"
        return f"TRAINING IS DOWN and BLOCKED: {detail}"
    why = next((r.get("summary") for r in entries(document, "reasons") if r.get("severity") == "critical"), "")
    return "TRAINING IS DOWN" + (f": {clean(why)}" if why else "")


def _verdict_of_evaluation(recovery: Document) -> str:
    """The verdict while training is stopped for an evaluation; recovery's detail names it."""
    if recovery.get("phase") == "stopping":
        return f"TRAINING STOPS {clean(recovery.get('detail') or '')}; podwatch starts it again after that"
    why = clean(recovery.get("detail") or "").removeprefix("training is stopped ")
    again = f"podwatch then starts it again{_source(recovery)}"
    return f"TRAINING IS STOPPED {why or 'for an evaluation'}; {again}"


def _source(recovery: Document) -> str:
    step = recovery.get("resumed_step")
    return "" if step is None else f" from step {step}"


def _late(training: Document, age: float) -> str:
    """The verdict for a living trainer whose next step is late."""
    usual = training.get("median_step_seconds")
    pace = f" (usually {span(usual)})" if isinstance(usual, int | float) else ""
    saving = "; a checkpoint is being saved" if training.get("saving") else ""
    return f"NO STEP FOR {span(age)}{pace}; the trainer is alive, last step {training.get('step')}{saving}"


ENDS_ON_ITS_OWN = "training ends on its own"
"""Ends recovery's detail while a requested stop has nothing left to stop."""


def _ending(recovery: Document) -> str:
    if recovery.get("phase") == "ending" and clean(recovery.get("detail") or "").endswith(ENDS_ON_ITS_OWN):
        return "; its last checkpoint is saved, and it ends on its own"
    return {"ending": "; podwatch STOPS it after its next save", "stopping": "; podwatch stops it"}.get(
        str(recovery.get("phase")), ""
    )


def _verdict_without_daemon(document: Document) -> str:
    lives = document.get("training_alive")
    found = next((str(r.get("kind")) for r in entries(document, "reasons")), "")
    if found == "podwatch-elsewhere":
        return "PODWATCH RUNS BUT CANNOT BE REACHED FROM HERE"
    guard = {
        "podwatch-silent": "PODWATCH DOES NOT ANSWER",
        "podwatch-stopped": "PODWATCH IS STOPPED",
        "podwatch-died": "PODWATCH IS NOT RUNNING",
    }.get(found, "PODWATCH IS NOT RUNNING")
    if lives is True:
        return f"{guard}: training continues UNGUARDED"
    if lives is False:
        return f"{guard} and TRAINING IS NOT RUNNING"
    was = {
        "stopped": "training was STOPPED",
        "finished": "training was FINISHED",
        **dict.fromkeys(("down", "recovering", "gave-up", "blocked"), "TRAINING WAS DOWN, nothing restarts it"),
    }.get(str(section(document, "training").get("state")), "training is UNGUARDED")
    return f"{guard}: {was}"
