"""Kill points: SIGKILL for a process right before or after its n-th rename, unlink, write-open, fsync, signal, exec...

A library (killpoints.c) that LD_PRELOAD loads counts these calls in the processes whose command matches the pattern of
a role. Nothing of the program under test is patched, and its interpreters can run isolated (``-I``). A first run
without a kill enumerates the points::

    points = KillPoints(tmp_path / "kill", below=[rig.root], roles=ROLES)
    daemon = rig.daemon(points.environment()).start()
    ...
    for call in points.trace(): print(call.role, call.number, call.call, call.path)

and the following runs end the process at one of them, once::

    points.kill(role="daemon", at=17, when="before")                      # the 17th call of all
    points.kill(role="supervisor", at=1, call="rename", path="*/record.json") # the first one of these
    ...
    assert points.fired

Calls of several threads come in another order each time: call and path name a moment again, a number alone does not.

The library is loaded into roles only: a process that starts another one passes it on to a role, even where it gives the
child an environment of its own, and hides it from everything else, so that the trainer's environment is as without it.
No wrapper exists for what does not go through libc's symbols: vfork (its child's exec counts instead, as a point of the
parent), sendfile, io_uring.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.support.nvml import NoCompiler

SOURCE = Path(__file__).with_name("killpoints.c")
ROLES = {
    "daemon": "*-m podwatch -c * run*",
    "supervisor": "*-I -S -E */supervise.py* keep *",
    "transfer": "*-m podwatch.store.transfer *",
}
"""Role -> pattern of the whole command, as the shell's ``case`` has them."""
CALLS = ("rename", "unlink", "open", "link", "mkdir", "fsync", "truncate", "kill", "fork", "exec", "connect", "request")
"""All but ``write``, of which there are very many. ``open`` counts only for writing or creating; ``request`` is one of
HTTP without TLS, by its first line (and the object's name, which B2 has in a header)."""
ASIDE = ("__pycache__", ".pyc", "podwatch.log", "supervisor.log")
When = Literal["before", "after"]


def build_killpoints(directory: Path) -> Path:
    """Compile the library into ``directory`` and return its path. Raises NoCompiler."""
    target = directory / "killpoints.so"
    if target.exists():
        return target
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise NoCompiler("kill points need a C compiler: install gcc")
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(f".{os.getpid()}")
    flags = ["-std=gnu11", "-O1", "-Wall", "-Werror", "-Wno-format-truncation", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", str(unfinished), str(SOURCE), "-ldl"], check=True)
    unfinished.replace(target)
    return target


@dataclass(frozen=True, slots=True)
class Call:
    """A counted call: the ``number``-th of its role. ``path``: absolute; of a signal ``pid/number``; of a connection
    its address; of an exec the command."""

    pid: int
    role: str
    number: int
    call: str
    path: str


class KillPoints:
    """``directory`` holds control file, trace and library; ``below``: only paths below these count (all if empty)."""

    def __init__(
        self,
        directory: Path,
        *,
        below: Iterable[Path] = (),
        roles: Mapping[str, str] = ROLES,
        calls: Iterable[str] = CALLS,
        aside: Iterable[str] = ASIDE,
        library: Path | None = None,
    ) -> None:
        self.library = library or build_killpoints(directory)
        self._directory = directory
        self._lines = [
            *(f"role {name} {pattern}" for name, pattern in roles.items()),
            *(f"below {path}" for path in below),
            *(f"aside {text}" for text in aside),
            f"calls {' '.join(calls)}",
            *(f"{name} {self._file(name)}" for name in ("trace", "fired", "numbers")),
        ]
        directory.mkdir(parents=True, exist_ok=True)
        self.disarm()

    def environment(self) -> dict[str, str]:
        """What the first process needs in its environment; it must be a role."""
        return {"LD_PRELOAD": str(self.library), "KILLPOINTS": str(self._file("control"))}

    def kill(self, *, role: str, at: int, when: When = "before", call: str = "*", path: str = "*") -> None:
        """Arm: the ``at``-th call of this role, name and path (patterns) from now on is its last. For processes that
        start after this."""
        self._reset(f"kill {role} {at} {when} {call} {path}")

    def disarm(self) -> None:
        """Only count, from the beginning, with an empty trace."""
        self._reset()

    @property
    def armed(self) -> bool:
        """Whether a process will still be killed."""
        return "kill " in self._file("control").read_text().splitlines()[-1] and not self.fired

    @property
    def fired(self) -> bool:
        return self._file("fired").exists()

    @property
    def victim(self) -> int:
        """The pid of the process that was killed; 0 before."""
        while self.fired and not (pid := self._file("fired").read_text().strip()):
            time.sleep(0.01)  # it is just being written
        return int(pid) if self.fired else 0

    def trace(self, role: str = "*") -> list[Call]:
        """The counted calls so far, in their order."""
        found = []
        for line in self._file("trace").read_text(errors="replace").splitlines():
            pid, name, number, call, path = line.split(" ", 4)
            if role in ("*", name):
                found.append(Call(int(pid), name, int(number), call, path))
        return found

    def _reset(self, *more: str) -> None:
        self._file("fired").unlink(missing_ok=True)
        self._file("trace").write_bytes(b"")
        self._file("numbers").write_bytes(bytes(4096))
        for name in ("trace", "numbers"):
            self._file(name).chmod(0o666)  # a role can have another user
        self._file("control").write_text("\n".join([*self._lines, *more]) + "\n")

    def _file(self, name: str) -> Path:
        return self._directory / f"{name}.txt"
