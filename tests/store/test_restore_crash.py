"""SIGKILL at any moment of a restore: nothing half done is ever visible, and only what was on its way comes again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("PODWATCH_CRASH_ROUNDS", "40"))
SEED = int(os.environ.get("PODWATCH_CRASH_SEED", "7"))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["b2", "file"])
def test_crash_rounds(kind: str, tmp_path: Path) -> None:
    rounds = max(1, ROUNDS * 4 // 5 if kind == "b2" else ROUNDS // 5)
    command = [sys.executable, "-m", "tests.support.restore_rounds", str(tmp_path), kind, str(rounds), str(SEED)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=3600
    )
    assert done.returncode == 0, f"seed {SEED}: {done.stderr[-3000:]}"
    counts = json.loads(done.stdout)
    print(counts)
    assert counts["kills"] >= rounds
