"""The daemon's own lines: the first, the last, the one for systemd, and why it is not ready."""

from podwatch import __version__
from podwatch.daemon import viewing
from podwatch.daemon.compose import Parts
from podwatch.domain.snapshot import Snapshot


def opening(parts: Parts) -> str:
    """The first line: what podwatch found, and whether anything is backed up."""
    where = f"syncing to {parts.settings.sync.store}" if parts.syncer is not None else "NOT BACKED UP"
    return f"podwatch {__version__} guards run {parts.settings.run_id}: {parts.recovery.opening}; {where}"


def farewell(*, training: bool, preempted: bool) -> str:
    """The last line. ``training``: a trainer is known; ``preempted``: it ends too, because the container does."""
    if not training:
        return "podwatch leaves; no training is running"
    if preempted:
        return "podwatch leaves because its container is being stopped; training is told to end"
    return (
        "podwatch leaves; training goes on UNGUARDED. Start podwatch again to guard it,"
        " or `podwatch stop-training` first to stop it"
    )


def headline(phase: str, snapshot: Snapshot) -> str:
    """What ``systemctl status`` shows."""
    newest = viewing.newest_step(snapshot)
    return f"{phase}, step {newest.step}" if newest is not None else str(phase)


def readiness(parts: Parts, snapshot: Snapshot) -> tuple[bool, list[str]]:
    """Sensors and store usable; the reasons where they are not."""
    reasons = [
        f"the {name} sensor is {view.state}" + (f": {view.detail}" if view.detail else "")
        for name, view in viewing.sensor_views(snapshot).items()
        if view.state in ("blind", "denied", "pending")
    ]
    if parts.syncer is not None and parts.syncer.state.ok is False:
        reasons.append(f"the store cannot be used: {parts.syncer.state.error}")
    return not reasons, reasons
