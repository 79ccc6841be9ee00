"""One judgement of the run: training state, reasons, overall."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.event import Incident
from podwatch.domain.facts import Facts, StoreFacts
from podwatch.domain.finding import DEATHS, NOTHING, Finding, FindingKind, Severity, Verdict
from podwatch.domain.process import ProcessIdentity
from podwatch.domain.run import Pause
from podwatch.domain.run_state import RunState
from podwatch.domain.snapshot import (
    Desired,
    ProgressSample,
    ProgressSource,
    Reading,
    SensorState,
    Snapshot,
    Supervision,
    TrainerSample,
    observed,
    unobserved,
)
from podwatch.domain.status_document import Overall, RecoveryView, TrainingState
from podwatch.report.daemon_view import DaemonView
from podwatch.report.overall_status import (
    HOLDS_UP,
    STEP_LATE_K,
    STEP_LATE_SECONDS,
    judge,
    step_late,
)

RUNNING = TrainerSample("a", Supervision.SUPERVISED, alive=True, started_at=0.0, launcher=ProcessIdentity(7, 1, "boot"))
BLIND: Reading[TrainerSample] = unobserved(SensorState.BLIND, 100.0, "no answer")


def situation(
    trainer: Reading[TrainerSample],
    *,
    desired: Desired = Desired.RUNNING,
    paused: bool = False,
    stores: bool = True,
    healed: bool = True,
    **fields: Any,
) -> DaemonView:
    """Without incident, and with a store."""
    run = RunState("r", desired=desired, pause=Pause(90.0) if paused else None)
    facts = Facts(Snapshot(at=100.0, wall=1e9, trainer=trainer), run)
    sync = StoreFacts(store_url="file:///x" if stores else "")
    incident = None if healed else Incident(1, "hang", 90.0, "what happened")
    return DaemonView("1", "r", facts, 100.0, 1e9, sync=sync, incident=incident, **fields)


def found(kind: FindingKind, severity: Severity = Severity.WARNING, **fields: object) -> Finding:
    return Finding(kind, severity, "what happened", 90.0, **fields)  # type: ignore[arg-type]


findings = st.lists(
    st.builds(
        found,
        st.sampled_from(FindingKind),
        st.sampled_from(Severity),
        verdict=st.sampled_from(Verdict),
        confirmed=st.booleans(),
    ),
    max_size=4,
).map(tuple)
situations = st.builds(
    situation,
    st.sampled_from((observed(RUNNING, 100.0), observed(replace(RUNNING, alive=False), 100.0), BLIND)),
    findings=findings,
    recovery=st.builds(
        RecoveryView,
        phase=st.sampled_from(("running", "starting", "blocked", "stopping", "evaluating")),
        active=st.booleans(),
        waiting=st.booleans(),
        blocked=st.booleans(),
        gave_up=st.booleans(),
        evaluating=st.booleans(),
    ),
    desired=st.sampled_from(Desired),
    mode=st.sampled_from(("act", "observe")),
    paused=st.booleans(),
    watchdog_ok=st.booleans(),
    stores=st.booleans(),
    healed=st.booleans(),
    trainer_ended_at=st.none() | st.just(95.0),
)


@given(situations)
def test_overall_is_never_better_than_its_reasons_and_the_state(now: DaemonView) -> None:
    judged = judge(now)
    severities = [reason.finding.severity for reason in judged.reasons]
    if Severity.CRITICAL in severities:
        assert judged.overall is Overall.CRITICAL
    if judged.overall is Overall.OK:
        assert Severity.WARNING not in severities
        assert judged.state not in (TrainingState.DOWN, TrainingState.RECOVERING, TrainingState.GAVE_UP)
    planned = judged.state in (TrainingState.EVALUATING, TrainingState.STARTING)  # there is no trainer to observe
    if not now.facts.pod.trainer.ok and not (now.recovery.evaluating and planned):
        assert judged.overall is not Overall.OK
    if judged.overall is Overall.CRITICAL:
        assert judged.reasons  # it says why


@given(situations)
def test_every_finding_is_a_reason_and_says_what_to_do(now: DaemonView) -> None:
    judged = judge(now)
    assert {f.key for f in now.findings} <= {reason.finding.key for reason in judged.reasons}
    for reason in judged.reasons:
        unknown = reason.since is None
        assert reason.finding.suggestion or (unknown and not now.acts) or (unknown and now.paused)


@given(situations, st.sampled_from(sorted(HOLDS_UP)))
def test_what_holds_a_start_up_comes_first_and_is_critical(now: DaemonView, kind: FindingKind) -> None:
    blocked = replace(
        now,
        facts=replace(now.facts, pod=replace(now.facts.pod, trainer=observed(replace(RUNNING, alive=False), 100.0))),
        findings=(found(kind, Severity.WARNING),),
        recovery=RecoveryView(phase="blocked", blocked=True),
    )
    judged = judge(blocked)
    assert judged.state is TrainingState.BLOCKED
    if kind is FindingKind.AMBIGUOUS_TRAINERS:  # within the patience of a start: podwatch only waits
        assert judged.overall is Overall.WARNING or not now.watchdog_ok
    else:
        assert (judged.reasons[0].finding.kind, judged.reasons[0].finding.severity) == (kind, Severity.CRITICAL)


def test_podwatch_that_repairs_asks_for_nothing() -> None:
    death = found(DEATHS[0], Severity.CRITICAL, verdict=Verdict.RESTART, confirmed=True)
    now = situation(
        observed(replace(RUNNING, alive=False), 100.0), findings=(death,), recovery=RecoveryView(active=True)
    )
    assert judge(now).state is TrainingState.RECOVERING
    assert judge(now).reasons[0].finding.suggestion == NOTHING
    for waits in (RecoveryView(active=True, blocked=True), RecoveryView(active=True, gave_up=True)):
        said = [reason.finding.suggestion for reason in judge(replace(now, recovery=waits)).reasons]
        assert NOTHING not in said, "it waits for the operator"
    assert (
        judge(replace(now, facts=replace(now.facts, run=replace(now.facts.run, pause=Pause(90.0)))))
        .reasons[0]
        .finding.suggestion.startswith("podwatch is paused")
    )
    assert "mode is observe" in judge(replace(now, mode="observe")).reasons[0].finding.suggestion


def test_a_step_is_late_only_by_a_known_median() -> None:
    sample = ProgressSample(ProgressSource.STEP_LINE, "trainer", 90.0, 40)
    seen = replace(situation(observed(RUNNING, 100.0)).facts.pod, progress=observed((sample,), 100.0))
    assert [step_late(seen, 90.0 + STEP_LATE_K * 60 + late, 60.0) for late in (-1, 1)] == [False, True]
    assert [step_late(seen, 90.0 + late, 0.1) for late in (STEP_LATE_SECONDS - 1, STEP_LATE_SECONDS + 1)] == [
        False,
        True,
    ]
    assert [step_late(seen, 1e6, 60.0, target) for target in (None, 42, 41, 40)] == [True, True, False, False]
    assert not step_late(seen, 1e6, None)
    assert not step_late(replace(seen, progress=observed((), 100.0)), 1e6, 60.0)


def test_an_evaluation_is_no_outage_and_its_end_that_cannot_start_training_is_one() -> None:
    gone = observed(replace(RUNNING, alive=False), 100.0)
    for phase, trainer, state in (
        ("stopping", observed(RUNNING, 100.0), TrainingState.EVALUATING),
        ("evaluating", gone, TrainingState.EVALUATING),
        ("evaluating", BLIND, TrainingState.EVALUATING),
        ("looking", gone, TrainingState.STARTING),
        ("starting", gone, TrainingState.STARTING),
    ):
        view = RecoveryView(phase=phase, active=True, evaluating=True)
        judged = judge(situation(trainer, recovery=view, trainer_ended_at=95.0 if phase == "evaluating" else None))
        assert (judged.state, judged.overall, judged.reasons) == (state, Overall.OK, ()), phase
    held = judge(situation(gone, recovery=RecoveryView(phase="blocked", blocked=True, evaluating=True)))
    assert (held.state, held.overall) == (TrainingState.BLOCKED, Overall.CRITICAL)
    stopped = judge(situation(gone, recovery=RecoveryView(phase="stopped", evaluating=True), desired=Desired.STOPPED))
    assert stopped.state is TrainingState.STOPPED
