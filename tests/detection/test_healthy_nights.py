"""Healthy runs of every kind of trainer, as they are left alone over night: nothing of this may restart them."""

from dataclasses import replace

import pytest

from tests.detection.looks import GIB, URL, World, process, world
from tests.drivers.detection import (
    ExitStatus,
    FindingKind,
    Health,
    InferenceSample,
    ProcessRole,
    ProcessSample,
    RequiredExit,
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


def gone(found: World, *ended: ProcessSample) -> None:
    old = found.trainer.get("required_exits", ())
    assert isinstance(old, tuple)
    exits = tuple(RequiredExit(p.identity, p.role, p.name, ExitStatus(0), found.now) for p in ended)
    found.trainer = {"required_exits": (*old, *exits)}


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
        gone(found, EVAL_SERVER, EVAL_ENGINE)
        found.stepping, found.generating = True, generating
        found.quiet(600)
        assert not found.findings
    if main:
        found.servers, found.engines = [], []
        gone(found, process(11, ProcessRole.INFERENCE), process(12, ProcessRole.ENGINE, (0,)))
        found.inference[URL] = InferenceSample(URL, Health.REFUSED, discovered=True)
        finding, took = found.until_verdict(30)
        assert finding.kind in (FindingKind.SILENT_DEATH, FindingKind.REQUIRED_CHILD_EXITED)
        assert took <= 15


@pytest.mark.parametrize("role", [ProcessRole.ORCHESTRATOR, ProcessRole.TRAINER])
def test_a_child_that_ended_hours_of_steps_ago_is_no_death_in_the_next_long_wait(role: ProcessRole) -> None:
    found = world()
    found.quiet(120)
    found.others = [p for p in found.others if p.role is not role]
    gone(found, process(90, role))
    found.quiet(1800)
    found.stepping = found.generating = False  # an evaluation of the trainer's own
    found.quiet(1400)
