"""A run that finishes or is stopped is no failure, whatever its processes do and write while they end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.detection.looks import GIB, URL, World, process
from tests.drivers.detection import (
    Desired,
    ExitStatus,
    FindingKind,
    Health,
    InferenceSample,
    LogMatch,
    LogRule,
    ProcessEnd,
    ProcessRole,
    Severity,
    TrainingMetrics,
    judging,
    observed,
)
from tests.support.examples import examples

RULE = LogRule("engine-dead", "x", critical=True, says="vLLM's engine died", supports=("silent-death",))


def running() -> World:
    found = World(judging(log_rules=(RULE,), gpu__inference=(0,), gpu__trainer=(1,)))
    found.quiet(120)
    return found


def take_down(found: World, roles: list[ProcessRole], code: int) -> None:
    """These roles have ended; the engine's log says that it died, its server refuses, its memory is gone."""
    exits = []
    for role in roles:
        exits.append(ProcessEnd(process(90, role).identity, role, ExitStatus(code), found.now))
        found.others = [p for p in found.others if p.role is not role]
    if ProcessRole.ENGINE in roles:
        found.engines, found.memory[0] = [], 0
    if ProcessRole.INFERENCE in roles:
        found.servers, found.inference[URL] = [], InferenceSample(URL, Health.REFUSED)
    if ProcessRole.TRAINER in roles:
        found.memory[1] = 0
    found.logs = (LogMatch("engine-dead", "inference", 1, found.now, found.now, "ERROR EngineCore died"),)
    found.stepping = found.generating = False
    found.trainer = {**found.trainer, "ends": tuple(exits)}


ROLES = [ProcessRole.ENGINE, ProcessRole.INFERENCE, ProcessRole.ORCHESTRATOR, ProcessRole.TRAINER]


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.sampled_from(ROLES), unique=True, min_size=1),
    st.sampled_from([0, 1, 143, -9]),
    st.sampled_from([Desired.STOPPED, Desired.FINISHED, Desired.RUNNING]),
    st.booleans(),
)
def test_while_a_run_ends_nothing_is_worse_than_fine(
    roles: list[ProcessRole], code: int, desired: Desired, gone: bool
) -> None:
    """``RUNNING`` here: the trainer has printed its finish line, and podwatch has not recorded the end yet."""
    found = running()
    found.desired = desired
    if desired is Desired.RUNNING:
        found.trainer = {"finish_line": True}
    take_down(found, roles, code)
    for findings in found.turns(60):
        assert [f.summary for f in findings if f.severity is not Severity.INFO] == []
    if gone and desired is not Desired.RUNNING:  # nothing is watched any more; the log still shows its last lines
        found.trainer = {"start_id": "", "alive": False, "descendants": ()}
        for findings in found.turns(60):
            assert [f.summary for f in findings if f.severity is not Severity.INFO] == []


def test_the_same_lines_are_critical_while_it_is_to_train() -> None:
    found = running()
    take_down(found, [ProcessRole.ENGINE], 0)
    assert FindingKind.LOG_RULE in {f.kind for f in found.run(6)}


def test_lines_of_a_start_that_is_over_say_nothing_about_the_next() -> None:
    """Between a stop and a start (a restart, or a run that another pod has taken) nothing is watched."""
    found = running()
    take_down(found, ROLES, 0)
    found.trainer = {"start_id": "", "alive": False, "descendants": ()}
    assert FindingKind.LOG_RULE not in {f.kind for f in found.run(6)}


@pytest.mark.parametrize("desired", [Desired.STOPPED, Desired.FINISHED])
def test_the_health_of_a_training_that_is_over_is_no_warning(desired: Desired) -> None:
    found = running()
    rows = tuple(TrainingMetrics(n, found.now, (("entropy", 0.001),)) for n in range(6, 14))
    found.readings = {"training": observed(rows, found.now)}
    assert FindingKind.TRAINING_HEALTH in {f.kind for f in found.run(4)}
    found.desired = desired
    assert FindingKind.TRAINING_HEALTH not in {f.kind for f in found.run(4)}


def test_memory_is_still_looked_at() -> None:
    """What ends may end; a device that falls off the bus is still reported."""
    found = running()
    found.desired = Desired.STOPPED
    take_down(found, ROLES, 0)
    del found.memory[0]
    assert FindingKind.SENSOR_BLIND in {f.kind for f in found.run(6)}
    assert 60 * GIB not in found.memory.values()
