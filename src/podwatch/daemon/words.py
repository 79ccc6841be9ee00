"""Texts of the daemon: first line, last line, systemd status, and why it is not ready."""

from podwatch import __version__
from podwatch.daemon import viewing
from podwatch.daemon.compose import Parts
from podwatch.daemon.pausing import described
from podwatch.domain.pause import Pause
from podwatch.domain.snapshot import Snapshot

FAREWELL_IDLE = "podwatch exits; no training is running"


def opening(parts: Parts, pause: Pause | None = None) -> str:
    """The first line: the state of training, and whether checkpoints are backed up."""
    layout = parts.layout
    known = f" (layout {layout.name}: {layout.chosen_because})" if layout.chosen_because else ""
    where = f"syncing to {parts.settings.sync.store}" if parts.syncer is not None else "NOT BACKED UP"
    paused = "" if pause is None else f"; {described(pause)}"
    return (
        f"podwatch {__version__} guards run {parts.settings.run_id}{known}: {parts.recovery.opening}; {where}{paused}"
    )


def farewell(*, training: bool, preempted: str) -> str:
    """The last line. ``training``: a trainer runs; ``preempted``: why podwatch ends it too, else empty."""
    if not training:
        return f"podwatch exits: {preempted}; no training is running" if preempted else FAREWELL_IDLE
    if preempted:
        return f"podwatch exits: {preempted}; podwatch requests training to end"
    return (
        "podwatch exits; training continues UNGUARDED. Start podwatch again to guard it;"
        " to stop training, start podwatch again and run `podwatch stop-training`"
    )


def headline(phase: str, snapshot: Snapshot, pause: Pause | None = None) -> str:
    """The line in ``systemctl status``."""
    newest = snapshot.newest_step
    text = f"{phase}, step {newest.step}" if newest is not None else str(phase)
    return text if pause is None else f"{described(pause)}; {text}"


def gpus_held(parts: Parts, snapshot: Snapshot) -> str:
    """What else holds the run's GPUs, as text; empty if nothing does, our own trainer runs, or it is unknown."""
    trainer = snapshot.trainer.value
    if trainer is not None and trainer.descendants:
        return ""
    return "; ".join(parts.recovery.procedure.free(0.0).gpus)


def readiness(parts: Parts, snapshot: Snapshot) -> tuple[bool, list[str]]:
    """Whether sensors and store are usable, and the reasons if they are not."""
    reasons = [
        f"the {name} sensor is {view.state}" + (f": {view.detail}" if view.detail else "")
        for name, view in viewing.sensor_views(snapshot).items()
        if view.state in ("blind", "denied", "pending")
    ]
    if parts.syncer is not None and parts.syncer.state.ok is False:
        reasons.append(f"the store cannot be used: {parts.syncer.state.error}")
    return not reasons, reasons
