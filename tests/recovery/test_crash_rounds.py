"""SIGKILL to podwatch and to the supervisor, at every journal point of a restart and at random moments: never two
trainers, never an orphan, and the next podwatch finishes or undoes it (promises 4 and 10)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import restart_rounds

pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("PODWATCH_CRASH_ROUNDS", "40"))
SEED = int(os.environ.get("PODWATCH_CRASH_SEED", "20261"))
ROOT = Path(__file__).resolve().parents[2]


def rounds(directory: Path, what: str, count: int = 0) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", restart_rounds.__name__, str(directory), what, str(count), str(SEED)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, f"seed {SEED}:\n{done.stderr}"
    print(done.stdout)
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["podwatch", "supervisor"])
def test_killed_at_every_point_of_a_restart(quick_dir: Path, victim: str) -> None:
    said = rounds(quick_dir, victim)
    assert said["rounds"] >= 25, "the restart passed fewer points than it has: the test does not reach it"
    assert {"before record", "after record", "after rename"} <= set(said["struck"])


@pytest.mark.timeout(300 + 8 * ROUNDS)
def test_killed_at_random_moments(quick_dir: Path) -> None:
    said = rounds(quick_dir, "random", ROUNDS)
    assert said["rounds"] == ROUNDS
