"""A unit of its own for the upload child, where podwatch is a systemd service (facts/systemd.md, "Priority").

With a cgroup for each service, nice and autogroup no longer count between them: a child in podwatch's own cgroup would
get as much of a busy machine as training. A scope keeps what the child needs: its pipes, its parent, the sandbox. Where
systemd refuses, and everywhere else, own session, autogroup and nice do it (sync/child.py).
"""

import itertools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from podwatch.domain.errors import HostError
from podwatch.system.child import run_child

CPU_WEIGHT = 2
"""Of 100 that every other unit has: 95:5 measured against a busy neighbour. Idle cores it has all the same."""
IO_WEIGHT = 2
"""The same for disks whose scheduler knows weights. The idle class is not used: it starves (facts/systemd.md)."""
PROBE_SECONDS = 5.0


class OwnUnit:
    """``prefix`` goes before the child's command. Tried once per process; ``refused`` after a failure gives it up."""

    def __init__(self, environ: Mapping[str, str] | None = None, running: Path = Path("/run/systemd/system")) -> None:
        self._environ = os.environ if environ is None else environ
        self._running = running
        self._works: bool | None = None
        self._numbers = itertools.count(1)

    async def prefix(self) -> tuple[str, ...]:
        """Empty where there is no unit to be had."""
        program = shutil.which("systemd-run", path=self._environ.get("PATH"))
        if self._works is None:
            service = "INVOCATION_ID" in self._environ and os.geteuid() == 0 and self._running.is_dir()
            self._works = program is not None and service and await self._try(program)
        return self._command(program) if self._works and program is not None else ()

    def refused(self) -> None:
        """The child did not come to life under it."""
        self._works = False

    async def _try(self, program: str) -> bool:
        try:
            return (await run_child([*self._command(program), "true"], timeout=PROBE_SECONDS)).ok
        except HostError:
            return False

    def _command(self, program: str) -> tuple[str, ...]:
        name = f"podwatch-upload-{os.getpid()}-{next(self._numbers)}"
        return (
            program, "--scope", "--quiet", "--collect", f"--unit={name}", f"--property=CPUWeight={CPU_WEIGHT}",
            f"--property=IOWeight={IO_WEIGHT}", "--",
        )  # fmt: skip
