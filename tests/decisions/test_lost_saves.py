"""Rejected checkpoints in a row, and a run of which nothing is stored: one finding for one cause."""

from dataclasses import replace

import pytest

from podwatch.app.lost_saves import FEW_SAVES, SavesOfRun, safekeeping, to_wait_for
from podwatch.domain.checkpoint import CheckpointSet, Completeness, PartState
from podwatch.domain.finding import Finding, FindingKind, Severity

WHY = "optimizer.bin is empty"
WARNING, CRITICAL = Severity.WARNING, Severity.CRITICAL


def made(step: int, state: Completeness = Completeness.DAMAGED, at: float | None = None) -> CheckpointSet:
    complete = state is Completeness.COMPLETE
    part = PartState("trainer", f"/out/checkpoints/step_{step}", True, complete, 10)
    return CheckpointSet(
        step, "custom", state, (part,), 10, 1, float(step) if at is None else at, reason="" if complete else WHY
    )


def found(kind: FindingKind, severity: Severity = WARNING) -> Finding:
    return Finding(kind, severity, f"{kind} is so", 5.0, subject="saves" if kind is FindingKind.SAVES_NOTHING else "")


def judged(kept: SavesOfRun, *findings: Finding) -> list[tuple[FindingKind, Severity]]:
    return [(f.kind, f.severity) for f in safekeeping(findings, kept, at=9.0)]


def test_one_rejected_checkpoint_is_what_a_kill_leaves_two_are_a_warning_with_rule_file_and_remedy() -> None:
    assert judged(SavesOfRun((made(5, Completeness.COMPLETE), made(10)))) == []
    sets = (made(5, Completeness.COMPLETE), made(10), made(15, Completeness.INCOMPLETE))
    (told,) = safekeeping((), SavesOfRun(sets), at=9.0)
    assert (told.kind, told.severity) == (FindingKind.NOT_COMPLETE, WARNING)
    assert "the newest 2 checkpoints (steps 10 and 15) are not complete by the rule of layout 'custom'" in told.summary
    assert f"step 10, /out/checkpoints/step_10: {WHY}" in told.summary  # the newest may still be half a save
    assert "[checkpoints.custom] require" in told.suggestion
    assert [e.signal for e in told.evidence] == ["step 15", "step 10"]


@pytest.mark.parametrize("between", [Completeness.WRITING, Completeness.COMPLETE])
def test_a_complete_one_ends_the_row_and_one_being_written_does_not(between: Completeness) -> None:
    sets = (made(5), made(10, between), made(15))
    assert bool(judged(SavesOfRun(sets))) is (between is Completeness.WRITING)


def test_the_row_is_in_order_of_time_so_that_an_abandoned_branch_does_not_end_it() -> None:
    """An operator went back to 100: what is saved after that comes below 120, which is of the old branch."""
    old = made(120, Completeness.COMPLETE, at=50.0)
    assert judged(SavesOfRun((made(105, at=60.0), made(110, at=70.0), old))) == [(FindingKind.NOT_COMPLETE, WARNING)]
    assert judged(SavesOfRun((made(105, at=30.0), made(110, at=40.0), old))) == []


@pytest.mark.parametrize("stored", [True, False])
def test_nothing_stored_is_critical_after_a_few_saves_with_the_steps_at_risk(stored: bool) -> None:
    for count in range(2, 14):
        kept = SavesOfRun(
            tuple(made(5 * n) for n in range(1, count + 1)), nothing_stored=not stored, steps_at_risk=5 * count
        )
        (told,) = safekeeping((), kept, at=9.0)
        worse = not stored and count >= FEW_SAVES
        assert (told.kind, told.severity) == (FindingKind.NOT_COMPLETE, CRITICAL if worse else WARNING), count
        text = f"nothing of this run is in the store, {5 * count} steps would be lost if training died now"
        assert (text in told.summary) is worse


def test_rejected_checkpoints_and_overdue_are_one_cause() -> None:
    kept = SavesOfRun((made(5), made(10)), nothing_stored=True)
    (told,) = safekeeping([found(FindingKind.CHECKPOINT_OVERDUE)], kept, at=9.0)
    assert (told.kind, told.severity) == (FindingKind.NOT_COMPLETE, CRITICAL)
    assert told.evidence[-1].signal == "checkpoint-overdue"


