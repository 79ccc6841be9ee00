"""A pod for one run: directories of its own, locks of its own, and nothing left running afterwards."""

import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from podwatch.system import procfs
from podwatch.system.clock import SystemClock
from podwatch.trainer.start_and_adopt import StartPlan, SupervisorLauncher, SupervisorOptions
from tests.support.known_trainers import ROLES


class Pod:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.output = root / "work" / "outputs"
        self.output.parent.mkdir()
        self.state = root / "state"
        self.beside = root / "beside"
        """podwatch's directory beside the output directory."""
        self.beside.mkdir()
        self.run_id = f"t-{os.getpid()}-{time.monotonic_ns()}"
        self.launchers: list[SupervisorLauncher] = []

    @property
    def directory(self) -> Path:
        return self.state / self.run_id / "supervisor"

    def launcher(self, **changes: object) -> SupervisorLauncher:
        options: dict[str, object] = {"beside": self.beside, "grace": 2.0, "linger": 30.0}
        state, output = changes.pop("state", self.state), changes.pop("output", self.output)
        options.update(changes)
        made = SupervisorLauncher(
            self.run_id,
            output,  # type: ignore[arg-type]
            state,  # type: ignore[arg-type]
            SystemClock(),
            use_systemd=False,
            roles=ROLES,
            options=SupervisorOptions(**options),  # type: ignore[arg-type]
        )
        self.launchers.append(made)
        return made

    def start_id(self, name: str = "s1") -> str:
        """Of this pod alone: whoever looks for the processes of a start looks at every process of the machine."""
        return f"{name}-{self.run_id}"

    def plan(self, *argv: str, start_id: str = "s1", env: dict[str, str] | None = None, **more: object) -> StartPlan:
        base = {"PATH": os.environ["PATH"], "HOME": "/root"}
        environ = {**base, **(env or {})}
        return StartPlan(self.start_id(start_id), argv, str(self.output.parent), environ, **more)  # type: ignore[arg-type]

    def script(self, text: str, **more: object) -> StartPlan:
        return self.plan("sh", "-c", text, **more)  # type: ignore[arg-type]

    def members(self) -> list[int]:
        """Without those in the middle of an exec, which take long on a busy machine: wait with ``eventually``."""
        return [p for p in procfs.all_pids() if procfs.environment_value(p, "PODWATCH_RUN") == self.run_id]

    def supervisors(self) -> list[int]:
        return [
            p
            for p in procfs.all_pids()
            if str(self.root) in " ".join(procfs.command(p)) and "supervise.py" in " ".join(procfs.command(p))
        ]

    def cleanup(self) -> None:
        for _ in range(100):
            left = self.supervisors() + self.members()
            if not left:
                return
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.01)


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[Pod]:
    made = Pod(tmp_path)
    yield made
    for launcher in made.launchers:
        await launcher.close()
    made.cleanup()


LIMITS = (0.5, 2.0, 8.0)
"""Seconds to try in turn where a limit has to pass, but not before what it ends has started on a busy machine."""


def eventually(check: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)
