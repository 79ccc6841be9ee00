"""A death that needs no window: its evidence, what speaks against it, and the short rhythm that confirms it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.detection.looks import GIB, URL, World, process, world
from tests.drivers.detection import (
    ATTACHED_ID,
    CONFIRM_SECONDS,
    PROVEN_SECONDS,
    REFUSED_SECONDS,
    SEEN_TO_END,
    Agreement,
    Desired,
    ExitStatus,
    FindingKind,
    Health,
    LogMatch,
    ProcessEnd,
    ProcessIdentity,
    ProcessRole,
    ProcessSample,
    SensorState,
    Severity,
    Supervision,
    confirming,
    unobserved,
)

HOLD = 600.0
BOOTED = 5000.0
LONG = 60.0
"""Seconds in which nothing may be done: many times what a proven death takes, and a tenth of ``hold``."""


def healthy(**detection: object) -> World:
    """After two minutes, with every log read, and start times known."""
    found = world(**({"gpu__hold": HOLD} | detection))
    found.booted = BOOTED
    found.quiet(120)
    found.poll = 0.5
    return found


def young(pid: int, role: ProcessRole, found: World) -> ProcessSample:
    """Started just now."""
    return replace(process(pid, role), identity=ProcessIdentity(pid, int((found.now + BOOTED) * 100)))


def engine_dies(found: World, health: Health = Health.UNHEALTHY) -> None:
    found.memory[0], found.engines = 0, []
    found.inference[URL] = replace(found.inference[URL], health=health)
    found.generating = found.stepping = False


def server_ends(found: World) -> None:
    found.servers = []
    found.inference[URL] = replace(found.inference[URL], health=Health.REFUSED)


def proven(found: World) -> float:
    """Seconds to the verdict, which comes long before the memory was away for ``hold``."""
    finding, took = found.until_verdict(LONG)
    assert finding.kind is FindingKind.SILENT_DEATH
    assert finding.severity is Severity.CRITICAL
    (seen,) = [e for e in finding.evidence if e.signal == SEEN_TO_END]
    assert seen.agreement is Agreement.AGREES
    assert seen.window_seconds >= PROVEN_SECONDS
    return took


def test_an_engine_that_ends_under_a_server_that_says_so() -> None:
    found = healthy()
    engine_dies(found)
    assert PROVEN_SECONDS <= proven(found) <= PROVEN_SECONDS + 1.0


def test_the_server_may_end_before_the_second_look() -> None:
    found = healthy()
    engine_dies(found)
    found.quiet(1.0)
    server_ends(found)
    assert proven(found) <= PROVEN_SECONDS


def test_without_a_503_the_end_of_the_server_counts() -> None:
    found = healthy()
    engine_dies(found, Health.REFUSED)
    found.quiet(LONG)
    server_ends(found)
    assert REFUSED_SECONDS <= proven(found) <= REFUSED_SECONDS + 1.0


def test_a_router_that_answers_503_does_not_speak_for_its_engines() -> None:
    """Without counters it is no engine's own server: 503 alone does not take the place of the server's end."""
    found = world(gpu__hold=HOLD)
    found.booted = BOOTED
    found.inference[URL] = replace(found.inference[URL], generation_tokens_total=None, requests_running=None)
    found.quiet(120)
    found.poll = 0.5
    engine_dies(found)
    found.quiet(LONG)
    server_ends(found)
    assert proven(found) <= REFUSED_SECONDS + 1.0


def test_its_own_log_may_say_so_while_its_process_lingers() -> None:
    found = healthy()
    engines = found.engines
    engine_dies(found)
    found.engines = engines
    found.quiet(LONG)
    found.logs = (LogMatch("engine-dead", "inference", 1, found.now, found.now, "EngineDeadError"),)
    proven(found)


def test_one_of_two_engines() -> None:
    found = world(gpu__inference=(0, 2), gpu__hold=HOLD)
    found.memory[2], found.booted = 60 * GIB, BOOTED
    found.engines.append(process(22, ProcessRole.ENGINE, (2,)))
    found.quiet(120)
    found.poll = 0.5
    found.memory[2] = 0
    del found.engines[1]
    found.inference[URL] = replace(found.inference[URL], health=Health.UNHEALTHY)
    assert proven(found) <= PROVEN_SECONDS + 1.0


def of_unknown_names() -> World:
    """A trainer of a layout of the operator's own: no process has a known name, and no context can be read."""
    found = world(gpu__hold=HOLD)
    found.booted = BOOTED
    found.others = [process(10, ProcessRole.LAUNCHER), process(15, ProcessRole.OTHER), process(16, ProcessRole.OTHER)]
    found.quiet(120)
    found.poll = 0.5
    return found


def test_the_names_of_the_other_processes_need_not_be_known() -> None:
    found = of_unknown_names()
    engine_dies(found)
    assert PROVEN_SECONDS <= proven(found) <= PROVEN_SECONDS + 1.0


