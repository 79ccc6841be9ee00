"""The starts of training, oldest first: which start it is, and whose a checkpoint is. Pure.

A checkpoint belongs to the start during which its files appeared. It is on the current line exactly if no later start
began below it; a start that returned to a branch is later only than the start that it returned to. Times are those of
the checkpoints' file system, so that no two clocks are compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from podwatch.domain.document import Flag, Real, Text, Whole

MOST_STARTS = 64
"""So many are recorded (16 KiB). A start in the middle that is dropped leaves its checkpoints to the one before it."""


class StartedBy(StrEnum):
    PODWATCH = "podwatch"
    OPERATOR = "operator"
    """podwatch attached to it; ``wall`` is the start of its process."""
    GUARD = "guard"
    """podwatch began to guard the run: what appears from then on is this run's, whoever trains."""
    CLEAN = "clean"
    """`podwatch clean`: training begins from nothing, and nothing was started yet."""
    OTHER_POD = "other-pod"
    """As a manifest in the store names it. Nothing of it appeared here; ``wall`` is no time of this pod."""


@dataclass(frozen=True, slots=True)
class TrainerStart:
    """``from_step``: None for a start from nothing. ``proved`` is false while nobody knows from which step it began: it
    has left nothing then. ``wall``: when it began, epoch seconds on the checkpoints' file system.

    ``branch``: the name of its branch in the store, which is the id of the first start of that branch. ``of``: the
    start whose checkpoint it resumed from, where that is on a branch that the run had left. ``left_step``: the newest
    step of the branch that an operator's own start left. ``why``: what proves ``from_step``, in words.

    ``seen``: its trainer was seen to run. ``ended``: the epoch second, by this machine's clock, at which that trainer
    ended; 0 in an earlier boot. ``counted``: its end was counted as a failure, once.
    """

    id: Text
    from_step: Whole | None = None
    wall: Real = 0.0
    by: StartedBy = StartedBy.PODWATCH
    proved: Flag = True
    branch: Text = ""
    of: Text = ""
    left_step: Whole | None = None
    why: Text = ""
    seen: Flag = True
    confirmed: Flag = False
    ended: Real | None = None
    counted: Flag = False

    @property
    def trains(self) -> bool:
        """Whether it has a trainer on this pod."""
        return self.by in (StartedBy.PODWATCH, StartedBy.OPERATOR)


Starts = Sequence[TrainerStart]


def start_of(wall: float, starts: Starts) -> TrainerStart | None:
    """The start during which something with this time of change appeared: the last one that had begun. None: nothing
    of this run had."""
    return next((s for s in reversed(starts) if s.by is not StartedBy.OTHER_POD and s.wall <= wall), None)


def find_start(start_id: str, starts: Starts) -> TrainerStart | None:
    return next((s for s in reversed(starts) if s.id == start_id), None)


@dataclass(frozen=True, slots=True)
class CurrentLine:
    """The line that is trained now. ``limits``: each start on it, with the last step of it that is (None: all).
    ``before``: the same for what is older than every start; -1 if none of it."""

    limits: Mapping[str, int | None] = field(default_factory=dict)
    before: int | None = None


def line_of(starts: Starts) -> CurrentLine:
    """Follow the starts back from the last one."""
    limits = dict[str, int | None]()
    place = {start.id: number for number, start in enumerate(starts)}
    limit: int | None = None
    number = len(starts) - 1
    while number >= 0:
        start = starts[number]
        limits[start.id] = limit
        if start.proved:
            if start.from_step is None:
                return CurrentLine(limits, -1)
            limit = start.from_step if limit is None else min(limit, start.from_step)
        number = min(place.get(start.of, number), number - 1)
    return CurrentLine(limits, limit)


