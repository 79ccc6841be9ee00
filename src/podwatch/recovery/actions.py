"""What a decision about training can be: a phase, its reason, and at most one action or edit."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.process import FoundTree
from podwatch.recovery.choose import Choice


class Phase(StrEnum):
    """What recovery is doing. The names are stable: ``status`` shows them."""

    IDLE = "idle"
    LOOKING = "looking"
    STARTING = "starting"
    CONFIRMING = "confirming"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDING = "ending"
    """A stop after the next save was requested: training continues until that save is complete."""
    EVALUATING = "evaluating"
    """Training is stopped for an evaluation; podwatch starts it again after that."""
    BLOCKED = "blocked"
    """Cannot start yet: GPU memory or a port is still held, or the operator has to decide."""
    BACKOFF = "backoff"
    GAVE_UP = "gave-up"
    STOPPED = "stopped"
    FINISHED = "finished"
    ATTACHED = "attached"
    """Watches a trainer that podwatch did not start."""
    PAUSED = "paused"
    """Maintenance: an action is pending until `podwatch unpause`."""
    OBSERVING = "observing"
    """Mode observe, and no trainer is known."""


# -- actions and edits -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stop:
    """End the tree of this start. ``evaluation``: what training is stopped to evaluate."""

    start_id: str
    why: str
    evaluation: str = ""


@dataclass(frozen=True, slots=True)
class Start:
    choice: Choice


@dataclass(frozen=True, slots=True)
class Attach:
    tree: FoundTree


@dataclass(frozen=True, slots=True)
class Fetch:
    choice: Choice


@dataclass(frozen=True, slots=True)
class Evaluate:
    title: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Record that training is finished, then end what is left of its tree."""

    finding: Finding | None = None


@dataclass(frozen=True, slots=True)
class Clean:
    """Move everything that an old run left to quarantine."""


Action: TypeAlias = Stop | Start | Attach | Fetch | Evaluate | Finish | Clean


@dataclass(frozen=True, slots=True)
class RecordEnd:
    """This start has ended, and that is no failure. ``wall``: when; None: now."""

    start_id: str
    wall: float | None = None


@dataclass(frozen=True, slots=True)
class Count:
    """Count the failure of this start; ``stopping`` names it in the same edit."""

    start_id: str
    finding: Finding


@dataclass(frozen=True, slots=True)
class WantStop:
    """``[training] stop``: training is unhealthy and stops, after a checkpoint above ``above`` where that is set."""

    finding: Finding
    above: int | None


@dataclass(frozen=True, slots=True)
class DropStart:
    """This start was recorded, and nothing of it was executed."""

    start_id: str


Edit: TypeAlias = RecordEnd | Count | WantStop | DropStart


@dataclass(frozen=True, slots=True)
class Decision:
    """``why`` is a sentence without its full stop; ``fix`` is what the operator does, empty where there is nothing.
    ``kind``: the finding that reports this; None: another one does, or none is needed. ``due_wall``: when a wait ends
    by itself at the latest. ``waits``: it can end without an operator. ``chosen``: it rests on the checkpoints here and
    in the store."""

    phase: Phase
    why: str
    fix: str = ""
    action: Action | None = None
    edit: Edit | None = None
    kind: FindingKind | None = None
    severity: Severity = Severity.CRITICAL
    due_wall: float | None = None
    waits: bool = True
    chosen: bool = False

    @property
    def rests(self) -> bool:
        return self.action is None and self.edit is None
