"""The interface of a detector. One file per family; ``run_detectors.py`` holds the registry and runs all of them.

A detector is pure: state and look in, state and findings out. It reads no clock. Everything it remembers is in its
state, which is reset when training restarts, unless ``survives_restart`` is true. To add one: write the class, give the
module a ``DETECTOR``, add it to ``run_detectors.DETECTORS``, and describe it in docs/detection.md (a test compares the
two).
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from podwatch.config.settings import Policies
from podwatch.detection.learned import Learned
from podwatch.detection.progress import Progress
from podwatch.detection.signals import NO_SIGNALS, Signals
from podwatch.domain.finding import Finding, FindingKind
from podwatch.domain.snapshot import Snapshot, TrainerSample

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Look:
    """The input of every detector for one turn. ``progress``, ``signals`` and ``learned`` already include this turn;
    ``learned`` also includes what the detectors earlier in the registry learned from it.

    ``trainer``: the trainer's process tree, None if it could not be observed. ``wanted``: the desired state is
    ``running``. ``ending``: training is finishing or being stopped, so the end of its processes is expected.
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
        """False while training is stopped or ending, and between two starts: an engine that is shut down writes the
        same log lines as one that dies (docs/detection.md)."""
        between = self.trainer is not None and not self.trainer.start_id
        return self.wanted and not self.ending and not between


@dataclass(frozen=True, slots=True)
class DetectorResult(Generic[S]):
    """The result of one turn of a detector. ``learned`` is ``look.learned`` itself if nothing was learned."""

    state: S
    learned: Learned
    findings: tuple[Finding, ...] = ()


class Detector(Protocol[S]):
    """One family of detectors. Every attribute is a constant of the class.

    ``name`` is stable: it appears in ``status --json``. ``kinds`` are the findings it can raise. ``needs`` are the
    readings (field names of the snapshot) without which it has no evidence. ``second`` are its corroborating signals;
    empty if its findings never request an action. ``survives_restart``: its state describes podwatch or the machine,
    not one start of the trainer.
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
        """The signals that were seen healthy, so that their failure counts from now on: ``silent-death:gpu0``,
        ``hang``. Empty if the detector needs no arming."""
        ...

    def advance(self, state: S, look: Look) -> DetectorResult[S]:
        """Judge one turn. Never raises: a missing reading is no evidence and leads to no verdict."""
        ...