@pytest.mark.parametrize("health", [Health.UNHEALTHY, Health.REFUSED])
def test_of_unknown_names_another_that_ends_or_a_server_that_only_refuses_speaks_against_it(health: Health) -> None:
    found = of_unknown_names()
    engine_dies(found, health)
    if health is Health.UNHEALTHY:
        found.others.pop()
    else:
        server_ends(found)
    found.quiet(LONG)


def test_helpers_of_the_engine_end_with_it() -> None:
    found = of_unknown_names()
    helper = replace(process(17, ProcessRole.OTHER), parent_pid=found.engines[0].identity.pid)
    found.others.append(helper)
    found.quiet(60)
    found.others.remove(helper)
    engine_dies(found)
    proven(found)


# -- what speaks against it


def attached(found: World) -> None:
    found.trainer |= {"supervision": Supervision.ATTACH}


def interrupt_logged(found: World) -> None:
    found.logs = (LogMatch("interrupted", "trainer", 1, found.now - 100.0, found.now - 100.0, "Received SIGTERM"),)


def logs_not_read(found: World) -> None:
    found.readings["logs"] = unobserved(SensorState.BLIND, found.now, "the disk hangs")


def logs_read_before(found: World) -> None:
    found.readings["logs"] = replace(found.snapshot().logs, at=found.now - 1.0)


def ended(found: World, pid: int, role: ProcessRole, status: ExitStatus) -> None:
    found.trainer |= {"ends": (ProcessEnd(process(pid, role).identity, role, status, found.now),)}


def engine_ended_with_0(found: World) -> None:
    ended(found, 12, ProcessRole.ENGINE, ExitStatus(0))


def engine_ended_by_sigterm(found: World) -> None:
    ended(found, 12, ProcessRole.ENGINE, ExitStatus(signal=15))


def server_ended_by_sigint(found: World) -> None:
    ended(found, 11, ProcessRole.INFERENCE, ExitStatus(130))


def orchestrator_gone(found: World) -> None:
    found.others = [p for p in found.others if p.role is not ProcessRole.ORCHESTRATOR]


def trainer_gone(found: World) -> None:
    found.others = [p for p in found.others if p.role is not ProcessRole.TRAINER]


def new_engine(found: World) -> None:
    found.engines = [young(112, ProcessRole.ENGINE, found)]


def new_server(found: World) -> None:
    found.servers.append(young(111, ProcessRole.INFERENCE, found))


def health_is_fine(found: World) -> None:
    found.inference[URL] = replace(found.inference[URL], health=Health.OK)


def health_times_out(found: World) -> None:
    found.inference[URL] = replace(found.inference[URL], health=Health.TIMEOUT)


def health_was_asked_before(found: World) -> None:
    found.readings["inference"] = replace(found.snapshot().inference, at=found.now - 0.1)


def memory_is_there(found: World) -> None:
    found.memory[0] = 60 * GIB


def start_times_unknown(found: World) -> None:
    found.booted = None


def stop_asked_for(found: World) -> None:
    found.desired = Desired.STOPPED


def asleep(found: World) -> None:
    found.inference[URL] = replace(found.inference[URL], asleep=True)


AGAINST = (
    attached, interrupt_logged, logs_not_read, logs_read_before, engine_ended_with_0,
    engine_ended_by_sigterm, server_ended_by_sigint, orchestrator_gone, trainer_gone, new_engine, new_server,
    health_is_fine, health_times_out, health_was_asked_before, memory_is_there, start_times_unknown, stop_asked_for,
    asleep,
)  # fmt: skip


@pytest.mark.parametrize("server", [False, True])
@pytest.mark.parametrize("against", AGAINST)
def test_what_speaks_against_it_leaves_it_to_the_window(against: Callable[[World], None], server: bool) -> None:
    found = healthy()
    engine_dies(found)
    if server:
        server_ends(found)
    against(found)
    found.quiet(LONG)


