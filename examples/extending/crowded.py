"""A detector: docs/contributing.md."""

from collections.abc import Iterator

from podwatch.detection.observe import Turn
from podwatch.domain.finding import Finding, FindingKind, Severity

HOLD_SECONDS = 60.0


def crowded(turn: Turn) -> Iterator[Finding]:
    """/dev/shm has been full for a minute."""
    reading = turn.snapshot.host
    host = reading.value if reading.ok else None
    free = host.shm_used_bytes != host.shm_total_bytes if host and host.shm_total_bytes else None
    window = turn.machine.watch("crowded", free, reading.at)
    if window.since is not None and window.seconds >= HOLD_SECONDS:
        text, fix = "/dev/shm is full; podwatch does not free it", "remove files from /dev/shm, or enlarge it"
        yield Finding(FindingKind.SHM_LOW, Severity.WARNING, text, window.since, fix)
