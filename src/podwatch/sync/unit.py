"""A systemd unit of its own for the upload child, where podwatch is a systemd service.

With a cgroup for each service, nice and autogroup no longer count between services: a child in podwatch's own cgroup
would get as much of a busy machine as training. A scope keeps what the child needs: its pipes, its parent, the sandbox.
Where systemd refuses, and everywhere else, session, autogroup and nice value are used (sync/children.py). The weights
change with the upload's level (sync/priority.py).
"""

import itertools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from podwatch.domain.errors import HostError
from podwatch.system.child import run_child

CPU_WEIGHT = 2
"""Every other unit has 100: measured 95:5 against a busy neighbour. Idle cores are used fully anyway."""
IO_WEIGHT = CPU_WEIGHT
"""The same for disks whose scheduler supports weights. The idle class is not used: it starves."""
PROBE_SECONDS = 5.0
_NAME = "--unit="


def unit_of(prefix: tuple[str, ...]) -> str:
    """The unit that ``prefix`` creates; empty for none."""
    return next((f"{word.removeprefix(_NAME)}.scope" for word in prefix if word.startswith(_NAME)), "")


class OwnUnit:
    """``prefix`` goes before the child's command. Tried once per process; ``refused`` after a failure gives it up."""

    def __init__(self, environ: Mapping[str, str] | None = None, running: Path = Path("/run/systemd/system")) -> None:
        self._environ = os.environ if environ is None else environ
        self._running = running
        self._works: bool | None = None
        self._numbers = itertools.count(1)

    async def prefix(self, weight: int = CPU_WEIGHT) -> tuple[str, ...]:
        """Empty where no unit can be created. ``weight``: for CPU and disk; other units have 100."""
        program = shutil.which("systemd-run", path=self._environ.get("PATH"))
        if self._works is None:
            service = "INVOCATION_ID" in self._environ and os.geteuid() == 0 and self._running.is_dir()
            self._works = program is not None and service and await self._try(program)
        return self._command(program, weight) if self._works and program is not None else ()

    async def reweigh(self, unit: str, weight: int) -> bool:
        """Change a running child's weight; False where systemd does not."""
        program = shutil.which("systemctl", path=self._environ.get("PATH"))
        if program is None:
            return False
        weights = (f"CPUWeight={weight}", f"IOWeight={weight}")
        try:
            done = await run_child([program, "set-property", "--runtime", unit, *weights], timeout=PROBE_SECONDS)
        except HostError:
            return False
        return done.ok

    def refused(self) -> None:
        """The child did not start in the unit."""
        self._works = False

    async def _try(self, program: str) -> bool:
        try:
            return (await run_child([*self._command(program, CPU_WEIGHT), "true"], timeout=PROBE_SECONDS)).ok
        except HostError:
            return False

    def _command(self, program: str, weight: int) -> tuple[str, ...]:
        name = f"podwatch-upload-{os.getpid()}-{next(self._numbers)}"
        return (
            program, "--scope", "--quiet", "--collect", f"{_NAME}{name}", f"--property=CPUWeight={weight}",
            f"--property=IOWeight={weight}", "--",
        )  # fmt: skip
