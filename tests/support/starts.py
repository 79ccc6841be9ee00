"""Lists of starts, as run.json has them."""

from podwatch.domain.starts import StartedBy, TrainerStart


def guarded(branch: str = "line", wall: float = 0.0) -> tuple[TrainerStart, ...]:
    """A run that podwatch began to guard at ``wall``, and in which nothing was started yet."""
    return (TrainerStart(f"guard-{branch}", wall=wall, by=StartedBy.GUARD, proved=False, branch=branch),)


def branched(
    starts: tuple[TrainerStart, ...], branch: str, from_step: int | None, *, wall: float = 0.0, left: int | None = None
) -> tuple[TrainerStart, ...]:
    """One more start, which opened a branch at ``from_step``; by an operator, if it ``left`` a step."""
    by = StartedBy.PODWATCH if left is None else StartedBy.OPERATOR
    return (*starts, TrainerStart(f"start-{branch}", from_step, wall, by, branch=branch, left_step=left))
