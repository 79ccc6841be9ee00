"""One failure is one finding, and nothing that an operator must know is lost in it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.detection.merge import (
    BEFORE_SECONDS,
    NOTHING,
    OPERATOR,
    UNPAUSE,
    Healing,
    cost,
    fold,
    reported,
)
from podwatch.domain.finding import DEATHS, Finding, FindingKind, Severity, Verdict

KEPT = frozenset(
    {FindingKind.DISK_NO_ROOM, FindingKind.GPU_LOST, FindingKind.GPU_FAULT, FindingKind.NOT_BACKED_UP,
     FindingKind.STORE_UNAVAILABLE, FindingKind.CONFIG_STALE, FindingKind.TWO_WRITERS}
)  # fmt: skip
"""Other trouble, with something of its own to do."""


def finding(kind: FindingKind, severity: Severity = Severity.CRITICAL, since: float = 100.0, **more: object) -> Finding:
    made = Finding(kind, severity, f"{kind} happened", since, subject=f"s{kind}")
    return replace(made, **more)  # type: ignore[arg-type]


def death(kind: FindingKind = FindingKind.SILENT_DEATH, **more: object) -> Finding:
    return finding(kind, verdict=Verdict.RESTART, confirmed=True, **more)


ENGINE = death(subject="gpu0", summary="the inference engine on GPU 0 died silently: confirmed by health")


@pytest.mark.parametrize(
    ("healing", "summary", "fix"),
    [
        (Healing(ENGINE, 320, False, 1, 16.0, launcher="prime-rl"),
         "The inference engine on GPU 0 died and prime-rl did not notice. Restarting from step 320"
         " (1 step lost, 16 s of training)",
         NOTHING),
        (Healing(ENGINE, 320, False, 0, 16.0),
         "The inference engine on GPU 0 died and the launcher did not notice. Restarting from step 320 (no step lost)",
         NOTHING),
        (Healing(ENGINE, 320, started=True),
         "The inference engine on GPU 0 died and the launcher did not notice. Restarted from step 320; waiting for"
         " the first step", NOTHING),
        (Healing(death(FindingKind.HANG, summary="no progress for 25 min"), None, True, 7, 300.0, retry_seconds=80.0),
         "No progress for 25 min. Restarting from the beginning in 80 s (7 steps lost, 5 min of training)", NOTHING),
        (Healing(ENGINE, 5, False, None, 16.0, paused=True),
         "The inference engine on GPU 0 died and the launcher did not notice. Training restarts from step 5 (16 s"
         " of training lost) when the pause ends", UNPAUSE),
        (Healing(ENGINE),
         "The inference engine on GPU 0 died and the launcher did not notice. Restarting training", NOTHING),
    ],
)  # fmt: skip
def test_cause_what_is_done_what_it_cost_and_what_to_do(healing: Healing, summary: str, fix: str) -> None:
    told = reported(healing)
    assert (told.summary, told.suggestion, told.key) == (summary, fix, healing.cause.key)
    assert (told.severity, told.verdict, told.confirmed) == (Severity.CRITICAL, Verdict.RESTART, True)


kinds = st.sampled_from([k for k in FindingKind if k is not FindingKind.FINISHED])
anything = st.lists(
    st.builds(
        lambda kind, severity, since, confirmed: finding(
            kind, severity, since,
            verdict=Verdict.RESTART if confirmed and kind in DEATHS else Verdict.NONE,
            confirmed=confirmed and kind in DEATHS,
        ),
        kinds, st.sampled_from(list(Severity)), st.floats(0.0, 1000.0), st.booleans(),
    ),
    max_size=12, unique_by=lambda f: f.key,
)  # fmt: skip


@given(anything, st.booleans())
def test_at_most_one_finding_is_about_the_death_and_nothing_else_is_lost(found: list[Finding], heals: bool) -> None:
    healing = Healing(ENGINE, 320, False, 1, 16.0) if heals else None
    folded = fold(found, healing)
    critical = [f for f in folded if f.kind in DEATHS and f.severity is Severity.CRITICAL]
    assert len(critical) <= 1
    if critical:
        assert {f.kind for f in folded if f.kind in DEATHS} == {critical[0].kind}
    said = {f.summary for f in folded} | {e.value for f in folded for e in f.evidence}
    for one in found:
        assert any(one.summary in text for text in said), "what is folded is in the evidence"
    assert {f.key for f in found if f.kind in KEPT} <= {f.key for f in folded}
    assert len({f.key for f in folded}) == len(folded)
    assert fold(folded) == folded or heals, "what is folded stays as it is"


def test_consequences_go_into_the_evidence_of_the_one_that_explains_most() -> None:
    gpu = death(subject="gpu0")
    url = finding(FindingKind.SILENT_DEATH, Severity.WARNING, subject="http://x", summary="server dead; not restarting")
    child = death(FindingKind.REQUIRED_CHILD_EXITED)
    log, blind = finding(FindingKind.LOG_RULE, since=95.0), finding(FindingKind.SENSOR_BLIND, Severity.WARNING)
    hang = finding(FindingKind.HANG, Severity.WARNING)
    (one,) = fold((log, url, gpu, child, blind, hang))
    assert one.key == gpu.key
    assert [e.signal for e in one.evidence] == [f.key for f in (log, url, child, blind, hang)]


def test_trouble_from_long_before_is_its_own() -> None:
    old = finding(FindingKind.LOG_RULE, since=100.0 - BEFORE_SECONDS - 1.0)
    blind = finding(FindingKind.SENSOR_BLIND, Severity.WARNING, since=10.0 - BEFORE_SECONDS)
    assert {f.key for f in fold((death(), old, blind))} == {death().key, old.key, blind.key}


def test_warnings_alone_stay() -> None:
    found = (finding(FindingKind.SILENT_DEATH, Severity.WARNING), finding(FindingKind.LOG_RULE))
    assert fold(found) == found


@pytest.mark.parametrize("kind", OPERATOR)
def test_what_holds_the_restart_up_leads_and_keeps_its_instruction(kind: FindingKind) -> None:
    asks = finding(kind, summary="port 8000 is held by pid 5", suggestion="end what holds it")
    (one,) = fold((asks, finding(FindingKind.LOG_RULE)), Healing(ENGINE, 320, False, 1, 16.0))
    assert (one.key, one.suggestion) == (asks.key, "end what holds it")
    assert one.summary.startswith("The inference engine on GPU 0 died")
    assert one.summary.endswith(". port 8000 is held by pid 5")
    assert "Restarting" not in one.summary, "it does not restart"


OOM = 'logs/trainer.log: "torch.OutOfMemoryError: CUDA out of memory."'


def test_the_line_that_says_why_and_the_time_that_was_waited_are_in_the_sentence() -> None:
    exited = death(FindingKind.TRAINER_EXITED, summary="the trainer ended with exit code 1 at step 46")
    told = reported(Healing(exited, 40, False, 6, 4.0, log=OOM, down_seconds=71.0))
    assert told.summary == (
        f"The trainer ended with exit code 1 at step 46 ({OOM}). Restarting from step 40 (6 steps lost, 4 s of"
        " training); no training for 71 s"
    )
    assert "no training" not in reported(Healing(exited, 40, down_seconds=2.0)).summary


def test_after_giving_up_nothing_is_said_to_be_restarted() -> None:
    exited = death(FindingKind.TRAINER_EXITED, summary="the trainer ended with exit code 2 before its first step")
    healing = Healing(exited, log='trainer.log: "rl: error: bad --foo"', gave_up=True)
    gave_up = Finding(
        FindingKind.GAVE_UP, Severity.CRITICAL, "podwatch gave up: unknown argument", 0.0, "fix the cause"
    )
    (told,) = fold((exited, gave_up), healing)
    assert told.summary == (
        'The trainer ended with exit code 2 before its first step (trainer.log: "rl: error: bad --foo").'
        " podwatch gave up: unknown argument"
    )


@pytest.mark.parametrize(
    ("healing", "text"),
    [
        (Healing(ENGINE, 5, started=True), ""),
        (Healing(ENGINE, 5, retry_seconds=80.0), ""),
        (Healing(ENGINE, 5, paused=True), ". Training restarts from step 5 when the pause ends"),
        (Healing(ENGINE, 5, paused=True, started=True), ""),
    ],
)
def test_what_blocks_the_restart_replaces_what_podwatch_would_do(healing: Healing, text: str) -> None:
    """Also where the cause itself speaks of a restart: nothing is cut out of its text."""
    said = 'vllm.log: "Worker died. Restarting worker 3"'
    (told,) = fold((finding(FindingKind.BLOCKED, summary="port 8000 is held"),), replace(healing, log=said))
    assert told.summary == (
        f"The inference engine on GPU 0 died and the launcher did not notice ({said}){text}. port 8000 is held"
    )


def test_what_a_failure_has_cost_in_the_end() -> None:
    assert cost(6, 4.0, 77.0) == "; 6 steps lost (4 s of training), no training for 77 s"
    assert cost(0, 4.0, 9.0) == "; no step lost, no training for 9 s"
    assert cost(None, 4.0, None) == ""