@dataclass(frozen=True, slots=True)
class Provenance:
    """``start_id``: the start that a checkpoint belongs to; empty if it is older than every one. One of another pod can
    be unknown here. ``ours``: it is this run's; others are neither chosen nor uploaded until an operator adopts them.
    ``left``: training has left it."""

    start_id: str = ""
    ours: bool = True
    left: bool = False


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the record of a checkpoint says of its origin. ``start_id``: the start that wrote it, which no clock can
    change any more; empty while only its times show that. ``restored``: it is in this run's store; the start, and the
    ``branch``, are then those that its manifest names."""

    start_id: str = ""
    restored: bool = False
    branch: str = ""


NOT_RECORDED = Recorded()


@dataclass(frozen=True, slots=True)
class Origins:
    """Answers whose a checkpoint is. ``adopted``: the start during which the operator adopted what is older than every
    start; empty if nobody did."""

    starts: tuple[TrainerStart, ...] = ()
    adopted: str = ""
    line: CurrentLine = field(default_factory=CurrentLine)
    branches: Mapping[str, int | None] = field(default_factory=dict)
    """Each branch of this pod, with its last step on the line: None if all are, -1 if none."""

    @classmethod
    def of(cls, starts: Starts, *, adopted: str = "") -> "Origins":
        branches: dict[str, int | None] = {start.branch: -1 for start in starts}
        branches.update(older_branches(starts))
        if starts:
            branches[starts[-1].branch] = None
        return cls(tuple(starts), adopted, line_of(starts), branches)

    def judge(self, step: int, wall: float, recorded: Recorded = NOT_RECORDED) -> Provenance:
        """``wall``: its newest change."""
        start = find_start(recorded.start_id, self.starts)
        if recorded.restored and start is None:
            limit = self.branches.get(recorded.branch, self.line.before)
            return Provenance(recorded.start_id, True, _is_above(step, limit))
        start = start or start_of(wall, self.starts) or self._adopting()
        if start is None:
            return Provenance("", self.line.before is not None and not _is_above(step, self.line.before))
        return Provenance(start.id, True, _is_above(step, self.line.limits.get(start.id, -1)))

    def _adopting(self) -> TrainerStart | None:
        """The start that what was adopted belongs to; the first one, where it is in the list no more."""
        return find_start(self.adopted, self.starts) or self.starts[0] if self.adopted and self.starts else None


def _is_above(step: int, limit: int | None) -> bool:
    return limit is not None and step > limit


# -- branches ----------------------------------------------------------------------------------------------------------


def opener_of(branch: str, starts: Starts) -> tuple[TrainerStart | None, str]:
    """The start that opened this branch, and the branch that it left; None for the first branch of this pod."""
    number = next((n for n, start in enumerate(starts) if start.branch == branch), 0)
    if number == 0:
        return None, ""
    opener = starts[number]
    left = find_start(opener.of, starts) if opener.of else None
    return opener, (left or starts[number - 1]).branch


def older_branches(starts: Starts) -> dict[str, int]:
    """Each branch that the current one continues, with its last step that is part of the line."""
    found = dict[str, int]()
    limits = line_of(starts).limits
    current = starts[-1].branch if starts else ""
    for start in starts:
        limit = limits.get(start.id)
        if limit is not None and start.branch != current:
            found[start.branch] = limit  # a later start's is never lower
    return found


# -- changes -----------------------------------------------------------------------------------------------------------


def with_start(starts: Starts, start: TrainerStart) -> tuple[TrainerStart, ...]:
    """With one more; at most MOST_STARTS."""
    found = (*(s for s in starts if s.id != start.id), start)
    while len(found) > MOST_STARTS:
        found = _without(found, _least_needed(found))
    return found


def changed_start(starts: Starts, start_id: str, **changes: Any) -> tuple[TrainerStart, ...]:
    return tuple(replace(s, **changes) if s.id == start_id else s for s in starts)


def _least_needed(starts: tuple[TrainerStart, ...]) -> int:
    """The oldest one, after the first, that opened no branch."""
    numbers = range(1, len(starts) - 1)
    return next((n for n in numbers if starts[n].branch == starts[n - 1].branch), 1)


def _without(starts: tuple[TrainerStart, ...], number: int) -> tuple[TrainerStart, ...]:
    dropped, heir = starts[number].id, starts[number - 1].id
    kept = (s for n, s in enumerate(starts) if n != number)
    return tuple(replace(s, of=heir) if s.of == dropped else s for s in kept)
