"""Uploads: which checkpoint is uploaded next, the outcome of each, and whether they are slower than the saves
(docs/sync.md). Pure."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.facts import Tally, UploadOutcome

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


# -- outcome of each upload --------------------------------------------------------------------------------------------

RECENT, SKIPPED_RECENTLY = 10, 2
"""A single skipped checkpoint is normal after a restart of podwatch or an outage."""
LEAST_SECONDS = 60.0
"""Shorter uploads never count as behind: at most a minute of training is not in the store."""
CAUGHT_UP = 5
"""The uplink has caught up after this many consecutive checkpoints without a skipped one."""


def uploads_behind(tally: Tally) -> bool:
    """Whether checkpoints are skipped because uploads are slower than the saves. False if they are faster: then an
    outage or a restart is the cause."""
    if tally.upload_seconds is None or tally.save_seconds is None:
        return False
    recent = tally.outcomes[-RECENT:]
    skips = recent.count(UploadOutcome.SKIPPED) >= SKIPPED_RECENTLY and UploadOutcome.SKIPPED in recent[-CAUGHT_UP:]
    return skips and tally.upload_seconds > max(tally.save_seconds, LEAST_SECONDS)


def in_words(outcomes: Sequence[UploadOutcome]) -> str:
    """``26 of the last 40 checkpoints are stored, 14 were skipped``."""
    counts = Counter(outcomes)
    skipped = counts[UploadOutcome.SKIPPED]
    text = f"{counts[UploadOutcome.STORED]} of the last {len(outcomes)} checkpoints are stored, {skipped} "
    text += "was skipped" if skipped == 1 else "were skipped"
    gone = counts[UploadOutcome.ABANDONED]
    return text + (f", {gone} {'was' if gone == 1 else 'were'} abandoned" if gone else "")


def every(outcomes: Sequence[UploadOutcome]) -> str:
    """``every third``: how many checkpoints there are for each stored one; empty if none or nearly all are stored."""
    stored = Counter(outcomes)[UploadOutcome.STORED]
    if not stored:
        return ""
    times = round(len(outcomes) / stored)
    return {2: "every second", 3: "every third", 4: "every fourth"}.get(times, f"one in {times}" if times > 4 else "")
