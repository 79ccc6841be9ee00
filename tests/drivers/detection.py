"""Detection, driven from outside: snapshots in, findings out; and recorded nights in a form that needs no product.

``initial`` and ``advance`` judge turn by turn, and are pure. Of their state tests read ``learned`` and ``armed``, and
ask the functions below for the rest. ``read_night`` and ``write_night`` know the form of a recorded night, which
tests/detection/nights/README.md describes; ``found_in`` gives what is found in it, in a form that can be written down.
"""

import gzip
import json
import lzma
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from podwatch import __version__
from podwatch.config.settings import Policies
from podwatch.detection.confirming import no_step_limit, quiet_seconds
from podwatch.detection.deaths import CONFIRM_SECONDS, PROVEN_SECONDS, REFUSED_SECONDS, SEEN_TO_END
from podwatch.detection.exits import ALONE_SECONDS
from podwatch.detection.hang import limit_seconds as hang_limit
from podwatch.detection.hang import patience_seconds
from podwatch.detection.learned import Learned
from podwatch.detection.observe import Turn, lasting_seconds, observe_ooms, observe_saves
from podwatch.detection.operator_ends import ATTACH_EXIT_WAIT_SECONDS, INTERRUPTED, TERMINAL_WAIT_SECONDS, Wait
from podwatch.detection.operator_ends import operator_wait as wait_for_operator
from podwatch.detection.progress import save_limit
from podwatch.detection.rules import RULES, DetectionState, advance, confirming, initial, second_signals
from podwatch.detection.window import Window
from podwatch.disk.next_save import LEAD_SECONDS
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity, Verdict
from podwatch.domain.process import TICKS_PER_SECOND, ExitStatus, ProcessIdentity, ProcessRole, ProcessSample
from podwatch.domain.snapshot import (
    ATTACHED_ID,
    CheckpointMark,
    Desired,
    DiskSample,
    FileUse,
    GpuSample,
    GpuState,
    Health,
    HostSample,
    InferenceSample,
    Liveness,
    LogMatch,
    ProcessEnd,
    ProgressSample,
    ProgressSource,
    Reading,
    SensorState,
    Snapshot,
    Supervision,
    TrainerSample,
    TrainingMetrics,
    XidEvent,
    observed,
    unobserved,
)
from podwatch.domain.trainer_log import LogRule
from podwatch.recording.format import Header, write_recording
from podwatch.sensors.gpu import GpuSensor

__all__ = [
    "ALONE_SECONDS",
    "ATTACHED_ID",
    "ATTACH_EXIT_WAIT_SECONDS",
    "CONFIRM_SECONDS",
    "INTERRUPTED",
    "PROVEN_SECONDS",
    "REFUSED_SECONDS",
    "SEEN_TO_END",
    "TERMINAL_WAIT_SECONDS",
    "TICKS_PER_SECOND",
    "Agreement",
    "CheckpointMark",
    "Desired",
    "DetectionState",
    "DiskSample",
    "Evidence",
    "ExitStatus",
    "FileUse",
    "Finding",
    "FindingKind",
    "Found",
    "GpuSample",
    "GpuSensor",
    "GpuState",
    "Health",
    "HostSample",
    "InferenceSample",
    "Judged",
    "Learned",
    "Liveness",
    "LogMatch",
    "LogRule",
    "Night",
    "Policies",
    "ProcessEnd",
    "ProcessIdentity",
    "ProcessRole",
    "ProcessSample",
    "ProgressSample",
    "ProgressSource",
    "Reading",
    "RuleAlone",
    "RuleTurn",
    "SensorState",
    "Severity",
    "Snapshot",
    "Supervision",
    "TrainerSample",
    "TrainingMetrics",
    "Verdict",
    "Window",
    "XidEvent",
    "acts",
    "advance",
    "confirming",
    "each_rule",
    "ended_roles",
    "expected_of",
    "found_in",
    "gpus_of_the_trainer",
    "hang_limit",
    "initial",
    "judging",
    "knowing_only",
    "lasting_seconds",
    "memory_of_this_start",
    "newest_progress_at",
    "no_step_limit",
    "observed",
    "operator_wait",
    "patience_seconds",
    "quiet_seconds",
    "read_night",
    "reborn",
    "save_limit",
    "second_signals",
    "survives_being_kept",
    "thresholds",
    "unobserved",
    "write_expected",
    "write_night",
]  # fmt: skip

T = TypeVar("T")


