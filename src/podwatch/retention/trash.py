"""What lies in trash and quarantine, and how a path of the trainer gets there (DESIGN section 6; promises 8 and 9).

An entry of the trash is called ``<intent id>.<step>.<n>``: the rename is itself the removal's intent, and needs
neither a new directory nor space, so it works on a disk that is 100 % full.
"""

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.domain.checkpoint import Completeness
from podwatch.domain.errors import HostError
from podwatch.judgement.retention import QuarantineEntry
from podwatch.system.aside import corners_of
from podwatch.system.files import open_dir_below, open_root, read_small
from podwatch.system.workspace import Workspace

HIDDEN = ".podwatch"


@dataclass(frozen=True, slots=True)
class Moved:
    """A rename that was done: ``name`` is the entry's name in the trash."""

    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class Located:
    """A path below one of the allowed roots: the real root and the plain relative rest."""

    root: Path
    relative: str

    @property
    def parent(self) -> str:
        return self.relative.rpartition("/")[0]

    @property
    def name(self) -> str:
        return self.relative.rpartition("/")[2]


def locate(path: Path, roots: Sequence[Path]) -> Located:
    """Find the root that ``path`` lies below. Raises HostError when it lies below none, is a root itself, or is not
    plain.
    """
    if ".." in path.parts or not path.is_absolute():
        raise HostError("not a plain absolute path", where=str(path), fix="this is a bug: please report it")
    for root in roots:
        for spelled in (root, Path(os.path.realpath(root))):
            if path != spelled and path.is_relative_to(spelled):
                return Located(Path(os.path.realpath(root)), str(path.relative_to(spelled)))
    raise HostError(
        "refuses to remove a path outside the configured directories",
        where=str(path),
        fix="name its directory in output_dir or the layout's roots if it is the trainer's",
    )


def inode_of(path: Path, roots: Sequence[Path]) -> tuple[int, int] | None:
    """(device, inode) of what is called ``path`` now, symlinks not followed; None if nothing is."""
    try:
        with _parent(locate(path, roots)) as (fd, name):
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return (status.st_dev, status.st_ino)


def move_to_trash(
    path: Path, roots: Sequence[Path], trash: Path, name: str, *, expected: tuple[int, int] | None = None
) -> Moved | None:
    """Rename ``path`` into ``trash`` as ``name``. A symlink is moved itself, never what it points to.

    None when it is gone already, or is not what ``expected`` (device, inode) says. Raises OSError (EXDEV where
    output_dir cannot be renamed from; ELOOP or ENOTDIR when a symlink stands in the way) and HostError.
    """
    trash_fd = open_root(trash)
    try:
        with _parent(locate(path, roots)) as (fd, leaf):
            if expected is not None:
                status = os.stat(leaf, dir_fd=fd, follow_symlinks=False)
                if (status.st_dev, status.st_ino) != expected:
                    return None
            try:
                if _exists(name, trash_fd):
                    name = f"{name}.{secrets.token_hex(4)}"
                os.rename(leaf, name, src_dir_fd=fd, dst_dir_fd=trash_fd)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                name = f"{name}.{secrets.token_hex(4)}"
                os.rename(leaf, name, src_dir_fd=fd, dst_dir_fd=trash_fd)
    except FileNotFoundError:
        return None
    finally:
        os.close(trash_fd)
    return Moved(path, name)


def other_trashes(path: Path, roots: Sequence[Path]) -> tuple[Path, ...]:
    """Where ``path`` may go if a rename into podwatch's own trash fails (EXDEV): its root is another volume, or it lies
    on a mount below it. In the order in which they are to be tried: beside the root, in it, beside ``path``."""
    root = locate(path, roots).root
    if root.name == "quarantine":
        return (root.parent / "trash",)  # our own, on whichever file system
    beside = root.parent / HIDDEN / root.name / "trash"
    return (beside, root / HIDDEN / "trash", path.parent / HIDDEN / "trash")


