"""A finished run whose processes do not end. Pure."""

from podwatch.detection.base import Look
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity, Verdict

LINGER_SECONDS = 15 * 60.0
BUSY_LINGER_FACTOR = 4.0
"""If the target is reached, no finish line was seen and the GPUs still work (a last evaluation, an export, or a
spinning collective), podwatch waits this many times the linger time."""
EXPORT_GRACE_SECONDS = 300.0


def lingering(look: Look, finish_line: bool, *, idle: float, blind: str) -> Finding | None:
    """A finding for a finished run whose processes still exist after ``LINGER_SECONDS``: they keep the pod, and
    its bill, alive (prime-rl #2229). ``idle``: for how many seconds all GPUs of the run have been idle; ``blind``: why
    nothing is known about their use."""
    progress, snapshot, policy = look.progress, look.snapshot, look.policies
    quiet_since = progress.active_at if progress.active_at is not None else progress.started_at
    if quiet_since is None or snapshot.at - quiet_since < LINGER_SECONDS:
        return None
    if not finish_line and not snapshot.progress.ok:
        return None
    quiet = snapshot.at - quiet_since
    if not blind and idle < EXPORT_GRACE_SECONDS:
        use = Evidence("gpu utilisation", "busy", Agreement.DISAGREES)
        if not finish_line and quiet < BUSY_LINGER_FACTOR * LINGER_SECONDS:
            return None
    elif blind:
        use = Evidence("gpu utilisation", blind, Agreement.UNAVAILABLE)
    else:
        use = Evidence("gpu utilisation", "all idle", Agreement.AGREES, idle)
    done = "the finish line was printed" if finish_line else f"the target step {policy.max_steps} was reached"
    return Finding(
        FindingKind.FINISHED,
        Severity.WARNING,
        f"training is finished ({done}), but its processes still run after {quiet / 60:.0f} min: podwatch ends them",
        quiet_since,
        verdict=Verdict.FINISH,
        confirmed=True,
        evidence=(
            Evidence("completion", done, Agreement.AGREES, quiet),
            Evidence("progress", f"none for {quiet:.0f} s", Agreement.AGREES, quiet),
            use,
        ),
        subject="lingering",
    )
