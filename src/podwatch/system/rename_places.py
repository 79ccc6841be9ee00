"""Finds places for podwatch's files from which a rename to and from the trainer's directories works.

A run's paths may be on several filesystems (``trainer.checkpoint_dir`` on another volume, output_dir a mount of its
own), and a directory from an overlay's lower layer cannot be renamed at all. This is found out by trying, never by
comparing devices. Everything here blocks, and works through ``workspace.tree``: no link is followed, and a directory of
podwatch that another user made or replaced raises RootReplaced.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from podwatch.domain.errors import HostError
from podwatch.system.files import DIRECTORY_FLAGS, rename_at
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import HIDDEN, PinnedTree, RootReplaced

_PARTIAL = ".partial"
_ELSEWHERE = (errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors after which the next home is tried."""


def corners(path: Path, workspace: Workspace, what: str) -> tuple[Path, ...]:
    """Directories called ``what`` for ``path``, in the order to try: podwatch's own, beside the configured root of
    ``path``, in that root, beside ``path``."""
    found = [workspace.movable / what]
    root = workspace.root_of(path)
    if root is not None:
        found += [root.parent / HIDDEN / root.name / what, root / HIDDEN / what]
    found.append(path.parent / HIDDEN / what)
    return tuple(dict.fromkeys(found))


def corners_of(workspace: Workspace, what: str) -> tuple[Path, ...]:
    """Every such directory that exists and is podwatch's: its own first."""
    found: list[Path] = []
    for root in workspace.roots:
        found += corners(root / "any", workspace, what)
    for root in workspace.roots:
        found += _below(workspace.tree, root, what)
    return tuple(p for p in dict.fromkeys(found) if _is_ours(workspace.tree, p))


def _below(tree: PinnedTree, root: Path, what: str) -> Iterator[Path]:
    """Up to two levels below a root. A hint only: ownership is checked before use."""
    tail = f"{HIDDEN}/{what}"
    with contextlib.suppress(OSError, RootReplaced), tree.directory(root) as fd:
        for first in sorted(os.listdir(fd)):  # noqa: PTH208 - a descriptor
            if _exists(fd, f"{first}/{tail}"):
                yield root / first / HIDDEN / what
            try:
                below = os.open(first, DIRECTORY_FLAGS, dir_fd=fd)
            except OSError:
                continue
            try:
                for second in sorted(os.listdir(below)):  # noqa: PTH208
                    if _exists(below, f"{second}/{tail}"):
                        yield root / first / second / HIDDEN / what
            except OSError:
                continue
            finally:
                os.close(below)


def _exists(directory: int, relative: str) -> bool:
    try:
        os.stat(relative, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return True


def _is_ours(tree: PinnedTree, path: Path) -> bool:
    try:
        return tree.is_directory(path)
    except (OSError, RootReplaced):
        return False


def reachable(tree: PinnedTree, candidates: Sequence[Path], place: Path) -> Path:
    """The first candidate from which a directory can be renamed into ``place``, an existing directory. Creates it if it
    does not exist. Raises HostError."""
    refused = ""
    for candidate in candidates:
        before = tree.is_directory(candidate)
        try:
            tree.make(candidate)
            if tree.can_rename(candidate, place):
                return candidate
        except OSError as error:
            refused = refused or f": {error.strerror}"
        if not before:
            drop_empty(tree, candidate)
    raise HostError(
        f"podwatch cannot move a directory there by a rename{refused}",
        where=str(place),
        fix="make it writable and not full, or choose another directory with --to",
    )


def drop_empty(tree: PinnedTree, directory: Path) -> None:
    """Remove podwatch's empty directory, and the hidden one above it if that is empty too."""
    with contextlib.suppress(OSError, HostError):
        tree.rmdir(directory)
        while (directory := directory.parent).name == HIDDEN or directory.parent.name == HIDDEN:
            tree.rmdir(directory)


def move_aside(tree: PinnedTree, source: Path, homes: Sequence[Path], folder: str, name: str) -> Path:
    """Rename ``source`` to ``<home>/<folder>/<name>`` in the first home where that works; returns its new path. A link
    is moved itself.

    A repeated call after a crash continues. Raises FileNotFoundError where the source is gone, FileExistsError where
    both it and its moved copy exist, OSError (EXDEV: no home works; ELOOP or ENOTDIR: a link on the way).
    """
    half = next((h for h in homes if tree.lstat(h / folder / (name + _PARTIAL)) is not None), None)
    if half is not None:
        return _piecewise(tree, source, half / folder / name)
    with tree.parent(source) as (fd, last):
        status = os.stat(last, dir_fd=fd, follow_symlinks=False)  # FileNotFoundError: nothing to do
    taken = next((h / folder / name for h in homes if tree.lstat(h / folder / name) is not None), None)
    if taken is not None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(source), None, str(taken))
    across = OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source))
    for move in (_whole, _piecewise) if stat.S_ISDIR(status.st_mode) else (_whole,):
        for home in homes:
            try:
                tree.make(home / folder)
                return move(tree, source, home / folder / name)
            except OSError as error:
                if error.errno not in _ELSEWHERE:
                    raise
                across = across if error.errno == errno.EXDEV else error
            with contextlib.suppress(OSError, HostError):
                tree.rmdir(home / folder)
                drop_empty(tree, home)
    raise across


def _whole(tree: PinnedTree, source: Path, target: Path) -> Path:
    if not tree.rename(source, target):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
    tree.sync(target.parent)
    return target


def _piecewise(tree: PinnedTree, source: Path, target: Path) -> Path:
    """A directory from an overlay's lower layer cannot be renamed; its contents can, file by file. The copy gets its
    name only when it is whole."""
    partial = target.with_name(target.name + _PARTIAL)
    made = tree.lstat(partial) is None
    try:
        with tree.parent(source) as (source_fd, name), tree.parent(partial, create=True) as (target_fd, new_name):
            _pour(source_fd, name, target_fd, new_name)
    except OSError:
        if made:
            with contextlib.suppress(OSError):
                tree.rmdir(partial)  # not even the first file could be moved: nothing was changed
        raise
    tree.rename(partial, target)
    tree.sync(target.parent)
    return target


def _pour(source_fd: int, name: str, target_fd: int, new_name: str) -> None:
    """Move the contents of directory ``name`` into ``new_name``, which gets its owner, mode and times at the end. Works
    on open directories: a concurrent replacement cannot lead elsewhere."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(new_name, 0o700, dir_fd=target_fd)
    try:
        source = os.open(name, DIRECTORY_FLAGS, dir_fd=source_fd)
    except FileNotFoundError:
        return  # all of it had been moved
    try:
        target = os.open(new_name, DIRECTORY_FLAGS, dir_fd=target_fd)
        try:
            status = os.fstat(source)
            for entry in sorted(os.listdir(source)):  # noqa: PTH208 - a descriptor
                try:
                    rename_at(source, entry, target, entry)
                except OSError as error:
                    if error.errno not in (errno.EEXIST, errno.EXDEV) or not _is_directory(source, entry):
                        raise
                    _pour(source, entry, target, entry)
            with contextlib.suppress(OSError):
                os.fchown(target, status.st_uid, status.st_gid)
                os.fchmod(target, stat.S_IMODE(status.st_mode))
                os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
        finally:
            os.close(target)
    finally:
        os.close(source)
    os.rmdir(name, dir_fd=source_fd)


def _is_directory(directory: int, name: str) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
