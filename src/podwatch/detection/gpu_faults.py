"""GPU faults that the driver reports: XIDs, uncorrected ECC errors, clocks throttled by heat or power."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from podwatch.detection.base import DetectorResult, Look
from podwatch.detection.learned import Learned
from podwatch.detection.windows import QUIET, Latches, kept
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.snapshot import GpuSample, XidEvent

# -- catalogue of XIDs -----------------------------------------------------------------------------------------------
# What each driver XID means for a training run, and the fix. Source: NVIDIA's catalogue
# (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, "Resolution Bucket (Immediate Action)", columns A100
# to GB200); the buckets are noted at each group. Codes that it calls unused are left out: an unknown code is reported
# with its number.


class XidAction(StrEnum):
    """The remedy."""

    NOTHING = "nothing"
    """For the record only (bucket IGNORE)."""
    APPLICATION = "application"
    """A fault of the program, or of the driver below it: the program dies, the GPU is healthy (RESTART_APP)."""
    RESET = "reset"
    """The GPU does not work correctly until it is reset (RESET_GPU)."""
    REBOOT = "reboot"
    """Only a reboot of the machine helps, on a rented pod another machine (RESTART_BM, RESTART_VM)."""
    HARDWARE = "hardware"
    """A cable, a link or the board (CHECK_MECHANICALS, WORKFLOW_NVLINK*): the owner of the machine must inspect it."""


@dataclass(frozen=True, slots=True)
class Xid:
    code: int
    what: str
    action: XidAction


_APPLICATION = {
    8: "the GPU stopped processing",
    11: "a command stream was corrupt",
    13: "a graphics engine exception (an illegal instruction or address in a kernel)",
    25: "a command stream was illegal",
    31: "a page fault in GPU memory (an illegal address)",
    32: "a command stream was corrupt",
    39: "a copy engine exception",
    40: "a copy engine exception",
    41: "a copy engine exception",
    60: "a video processor exception",
    68: "a video decoder exception",
    69: "a graphics engine class error",
    70: "a copy engine exception",
    71: "a copy engine exception",
    72: "a copy engine exception",
    75: "a copy engine exception",
    76: "a copy engine exception",
    77: "a copy engine exception",
    80: "data sent to the GPU was corrupt",
    85: "a copy engine exception",
    94: "an uncorrectable memory error, contained to one program",
}
# Bucket IGNORE too, but the channel is gone: the program that owned it fails (43, 44), or another XID explains it (45).
_ENDED = {
    43: "a program's work on the GPU was stopped because of its own fault",
    44: "a fault during a context switch",
    45: "a program's work was cleaned up after an earlier error",
}
_NOTHING = {
    37: "a firmware message",
    38: "a firmware message",
    63: "a memory row was remapped, or will be at the next reset",
    66: "an illegal access by the driver",
    67: "an illegal access by the driver",
    92: "many single-bit ECC errors, all corrected",
    93: "the board's InfoROM storage is worn (not fatal)",
    106: "a test message",
    107: "a test message",
    108: "an NVLink translation error at the other end",
    121: "an error on the link to the CPU, corrected",
    137: "an NVLink access without privilege",
    141: "an error on a fast path of CUDA",
    152: "an error of another engine",
    153: "an error of another engine",
    157: "a resource could not be retired",
    160: "a memory channel was retired",
    161: "a memory channel could not be retired",
}
_RESET = {
    46: "the GPU stopped processing",
    48: "an uncorrectable (double-bit) ECC error",
    62: "the GPU's own controller halted",
    64: "a memory row could not be remapped",
    95: "an uncorrectable memory error that was not contained: every program on the GPU is affected",
    109: "a context switch timed out",
    110: "a security fault",
    119: "the GPU's system processor (GSP) does not answer",
    120: "the GPU's system processor (GSP) failed",
    136: "a link could not be trained",
    140: "an unrecovered ECC error",
    143: "the GPU could not be initialised",
    154: "the driver reports that the GPU needs a recovery action",
    155: "an NVLink error",
    156: "a faulty resource is to be retired",
    158: "a fatal timeout of the GPU",
    171: "an uncorrectable error in device memory",
    172: "an uncorrectable error in on-chip memory",
}
_REBOOT = {79: "the GPU has fallen off the bus", 151: "a key could not be changed (confidential computing)"}
_HARDWARE = {
    54: "auxiliary power is not connected to the board",
    74: "an NVLink error",
    **dict.fromkeys(range(144, 151), "an NVLink error"),
}

TABLE: dict[int, Xid] = {
    code: Xid(code, what, action)
    for action, group in (
        (XidAction.APPLICATION, _APPLICATION | _ENDED),
        (XidAction.NOTHING, _NOTHING),
        (XidAction.RESET, _RESET),
        (XidAction.REBOOT, _REBOOT),
        (XidAction.HARDWARE, _HARDWARE),
    )
    for code, what in group.items()
}

_FIX = {
    XidAction.NOTHING: "nothing to do",
    XidAction.APPLICATION: "the program fails and the GPU is healthy: check the trainer's log; if this repeats on one"
    " GPU only, move to another machine",
    XidAction.RESET: "stop training and reset the GPU (`nvidia-smi --gpu-reset`), or reboot the pod; on a rented pod"
    " move to another machine",
    XidAction.REBOOT: "restarting training cannot repair it: reboot the pod or move to another machine",
    XidAction.HARDWARE: "report it to the provider of the machine (NVLink, power, cables); on a rented pod move to"
    " another machine",
}


def meaning(code: int) -> Xid:
    """The meaning of ``code``. One that is not in the catalogue counts as a program fault, the mildest class that is
    still reported."""
    return TABLE.get(code, Xid(code, "not in NVIDIA's catalogue", XidAction.APPLICATION))


def fix(action: XidAction) -> str:
    return _FIX[action]


# -- detector --------------------------------------------------------------------------------------------------------

SHOWN_SECONDS = 3600.0
"""How long an XID caused by a program is shown."""
LASTING_SECONDS = 24 * 3600.0
"""How long one that needs a reset is shown: it does not end without one, and an operator looks at least daily."""
THROTTLED_SECONDS = 300.0
"""A GPU that is throttled for this long is a finding."""
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

    def advance(self, state: GpuHealthState, look: Look) -> DetectorResult[GpuHealthState]:
        snapshot, policy = look.snapshot, look.policies
        mine = {*policy.gpu.inference, *policy.gpu.trainer}
        findings: list[Finding] = []
        if snapshot.host.ok and snapshot.host.value is not None and snapshot.host.value.xids:
            findings.extend(_xids(snapshot.host.value.xids, mine, snapshot.at))
        if snapshot.gpus.ok and snapshot.gpus.value is not None:
            gpus = [g for g in snapshot.gpus.value if not mine or g.index in mine]
            if snapshot.gpus.at != state.taken_at and not _quiet(state, gpus):
                state = _take(state, gpus, snapshot.gpus.at)
            if state.throttled:
                findings.extend(_throttled(state, gpus, snapshot.at))
        if state.grown:
            findings.extend(_ecc(state, snapshot.at))
        return DetectorResult(state, look.learned, tuple(findings))


DETECTOR = GpuHealthDetector()


def _xids(events: tuple[XidEvent, ...], mine: set[int], at: float) -> Iterator[Finding]:
    """One finding per GPU and code; ``since`` is its first occurrence within the time that it is shown."""
    newest: dict[tuple[int | None, int], tuple[float, float, int]] = {}
    for event in events:
        if mine and event.gpu is not None and event.gpu not in mine:
            continue
        known = meaning(event.code)
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
        known = meaning(code)
        where = f"GPU {gpu}" if gpu is not None else "a GPU of this machine"
        times = f", {count} times" if count > 1 else ""
        yield Finding(
            FindingKind.GPU_FAULT,
            Severity.WARNING if known.action is XidAction.APPLICATION else Severity.CRITICAL,
            f"{where} reported XID {code}{times}: {known.what}",
            first,
            suggestion=fix(known.action),
            evidence=(Evidence(f"xid {code}", where, Agreement.AGREES, max(0.0, at - last)),),
            subject=f"gpu{gpu}-xid{code}" if gpu is not None else f"xid{code}",
        )


def _quiet(state: GpuHealthState, gpus: list[GpuSample]) -> bool:
    """True in the usual case: no throttling now or remembered, and no new ECC error."""
    if state.throttled or state.grown or state.taken_at is None:
        return False
    counted = dict(state.ecc)
    return not any(g.throttled or g.ecc_uncorrected != counted.get(g.index) for g in gpus)


def _take(state: GpuHealthState, gpus: list[GpuSample], at: float) -> GpuHealthState:
    latches, ecc = dict(state.throttled), dict(state.ecc)
    grown = {index: (errors, when) for index, errors, when in state.grown if at - when <= LASTING_SECONDS}
    for gpu in gpus:
        name = f"gpu{gpu.index}"
        latches[name] = latches.get(name, QUIET).update(
            bool(gpu.throttled), at, hold=THROTTLED_SECONDS, release=RELEASE_SECONDS
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
                suggestion=fix(XidAction.RESET),
                evidence=(Evidence(f"gpu{index} ecc", f"{errors} uncorrected", Agreement.AGREES, at - when),),
                subject=f"gpu{index}-ecc",
            )
