"""Holes in what was seen, suspends and jumps of the wall clock are never taken as evidence."""

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.finding import Finding, FindingKind, Verdict
from podwatch.domain.process import ProcessRole
from podwatch.domain.snapshot import (
    DiskSample,
    GpuSample,
    Health,
    InferenceSample,
    ProgressSample,
    ProgressSource,
    Snapshot,
    Supervision,
    TrainerSample,
    observed,
)
from tests.detection.looks import kills, world
from tests.drivers.detection import DetectionState, Window, advance, initial, judging, newest_progress_at
from tests.support.pods.tree import ENGINE, process
from tests.support.pods.world import GIB

POLICIES = judging(gpu__inference=(0,), gpu__trainer=(1,))
TREE = (process(10, ProcessRole.LAUNCHER), process(14, ProcessRole.TRAINER, (1,)))


def snap(
    at: float,
    *,
    wall: float | None = None,
    boot: float | None = None,
    step: int = 1,
    step_at: float = 10.0,
    memory: int = 60 * GIB,
    busy: float = 90.0,
    engine: bool = True,
) -> Snapshot:
    gpus = (
        GpuSample(0, "a", "H", memory_used_bytes=memory, memory_total_bytes=80 * GIB, utilization_percent=busy),
        GpuSample(1, "b", "H", memory_used_bytes=60 * GIB, memory_total_bytes=80 * GIB, utilization_percent=busy),
    )
    tree = (*TREE, ENGINE) if engine else TREE
    return Snapshot(
        at=at,
        wall=1e9 + at if wall is None else wall,
        boot_at=at if boot is None else boot,
        gpus=observed(gpus, at),
        disk=observed(DiskSample("/d", 100, 1, 99, 100, 99), at),
        trainer=observed(TrainerSample("s", Supervision.SUPERVISED, True, 1.0, TREE[0].identity, None, tree), at),
        inference=observed((InferenceSample("http://e", Health.OK),), at),
        progress=observed((ProgressSample(ProgressSource.STEP_LINE, "trainer", step_at, step),), at),
    )


def run(
    turns: Iterable[Snapshot], state: DetectionState | None = None
) -> tuple[DetectionState, list[tuple[Finding, ...]]]:
    state, told = state or initial(POLICIES), []
    for one in turns:
        state, findings = advance(state, one, POLICIES)
        told.append(findings)
    return state, told


