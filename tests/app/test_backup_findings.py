"""What the daemon finds about itself."""

from dataclasses import replace

import pytest

from podwatch.app.backup_findings import backup_findings, upload_findings
from podwatch.app.entry import silent_seconds
from podwatch.app.own_findings import freeze_findings, saved_after_all, supervisor_findings
from podwatch.checkpoints.shapes import SAVES, Concern
from podwatch.domain.checkpoint import CheckpointSet, Completeness
from podwatch.domain.facts import StoreFacts
from podwatch.domain.finding import FindingKind, Severity, Verdict
from podwatch.domain.lease import Decision, LeaseAction
from podwatch.domain.process import ProcessIdentity
from podwatch.domain.snapshot import Reading, SensorState, Supervision, TrainerSample, observed, unobserved


def test_a_restart_by_init_after_a_freeze_is_a_warning_for_ten_minutes() -> None:
    (found,) = freeze_findings(74.2, now=130.0, wall=1_700_000_030.0, since=100.0)
    assert (found.kind, found.severity, found.subject) == (FindingKind.LOOP_STALLED, Severity.WARNING, "restarted")
    assert "did not respond for 74 s, and init restarted it" in found.summary
    assert "guards it again since 22:13:20 UTC" in found.summary
    assert found.since == 100.0
    later = freeze_findings(74.2, now=700.0, wall=1_700_000_600.0, since=100.0)
    assert [f.summary for f in later] == [found.summary], "the text does not change while it is shown"
    assert freeze_findings(74.2, now=700.1, wall=1_700_000_600.1, since=100.0) == ()
    assert freeze_findings(0.0, now=130.0, wall=1_700_000_030.0, since=100.0) == ()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"PODWATCH_SILENT_SECONDS": "74.2", "PODWATCH_UNDER_INIT": "pid1"}, 74.2),
        ({"PODWATCH_SILENT_SECONDS": "74.2"}, 0.0),
        ({"PODWATCH_SILENT_SECONDS": "nan", "PODWATCH_UNDER_INIT": "pid1"}, 0.0),
        ({"PODWATCH_SILENT_SECONDS": "long", "PODWATCH_UNDER_INIT": "pid1"}, 0.0),
        ({"PODWATCH_UNDER_INIT": "pid1"}, 0.0),
    ],
)
def test_only_what_init_says_is_believed_and_only_once(given: dict[str, str], expected: float) -> None:
    assert silent_seconds(given) == expected
    assert silent_seconds(given) == 0.0


LAUNCHER = ProcessIdentity(4711, 100)
KEPT = TrainerSample("s1", Supervision.SUPERVISED, alive=True, launcher=LAUNCHER)
LOST = replace(KEPT, supervision=Supervision.ATTACH)


def test_a_trainer_whose_supervisor_ended_is_a_warning_that_says_what_still_works() -> None:
    (found,) = supervisor_findings(observed(LOST, 5.0))
    assert (found.kind, found.severity, found.verdict) == (FindingKind.SUPERVISOR_LOST, Severity.WARNING, Verdict.NONE)
    assert "(pid 4711), which continues" in found.summary
    assert "restarts it as before" in found.summary
    assert "counts as a failure" in found.summary
    assert "podwatch restart" in found.suggestion


@pytest.mark.parametrize(
    "reading",
    [
        observed(KEPT, 5.0),
        observed(replace(LOST, alive=False), 5.0),
        observed(replace(LOST, start_id="attach-4711-100"), 5.0),
        observed(TrainerSample(), 5.0),
        unobserved(SensorState.BLIND, 5.0, "no answer"),
    ],
    ids=["kept", "ended", "attached", "none", "unseen"],
)
def test_nothing_is_said_of_the_supervisor_of(reading: Reading[TrainerSample]) -> None:
    assert supervisor_findings(reading) == ()


def test_a_command_that_has_saved_does_not_save_nothing() -> None:
    nothing = Concern(SAVES, "prime-rl saves no checkpoints", "add --ckpt", certain=True)
    other = Concern("pattern", "no such directory", "correct it", certain=True)
    saved = CheckpointSet(40, "prime-rl", Completeness.COMPLETE, (), 1, 1, 1000.0, "s40")
    assert saved_after_all((nothing, other), (), 900.0) == (nothing, other)
    assert saved_after_all((nothing, other), (saved,), 900.0) == (other,)
    for started in (None, 2000.0):
        earlier, same = saved_after_all((nothing, other), (saved,), started)
        assert earlier.what == f"{nothing.what}; the checkpoints here (newest: step 40) are of an earlier start"
        assert same == other


BEHIND = StoreFacts(
    store_url="b2://bucket",
    ok=True,
    upload_seconds=1260.0,
    save_seconds=420.0,
    skipped=8,
)


def test_uploads_that_are_slower_than_the_saves() -> None:
    (found,) = upload_findings(BEHIND, now=150.0)
    assert (found.kind, found.severity) == (FindingKind.UPLOADS_SLOW, Severity.WARNING)
    assert found.summary == (
        "uploads are slower than the saves: an upload takes 21 min, a save comes every 7 min; 8 checkpoints were"
        " skipped lately. podwatch always sends the newest checkpoint next"
    )
    assert "save less often" in found.suggestion


@pytest.mark.parametrize(
    "sync",
    [
        None,
        replace(BEHIND, ok=False),
        replace(BEHIND, lease=Decision(LeaseAction.SUPERSEDED)),
        replace(BEHIND, upload_seconds=400.0),
    ],
)
def test_no_word_of_slow_uploads_without_cause(sync: StoreFacts | None) -> None:
    assert upload_findings(sync, now=150.0) == ()


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize(
    ("url", "word", "other"), [("file:///mnt/nas", "directory", "bucket"), ("b2://b", "bucket", "directory")]
)
def test_the_advice_about_a_store_is_about_its_kind(url: str, word: str, other: str, refused: bool) -> None:
    sync = StoreFacts(store_url=url, ok=False, error="no answer", refused=refused)
    (found,) = backup_findings(sync, (), now=100.0, wall=1e9, max_lag=3600.0, since=0.0)
    assert found.kind is FindingKind.STORE_UNAVAILABLE
    assert word in found.suggestion
    assert other not in found.suggestion
