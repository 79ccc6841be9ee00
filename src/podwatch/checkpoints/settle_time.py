"""Settle times: how long a checkpoint must be unchanged before it counts as complete, whether a process has it open,
and what this pod's kernel and filesystem can report about files that are being written.

The settle time depends on the layout's marker and is doubled where changes become visible late. Read leases ask the
kernel itself; they are off unless configured, because the holder of a lease can delay the trainer's open: a short-lived
helper process takes one lease at a time and releases it at once, so that neither a slow interpreter nor a stopped
daemon can hold one. ``probe`` tries each of these once on a scratch file of podwatch's own: sandboxes and FUSE
lack some.
"""

import contextlib
import ctypes
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from podwatch.checkpoints import open_for_writing
from podwatch.checkpoints.layouts.base import Marker
from podwatch.domain.errors import HostError
from podwatch.system.pinned_directories import PinnedTree

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


_HOLE = 1 << 20
"""Bytes; larger than any filesystem's block."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """``None`` means that it could not be tried. ``filesystem`` is empty where unknown."""

    filesystem: str = ""
    slow: bool = False
    """Sizes and times become visible late: every settle time is doubled and leases are not used."""
    holes: bool | None = None
    """The filesystem reports ranges that were never written (SEEK_HOLE)."""
    leases: bool | None = None
    """The kernel reports whether a file is open for writing."""
    inotify: bool | None = None
    """File events work. Without them podwatch finds checkpoints by rescans alone."""

    def to_dict(self) -> dict[str, object]:
        return {
            "filesystem": self.filesystem,
            "slow": self.slow,
            "holes": self.holes,
            "leases": self.leases,
            "inotify": self.inotify,
        }


def probe(directory: Path, tree: PinnedTree | None = None) -> Capabilities:
    """Probe in ``directory`` (podwatch's own, on the checkpoints' filesystem). Blocks; never raises OSError; leaves no
    files. Pass ``tree`` where another user could replace the directory meanwhile."""
    kind = kind_of(directory)
    slow, inotify = is_slow(kind), _inotify()
    try:
        with contextlib.nullcontext(None) if tree is None else tree.directory(directory) as at:
            name = f".probe-{os.getpid()}-{secrets.token_hex(4)}"
            there: str | Path = directory / name if at is None else name
            fd = os.open(there, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=at)
            try:
                holes = _holes(fd)
                leases = _leases(fd, directory / name) if not slow else None
            finally:
                with contextlib.suppress(OSError):
                    os.close(fd)
                with contextlib.suppress(OSError):
                    os.unlink(there, dir_fd=at)
    except (OSError, HostError):
        return Capabilities(kind, slow, inotify=inotify)
    return Capabilities(kind, slow, holes, leases, inotify)


def _holes(fd: int) -> bool | None:
    """Whether a file that is one hole is reported as such, and a fully written one is not."""
    try:
        os.ftruncate(fd, _HOLE)
        if os.lseek(fd, 0, os.SEEK_HOLE) >= _HOLE:
            return False
        os.pwrite(fd, b"x" * 4096, 0)
        os.ftruncate(fd, 4096)
        return os.lseek(fd, 0, os.SEEK_HOLE) == 4096
    except OSError:
        return None


def _leases(fd: int, path: Path) -> bool | None:
    """Whether the kernel reports that podwatch's own descriptor is open for writing, and that it is closed."""
    while_open, _ = held_open([path])
    if while_open is not Held.YES:
        return False if while_open is Held.NO else None
    reader = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.dup2(reader, fd, inheritable=False)  # the write descriptor is gone; the caller still closes its number
    finally:
        os.close(reader)
    after, _ = held_open([path])
    return after is Held.NO


def _inotify() -> bool | None:
    """Whether an inotify instance is available (they are counted per user, and a container cannot raise the limit)."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.inotify_init1(os.O_CLOEXEC)
    except (OSError, AttributeError):
        return None
    if fd < 0:
        return False
    os.close(fd)
    return True
