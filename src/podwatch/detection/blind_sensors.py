"""Sensors that cannot observe, GPUs that cannot be read or are lost. Findings only: nothing here requests an action."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from podwatch.config.settings import GpuSettings
from podwatch.detection.base import DetectorResult, Look
from podwatch.detection.learned import Learned
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.process import ProcessRole
from podwatch.domain.snapshot import GpuState, Reading, SensorState, Snapshot

STALE_FACTOR = {"gpus": 1.0, "trainer": 1.0, "disk": 10.0, "inference": 4.0, "progress": 4.0, "host": 4.0}
"""A reading older than ``blind_after`` times this factor counts as missing: slow sensors are read less often."""
SECOND_SIGNAL_AFTER_SECONDS = 60.0
"""After this time podwatch reports that no corroborating signal can be observed on this pod."""


@dataclass(frozen=True, slots=True)
class SensorsState:
    watching_since: float | None = None
    troubled: tuple[tuple[str, float], ...] = ()
    """(sensor, monotonic time since which it gives no reading)."""


class SensorsDetector:
    name = "sensors"
    kinds = (FindingKind.SENSOR_BLIND, FindingKind.GPU_LOST, FindingKind.NO_SECOND_SIGNAL)
    needs: tuple[str, ...] = ()
    second: tuple[str, ...] = ()
    survives_restart = True

    def initial(self) -> SensorsState:
        return SensorsState()

    def armed(self, state: SensorsState, learned: Learned) -> tuple[str, ...]:
        return ()

    def advance(self, state: SensorsState, look: Look) -> DetectorResult[SensorsState]:
        state, findings = advance(state, look.snapshot, look.learned, look.policies.gpu)
        return DetectorResult(state, look.learned, findings)


DETECTOR = SensorsDetector()


def advance(
    state: SensorsState, snapshot: Snapshot, learned: Learned, policy: GpuSettings
) -> tuple[SensorsState, tuple[Finding, ...]]:
    watching_since = snapshot.at if state.watching_since is None else state.watching_since
    findings: list[Finding] = []
    troubled = state.troubled
    if troubled or not _all_fresh(snapshot, policy.blind_after):
        troubled = _look_closer(troubled, snapshot, watching_since, policy, findings)
    findings.extend(_devices(snapshot, policy))
    second = _no_second_signal(snapshot, watching_since, learned, policy)
    if second is not None:
        findings.append(second)
    if troubled is state.troubled and watching_since == state.watching_since:
        return state, tuple(findings)
    return SensorsState(watching_since, troubled), tuple(findings)


def _all_fresh(snapshot: Snapshot, within: float) -> bool:
    """True in the usual case: every reading is good and recent. Cheap, because it runs at every turn."""
    oldest, ok = snapshot.at - within, SensorState.OK
    return (
        snapshot.gpus.state is ok
        and snapshot.trainer.state is ok
        and snapshot.disk.state is ok
        and snapshot.inference.state is ok
        and snapshot.progress.state is ok
        and snapshot.gpus.at >= oldest
        and snapshot.trainer.at >= oldest
        and snapshot.disk.at >= oldest
        and snapshot.inference.at >= oldest
        and snapshot.progress.at >= oldest
    )


def _look_closer(
    troubled: tuple[tuple[str, float], ...],
    snapshot: Snapshot,
    watching_since: float,
    policy: GpuSettings,
    findings: list[Finding],
) -> tuple[tuple[str, float], ...]:
    """Return since when each sensor gives no reading; appends to ``findings``."""
    since = dict(troubled)
    for name, reading in _readings(snapshot):
        trouble = _trouble(name, reading, snapshot.at, policy)
        if not trouble:
            since.pop(name, None)
            continue
        begun = since.setdefault(name, min(reading.at, snapshot.at) if reading.at > 0 else snapshot.at)
        if reading.state is SensorState.PENDING:
            begun = since[name] = max(begun, watching_since)
        lasting = snapshot.at - begun
        if reading.state not in (SensorState.DENIED, SensorState.ABSENT) and lasting < policy.blind_after:
            continue
        findings.append(
            Finding(
                FindingKind.SENSOR_BLIND,
                Severity.WARNING,
                f"the {name} sensor cannot observe: {trouble}",
                begun,
                evidence=(Evidence(name, str(reading.state), Agreement.UNAVAILABLE, lasting),),
                subject=name,
            )
        )
    return tuple(sorted(since.items()))


def _readings(snapshot: Snapshot) -> Iterable[tuple[str, Reading[Any]]]:
    return (
        ("gpus", snapshot.gpus),
        ("trainer", snapshot.trainer),
        ("disk", snapshot.disk),
        ("inference", snapshot.inference),
        ("progress", snapshot.progress),
        *((("host", snapshot.host),) if snapshot.host.state is not SensorState.PENDING else ()),
    )


def _trouble(name: str, reading: Reading[Any], at: float, policy: GpuSettings) -> str:
    if reading.state is SensorState.OK:
        age = at - reading.at
        if age > policy.blind_after * STALE_FACTOR[name]:
            return f"its newest reading is {age:.0f} s old"
        return ""
    if reading.state is SensorState.ABSENT:
        # Only missing NVML is a problem: an unset URL or step source is the operator's choice.
        return reading.detail or "not available" if name == "gpus" and policy.inference else ""
    return reading.detail or str(reading.state)


def _devices(snapshot: Snapshot, policy: GpuSettings) -> list[Finding]:
    if not snapshot.gpus.ok or snapshot.gpus.value is None:
        return []
    findings = []
    present = [g.index for g in snapshot.gpus.value]
    for gpu in snapshot.gpus.value:
        if gpu.state is GpuState.OK and gpu.memory_used_bytes is not None:
            continue
        if gpu.state is GpuState.LOST:
            findings.append(
                Finding(
                    FindingKind.GPU_LOST,
                    Severity.CRITICAL,
                    f"GPU {gpu.index} fell off the bus: the driver cannot reach it",
                    snapshot.gpus.at,
                    suggestion="restarting training cannot repair it: reboot the pod or move to another machine",
                    evidence=(Evidence(f"gpu{gpu.index}", gpu.detail or "lost", Agreement.AGREES),),
                    subject=f"gpu{gpu.index}",
                )
            )
        elif gpu.index in policy.inference and (gpu.state is not GpuState.OK or gpu.memory_used_bytes is None):
            findings.append(_unreadable(gpu.index, gpu.detail or str(gpu.state), snapshot.gpus.at))
    for index in policy.inference:
        if index not in present:
            findings.append(_unreadable(index, "NVML does not list it", snapshot.gpus.at))
    return findings


def _unreadable(index: int, why: str, at: float) -> Finding:
    return Finding(
        FindingKind.SENSOR_BLIND,
        Severity.WARNING,
        f"podwatch cannot read the memory of GPU {index} ({why}), so it cannot detect a silent death there by memory",
        at,
        suggestion="compare [gpu] inference with `nvidia-smi -L`",
        evidence=(Evidence(f"gpu{index} memory", why, Agreement.UNAVAILABLE),),
        subject=f"gpu{index}",
    )


def _no_second_signal(
    snapshot: Snapshot, watching_since: float, learned: Learned, policy: GpuSettings
) -> Finding | None:
    if not policy.inference or snapshot.at - watching_since < SECOND_SIGNAL_AFTER_SECONDS:
        return None
    if snapshot.inference.state not in (SensorState.ABSENT, SensorState.DENIED):
        return None
    trainer = snapshot.trainer.value if snapshot.trainer.ok else None
    if trainer is None or not trainer.alive:
        return None
    roles = {p.role for p in trainer.descendants}
    possible = (
        any(p.cuda is not None for p in trainer.descendants)
        or bool(roles & {ProcessRole.ENGINE, ProcessRole.INFERENCE})
        or snapshot.inference.state not in (SensorState.ABSENT, SensorState.DENIED)
        or (snapshot.progress.ok and bool(snapshot.progress.value or "progress" in learned.seen))
    )
    if possible:
        return None
    return Finding(
        FindingKind.NO_SECOND_SIGNAL,
        Severity.WARNING,
        "podwatch sees the GPU memory but no corroborating signal (server health, processes): it would report a dead"
        " engine but not restart training",
        watching_since,
        suggestion="set [inference] urls, or run podwatch as the trainer's user or as root",
        evidence=(
            Evidence("processes", "not readable or not recognized", Agreement.UNAVAILABLE),
            Evidence("health", snapshot.inference.detail or "not configured", Agreement.UNAVAILABLE),
            Evidence("steps", snapshot.progress.detail or "none seen", Agreement.UNAVAILABLE),
        ),
    )