def healthy(until: float = 300.0, every: float = 60.0) -> DetectionState:
    state, told = run(
        snap(float(at), step=int(at // every) + 1, step_at=max(2.0, at // every * every))
        for at in range(2, int(until) + 2, 2)
    )
    assert not any(told), told
    return state


def kinds(findings: Iterable[Finding]) -> set[FindingKind]:
    return {f.kind for f in findings}


def test_a_stall_is_told_for_a_while_and_then_no_more() -> None:
    state, (findings,) = run([snap(345.0)], healthy())
    (finding,) = findings
    assert finding.kind is FindingKind.LOOP_STALLED
    assert "observed nothing for 45 s" in finding.summary
    assert finding.since == 345.0
    assert finding.suggestion
    assert finding.verdict is Verdict.NONE
    assert not finding.confirmed
    _, told = run([snap(345.0 + n, step=9, step_at=345.0 + n) for n in range(2, 604, 2)], state)
    assert all(kinds(f) == {FindingKind.LOOP_STALLED} for f in told[:-2])
    assert FindingKind.LOOP_STALLED not in kinds(told[-1])


@pytest.mark.parametrize(
    "turn",
    [
        snap(302.0, wall=1e9 + 302 + 4000, boot=4302.0),
        snap(302.0, wall=1e9 + 302 + 3600),
        snap(302.0, wall=1e9 + 302 - 3600),
    ],
)
def test_a_suspend_and_a_clock_that_was_set_are_no_finding(turn: Snapshot) -> None:
    assert run([turn], healthy())[1] == [()]


def test_a_short_delay_and_a_slewed_clock_are_nothing() -> None:
    state = healthy()
    _, told = run([snap(320.0), snap(322.0, wall=1e9 + 326)], state)
    assert not any(told)


def test_a_slow_poll_is_its_own_measure() -> None:
    state, _ = run(snap(60.0 * n, step_at=60.0 * n, step=n) for n in range(1, 10))
    _, told = run([snap(740.0, step=99, step_at=739.0), snap(1800.0, step=100, step_at=1799.0)], state)
    assert FindingKind.LOOP_STALLED not in kinds(told[0])
    assert kinds(told[1]) >= {FindingKind.LOOP_STALLED}


def test_memory_that_is_gone_on_both_sides_of_a_hole_makes_no_window() -> None:
    dead = {"memory": 0, "engine": False, "step": 6, "step_at": 300.0}
    state, told = run([snap(302.0, **dead), snap(304.0, **dead), snap(306.0, **dead)], healthy())  # type: ignore[arg-type]
    assert not any(told)
    # Suspended for an hour: monotonic time went on by two seconds only.
    asleep = [snap(308.0 + n, boot=3908.0 + n, wall=1e9 + 3908 + n, **dead) for n in range(0, 12, 2)]  # type: ignore[arg-type]
    _, told = run(asleep, state)
    died = [FindingKind.SILENT_DEATH in kinds(f) for f in told]
    assert died == [False, False, False, False, True, True], "eight seconds begin after it woke"


@pytest.mark.parametrize("frozen", [3600.0, 86400.0])
def test_a_pod_that_was_frozen_is_not_hung(frozen: float) -> None:
    """Frozen whole, as by a paused container: both it and podwatch lose the time. It then idles for a while."""
    end = 300.0 + frozen
    idle = [snap(end + n, busy=0.0, step=6, step_at=300.0) for n in range(0, 1400, 2)]
    _, told = run(idle, healthy())
    assert not any(FindingKind.HANG in kinds(f) for f in told)
    assert not any(f.verdict is not Verdict.NONE for findings in told for f in findings)


def test_a_pod_that_is_frozen_again_after_seconds_is_not_hung() -> None:
    """Both pauses are known, and neither counts as time without a step."""
    state, told = run([snap(3900.0), snap(3902.0), snap(7502.0)], healthy())
    assert [(f.kind, f.since) for f in told[-1]] == [(FindingKind.LOOP_STALLED, 7502.0)]
    assert state.start.progress.lost_seconds == 3600.0 + 3600.0


def test_a_run_that_stays_silent_after_the_hole_is_found() -> None:
    state = healthy()
    _, told = run([snap(3900.0 + n, busy=0.0, step=6, step_at=300.0) for n in range(0, 2200, 2)], state)
    hung = [n * 2 for n, f in enumerate(told) if any(x.verdict is Verdict.RESTART for x in f)]
    assert hung
    # Frozen from 300 to 3900 s: what counts is the silence after it, and 25 min of that are the floor; idle GPUs with
    # no known request agree after 30 min.
    assert 1490 <= hung[0] <= 1830


def test_a_freeze_during_start_up_does_not_use_up_its_patience() -> None:
    def loading(at: float) -> Snapshot:
        return replace(snap(at, busy=0.0), progress=observed((), at))

    warm = replace(healthy().learned, start_id="")
    state = initial(POLICIES, warm)
    state, _ = run((loading(float(at)) for at in range(2, 300, 2)), state)
    _, told = run((loading(8000.0 + at) for at in range(0, 2000, 2)), state)
    assert not any(f.verdict is Verdict.RESTART for findings in told for f in findings)


def test_steps_that_were_made_in_the_hole_count() -> None:
    """Only podwatch stood still: the trainer went on."""
    state, _ = run([snap(1300.0, step=20, step_at=1290.0)], healthy())
    assert newest_progress_at(state) == 1290.0


@given(st.floats(0.1, 1e6), st.floats(0, 1e6), st.floats(-1e6, 1e6))
def test_every_window_restarts_after_a_gap_and_only_then(passed: float, slept: float, jumped: float) -> None:
    """Of the monotonic clock, or of the one that runs while the machine sleeps; the wall clock proves nothing."""
    dead = {"memory": 0, "engine": False, "step": 6, "step_at": 300.0}
    state, _ = run([snap(302.0, **dead), snap(304.0, **dead), snap(306.0, **dead)], healthy())  # type: ignore[arg-type]
    at = 306.0 + passed
    turn = snap(at, boot=at + slept, wall=1e9 + at + slept + jumped, **dead)  # type: ignore[arg-type]
    after, (findings,) = run([turn], state)
    assert (FindingKind.LOOP_STALLED in kinds(findings)) == (passed > 30.0)
    if passed > 30.0 or slept > 2.01:
        assert after.start.of("gpu0").since == pytest.approx(at)
    elif passed < 6.0 and slept < 1.99:
        assert after.start.of("gpu0").since == 302.0


def test_clocks_that_go_back_or_stand_still_are_no_gap() -> None:
    for at in (302.0, 3.0):
        _, (findings,) = run([snap(at, boot=at)], run([snap(302.0)], healthy())[0])
        assert FindingKind.LOOP_STALLED not in kinds(findings)


@pytest.mark.parametrize(("bridges", "since"), [(0.0, None), (30.0, 2.0), (float("inf"), 2.0)])
def test_what_could_not_be_observed_ends_a_short_window(bridges: float, since: float | None) -> None:
    window = Window(armed=True, since=2.0, last=6.0, samples=3, bridges=bridges)
    assert window.observe(None, 10.0).since == since
    assert window.observe(None, 10.0).armed


def test_a_long_window_bridges_a_gap_and_does_not_count_it() -> None:
    window = Window(armed=True, since=0.0, last=100.0, samples=50, bridges=30.0)
    bridged = window.observe(False, 125.0, gap=6.0)
    assert (bridged.since, bridged.seconds) == (25.0, 100.0)
    assert window.observe(False, 105.0, gap=6.0).seconds == 105.0, "the sensor's own interval counts"
    assert window.observe(False, 131.0, gap=6.0).seconds == 0.0
    assert window.observe(None, 131.0).since is None


@given(st.lists(st.tuples(st.sampled_from([True, False, None]), st.floats(0.5, 40.0)), max_size=30))
def test_a_window_counts_only_if_it_was_healthy_and_fails_now(readings: list[tuple[bool | None, float]]) -> None:
    window, at, healthy_once, last = Window(), 0.0, False, None
    for good, passed in readings:
        at, last = at + passed, good
        window = window.observe(good, at)
        healthy_once = healthy_once or good is True
        assert window.counts() == (healthy_once and last is False)
        assert window.seconds <= at


def test_a_machine_that_stays_slow_is_watched_at_its_own_pace() -> None:
    """Turns of 2 s, and from some moment on of 45 s: a death is found nevertheless, and one stall alone is none."""
    found = world()
    found.quiet(60)
    found.poll = 45.0
    found.quiet(600)
    found.memory[0], found.engines = 0, []
    finding, took = found.until_verdict(600)
    assert finding.verdict is Verdict.RESTART
    assert FindingKind.SILENT_DEATH in found.kinds()
    assert took <= 4 * 45


@pytest.mark.parametrize("pace", [(2.0, 2.0, 40.0, 40.0, 40.0), (2.0, 40.0, 40.0, 40.0)])
def test_a_starved_machine_is_watched_although_some_of_its_turns_are_quick(pace: tuple[float, ...]) -> None:
    found, turns = world(), itertools.cycle(pace)
    found.quiet(60)
    for found.poll in itertools.islice(turns, 40):
        found.quiet(found.poll)
    found.memory[0], found.engines = 0, []
    began = found.now
    for found.poll in itertools.islice(turns, 20):
        if kills(found.run(found.poll)):
            break
    assert FindingKind.SILENT_DEATH in found.kinds()
    assert found.now - began <= 200
