"""Sensors that cannot observe, GPUs that cannot be read or are lost, and pauses of podwatch itself. Findings only."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from podwatch.detection.observe import Turn
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.process import ProcessRole
from podwatch.domain.snapshot import GpuState, Reading, SensorState, Snapshot

LATE_FACTOR = {"gpus": 1.0, "trainer": 1.0, "disk": 10.0, "inference": 4.0, "progress": 4.0, "host": 4.0}
"""A reading older than ``blind_after`` times this factor counts as missing: slow sensors are read less often."""
SECOND_SIGNAL_AFTER_SECONDS = 60.0
"""After this time podwatch reports that no corroborating signal can be observed on this pod."""
STALL_TURNS = 5.0
"""A pause counts as a stall if it is longer than this many median turns, and longer than the time after which a silent
sensor counts as blind. The windows themselves detect shorter pauses."""
TURNS_LEARNED = 3
SUSPEND_SECONDS = 2.0
"""If CLOCK_BOOTTIME advances by this much more than CLOCK_MONOTONIC between two turns, the machine was suspended."""
STALL_SHOWN_SECONDS = 600.0
"""How long the finding stays after a stall, so that an operator sees it."""


# -- pauses of podwatch ------------------------------------------------------------------------------------------------


def observe_gap(turn: Turn) -> None:
    """Restart every window if nothing was observed since the last turn: missing progress there is no evidence, because
    a pod that was frozen for an hour has made no step for an hour and is not hung.

    A single stall is not learned. Consecutive ones are the pace of a slow machine and are learned: otherwise every turn
    would restart every window, and nothing would ever be detected."""
    snapshot, machine, start = turn.snapshot, turn.machine, turn.start
    turns, boot, machine.boot_at = machine.read.get("turns", ()), machine.boot_at, snapshot.boot_at
    passed = snapshot.at - turns[-1] if turns else 0.0
    if passed > 0.0:
        slept = snapshot.boot_at - boot - passed if snapshot.boot_at is not None and boot is not None else 0.0
        usual, again = machine.pace("turns", turns[-1]), machine.stall is not None and machine.stall[0] == turns[-1]
        stalled = len(turns) > TURNS_LEARNED and passed > max(turn.policies.gpu.blind_after, STALL_TURNS * usual)
        if stalled:
            machine.stall = (snapshot.at, passed)
            start.progress = replace(start.progress, lost_seconds=start.progress.lost_seconds + passed)
        if slept > SUSPEND_SECONDS or (stalled and not again):
            machine.read["turns"] = (*(at + passed for at in turns[:-1]), snapshot.at)
        if stalled or slept > SUSPEND_SECONDS:
            start.gap_at = turns[-1]
            start.reset()
    machine.pace("turns", snapshot.at)


def gaps(turn: Turn) -> Iterator[Finding]:
    """The newest stall of podwatch's own loop, for a while."""
    if turn.machine.stall is None or turn.at - turn.machine.stall[0] > STALL_SHOWN_SECONDS:
        return
    at, seconds = turn.machine.stall
    yield Finding(
        FindingKind.LOOP_STALLED,
        Severity.WARNING,
        f"podwatch observed nothing for {seconds:.0f} s: its process was stalled or the pod was frozen",
        at,
        "podwatch measures its waiting times from now on, so the gap does not count as a hang; if this repeats,"
        " check whether the pod is short of CPU or something stops podwatch",
        evidence=(Evidence("sensing loop", f"no turn for {seconds:.1f} s", Agreement.UNAVAILABLE, seconds),),
    )


# -- sensors -----------------------------------------------------------------------------------------------------------


def sensors(turn: Turn) -> Iterator[Finding]:
    """Each sensor that has given no reading for too long, each GPU that is lost, and a pod without a second signal."""
    machine, snapshot = turn.machine, turn.snapshot
    if machine.watching_since is None:
        machine.watching_since = snapshot.at
    for name, reading in _readings(snapshot):
        yield from _blind(turn, name, reading, machine.watching_since)
    yield from _devices(turn)
    if snapshot.at - machine.watching_since >= SECOND_SIGNAL_AFTER_SECONDS:
        yield from _no_second_signal(turn, machine.watching_since)


