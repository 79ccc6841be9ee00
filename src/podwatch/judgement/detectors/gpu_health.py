"""GPU faults that the driver reports: XIDs, uncorrected ECC errors, clocks throttled by heat or power."""

from collections.abc import Iterator
from dataclasses import dataclass

from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.policy import ResourcePolicy
from podwatch.domain.snapshot import GpuSample, XidEvent
from podwatch.judgement import xid as xids
from podwatch.judgement.detectors.base import Look, Turn
from podwatch.judgement.detectors.latch import QUIET, Latches, kept
from podwatch.judgement.learned import Learned
from podwatch.judgement.xid import XidAction

SHOWN_SECONDS = 3600.0
"""How long an XID caused by a program is shown."""
LASTING_SECONDS = 24 * 3600.0
"""How long one that needs a reset is shown: it does not end without one, and an operator looks at least daily."""
RELEASE_SECONDS = 90.0
"""Three readings of unthrottled clocks before the warning is cleared."""

_WORDS = {
    "hw-thermal": "heat (hardware slowdown)",
    "hw-power-brake": "the power brake (requested by the power supply)",
    "sw-thermal": "heat",
    "hw-slowdown": "heat or power (hardware slowdown)",
}


@dataclass(frozen=True, slots=True)
class GpuHealthState:
    """``ecc``: (NVML index, counter as last read). ``grown``: (NVML index, new errors, time of the newest)."""

    throttled: Latches = ()
    ecc: tuple[tuple[int, int], ...] = ()
    grown: tuple[tuple[int, int, float], ...] = ()
    taken_at: float | None = None


class GpuHealthDetector:
    name = "gpu-health"
    kinds = (FindingKind.GPU_FAULT, FindingKind.GPU_THROTTLED)
    needs = ("gpus", "host")
    second: tuple[str, ...] = ()
    survives_restart = True

    def initial(self) -> GpuHealthState:
        return GpuHealthState()

    def armed(self, state: GpuHealthState, learned: Learned) -> tuple[str, ...]:
        return ()

    def advance(self, state: GpuHealthState, look: Look) -> Turn[GpuHealthState]:
        snapshot, policy = look.snapshot, look.policies
        mine = {*policy.detection.inference_gpus, *policy.detection.trainer_gpus}
        findings: list[Finding] = []
        if snapshot.host.ok and snapshot.host.value is not None and snapshot.host.value.xids:
            findings.extend(_xids(snapshot.host.value.xids, mine, snapshot.at))
        if snapshot.gpus.ok and snapshot.gpus.value is not None:
            gpus = [g for g in snapshot.gpus.value if not mine or g.index in mine]
            if snapshot.gpus.at != state.taken_at and not _quiet(state, gpus):
                state = _take(state, gpus, snapshot.gpus.at, policy.resources)
            if state.throttled:
                findings.extend(_throttled(state, gpus, snapshot.at))
        if state.grown:
            findings.extend(_ecc(state, snapshot.at))
        return Turn(state, look.learned, tuple(findings))


DETECTOR = GpuHealthDetector()


def _xids(events: tuple[XidEvent, ...], mine: set[int], at: float) -> Iterator[Finding]:
    """One finding per GPU and code; ``since`` is its first occurrence within the time that it is shown."""
    newest: dict[tuple[int | None, int], tuple[float, float, int]] = {}
    for event in events:
        if mine and event.gpu is not None and event.gpu not in mine:
            continue
        known = xids.meaning(event.code)
        lasting = (
            LASTING_SECONDS
            if known.action in (XidAction.RESET, XidAction.REBOOT, XidAction.HARDWARE)
            else SHOWN_SECONDS
        )
        if known.action is XidAction.NOTHING or at - event.at > lasting:
            continue
        first, _, count = newest.get((event.gpu, event.code), (event.at, event.at, 0))
        newest[(event.gpu, event.code)] = (first, event.at, count + 1)
    for (gpu, code), (first, last, count) in newest.items():
        known = xids.meaning(code)
        where = f"GPU {gpu}" if gpu is not None else "a GPU of this machine"
        times = f", {count} times" if count > 1 else ""
        yield Finding(
            FindingKind.GPU_FAULT,
            Severity.WARNING if known.action is XidAction.APPLICATION else Severity.CRITICAL,
            f"{where} reported XID {code}{times}: {known.what}",
            first,
            suggestion=xids.fix(known.action),
            evidence=(Evidence(f"xid {code}", where, Agreement.AGREES, max(0.0, at - last)),),
            subject=f"gpu{gpu}-xid{code}" if gpu is not None else f"xid{code}",
        )


