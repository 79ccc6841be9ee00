"""Nights that an older podwatch recorded, judged by today's `podwatch replay`: recordings/772aae4/README.md."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from podwatch.cli.root import cli

ARCHIVE = Path(__file__).with_name("recordings") / "772aae4" / "nights.tar.xz"
HEALTHY = {
    "evaluations": 3590, "slow-steps-and-saves": 3590, "weight-updates": 3590, "sleep-mode": 2150,
    "sleep-mode-by-flag": 2150, "tools": 3590, "saves-only": 2510, "attached": 3590, "stopped-by-its-operator": 3590,
    "finished": 1790, "daemon-stopped-and-finished": 50, "daemon-slow-step-and-restart": 30,
}  # fmt: skip
"""And the seconds that each covers at least."""
DEATHS = ("engine-dies", "daemon-engine-dies")


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("nights")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    return directory


def path_of(nights: Path, name: str) -> Path:
    one = nights / f"{name}.jsonl"
    return one if one.exists() else nights / name


def replayed(path: Path) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["replay", str(path), "--json"])
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.output)
    assert answer["problems"] == []
    assert answer["gaps"] == []
    files = [path] if path.is_file() else sorted(path.iterdir())
    lines = [len(file.read_bytes().splitlines()) for file in files]
    assert answer["turns"] == sum(lines) - len(files) > 0, "every line after a header is a turn"
    return answer


def test_every_recording_has_its_test(nights: Path) -> None:
    assert {p.name.removesuffix(".jsonl") for p in nights.iterdir()} == {*HEALTHY, *DEATHS}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_night_gives_no_restart(nights: Path, name: str) -> None:
    answer = replayed(path_of(nights, name))
    assert answer["would_restart_at"] == [], [f for f in answer["findings"] if f["acts"]]
    assert answer["recorded_seconds"] >= HEALTHY[name]
    assert len(answer["would_finish_at"]) == (1 if name.endswith("finished") else 0)


@pytest.mark.parametrize("name", DEATHS)
def test_a_death_in_between_gives_one(nights: Path, name: str) -> None:
    answer = replayed(path_of(nights, name))
    assert len(answer["would_restart_at"]) == 1
    (act,) = [f for f in answer["findings"] if f["acts"]]
    assert (act["kind"], act["subject"]) == ("silent-death", "gpu0")
