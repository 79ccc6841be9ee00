"""Which saves `runs archive` deletes from the store, and when `runs import` moves the pointer to an imported save.

An operator archives a run from any machine with access to the bucket, often without the journal of the pod that
trained, so every decision rests on the store's contents alone (docs/runs.md).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from podwatch.domain.manifest import Pointer

ALIVE_SECONDS = 900.0
"""If a heartbeat or claim in the store is younger than this, a podwatch guards the run. Fifteen heartbeat intervals."""
SUPERSEDED_SECONDS = 24 * 3600.0
"""A superseded save stays for a day: a pod may still be restoring from it, and the archiving operator holds no
generation of the run."""
IMPORT_LINEAGE = "import-"


class Keep(StrEnum):
    LATEST = "latest"
    MILESTONES = "milestones"


@dataclass(frozen=True, slots=True)
class StoredSave:
    """One save in the store. ``uploaded_wall``: the store's upload time of the manifest (epoch seconds). ``problem``:
    why its manifest cannot be read, else empty. ``named``: the pointer names it."""

    step: int
    save_id: str
    lineage: str
    uploaded_wall: float
    size_bytes: int
    named: bool
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether ``save`` stays, and why. ``until`` (epoch seconds): when it can be deleted, if only its age keeps it."""

    save: StoredSave
    stays: bool
    reason: str
    until: float | None = None


def sign_of_life(walls: Iterable[float], now_wall: float) -> float | None:
    """Seconds since the newest of ``walls`` (heartbeat and claims, epoch seconds) if it is younger than
    ``ALIVE_SECONDS``, so that a podwatch guards the run; None otherwise. A time in the future counts as now."""
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
    """Return a decision for each save, oldest first. ``pointer_wall``: when the pointer was written (epoch seconds).

    A save is superseded from the time the next one was written; the last one from the time the pointer left it.
    """
    ordered = sorted(saves, key=lambda s: (s.uploaded_wall, s.step, s.save_id))
    milestones = _milestones(ordered, keep_every) if keep is Keep.MILESTONES else frozenset[tuple[int, str]]()
    decisions = []
    for position, save in enumerate(ordered):
        if save.named:
            decisions.append(Decision(save, True, "latest.json names it"))
        elif save.problem:
            decisions.append(Decision(save, True, f"kept because podwatch cannot judge it: {save.problem}"))
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
                decisions.append(Decision(save, False, "a newer save is kept"))
    return tuple(decisions)


def _milestones(saves: Sequence[StoredSave], keep_every: int) -> frozenset[tuple[int, str]]:
    """One save for every ``keep_every`` save intervals, counted in steps.

    The daemon counts milestones by ``seq``, which is only in its journal; steps give the same result, whether or not
    retention has already deleted saves. The interval is the smallest distance between two saves. In each stretch the
    first save is taken, preferring the lineage of the pointer.
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
    """Whether the pointer moves to an imported save, and then its generation and seq."""

    moves: bool
    reason: str
    generation: int = 0
    seq: int = 0


def place_import(current: Pointer | None, step: int, lineage: str, *, alive: bool) -> Placing:
    """Decide whether an import moves the pointer. It never replaces a save of podwatch's own: it sets the pointer of a
    run that has none, or continues an earlier import of the same backups. ``alive``: a podwatch guards the run."""
    if alive:
        return Placing(False, "a podwatch guards this run, and only that podwatch moves the pointer")
    if current is None:
        return Placing(True, "the run had no pointer yet", 1, 1)
    if current.step is None:
        return Placing(False, "an operator started the run from the beginning")
    if current.lineage != lineage:
        return Placing(False, f"latest.json names step {current.step}, which podwatch saved or imported before")
    if current.step >= step:
        return Placing(False, f"latest.json names step {current.step} already")
    return Placing(True, f"follows step {current.step} of the same import", current.generation, current.seq + 1)


def stale_artefacts(
    found: Mapping[str, Sequence[tuple[str, float]]], now_wall: float, *, most: Mapping[str, int], seconds: float
) -> tuple[str, ...]:
    """Keys of logs, incident bundles and configurations to delete: all but the newest ``most`` of each kind, and those
    older than ``seconds``. The newest of each kind always stays. ``found`` maps a kind to (key, upload time)."""
    stale: list[str] = []
    for kind, objects in found.items():
        newest_first = sorted(objects, key=lambda pair: (-pair[1], pair[0]))
        for place, (key, wall) in enumerate(newest_first):
            if place >= max(1, most.get(kind, 0)) or (place > 0 and now_wall - wall > seconds):
                stale.append(key)
    return tuple(stale)
