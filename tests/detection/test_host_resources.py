"""Warnings about the machine: when they come, that they do not flap, and that they never ask for an act."""

from dataclasses import replace

import pytest

from podwatch.config.settings import Policies, ResourceSettings
from podwatch.detection.warnings import OOM_SHOWN_SECONDS
from podwatch.domain.finding import Finding, Severity, Verdict
from podwatch.domain.snapshot import (
    DiskSample,
    FileUse,
    HostSample,
    SensorState,
    Snapshot,
    observed,
    unobserved,
)
from tests.drivers.detection import RuleAlone

GIB = 1 << 30
FINE = HostSample(
    100 * GIB, 60 * GIB, 8 * GIB, 0, 10 * GIB, GIB, 80 * GIB, 40 * GIB, 0, (FileUse(7, "engine", 100, 1000),)
)


class Desk:
    """The detector alone, fed one host sample every 10 s."""

    def __init__(self, policy: ResourceSettings | None = None) -> None:
        self.policies = Policies(resources=policy or ResourceSettings(), nofile=1000)
        self.rule = RuleAlone("resources")
        self.now = 0.0
        self.findings: dict[str, Finding] = {}

    def see(self, host: HostSample | None, looks: int = 1) -> set[str]:
        for _ in range(looks):
            reading = observed(host, self.now) if host else unobserved(SensorState.BLIND, self.now, "gone")
            for at in (self.now, self.now + 4.0):  # a reading is seen by several turns
                snapshot = Snapshot(at=at, wall=at, host=reading)  # type: ignore[arg-type]
                self.findings = {f.key: f for f in self.rule.ask(snapshot, self.policies)}
                assert all(f.verdict is Verdict.NONE and not f.confirmed for f in self.findings.values())
            self.now += 10.0
        return set(self.findings)


def used(name: str, ratio: float) -> HostSample:
    return {
        "files-low": replace(FINE, files=(FileUse(7, "engine", int(1000 * ratio), 1000),)),
        "memory-low:host": replace(FINE, memory_available_bytes=int(100 * GIB * (1 - ratio))),
        "memory-low:container": replace(FINE, cgroup_used_bytes=int(80 * GIB * ratio)),
        "shm-low": replace(FINE, shm_used_bytes=int(10 * GIB * ratio)),
    }[name]


MARKS = {"files-low": 0.8, "memory-low:host": 0.95, "memory-low:container": 0.95, "shm-low": 0.9}


def test_a_healthy_machine_is_not_worth_a_word() -> None:
    assert Desk().see(FINE, 50) == set()


@pytest.mark.parametrize("name", MARKS)
def test_each_limit_is_told_above_its_mark_after_two_looks(name: str) -> None:
    desk = Desk()
    assert desk.see(used(name, MARKS[name] - 0.01), 10) == set()
    assert desk.see(used(name, MARKS[name] + 0.02), 2) == set()
    assert desk.see(used(name, MARKS[name] + 0.02), 1) == {name}
    assert desk.findings[name].severity is Severity.WARNING
    assert desk.findings[name].suggestion
    desk.see(used(name, 0.99))
    assert desk.findings[name].severity is Severity.CRITICAL


@pytest.mark.parametrize("name", MARKS)
def test_it_goes_only_when_it_is_well_below_for_a_while(name: str) -> None:
    desk = Desk()
    desk.see(used(name, 0.99), 3)
    assert desk.see(used(name, MARKS[name] - 0.02), 30) == {name}
    assert desk.see(used(name, MARKS[name] - 0.1), 6) == {name}
    assert desk.see(used(name, MARKS[name] - 0.1), 1) == set()


def test_a_swing_about_the_mark_is_told_once() -> None:
    desk = Desk()
    desk.see(used("files-low", 0.85), 3)
    since = desk.findings["files-low"].since
    for number in range(100):
        desk.see(used("files-low", 0.79 if number % 2 else 0.81))
        assert desk.findings["files-low"].since == since


def test_what_the_machine_does_not_tell_is_never_full() -> None:
    blind = HostSample(100 * GIB, 60 * GIB)
    assert Desk().see(blind, 20) == set()
    desk = Desk()
    desk.see(used("shm-low", 0.99), 3)
    assert desk.see(None, 3) == set()
    assert desk.see(used("shm-low", 0.99)) == {"shm-low"}, "it was only not observed"
    assert desk.see(None, 20) == set()
    assert desk.see(used("shm-low", 0.99)) == set(), "nobody knows what happened meanwhile"
    assert desk.see(used("shm-low", 0.99), 2) == {"shm-low"}


def test_a_limit_of_open_files_below_the_configured_one_is_shown_while_it_is_so() -> None:
    desk = Desk()
    few, more = FileUse(7, "engine", 10, 999), FileUse(8, "worker", 10, 1000)
    assert desk.see(replace(FINE, files=(few,))) == {"files-low:limit"}
    assert desk.findings["files-low:limit"].severity is Severity.INFO
    assert desk.see(replace(FINE, files=(few, more))) == set(), "one process has lowered its own"
    assert desk.see(replace(FINE, files=())) == set(), "not observed"


def test_an_oom_kill_is_critical_and_stays_for_an_hour() -> None:
    desk = Desk()
    desk.see(replace(FINE, oom_kills=3), 5)
    assert desk.see(replace(FINE, oom_kills=5)) == {"out-of-memory"}
    finding = desk.findings["out-of-memory"]
    assert finding.severity is Severity.CRITICAL
    assert "killed 2 processes" in finding.summary
    assert desk.see(replace(FINE, oom_kills=5), 300) == {"out-of-memory"}
    assert desk.see(replace(FINE, oom_kills=5), int(OOM_SHOWN_SECONDS / 10) - 300) == set()


def test_a_new_group_counts_from_zero() -> None:
    desk = Desk()
    desk.see(replace(FINE, oom_kills=3))
    assert desk.see(replace(FINE, oom_kills=0), 3) == set()
    assert desk.see(replace(FINE, oom_kills=1)) == {"out-of-memory"}


def test_a_disk_and_its_inodes_are_rows_like_the_others_and_no_cause_for_alarm() -> None:
    rule, policies = RuleAlone("resources"), Policies()
    full = DiskSample("/app", 100, 99, 1, 1000, 5)
    for at in (0.0, 10.0, 20.0):
        found = rule.ask(Snapshot(at=at, wall=at, disk=observed(full, at)), policies)
        assert {(f.kind, f.severity, f.since) for f in found} == {
            ("disk-high", Severity.WARNING, 0.0), ("inodes-low", Severity.WARNING, 0.0),
        }  # fmt: skip
