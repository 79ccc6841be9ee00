"""The registry against docs/detection.md: each detector is described, and says of itself what the page says."""

import re
from pathlib import Path

import pytest

from podwatch.detection import run_detectors
from podwatch.detection.base import Detector, DetectorResult, Look
from podwatch.detection.learned import Learned
from podwatch.detection.run_detectors import DETECTORS, DetectionState, advance, initial
from podwatch.domain.finding import FindingKind
from podwatch.domain.snapshot import Snapshot
from podwatch.domain.thresholds import Policies

PAGE = (Path(__file__).parents[2] / "docs" / "detection.md").read_text()
ROWS = ["watched from", "limit", "for", "confirmed by"]
"""Of a detector that restarts training; the others are described in a paragraph."""


def section(name: str) -> str:
    match = re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert match, f"docs/detection.md has no section {name!r}"
    return match[1]


def corroborating(name: str) -> str:
    """The signals that the page names for this detector; empty where it only reports."""
    found = dict(re.findall(r"^\| ([\w ]+) \| ?(.*?) ?\|$", section(name), re.MULTILINE))
    assert [row for row in found if row in ROWS] in ([], ROWS), f"the table of {name}"
    return found.get("confirmed by", "")


def test_names_are_unique() -> None:
    assert len({d.name for d in DETECTORS}) == len(DETECTORS)


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda d: d.name)
def test_each_detector_is_described_as_it_is(detector: Detector[object]) -> None:
    signals, text = corroborating(detector.name), section(detector.name)
    for kind in detector.kinds:
        assert f"`{kind}`" in text, kind
    for signal in detector.second:
        assert signal in signals
        assert f"\n- **{signal}**: " in section("Corroborating signals"), f"{signal} is not explained"
    assert bool(detector.second) == bool(signals)
    assert not (detector.second and detector.survives_restart), "the page says that these start again"
    for field in detector.needs:
        assert field in Snapshot.__dataclass_fields__


def test_each_kind_belongs_to_someone_and_to_the_runbook() -> None:
    runbook = (Path(__file__).parents[2] / "docs" / "runbook.md").read_text()
    for kind in {k for d in DETECTORS for k in d.kinds}:
        assert isinstance(kind, FindingKind)
        assert f"\n### {kind}\n" in runbook


class Broken:
    name, kinds, needs, second, survives_restart = "broken", (), (), (), False

    def initial(self) -> int:
        return 7

    def armed(self, state: int, learned: Learned) -> tuple[str, ...]:
        return ()

    def advance(self, state: int, look: Look) -> DetectorResult[int]:
        raise ZeroDivisionError("a fault of ours")


def test_a_detector_that_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_detectors, "DETECTORS", (Broken(), *DETECTORS))
    state, findings = advance(initial(Policies()), Snapshot(at=1.0, wall=1.0), Policies())
    assert [(f.key, f.severity, f.confirmed) for f in findings] == [("sensor-blind:detector-broken", "critical", False)]
    assert state.states["broken"] == 7
    assert isinstance(state, DetectionState)
    assert len(state.states) == len(DETECTORS) + 1
