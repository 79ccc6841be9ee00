"""Directories and files by descriptor: opened segment by segment, no link followed, owners checked on the way.

The functions under ``pinned_directories.py``, which callers use. They block, and may be called from several threads.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from podwatch.domain.errors import HostError
from podwatch.system.files import DIRECTORY_FLAGS
from podwatch.system.follow import follow
from podwatch.system.rights import Rights, applied

HIDDEN = ".podwatch"
"""Name of every directory of podwatch beside or in a trainer's directory: layouts ignore it."""
STAGING = ".podwatch-staging"
"""Also podwatch's: the staging directory of a restore to a directory of the operator's choice."""
USER = "user"
"""In podwatch's directory beside a root: the one directory that belongs to the trainer's user."""
KEPT = frozenset({"quarantine", "trash", "staging", "uploading"})
"""The directories in it. What is in them is, or becomes, the trainer's."""
NODES = "nodes"
"""podwatch's directory for a run over several nodes: what they report, and a directory for each but rank 0."""
_RECORD = "run.json"
_LOCKS = ("guard.lock", "lock")
"""Of the daemon, and of a supervisor: the first thing that is made there where the directory has another name too."""
_LOOKED_AT = 1000
"""Limit of directory entries that are examined to decide whether podwatch made it."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_also_ours: set[tuple[int, int]] = set()
"""(device, uid) that a filesystem shows for files we create: found out once for each, by creating a file."""


class RootReplaced(HostError):  # noqa: N818 - reads better at the raise site
    """A root is not the directory that was pinned, or not one that podwatch may work in. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a path named when it was judged. Valid within one process and one mount."""

    device: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Identity":
        return cls(status.st_dev, status.st_ino)


def open_regular(directory: int, name: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a regular file in a directory, without following a link and without blocking. Raises OSError."""
    fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, mode, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return fd


def own_segments(parts: tuple[str, ...]) -> int:
    """How many segments below podwatch's directory beside a root are opened by podwatch itself: up to ``USER``, which
    is never the first one (that is the name of the root)."""
    return next((n + 1 for n, name in enumerate(parts) if n and name == USER), len(parts))


def check_users(fd: int, path: Path, rights: Rights | None) -> None:
    """Raises RootReplaced unless the directory ``USER`` belongs to the trainer's user. One that podwatch made, which no
    other user can have written to, is given to that user with the empty directories in it."""
    status = os.fstat(fd)
    if rights is None:
        check_owner(fd, fd, path)
        return
    if status.st_uid == rights.uid or (status.st_dev, status.st_uid) in _also_ours:
        return
    if status.st_uid == os.geteuid():
        for name in os.listdir(fd):
            with contextlib.suppress(OSError):
                below = os.open(name, DIRECTORY_FLAGS, dir_fd=fd)
                os.fchown(below, rights.uid, rights.gid)
                os.close(below)
        with contextlib.suppress(OSError):
            os.fchown(fd, rights.uid, rights.gid)
        if os.fstat(fd).st_uid == rights.uid:
            return
    raise RootReplaced(
        f"this directory belongs to user {status.st_uid}, and podwatch works there as user {rights.uid}",
        where=str(path),
        fix=f"chown -R {rights.uid} {path}",
    )


def check_ours(fd: int, path: Path, _: Rights | None = None) -> None:
    """Raises RootReplaced unless the directory belongs to podwatch (or root) and no other user can write to it. Removes
    the write permission of group and others."""
    check_owner(fd, fd, path)
    status = os.fstat(fd)
    if status.st_mode & OTHERS_WRITE:
        try:
            os.fchmod(fd, stat.S_IMODE(status.st_mode) & ~OTHERS_WRITE)
        except OSError as error:
            raise RootReplaced(
                "other users can write to podwatch's own directory", where=str(path), fix="chmod go-w it"
            ) from error


def check_made_by_us(fd: int, path: Path) -> None:
    """``check_ours`` for a directory that its parent's owner could have replaced by another root-owned one, by a
    rename: its contents must be podwatch's. Changes nothing before that is known."""
    check_owner(fd, fd, path)
    if not _looks_made_by_us(fd):
        raise RootReplaced(
            "this directory has podwatch's name, but contains nothing that podwatch made",
            where=str(path),
            fix="find out which user replaced it, and move it away or restore the original",
        )
    check_ours(fd, path)


def check_owner(fd: int, directory: int, path: Path) -> None:
    """``fd`` is ``directory`` or is in it."""
    status = os.fstat(fd)
    if status.st_uid in (0, os.geteuid()) or (status.st_dev, status.st_uid) in _also_ours:
        return
    if status.st_uid == _our_uid(directory):
        _also_ours.add((status.st_dev, status.st_uid))
        return
    raise RootReplaced(
        f"podwatch's own {'directory' if stat.S_ISDIR(status.st_mode) else 'file'} belongs to user {status.st_uid}",
        where=str(path),
        fix=f"move it away, or chown it to user {os.geteuid()} if podwatch made it as another user",
    )