# -- judging -----------------------------------------------------------------------------------------------------------


def acts(finding: Finding) -> bool:
    """Whether podwatch does something about it."""
    return finding.verdict is not Verdict.NONE and finding.confirmed


@dataclass(frozen=True, slots=True)
class RuleTurn:
    """What one rule says of one turn: its ``name``, the ``kinds`` it can raise, those it raised, what it arms."""

    name: str
    kinds: tuple[FindingKind, ...]
    raised: tuple[FindingKind, ...]
    armed: tuple[str, ...]


def reborn(state: DetectionState, policies: Policies) -> DetectionState:
    """What a podwatch that was restarted remembers: what it had learned, as the journal keeps it (JSON)."""
    return initial(policies, Learned.from_json(json.loads(json.dumps(state.learned.to_json()))))


def knowing_only(learned: Learned) -> DetectionState:
    """The state of one that has learned this and has seen nothing."""
    return DetectionState(learned=learned)


def memory_of_this_start(state: DetectionState) -> dict[str, object]:
    """Everything that is remembered of this start of the trainer, by name: comparable, and opaque."""
    return {"learned": state.learned, "start": state.start}


def ended_roles(state: DetectionState) -> dict[str, float]:
    """Each role of which no process is left, and since when."""
    return state.start.ended_roles()


def operator_wait(gone: Mapping[str, float], snapshot: Snapshot, trainer: TrainerSample, since: float) -> Wait | None:
    """How long podwatch waits for the operator after an end of the engine at ``since``, when these roles are gone."""
    state = DetectionState()
    state.start.windows = {f"role:{role}": Window(True, at, at, 1) for role, at in gone.items()}
    return wait_for_operator(
        Turn(snapshot, Policies(), state.start, state.machine, state.learned, trainer), since
    )  # fmt: skip


def gpus_of_the_trainer(state: DetectionState) -> frozenset[int]:
    """The GPUs on which the trainer was seen to work."""
    return state.start.tree.trainer_gpus


def newest_progress_at(state: DetectionState) -> float | None:
    """The monotonic second of the newest progress that counts."""
    return state.start.progress.newest_at


def each_rule(state: DetectionState, snapshot: Snapshot, policies: Policies) -> Iterator[RuleTurn]:
    """What each rule says of this turn, asked directly: ``advance`` reports a fault of a rule as a finding, this
    raises."""
    for rule in RULES:
        raised = tuple(f.kind for f in RuleAlone(rule.name, state).ask(snapshot, policies))
        yield RuleTurn(rule.name, tuple(k for r in RULES if r.name == rule.name for k in r.kinds), raised, state.armed)


class RuleAlone:
    """The rules of one name, turn by turn: without those of other names and, of what ``advance`` observes before them,
    with the saves and the OOM kills only."""

    def __init__(self, name: str, state: DetectionState | None = None) -> None:
        before = state or DetectionState()
        self.rules = [rule for rule in RULES if rule.name == name]
        self.start, self.machine, self.learned = before.start.copy(), before.machine.copy(), before.learned

    def ask(
        self, snapshot: Snapshot, policies: Policies, *, trainer: TrainerSample | None = None, wanted: bool = True,
        ending: bool = False,
    ) -> tuple[Finding, ...]:  # fmt: skip
        seen = trainer or snapshot.trainer.value or TrainerSample()
        turn = Turn(snapshot, policies, self.start, self.machine, self.learned, seen, wanted, ending)
        observe_saves(turn)
        observe_ooms(turn)
        found = tuple(finding for rule in self.rules for finding in rule.ask(turn))
        self.learned = turn.learned
        return found


def survives_being_kept(learned: Learned) -> bool:
    """Whether what was learned is the same after it was written down and read."""
    return Learned.from_json(json.loads(json.dumps(learned.to_json()))) == learned


def judging(policies: Policies | None = None, **changes: object) -> Policies:
    """``policies`` (None: the defaults) with other values: ``gpu__hold=2.0``, ``max_steps=40``."""
    found = policies or Policies()
    for name, value in changes.items():
        section, _, key = name.rpartition("__")
        changed = getattr(found, section).model_copy(update={key: value}) if section else value
        found = found.model_copy(update={section or key: changed})
    return found


# -- recorded nights ---------------------------------------------------------------------------------------------------