def trashes_below(roots: Sequence[Path]) -> tuple[Path, ...]:
    """Every such directory that exists: what a crash left there is swept at the next start. Blocks."""
    found: list[Path] = []
    for root in roots:
        found.append(root.parent / HIDDEN / root.name / "trash")
        with contextlib.suppress(OSError):
            found.append(root / HIDDEN / "trash")
            found.extend(sorted(root.glob(f"*/{HIDDEN}/trash")))
            found.extend(sorted(root.glob(f"*/*/{HIDDEN}/trash")))
    # os.path, because Path.is_dir raises where a directory above may not be entered
    return tuple(p for p in dict.fromkeys(found) if os.path.isdir(p) and not os.path.islink(p))  # noqa: PTH112, PTH114


def trash_entries(trash: Path) -> tuple[str, ...]:
    """Names in the trash, oldest intent first; empty where there is no trash."""
    try:
        names = os.listdir(trash)  # noqa: PTH208 - names, not paths
    except FileNotFoundError:
        return ()
    return tuple(sorted(names, key=_by_number))


def tree_bytes(path: Path) -> int:
    """Bytes on disk below ``path`` (hard links and sparse files as the disk counts them once per name). Blocks."""
    total = 0
    try:
        status = path.lstat()
    except OSError:
        return 0
    total += status.st_blocks * 512
    if stat.S_ISDIR(status.st_mode):
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            for entry in entries:
                total += tree_bytes(Path(entry.path))
    return total


def quarantine_entries(
    workspace: Workspace,
    *,
    now_wall: float,
    keep_seconds: float,
    needed: Callable[[int], bool],
    roots: Sequence[Path] = (),
) -> tuple[QuarantineEntry, ...]:
    """Everything set aside, also on the file systems of ``roots``, oldest first, as each ``index.json`` tells (its
    writer is the recovery room).

    ``needed(step)`` says whether a complete set of that step must stay: its new line has no verified set beyond it
    yet (promise 2). An entry without a readable index is always needed. Blocks.
    """
    found: list[Path] = []
    for home in corners_of(workspace, roots, "quarantine"):
        with contextlib.suppress(OSError):
            found += [p for p in home.iterdir() if p.name.isdecimal() and p.is_dir() and not p.is_symlink()]
    entries = []
    for path in sorted(found, key=lambda p: int(p.name)):
        read, device = _index(path), _device(path)
        if read is None:
            entries.append(QuarantineEntry(str(path), -1, tree_bytes(path), expired=False, needed=True, device=device))
            continue
        wall, steps = read
        must_stay = any(whole and needed(step) for step, whole in steps.items())
        step = max(steps, default=-1)
        old = now_wall - wall >= keep_seconds
        entries.append(QuarantineEntry(str(path), step, tree_bytes(path), old, must_stay, device))
    return tuple(entries)


def _device(path: Path) -> int:
    try:
        return path.lstat().st_dev
    except OSError:
        return 0


def _index(path: Path) -> tuple[float, dict[int, bool]] | None:
    """When it was set aside, and which steps lie in it: True for those that are complete."""
    try:
        index = json.loads(read_small(path / "index.json"))
        steps = {int(step): str(state) == Completeness.COMPLETE for step, state in index["steps"].items()}
        return float(index["wall"]), steps
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _by_number(name: str) -> tuple[int, str]:
    head = name.split(".", 1)[0]
    return (int(head) if head.isdigit() else 0, name)


def _exists(name: str, directory_fd: int) -> bool:
    try:
        os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


class _parent:  # noqa: N801 - reads as a context manager function
    """The directory that holds a located path, opened without following a symlink; and the last segment."""

    def __init__(self, located: Located) -> None:
        self._located = located
        self._fd = -1

    def __enter__(self) -> tuple[int, str]:
        root_fd = open_root(self._located.root)
        try:
            self._fd = open_dir_below(root_fd, self._located.parent)
        finally:
            os.close(root_fd)
        return self._fd, self._located.name

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