def _looks_made_by_us(fd: int) -> bool:
    """Empty, or with an entry that podwatch creates in its directories."""
    names = os.listdir(fd)[:_LOOKED_AT]
    bare = True
    for name in names:
        if name.startswith(".podwatch-"):
            return True
        try:
            below = os.open(name, DIRECTORY_FLAGS, dir_fd=fd)
        except OSError:
            bare = False
            continue
        try:
            inside = os.listdir(below)[:_LOOKED_AT]  # noqa: PTH208
        finally:
            os.close(below)
        if any(entry in (USER, NODES, *_LOCKS) or entry.startswith(_RECORD) for entry in inside):
            return True
        bare = bare and not inside
    return bare


def make_root(path: Path, rights: Rights | None) -> None:
    """Create a directory of the trainer's that is configured, and what is missing above it. Where its user cannot
    create it (its parent is root's), no other user can replace it either: it is made and given to that user."""
    if not os.path.lexists(path.parent):
        make_root(path.parent, rights)
    parent, _ = open_path(path.parent)
    try:
        try:
            with applied(rights):
                os.mkdir(path.name, 0o755, dir_fd=parent)
                return
        except PermissionError:
            if rights is None:
                raise
        os.mkdir(path.name, 0o755, dir_fd=parent)
        fd = os.open(path.name, DIRECTORY_FLAGS, dir_fd=parent)
        try:
            if not os.listdir(fd) and os.fstat(fd).st_uid == os.geteuid():  # noqa: PTH208 - a descriptor
                os.fchown(fd, rights.uid, rights.gid)
        finally:
            os.close(fd)
    except FileExistsError:
        return
    finally:
        os.close(parent)


def is_own_and_guarded(path: Path) -> bool:
    """A directory of podwatch's user (or root) in one where no other user can replace it."""
    try:
        found, above = path.lstat(), path.parent.stat()
    except OSError:
        return False
    guarded = not above.st_mode & OTHERS_WRITE or bool(above.st_mode & stat.S_ISVTX)
    return stat.S_ISDIR(found.st_mode) and {found.st_uid, above.st_uid} <= {0, os.geteuid()} and guarded


def open_or_make(directory: int, name: str, create: bool, mode: int) -> int:
    """An existing directory is not created again: a full disk refuses that."""
    try:
        return os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
    except FileNotFoundError:
        if not create:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=directory)
    return os.open(name, DIRECTORY_FLAGS, dir_fd=directory)


def open_path(path: Path) -> tuple[int, frozenset[int]]:
    """Open a directory by an absolute path, segment by segment; also returns the owners (root and podwatch left out) of
    the links on the way. The last segment may only be a link of root's or podwatch's. Raises RootReplaced, OSError."""
    owners: set[int] = set()
    with contextlib.closing(follow(str(path))) as steps:
        for step in steps:
            if step.is_link and step.status.st_uid not in (0, os.geteuid()):
                if step.last:
                    raise RootReplaced(
                        f"is a symbolic link of user {step.status.st_uid}",
                        where=str(path),
                        fix="remove the link, or configure its target directory",
                    )
                owners.add(step.status.st_uid)
            elif step.last and not step.is_link:
                return os.open(".", DIRECTORY_FLAGS, dir_fd=step.place), frozenset(owners)
    return os.open("/", DIRECTORY_FLAGS), frozenset(owners)


def _our_uid(directory: int) -> int:
    """The uid that our files get here: it differs from our own on NFS with root squashed, and on some FUSE mounts.
    -1 where it cannot be found out."""
    name = f".podwatch-uid-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    except OSError:
        return -1
    try:
        uid = os.fstat(fd).st_uid
        return -1 if uid == 0 else uid
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)


def measure(directory: int, name: str, seen: list[int], entries: int, depth: int) -> None:
    """Add up [bytes, entries]. Continues after unreadable entries."""
    for status in walk(directory, name, depth):
        seen[0] += status.st_blocks * 512
        seen[1] += 1
        if seen[1] >= entries:
            return


def walk(directory: int, name: str, depth: int) -> Iterator[os.stat_result]:
    """The status of an entry and of all below it; a link counts as itself. Continues after unreadable entries."""
    try:
        status = lstat_at(directory, name)
    except OSError:
        return
    yield status
    if not stat.S_ISDIR(status.st_mode) or depth == 0:
        return
    try:
        fd = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
    except OSError:
        return
    try:
        for entry in os.listdir(fd):  # noqa: PTH208
            yield from walk(fd, entry, depth - 1)
    except OSError:
        return
    finally:
        os.close(fd)


def lstat_at(directory: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=directory, follow_symlinks=False)
