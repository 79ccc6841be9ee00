"""What is kept of a branch that training has left, and what the status says about it."""

from podwatch.daemon.compose import Parts
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.judgement.lineage import kept_step


def kept_branch(parts: Parts) -> int | None:
    """The newest checkpoint of an earlier branch that has to stay on this pod for now; None where there is none."""
    record = parts.record.current
    if record is None or not record.earlier:
        return None
    stored = parts.syncer.state.newest_of.get(record.lineage.id) if parts.syncer is not None else None
    return kept_step(parts.catalogue.sets, record.lineage, has_store=parts.syncer is not None, stored=stored)


def branch_findings(parts: Parts, now: float) -> tuple[Finding, ...]:
    """One line while the newest checkpoint of an earlier branch is kept. ``now`` monotonic."""
    record, kept = parts.record.current, kept_branch(parts)
    if record is None or kept is None:
        return ()
    at = record.lineage.parent_step
    where = "which starts from the beginning" if at is None else f"which continues from step {at}"
    until = "verified in the store" if parts.syncer is not None else "complete"
    return (
        Finding(
            FindingKind.EARLIER_BRANCH,
            Severity.INFO,
            f"step {kept} of the earlier branch is kept until a new checkpoint of the present one, {where}, is {until}",
            now,
            f"to return to the earlier branch: `podwatch restart --step {kept}`",
        ),
    )
