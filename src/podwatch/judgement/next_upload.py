"""Which checkpoint is uploaded next: what was begun is finished (DESIGN, "Remote layout, upload, restore").

An upload ends early when podwatch is restarted or killed, or when the store fails. Starting over with the newest
checkpoint each time would publish nothing as long as interruptions come faster than uploads.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """A complete checkpoint of the current lineage that is not in the store. ``left_bytes``: still to be sent."""

    step: int
    save_id: str
    left_bytes: int


def next_upload(newest: Waiting | None, begun: Collection[Waiting]) -> Waiting | None:
    """The one of which least is left; the newest where they are equal. ``newest`` is None where the newest checkpoint
    is in the store or cannot be sent; then only what is newer than ``begun`` would be worth more, and there is none.

    So a publication is never further away than one upload: an upload is left only for one that is shorter than what
    was left of it.
    """
    candidates = [*begun, *((newest,) if newest is not None else ())]
    return min(candidates, key=lambda w: (w.left_bytes, -w.step), default=None)
