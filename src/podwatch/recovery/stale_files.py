"""Stale files of a killed vLLM in /dev/shm and /tmp, on which the next start hangs: find and remove them.

They are outside every configured root. So podwatch removes one only if it belongs to the user that training runs as, is
not older than our last start, and no living process has it open or mapped. If that cannot be seen, it removes nothing.
"""

import os
import pwd
import shutil
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from podwatch.system import procfs
from podwatch.system.rights import applied, rights_of

PLACES: Final[list[tuple[Path, str]]] = [
    (Path("/dev/shm"), "vllm-*"),
    (Path("/tmp"), "vllm-*"),
]
"""Not torchrun's log directories ``/tmp/torchelastic_*``: no start waits for them, and a living torchrun keeps none of
them open."""


@dataclass(frozen=True, slots=True)
class StaleFiles:
    """``stale`` can be removed, ``held`` is in use. ``unseen``: number of processes whose files could not be read."""

    stale: tuple[Path, ...] = ()
    held: tuple[Path, ...] = ()
    unseen: int = 0


def owner_id(user: str) -> int:
    """Return the uid that training runs as; -1 for a user that does not exist (the start itself reports that)."""
    if not user:
        return os.geteuid()
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return -1


def find_stale(uid: int, since: float, places: Sequence[tuple[Path, str]] | None = None) -> StaleFiles:
    """Find stale files. ``since``: epoch seconds of our last start. Blocks: reads all of /proc if any file matches."""
    mine = [
        path for root, pattern in (PLACES if places is None else places) for path in _ours(root, pattern, uid, since)
    ]
    if not mine:
        return StaleFiles()
    used, unseen = _in_use()
    held = tuple(path for path in mine if any(name == str(path) or name.startswith(f"{path}/") for name in used))
    stale = () if unseen else tuple(path for path in mine if path not in held)
    return StaleFiles(stale, held, unseen)


def remove_stale(paths: Iterable[Path], uid: int) -> tuple[Path, ...]:
    """Remove ``paths``, which ``find_stale`` has just found, with the rights of that user; return those that are
    gone. Blocks. Never raises for a file that cannot be removed."""
    with applied(rights_of(uid) if os.geteuid() == 0 and uid > 0 else None):
        return _removed(paths)


def _removed(paths: Iterable[Path]) -> tuple[Path, ...]:
    gone = []
    for path in paths:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)  # does not follow links
            else:
                path.unlink()
        except (OSError, RecursionError):  # a tree that is thousands deep
            continue
        gone.append(path)
    return tuple(gone)


def _ours(root: Path, pattern: str, uid: int, since: float) -> Iterable[Path]:
    try:
        entries = sorted(root.glob(pattern))
    except OSError:
        return
    for path in entries:
        try:
            seen = path.lstat()
        except OSError:
            continue
        # Both times: one alone can be set back or copied; a file of an older run has neither.
        young = seen.st_ctime >= since and seen.st_mtime >= since
        if seen.st_uid == uid and young and not stat.S_ISLNK(seen.st_mode):
            yield path


def _in_use() -> tuple[set[str], int]:
    """Return the paths that living processes have open, mapped, or bound as a socket; and how many processes could not
    be read."""
    used: set[str] = set()
    unseen = 0
    for pid in procfs.all_pids():
        status = procfs.read_stat(pid)
        if status is None or status.state in "ZXx":
            continue
        if not procfs.command(pid) and not procfs.hangs(pid):
            continue  # a kernel thread
        links, maps = procfs.open_files(pid), procfs.mapped_files(pid)
        if links is None or maps is None:
            # The machine's init may be unreadable even for root, and uses none of these files.
            init = pid == 1 and not status.name.startswith("python")
            unseen += not init and procfs.read_stat(pid) is not None
            continue
        used.update(links.values())
        used.update(maps)
    try:
        sockets = Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]
    except OSError:
        sockets = []
    used.update(line.split(maxsplit=7)[7] for line in sockets if len(line.split(maxsplit=7)) == 8)
    return used, unseen
