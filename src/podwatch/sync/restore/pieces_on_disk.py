"""The files of a restore on this disk, piece by piece. Nothing found on disk is trusted: every piece is hashed before
it counts."""

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence

from podwatch.domain.errors import HostError
from podwatch.domain.manifest import ManifestFile, ManifestSymlink
from podwatch.stores.base import Take
from podwatch.stores.part_reader import part_spans
from podwatch.system.files import open_below, open_dir_below, start_writeback
from podwatch.system.pinned_directories import Pin, open_pinned, open_regular

_BLOCK = 1 << 20


class StagedFile:
    """Used by one thread; other threads may have the same file open for other pieces."""

    def __init__(self, file: ManifestFile, root: int, part_size: int) -> None:
        self.file, self._root = file, root
        self.spans = part_spans(file.size, part_size)
        self._fd = -1

    def __enter__(self) -> "StagedFile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def prepare(self) -> bool:
        """Create or open the file at its full size; whether it was there before, so that pieces of it may be right.
        Call it before any piece is written."""
        folder = self.file.path.rpartition("/")[0]
        os.close(open_dir_below(self._root, folder, create=True))
        had = self._open(os.O_CREAT)
        os.ftruncate(self._fd, self.file.size)
        return had > 0

    def open(self) -> None:
        """Open the file after ``prepare``."""
        self._open(0)

    def _open(self, create: int) -> int:
        """Returns the file's size."""
        self._fd = open_below(self._root, self.file.path, os.O_RDWR | create | os.O_NONBLOCK, 0o600)
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise OSError(errno.EINVAL, "not a plain file of ours", self.file.path)
        return found.st_size

    def good(self, number: int) -> bool:
        """Does this piece match the manifest already?"""
        return _sha1_of(self._fd, self.spans[number]) == self.file.parts_sha1[number]

    def writer(self, number: int) -> Take:
        """A function that writes blocks one after the other."""
        position = self.spans[number][0]

        def write(data: memoryview) -> None:
            nonlocal position
            done = 0
            while done < len(data):
                done += os.pwrite(self._fd, data[done:] if done else data, position + done)
            position += len(data)

        return write

    def written(self, number: int) -> None:
        """Start writing the piece to disk now, so that the final sync is short."""
        start_writeback(self._fd, *self.spans[number])

    def complete(self) -> None:
        """Call when every piece is right. Sets mode and time as recorded, without setuid, setgid or capabilities."""
        os.fchmod(self._fd, self.file.mode & 0o777)
        os.utime(self._fd, ns=(self.file.mtime_ns, self.file.mtime_ns))
        if self.file.size > _BLOCK:
            os.fsync(self._fd)  # small ones are synced together at the end


def open_there(pins: Sequence[Pin], root: str, file: ManifestFile) -> int:
    """The file at its place below ``root``, opened without following a link. -1 if it is not there, or is no regular
    file."""
    try:
        with _folder(pins, root, file.path) as (directory, name):
            return open_regular(directory, name)
    except (OSError, HostError):
        return -1


def link_there(pins: Sequence[Pin], root: str, link: ManifestSymlink) -> bool:
    """Is the link below ``root`` as the manifest has it?"""
    try:
        with _folder(pins, root, link.path) as (directory, name):
            return os.readlink(name, dir_fd=directory) == link.target
    except (OSError, HostError):
        return False


@contextlib.contextmanager
def _folder(pins: Sequence[Pin], root: str, path: str) -> Iterator[tuple[int, str]]:
    """``path`` starts with the part's name, which is not in ``root``."""
    folder, _, name = path.partition("/")[2].rpartition("/")
    top = open_pinned(pins, root)
    try:
        directory = open_dir_below(top, folder)
    finally:
        os.close(top)
    try:
        yield directory, name
    finally:
        os.close(directory)


def same_on_disk(pins: Sequence[Pin], root: str, file: ManifestFile) -> bool:
    """Does the file below ``root`` have this size and mtime? Cheap; its bytes are not checked."""
    descriptor = open_there(pins, root, file)
    if descriptor < 0:
        return False
    try:
        found = os.fstat(descriptor)
        return (found.st_size, found.st_mtime_ns) == (file.size, file.mtime_ns)
    finally:
        os.close(descriptor)


def hash_in_place(pins: Sequence[Pin], root: str, file: ManifestFile, part_size: int, number: int) -> str:
    """The SHA-1 of one piece of the file below ``root``; empty where it cannot be read whole."""
    descriptor = open_there(pins, root, file)
    if descriptor < 0:
        return ""
    try:
        return _sha1_of(descriptor, part_spans(file.size, part_size)[number])
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _sha1_of(descriptor: int, span: tuple[int, int]) -> str:
    """Of one piece; empty where the file ends before it."""
    position, left = span
    digest = hashlib.sha1(usedforsecurity=False)
    while left and (data := os.pread(descriptor, min(_BLOCK, left), position)):
        digest.update(data)
        position, left = position + len(data), left - len(data)
    return "" if left else digest.hexdigest()
