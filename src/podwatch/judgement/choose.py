"""Which step the trainer resumes from (promise 7; facts/prime-rl.md, "must therefore do" 1, 3, 4).

Never "latest": a step of *this* run and its line of descent, complete by its layout's rule, not refused for having
resumed wrongly or failed to load. When something is there but nothing may be used, the answer is "none" and a person
is asked: a silent fresh start would throw a run away.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.run import Lineage
from podwatch.judgement.plausible import NO_TRAINING

Source = Literal["local", "store", "fresh", "none"]


@dataclass(frozen=True, slots=True)
class RemoteSave:
    """A save in the store whose manifest was published."""

    step: int
    save_id: str
    lineage: str
    seq: int


@dataclass(frozen=True, slots=True)
class Choice:
    """``source`` says what to do: start from a local set, fetch from the store first, start fresh, or ask a person.

    ``rejected`` lists every candidate that was looked at and not taken, newest first, with the reason. ``unowned``: a
    complete checkpoint is among them that is not known to be of this run.
    """

    step: int | None
    source: Source
    save_id: str
    reason: str
    rejected: tuple[tuple[int, str], ...] = ()
    unowned: bool = False


@dataclass
class _Candidates:
    local: dict[int, CheckpointSet] = field(default_factory=dict)
    remote: dict[int, RemoteSave] = field(default_factory=dict)
    rejected: list[tuple[int, str]] = field(default_factory=list)
    unowned: bool = False
    held_back: bool = False
    """Something exists that is, or may be, what the run has left, and cannot be used: a fresh start would be an
    operator's decision."""

    def steps(self) -> list[int]:
        return sorted(self.local.keys() | self.remote.keys(), reverse=True)


def choose(
    local: Sequence[CheckpointSet],
    remote: Sequence[RemoteSave] = (),
    *,
    lineage: Lineage | None,
    refused: Mapping[int, str] | None = None,
    adopted: bool = True,
    wanted: int | None = None,
    below: int | None = None,
    ancestry: Mapping[str, int] | None = None,
) -> Choice:
    """Choose the step to start from.

    ``lineage`` is the run's current line (None on a pod that has no record: the line of the highest seq in the store
    is followed). ``ancestry`` maps older lineages to the last step that still belongs to this line; the direct parent
    is known from ``lineage``. ``refused`` are steps pinned away (resumed-wrong, failed loads) with the reason.
    ``adopted`` is false when the sets on this pod belong to another run or to nobody knows whom. ``wanted`` is a step
    that a person named: it must exist and be complete, and overrides ``refused`` and ``below``. ``below`` allows only
    steps under it (a step back).

    Between a local set and a save of the same step the local one wins: it needs no download.
    """
    found = _sort_out(
        local,
        remote,
        _valid_until(lineage, ancestry or {}, remote),
        {} if wanted is not None else dict(refused or {}),
        adopted,
        None if wanted is not None else below,
        named=wanted is not None,
    )
    steps = found.steps()
    if wanted is not None:
        if wanted not in steps:
            why = "; ".join(reason for step, reason in found.rejected if step == wanted) or "no such checkpoint"
            return Choice(
                None, "none", "", f"step {wanted} was asked for: {why}", _newest_first(found.rejected), found.unowned
            )
        overridden = f", although refused before: {refused[wanted]}" if refused and wanted in refused else ""
        return _take(found, wanted, f"asked for by number{overridden}")
    if steps:
        return _take(found, steps[0], "newest complete step of this run")
    rejected = _newest_first(found.rejected)
    if found.held_back:
        newest_step, why = rejected[0]
        return Choice(
            None, "none", "", f"nothing may be resumed from (step {newest_step}: {why})", rejected, found.unowned
        )
    return Choice(None, "fresh", "", "no complete checkpoint of this run, here or in the store", rejected)


def other_world(saved: int | None, asked: int | None, *, counts_all: bool) -> str:
    """Why a trainer that cannot reshard will not load a set that ``saved`` processes wrote into the ``asked`` ones that
    the command starts; empty if it may, or one of the numbers is not known. Unless it ``counts_all``, ``saved`` are the
    data-parallel ranks only: then the others must be a whole number of times as many."""
    if saved is None or asked is None or saved == asked or (not counts_all and asked % saved == 0):
        return ""
    whom = "processes" if counts_all else "data-parallel ranks"
    return f"it was saved by {saved} {whom} and the command starts {asked} processes: this trainer cannot load that"


