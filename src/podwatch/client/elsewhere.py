"""Find a running podwatch by the run's lock if its runtime directory is unknown.

Otherwise a run whose podwatch was started with another PODWATCH_RUNTIME_DIR, or as another user, would be reported as
"not running".
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from podwatch.client.discover import Hints


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a run's lock. ``runtime``: its runtime directory; empty if it cannot be read."""

    pid: int
    lock: Path
    runtime: str = ""


def holder(run: str, environ: Mapping[str, str], hints: Hints, locks: Path = Path("/proc/locks")) -> Holder | None:
    """The process that holds the lock of ``run`` (empty: of any run in the default state directories). Reads
    /proc/locks and takes no lock: even a short one could prevent podwatch from starting."""
    held = _held(locks)
    for path in _lock_files(run, environ, hints):
        try:
            status = path.stat()
        except OSError:
            continue
        pid = held.get(status.st_ino, 0)
        if pid > 0 and _user_of(pid) in (0, os.geteuid(), status.st_uid):
            return Holder(pid, path, _runtime_of(pid))
    return None


def _lock_files(run: str, environ: Mapping[str, str], hints: Hints) -> Iterable[Path]:
    named = [hints.state_dir] if hints.state_dir else []
    home = environ.get("HOME", "")
    usual = (
        environ.get("PODWATCH_STATE_DIR", ""),
        "/var/lib/podwatch",
        f"{home}/.local/state/podwatch" if home else "",
    )
    for root in named or [Path(place) for place in usual if place]:
        if run or hints.run_id:
            yield root / (run or hints.run_id) / "lock"
            continue
        try:
            yield from sorted(root.glob("*/lock"))
        except OSError:
            continue


def _held(locks: Path) -> dict[int, int]:
    """Inode -> pid of the process that holds a flock on it. Devices are not compared: overlays show another device."""
    try:
        lines = locks.read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for words in map(str.split, lines):  # 1: FLOCK  ADVISORY  WRITE 708 00:1a:123 0 EOF
        if len(words) >= 6 and words[1] == "FLOCK" and words[3] == "WRITE" and words[4].isdigit():
            inode = words[5].rpartition(":")[2]
            if inode.isdigit():
                found[int(inode)] = int(words[4])
    return found


def _user_of(pid: int) -> int:
    """Real user id; -1 without such a process. It is compared because inode numbers repeat across file systems."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("Uid:")))
    except (OSError, ValueError, StopIteration):
        return -1


def _runtime_of(pid: int) -> str:
    try:
        items = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    values = dict(item.split(b"=", 1) for item in items if b"=" in item)
    found = values.get(b"PODWATCH_RUNTIME_DIR") or values.get(b"RUNTIME_DIRECTORY", b"").split(b":")[0]
    return os.fsdecode(found)
