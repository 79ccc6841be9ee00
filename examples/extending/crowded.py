"""A detector: docs/contributing.md."""

from dataclasses import dataclass

from podwatch.detection.base import DetectorResult, Look
from podwatch.detection.learned import Learned
from podwatch.detection.windows import QUIET, Latch
from podwatch.domain.finding import Finding, FindingKind, Severity

HOLD_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class CrowdedState:
    full: Latch = QUIET


class CrowdedDetector:
    name = "crowded"
    kinds = (FindingKind.SHM_LOW,)
    needs = ("host",)
    second: tuple[str, ...] = ()
    survives_restart = True

    def initial(self) -> CrowdedState:
        return CrowdedState()

    def armed(self, state: CrowdedState, learned: Learned) -> tuple[str, ...]:
        return ()

    def advance(self, state: CrowdedState, look: Look) -> DetectorResult[CrowdedState]:
        host = look.snapshot.host.value
        over = host.shm_used_bytes == host.shm_total_bytes if host and host.shm_total_bytes else None
        full = state.full.update(over, look.snapshot.at, hold=HOLD_SECONDS)
        findings: tuple[Finding, ...] = ()
        if full.raised and full.since is not None:
            text, fix = "/dev/shm is full; podwatch does not free it", "remove files from /dev/shm, or enlarge it"
            findings = (Finding(FindingKind.SHM_LOW, Severity.WARNING, text, full.since, fix),)
        return DetectorResult(CrowdedState(full), look.learned, findings)


DETECTOR = CrowdedDetector()
