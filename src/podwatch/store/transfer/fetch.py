"""Fetches pieces into staging directories: every byte is hashed, no name is trusted, and a kill costs little.

What lies in staging already and is right is kept, so that an interrupted restore loses the pieces in flight.
"""

import contextlib
import errno
import os
import stat
import threading
from collections import Counter
from collections.abc import Collection

from podwatch.domain.checkpoint import FileEntry, SymlinkEntry
from podwatch.domain.errors import HostError, IntegrityError, SaveGone
from podwatch.domain.safe_links import check_links
from podwatch.store.keys import Piece
from podwatch.store.objects.base import Objects, Slice
from podwatch.store.objects.errors import ObjectMissing
from podwatch.store.transfer.job import TransferJob
from podwatch.store.transfer.lanes import RateLimit, Report, work_off
from podwatch.system.files import (
    DIRECTORY_FLAGS,
    open_below,
    open_dir_below,
    start_writeback,
    sync_descriptor,
    sync_filesystem,
)
from podwatch.system.rights import applied, rights_of

READINGS = 2
"""Reads of a piece before it counts as damaged in the store: a bit may flip in transit, hardly ever twice."""


class Fetching:
    """``run`` returns when staging has exactly the job's files and links, durably. Raises IntegrityError (damaged),
    SaveGone, RemoteError, HostError (no space) or OSError."""

    def __init__(self, job: TransferJob, store: Objects, report: Report) -> None:
        self._job, self._store, self._report = job, store, report
        self._limit, self._lock = RateLimit(job.rate), threading.Lock()
        self._pieces = job.objects()
        self._left = Counter(piece.file for piece in self._pieces)
        self._kept: set[int] = set()
        """Files that were in staging before."""

    def run(self) -> None:
        job = self._job
        check_links([file.name for file in job.files], job.links)
        with self._rights():
            for part, root in job.roots.items():
                _strip(root, {file.path for file in job.files if file.part == part})
            self._check_room()
            for number, file in enumerate(job.files):
                self._prepare(number, file)
        work_off([lambda piece=piece: self._fetch(piece) for piece in self._pieces], job.connections)  # type: ignore[misc]
        with self._rights():
            for number, file in enumerate(job.files):
                if not self._left[number]:
                    self._complete(file)
            for link in job.links:
                self._link(link)
            for root in set(job.roots.values()):
                _sync_directories(root)
                sync_filesystem(root)

    def _rights(self) -> contextlib.AbstractContextManager[None]:
        return applied(rights_of(self._job.user) if self._job.user >= 0 else None)

    def _check_room(self) -> None:
        """Bytes in staging already need no space again."""
        needed, staged, one = Counter[int](), Counter[int](), dict[int, int]()
        for part, root in self._job.roots.items():
            device = os.fstat(root).st_dev
            one[device] = root
            needed[device] += sum(file.size for file in self._job.files if file.part == part)
            staged[device] += _allocated(root)
        for device, size in needed.items():
            room = os.fstatvfs(one[device])
            free = room.f_bavail * room.f_frsize
            if size > free + staged[device]:
                raise HostError(
                    f"not enough disk space to restore: {size} bytes needed, {free} free",
                    fix="free space (`podwatch prune`), then restore again",
                )

    def _open(self, file: FileEntry, create: int = 0) -> int:
        """A plain file of one name below the part's directory."""
        flags = os.O_RDWR | os.O_NONBLOCK | create
        descriptor = open_below(self._job.roots[file.part], file.path, flags, 0o600)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a plain file of ours", file.path)
        return descriptor

    def _prepare(self, number: int, file: FileEntry) -> None:
        os.close(open_dir_below(self._job.roots[file.part], file.path.rpartition("/")[0], create=True))
        descriptor = self._open(file, os.O_CREAT)
        try:
            if os.fstat(descriptor).st_size:
                self._kept.add(number)
            os.ftruncate(descriptor, file.size)
        finally:
            os.close(descriptor)

    def _fetch(self, piece: Piece) -> None:
        file, (name, _, wanted) = self._job.files[piece.file], piece.hash.partition(":")
        if name not in ("sha1", "sha256"):
            raise IntegrityError("the recorded hash is of no known kind", where=piece.name)
        with self._rights():
            descriptor = self._open(file)
        try:
            staged = piece.file in self._kept and self._hash(descriptor, piece, name) == wanted
            if staged:
                self._report.count(piece.size)
            elif not any(self._read(piece, descriptor, name) == wanted for _ in range(READINGS)):
                raise IntegrityError("the object does not match its recorded hash", where=piece.name)
            start_writeback(descriptor, piece.offset, piece.size)
        finally:
            os.close(descriptor)
        with self._lock:
            self._left[piece.file] -= 1
        self._report.say("piece", name=piece.name, size=piece.size, fetched=not staged)

    def _hash(self, descriptor: int, piece: Piece, name: str) -> str:
        return Slice(descriptor, piece.offset, piece.size).hashes([name])[name]

    def _read(self, piece: Piece, descriptor: int, name: str) -> str:
        position = piece.offset

        def write(block: memoryview) -> None:
            nonlocal position
            self._limit.take(len(block))
            count = len(block)
            while block:
                done = os.pwrite(descriptor, block, position)
                position, block = position + done, block[done:]
            self._report.count(count)

        try:
            return self._store.get(self._job.folder + piece.name, write, length=piece.size, hash_name=name)
        except ObjectMissing as error:
            raise SaveGone("the object is not in the store any more", where=error.where) from error

    def _complete(self, file: FileEntry) -> None:
        """Mode and time as recorded, without setuid, setgid or capabilities."""
        descriptor = self._open(file)
        try:
            os.fchmod(descriptor, file.mode & 0o777)
            os.utime(descriptor, ns=(file.mtime_ns, file.mtime_ns))
        finally:
            os.close(descriptor)

    def _link(self, link: SymlinkEntry) -> None:
        folder, _, name = link.path.rpartition("/")
        directory = open_dir_below(self._job.roots[link.part], folder, create=True)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)
            os.symlink(link.target, name, dir_fd=directory)
        finally:
            os.close(directory)


def _strip(directory: int, wanted: Collection[str], inside: str = "") -> None:
    """Remove everything that is not wanted, and everything except plain files with one name."""
    for name in os.listdir(directory):
        path = inside + name
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            below = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
            try:
                _strip(below, wanted, f"{path}/")
            finally:
                os.close(below)
            if not any(other.startswith(f"{path}/") for other in wanted):
                os.rmdir(name, dir_fd=directory)
        elif not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or path not in wanted:
            os.unlink(name, dir_fd=directory)


def _allocated(directory: int) -> int:
    total = 0
    for _, _, files, folder in os.fwalk(".", dir_fd=directory, follow_symlinks=False):
        total += sum(os.stat(name, dir_fd=folder, follow_symlinks=False).st_blocks * 512 for name in files)
    return total


def _sync_directories(directory: int) -> None:
    for _, _, _, folder in os.fwalk(".", dir_fd=directory, follow_symlinks=False, topdown=False):
        sync_descriptor(folder)
