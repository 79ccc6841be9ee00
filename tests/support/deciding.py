"""Facts for decisions: one state of the pod and of run.json, with everything that a case does not name at rest."""

import json
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from podwatch.config.settings import Settings
from podwatch.domain.checkpoint import CheckpointSet, Completeness
from podwatch.domain.facts import Facts, Inventory, PodSearch, StoreFacts, Trainer
from podwatch.domain.finding import Finding, FindingKind, Severity, Verdict
from podwatch.domain.lease import Decision as Lease
from podwatch.domain.lease import LeaseAction
from podwatch.domain.process import FoundTree, PodProcess, ProcessIdentity, ProcessRole, TreeAnswer
from podwatch.domain.run import StartRecord
from podwatch.domain.run_state import RunState
from podwatch.domain.snapshot import Reading, SensorState, Snapshot, observed, unobserved
from podwatch.domain.starts import StartedBy, TrainerStart
from podwatch.recovery.actions import Decision
from podwatch.recovery.decide import ROWS, Now, decide

AT, WALL = 1000.0, 100_000.0
FREE_SINCE = 900.0
"""Nothing of ours lives since then, in every case without a trainer."""
GUARD = TrainerStart("guard", wall=1.0, by=StartedBy.GUARD, proved=False, branch="b")
LAST = TrainerStart("s1", 40, 50_000.0, branch="b")
OVER = replace(LAST, ended=WALL - 100)
RECORD = StartRecord("s1", 50_000.0, ("train",), "/")
OURS = Trainer("s1", 41)
DEAD = Trainer("s1", 41, lives=False, ended_wall=WALL - 2, ended_at=AT - 2)
NO_GPU: Reading[Any] = unobserved(SensorState.ABSENT, AT, "no GPU")


def settings(**sections: Any) -> Settings:
    return _settings(json.dumps(sections, sort_keys=True))


@cache
def _settings(sections: str) -> Settings:
    base: dict[str, Any] = {
        "run_id": "r1",
        "state_dir": Path("/state"),
        "trainer": {"output_dir": Path("/out"), "command": ["train"], "layout": "hf"},
        "gpu": {"inference": [0]},
    }
    for section, values in json.loads(sections).items():
        base[section] = {**base.get(section, {}), **values} if isinstance(values, dict) else values
    return Settings.model_validate(base)


def saved(step: int, **changes: Any) -> CheckpointSet:
    found = CheckpointSet(step, "hf", Completeness.COMPLETE, (), 100, 3, float(step), f"l{step}", start_id="s1")
    return replace(found, **changes)


def settling(step: int, seconds: float = 5.0) -> CheckpointSet:
    return saved(step, completeness=Completeness.WRITING, save_id="", settles_in=seconds, reason="it is new")


def tree(pid: int = 70, answer: TreeAnswer = TreeAnswer.ATTACH, age: float = 10.0, *, trains: bool = True) -> FoundTree:
    """``age`` 10: it began after our last trainer ended, 100 s ago."""
    role = ProcessRole.LAUNCHER if trains else ProcessRole.OTHER
    top = PodProcess(ProcessIdentity(pid, pid), 1, "python", ("python", "train.py"), age=age, role=role, cuda=trains)
    return FoundTree(top, answer, "a file of a checkpoint is open", trains=trains)


def finding(verdict: Verdict, kind: FindingKind = FindingKind.TRAINER_EXITED, **changes: Any) -> Finding:
    found = Finding(kind, Severity.CRITICAL, f"{kind} happened", AT - 2, verdict=verdict, confirmed=True)
    return replace(found, **changes)


def searched(*trees: FoundTree, at: float = AT - 50, lock_holder: str = "") -> Reading[PodSearch]:
    return observed(PodSearch(trees, lock_holder), at)


def held(*names: str, at: float = AT - 50) -> Reading[tuple[str, ...]]:
    return observed(names, at)


def leased(act: LeaseAction, why_not: str = "", *, stop: bool = False, error: str = "", **more: Any) -> StoreFacts:
    return StoreFacts("file:///s", error=error, lease=Lease(act, why_not, stop, **more))


@dataclass(frozen=True)
class Case:
    """What differs from a pod at rest, on which training is wanted and can start."""

    facts: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    def over(self, other: "Case") -> "Case":
        """Both at once; where they contradict each other, this one counts."""
        return Case(
            {**other.facts, **self.facts},
            {**other.run, **self.run},
            self.findings or other.findings,
            {**other.settings, **self.settings},
        )

    def now(self) -> Now:
        trainer = self.facts.get("trainer")
        last = OVER if trainer is None else replace(LAST, confirmed=True)
        run = RunState("r1", starts=(GUARD, last), last_start=RECORD)
        base: dict[str, Any] = {
            "pod": Snapshot(at=AT, wall=WALL, gpus=NO_GPU),
            "run": replace(run, **self.run),
            "checkpoints": (saved(40),),
            "free_since": FREE_SINCE,
            "search": searched(),
            "held": held(),
            "inventory": Inventory(),
        }
        return Now(Facts(**{**base, **self.facts}), self.findings, settings(**self.settings))

    @property
    def decision(self) -> Decision:
        now = self.now()
        return decide(now.facts, now.findings, now.settings)

    @property
    def row(self) -> str:
        """The name of the row that answers."""
        now = self.now()
        return next(row.__name__ for row in ROWS if row(now) is not None)