def _quiet(state: GpuHealthState, gpus: list[GpuSample]) -> bool:
    """True in the usual case: no throttling now or remembered, and no new ECC error."""
    if state.throttled or state.grown or state.taken_at is None:
        return False
    counted = dict(state.ecc)
    return not any(g.throttled or g.ecc_uncorrected != counted.get(g.index) for g in gpus)


def _take(state: GpuHealthState, gpus: list[GpuSample], at: float, policy: ResourcePolicy) -> GpuHealthState:
    latches, ecc = dict(state.throttled), dict(state.ecc)
    grown = {index: (errors, when) for index, errors, when in state.grown if at - when <= LASTING_SECONDS}
    for gpu in gpus:
        name = f"gpu{gpu.index}"
        latches[name] = latches.get(name, QUIET).update(
            bool(gpu.throttled), at, hold=policy.throttled_seconds, release=RELEASE_SECONDS
        )
        if gpu.ecc_uncorrected is None:
            continue
        before = ecc.get(gpu.index)
        ecc[gpu.index] = gpu.ecc_uncorrected
        # Errors from before podwatch started, or a counter reset by a driver reload, are not new errors of this run.
        if before is not None and gpu.ecc_uncorrected > before:
            grown[gpu.index] = (grown.get(gpu.index, (0, at))[0] + gpu.ecc_uncorrected - before, at)
    return GpuHealthState(
        kept(latches),
        tuple(sorted(ecc.items())),
        tuple((index, errors, when) for index, (errors, when) in sorted(grown.items())),
        at,
    )


def _throttled(state: GpuHealthState, gpus: list[GpuSample], at: float) -> Iterator[Finding]:
    latches = dict(state.throttled)
    for gpu in gpus:
        latch = latches.get(f"gpu{gpu.index}", QUIET)
        if not latch.raised or latch.since is None:
            continue
        why = " and ".join(_WORDS.get(reason, reason) for reason in gpu.throttled) or "an intermittent fault"
        warm = f" ({gpu.temperature_celsius:.0f} degrees Celsius)" if gpu.temperature_celsius is not None else ""
        yield Finding(
            FindingKind.GPU_THROTTLED,
            Severity.WARNING,
            f"GPU {gpu.index} has been throttled by {why} for {(at - latch.since) / 60:.0f} minutes{warm}, so training"
            " is slower",
            latch.since,
            suggestion="report it to the provider of the machine, or move to another machine",
            evidence=(
                Evidence(f"gpu{gpu.index} clocks", ", ".join(gpu.throttled), Agreement.AGREES, at - latch.since),
            ),
            subject=f"gpu{gpu.index}",
        )


def _ecc(state: GpuHealthState, at: float) -> Iterator[Finding]:
    for index, errors, when in state.grown:
        if at - when <= LASTING_SECONDS:
            yield Finding(
                FindingKind.GPU_FAULT,
                Severity.CRITICAL,
                f"GPU {index} had {errors} uncorrected memory error{'s' if errors > 1 else ''} since podwatch started",
                when,
                suggestion=xids.fix(XidAction.RESET),
                evidence=(Evidence(f"gpu{index} ecc", f"{errors} uncorrected", Agreement.AGREES, at - when),),
                subject=f"gpu{index}-ecc",
            )
