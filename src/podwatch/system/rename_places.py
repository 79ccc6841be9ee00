"""Finds places for podwatch's files from which a rename to and from the trainer's directories works.

A run's paths may be on several filesystems (``trainer.checkpoint_dir`` on another volume, output_dir a mount of its
own), and a directory from an overlay's lower layer cannot be renamed at all: it is refused. This is found out by
trying, never by comparing devices. Everything here blocks, and works through ``workspace.tree``: no link is followed,
and a directory of podwatch that another user made or replaced raises RootReplaced.
"""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from podwatch.domain.errors import HostError
from podwatch.system.files import DIRECTORY_FLAGS
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import HIDDEN, USER, PinnedTree, RootReplaced

_ELSEWHERE = (errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors after which the next home is tried."""


def corners(path: Path, workspace: Workspace, what: str) -> tuple[Path, ...]:
    """Directories called ``what`` for ``path``, in the order to try: podwatch's own, beside the configured root of
    ``path``, in that root, beside ``path``."""
    found = [workspace.movable / what]
    root = workspace.root_of(path)
    if root is not None:
        found += [root.parent / HIDDEN / root.name / USER / what, root / HIDDEN / what]
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
    """Remove podwatch's empty directory, and those of podwatch above it that are then empty too."""
    with contextlib.suppress(OSError, HostError):
        tree.rmdir(directory)
        while HIDDEN in (directory := directory.parent).parts[-3:]:
            tree.rmdir(directory)


def move_aside(tree: PinnedTree, source: Path, homes: Sequence[Path], folder: str, name: str) -> Path:
    """Rename ``source`` to ``<home>/<folder>/<name>`` in the first home where that works; returns its new path. A link
    is moved itself.

    Raises FileNotFoundError where the source is gone, FileExistsError where both it and its moved copy exist, HostError
    where the kernel renames it into no home, OSError (ELOOP or ENOTDIR: a link on the way).
    """
    with tree.parent(source) as (fd, last):
        os.stat(last, dir_fd=fd, follow_symlinks=False)  # FileNotFoundError: nothing to do
    taken = next((h / folder / name for h in homes if tree.lstat(h / folder / name) is not None), None)
    if taken is not None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(source), None, str(taken))
    refused: OSError | None = None
    for home in homes:
        try:
            tree.make(home / folder)
            return _rename(tree, source, home / folder / name)
        except OSError as error:
            if error.errno not in _ELSEWHERE:
                raise
            refused = error if refused is None or error.errno != errno.EXDEV else refused
        with contextlib.suppress(OSError, HostError):
            tree.rmdir(home / folder)
            drop_empty(tree, home)
    if refused is not None and refused.errno != errno.EXDEV:
        raise refused
    raise HostError(
        "the kernel refuses to rename this path, as it does for a directory of the container's image",
        where=str(source),
        fix="replace it by a copy of itself (cp -a to a new name, remove it, mv the copy to its name), or put"
        " output_dir on a volume",
    )


def _rename(tree: PinnedTree, source: Path, target: Path) -> Path:
    if not tree.rename(source, target):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
    tree.sync(target.parent)
    return target
