"""Processes as /proc shows them to the tests, which look for themselves and not with podwatch's eyes.

Each answer is empty or None when the process is gone.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
KTHREADD = 2
"""The parent of the kernel's own threads, which have neither a command nor an environment."""


@dataclass(frozen=True, slots=True)
class Stat:
    """Of ``/proc/PID/stat``. ``state`` is one letter: Z and X are those that have ended."""

    pid: int
    name: str
    state: str
    parent_pid: int
    session: int


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir(PROC) if name.isdigit()]  # noqa: PTH208 - cheaper than Path.iterdir


def read_stat(pid: int) -> Stat | None:
    """The name may have spaces and brackets: it ends at the last one."""
    head, _, rest = _read(pid, "stat").decode(errors="replace").rpartition(")")
    if not head:
        return None
    state, parent, _, session = rest.split()[:4]
    return Stat(pid, head.partition("(")[2], state, int(parent), int(session))


def alive(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.state not in "ZX"


def command(pid: int) -> list[str]:
    return _words(_read(pid, "cmdline"))


def environment_value(pid: int, name: str) -> str | None:
    """None where it is not set, or may not be read."""
    return next((word.partition("=")[2] for word in _environment(pid) if word.startswith(f"{name}=")), None)


def _environment(pid: int) -> list[str]:
    """A process in the middle of an exec shows neither environment nor command for a moment: it is read again."""
    for _ in range(8):
        found = _words(_read(pid, "environ"))
        stat = read_stat(pid)
        if found or stat is None or stat.state in "ZX" or KTHREADD in (pid, stat.parent_pid) or command(pid):
            return found
        time.sleep(0.01)
    return _words(_read(pid, "environ"))


def children(pid: int) -> list[int]:
    """Of every thread of it: a look at each process of the machine would cost much more."""
    try:
        lists = [task.joinpath("children").read_text() for task in (PROC / str(pid) / "task").iterdir()]
    except OSError:  # a thread has just ended, or a kernel without these lists
        return [p for p in all_pids() if (stat := read_stat(p)) is not None and stat.parent_pid == pid]
    return [int(word) for words in lists for word in words.split()]


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on; ``pid`` itself is left out."""
    found, waiting = [], [pid]
    while waiting:
        new = [child for child in children(waiting.pop(0)) if child not in found]
        found += new
        waiting += new
    return found


def _read(pid: int, name: str) -> bytes:
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


def _words(raw: bytes) -> list[str]:
    return raw.decode(errors="replace").rstrip("\0").split("\0") if raw else []
