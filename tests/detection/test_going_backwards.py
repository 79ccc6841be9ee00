"""Training that begins again below a step that it has made, within one start."""

from dataclasses import replace

import pytest

from tests.detection.looks import World, process, world
from tests.drivers.detection import (
    FindingKind,
    ProcessIdentity,
    ProcessRole,
    ProgressSample,
    ProgressSource,
    Severity,
    Verdict,
    observed,
)

BOOTED = 5000.0


def stepping() -> World:
    found = world()
    found.booted, found.step = BOOTED, 50
    found.quiet(120)
    return found


def falls(found: World, step: int) -> None:
    found.step, found.step_at = step, found.now


def test_two_steps_below_the_highest_of_the_same_source_and_for_an_hour_after_it_is_passed() -> None:
    found = stepping()
    highest = found.step
    falls(found, 40)
    found.run(2)
    assert FindingKind.GOING_BACKWARDS not in found.kinds(), "a single line can be an odd one"
    began = found.step_at
    found.run(30)
    (finding,) = (f for f in found.findings if f.kind is FindingKind.GOING_BACKWARDS)
    assert (finding.severity, finding.verdict, finding.since) == (Severity.CRITICAL, Verdict.NONE, began)
    assert f"after step {highest}" in finding.summary
    found.run(20.0 * (highest - 40))
    assert FindingKind.GOING_BACKWARDS in found.kinds()
    found.run(3600)
    assert FindingKind.GOING_BACKWARDS not in found.kinds()


def test_the_program_that_started_it_again_is_named() -> None:
    found = stepping()
    torchrun = replace(process(20, ProcessRole.OTHER), name="torchrun")
    young = ProcessIdentity(21, int((found.now + BOOTED) * 100))
    trainer = replace(process(21, ProcessRole.TRAINER, (1,)), identity=young, parent_pid=20)
    younger = ProcessIdentity(22, young.start_ticks + 1)
    worker = replace(process(22, ProcessRole.TRAINER, (1,)), identity=younger, parent_pid=21)
    found.others = [p for p in found.others if p.role is not ProcessRole.TRAINER] + [torchrun, trainer, worker]
    found.trainer = {"started_at": -1000.0}
    falls(found, 40)
    found.run(60)
    (finding,) = (f for f in found.findings if f.kind is FindingKind.GOING_BACKWARDS)
    assert "torchrun (process 20) started its processes again" in finding.summary


@pytest.mark.parametrize(
    ("source", "role"),
    [
        (ProgressSource.STEP_LINE, "trainer"),
        (ProgressSource.STEP_LINE, "orchestrator"),
        (ProgressSource.MARKER, "trainer"),
        (ProgressSource.CHECKPOINT, "checkpoint"),
    ],
)
def test_each_source_is_compared_with_itself(source: ProgressSource, role: str) -> None:
    found = stepping()
    for step in (70, 71, 10, 11):
        shown = ProgressSample(source, role, found.now, step)
        found.readings = {"progress": observed((shown,), found.now)}
        assert FindingKind.GOING_BACKWARDS not in found.kinds()
        found.run(2)
    (finding,) = (f for f in found.findings if f.kind is FindingKind.GOING_BACKWARDS)
    assert "step 11 after step 71" in finding.summary


def test_numbers_of_the_orchestrator_are_no_steps_of_the_trainer() -> None:
    found = stepping()
    made = found.state.start.progress
    batch = ProgressSample(ProgressSource.STEP_LINE, "orchestrator", found.now, 900)
    found.readings = {"progress": observed((batch,), found.now)}
    found.run(2)
    after = found.state.start.progress
    assert (after.step, after.numbered_at) == (made.step, made.numbered_at)


@pytest.mark.parametrize("source", [ProgressSource.MARKER, ProgressSource.CHECKPOINT])
def test_a_lower_number_of_another_source_or_role_is_none(source: ProgressSource) -> None:
    found = stepping()
    for number in range(4):
        own = ProgressSample(ProgressSource.STEP_LINE, "trainer", found.now, 60 + number)
        other = ProgressSample(source, "trainer", found.now, 10 + number)
        batch = ProgressSample(ProgressSource.STEP_LINE, "orchestrator", found.now, 5 + number)
        found.readings = {"progress": observed((own, other, batch), found.now)}
        found.run(2)
        assert FindingKind.GOING_BACKWARDS not in found.kinds()
