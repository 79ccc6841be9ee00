"""SIGKILL to podwatch, to its upload child and to both, at random moments of upload, publishing and store retention,
while the store has faults: the pointer never lies, and hardly anything is sent twice (promises 1, 2 and 10)."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support import sync_rounds

pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("PODWATCH_CRASH_ROUNDS", "40")) * 6 // 10
"""Saves; each meets one to three kills, 17 in ten."""
SEED = int(os.environ.get("PODWATCH_CRASH_SEED", "20261"))
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300 + 30 * ROUNDS)
def test_killed_at_random_moments() -> None:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        done = subprocess.run(
            [sys.executable, "-m", sync_rounds.__name__, directory, str(ROUNDS), str(SEED)],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
    assert done.returncode == 0, f"seed {SEED}:\n{done.stderr}"
    print(done.stdout)
    said = json.loads(done.stdout)
    assert said["rounds"] == ROUNDS
    if ROUNDS >= 30:
        assert min(said["podwatch killed"], said["child killed"], said["both killed"]) > 0