NIGHT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Night:
    """A recorded night. ``holds``: what happens in it. ``poll_seconds``: between two turns as a rule."""

    name: str
    holds: str
    turns: tuple[Snapshot, ...]
    policies: Policies = field(default_factory=Policies)
    learned: Learned = field(default_factory=Learned)
    layout: str = "prime-rl"
    poll_seconds: float = 2.0


def read_night(path: Path) -> Night:
    """The night in a file NAME.jsonl.xz."""
    with lzma.open(path, "rb") as file:
        header = json.loads(file.readline())
        assert header["podwatch_night"] == NIGHT_VERSION, path
        turns = tuple(map(_adapter(Snapshot).validate_json, file))
    assert len(turns) == header["turns"], f"{path} has lost turns"
    return Night(
        header["name"], header["holds"], turns, _policies(header["thresholds"]),
        Learned.from_json(header["learned"]), header["layout"], header["poll_seconds"],
    )  # fmt: skip


def _policies(thresholds: Any) -> Policies:
    """The names are those of the first recorded nights. What is left out had its default in every night."""
    by, disk, resources, training = (thresholds[name] for name in ("detection", "disk", "resources", "training"))
    return Policies.model_validate(
        {
            "gpu": {
                "inference": by["inference_gpus"], "trainer": by["trainer_gpus"], "hold": by["hold_seconds"],
                "floor": by["memory_floor_bytes"],
            },
            "hang": {"floor": by["hang_floor_seconds"], "k": by["hang_k"]},
            "inference": {"sleep": "yes" if by["memory_may_fall"] else "auto" if by["sleep_auto"] else "no"},
            "disk": {**disk, "on_full": "stop" if disk["stop_when_full"] else "stay"},
            "resources": {
                **resources, "overdue": resources["checkpoint_overdue_k"],
                "overdue_floor": resources["checkpoint_overdue_floor_seconds"],
            },
            "training": {**training, "plateau_steps": training["plateau_steps"] or 0},
            "log_rules": [{**rule, "within": rule["within_seconds"]} for rule in thresholds["log_rules"]],
            "startup_patience": by["startup_patience_seconds"],
            "nofile": 1024,  # the nights do not say it, and some were recorded where a pod allows few files
            "max_steps": by["max_steps"],
            "clean_exit_finishes": by["clean_exit_finishes"],
            "save_interval_steps": resources["save_interval_steps"],
        },
        extra="ignore",
    )  # fmt: skip


def thresholds(policies: Policies) -> Any:
    """As ``_policies`` reads them."""
    found = policies.model_dump(mode="json")
    gpu, hang, disk, resources = found["gpu"], found["hang"], found["disk"], found["resources"]
    sleep = found["inference"]["sleep"]
    return {
        "detection": {
            "inference_gpus": gpu["inference"], "trainer_gpus": gpu["trainer"], "hold_seconds": gpu["hold"],
            "memory_floor_bytes": gpu["floor"], "hang_floor_seconds": hang["floor"], "hang_k": hang["k"],
            "memory_may_fall": sleep == "yes", "sleep_auto": sleep == "auto",
            "startup_patience_seconds": found["startup_patience"], "max_steps": found["max_steps"],
            "clean_exit_finishes": found["clean_exit_finishes"],
        },
        "disk": {**disk, "lead_seconds": LEAD_SECONDS, "stop_when_full": disk["on_full"] == "stop"},
        "resources": {
            **resources, "checkpoint_overdue_k": resources["overdue"],
            "checkpoint_overdue_floor_seconds": resources["overdue_floor"],
            "save_interval_steps": found["save_interval_steps"],
        },
        "training": found["training"],
        "log_rules": [{**rule, "within_seconds": rule["within"]} for rule in found["log_rules"]],
    }  # fmt: skip


def write_as_recording(path: Path, night: Night) -> None:
    """Write the night as podwatch records one, for ``podwatch replay``."""
    header = Header(
        "night", night.layout, wall=night.turns[0].wall, poll=night.poll_seconds, policies=night.policies,
        learned=night.learned,
    )  # fmt: skip
    write_recording(path, header, night.turns)


def write_for_edition_2(path: Path, night: Night) -> None:
    """Write the night as the second edition recorded one: each turn whole, which its changes may be, too."""
    header = {
        "podwatch_recording": 1,
        "version": __version__,
        "run_id": "night",
        "layout": night.layout,
        "wall": night.turns[0].wall,
        "poll": night.poll_seconds,
        "policies": thresholds(night.policies),
        "learned": night.learned.to_json(),
    }
    with gzip.open(path, "wb") as file:
        for line in (header, *({"=": _for_edition_2(turn)} for turn in night.turns)):
            file.write(_line(line))


