"""Which step the trainer resumes from. Pure.

Never "latest": a step of *this* run and lineage, complete by its layout's rule, and not refused because it resumed at
the wrong step or failed to load. If checkpoints exist but none is usable, the answer is "none" and podwatch asks the
operator: a silent fresh start would discard the run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from podwatch.domain.checkpoint import NO_TRAINING, CheckpointSet
from podwatch.domain.facts import Facts
from podwatch.domain.run import Lineage
from podwatch.domain.stored_checkpoint import StoredCheckpoint

# -- choice of the step ----------------------------------------------------------------------------------------------

Source = Literal["local", "store", "fresh", "none"]


@dataclass(frozen=True, slots=True)
class Choice:
    """``source``: resume from a local checkpoint, fetch one from the store first, start fresh, or (none) ask the
    operator.

    ``rejected`` lists every candidate that was not taken, newest first, with the reason. ``unowned``: one of them is a
    complete checkpoint that is not known to belong to this run.
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
    remote: dict[int, StoredCheckpoint] = field(default_factory=dict)
    rejected: list[tuple[int, str]] = field(default_factory=list)
    unowned: bool = False
    held_back: bool = False
    """An unusable checkpoint exists that is or could be this run's: only the operator can decide on a fresh start."""

    def steps(self) -> list[int]:
        return sorted(self.local.keys() | self.remote.keys(), reverse=True)


