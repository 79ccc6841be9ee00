"""The checkpoints that are kept of a branch that training has left, and the finding about them."""

from podwatch.daemon.wiring import Components
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.policy.lineage import branch_line, kept_step


def kept_branch(parts: Components) -> int | None:
    """The newest step of an earlier branch that must stay on this pod for now; None if there is none."""
    record = parts.training.record.current
    if record is None or not record.earlier:
        return None
    stored = parts.syncer.status().newest_of.get(record.lineage.id) if parts.syncer is not None else None
    return kept_step(
        parts.checkpoints.catalogue.sets, record.lineage, has_store=parts.syncer is not None, stored=stored
    )


def branch_findings(parts: Components, now: float, wall: float) -> tuple[Finding, ...]:
    """A finding while the newest checkpoint of an earlier branch is kept, and for a day after an operator went back to
    an earlier step. ``now`` monotonic, ``wall`` epoch seconds."""
    record = parts.training.record.current
    if record is None or not record.lineage.parent:
        return ()
    kept, has_store = kept_branch(parts), parts.syncer is not None
    line = branch_line(parts.checkpoints.catalogue.sets, record.lineage, kept, has_store=has_store, wall=wall)
    if line is None:
        return ()
    summary, suggestion = line
    opened = record.lineage.opened_wall
    since = now - max(0.0, wall - opened) if opened else now
    return (Finding(FindingKind.EARLIER_BRANCH, Severity.INFO, summary, since, suggestion),)
