"""Findings about lost saves: consecutive checkpoints that the completeness rule rejects, and a run that has nothing in
the store while more and more steps are at risk.

One finding per cause. Each source reports its own (``saves-nothing``, ``checkpoint-overdue``, ``store-unavailable``,
``sync-lagging``); ``safekeeping`` keeps the one that gives the reason, puts the others into its evidence, and raises it
to critical if nothing of the run was ever stored.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from podwatch.domain.checkpoint import CheckpointSet, Completeness
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity

IN_A_ROW = 2
"""Rejected checkpoints before a warning: a kill during a save leaves a single one."""
FEW_SAVES = 3
"""Checkpoints of which none is stored before the finding is critical: a first upload that is only slow has then had two
save intervals."""
_LISTED = 5


@dataclass(frozen=True, slots=True)
class NotStored:
    """``step``: the newest complete checkpoint. ``since_wall`` (epoch seconds): since when the store has got nothing
    although a complete checkpoint waits."""

    step: int
    since_wall: float


def not_stored(
    sets: Iterable[CheckpointSet], stored: Collection[tuple[int, str]], published_wall: float | None
) -> NotStored | None:
    """None if the newest complete checkpoint is in the store. ``stored``: (step, save_id); ``published_wall``: the last
    publication."""
    waiting = [s for s in sets if s.complete and not s.held]
    newest = max(waiting, key=lambda s: s.step, default=None)
    if newest is None or (newest.step, newest.save_id) in stored:
        return None
    oldest = min(s.changed_wall for s in waiting if (s.step, s.save_id) not in stored)
    return NotStored(newest.step, max(oldest, published_wall or 0.0))


def pin_not_stored(
    sets: Iterable[CheckpointSet], stored: Collection[tuple[int, str]], pins: Collection[int]
) -> NotStored | None:
    """The newest pinned checkpoint that is to be stored once the run is finished and is not yet."""
    waiting = [s for s in sets if s.step in pins and s.complete and not s.held and (s.step, s.save_id) not in stored]
    newest = max(waiting, key=lambda s: s.step, default=None)
    return None if newest is None else NotStored(newest.step, newest.changed_wall)


@dataclass(frozen=True, slots=True)
class SavesOfRun:
    """The checkpoints of a run at this moment. ``sets``: this run's own on this pod.

    ``nothing_stored``: a store is configured, this pod publishes to it, and as far as podwatch knows nothing of this
    run was ever stored. ``voided``: consecutive uploads given up because their files changed. ``steps_at_risk``: steps
    that a failure now would lose; None if unknown. ``content_read``: podwatch has listed the store's contents.
    """

    sets: tuple[CheckpointSet, ...] = ()
    nothing_stored: bool = False
    voided: int = 0
    steps_at_risk: int | None = None
    content_read: bool = True


def rejected_in_a_row(sets: Sequence[CheckpointSet]) -> list[CheckpointSet]:
    """The checkpoints written since the last complete one, newest first. One that is still being written is left
    out."""
    found: list[CheckpointSet] = []
    for each in sorted(sets, key=lambda s: (s.changed_wall, s.step), reverse=True):
        if each.completeness is Completeness.WRITING:
            continue
        if each.complete:
            break
        found.append(each)
    return found


def safekeeping(findings: Sequence[Finding], saves: SavesOfRun, *, at: float) -> tuple[Finding, ...]:
    """``findings`` with each cause once, raised to critical if it leaves the run without anything in the store. ``at``
    is monotonic. Pure."""
    found = list(findings)
    rejected = rejected_in_a_row(saves.sets)
    overdue = _first(found, FindingKind.CHECKPOINT_OVERDUE)
    cause = _not_complete(rejected, saves, at) if len(rejected) >= IN_A_ROW else None
    if cause is not None:
        found.append(cause)
    else:
        cause = _first(found, FindingKind.SAVES_NOTHING) or overdue
    if cause is not None and overdue is not None and cause is not overdue:
        summary = cause.summary if rejected else f"{cause.summary}; {overdue.summary}"
        cause = _merge(found, replace(cause, summary=summary), cause, overdue)
    if not saves.nothing_stored:
        return tuple(found)
    whole = [s for s in saves.sets if s.complete]
    if whole:
        _waiting(found, [s for s in whole if not s.held], saves, at)
    elif cause is not None and (len(rejected) >= FEW_SAVES or overdue is not None):
        text = f"{cause.summary}; nothing of this run is in the store{_at_risk(saves)}"
        _merge(found, replace(cause, severity=Severity.CRITICAL, summary=text), cause)
    elif cause is None and len(unclear := [s for s in saves.sets if s.unclear]) >= FEW_SAVES:
        newest = max(unclear, key=lambda s: s.step)
        why = f"podwatch cannot judge {len(unclear)} checkpoints; step {newest.step}: {newest.reason}"
        found.append(_nothing_stored(f"{why}{_at_risk(saves)}", "give podwatch permission to read them", at))
    return tuple(found)


def _waiting(found: list[Finding], whole: Sequence[CheckpointSet], saves: SavesOfRun, at: float) -> None:
    """Report complete checkpoints of which the store accepted none."""
    if len(whole) < FEW_SAVES:
        return
    nothing = "nothing of this run was ever stored" if saves.content_read else "none of them is in the store"
    text = f"{len(whole)} complete checkpoints are waiting for upload, {nothing}"
    refused = _first(found, FindingKind.STORE_UNAVAILABLE)
    lagging = _first(found, FindingKind.SYNC_LAGGING)
    if refused is not None:
        worse = replace(refused, severity=Severity.CRITICAL, summary=f"{refused.summary}; {text}")
        _merge(found, worse, refused, *(() if lagging is None else (lagging,)))
    elif saves.voided >= FEW_SAVES and lagging is None:
        why = f"{text}: podwatch gave up {saves.voided} uploads in a row because files of the checkpoint changed"
        fix = "find the program that changes or deletes files of saved checkpoints (`podwatch checkpoints`)"
        found.append(_nothing_stored(why, fix, at))


def _not_complete(rejected: Sequence[CheckpointSet], saves: SavesOfRun, at: float) -> Finding:
    oldest = rejected[-1]  # the newest one may still change
    good = max((s.step for s in saves.sets if s.complete and not s.held), default=None)
    back = "" if good is None else f"; the newest complete one is step {good}{_at_risk(saves)}"
    own_rule = oldest.layout == "custom"
    where = (
        "correct [checkpoints.custom] require, not_part or last"
        if own_rule
        else "check trainer.layout, or write a [checkpoints.custom] section"
    )
    return Finding(
        FindingKind.NOT_COMPLETE,
        Severity.WARNING,
        f"the newest {len(rejected)} checkpoints ({_steps(rejected)}) are not complete by the rule of layout"
        f" {oldest.layout!r}: podwatch neither stores them nor resumes from them{back}; step {oldest.step},"
        f" {_where(oldest)}: {_why(oldest)}",
        at,
        f"check the trainer's log for failed saves; if these checkpoints are complete, {where} (docs/trainer.md)",
        evidence=tuple(
            Evidence(f"step {s.step}", f"{s.completeness}: {_why(s)}", Agreement.AGREES) for s in rejected[:_LISTED]
        ),
    )


def _steps(sets: Sequence[CheckpointSet]) -> str:
    steps = sorted(s.step for s in sets)
    return f"steps {steps[0]} and {steps[1]}" if len(steps) == 2 else f"steps {steps[0]} to {steps[-1]}"


def _where(found: CheckpointSet) -> str:
    """The directory of the incomplete part."""
    parts = sorted(found.parts, key=lambda p: (not (p.required and p.reason), not p.required))
    return parts[0].path if parts else "its directory"


def _why(found: CheckpointSet) -> str:
    return found.reason or next((p.reason for p in found.parts if p.reason), "") or str(found.completeness)


def _nothing_stored(why: str, fix: str, at: float) -> Finding:
    return Finding(FindingKind.NOT_BACKED_UP, Severity.CRITICAL, f"NOT BACKED UP: {why}", at, fix)


def _at_risk(saves: SavesOfRun) -> str:
    steps = saves.steps_at_risk
    return "" if not steps else f", {steps} step{'' if steps == 1 else 's'} would be lost if training died now"


def _first(findings: Sequence[Finding], kind: FindingKind) -> Finding | None:
    return next((f for f in findings if f.kind is kind), None)


def _merge(found: list[Finding], leader: Finding, old: Finding, *absorbed: Finding) -> Finding:
    """Replace ``old`` with ``leader`` and move ``absorbed`` into its evidence."""
    more = tuple(Evidence(f.key, f.summary, Agreement.AGREES) for f in absorbed)
    leader = replace(leader, evidence=(*leader.evidence, *more))
    gone = {id(f) for f in absorbed}
    found[:] = [leader if f is old else f for f in found if id(f) not in gone]
    return leader


def to_wait_for(sets: Iterable[CheckpointSet], stored: int | None, *, settled: bool) -> int | None:
    """The step of a checkpoint that is not complete yet, and that a finished run waits for; None if there is none.
    ``stored``: the newest step in the store. ``settled``: nothing more will be written. Then only one counts that can
    still be found complete: of nodes with a disk of their own, while one of the disks is not known."""
    known = tuple(sets)
    newest = max((s.step for s in known if s.complete and not s.held), default=-1)
    least = max(newest, -1 if stored is None else stored) if settled else newest
    writing = (s for s in known if s.step > least and s.completeness is Completeness.WRITING)
    return max((s.step for s in writing if not settled or s.settles_in is not None), default=None)
