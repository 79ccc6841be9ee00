"""Lineages: when an operator's own start opens a new one, and what stays of the old one. Pure.

A start below the newest checkpoint is proved by the resume step in its command, or in a file that its command names, or
by a checkpoint that its processes saved below the newest one. A step number in a log is no proof.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from podwatch.domain.checkpoint import CheckpointSet, newest_complete
from podwatch.domain.facts import StoreFacts
from podwatch.domain.run import Lineage
from podwatch.domain.run_state import RunState
from podwatch.domain.starts import TrainerStart


@dataclass(frozen=True, slots=True)
class Departure:
    """A start that left the current lineage. ``step``: the step from which it continued (None: from the beginning).
    ``newest``: the newest step of the lineage that was left. ``why``: the proof in words. ``can_return``: the newest
    checkpoint of the lineage that was left is on this pod and was complete."""

    step: int | None
    newest: int
    why: str
    can_return: bool


def departure(
    sets: Sequence[CheckpointSet],
    start: TrainerStart,
    *,
    resumed: int | None = None,
    named_by: str = "its command",
    stored: Iterable[int] = (),
) -> Departure | None:
    """Whether ``start`` left the lineage that was trained before it; None if not, or if it is already recorded (the
    checkpoints left behind are then marked as an earlier branch).

    ``sets``: the run's marked checkpoints on this pod. ``resumed``: the step that the start's command resumes from,
    None if it names none; ``named_by``: the place that names it, as the subject of a sentence. ``stored``: the steps of
    this lineage that were in the store before that start.
    """
    line = [s for s in sets if s.of_line]
    older = [s.step for s in line if s.start_id != start.id and s.complete]
    newest = max((*older, *stored), default=None)
    if newest is None:
        return None
    if resumed is not None and resumed < newest:
        return Departure(resumed, newest, f"{named_by} resumes from step {resumed}", newest in older)
    # Only checkpoints that this start wrote completely: an older one in which a file changed proves nothing.
    own = (s for s in line if s.start_id == start.id and s.complete and not s.held)
    first = min((s.step for s in own if (s.began_wall or s.changed_wall) >= start.wall), default=newest)
    if first >= newest:
        return None
    step = max((n for n in older if n < first), default=None)
    return Departure(step, newest, f"it saved step {first}", newest in older)


def kept_step(sets: Sequence[CheckpointSet], lineage: Lineage, *, has_store: bool, stored: int | None) -> int | None:
    """The newest checkpoint of an earlier branch while podwatch protects it: until ``lineage`` has a checkpoint of its
    own that is verified in the store (``stored``: its newest), or complete on this pod if no store is configured."""
    base = -1 if lineage.parent_step is None else lineage.parent_step
    newest = newest_complete(tuple(sets))
    own = stored if has_store else (newest.step if newest is not None else None)
    if own is not None and own > base:
        return None
    return max((s.step for s in sets if s.earlier and s.complete), default=None)


def kept_branch(sets: tuple[CheckpointSet, ...], run: RunState, store: StoreFacts | None) -> int | None:
    """The newest step of an earlier branch that must stay on this pod for now; None if there is none."""
    if not any(s.earlier for s in sets):
        return None
    stored = None if store is None else store.newest_of.get(run.lineage.id)
    return kept_step(sets, run.lineage, has_store=store is not None, stored=stored)


SHOWN_SECONDS = 24 * 3600.0
"""How long ``status`` explains why the step number decreased."""
_LISTED = 5


def branch_line(
    sets: Sequence[CheckpointSet], lineage: Lineage, kept: int | None, *, has_store: bool, wall: float
) -> tuple[str, str] | None:
    """(event, fix) for the status while podwatch protects the newest checkpoint of an earlier branch (``kept``, see
    ``kept_step``), and for a day after an operator's own start left it; None otherwise. ``wall``: now, epoch seconds.
    """
    at, left = lineage.parent_step, lineage.left_step
    recent = left is not None and 0 <= wall - lineage.opened_wall < SHOWN_SECONDS
    if kept is None and not recent:
        return None
    here = sorted(s.step for s in sets if s.earlier and s.complete)
    until = "verified in the store" if has_store else "complete"
    says = []
    if left is not None:
        when = _when(lineage.opened_wall, wall)
        says.append(
            f"the operator started training from the beginning at {when}, after it had reached step {left}"
            if at is None
            else f"the operator took training back from step {left} to step {at} at {when}"
        )
    if here:
        says.append(f"{_steps(here)} of the earlier branch {'is' if len(here) == 1 else 'are'} on this pod")
    elif left is not None:
        says.append("no checkpoint of the earlier branch is left on this pod")
    if kept is not None:
        says.append(f"podwatch keeps step {kept} until a new checkpoint of the current branch is {until}")
    elif here:
        says.append(
            "they are no longer protected: training overwrites a step when it saves it again, and podwatch deletes them"
            " when the disk needs room"
        )
    fix = f"nothing; to return to the earlier branch: `podwatch restart --step {here[-1]}`" if here else "nothing"
    return "; ".join(says), fix


def _steps(steps: Sequence[int]) -> str:
    """``step 90``, ``steps 80 and 90``, ``steps 10, 20, ... and 90``."""
    names = [str(step) for step in steps]
    if len(names) == 1:
        return f"step {names[0]}"
    if len(names) > _LISTED:
        names = [*names[: _LISTED - 2], "...", names[-1]]
    return f"steps {', '.join(names[:-1])} and {names[-1]}"


def _when(at: float, now: float) -> str:
    """UTC, with the date where it is not today's."""
    then, today = datetime.fromtimestamp(at, UTC), datetime.fromtimestamp(now, UTC)
    return f"{then:%H:%M UTC}" if then.date() == today.date() else f"{then:%Y-%m-%d %H:%M UTC}"
