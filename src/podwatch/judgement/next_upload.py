"""Which checkpoint is uploaded next: what was begun is finished (DESIGN, "Remote layout, upload, restore").

An upload ends early when podwatch is restarted or killed, or when the store fails. Starting over with the newest
checkpoint each time would publish nothing as long as interruptions come faster than uploads.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from podwatch.domain.checkpoint import CheckpointSet


@dataclass(frozen=True, slots=True)
class Waiting:
    """A complete checkpoint of the current lineage that is not in the store. ``left_bytes``: still to be sent."""

    step: int
    save_id: str
    left_bytes: int


@dataclass(frozen=True, slots=True)
class GivenUp:
    """An interrupted upload that will not be finished: its parts in the store are cancelled."""

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
    """Of the interrupted uploads (step, save_id): the checkpoints that can still be finished, and what is given up.
    The rest is left as it is until it was judged again. ``void``: their files changed; ``published``: the highest step
    of this lineage in the store."""
    finish, given_up = [], []
    for step, save_id in begun:
        found = sets.get(step)
        if found is not None and not found.save_id:
            continue  # it is not judged again yet
        if found is None or found.save_id != save_id or (step, save_id) in void:
            given_up.append(GivenUp(step, save_id, "it was removed or saved again before it was in the store"))
        elif found.earlier:
            given_up.append(GivenUp(step, save_id, "it is of an earlier branch, which training has left"))
        elif step < published:
            given_up.append(GivenUp(step, save_id, f"step {published} is in the store"))
        elif found.complete and not found.held:
            finish.append(found)
    return tuple(finish), tuple(given_up)


def next_upload(newest: Waiting | None, begun: Collection[Waiting]) -> Waiting | None:
    """The one of which least is left; the newest where they are equal. ``newest`` is None where the newest checkpoint
    is in the store or cannot be sent; then only what is newer than ``begun`` would be worth more, and there is none.

    So a publication is never further away than one upload: an upload is left only for one that is shorter than what
    was left of it.
    """
    candidates = [*begun, *((newest,) if newest is not None else ())]
    return min(candidates, key=lambda w: (w.left_bytes, -w.step), default=None)
