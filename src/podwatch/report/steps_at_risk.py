"""How many steps a death now would cost. Pure."""

from podwatch.domain.checkpoint import CheckpointSet, newest_complete
from podwatch.domain.snapshot import Snapshot


def steps_at_risk(
    snapshot: Snapshot,
    sets: tuple[CheckpointSet, ...],
    resumed: int | None,
    stored: int | None,
    *,
    unread: bool = False,
    saves_counted: bool = False,
) -> int | None:
    """Steps that a death now would cost: since the newest checkpoint that is complete here, is in the store
    (``stored``), or was resumed from; without any, since step 0. None if no step was seen, the store was not read yet
    (``unread``), only checkpoints show steps, or the newest checkpoint's number is no step (``saves_counted``)."""
    newest = snapshot.newest_step
    if newest is None or newest.step is None or not snapshot.steps_between_saves:
        return None
    here = newest_complete(sets)
    steps = (here.step if here is not None else None, resumed, stored)
    if saves_counted and any(step is not None for step in steps):
        return None
    if here is not None and here.step > newest.step:
        return 0  # the trainer has saved a step that its log has not shown yet
    saved = [step for step in steps if step is not None and step <= newest.step]
    if not saved and unread:
        return None
    return newest.step - max(saved, default=0)
