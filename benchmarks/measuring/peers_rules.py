"""What the documented rules of others would say on the same snapshots: small pure functions, each with its source.

Only the rules are here, not the programs: where a program needs its library inside the training code (NVRx, DLRover) a
step seen by podwatch stands for its call, which is in its favour. A rule that has alarmed begins anew, as after the
restart it asks for. Defaults as of mid-2026; facts/peers.md sections 2.1 to 2.4.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from podwatch.detection.window import Window
from podwatch.domain.process import ProcessRole
from podwatch.domain.snapshot import Desired, GpuState, Snapshot

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Seen:
    """What one of the rules remembers. Times are monotonic seconds."""

    start_id: str = ""
    began: float = 0.0
    alive_at: float = 0.0
    """When a process of the training was last seen."""
    step: int | None = None
    step_at: float | None = None
    gaps: tuple[float, ...] = ()
    longest: float = 0.0
    count: int = 0
    saving_at: float = 0.0
    ticked: float = 0.0
    armed: bool = False
    low: Window = field(default_factory=Window)
    ended: bool = False


Rule = Callable[[Seen, Snapshot, tuple[int, ...]], tuple[Seen, bool]]
"""(what it remembers, one look, the inference GPUs) -> (what it remembers now, it alarms)."""

TRAINING = (ProcessRole.TRAINER, ProcessRole.ORCHESTRATOR)


def _follow(seen: Seen, snapshot: Snapshot) -> Seen:
    """Steps, processes and starts: a start by a person begins everything anew."""
    at, trainer = snapshot.at, snapshot.trainer.value
    if trainer is not None and trainer.start_id != seen.start_id:
        seen = Seen(trainer.start_id, at, at)
    if trainer is None or any(p.role in TRAINING for p in trainer.descendants) or not seen.began:
        seen = replace(seen, alive_at=at)  # what podwatch cannot see another may: taken for alive
    if snapshot.desired is not Desired.RUNNING:
        return Seen(seen.start_id, at, at, ended=True)
    steps = [s for s in snapshot.progress.value or () if s.trained or s.step is None]
    newest = max(steps, key=lambda s: s.at, default=None)
    if newest is not None and (seen.step_at is None or newest.at > seen.step_at) and newest.at >= seen.began:
        gap = 0.0 if seen.step_at is None else newest.at - seen.step_at
        count = seen.count + 1
        gaps = (*seen.gaps, gap)[-20:] if seen.step_at is not None else seen.gaps
        longest = max(seen.longest, gap) if count > 6 else seen.longest
        seen = replace(seen, step=newest.step, step_at=newest.at, gaps=gaps, count=count, longest=longest)
    if snapshot.saving:
        seen = replace(seen, saving_at=at)
    return seen


def _ended(seen: Seen, snapshot: Snapshot, within: float) -> bool:
    """The trainer's process or its launcher is gone, and a person did not want it."""
    if seen.ended or snapshot.desired is not Desired.RUNNING:
        return False
    trainer = snapshot.trainer.value
    if trainer is not None and not trainer.alive and trainer.exit is not None:
        return True
    return snapshot.at - seen.alive_at > within


def wandb(seen: Seen, snapshot: Snapshot, _gpus: tuple[int, ...]) -> tuple[Seen, bool]:
    """A run whose SDK sent no heartbeat for 5 minutes is marked crashed (wandb issue 8592, pull request 12500). The SDK
    beats for as long as its process lives, whatever training does."""
    seen = _follow(seen, snapshot)
    return seen, not seen.ended and snapshot.at - seen.alive_at > 300.0


def gpud(seen: Seen, snapshot: Snapshot, _gpus: tuple[int, ...]) -> tuple[Seen, bool]:
    """Components look every 60 s; a GPU that is lost makes its component unhealthy. Used memory is a figure it reports
    and judges nothing by (gpud, components/accelerator/nvidia)."""
    if snapshot.at - seen.ticked < 60.0:
        return seen, False
    seen = replace(seen, ticked=snapshot.at)
    return seen, any(g.state is GpuState.LOST for g in snapshot.gpus.value or ())


def memory_alert(seen: Seen, snapshot: Snapshot, gpus: tuple[int, ...]) -> tuple[Seen, bool]:
    """Not a rule of theirs but what a person can write on 60 s figures of gpud or an exporter: an inference GPU that
    was full shows less than 1 GiB twice running."""
    if snapshot.at - seen.ticked < 60.0 or not snapshot.gpus.ok:
        return seen, False
    seen = replace(seen, ticked=snapshot.at)
    used = [g.memory_used_bytes or 0 for g in snapshot.gpus.value or () if g.index in gpus and g.state is GpuState.OK]
    low = bool(used) and min(used) < GIB
    armed = seen.armed or (bool(used) and min(used) > 2 * GIB)
    held = seen.low.observe(not (low and armed), snapshot.at, 130.0)
    return replace(seen, armed=armed, low=held), held.samples >= 2


