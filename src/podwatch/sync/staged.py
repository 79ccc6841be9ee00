"""One file of a restore: its pieces on this disk, and what already lies there of it. Nothing that is found is trusted:
every piece is hashed before it counts."""

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from podwatch.domain.remote import ManifestFile
from podwatch.stores.parts import part_spans
from podwatch.system.files import open_below, open_dir_below, open_root, start_writeback

_BLOCK = 1 << 20
_ZEROS = bytes(_BLOCK)


class StagedFile:
    """Its lock guards opening and counting; pieces are written by several threads at once.

    ``seed`` is the directory of a set that is there and may share pieces with this one (a damaged local copy)."""

    def __init__(self, file: ManifestFile, root: int, part_size: int, seed: Path | None = None) -> None:
        self.file, self._root, self._seed_root = file, root, seed
        self.spans = part_spans(file.size, part_size)
        self.lock = threading.Lock()
        self.left = max(1, len(self.spans))
        """Pieces that are not right yet; who brings it to zero completes the file. An empty file has one."""
        self._fd = -1
        self._seed = -1
        self._had = 0

    def open(self) -> None:
        """Once, by whoever comes first."""
        with self.lock:
            if self._fd >= 0:
                return
            folder = self.file.path.rpartition("/")[0]
            os.close(open_dir_below(self._root, folder, create=True))
            self._fd = open_below(self._root, self.file.path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
            self._had = os.fstat(self._fd).st_size
            os.ftruncate(self._fd, self.file.size)
            self._seed = _open_seed(self._seed_root, self.file) if self._seed_root is not None else -1

    def close(self) -> None:
        with self.lock:
            for descriptor in (self._fd, self._seed):
                if descriptor >= 0:
                    os.close(descriptor)
            self._fd = self._seed = -1

    def touched(self, number: int) -> bool:
        """Was anything written there before? Else it is a hole, which costs neither reading nor writing zeros."""
        offset, length = self.spans[number]
        if self._had <= offset:
            return False
        try:
            return os.lseek(self._fd, offset, os.SEEK_DATA) < offset + length
        except OSError as error:
            return error.errno != errno.ENXIO

    def good(self, number: int) -> bool:
        """Is this piece already as the manifest says?"""
        return self._hash_of(self._fd, number, None) == self.file.parts_sha1[number]

    @property
    def seeded(self) -> bool:
        """A piece that was not right there may have been copied half: nothing is a hole for sure."""
        return self._seed >= 0

    def taken_from_seed(self, number: int) -> bool:
        """The same for the set that lies where this one belongs; then the piece is copied from there."""
        if self._seed < 0:
            return False
        write = self.writer(number, fresh=True)
        return self._hash_of(self._seed, number, write) == self.file.parts_sha1[number]

    def _hash_of(self, descriptor: int, number: int, also: Callable[[memoryview], None] | None) -> str:
        position, left = self.spans[number]
        digest = hashlib.sha1(usedforsecurity=False)
        while left and (data := os.pread(descriptor, min(_BLOCK, left), position)):
            digest.update(data)
            if also is not None:
                also(memoryview(data))
            position, left = position + len(data), left - len(data)
        return "" if left else digest.hexdigest()

    def writer(self, number: int, *, fresh: bool) -> Callable[[memoryview], None]:
        """Writes what it is given one after the other. Where nothing was written before, blocks of zeros stay holes."""
        position = self.spans[number][0]

        def write(data: memoryview) -> None:
            nonlocal position
            if not (fresh and _is_zero(data)):
                done = 0
                while done < len(data):
                    done += os.pwrite(self._fd, data[done:] if done else data, position + done)
            position += len(data)

        return write

    def written(self, number: int) -> None:
        """Let the disk begin now with what must be on it at the end."""
        start_writeback(self._fd, *self.spans[number])

    def complete(self, owner: tuple[int, int] | None) -> None:
        """Every piece is right. Mode, owner and time as recorded; nothing that would let a file act for its owner."""
        os.fchmod(self._fd, self.file.mode & 0o777)
        if owner is not None:
            os.fchown(self._fd, *owner)
        os.utime(self._fd, ns=(self.file.mtime_ns, self.file.mtime_ns))
        if self.file.size > _BLOCK:
            os.fsync(self._fd)  # small ones are synced together at the end
        self.close()


def _open_seed(root: Path, file: ManifestFile) -> int:
    try:
        directory = open_root(root)
    except OSError:
        return -1
    try:
        descriptor = open_below(directory, file.path.partition("/")[2], os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return -1
    finally:
        os.close(directory)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return -1
    return descriptor


def same_on_disk(root: Path, file: ManifestFile) -> bool:
    """Has the file below ``root`` this size and mtime? Cheap; whether its bytes are right is another question."""
    descriptor = _open_seed(root, file)
    if descriptor < 0:
        return False
    try:
        found = os.fstat(descriptor)
        return (found.st_size, found.st_mtime_ns) == (file.size, file.mtime_ns)
    finally:
        os.close(descriptor)


def hash_in_place(root: Path, file: ManifestFile, part_size: int, number: int) -> str:
    """SHA-1 of one piece of the file below ``root``; empty where it cannot be read whole."""
    descriptor = _open_seed(root, file)
    if descriptor < 0:
        return ""
    try:
        position, left = part_spans(file.size, part_size)[number]
        digest = hashlib.sha1(usedforsecurity=False)
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
