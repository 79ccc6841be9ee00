"""Which checkpoint is uploaded next: an interrupted upload is finished first, if less is left of it (docs/sync.md).

An upload is interrupted when podwatch restarts or is killed, or when the store fails. If podwatch then always started
with the newest checkpoint, it would publish nothing as long as interruptions are more frequent than uploads.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from podwatch.domain.checkpoint import CheckpointSet


@dataclass(frozen=True, slots=True)
class Waiting:
    """A complete checkpoint of the current lineage that is not in the store. ``left_bytes``: bytes still to send."""

    step: int
    save_id: str
    left_bytes: int


@dataclass(frozen=True, slots=True)
class GivenUp:
    """An interrupted upload that will not be finished: podwatch cancels its parts in the store."""

    step: int
    save_id: str
    why: str


def sort_begun(
    begun: Iterable[tuple[int, str]],
    sets: Mapping[int, CheckpointSet],
    *,
    void: Collection[tuple[int, str]],
    published: int,
) -> tuple[tuple[CheckpointSet, ...], tuple[GivenUp, ...]]:
    """Sort the interrupted uploads (step, save_id) into the checkpoints that can still be finished and those given up.
    Uploads in neither list are decided once their checkpoint was judged again. ``void``: their files changed;
    ``published``: the highest step of this lineage in the store."""
    finish, given_up = [], []
    for step, save_id in begun:
        found = sets.get(step)
        if found is not None and not found.save_id:
            continue  # not judged again yet
        if found is None or found.save_id != save_id or (step, save_id) in void:
            given_up.append(GivenUp(step, save_id, "it was removed or saved again before it was in the store"))
        elif found.earlier:
            given_up.append(
                GivenUp(step, save_id, "it belongs to an earlier branch of this run, which training has left")
            )
        elif step < published:
            given_up.append(GivenUp(step, save_id, f"step {published} is in the store"))
        elif found.complete and not found.held:
            finish.append(found)
    return tuple(finish), tuple(given_up)


def next_upload(newest: Waiting | None, begun: Collection[Waiting]) -> Waiting | None:
    """The upload with the fewest bytes left; the newest if equal. ``newest`` is None if the newest checkpoint is in the
    store or cannot be sent.

    So the next publication is never further away than one upload: podwatch leaves an upload only for one that needs
    fewer bytes than were left of it.
    """
    candidates = [*begun, *((newest,) if newest is not None else ())]
    return min(candidates, key=lambda w: (w.left_bytes, -w.step), default=None)