def test_a_run_that_saves_nothing_is_one_finding_critical_when_a_store_waits_for_it_in_vain() -> None:
    saves, overdue = found(FindingKind.SAVES_NOTHING), found(FindingKind.CHECKPOINT_OVERDUE)
    empty = SavesOfRun(nothing_stored=True, steps_at_risk=31)
    assert judged(empty, saves) == [(FindingKind.SAVES_NOTHING, WARNING)], "not at once: nothing much is at risk yet"
    (told,) = safekeeping([overdue, saves], empty, at=9.0)
    assert (told.kind, told.severity, told.key) == (FindingKind.SAVES_NOTHING, CRITICAL, saves.key)
    assert "31 steps would be lost" in told.summary
    assert overdue.summary in told.summary
    assert judged(replace(empty, nothing_stored=False), overdue, saves) == [(FindingKind.SAVES_NOTHING, WARNING)]
    assert judged(empty, overdue) == [(FindingKind.CHECKPOINT_OVERDUE, CRITICAL)], "of a command that nobody can read"


@pytest.mark.parametrize("held", ["", "a second trainer wrote"])
def test_a_store_that_takes_nothing_is_critical_once_a_few_checkpoints_wait(held: str) -> None:
    refused, lagging = found(FindingKind.STORE_UNAVAILABLE), found(FindingKind.SYNC_LAGGING, CRITICAL)
    for count in range(1, 6):
        sets = tuple(replace(made(n, Completeness.COMPLETE), held=held) for n in range(count))
        kept = SavesOfRun(sets, nothing_stored=True)
        worse = count >= FEW_SAVES and not held
        assert judged(kept, refused) == [(FindingKind.STORE_UNAVAILABLE, CRITICAL if worse else WARNING)]
        if worse:
            assert judged(kept, refused, lagging) == [(FindingKind.STORE_UNAVAILABLE, CRITICAL)]
        assert judged(replace(kept, nothing_stored=False), refused) == [(FindingKind.STORE_UNAVAILABLE, WARNING)]
        assert judged(kept) == [], "a first upload that is slow is sync-lagging's"


def test_uploads_that_are_always_given_up_are_named() -> None:
    sets = tuple(made(n, Completeness.COMPLETE) for n in range(FEW_SAVES))
    kept = SavesOfRun(sets, nothing_stored=True, voided=FEW_SAVES)
    assert judged(kept) == [(FindingKind.NOT_BACKED_UP, CRITICAL)]
    lagging = found(FindingKind.SYNC_LAGGING, CRITICAL)
    assert judged(kept, lagging) == [(FindingKind.SYNC_LAGGING, CRITICAL)]


def test_checkpoints_that_cannot_be_read_are_the_reason_too() -> None:
    sets = tuple(replace(made(n, Completeness.WRITING), unclear=True) for n in range(FEW_SAVES))
    (told,) = safekeeping((), SavesOfRun(sets, nothing_stored=True), at=9.0)
    assert (told.kind, told.severity) == (FindingKind.NOT_BACKED_UP, CRITICAL)
    assert WHY in told.summary
    assert judged(SavesOfRun(sets)) == []


def test_a_finished_run_waits_for_a_checkpoint_that_can_still_be_found_complete() -> None:
    """Its last one, while a disk of another node is not known: ending now would report that all is stored."""
    complete, half = made(5, Completeness.COMPLETE), made(10, Completeness.WRITING)
    unknown = replace(half, settles_in=0.0)
    assert to_wait_for((complete, half), None, settled=False) == 10
    assert to_wait_for((complete, half), None, settled=True) is None, "an interrupted save"
    assert to_wait_for((complete, unknown), None, settled=True) == 10
    assert to_wait_for((unknown,), 5, settled=True) == 10
    assert to_wait_for((unknown,), 10, settled=True) is None, "it is in the store"
    assert to_wait_for((made(15, Completeness.COMPLETE), unknown), None, settled=True) is None
