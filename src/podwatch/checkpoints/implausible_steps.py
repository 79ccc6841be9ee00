"""Steps that no training of this run can have reached, such as a checkpoint copied from elsewhere. Pure.

A stray ``step_99999999999999999`` would be "the newest" forever. Refusing a real checkpoint is as bad as accepting a
stray one, so a step is implausible only if known facts contradict it; without any facts it is accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from podwatch.domain.checkpoint import NO_TRAINING
from podwatch.domain.document import Document, Real, Text, Whole

FEW_SAVES: Final = 10
"""Allowed distance beyond the known steps, in largest save intervals: podwatch may have been stopped meanwhile, and
trainers delete checkpoints in between."""
FASTER: Final = 10.0
"""Allowed speed-up against the measured step time."""
CLUSTER: Final = 2
"""Number of known steps that show how far this run is, if its speed is unknown."""
OUTLIER: Final = 1000
"""A step this many times as high as all known ones belongs to another run."""
OUTLIER_LEAST: Final = 100_000
"""Below this step, a few early checkpoints beside one late one are normal."""
ABOVE_TARGET: Final = 10
"""The same factor for a step above the configured target."""


class Saved(Protocol):
    """The attributes of a checkpoint that this module needs; ``domain.checkpoint.CheckpointSet`` has them."""

    @property
    def step(self) -> int: ...
    @property
    def save_id(self) -> str: ...
    @property
    def complete(self) -> bool: ...
    @property
    def changed_wall(self) -> float: ...


@dataclass(frozen=True, slots=True)
class StepEvidence(Document):
    """The known facts about how far this run can be.

    ``target``: the step at which training is finished. ``trained``: the highest step that this run's trainer showed in
    its logs or heartbeats, at ``trained_wall`` (epoch seconds). ``step_seconds``: the median step time. ``believed``:
    (step, save_id) that an operator named or that podwatch fetched from the store. ``doubted``: those found implausible
    before; they stay implausible when training passes their number.
    """

    target: Whole | None = None
    trained: Whole | None = None
    trained_wall: Real = 0.0
    step_seconds: Real | None = None
    believed: frozenset[tuple[Whole, Text]] = field(default_factory=frozenset)
    doubted: frozenset[tuple[Whole, Text]] = field(default_factory=frozenset)


def implausible(sets: Sequence[Saved], evidence: StepEvidence) -> dict[int, str]:
    """Step -> why no training of this run can have written it. A step that the target or the trained steps explain is
    never implausible, nor is a checkpoint about which nothing is known."""
    found: dict[int, str] = {}
    known = _Plausible()
    for one in sorted(sets, key=lambda s: s.step):
        key = (one.step, one.save_id)
        named = key in evidence.believed or (evidence.target is not None and one.step <= evidence.target)
        trained = evidence.trained is not None and one.step <= evidence.trained
        if named:
            why = ""
        elif key in evidence.doubted and one.save_id:
            why = "podwatch found it implausible before"
        else:
            why = "" if trained else _contradiction(one, known, evidence)
        if why:
            found[one.step] = why
        elif one.complete:
            known.add(one.step)
    return found


@dataclass(slots=True)
class _Plausible:
    """The plausible complete checkpoints below the one that is judged, without a list: each is compared with them."""

    count: int = 0
    first: int = 0
    last: int = 0
    widest: int = 1
    """The largest distance between two of them."""

    def add(self, step: int) -> None:
        """``step`` is above all before it."""
        if self.count:
            self.widest = max(self.widest, step - self.last)
        else:
            self.first = step
        self.count, self.last = self.count + 1, step

    @property
    def interval(self) -> int:
        """The largest distance between two; for a single one, its distance from step 0."""
        return self.widest if self.count > 1 else max(self.first, 1)


def _contradiction(one: Saved, known: _Plausible, evidence: StepEvidence) -> str:
    """The contradiction, or empty."""
    step, trained = one.step, evidence.trained
    if step >= NO_TRAINING:
        return "the step number is impossibly high"
    if not known.count:
        return ""
    top = max(known.last, -1 if trained is None else trained)
    # A log that counts epochs is no evidence for checkpoints that count steps: one of them must be in its reach.
    counted = trained is not None and known.first <= trained
    if counted and evidence.step_seconds:
        elapsed = max(0.0, one.changed_wall - evidence.trained_wall)
        reach = top + FEW_SAVES * known.interval + FASTER * elapsed / evidence.step_seconds
        if step > reach:
            return f"training has only reached step {top}"
    beyond = step > top + FEW_SAVES * known.interval
    below = evidence.target is not None and known.count >= CLUSTER and known.last <= evidence.target
    if below and beyond and step > ABOVE_TARGET * (evidence.target or 0):
        return f"training ends at step {evidence.target}, and the other checkpoints reach step {known.last}"
    if known.count + counted >= CLUSTER and step >= OUTLIER_LEAST and step > OUTLIER * max(top, 1):
        return f"everything else of this run is at step {top} or below"
    return ""
