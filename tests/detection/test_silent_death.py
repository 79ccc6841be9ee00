"""Memory that falls: on GPUs of its own, on shared ones, on one of four; and where it may."""

from dataclasses import replace

import pytest

from tests.detection.looks import GIB, LAUNCHER, URL, World, kills, process, world
from tests.drivers.detection import (
    Agreement,
    Finding,
    FindingKind,
    Health,
    ProcessRole,
    SensorState,
    Severity,
    gpus_of_the_trainer,
    second_signals,
    unobserved,
)


def death(found: World, seconds: float = 60.0) -> tuple[Finding, float]:
    finding, took = found.until_verdict(seconds)
    assert finding.kind is FindingKind.SILENT_DEATH
    return finding, took


def tensor_parallel() -> World:
    found = world(gpu__inference=(0, 1, 2, 3))
    found.memory = dict.fromkeys(range(5), 70 * GIB)
    found.use = dict.fromkeys(range(5), 90.0)
    found.engines = [process(20, ProcessRole.ENGINE), *(process(21 + n, ProcessRole.ENGINE, (n,)) for n in range(4))]
    found.others[2] = process(14, ProcessRole.TRAINER, (4,))
    found.quiet(60)
    return found


@pytest.mark.parametrize("gone", range(4))
def test_one_of_four_tensor_parallel_gpus_gone_is_a_death(gone: int) -> None:
    found = tensor_parallel()
    found.memory[gone] = 400 << 20
    del found.engines[1 + gone]
    finding, took = death(found)
    assert finding.subject == f"gpu{gone}"
    assert took <= 15


def test_a_tensor_parallel_engine_that_nobody_else_calls_dead_only_warns() -> None:
    found = tensor_parallel()
    found.memory[2] = 400 << 20
    found.quiet(300)
    assert [(f.subject, f.severity) for f in found.findings] == [("gpu2", Severity.WARNING)]


def shared() -> World:
    """Engine and trainer on GPU 0, with 72 GiB of 80 in use."""
    found = world(gpu__inference=(0,), shared_gpus=(0,), gpu__trainer=(0,))
    found.memory, found.use = {0: 72 * GIB}, {0: 80.0}
    found.others[2] = process(14, ProcessRole.TRAINER, (0,))
    found.quiet(60)
    return found


def test_a_shared_gpu_is_judged_by_its_recent_level() -> None:
    found = shared()
    found.memory[0] = 44 * GIB  # 61 %
    found.quiet(120)
    assert not found.findings
    found.memory[0] = 72 * GIB
    found.quiet(60)
    found.memory[0] = 43 * GIB  # 59.7 %
    found.engines = []
    finding, took = death(found)
    assert took <= 15
    assert "below 60% of that" in finding.evidence[0].value


def test_a_smaller_fall_is_no_death_by_memory_even_when_the_engine_is_gone() -> None:
    found = shared()
    found.memory[0], found.engines, found.servers = 46 * GIB, [], []
    found.run(120)
    assert FindingKind.SILENT_DEATH not in found.kinds()


def test_a_trainer_that_gives_memory_back_is_the_new_level() -> None:
    found = shared()
    found.memory[0] = 40 * GIB  # a colocated trainer goes to the CPU
    found.quiet(120)
    assert not found.findings, "steps are made, tokens come and the engine lives"
    found.memory[0] = 23 * GIB  # 57 % of the new level
    found.engines = []
    assert death(found)[1] <= 15


@pytest.mark.parametrize("why", ["configured", "command", "route"])
def test_where_memory_may_fall_the_verdict_is_off_and_said_so(why: str) -> None:
    found = world(inference__sleep="yes" if why == "configured" else "auto")
    if why == "command":
        found.servers = [process(11, ProcessRole.INFERENCE, command="vllm serve m --enable_sleep_mode")]
    if why == "route":
        found.inference[URL] = replace(found.inference[URL], asleep=True)
    found.quiet(60)
    assert {f.kind: f.severity for f in found.findings} == {FindingKind.MEMORY_MAY_FALL: Severity.INFO}
    found.memory[0] = 300 << 20
    found.engines = []
    found.quiet(300)
    assert FindingKind.SILENT_DEATH not in found.kinds()


def test_sleep_no_judges_by_memory_all_the_same() -> None:
    found = world(inference__sleep="no")
    found.servers = [process(11, ProcessRole.INFERENCE, command="vllm serve m --enable-sleep-mode")]
    found.quiet(60)
    found.memory[0], found.engines = 300 << 20, []
    assert death(found)[1] <= 15


def test_mig_is_said_and_never_judged() -> None:
    found = world()
    found.mig = frozenset({0})
    found.quiet(60)
    assert [(f.kind, f.subject) for f in found.findings] == [(FindingKind.GPU_MIG, "gpu0")]
    found.memory[0], found.engines = 0, []
    found.quiet(120)


def test_weights_that_are_swapped_are_no_death() -> None:
    found = world()
    found.quiet(60)
    for _ in range(5):
        found.memory[0] = 300 << 20
        found.quiet(6)
        found.memory[0] = 60 * GIB
        found.quiet(30)
    assert not found.findings


def test_a_step_under_way_when_the_engine_died_only_delays_the_slow_path() -> None:
    """Nothing but steps can be seen. The step in flight still ends, and then no other comes."""
    found = world()
    found.engines, found.servers = [], []
    found.readings["inference"] = unobserved(SensorState.ABSENT, 0.0, "no URL")
    found.quiet(60)
    found.memory[0] = 300 << 20
    found.quiet(16)
    found.step, found.step_at, found.stepping = found.step + 1, found.now, False
    finding, took = found.until_verdict(1200)
    assert 590 <= took <= 620
    assert [e.signal for e in finding.evidence if e.agreement is Agreement.AGREES] == ["gpu0 memory", "steps"]


def test_a_restart_begins_anew() -> None:
    found = shared()
    found.start_id, found.trainer = "s2", {"started_at": found.now}
    found.memory[0], found.engines, found.stepping = 300 << 20, [], False
    found.inference[URL] = replace(found.inference[URL], health=Health.REFUSED)
    found.quiet(600)
    assert "silent-death:gpu0" not in found.state.armed


def test_a_warning_becomes_a_verdict_as_soon_as_one_signal_agrees() -> None:
    found = world()
    found.quiet(60)
    found.memory[0] = 0
    found.quiet(60)
    assert not kills(found.findings)
    assert found.findings
    found.inference[URL] = replace(found.inference[URL], health=Health.UNHEALTHY, http_status=503)
    assert found.until_verdict(10)[1] <= 2


def test_processes_name_gpus_by_another_number_than_nvml() -> None:
    """In a container that was given GPUs 6 and 3 of its host: /dev/nvidia6 is NVML's GPU 0."""
    found = world(gpu__trainer=(1,))
    found.minors = {0: 6, 1: 3}
    found.engines = [process(12, ProcessRole.OTHER, (6,))]
    found.others = [LAUNCHER, process(14, ProcessRole.TRAINER, (3,))]
    found.servers, found.inference = [], {}
    found.quiet(60)
    assert "cuda-context" in second_signals(found.state)
    assert gpus_of_the_trainer(found.state) == {0, 1}
    found.engines, found.memory[0] = [], 0
    finding, took = found.until_verdict(30)
    assert took <= 15
    assert "confirmed by CUDA context on gpu0" in finding.summary
