"""Settle times: how long a checkpoint must be unchanged before it counts as complete, and whether a process has it
open.

The settle time depends on the layout's marker and is doubled where changes become visible late. Read leases ask the
kernel itself; they are off unless configured, because the holder of a lease can delay the trainer's open: a short-lived
helper process takes one lease at a time and releases it at once, so that neither a slow interpreter nor a stopped
daemon can hold one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from podwatch.checkpoints import open_for_writing
from podwatch.checkpoints.layouts.base import Marker

# -- settle times and open files -------------------------------------------------------------------------------------

SLOW_FACTOR = 2
"""Network and FUSE clients cache sizes and mtimes for seconds."""
LEASE_DEADLINE = 2.0
"""Seconds after which the helper is killed: it starts in 20 ms and needs microseconds per file."""
_BATCH = 256
"""Files per helper: few enough that a huge checkpoint is left soon when a writer is found."""


@dataclass(frozen=True, slots=True)
class SettleTimes:
    """Settle times in seconds: with a commit marker, with a file written last or a tracker, and without any."""

    settle: float
    tracker: float
    weak: float

    def need(self, marker: Marker, *, slow: bool) -> float:
        base = {Marker.COMMIT: self.settle, Marker.LAST_FILE: self.tracker, Marker.NONE: self.weak}[marker]
        return base * (SLOW_FACTOR if slow else 1)

    def longest(self, *, slow: bool) -> float:
        return max(self.settle, self.tracker, self.weak) * (SLOW_FACTOR if slow else 1)


class Held(StrEnum):
    NO = "no"
    YES = "yes"
    UNKNOWN = "unknown"


def held_open(paths: Iterable[Path]) -> tuple[Held, str]:
    """Whether a process on this kernel has one of ``paths`` open for writing (or mapped), and that path.

    UNKNOWN where the kernel or the file system does not report it: another user's file without CAP_LEASE, or no leases.
    Blocks, at most until a deadline.
    """
    names = [str(p) for p in paths]
    for start in range(0, len(names), _BATCH):
        verdict, where = _ask(names[start : start + _BATCH])
        if verdict is not Held.NO:
            return verdict, where
    return Held.NO, ""


def _ask(names: list[str]) -> tuple[Held, str]:
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(open_for_writing.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={n: v for n, v in os.environ.items() if n == "LD_LIBRARY_PATH"},
        )
    except OSError:
        return Held.UNKNOWN, ""
    try:
        out, _ = child.communicate(json.dumps(names).encode(), timeout=LEASE_DEADLINE)
        answer = json.loads(out)
        return Held(answer["held"]), str(answer["path"])
    except (subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
        return Held.UNKNOWN, ""
    finally:
        child.kill()
        try:
            child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            pass  # hangs in the kernel: reaped later
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


# -- filesystem of a path --------------------------------------------------------------------------------------------

_SLOW = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p", "beegfs", "glusterfs", "gpfs", "afs", "virtiofs")
_known: dict[int, str] = {}


def slow_to_show(paths: Iterable[Path], *, mountinfo: Path = Path("/proc/self/mountinfo")) -> bool:
    """True if any of ``paths`` (or its nearest existing parent) is on a network or FUSE filesystem.

    Their clients cache sizes and mtimes for seconds. The answer is cached per device.
    """
    return any(is_slow(kind_of(p, mountinfo=mountinfo)) for p in paths)


def is_slow(kind: str) -> bool:
    return kind in _SLOW or kind == "fuse" or kind.startswith("fuse.")


def kind_of(path: Path, *, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """``ext4``, ``overlay``, ``nfs4``... of ``path`` or its nearest existing parent; empty if unknown."""
    for candidate in (path, *path.parents):
        try:
            device = candidate.stat().st_dev
        except OSError:
            continue
        if device not in _known:
            _known[device] = _look_up(device, mountinfo)
        return _known[device]
    return ""


def _look_up(device: int, mountinfo: Path) -> str:
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split(" ", 1)[0]
        if len(fields) > 2 and fields[2] == wanted:
            return kind
    return ""
