"""Where something of ours may lie so that it can be renamed from and to a place of the trainer's.

A run's paths may lie on several filesystems (``trainer.checkpoint_dir`` on another volume, output_dir a mount of its
own), and a directory from an overlay's lower layer cannot be renamed at all. All of it is found out by trying, never by
comparing devices (DESIGN section 6). Everything here blocks.
"""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from podwatch.domain.errors import HostError
from podwatch.system.files import can_rename, fsync_dir, rename_noreplace
from podwatch.system.pinned import HIDDEN
from podwatch.system.workspace import Workspace

_PARTIAL = ".partial"
_ELSEWHERE = (errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS)
"""What another home may still do."""


def corners(path: Path, workspace: Workspace, roots: Sequence[Path], what: str) -> tuple[Path, ...]:
    """Directories called ``what`` for ``path``, in the order in which they are to be tried: our own, beside the
    configured root that ``path`` lies in, in that root, beside ``path``."""
    found = [workspace.movable / what]
    root = next((r for r in (*roots, workspace.output_dir) if r in path.parents), None)
    if root is not None:
        found += [root.parent / HIDDEN / root.name / what, root / HIDDEN / what]
    found.append(path.parent / HIDDEN / what)
    return tuple(dict.fromkeys(found))


def corners_of(workspace: Workspace, roots: Sequence[Path], what: str) -> tuple[Path, ...]:
    """Every such directory that exists: our own first, if it does."""
    found = list(corners(workspace.output_dir / "any", workspace, (), what))
    for root in roots:
        found += corners(root / "any", workspace, roots, what)
    for root in (workspace.output_dir, *roots):
        with contextlib.suppress(OSError):
            found.extend(sorted(root.glob(f"*/{HIDDEN}/{what}")))
            found.extend(sorted(root.glob(f"*/*/{HIDDEN}/{what}")))
    # os.path, because Path.is_dir raises where a directory above may not be entered
    return tuple(p for p in dict.fromkeys(found) if os.path.isdir(p) and not os.path.islink(p))  # noqa: PTH112, PTH114


def reachable(candidates: Sequence[Path], place: Path) -> Path:
    """The first candidate from which a directory can be renamed into ``place``, which need not exist yet: what is made
    below its nearest ancestor is on the same filesystem. Made if it is not there. Raises HostError."""
    while not place.is_dir() and place != place.parent:
        place = place.parent
    refused = ""
    for candidate in candidates:
        before = candidate.is_dir()
        try:
            candidate.mkdir(parents=True, exist_ok=True, mode=0o700)
            if can_rename(candidate, place):
                return candidate
        except OSError as error:
            refused = refused or f": {error.strerror}"
        if not before:
            drop_empty(candidate)
    raise HostError(
        f"nothing can be put there by a rename{refused}",
        where=str(place),
        fix="make it writable and not full, or choose another directory with --to",
    )


def drop_empty(directory: Path) -> None:
    """Leave nothing of ours behind that holds nothing: the directory, and our hidden one above it."""
    with contextlib.suppress(OSError):
        directory.rmdir()
        while (directory := directory.parent).name == HIDDEN or directory.parent.name == HIDDEN:
            directory.rmdir()


def move_aside(source: Path, homes: Sequence[Path], folder: str, name: str) -> Path:
    """Rename ``source`` to ``<home>/<folder>/<name>`` in the first home that takes it; returns where it is now.

    Done again after a crash it goes on. Raises FileNotFoundError where the source is gone, FileExistsError where both
    it and its copy aside are there, OSError (EXDEV) where no home takes it.
    """
    begun = next((h for h in homes if os.path.lexists(h / folder / (name + _PARTIAL))), None)
    if begun is not None:
        return _piecewise(source, begun / folder / name)
    directory = stat.S_ISDIR(os.lstat(source).st_mode)  # FileNotFoundError: nothing to do
    taken = next((h / folder / name for h in homes if os.path.lexists(h / folder / name)), None)
    if taken is not None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(source), None, str(taken))
    across = OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source))
    for move in (_whole, _piecewise) if directory else (_whole,):
        for home in homes:
            try:
                (home / folder).mkdir(parents=True, exist_ok=True)
                return move(source, home / folder / name)
            except OSError as error:
                if error.errno not in _ELSEWHERE:
                    raise
                across = across if error.errno == errno.EXDEV else error
            with contextlib.suppress(OSError):
                (home / folder).rmdir()
                drop_empty(home)
    raise across


def _whole(source: Path, target: Path) -> Path:
    rename_noreplace(source, target)
    fsync_dir(target.parent)
    return target


def _piecewise(source: Path, target: Path) -> Path:
    """A directory from an overlay's lower layer cannot be renamed; what is in it can, file by file. The copy has its
    name only when it is whole."""
    partial = target.with_name(target.name + _PARTIAL)
    made = not partial.exists()
    try:
        _pour(source, partial)
    except OSError:
        if made:
            with contextlib.suppress(OSError):
                partial.rmdir()  # not even the first file would go: nothing was done
        raise
    rename_noreplace(partial, target)
    fsync_dir(target.parent)
    return target


def _pour(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    try:
        entries = sorted(os.scandir(source), key=lambda e: e.name)
    except FileNotFoundError:
        return  # all of it had been moved
    status = os.lstat(source)
    for entry in entries:
        here, there = Path(entry.path), target / entry.name
        try:
            rename_noreplace(here, there)
        except FileExistsError:
            if not entry.is_dir(follow_symlinks=False):
                raise
            _pour(here, there)
        except OSError as error:
            if error.errno != errno.EXDEV or not entry.is_dir(follow_symlinks=False):
                raise
            _pour(here, there)
    with contextlib.suppress(OSError):
        shutil.copystat(source, target)
        os.chown(target, status.st_uid, status.st_gid)
    source.rmdir()
