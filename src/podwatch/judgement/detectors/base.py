"""What a detector is. One file per family; ``judgement.watch`` holds the registry and turns them all.

A detector is pure: state and look in, state and findings out. It reads no clock; everything it remembers is in its
state, which is wiped at a restart boundary unless it says otherwise. To add one: write the class, give the module a
``DETECTOR``, name it in ``watch.DETECTORS``, and describe it in docs/detection.md (a test compares the two).
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from podwatch.domain.finding import Finding, FindingKind
from podwatch.domain.policy import Policies
from podwatch.domain.snapshot import Snapshot, TrainerSample
from podwatch.judgement.learned import Learned
from podwatch.judgement.progress import Progress
from podwatch.judgement.signals import NO_SIGNALS, Signals

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Look:
    """One turn as every detector sees it. ``progress``, ``signals`` and ``learned`` already hold this turn, ``learned``
    also what the detectors before this one in the registry learned from it.

    ``trainer`` is the trainer's tree, where it could be observed. ``wanted``: training is to run (not stopped, not
    finished). ``ending``: it is finishing or is being stopped, so its processes may go.
    """

    snapshot: Snapshot
    progress: Progress
    learned: Learned
    policies: Policies
    signals: Signals = NO_SIGNALS
    trainer: TrainerSample | None = None
    wanted: bool = True
    ending: bool = False

    @property
    def trains(self) -> bool:
        """False while the run may end, and between two starts: an engine that is shut down writes the same lines as
        one that dies (DESIGN section 3)."""
        between = self.trainer is not None and not self.trainer.start_id
        return self.wanted and not self.ending and not between


@dataclass(frozen=True, slots=True)
class Turn(Generic[S]):
    """What one turn of a detector gives back. ``learned`` is ``look.learned`` itself where nothing was learned."""

    state: S
    learned: Learned
    findings: tuple[Finding, ...] = ()


class Detector(Protocol[S]):
    """One family. Every attribute is a constant of the class.

    ``name`` is stable: it appears in ``status --json``. ``kinds`` are the findings it may make. ``needs`` are the
    readings of the snapshot (its field names) without which it has no evidence; ``second`` the signals that may agree
    with it, empty where its findings never ask for an act. ``survives_restart``: its state is about podwatch or the
    machine, not about one start of the trainer.
    """

    @property
    def name(self) -> str: ...

    @property
    def kinds(self) -> tuple[FindingKind, ...]: ...

    @property
    def needs(self) -> tuple[str, ...]: ...

    @property
    def second(self) -> tuple[str, ...]: ...

    @property
    def survives_restart(self) -> bool: ...

    def initial(self) -> S: ...

    def armed(self, state: S, learned: Learned) -> tuple[str, ...]:
        """What it watches from now on, having seen it healthy: ``silent-death:gpu0``, ``hang``. Empty where it needs
        no arming."""
        ...

    def advance(self, state: S, look: Look) -> Turn[S]:
        """One turn. Total: whatever the snapshot lacks, it gives an answer, and no verdict from what is missing."""
        ...
