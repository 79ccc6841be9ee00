"""Sends pieces of files. Each is hashed, sent with that hash, and noted; a source that changed voids the save."""

import contextlib
import fcntl
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from podwatch.domain.checkpoint import FileEntry, Identity
from podwatch.domain.errors import HostError, PodwatchError, RemoteError
from podwatch.store.keys import Piece
from podwatch.store.objects.base import Objects, Slice
from podwatch.store.transfer.job import SentPiece, TransferJob
from podwatch.store.transfer.lanes import RateLimit, Report, work_off
from podwatch.system.files import open_dir_below
from podwatch.system.open_by_descriptor import open_regular
from podwatch.system.rights import applied, rights_of


class SourceChanged(PodwatchError):  # noqa: N818
    """A file is not as it was found complete: the save is void."""


class SourceForeign(PodwatchError):  # noqa: N818
    """A file does not belong to the training: nothing of the save is sent."""


class Sending:
    """``run`` returns when every piece is stored. The first failure ends it."""

    def __init__(self, job: TransferJob, store: Objects, report: Report) -> None:
        self._job, self._store, self._report = job, store, report
        self._limit, self._lock = RateLimit(job.rate), threading.Lock()
        self._pieces = job.objects()
        self._left = Counter(piece.file for piece in self._pieces)
        self._open: dict[int, int] = {}
        self._alone = _alone(job.alone or str(Path(job.sent).parent))
        self._sent = os.open(job.sent, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def run(self) -> None:
        work_off([lambda piece=piece: self._send(piece) for piece in self._pieces], self._job.connections)  # type: ignore[misc]
        os.fsync(self._sent)

    def _send(self, piece: Piece) -> None:
        file = self._job.files[piece.file]
        with self._lock:
            if piece.file not in self._open:
                self._open[piece.file] = self._opened(file)
            source = self._open[piece.file]
        slice_ = Slice(source, piece.offset, piece.size, self._moved)
        try:
            hashes = slice_.hashes(self._store.hashes)
            self._store.put(self._job.folder + piece.name, slice_, hashes)
        except RemoteError as error:  # also a store that refuses the hash of what was read before
            if identity_of(os.fstat(source)) != file.identity:
                raise _changed(file) from error
            raise
        if identity_of(os.fstat(source)) != file.identity:
            raise _changed(file)
        name = self._store.hashes[0]
        sent = SentPiece(piece.name, f"{name}:{hashes[name]}", piece.size, file.identity)
        os.write(self._sent, sent.to_line())  # one write: a line that a crash of the machine loses costs one piece
        self._report.say("piece", name=sent.name, size=sent.size)
        with contextlib.suppress(OSError):
            os.posix_fadvise(source, piece.offset, piece.size, os.POSIX_FADV_DONTNEED)  # training needs that memory
        with self._lock:
            self._left[piece.file] -= 1
            if not self._left[piece.file]:
                os.close(self._open.pop(piece.file))
                os.close(self._opened(file))  # and the name still refers to it

    def _moved(self, count: int) -> None:
        self._limit.take(count)
        self._report.count(count)

    def _opened(self, file: FileEntry) -> int:
        """Without following a link, with the rights of the trainer's user. Raises SourceChanged, SourceForeign."""
        job = self._job
        folder, _, name = file.path.rpartition("/")
        with applied(rights_of(job.user) if job.user >= 0 else None):
            try:
                directory = open_dir_below(job.roots[file.part], folder)
                try:
                    descriptor = open_regular(directory, name)
                    around = os.fstat(directory)
                finally:
                    os.close(directory)
            except OSError as error:
                raise SourceChanged(f"the file cannot be opened: {error.strerror}", where=file.name) from error
        found = os.fstat(descriptor)
        if identity_of(found) != file.identity:
            os.close(descriptor)
            raise _changed(file)
        if job.owners is not None and (reason := why_foreign(found, around, job.owners)):
            os.close(descriptor)
            raise SourceForeign(reason, where=file.name)
        return descriptor


def why_foreign(found: os.stat_result, around: os.stat_result, owners: Collection[int]) -> str:
    """Why this file of a directory (``around``) must not leave the pod; empty if it may. One with several names can be
    a link to a file that the linking user cannot even read: it must belong to one of ``owners``, or to the owner of its
    directory, if only that owner can create entries in it."""
    if found.st_nlink < 2 or found.st_uid in owners:
        return ""
    if found.st_uid == around.st_uid and not around.st_mode & stat.S_IWOTH:
        return ""
    return f"the file is a hard link to one of user {found.st_uid}, and only its owner may decide that it is sent"


def _alone(directory: str) -> int:
    """A lock until this process ends. Raises HostError where another upload does not end soon: that of a podwatch that
    was killed ends with it."""
    lock, tries = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), 100
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if not (tries := tries - 1):
                os.close(lock)
                raise HostError("another upload is still running here", fix="podwatch tries again") from None
            time.sleep(0.1)


def _changed(file: FileEntry) -> SourceChanged:
    return SourceChanged("the file is not the one that was found complete", where=file.name)


def identity_of(found: os.stat_result) -> Identity:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