def _for_edition_2(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _for_edition_2(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, frozenset):
        return sorted(map(_for_edition_2, value))
    if isinstance(value, tuple):
        return list(map(_for_edition_2, value))
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return "keeper" if value is Supervision.SUPERVISED else value


def write_night(path: Path, night: Night) -> None:
    """Write the file that ``read_night`` reads. The same night gives the same bytes."""
    header = {
        "podwatch_night": NIGHT_VERSION,
        "name": night.name,
        "holds": night.holds,
        "layout": night.layout,
        "poll_seconds": night.poll_seconds,
        "turns": len(night.turns),
        "thresholds": thresholds(night.policies),
        "learned": night.learned.to_json(),
    }
    with lzma.open(path, "wb", preset=9 | lzma.PRESET_EXTREME) as file:
        for line in (header, *map(asdict, night.turns)):
            file.write(_line(line))


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)


def _line(data: Mapping[str, object]) -> bytes:
    return json.dumps(data, separators=(",", ":"), allow_nan=False, default=sorted).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Found:
    """One finding of a night, from the turn that raised it (or changed it) until the turn that no longer has it. No
    wording. ``since_at``: the monotonic second at which its condition began. ``acts``: podwatch would have acted here,
    for the first time since the trainer's start. ``until_wall`` None: to the end of the night."""

    kind: str
    subject: str
    severity: str
    verdict: str
    confirmed: bool
    from_wall: float
    until_wall: float | None
    since_at: float
    start_id: str
    acts: bool


@dataclass(frozen=True, slots=True)
class Judged:
    """What came of a night. ``acting``: the findings on which podwatch would have acted, with their evidence.
    ``seconds`` that it covers."""

    found: tuple[Found, ...]
    acting: tuple[tuple[float, Finding], ...]
    seconds: float

    def acted(self, verdict: Verdict) -> list[tuple[float, Finding]]:
        """The epoch second and the finding of each act of this kind."""
        return [(wall, finding) for wall, finding in self.acting if finding.verdict is verdict]


def found_in(night: Night) -> Judged:
    """Judge the whole night from its first turn."""
    found: list[Found] = []
    open_now: dict[str, int] = {}
    acting: list[tuple[float, Finding]] = []
    starts_acted: set[str] = set()
    for snapshot, findings in _turns_of(night):
        now = {f.key: f for f in findings}
        for key, number in list(open_now.items()):
            if key not in now or not _same_state(found[number], now[key]):
                found[number] = replace(found[number], until_wall=snapshot.wall)
                del open_now[key]
        start_id = snapshot.trainer.value.start_id if snapshot.trainer.value is not None else ""
        for key, finding in now.items():
            if key in open_now:
                continue
            act = acts(finding) and start_id not in starts_acted
            if act:
                starts_acted.add(start_id)
                acting.append((snapshot.wall, finding))
            open_now[key] = len(found)
            found.append(_found(finding, snapshot.wall, start_id, act))
    return Judged(tuple(found), tuple(acting), sum(max(0.0, b.at - a.at) for a, b in pairwise(night.turns)))


def _turns_of(night: Night) -> Iterator[tuple[Snapshot, tuple[Finding, ...]]]:
    state = initial(night.policies, night.learned)
    for snapshot in night.turns:
        state, findings = advance(state, snapshot, night.policies)
        yield snapshot, findings


def _found(finding: Finding, wall: float, start_id: str, act: bool) -> Found:
    return Found(
        finding.kind.value, finding.subject, finding.severity.value, finding.verdict.value, finding.confirmed,
        wall, None, finding.since, start_id, act,
    )  # fmt: skip


def _same_state(found: Found, finding: Finding) -> bool:
    return (found.severity, found.confirmed, found.verdict) == (finding.severity, finding.confirmed, finding.verdict)


def expected_of(path: Path) -> tuple[Found, ...]:
    """What is to be found in the night of this file: NAME.found.jsonl beside NAME.jsonl.xz."""
    lines = _expected_path(path).read_bytes().splitlines()
    return tuple(Found(**json.loads(line)) for line in lines)


def write_expected(path: Path, found: Iterable[Found]) -> None:
    _expected_path(path).write_bytes(b"".join(_line(asdict(one)) for one in found))


def _expected_path(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".jsonl.xz") + ".found.jsonl")