@pytest.mark.parametrize("later", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("against", [orchestrator_gone, interrupt_logged, new_engine])
def test_it_may_come_after_the_engine_and_before_the_second_look(
    against: Callable[[World], None], later: float
) -> None:
    found = healthy()
    engine_dies(found)
    found.quiet(later)
    against(found)
    found.quiet(LONG)


def test_a_server_that_refuses_and_lives_on_may_have_been_asked_to_end() -> None:
    """prime-rl's launcher ends its orchestrator only when the server has ended, up to 60 s after the engine."""
    found = healthy()
    engine_dies(found, Health.REFUSED)
    found.quiet(LONG)
    server_ends(found)
    found.quiet(1.0)
    orchestrator_gone(found)
    found.quiet(LONG)


def test_an_engine_that_nobody_saw_alive_for_long_was_not_seen_to_end() -> None:
    found = healthy()
    found.engines = []
    found.inference[URL] = replace(found.inference[URL], health=Health.OK)
    found.run(5.0)
    found.engines = [young(112, ProcessRole.ENGINE, found)]
    found.run(20.0)
    found.now += 60.0  # nobody looked: the second engine is old enough now, and what happened is not known
    engine_dies(found)
    found.quiet(LONG)


def test_by_hand_is_by_hand_whatever_its_supervisor() -> None:
    found = healthy()
    found.start_id = f"{ATTACHED_ID}1"
    found.trainer = {"supervision": Supervision.ATTACH}
    found.quiet(120)
    engine_dies(found)
    found.quiet(LONG)


# -- looking sooner


def asks(found: World) -> bool:
    return confirming(found.state, found.snapshot(), found.policies)


def test_podwatch_looks_sooner_only_after_an_engine_ended() -> None:
    found = healthy()
    assert not asks(found)
    found.memory[0] = 0  # weights are swapped
    found.quiet(4.0)
    assert not asks(found)
    found.memory[0] = 60 * GIB
    found.quiet(4.0)
    found.engines = [young(112, ProcessRole.ENGINE, found)]
    found.quiet(1.0)
    assert asks(found)
    found.quiet(CONFIRM_SECONDS)
    assert not asks(found), "never for long"


@pytest.mark.parametrize("against", [attached, stop_asked_for, asleep])
def test_it_does_not_where_no_verdict_can_come_of_it(against: Callable[[World], None]) -> None:
    found = healthy()
    against(found)
    found.quiet(10.0)
    engine_dies(found)
    found.quiet(2.0)
    assert not asks(found)


# -- an engine that is loaded again


def test_an_engine_that_is_replaced_is_no_death_while_the_new_one_loads() -> None:
    found = healthy(gpu__hold=8.0)
    engine_dies(found, Health.REFUSED)
    found.servers = []
    found.quiet(3.0)
    found.servers = [young(111, ProcessRole.INFERENCE, found)]
    found.quiet(20.0)
    found.engines = [young(112, ProcessRole.ENGINE, found)]
    found.quiet(300.0)
    (said,) = [f for f in found.findings if f.kind is FindingKind.SILENT_DEATH and f.subject == "gpu0"]
    assert said.severity is Severity.WARNING
    assert "is loading again" in said.summary
    finding, _ = found.until_verdict(1800.0)  # it never comes up: then the steps say so
    assert [e.agreement for e in finding.evidence if e.signal == "steps"] == [Agreement.AGREES]


def test_a_look_that_failed_in_the_middle_of_a_reload_changes_nothing() -> None:
    found = healthy(gpu__hold=8.0)
    engine_dies(found, Health.REFUSED)
    found.quiet(2.0)
    found.engines = [young(112, ProcessRole.ENGINE, found)]
    found.quiet(10.0)
    found.readings["gpus"] = unobserved(SensorState.BLIND, found.now, "NVML hangs")
    found.quiet(30.0)
    del found.readings["gpus"]
    found.quiet(120.0)


def test_an_old_replacement_does_not_hide_the_next_death() -> None:
    found = healthy(gpu__hold=8.0)
    engine_dies(found, Health.REFUSED)
    found.quiet(2.0)
    found.engines = [young(112, ProcessRole.ENGINE, found)]
    found.quiet(30.0)
    found.memory[0] = 60 * GIB
    found.inference[URL] = replace(found.inference[URL], health=Health.OK)
    found.quiet(60.0)
    engine_dies(found)
    assert found.until_verdict(15.0)[1] <= 10.0


def test_a_role_that_lived_again_is_missing_only_since_it_went_again() -> None:
    """An engine that was replaced late is replaced once more."""
    found = healthy(gpu__hold=8.0)
    found.servers, found.engines = [], []
    found.quiet(2.0)
    found.servers, found.engines = [young(111, ProcessRole.INFERENCE, found)], [young(112, ProcessRole.ENGINE, found)]
    found.quiet(120.0)
    engine_dies(found, Health.REFUSED)
    found.quiet(4.0)  # it had been a verdict at the first look
    found.engines = [young(113, ProcessRole.ENGINE, found)]
    found.quiet(60.0)


def test_an_engine_that_was_replaced_while_the_tree_could_not_be_read() -> None:
    """The reading that missed it came after its successor's start."""
    found = healthy(gpu__hold=8.0)
    engine_dies(found, Health.REFUSED)
    found.readings["trainer"] = unobserved(SensorState.DENIED, found.now, "permission denied")
    found.quiet(20.0)
    found.servers = [young(111, ProcessRole.INFERENCE, found)]
    found.quiet(40.0)
    del found.readings["trainer"]
    found.quiet(120.0)


def test_an_engine_that_may_sleep_may_be_empty_when_it_ends() -> None:
    found = world()
    found.booted = BOOTED
    found.engines = [process(12, ProcessRole.ENGINE, (0,), command="VLLM::EngineCore --enable-sleep-mode")]
    found.quiet(120)
    found.memory[0] = 300 << 20
    found.quiet(60)
    found.engines = []
    found.quiet(2.0)
