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
    found.others = [p for p in found.others if p.role is not ProcessRole.TRAINER] + [torchrun, trainer]
    found.trainer = {"started_at": -1000.0}
    falls(found, 40)
    found.run(60)
    (finding,) = (f for f in found.findings if f.kind is FindingKind.GOING_BACKWARDS)
    assert "torchrun (process 20) started its processes again" in finding.summary


@pytest.mark.parametrize("source", [ProgressSource.MARKER, ProgressSource.CHECKPOINT])
def test_a_lower_number_of_another_source_or_role_is_none(source: ProgressSource) -> None:
    found = stepping()
    for number in range(4):
        own = ProgressSample(ProgressSource.STEP_LINE, "trainer", found.now, 60 + number)
        other = ProgressSample(source, "trainer", found.now, 10 + number)
        batch = ProgressSample(ProgressSource.STEP_LINE, "orchestrator", found.now, 5 - number)
        found.readings = {"progress": observed((own, other, batch), found.now)}
        found.run(2)
        assert FindingKind.GOING_BACKWARDS not in found.kinds()
