"""Healthy runs of every kind of trainer, as they are left alone over night: nothing of this may restart them."""

from dataclasses import replace

import pytest

from tests.detection.looks import GIB, URL, World, process, world
from tests.drivers.detection import (
    FindingKind,
    Health,
    InferenceSample,
    ProcessRole,
    SensorState,
    unobserved,
)
from tests.drivers.detection import reborn as reborn_state

pytestmark = pytest.mark.slow

EVAL_URL = "http://127.0.0.1:8123"
EVAL_SERVER, EVAL_ENGINE = process(80, ProcessRole.INFERENCE), process(81, ProcessRole.ENGINE, (0,))


def trainer_alone(**detection: object) -> World:
    """verl or TRL: the engine lives inside the trainer's own processes, no server listens."""
    found = world(**({"gpu__inference": (0,), "shared_gpus": (0,), "gpu__trainer": (0,)} | detection))
    found.engines, found.servers, found.inference = [], [], {}
    found.memory, found.use = {0: 70 * GIB}, {0: 90.0}
    found.others = [process(14, ProcessRole.TRAINER, (0,))]
    found.generating = False
    found.readings["inference"] = unobserved(SensorState.ABSENT, 0.0, "no inference URL configured")
    return found


def a_step(found: World, rollouts: float, training: float) -> None:
    """The engine gives its memory back while the trainer trains, and nobody says so."""
    found.memory[0] = 70 * GIB
    found.quiet(rollouts)
    found.memory[0] = 25 * GIB
    found.quiet(training)
    found.step, found.step_at = found.step + 1, found.now
    found.memory[0] = 70 * GIB


@pytest.mark.parametrize("minutes", [(8, 9), (12, 10), (20, 20)])
def test_an_engine_inside_the_trainer_that_sleeps_through_long_steps(minutes: tuple[int, int]) -> None:
    found = trainer_alone()
    found.stepping = False
    found.quiet(60)
    for _ in range(3):
        a_step(found, minutes[0] * 60.0, minutes[1] * 60.0)


def finetuning() -> World:
    """SFT: no inference at all, a step every 20 s."""
    found = trainer_alone(gpu__inference=(), shared_gpus=())
    found.quiet(120)
    return found


@pytest.mark.parametrize("reborn", [False, True])
@pytest.mark.parametrize("main", [False, True])
def test_a_server_that_a_run_starts_for_its_evaluations_may_end(main: bool, reborn: bool) -> None:
    """``main``: beside a server of its own that the run needs."""
    if main:
        found = world()
        found.inference = {URL: replace(found.inference[URL], discovered=True)}
        found.quiet(120)
    else:
        found = finetuning()
    for _ in range(2):
        found.quiet(600)
        found.readings.pop("inference", None)
        found.inference[EVAL_URL] = InferenceSample(EVAL_URL, Health.OK, 200, 4.0, 0.0, 0.0, discovered=True)
        found.servers, found.engines = [*found.servers, EVAL_SERVER], [*found.engines, EVAL_ENGINE]
        found.stepping, generating, found.generating = False, found.generating, True
        found.quiet(300)
        if reborn:
            found.state = reborn_state(found.state, found.policies)
        found.quiet(300)
        found.servers.remove(EVAL_SERVER)
        found.engines.remove(EVAL_ENGINE)
        found.inference[EVAL_URL] = InferenceSample(EVAL_URL, Health.REFUSED, discovered=True)
        found.stepping, found.generating = True, generating
        found.quiet(600)
        assert not found.findings
    if main:
        found.servers, found.engines = [], []
        found.inference[URL] = InferenceSample(URL, Health.REFUSED, discovered=True)
        finding, took = found.until_verdict(30)
        assert finding.kind in (FindingKind.SILENT_DEATH, FindingKind.REQUIRED_CHILD_EXITED)
        assert took <= 15


@pytest.mark.parametrize("reborn", [False, True])
def test_an_evaluations_server_that_ends_while_the_engine_inside_the_trainer_sleeps(reborn: bool) -> None:
    """The memory falls, and an engine ends: but not one that training needs. ``reborn``: podwatch is restarted then."""
    found = trainer_alone()
    found.quiet(240)
    found.servers, found.engines = [EVAL_SERVER], [EVAL_ENGINE]
    found.quiet(120)
    found.servers, found.engines, found.memory[0] = [], [], 25 * GIB
    if reborn:
        found.state = reborn_state(found.state, found.policies)
    found.quiet(300)


@pytest.mark.parametrize("printed", [True, False])
def test_an_orchestrator_that_printed_its_finish_line_is_not_missed_while_the_trainer_saves(printed: bool) -> None:
    """Where the target is not known, nothing else shows that the run is about to end."""
    found = world()
    found.quiet(120)
    found.others = [p for p in found.others if p.role is not ProcessRole.ORCHESTRATOR]
    found.trainer = {"finished": frozenset({ProcessRole.ORCHESTRATOR} if printed else ())}
    found.stepping = found.generating = False
    kinds = {finding.kind for findings in found.turns(1200) for finding in findings}
    assert (FindingKind.REQUIRED_CHILD_EXITED in kinds) is not printed


@pytest.mark.parametrize("role", [ProcessRole.ORCHESTRATOR, ProcessRole.TRAINER])
def test_a_child_that_ended_hours_of_steps_ago_is_no_death_in_the_next_long_wait(role: ProcessRole) -> None:
    found = world()
    found.quiet(120)
    found.others = [p for p in found.others if p.role is not role]
    found.quiet(1800)
    found.stepping = found.generating = False  # an evaluation of the trainer's own
    found.quiet(1400)
