"""The disk, as warnings. What to do about it is ``judgement.retention``'s."""

from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.policy import DiskPolicy
from podwatch.domain.snapshot import Snapshot


def advance(snapshot: Snapshot, policy: DiskPolicy) -> tuple[Finding, ...]:
    if not snapshot.disk.ok or snapshot.disk.value is None:
        return ()
    disk = snapshot.disk.value
    findings = []
    if disk.used_ratio > policy.prune_above:
        findings.append(
            Finding(
                FindingKind.DISK_HIGH,
                Severity.WARNING,
                f"{disk.path} is {disk.used_ratio:.0%} full (prunes above {policy.prune_above:.0%})",
                snapshot.disk.at,
                suggestion="`podwatch prune --dry-run` says what can go",
                evidence=(Evidence("disk", f"{disk.used_ratio:.3f} used", Agreement.AGREES),),
            )
        )
    if disk.inodes_total > 0 and disk.inodes_free / disk.inodes_total < policy.inodes_below:
        findings.append(
            Finding(
                FindingKind.INODES_LOW,
                Severity.WARNING,
                f"{disk.path} has {disk.inodes_free} of {disk.inodes_total} inodes left",
                snapshot.disk.at,
                suggestion="many small files: rollouts and broadcasts are the usual ones",
                evidence=(Evidence("inodes", f"{disk.inodes_free} free", Agreement.AGREES),),
            )
        )
    return tuple(findings)
