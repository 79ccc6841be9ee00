"""Which step directories no training of this run can have written (DESIGN section 2, "Lineage").

A stray ``step_99999999999999999`` would be "the newest" for ever. Pure, and careful: to refuse a real checkpoint is as
bad as to accept a stray one. So a step is implausible only where something that is known contradicts it; a checkpoint
about which nothing is known is taken as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Protocol

NO_TRAINING: Final = 10**15
"""No training counts this far: a million steps a second for 30 years. Counters of tokens or samples stay below it."""
FEW_SAVES: Final = 10
"""A checkpoint may be so many of the largest save interval beyond what is known: podwatch may have been away, and
trainers remove what lies between."""
FASTER: Final = 10.0
"""A training may be so many times as fast as it was when its steps were measured."""
CLUSTER: Final = 2
"""So many known steps say how far this run is, where its speed is not known."""
OUTLIER: Final = 1000
"""A step so many times as high as all that is known belongs to another run."""
OUTLIER_LEAST: Final = 100_000
"""Below this, a few early checkpoints beside one late one are ordinary."""
ABOVE_TARGET: Final = 10
"""The same for a step above the configured target."""


class Saved(Protocol):
    """What is needed of a checkpoint; ``domain.checkpoint.CheckpointSet`` is one."""

    @property
    def step(self) -> int: ...
    @property
    def save_id(self) -> str: ...
    @property
    def complete(self) -> bool: ...
    @property
    def changed_wall(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of how far this run can be.

    ``target`` is the step at which training is done. ``trained`` is the highest step that our own trainer showed, in
    its logs or its heartbeats, at ``trained_wall`` (epoch seconds); ``step_seconds`` is the median time of one step.
    ``believed`` are (step, save_id) that an operator named, or that podwatch fetched from the store. ``doubted`` are
    those that were found implausible before: that training has passed their number since does not make them its own.
    """

    target: int | None = None
    trained: int | None = None
    trained_wall: float = 0.0
    step_seconds: float | None = None
    believed: frozenset[tuple[int, str]] = field(default_factory=frozenset)
    doubted: frozenset[tuple[int, str]] = field(default_factory=frozenset)


def implausible(sets: Sequence[Saved], evidence: Evidence) -> dict[int, str]:
    """Step -> why no training of this run can have written it. A step that the target, or the steps that were trained,
    explain is never among them; nor is a checkpoint about which nothing at all is known."""
    found: dict[int, str] = {}
    known: list[int] = []
    for one in sorted(sets, key=lambda s: s.step):
        key = (one.step, one.save_id)
        named = key in evidence.believed or (evidence.target is not None and one.step <= evidence.target)
        trained = evidence.trained is not None and one.step <= evidence.trained
        if named:
            why = ""
        elif key in evidence.doubted and one.save_id:
            why = "it was found implausible before"
        else:
            why = "" if trained else _why(one, known, evidence)
        if why:
            found[one.step] = why
        elif one.complete:
            known.append(one.step)
    return found


def _why(one: Saved, known: Sequence[int], evidence: Evidence) -> str:
    """``known`` are the complete checkpoints below that are believed, lowest first."""
    step, trained = one.step, evidence.trained
    if step >= NO_TRAINING:
        return "no training makes so many steps"
    if not known:
        return ""
    top = max(known[-1], -1 if trained is None else trained)
    # A log that counts epochs, where checkpoints count steps, says nothing about checkpoints: one must be in its reach.
    counted = trained is not None and known[0] <= trained
    if counted and evidence.step_seconds:
        elapsed = max(0.0, one.changed_wall - evidence.trained_wall)
        reach = top + FEW_SAVES * _interval(known) + FASTER * elapsed / evidence.step_seconds
        if step > reach:
            return f"training has reached step {top}"
    beyond = step > top + FEW_SAVES * _interval(known)
    below = evidence.target is not None and len(known) >= CLUSTER and known[-1] <= evidence.target
    if below and beyond and step > ABOVE_TARGET * (evidence.target or 0):
        return f"training ends at step {evidence.target}, and the other checkpoints reach step {known[-1]}"
    if len(known) + counted >= CLUSTER and step >= OUTLIER_LEAST and step > OUTLIER * max(top, 1):
        return f"all else of this run is at step {top} or below"
    return ""


def _interval(known: Sequence[int]) -> int:
    """The largest distance between two checkpoints; with one alone, from the start of training."""
    gaps = [b - a for a, b in pairwise(known)]
    return max(*gaps, 1) if gaps else max(known[0], 1)
