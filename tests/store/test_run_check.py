"""The verdict over a run's traces in the store."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.lease import Beat, Heartbeat, read_beat
from podwatch.store.documents import RunPointer
from podwatch.store.runs.judge import Judgement, Level, Limits, judge
from podwatch.store.runs.read import Activity, NewestSave, RunInStore

LIMITS = Limits()
WROTE = 1e9


def changed(
    beat: Beat, *, age: float | None = None, step_age: float | None = None, unstored_age: float | None = None,
    **fields: object,
) -> Beat:  # fmt: skip
    """The ages are seconds before it was written."""
    walls = {"step_wall": step_age, "unstored_since_wall": unstored_age}
    fields |= {name: WROTE - seconds for name, seconds in walls.items() if seconds is not None}
    return replace(beat, said=replace(beat.said, **fields), age=beat.age if age is None else age)  # type: ignore[arg-type]


WELL = changed(
    Beat(Heartbeat(host="pod-1", written_wall=WROTE, step=320)),
    age=20.0, step_age=4.0, state="running", phase="running", desired="running", overall="ok",
)  # fmt: skip
NOW = 2e9


def run_of(
    beat: Beat | None = None, *, claim_age: float | None = None, step: int | None = None, problem: str = "",
    **more: object,
) -> RunInStore:  # fmt: skip
    """What the store holds of a run. ``step``: what the newest pointer names."""
    active = Activity(NOW, beat, None if claim_age is None else (1, NOW - claim_age))
    pointer = RunPointer("r", 1, 1, step, "w", NOW, "s" * (step is not None), "sha1:" + "0" * 40 if step else "")
    return RunInStore("r", active, NewestSave(None if step is None else pointer, problem=problem), **more)  # type: ignore[arg-type]


def of(**fields: object) -> Judgement:
    return judge(run_of(changed(WELL, **fields), claim_age=90_000.0, step=300), LIMITS)  # type: ignore[arg-type]


def test_a_run_that_is_well() -> None:
    assert of() == Judgement(Level.OK, "step 320, 24 s ago; step 300 is stored")


@pytest.mark.parametrize(
    ("beat", "level", "text"),
    [
        ({"age": 301.0}, Level.CRITICAL, "dead: no heartbeat from pod pod-1 since 5 min; its last step was 320"),
        ({"age": 301.0, "state": "restarting"}, Level.CRITICAL, "dead: podwatch ended there"),
        ({"age": 200.0}, Level.WARNING, "no heartbeat since 3 min"),
        ({"step_age": 3601.0}, Level.WARNING, "no new step since 1 h"),
        ({"step_age": 3601.0, "phase": "paused"}, Level.OK, "step 320"),
        ({"step_age": 3601.0, "phase": "evaluating"}, Level.OK, "step 320"),
        (
            {"unstored_step": 310, "unstored_age": 3601.0},
            Level.WARNING,
            "upload is behind: nothing was stored for 1 h, step 310 waits; step 300 is stored",
        ),
        ({"unstored_step": 310, "unstored_age": 60.0}, Level.OK, "step 300 is stored"),
        ({"state": ""}, Level.UNKNOWN, "its heartbeat cannot be read"),
        ({"overall": "critical", "reason": "GPU 0 is lost"}, Level.CRITICAL, "GPU 0 is lost"),
        ({"overall": "warning", "reason": "the disk is 90 % full"}, Level.WARNING, "the disk is 90 % full"),
        ({"overall": "unknown"}, Level.UNKNOWN, "cannot observe training"),
        ({"state": "released", "desired": "finished"}, Level.OK, "finished; step 300 is stored"),
        ({"state": "released", "desired": "finished", "age": 1e7}, Level.OK, "finished"),
        ({"state": "restarting", "desired": "finished", "age": 400.0}, Level.OK, "finished; step 300 is stored"),
        (
            {"state": "released", "desired": "finished", "unstored_step": 320},
            Level.WARNING,
            "finished, but the checkpoint of step 320",
        ),
        (
            {"state": "released", "desired": "finished", "unstored_step": 12, "age": 400.0},
            Level.CRITICAL,
            "finished, but the checkpoint of step 12 is not stored (step 300 is stored)",
        ),
        ({"state": "released", "desired": "stopped", "age": 1e6}, Level.OK, "training is stopped; step 300 is stored"),
        (
            {"state": "released", "desired": "stopped", "overall": "critical", "reason": "the next save does not fit"},
            Level.CRITICAL,
            "training is stopped: the next save does not fit",
        ),
        (
            {"state": "released", "desired": "stopped", "unstored_step": 320},
            Level.WARNING,
            "step 320 is only on pod pod-1",
        ),
        ({"state": "released", "age": 60.0}, Level.CRITICAL, "no pod holds the run: pod pod-1 gave up or ended"),
        ({"state": "preempted", "age": 60.0}, Level.CRITICAL, "no pod holds the run: pod pod-1 was preempted 60 s ago"),
    ],
)
def test_each_case(beat: dict[str, object], level: Level, text: str) -> None:
    found = of(**beat)
    assert (found.level, text in found.summary) == (level, True), found


def test_without_a_heartbeat() -> None:
    assert judge(run_of(), LIMITS).level is Level.UNKNOWN
    assert judge(run_of(claim_age=20.0), LIMITS).level is Level.WARNING
    assert judge(run_of(claim_age=400.0), LIMITS).level is Level.CRITICAL
    assert judge(run_of(step=3), LIMITS).level is Level.CRITICAL


def test_a_pod_that_takes_over() -> None:
    dead = run_of(changed(WELL, age=700.0), claim_age=40.0)
    assert judge(dead, LIMITS).level is Level.WARNING
    assert "another pod claimed the run 40 s ago" in judge(dead, LIMITS).summary
    left = run_of(changed(WELL, state="preempted", age=70.0), claim_age=40.0)
    assert judge(left, LIMITS).level is Level.WARNING
    own = run_of(changed(WELL, state="preempted", age=70.0), claim_age=100.0)
    assert judge(own, LIMITS).level is Level.CRITICAL, "the claim is older than the heartbeat: its own"


def test_what_is_not_in_use_is_well() -> None:
    gone = run_of(changed(WELL, age=1e7), step=300, archived_wall=1.0)
    assert judge(gone, LIMITS) == Judgement(Level.OK, "archived; step 300 is stored")
    for state, overall in (("released", "ok"), ("running", "critical")):
        asked = changed(WELL, age=1e7, state=state, overall=overall)
        found = judge(run_of(asked, step=300, stopped_by_control="the data are wrong"), LIMITS)
        assert found == Judgement(Level.OK, "stopped by control.json (the data are wrong); step 300 is stored")


def test_a_pointer_that_cannot_be_used_is_critical() -> None:
    found = judge(run_of(WELL, step=300, problem="the manifest is not in the store"), LIMITS)
    assert (found.level, "the newest checkpoint is not usable" in found.summary) == (Level.CRITICAL, True)


beats = st.builds(
    changed,
    st.just(Beat(Heartbeat(written_wall=WROTE))),
    age=st.floats(0, 1e8),
    state=st.sampled_from(["", "running", "restarting", "preempted", "released", "?"]),
    phase=st.sampled_from(["", "running", "paused", "gave-up", "finished"]),
    desired=st.sampled_from(["", "running", "stopped", "finished"]),
    overall=st.sampled_from(["", "ok", "warning", "critical", "unknown"]),
    step=st.none() | st.integers(0, 1000),
    step_age=st.none() | st.floats(0, 1e8),
    unstored_step=st.none() | st.integers(0, 1000),
    unstored_age=st.none() | st.floats(0, 1e8),
)
runs = st.builds(
    run_of,
    st.none() | beats,
    claim_age=st.none() | st.floats(0, 1e8),
    step=st.none() | st.integers(1, 1000),
    problem=st.sampled_from(["", "damaged"]),
)


@given(runs)
def test_silence_is_never_well(run: RunInStore) -> None:
    """Without a fresh heartbeat a run is well only if somebody ended it on purpose."""
    found, beat = judge(run, LIMITS), run.active.beat
    assert found.summary
    ended = beat is not None and beat.said.state in ("preempted", "released", "restarting")
    ended = ended and beat is not None and beat.said.desired in ("stopped", "finished")
    if (beat is None or beat.age > LIMITS.late) and not ended:
        assert found.level is not Level.OK


@given(runs, st.floats(0, 1e8))
def test_more_silence_is_never_better(run: RunInStore, more: float) -> None:
    beat = run.active.beat
    if beat is None or beat.said.state in ("preempted", "released", ""):
        return
    if beat.said.state == "restarting" and beat.said.desired == "finished":
        return
    order = (Level.OK, Level.WARNING, Level.UNKNOWN, Level.CRITICAL)
    later = judge(replace(run, active=replace(run.active, beat=replace(beat, age=beat.age + more))), LIMITS)
    known = judge(run, LIMITS)
    if run.active.claim_age is None or run.active.claim_age > LIMITS.dead:
        assert order.index(later.level) >= order.index(known.level) or known.level is Level.UNKNOWN


def test_the_ages_of_a_heartbeat_are_by_the_clock_of_its_pod() -> None:
    said = Heartbeat(written_wall=1000.0, step_wall=990.0, unstored_since_wall=900.5)
    beat = read_beat(said.to_bytes(), -3.0)
    assert beat is not None
    assert (beat.step_age, beat.unstored_age, beat.age) == (10.0, 99.5, 0.0)
    assert Beat(replace(said, step_wall=1001.0)).step_age == 0.0, "the clock was set back"
    assert Beat(replace(said, written_wall=None)).step_age is None