def dlrover(seen: Seen, snapshot: Snapshot, _gpus: tuple[int, ...]) -> tuple[Seen, bool]:
    """Agent loop 15 s. No step for ten times the average of the last steps, at least 2 and at most 10 minutes (10 where
    none is known), 15 minutes with a save (dlrover/python/master: HANG_DOWNTIME, MIN_HANG_DOWNTIME, MAX_CKPT_THRESHOLD,
    check_job_step_hang). Its default is to notify; with hang_detection = 2 it restarts."""
    seen = _follow(seen, snapshot)
    if snapshot.at - seen.ticked < 15.0:
        return seen, False
    seen = replace(seen, ticked=snapshot.at)
    if _ended(seen, snapshot, 15.0):
        return seen, True
    if seen.step_at is None or seen.ended:
        return seen, False
    average = sum(seen.gaps) / len(seen.gaps) if seen.gaps else None
    limit = 600.0 if average is None else min(600.0, max(120.0, 10.0 * average))
    if snapshot.at - seen.saving_at < 5.0:
        limit = 900.0
    return seen, snapshot.at - max(seen.step_at, seen.saving_at if limit < 900.0 else 0.0) > limit


def nvrx_default(seen: Seen, snapshot: Snapshot, _gpus: tuple[int, ...]) -> tuple[Seen, bool]:
    """ft_launcher without calibration: 60 minutes to the first heartbeat, 45 between two, looked at every 5 s (NVIDIA
    resiliency extension, fault_tolerance/config.py and docs, heartbeats)."""
    return _nvrx(seen, snapshot, learned=False)


def nvrx_learned(seen: Seen, snapshot: Snapshot, _gpus: tuple[int, ...]) -> tuple[Seen, bool]:
    """The same with calculated timeouts: the longest interval seen times ``safety_factor`` 5, the first 5 left out."""
    return _nvrx(seen, snapshot, learned=True)


def _nvrx(seen: Seen, snapshot: Snapshot, *, learned: bool) -> tuple[Seen, bool]:
    seen = _follow(seen, snapshot)
    if snapshot.at - seen.ticked < 5.0:
        return seen, False
    seen = replace(seen, ticked=snapshot.at)
    if _ended(seen, snapshot, 5.0):
        return seen, True
    if seen.ended:
        return seen, False
    if seen.step_at is None:
        return seen, snapshot.at - seen.began > 3600.0
    timeout = 5.0 * seen.longest if learned and seen.longest else 2700.0
    return seen, snapshot.at - seen.step_at > timeout


def nvrx_inprocess(seen: Seen, snapshot: Snapshot, _gpus: tuple[int, ...]) -> tuple[Seen, bool]:
    """In-process wrapper with a ping per step: soft timeout 60 s, hard 90 s (inprocess/wrap.py). Made for pre-training
    steps of seconds; a step of an RL run takes minutes."""
    seen = _follow(seen, snapshot)
    if seen.step_at is None or seen.ended:
        return seen, False
    return seen, snapshot.at - seen.step_at > 61.0


RULES: dict[str, Rule] = {
    "W&B": wandb,
    "gpud": gpud,
    "60 s memory alert": memory_alert,
    "DLRover": dlrover,
    "NVRx default": nvrx_default,
    "NVRx learned": nvrx_learned,
    "NVRx in-process": nvrx_inprocess,
}


class Peers:
    """All rules side by side over one trace. ``alarms``: rule -> monotonic seconds at which it alarmed."""

    def __init__(self, inference_gpus: tuple[int, ...]) -> None:
        self._gpus = inference_gpus
        self._seen: dict[str, Any] = dict.fromkeys(RULES, Seen())
        self.alarms: dict[str, list[float]] = {name: [] for name in RULES}

    def look(self, snapshot: Snapshot) -> None:
        for name, rule in RULES.items():
            seen, alarm = rule(self._seen[name], snapshot, self._gpus)
            if alarm:
                self.alarms[name].append(snapshot.at)
                # Begins anew; an end that was told once is not told again.
                over = snapshot.trainer.value is not None and not snapshot.trainer.value.alive
                seen = Seen(seen.start_id, snapshot.at, snapshot.at, ended=over, ticked=snapshot.at)
            self._seen[name] = seen
