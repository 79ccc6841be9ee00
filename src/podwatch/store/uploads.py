"""Uploads: which checkpoint is uploaded next, and whether they are slower than the saves (docs/store.md). Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from podwatch.domain.checkpoint import CheckpointSet

PINNED: Final = "the pinned checkpoint of step "
"""Begins the name of a pinned checkpoint that is not in the store when the run ends; the step follows."""

# -- order -------------------------------------------------------------------------------------------------------------
# An interrupted upload is finished first, if less is left of it. An upload is interrupted when podwatch restarts or is
# killed, or when the store fails. If podwatch then always started with the newest checkpoint, it would publish nothing
# as long as interruptions are more frequent than uploads.


@dataclass(frozen=True, slots=True)
class Waiting:
    """A complete checkpoint of the current lineage that is not in the store. ``left_bytes``: bytes still to send."""

    step: int
    save_id: str
    left_bytes: int


@dataclass(frozen=True, slots=True)
class Begun:
    """An interrupted upload. ``found``: the checkpoint of its step on this pod now; ``linked``: podwatch has its files
    by names of its own, whatever the trainer removes; ``void``: its files changed; ``newest_stored``: the highest step
    of this lineage in the store; ``scanned``: the pod's checkpoints are known."""

    step: int
    save_id: str
    found: CheckpointSet | None
    linked: bool = False
    void: bool = False
    same_lineage: bool = True
    newest_stored: int = -1
    pinned: bool = False
    scanned: bool = True


def why_given_up(begun: Begun) -> str:
    """Why an interrupted upload is not finished; empty if it is."""
    found = begun.found
    if not begun.same_lineage or (found is not None and found.save_id == begun.save_id and found.earlier):
        return "it belongs to an earlier branch of this run, which training has left"
    if begun.void:
        return "its files changed"
    if begun.step < begun.newest_stored and not begun.pinned:
        return f"step {begun.newest_stored} is in the store"
    again = found is not None and found.complete and found.save_id != begun.save_id
    if again or (not begun.linked and begun.scanned and found is None):
        return "it was removed or saved again before it was in the store"
    return ""


def next_upload(newest: Waiting | None, begun: Collection[Waiting]) -> Waiting | None:
    """The upload with the fewest bytes left; the newest if equal. ``newest`` is None if the newest checkpoint is in the
    store or cannot be sent.

    So the next publication is never further away than one upload: podwatch leaves an upload only for one that needs
    fewer bytes than were left of it.
    """
    candidates = [*begun, *((newest,) if newest is not None else ())]
    return min(candidates, key=lambda w: (w.left_bytes, -w.step), default=None)


# -- pace --------------------------------------------------------------------------------------------------------------

PUBLICATIONS = 5
"""Whose skipped checkpoints count: the uplink has caught up after as many without one."""
SKIPPED_RECENTLY = 2
"""A single skipped checkpoint is normal after a restart of podwatch or an outage."""
LEAST_SECONDS = 60.0
"""Shorter uploads never count as behind: at most a minute of training is not in the store."""


def uploads_behind(skipped: int, upload_seconds: float | None, save_seconds: float | None) -> bool:
    """Whether checkpoints are skipped because uploads are slower than the saves. False if they are faster: then an
    outage or a restart is the cause. ``skipped``: by the last ``PUBLICATIONS``."""
    if upload_seconds is None or save_seconds is None:
        return False
    return skipped >= SKIPPED_RECENTLY and upload_seconds > max(save_seconds, LEAST_SECONDS)
