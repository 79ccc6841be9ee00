"""The files of a restore on this disk, piece by piece. Nothing found on disk is trusted: every piece is hashed before
it counts."""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence

from podwatch.domain.errors import HostError
from podwatch.domain.manifest import ManifestFile, ManifestSymlink
from podwatch.stores.base import Take
from podwatch.stores.part_reader import new_hash, part_spans
from podwatch.system.files import open_below, open_dir_below, release, reserve, start_writeback
from podwatch.system.pinned_directories import Pin, open_pinned, open_regular

_BLOCK = 1 << 20
_ZEROS = bytes(_BLOCK)


class StagedFile:
    """Used by one thread; other threads may have the same file open for other pieces.

    ``seed`` opens the same file of a local checkpoint that may share pieces with this one (a damaged copy); -1 if there
    is none."""

    def __init__(self, file: ManifestFile, root: int, part_size: int, seed: Callable[[], int] = lambda: -1) -> None:
        self.file, self._root, self._open_seed = file, root, seed
        self.spans = part_spans(file.size, part_size)
        self._fd = -1
        self._seed = -1

    def __enter__(self) -> "StagedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self) -> list[bool]:
        """Create or open the file at its full size, and return for each piece whether anything was written there
        before: if not, it is a hole, which costs neither reading nor writing zeros. Call it before any piece is
        written: neighbours share a block of the disk."""
        folder = self.file.path.rpartition("/")[0]
        os.close(open_dir_below(self._root, folder, create=True))
        had = self._open(os.O_CREAT)
        touched = [self._touched(*span, had) for span in self.spans]
        os.ftruncate(self._fd, self.file.size)
        return touched

    def open(self) -> None:
        """Open the file after ``prepare``."""
        self._open(0)

    def _open(self, create: int) -> int:
        """Returns the file's size."""
        self._fd = open_below(self._root, self.file.path, os.O_RDWR | create | os.O_NONBLOCK, 0o600)
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise OSError(errno.EINVAL, "not a plain file of ours", self.file.path)
        self._seed = self._open_seed()
        return found.st_size

    def close(self) -> None:
        for descriptor in (self._fd, self._seed):
            if descriptor >= 0:
                os.close(descriptor)
        self._fd = self._seed = -1

    def _touched(self, offset: int, length: int, had: int) -> bool:
        if had <= offset:
            return False
        try:
            return os.lseek(self._fd, offset, os.SEEK_DATA) < offset + length
        except OSError as error:
            return error.errno != errno.ENXIO

    def good(self, number: int) -> bool:
        """Does this piece match the manifest already?"""
        return self._same(self._fd, number, None)

    @property
    def seeded(self) -> bool:
        """A wrong piece may have been copied half: no piece is certainly a hole any more."""
        return self._seed >= 0

    def taken_from_seed(self, number: int) -> bool:
        """Does the checkpoint at the target have this piece? Then it is copied from there."""
        if self._seed < 0:
            return False
        write = self.writer(number, fresh=True)
        return self._same(self._seed, number, write)

    def _same(self, descriptor: int, number: int, also: Take | None) -> bool:
        position, left = self.spans[number]
        name, expected = self.file.recorded(number)
        digest = new_hash(name)
        while left and (data := os.pread(descriptor, min(_BLOCK, left), position)):
            digest.update(data)
            if also is not None:
                also(memoryview(data))
            position, left = position + len(data), left - len(data)
        return not left and digest.hexdigest() == expected

    def writer(self, number: int, *, fresh: bool) -> Take:
        """A function that writes blocks one after the other. In a fresh piece, blocks of zeros stay holes, and the rest
        is reserved at the first other block."""
        position, length = self.spans[number]
        end, reserved = position + length, False

        def write(data: memoryview) -> None:
            nonlocal position, reserved
            if fresh and _is_zero(data):
                if reserved:
                    release(self._fd, position, len(data))
            else:
                if fresh and not reserved and end - position > _BLOCK:
                    reserved = reserve(self._fd, position, end - position)
                done = 0
                while done < len(data):
                    done += os.pwrite(self._fd, data[done:] if done else data, position + done)
            position += len(data)

        return write

    def written(self, number: int) -> None:
        """Start writing the piece to disk now, so that the final sync is short."""
        start_writeback(self._fd, *self.spans[number])

    def complete(self, owner: tuple[int, int] | None) -> None:
        """Call when every piece is right. Sets mode, owner and time as recorded, without setuid, setgid or
        capabilities."""
        os.fchmod(self._fd, self.file.mode & 0o777)
        if owner is not None:
            os.fchown(self._fd, *owner)
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
    """The recorded kind of hash of one piece of the file below ``root``; empty where it cannot be read whole."""
    descriptor = open_there(pins, root, file)
    if descriptor < 0:
        return ""
    try:
        position, left = part_spans(file.size, part_size)[number]
        digest = new_hash(file.recorded(number)[0])
        while left and (data := os.pread(descriptor, min(_BLOCK, left), position)):
            digest.update(data)
            position, left = position + len(data), left - len(data)
        return "" if left else digest.hexdigest()
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _is_zero(data: memoryview) -> bool:
    return not data[0] and not data[-1] and bytes(data) == _ZEROS[: len(data)]