def _readings(snapshot: Snapshot) -> Iterable[tuple[str, Reading[Any]]]:
    return (
        ("gpus", snapshot.gpus),
        ("trainer", snapshot.trainer),
        ("disk", snapshot.disk),
        ("inference", snapshot.inference),
        ("progress", snapshot.progress),
        *((("host", snapshot.host),) if snapshot.host.state is not SensorState.PENDING else ()),
    )


def _blind(turn: Turn, name: str, reading: Reading[Any], watching_since: float) -> Iterator[Finding]:
    troubled, at = turn.machine.troubled, turn.at
    trouble = _trouble(turn, name, reading)
    if not trouble:
        troubled.pop(name, None)
        return
    since = troubled.setdefault(name, min(reading.at, at) if reading.at > 0 else at)
    if reading.state is SensorState.PENDING:
        since = troubled[name] = max(since, watching_since)
    lasting = at - since
    if reading.state not in (SensorState.DENIED, SensorState.ABSENT) and lasting < turn.policies.gpu.blind_after:
        return
    yield Finding(
        FindingKind.SENSOR_BLIND,
        Severity.WARNING,
        f"the {name} sensor cannot observe: {trouble}",
        since,
        evidence=(Evidence(name, str(reading.state), Agreement.UNAVAILABLE, lasting),),
        subject=name,
    )


def _trouble(turn: Turn, name: str, reading: Reading[Any]) -> str:
    policy = turn.policies.gpu
    if reading.state is SensorState.OK:
        age = turn.at - reading.at
        return f"its newest reading is {age:.0f} s old" if age > policy.blind_after * LATE_FACTOR[name] else ""
    if reading.state is SensorState.ABSENT:
        # Only missing NVML is a problem: an unset URL or step source is the operator's choice.
        return reading.detail or "not available" if name == "gpus" and policy.inference else ""
    return reading.detail or str(reading.state)


def _devices(turn: Turn) -> Iterator[Finding]:
    gpus, inference = turn.snapshot.gpus, turn.policies.gpu.inference
    if not gpus.ok or gpus.value is None:
        return
    for gpu in gpus.value:
        if gpu.state is GpuState.LOST:
            yield Finding(
                FindingKind.GPU_LOST,
                Severity.CRITICAL,
                f"GPU {gpu.index} fell off the bus: the driver cannot reach it",
                gpus.at,
                suggestion="restarting training cannot repair it: reboot the pod or move to another machine",
                evidence=(Evidence(f"gpu{gpu.index}", gpu.detail or "lost", Agreement.AGREES),),
                subject=f"gpu{gpu.index}",
            )
        elif gpu.index in inference and (gpu.state is not GpuState.OK or gpu.memory_used_bytes is None):
            yield _unreadable(gpu.index, gpu.detail or str(gpu.state), gpus.at)
    for index in sorted(set(inference) - {g.index for g in gpus.value}):
        yield _unreadable(index, "NVML does not list it", gpus.at)


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


def _no_second_signal(turn: Turn, since: float) -> Iterator[Finding]:
    """A blind watcher does not look healthy: where nothing could confirm a death, the status says so."""
    snapshot, trainer = turn.snapshot, turn.trainer
    asked = snapshot.inference.state not in (SensorState.ABSENT, SensorState.DENIED)
    if not turn.policies.gpu.inference or asked or not trainer.alive:
        return
    known = {ProcessRole.ENGINE, ProcessRole.INFERENCE}
    if any(p.cuda is not None or p.role in known for p in trainer.descendants):
        return
    if snapshot.progress.ok and (snapshot.progress.value or "progress" in turn.learned.seen):
        return
    yield Finding(
        FindingKind.NO_SECOND_SIGNAL,
        Severity.WARNING,
        "podwatch sees the GPU memory but no corroborating signal (server health, processes): it would report a dead"
        " engine but not restart training",
        since,
        suggestion="set [inference] urls, or run podwatch as the trainer's user or as root",
        evidence=(
            Evidence("processes", "not readable or not recognized", Agreement.UNAVAILABLE),
            Evidence("health", snapshot.inference.detail or "not configured", Agreement.UNAVAILABLE),
            Evidence("steps", snapshot.progress.detail or "none seen", Agreement.UNAVAILABLE),
        ),
    )
