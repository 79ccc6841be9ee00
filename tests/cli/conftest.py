"""Real processes: the command under test, and a daemon's outside for it to talk to."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import contract, own_times, warm

ROOT = Path(__file__).parents[2]
TIMES = '[times]\n"checkpoints.settle_weak" = 0\n"checkpoints.settle_tracker" = 0\n'
"""What lies in these directories is not being written."""


class Machine:
    """One pretended machine: its runtime and home directories, and the daemons started on it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runtime = directory / "run"
        self.runtime.mkdir()
        (directory / "cwd").mkdir()
        self.daemons: list[warm.Started] = []
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(directory),
            "TZ": "UTC",
            "PODWATCH_RUNTIME_DIR": str(self.runtime),
            "PYTHONPATH": str(ROOT),
            "LC_ALL": "C.UTF-8",
            **own_times.write(TIMES, directory / "test-times.toml"),
        }

    def daemon(self, state: str = "running") -> warm.Started:
        reader, writer = os.pipe()
        with os.fdopen(reader) as said, os.fdopen(writer, "w") as out, Path(os.devnull).open() as nothing:
            streams = [nothing.fileno(), out.fileno(), 2]
            process = warm.start(
                "tests.cli.fake_daemon", [str(self.runtime), state], cwd=ROOT, env=self.env, streams=streams
            )
            self.daemons.append(process)
            out.close()
            assert said.readline() == "ready\n"
        return process

    def podwatch(self, *arguments: str, **extra_env: str) -> subprocess.CompletedProcess[str]:
        done = warm.podwatch(*arguments, cwd=self.directory / "cwd", env={**self.env, **extra_env})
        contract.check_printed(arguments, done.stdout)
        return done

    def end(self) -> None:
        for process in self.daemons:
            process.kill()
            process.wait()


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
