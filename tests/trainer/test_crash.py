"""Two racing podwatches and random SIGKILLs: never two trainers, never one that nobody finds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import crash_rounds

pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("PODWATCH_CRASH_ROUNDS", "30"))
SEED = int(os.environ.get("PODWATCH_CRASH_SEED", "20261"))


@pytest.mark.timeout(300 + 15 * ROUNDS)
def test_never_two_trainers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, crash_rounds.__file__, str(tmp_path), str(ROUNDS), str(SEED)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)["outcomes"]
    print(done.stdout)
    if ROUNDS >= 30:  # the rounds were worth something: trainers that lived and starts that never happened
        assert any("1 alive" in key for key in outcomes)
        assert len(outcomes) >= 4