def _valid_until(
    lineage: Lineage | None, ancestry: Mapping[str, int], remote: Sequence[RemoteSave]
) -> dict[str, int | None]:
    """Lineage id -> last step of it that belongs to this line (None: all of them)."""
    if lineage is None:
        newest = max(remote, key=lambda s: s.seq, default=None)
        return {newest.lineage: None} if newest is not None else {}
    valid: dict[str, int | None] = dict(ancestry)
    if lineage.parent and lineage.parent_step is not None:
        valid[lineage.parent] = lineage.parent_step
    valid[lineage.id] = None
    return valid


def _sort_out(
    local: Sequence[CheckpointSet],
    remote: Sequence[RemoteSave],
    valid: Mapping[str, int | None],
    refused: Mapping[int, str],
    adopted: bool,
    below: int | None,
    *,
    named: bool = False,
) -> _Candidates:
    found = _Candidates()
    unfinished = 0
    for candidate in local:
        step = candidate.step
        if not candidate.complete:
            found.rejected.append((step, f"{candidate.completeness}: {candidate.reason or 'not whole'}"))
            found.held_back = found.held_back or candidate.settles_in is not None or candidate.unclear
            unfinished += _all_parts_there(candidate)
            continue
        if not adopted:
            found.unowned = True
            why = "not known to be of this run; take it with --adopt-existing or set it aside with `podwatch clean`"
        elif candidate.held and not named:
            why = f"held back: {candidate.held}; name the step to use it"
        else:
            why = _why_not(step, refused, below)
        if why:
            found.rejected.append((step, why))
            found.held_back = True
        else:
            found.local[step] = candidate
    # A kill cuts off one save. Several, with all their parts and none of them complete, are not understood.
    found.held_back = found.held_back or (unfinished > 1 and not found.local)
    for save in remote:
        step = save.step
        last = valid.get(save.lineage, -1)
        if save.lineage not in valid:
            # Left on purpose: it never holds a start back.
            found.rejected.append((step, f"in the store, of a line that this run has left ({save.lineage})"))
            continue
        if last is not None and step > last:
            found.rejected.append((step, f"in the store, after step {last} where this run left that line"))
            continue
        if why := _why_not(step, refused, below) or _no_step(step, named=named):
            found.rejected.append((step, f"in the store: {why}"))
            found.held_back = True
        elif step not in found.remote or save.seq > found.remote[step].seq:
            found.remote[step] = save
    return found


def _all_parts_there(candidate: CheckpointSet) -> bool:
    required = [part for part in candidate.parts if part.required]
    return bool(required) and all(part.size_bytes > 0 for part in required)


def awaited(
    local: Sequence[CheckpointSet],
    *,
    refused: Mapping[int, str] | None = None,
    wanted: int | None = None,
    below: int | None = None,
) -> CheckpointSet | None:
    """The newest set that is whole, still settling, and would be chosen before every complete one: what a start waits
    for instead of passing it over (promise 7). None where there is nothing to wait for."""
    if wanted is not None:
        usable = [s for s in local if s.step == wanted]
    else:
        usable = [s for s in local if s.of_line and not _why_not(s.step, refused or {}, below)]
    newest = max(
        (s for s in usable if s.complete or s.settles_in is not None), key=lambda s: (s.step, s.complete), default=None
    )
    return None if newest is None or newest.complete else newest


def _no_step(step: int, *, named: bool) -> str:
    return "no training makes so many steps" if step >= NO_TRAINING and not named else ""


def _why_not(step: int, refused: Mapping[int, str], below: int | None) -> str:
    if step in refused:
        return f"refused: {refused[step]}"
    if below is not None and step >= below:
        return f"a step below {below} is needed"
    return ""


def _take(found: _Candidates, step: int, reason: str) -> Choice:
    rejected = _newest_first(found.rejected)
    if step in found.local:
        return Choice(step, "local", found.local[step].save_id, reason, rejected)
    newest_local = max(found.local, default=None)
    than = f"; the newest here is step {newest_local}" if newest_local is not None else "; none here"
    return Choice(step, "store", found.remote[step].save_id, f"{reason}, in the store{than}", rejected)


def _newest_first(rejected: list[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    return tuple(sorted(rejected, key=lambda r: -r[0]))
