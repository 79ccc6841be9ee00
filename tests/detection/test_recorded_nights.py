"""Recorded nights, judged by today's rules: nights/README.md. No healthy night gives a restart, each death gives one,
and what is found in each is what was found when it was converted."""

from pathlib import Path

import pytest

from tests.drivers.detection import FindingKind, Judged, Verdict, expected_of, found_in, read_night

NIGHTS = Path(__file__).with_name("nights")
HEALTHY = {
    "evaluations": 3590, "slow-steps-and-saves": 3590, "weight-updates": 3590, "sleep-mode": 2150,
    "sleep-mode-by-flag": 2150, "tools": 3590, "saves-only": 2510, "attached": 3590, "stopped-by-its-operator": 3590,
    "finished": 1790, "daemon-stopped-and-finished": 50, "daemon-slow-step-and-restart": 30,
}  # fmt: skip
"""And the seconds that each covers at least."""
DEATHS = ("engine-dies", "daemon-engine-dies")
INCIDENTS = ("incident-a", "incident-b")
"""test_incidents.py has more about them."""


def judged(name: str) -> Judged:
    night = read_night(NIGHTS / f"{name}.jsonl.xz")
    assert night.name == name
    assert night.turns
    return found_in(night)


def test_every_night_has_its_test() -> None:
    names = {*HEALTHY, *DEATHS, *INCIDENTS}
    assert {p.name.removesuffix(".jsonl.xz") for p in NIGHTS.glob("*.xz")} == names
    assert {p.name.removesuffix(".found.jsonl") for p in NIGHTS.glob("*.found.jsonl")} == names


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_night_gives_no_restart(name: str) -> None:
    night = judged(name)
    assert night.acted(Verdict.RESTART) == []
    assert night.seconds >= HEALTHY[name]
    assert len(night.acted(Verdict.FINISH)) == (1 if name.endswith("finished") else 0)


@pytest.mark.parametrize("name", DEATHS)
def test_a_death_in_between_gives_one(name: str) -> None:
    night = judged(name)
    assert len(night.acted(Verdict.RESTART)) == 1
    ((_, finding),) = night.acting
    assert (finding.kind, finding.subject) == (FindingKind.SILENT_DEATH, "gpu0")


@pytest.mark.parametrize("name", [*HEALTHY, *DEATHS, *INCIDENTS])
def test_what_is_found_in_a_night_and_when(name: str) -> None:
    """A rule that is changed on purpose changes NAME.found.jsonl with it: ``write_expected`` of the driver."""
    assert judged(name).found == expected_of(NIGHTS / f"{name}.jsonl.xz")