def choose(
    local: Sequence[CheckpointSet],
    remote: Sequence[StoredCheckpoint] = (),
    *,
    lineage: Lineage | None,
    refused: Mapping[int, str] | None = None,
    adopted: bool = True,
    wanted: int | None = None,
    below: int | None = None,
    ancestry: Mapping[str, int] | None = None,
) -> Choice:
    """Choose the step to start from.

    ``remote``: the one that the run's pointer names first. ``lineage``: the run's current lineage (None on a pod
    without a record: that of the first one in the store). ``ancestry`` maps older lineages to their last step that is
    part of the current one; the direct parent is known from ``lineage``. ``refused``: steps that must not be used
    (resumed-wrong, failed loads), with the reason. ``adopted`` is false if the checkpoints on this pod belong to
    another run or to an unknown one. ``wanted``: a step that an operator named; it must exist and be complete, and
    overrides ``refused`` and ``below``. ``below`` allows only lower steps (a step back).

    If a step is both local and in the store, the local checkpoint is used: it needs no download.
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
                None, "none", "", f"cannot use step {wanted}: {why}", _newest_first(found.rejected), found.unowned
            )
        overridden = f", although podwatch refused it: {refused[wanted]}" if refused and wanted in refused else ""
        return _take(found, wanted, f"requested by step number{overridden}")
    if steps:
        return _take(found, steps[0], "newest complete step of this run")
    rejected = _newest_first(found.rejected)
    if found.held_back:
        newest_step, why = rejected[0]
        return Choice(
            None, "none", "", f"no checkpoint can be resumed from (step {newest_step}: {why})", rejected, found.unowned
        )
    return Choice(None, "fresh", "", "no complete checkpoint of this run on this pod or in the store", rejected)


def other_world(saved: int | None, asked: int | None, *, counts_all: bool) -> str:
    """Why a trainer that cannot reshard cannot load a checkpoint that ``saved`` processes wrote, if the command starts
    ``asked`` processes; empty if it can, or if a number is unknown. Without ``counts_all``, ``saved`` counts only
    data-parallel ranks, and ``asked`` must be a multiple of it."""
    if saved is None or asked is None or saved == asked or (not counts_all and asked % saved == 0):
        return ""
    whom = "processes" if counts_all else "data-parallel ranks"
    return f"{saved} {whom} saved it and the command starts {asked} processes: this trainer cannot load it"


def _valid_until(
    lineage: Lineage | None, ancestry: Mapping[str, int], remote: Sequence[StoredCheckpoint]
) -> dict[str, int | None]:
    """Lineage id -> its last step that is part of the current lineage (None: all of them)."""
    if lineage is None:
        newest = next((save for save in remote if not save.problem), None)
        return {newest.lineage: None} if newest is not None else {}
    valid: dict[str, int | None] = dict(ancestry)
    if lineage.parent and lineage.parent_step is not None:
        valid[lineage.parent] = lineage.parent_step
    valid[lineage.id] = None
    return valid


def _sort_out(
    local: Sequence[CheckpointSet],
    remote: Sequence[StoredCheckpoint],
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
            why = (
                "not known to belong to this run; use it with `podwatch run --adopt-existing` or move it away with"
                " `podwatch clean`"
            )
        elif candidate.held and not named:
            why = f"held back: {candidate.held}; to use it, name the step"
        else:
            why = _why_not(step, refused, below)
        if why:
            found.rejected.append((step, why))
            found.held_back = True
        else:
            found.local[step] = candidate
    # A kill interrupts one save. Several incomplete ones that have all their parts need an operator's judgement.
    found.held_back = found.held_back or (unfinished > 1 and not found.local)
    for save in remote:
        step = save.step
        last = valid.get(save.lineage, -1)
        if save.problem:
            found.rejected.append((step, f"in the store: {save.problem}"))
            found.held_back = True
            continue
        if save.lineage not in valid:
            # Left on purpose: it never prevents a fresh start.
            found.rejected.append((step, f"in the store, of a lineage that this run has left ({save.lineage})"))
            continue
        if last is not None and step > last:
            found.rejected.append((step, f"in the store, above step {last} where this run left that lineage"))
            continue
        if why := _why_not(step, refused, below) or _no_step(step, named=named):
            found.rejected.append((step, f"in the store: {why}"))
            found.held_back = True
        elif step not in found.remote or save.order > found.remote[step].order:
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
    """The newest checkpoint that is whole but still settling and newer than every complete one, so that a start waits
    for it; None if there is none."""
    if wanted is not None:
        usable = [s for s in local if s.step == wanted]
    else:
        usable = [s for s in local if s.of_line and not _why_not(s.step, refused or {}, below)]
    newest = max(
        (s for s in usable if s.complete or s.settles_in is not None), key=lambda s: (s.step, s.complete), default=None
    )
    return None if newest is None or newest.complete else newest


INSPECTIONS = 3
"""So many inspections without an answer, and the operator is asked: an older checkpoint would lose steps, and a start
from it would move this one to quarantine."""


def unanswered(
    local: Sequence[CheckpointSet], *, refused: Mapping[int, str] | None = None, below: int | None = None
) -> CheckpointSet | None:
    """The newest checkpoint that no inspection could judge and that is newer than every complete one; None if there is
    none."""
    usable = [s for s in local if s.of_line and not _why_not(s.step, refused or {}, below)]
    newest = max((s for s in usable if s.complete or s.unanswered), key=lambda s: (s.step, s.complete), default=None)
    return None if newest is None or newest.complete else newest


def _no_step(step: int, *, named: bool) -> str:
    return "the step number is impossibly high" if step >= NO_TRAINING and not named else ""


def _why_not(step: int, refused: Mapping[int, str], below: int | None) -> str:
    if step in refused:
        return f"refused: {refused[step]}"
    if below is not None and step >= below:
        return f"podwatch steps back to a step below {below}"
    return ""


def _take(found: _Candidates, step: int, reason: str) -> Choice:
    rejected = _newest_first(found.rejected)
    if step in found.local:
        return Choice(step, "local", found.local[step].save_id, reason, rejected)
    newest_local = max(found.local, default=None)
    than = f"; the newest on this pod is step {newest_local}" if newest_local is not None else "; none on this pod"
    return Choice(step, "store", found.remote[step].save_id, f"{reason}, in the store{than}", rejected)


def _newest_first(rejected: list[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    return tuple(sorted(rejected, key=lambda r: -r[0]))


# -- the step of the next start ---------------------------------------------------------------------------------------

SETTLE_PATIENCE = 720.0
"""Seconds; the longest settle time is two minutes. A checkpoint that still changes then has a writer."""
BEHIND_A_LINK = (
    "move the checkpoint back to the place of the link, set trainer.checkpoint_dir to the directory that it points to,"
    " or run `podwatch start --fresh`"
)
DOUBT_FIX = "make podwatch's state directory writable (see the other findings), or run `podwatch start --step N`"
DECIDE = "see `podwatch checkpoints`, then run `podwatch start --step N` or `podwatch start --fresh`"


@dataclass(frozen=True, slots=True)
class Pending:
    """The step is not known yet. ``fix``: what an operator can do about it; empty if it is a matter of seconds."""

    why: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """An operator has to decide. ``unowned``: about checkpoints that are not known to be this run's. ``wrong``: about a
    trainer that ignored the step that it was to resume from."""

    why: str
    fix: str = DECIDE
    unowned: bool = False
    wrong: bool = False


ASKS_STORE = Pending("choosing the step to start from")


def choose_start(facts: Facts) -> Choice | Pending | Ask:
    """The step of the next start, by the checkpoints here, those in the store, and what run.json says of the run."""
    run, nodes = facts.run, facts.nodes
    if nodes is not None and nodes.follows:
        return Choice(nodes.step, "fresh" if nodes.step is None else "local", "", "node 0 has chosen this step")
    if run.fresh:
        return Choice(None, "fresh", "", "a fresh start was requested")
    if facts.inventory is None:
        return ASKS_STORE
    if facts.question is not None:
        return Ask(*facts.question)
    if facts.unreadable:
        fix = "give podwatch's user access to the directory, or repair its disk; podwatch retries automatically"
        return Pending(f"the checkpoints cannot be listed: {facts.unreadable}", fix)
    ours = [s for s in facts.checkpoints if s.ours]
    use = ours or list(facts.checkpoints)
    if (unclear := _unclear(facts, use)) is not None:
        return unclear
    choice = _chosen(facts, use, adopted=bool(ours) or not use, below=run.below)
    if choice.source == "none" and run.below is not None and run.wanted is None:
        # No older checkpoint is usable: the one that failed is better than none.
        choice = _chosen(facts, use, adopted=bool(ours) or not use, below=None)
    return _asked_about(facts, choice, use) or choice


def _chosen(facts: Facts, use: Sequence[CheckpointSet], *, adopted: bool, below: int | None) -> Choice:
    run = facts.run
    # A lineage with a parent was opened here on request (`clean`), even if nothing was started in it yet.
    own = run.last_start is not None or run.lineage.parent != ""
    return choose(
        use,
        () if facts.inventory is None else facts.inventory.saves,
        lineage=run.lineage if own else None,
        refused=run.refused,
        adopted=adopted,
        wanted=run.wanted,
        below=below,
        ancestry=run.ancestry,
    )


def _unclear(facts: Facts, use: Sequence[CheckpointSet]) -> Pending | Ask | None:
    """About a checkpoint that is newer than every complete one and may be whole."""
    run = facts.run
    settling = awaited(use, refused=run.refused, wanted=run.wanted, below=run.below)
    if settling is not None:
        left = settling.settles_in or 0.0
        if facts.pod.at - facts.free_since > SETTLE_PATIENCE:
            return Ask(f"step {settling.step} keeps changing: {settling.reason}. Another process writes to it")
        return Pending(f"step {settling.step} looks complete; {left:.0f} s more to see that it no longer changes")
    unsure = None if run.wanted is not None else unanswered(use, refused=run.refused, below=run.below)
    if unsure is not None and unsure.unanswered < INSPECTIONS:
        count = f"{unsure.unanswered} of {INSPECTIONS} inspections gave no answer"
        return Pending(f"step {unsure.step} may be complete; {count}: {unsure.reason}")
    return None


def _asked_about(facts: Facts, choice: Choice, use: Sequence[CheckpointSet]) -> Pending | Ask | None:
    """Why this choice is not started from: an operator decides, or the store has to answer."""
    run, trouble = facts.run, "" if facts.inventory is None else facts.inventory.trouble
    above = -1 if choice.step is None else choice.step
    unsure = None if run.wanted is not None else unanswered(use, refused=run.refused, below=run.below)
    if unsure is not None and above < unsure.step:
        return Ask(f"step {unsure.step} may be complete, but no inspection gave an answer: {unsure.reason}")
    if choice.source == "none" and trouble and run.wanted is not None and all(s.step != run.wanted for s in use):
        why = f"step {run.wanted} is not on this pod, and the store did not provide it: {trouble}"
        return Pending(why, "make the store reachable, or choose a step that `podwatch checkpoints` shows on this pod")
    if run.refused and run.wanted is None and above < max(run.refused):
        step, why = min(run.refused.items())
        text = f"{why}. The command ignores the step that it is to resume from, so podwatch starts it no more"
        fix = (
            "correct [trainer] command or resume_args, then run `podwatch start`; `podwatch start --step"
            f" {step}` resumes from it anyway"
        )
        return Ask(text, fix, wrong=True)
    if choice.source == "none":
        return Ask(choice.reason, unowned=choice.unowned)
    if facts.doubt and choice.step is None:
        return Pending(f"podwatch does not start fresh: {facts.doubt}", DOUBT_FIX)
    if facts.doubt and any(s.complete and not s.ours and s.step > above for s in facts.checkpoints):
        unknown = f"podwatch cannot tell whether a checkpoint above step {choice.step} belongs to this run"
        return Pending(f"{unknown}: {facts.doubt}", DOUBT_FIX)
    if choice.source == "fresh":
        return _before_a_fresh_start(facts, trouble)
    if choice.source == "local" and run.wanted is None and (misfit := facts.misfits.get(above)):
        return Ask(f"step {choice.step} cannot be resumed from: {misfit}")
    return None


def _before_a_fresh_start(facts: Facts, trouble: str) -> Pending | Ask | None:
    if facts.behind_links:
        step = max(facts.behind_links)
        return Ask(f"step {step} seems to be behind a symbolic link, and podwatch follows no link", BEHIND_A_LINK)
    # A pod that has trained, and has never seen a save of this run in the store, loses nothing that is there.
    store_is_empty = facts.run.last_start is not None and not facts.run.stored
    if trouble and not store_is_empty:
        why = f"no checkpoint of this run is on this pod, and the store did not provide one: {trouble}"
        return Pending(why, "make the store reachable, or run `podwatch start --fresh` to start at step 0")
    return None
