"""What may leave the store when a finished run is archived, and when an import may name a save as the newest.

An archive is asked for by a person and made by whoever has the bucket, often without the journal of the pod that
trained: so all is judged by what the store itself tells (DESIGN sections 4 and 5).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from podwatch.domain.remote import Pointer

ALIVE_SECONDS = 900.0
"""A sign of life in the store younger than this: somebody guards the run. Fifteen heartbeats at their usual pace."""
SUPERSEDED_SECONDS = 24 * 3600.0
"""Whoever archives holds no generation of the run, and saves of another generation than one's own, like those that an
older version of the pointer names, stay for a day: a pod may still be restoring from them (section 4 (e))."""
IMPORT_LINEAGE = "import-"


class Keep(StrEnum):
    LATEST = "latest"
    MILESTONES = "milestones"


@dataclass(frozen=True, slots=True)
class StoredSave:
    """One save by its manifest. ``uploaded_wall`` is the store's time of the manifest; ``problem``: its manifest cannot
    be understood; ``named``: the pointer names it."""

    step: int
    save_id: str
    lineage: str
    uploaded_wall: float
    size_bytes: int
    named: bool
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """``until`` is set where only time keeps it: epoch seconds from which it may go."""

    save: StoredSave
    stays: bool
    reason: str
    until: float | None = None


def sign_of_life(walls: Iterable[float], now_wall: float) -> float | None:
    """Seconds since the newest of these times (heartbeat, claims), if that is so short ago that somebody guards the
    run. A time in the future counts as just now."""
    age = now_wall - max(walls, default=-ALIVE_SECONDS)
    return max(0.0, age) if age < ALIVE_SECONDS else None


def plan_archive(
    saves: Sequence[StoredSave],
    keep: Keep,
    *,
    keep_every: int,
    pins: Collection[int],
    pointer_wall: float,
    now_wall: float,
) -> tuple[Decision, ...]:
    """A decision for each save, oldest first. ``pointer_wall``: when the pointer was written.

    A save counts as superseded when the next one was written, the last one when the pointer left it.
    """
    ordered = sorted(saves, key=lambda s: (s.uploaded_wall, s.step, s.save_id))
    milestones = _milestones(ordered, keep_every) if keep is Keep.MILESTONES else frozenset[tuple[int, str]]()
    decisions = []
    for position, save in enumerate(ordered):
        if save.named:
            decisions.append(Decision(save, True, "latest.json names it"))
        elif save.problem:
            decisions.append(Decision(save, True, f"left alone: {save.problem}"))
        elif save.step in pins:
            decisions.append(Decision(save, True, "pinned"))
        elif (save.step, save.save_id) in milestones:
            decisions.append(Decision(save, True, "milestone"))
        else:
            later = ordered[position + 1].uploaded_wall if position + 1 < len(ordered) else pointer_wall
            until = max(later, save.uploaded_wall) + SUPERSEDED_SECONDS
            if now_wall < until:
                decisions.append(Decision(save, True, "superseded less than a day ago", until))
            else:
                decisions.append(Decision(save, False, "a newer save stays"))
    return tuple(decisions)


def _milestones(saves: Sequence[StoredSave], keep_every: int) -> frozenset[tuple[int, str]]:
    """One save for every ``keep_every`` save intervals of steps.

    The numbers by which the daemon counts its milestones are in its journal only; steps tell the same, whether the
    daemon has thinned the run already or not. The interval is the smallest distance between two saves. Of one stretch
    the first save is taken, of the line that the pointer is on before any other.
    """
    steps = sorted({s.step for s in saves})
    if keep_every <= 0 or len(steps) < 2:
        return frozenset()
    span = keep_every * min(b - a for a, b in pairwise(steps))
    current = next((s.lineage for s in saves if s.named), "")
    best: dict[int, tuple[tuple[bool, int, float], StoredSave]] = {}
    for save in saves:
        stretch = save.step // span
        rank = (save.lineage != current, save.step, -save.uploaded_wall)
        if not save.problem and stretch > 0 and (stretch not in best or rank < best[stretch][0]):
            best[stretch] = (rank, save)
    return frozenset((save.step, save.save_id) for _, save in best.values())


@dataclass(frozen=True, slots=True)
class Placing:
    """Whether an imported save becomes the newest; then under which numbers."""

    moves: bool
    reason: str
    generation: int = 0
    seq: int = 0


def place_import(current: Pointer | None, step: int, lineage: str, *, alive: bool) -> Placing:
    """An import never takes the pointer from what podwatch saved itself: it only fills an empty place, or goes on from
    an earlier import of the same backups."""
    if alive:
        return Placing(False, "the run is being guarded: its own podwatch moves the pointer")
    if current is None:
        return Placing(True, "the run had nothing of podwatch's yet", 1, 1)
    if current.step is None:
        return Placing(False, "the run was started afresh on purpose")
    if current.lineage != lineage:
        return Placing(False, f"latest.json names step {current.step}, which podwatch itself saved or took in before")
    if current.step >= step:
        return Placing(False, f"latest.json names step {current.step} already")
    return Placing(True, f"follows step {current.step} of the same import", current.generation, current.seq + 1)


def stale_artefacts(
    found: Mapping[str, Sequence[tuple[str, float]]], now_wall: float, *, most: Mapping[str, int], seconds: float
) -> tuple[str, ...]:
    """Keys of logs, incident bundles and configurations that may go: beyond the newest ``most`` of their kind, or older
    than ``seconds``; the newest of each kind stays whatever its age. ``found`` maps a kind to (key, upload time)."""
    stale: list[str] = []
    for kind, objects in found.items():
        newest_first = sorted(objects, key=lambda pair: (-pair[1], pair[0]))
        for place, (key, wall) in enumerate(newest_first):
            if place >= max(1, most.get(kind, 0)) or (place > 0 and now_wall - wall > seconds):
                stale.append(key)
    return tuple(stale)
