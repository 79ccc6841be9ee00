"""All rules, one turn at a time: state and snapshot in, state and findings out.

A recording can be replayed through ``advance``: it reads no clock and keeps all state in ``DetectionState``. To add a
rule: write a function from a turn to findings, add a line to ``RULES``, and describe it in docs/detection.md.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from podwatch.config.settings import Policies
from podwatch.detection.blind_sensors import gaps, observe_gap, sensors
from podwatch.detection.checkpoint_overdue import checkpoint_overdue
from podwatch.detection.deaths import dead_server, is_confirming, silent_death
from podwatch.detection.exits import child_ended, launcher_ended
from podwatch.detection.going_backwards import going_backwards
from podwatch.detection.hang import hang
from podwatch.detection.learned import Learned
from podwatch.detection.log_rules import log_rules
from podwatch.detection.observe import OBSERVERS, Turn
from podwatch.detection.progress import WATCHED_SECONDS, Progress, target_reached
from podwatch.detection.start import Machine, Start
from podwatch.detection.training_metrics import training_health
from podwatch.detection.warnings import gpu_health, resources
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.snapshot import Desired, Snapshot, TrainerSample


@dataclass(frozen=True, slots=True)
class Rule:
    """``name``: stable, a section of docs/detection.md. ``judge``: a reading that is missing is no evidence and leads
    to no verdict. ``kinds``: the findings that it can raise. ``needs``: what is missing skips the rule."""

    name: str
    judge: Callable[[Turn], Iterable[Finding]]
    kinds: tuple[FindingKind, ...]
    needs: tuple[Callable[[Turn], bool], ...] = ()

    def ask(self, turn: Turn) -> Iterable[Finding]:
        return self.judge(turn) if all(need(turn) for need in self.needs) else ()


def lives(turn: Turn) -> bool:
    return turn.trainer.alive


def wanted(turn: Turn) -> bool:
    return turn.wanted


def continues(turn: Turn) -> bool:
    return turn.wanted and not turn.ending


def servers(turn: Turn) -> bool:
    return turn.snapshot.inference.ok


K = FindingKind
RULES = (
    Rule("silent-death", silent_death, (K.SILENT_DEATH, K.MEMORY_MAY_FALL, K.GPU_MIG), (lives,)),
    Rule("inference", dead_server, (K.SILENT_DEATH,), (lives, continues, servers)),
    Rule("exits", launcher_ended, (K.TRAINER_EXITED, K.FINISHED)),
    Rule("exits", child_ended, (K.REQUIRED_CHILD_EXITED,), (lives, continues)),
    Rule("hang", hang, (K.HANG, K.FINISHED), (lives, wanted)),
    Rule("going-backwards", going_backwards, (K.GOING_BACKWARDS,), (lives, wanted)),
    Rule("sensors", sensors, (K.SENSOR_BLIND, K.GPU_LOST, K.NO_SECOND_SIGNAL)),
    Rule("resources", resources, (K.DISK_HIGH, K.INODES_LOW, K.FILES_LOW, K.MEMORY_LOW, K.OUT_OF_MEMORY, K.SHM_LOW)),
    Rule("gpu-health", gpu_health, (K.GPU_FAULT, K.GPU_THROTTLED)),
    Rule("checkpoint-overdue", checkpoint_overdue, (K.CHECKPOINT_OVERDUE,), (lives, continues)),
    Rule("log-rules", log_rules, (K.LOG_RULE,)),
    Rule("training-health", training_health, (K.TRAINING_HEALTH,)),
    Rule("gaps", gaps, (K.LOOP_STALLED,)),
)
_ORDER = {Severity.CRITICAL: 0, Severity.WARNING: 1, Severity.INFO: 2}
SECOND_SIGNALS = {
    "engine-process": "engine", "cuda-context": "cuda", "inference-health": "health:", "liveness": "liveness:",
    "generation-tokens": "tokens:", "step-progress": "progress",
}  # fmt: skip
"""How the status names a corroborating signal, and how ``Learned.seen`` begins."""


@dataclass(frozen=True, slots=True)
class DetectionState:
    """All state. Only ``learned`` survives a restart of podwatch, ``machine`` a restart of the trainer."""

    learned: Learned = field(default_factory=Learned)
    start: Start = field(default_factory=Start)
    machine: Machine = field(default_factory=Machine)

    @property
    def armed(self) -> tuple[str, ...]:
        """The rules that have a signal that was healthy during this start, so that its failure counts:
        ``silent-death:gpu0``, ``hang``."""
        seen = self.learned.seen
        return (
            *(f"silent-death:{name}" for name in seen if name.startswith("gpu")),
            *(f"inference:{name.partition(':')[2]}" for name in seen if name.startswith("health:")),
            *(("hang",) if "progress" in seen else ()),
        )


def initial(policies: Policies, learned: Learned | None = None) -> DetectionState:
    """The state before the first turn. Baselines of GPUs that are no longer configured are dropped."""
    if learned is None:
        return DetectionState()
    kept = tuple(p for p in learned.gpu_baseline_bytes if p[0] in policies.gpu.inference)
    return DetectionState(replace(learned, gpu_baseline_bytes=kept))


def second_signals(state: DetectionState) -> tuple[str, ...]:
    """The corroborating signals that were healthy during this start, so that their failure can confirm a death."""
    seen = state.learned.seen
    return tuple(name for name, begin in SECOND_SIGNALS.items() if any(s.startswith(begin) for s in seen))


def advance(
    state: DetectionState, snapshot: Snapshot, policies: Policies
) -> tuple[DetectionState, tuple[Finding, ...]]:
    """Judge one turn of the sensing loop; ``state`` is not changed. Findings are worst first; a condition keeps its
    ``key`` and ``since``."""
    turn = turn_of(state.start.copy(), state.machine.copy(), state.learned, snapshot, policies)
    observe_gap(turn)
    _begin_start(turn)
    findings: list[Finding] = []
    for observer in OBSERVERS:
        try:
            observer(turn)
        except Exception as error:  # a part that fails must not stop the others, and the guard
            findings.append(_failed(observer.__name__.replace("_", "-"), error, snapshot.at))
    turn.ending = _is_ending(turn)
    for rule in RULES:
        try:
            findings.extend(rule.ask(turn))
        except Exception as error:
            findings.append(_failed(rule.name, error, snapshot.at))
    findings.sort(key=lambda f: (_ORDER[f.severity], f.kind, f.subject))
    return DetectionState(turn.learned, turn.start, turn.machine), tuple(findings)


def turn_of(start: Start, machine: Machine, learned: Learned, snapshot: Snapshot, policies: Policies) -> Turn:
    """The turn before anything is observed in it."""
    trainer = snapshot.trainer.value if snapshot.trainer.ok else None
    return Turn(
        snapshot, policies, start, machine, learned, trainer or TrainerSample(), snapshot.desired is Desired.RUNNING
    )


def _is_ending(turn: Turn) -> bool:
    return not turn.wanted or turn.trainer.finish_line or (
        turn.snapshot.trainer.ok and target_reached(turn.start.progress, turn.policies)
    )  # fmt: skip


def confirming(state: DetectionState, snapshot: Snapshot, policies: Policies) -> bool:
    """Whether the evidence of a death is incomplete after this turn and a reading before the next poll may complete it.
    Pure; false on every healthy turn."""
    turn = turn_of(state.start, state.machine, state.learned, snapshot, policies)
    turn.ending = _is_ending(turn)
    return is_confirming(turn)


def _failed(name: str, error: Exception, at: float) -> Finding:
    """A finding for a bug of podwatch: one rule is blind, and the status must show that."""
    what = f"{type(error).__name__}: {error}"
    return Finding(
        FindingKind.SENSOR_BLIND,
        Severity.CRITICAL,
        f"the {name} detector failed: {what}",
        at,
        suggestion="this is a bug in podwatch: please report it; the other detectors still work",
        evidence=(Evidence(f"{name} detector", what, Agreement.UNAVAILABLE),),
        subject=f"detector-{name}",
    )


def _begin_start(turn: Turn) -> None:
    """An empty ``Start`` at a new start of training; learned values stay."""
    trainer, at = turn.trainer, turn.at
    if not turn.snapshot.trainer.ok or trainer.start_id == turn.start.id:
        return
    if not trainer.start_id and turn.start.id is not None and not trainer.alive:
        return  # between two starts: the old state still describes the end
    if turn.learned.start_id != trainer.start_id:
        turn.learned = replace(turn.learned, start_id=trainer.start_id, seen=())
    started = trainer.started_at if trainer.started_at is not None else at
    turn.start = Start(
        id=trainer.start_id, progress=Progress(started_at=started, watched=at - started <= WATCHED_SECONDS)
    )  # fmt: skip
    for name in turn.learned.seen:
        for armed in (name, name.replace("health:", "sick:")):
            turn.start.windows[armed] = replace(turn.start.of(armed), armed=True)
