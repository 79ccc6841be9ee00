"""Servers that are dead by their own answers."""

from dataclasses import replace

from tests.detection.looks import URL, World, kills, process, world
from tests.drivers.detection import (
    FindingKind,
    Health,
    InferenceSample,
    Liveness,
    ProcessIdentity,
    ProcessRole,
    SensorState,
    Severity,
    unobserved,
)

OTHER = "http://127.0.0.1:8101"


def blind_to_memory() -> World:
    """Two servers; no GPU can be read."""
    found = world()
    found.inference[OTHER] = InferenceSample(OTHER, Health.OK, 200, 4.0, 0.0)
    found.readings["gpus"] = unobserved(SensorState.DENIED, 0.0, "no device")
    found.quiet(60)
    return found


def test_one_of_two_servers_is_dead_and_its_engine_with_it() -> None:
    found = blind_to_memory()
    found.inference[OTHER] = InferenceSample(OTHER, Health.UNHEALTHY, 503)
    found.engines = []
    finding, took = found.until_verdict(60)
    assert (finding.kind, finding.subject) == (FindingKind.SILENT_DEATH, OTHER)
    assert 8 <= took <= 12
    assert finding.evidence[0].window_seconds >= 8


def test_a_dead_server_alone_only_warns_and_steps_decide() -> None:
    found = blind_to_memory()
    found.inference[OTHER] = InferenceSample(OTHER, Health.REFUSED)
    found.quiet(900)
    assert [(f.subject, f.severity) for f in found.findings if f.kind is FindingKind.SILENT_DEATH] == [
        (OTHER, Severity.WARNING)
    ]
    found.stepping = found.generating = False
    finding, took = found.until_verdict(700)
    assert "confirmed by steps" in finding.summary
    assert took >= 590


def test_a_blink_a_timeout_and_a_stranger_are_no_death() -> None:
    found = blind_to_memory()
    found.engines = []
    found.inference[OTHER] = InferenceSample(OTHER, Health.REFUSED)
    found.quiet(6)
    found.inference[OTHER] = InferenceSample(OTHER, Health.TIMEOUT)
    found.quiet(120)
    stranger = "http://127.0.0.1:9999"
    found.inference = {URL: found.inference[URL], stranger: InferenceSample(stranger, Health.REFUSED)}
    found.quiet(120)
    assert not [f for f in found.findings if f.kind is FindingKind.SILENT_DEATH], "never was 200"


def test_a_hole_begins_the_window_anew() -> None:
    found = blind_to_memory()
    found.engines.append(process(22, ProcessRole.ENGINE))  # one of two: the role itself is not gone
    found.quiet(60)
    del found.engines[0]
    for _ in range(5):
        found.inference[OTHER] = InferenceSample(OTHER, Health.REFUSED)
        found.quiet(7)
        held, found.readings["inference"] = dict(found.readings), unobserved(SensorState.BLIND, found.now, "hangs")
        found.quiet(4)
        found.readings = held
    assert not kills(found.findings)


def test_a_server_that_its_parent_ends_and_starts_again_is_no_death() -> None:
    """It hung, refused, and was replaced: its end is evidence only if no other comes within seconds."""
    found = world()
    found.booted = 5000.0
    found.readings["gpus"] = unobserved(SensorState.DENIED, 0.0, "no device")
    found.quiet(120)
    found.inference[URL] = InferenceSample(URL, Health.REFUSED)
    found.quiet(20)
    found.servers = []
    found.quiet(4)
    young = ProcessIdentity(31, int((found.now + 5000.0) * 100))
    found.servers = [replace(process(31, ProcessRole.INFERENCE), identity=young)]
    found.quiet(60)


def test_a_server_that_ended_and_refuses_is_one() -> None:
    found = world()
    found.readings["gpus"] = unobserved(SensorState.DENIED, 0.0, "no device")
    found.quiet(120)
    found.inference[URL] = InferenceSample(URL, Health.REFUSED)
    found.servers = []
    assert found.until_verdict(20)[1] >= 8


def test_liveness_with_the_engines_process_gone() -> None:
    found = blind_to_memory()
    found.inference[URL] = replace(found.inference[URL], liveness=Liveness.OK)
    found.quiet(20)
    found.inference[URL] = replace(found.inference[URL], liveness=Liveness.TIMEOUT)
    found.engines = []
    finding, took = found.until_verdict(300)
    assert finding.subject == URL
    assert 148 <= took <= 156


def test_armed_and_second_signals_are_told() -> None:
    found = blind_to_memory()
    assert f"inference:{OTHER}" in found.state.armed
