"""What the image installs exists: every locked package as a wheel, for each supported Python on both processors."""

import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[3] / "config"


@pytest.mark.parametrize("lock", ["requirements.lock", "build.lock"])
@pytest.mark.parametrize("processor", ["x86_64", "aarch64"])
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_pip_resolves_the_lock_to_wheels_with_these_hashes(
    python: str, processor: str, lock: str, tmp_path: Path
) -> None:
    platforms = [f"--platform={name}_{processor}" for name in ("manylinux2014", "manylinux_2_17", "manylinux_2_28")]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", f"--target={tmp_path}",
         *platforms, f"--python-version={python}", "--implementation=cp", "--only-binary=:all:", "--require-hashes",
         "-r", CONFIG / lock],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
