"""Real processes: the command under test, and a daemon's outside for it to talk to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Machine:
    """One pretended machine: its runtime and home directories, and the daemons started on it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runtime = directory / "run"
        self.runtime.mkdir()
        (directory / "cwd").mkdir()
        self.daemons: list[subprocess.Popen[str]] = []
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(directory),
            "TZ": "UTC",
            "PODWATCH_RUNTIME_DIR": str(self.runtime),
            "PYTHONPATH": str(ROOT),
            "LC_ALL": "C.UTF-8",
        }

    def daemon(self, state: str = "running", *, name: str = "") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.fake_daemon", str(self.runtime), state],
            stdout=subprocess.PIPE, text=True, cwd=ROOT, env=self.env,
        )  # fmt: skip
        self.daemons.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def podwatch(self, *arguments: str, **extra_env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "podwatch", *arguments],
            capture_output=True, text=True, timeout=150, cwd=self.directory / "cwd", env={**self.env, **extra_env},
        )  # fmt: skip

    def end(self) -> None:
        for process in self.daemons:
            process.kill()
            process.communicate()


@pytest.fixture
def machine(tmp_path):
    made = Machine(tmp_path)
    yield made
    made.end()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A machine with a healthy daemon, shared by tests that only ask."""
    made = Machine(tmp_path_factory.mktemp("guarded"))
    made.daemon("running")
    yield made
    made.end()
