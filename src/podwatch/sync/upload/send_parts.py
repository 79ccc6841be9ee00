"""One queue of parts over all files of a checkpoint, and the connections that send them.

Each part is read once, hashed while it is sent, and compared with the store's answer. The connection that comes to a
large file first starts its upload, and the one that sends its last part finishes it; parts that the store has from
before a kill are not sent again.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial

from podwatch.domain.errors import IntegrityError, PodwatchError
from podwatch.stores.base import ObjectStore, Progress, StoredObject, StoredPart, Upload, recognized
from podwatch.stores.part_reader import FileSource, part_sha1, part_spans
from podwatch.sync.connections import RateLimit, work_off
from podwatch.sync.read_back import read_back
from podwatch.sync.upload.child_job import JobFile, UploadJob
from podwatch.system.files import open_dir_below
from podwatch.system.pinned_directories import open_pinned, open_regular
from podwatch.system.rights import applied


class SourceChanged(PodwatchError):  # noqa: N818
    """A file is not as it was found complete: the checkpoint is void."""


class SourceForeign(PodwatchError):  # noqa: N818
    """The trainer's user cannot read a file: the checkpoint is void."""


Say = Callable[..., None]
"""``say(type, **details)``: sends a message to the daemon."""


class _File:
    """One file in flight. Its lock guards everything but the sending of parts."""

    def __init__(self, job: UploadJob, file: JobFile) -> None:
        self.job, self.file = job, file
        self.spans = part_spans(file.size, job.part_size)
        self.large = file.size > job.part_size
        self.lock = threading.Lock()
        self.left = len(self.spans) if self.large else 1
        """Number of unsent parts; the connection that makes it zero finishes the file."""
        self.parts: dict[int, StoredPart] = {}
        """Sent, by number."""
        self.upload: Upload | None = None
        self.stored: StoredObject | None = None
        self._source: FileSource | None = None

    def source(self) -> FileSource:
        """The open file. Raises SourceChanged when it is not the one that was found complete."""
        if self._source is None:
            self._source = FileSource(_open(self.job, self.file))
        return self._source

    def forget(self, offset: int, length: int) -> None:
        """Drop sent bytes from the page cache: training needs that memory."""
        if self._source is not None:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._source.descriptor, offset, length, os.POSIX_FADV_DONTNEED)

    def unchanged(self) -> None:
        """Raises SourceChanged if the file was written to, replaced or removed while it was read."""
        source = self.source()
        if _identity(os.fstat(source.descriptor)) != _expected(self.file):
            raise SourceChanged("the file changed while it was read", where=self.file.remote)
        os.close(_open(self.job, self.file))  # and the name still refers to it

    def close(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            os.close(source.descriptor)


class Sending:
    """``run`` returns when every file of the job is in the store. The first failure stops the others at their next
    part."""

    def __init__(
        self,
        job: UploadJob,
        store: ObjectStore,
        say: Say,
        progress: Progress,
        there: Progress | None = None,
    ) -> None:
        """``progress``: bytes sent; ``there``: bytes that the store had already (not part of ``progress``)."""
        self._there = there or progress
        self._job, self._store, self._say = job, store, say
        self._limit = RateLimit(job.max_rate)
        self._progress_out = progress

    def run(self) -> None:
        work: list[Callable[[], None]] = []
        for file in self._job.files:
            state = _File(self._job, file)
            work += [partial(self._send, state, number) for number in range(1, state.left + 1)]
        work_off(work, self._job.connections)

    def _progress(self, count: int) -> None:
        self._progress_out(count)
        self._limit.take(count)

    def _send(self, file: _File, number: int) -> None:
        with file.lock:
            if file.stored is None:
                source = file.source()
                if file.large:
                    self._begin(file)
        if file.stored is None and number not in file.parts:
            try:
                self._transfer(file, source, number)
            except IntegrityError as error:
                if os.fstat(source.descriptor).st_size != file.file.size:
                    raise SourceChanged("the file changed while it was read", where=file.file.remote) from error
                raise
        with file.lock:
            file.left -= 1
            if file.left == 0:
                self._finish(file)

    def _transfer(self, file: _File, source: FileSource, number: int) -> None:
        key, size = file.file.key, file.file.size
        if not file.large:
            file.stored = self._store.put_small(key, source, size, self._progress)
            file.forget(0, size)
            return
        offset, length = file.spans[number - 1]
        assert file.upload is not None
        part = self._store.put_part(file.upload, number, source, offset, length, self._progress)
        file.parts[number] = part
        self._say("part", remote=file.file.remote, number=number, note=part.note)
        file.forget(offset, length)

    def _begin(self, file: _File) -> None:
        """Once per file, by the connection that comes first: continue a killed upload, or start one."""
        if file.upload:
            return
        left = file.file.upload
        if left and self._take_up(file, Upload(file.file.key, left)):
            return
        file.parts = {}
        file.upload = self._store.begin_large(file.file.key, file.file.size)
        ctime = os.fstat(file.source().descriptor).st_ctime_ns
        self._say("begun", remote=file.file.remote, upload=file.upload.id, ctime_ns=ctime)

    def _take_up(self, file: _File, upload: Upload) -> bool:
        sizes = {number: length for number, (_, length) in enumerate(file.spans, 1)}
        known = {n: StoredPart.noted(note, sizes.get(n, 0)) for n, note in file.file.parts.items()}
        listed = self._store.parts_there(upload)
        if listed is None:
            return self._was_finished(file, upload, known)
        there = recognized(listed, known)
        if any(sizes.get(n) != p.size or (n in known and known[n].sha1 != p.sha1) for n, p in there.items()):
            self._store.cancel_large(upload)  # another part size, or not what we sent
            return False
        if not self._same_bytes(file, there):
            self._store.cancel_large(upload)
            return False
        file.upload, file.parts = upload, there
        self._there(sum(part.size for part in there.values()))
        return True

    def _was_finished(self, file: _File, upload: Upload, known: Mapping[int, StoredPart]) -> bool:
        """Was the upload finished, and only the answer lost? Only where the store can show it, and all sent parts are
        known; else the file is sent again."""
        if set(known) != set(range(1, len(file.spans) + 1)):
            return False
        found = self._store.finished(upload, [known[n] for n in sorted(known)], file.file.size)
        if found is None or not self._same_bytes(file, known):
            return False
        file.upload, file.parts, file.stored = upload, dict(known), found
        self._there(file.file.size)
        return True

    def _same_bytes(self, file: _File, parts: Mapping[int, StoredPart]) -> bool:
        """Size and mtime can be set, ctime cannot: if it differs from the one at the start of the upload, the stored
        parts are compared with the file by hash. That costs no traffic, and equal parts are not sent again."""
        source = file.source()
        if file.file.ctime_ns in (0, os.fstat(source.descriptor).st_ctime_ns):
            return True
        for number, part in parts.items():
            offset, length = file.spans[number - 1]
            if part_sha1(source, offset, length) != part.sha1:
                return False
        return True

    def _finish(self, file: _File) -> None:
        source = file.source()
        file.unchanged()
        entry = file.file
        if file.large and file.stored is None:
            assert file.upload is not None
            file.stored = self._store.finish_large(file.upload, [file.parts[n] for n in sorted(file.parts)], entry.size)
        assert file.stored is not None
        found = os.fstat(source.descriptor)
        file.close()
        sent = [file.parts[n].sha1 for n in sorted(file.parts)]
        hashes = sent if file.large else list(file.stored.parts_sha1)
        proof = file.stored.proof or read_back(self._store, file.stored, hashes, self._job.part_size, self._limit.take)
        self._say(
            "object",
            remote=entry.remote,
            file_id=file.stored.file_id,
            size=file.stored.size,
            parts_sha1=hashes,
            proof=proof,
            source=dict(zip(("device", "inode", "size", "mtime_ns"), _identity(found), strict=True)),
        )


def _open(job: UploadJob, file: JobFile) -> int:
    """Open the file from one of the daemon's roots, with the rights of the directory's user and without following a
    link. Raises SourceChanged, SourceForeign, RootReplaced."""
    with applied(job.rights):
        return _open_with_these_rights(job, file)


def _open_with_these_rights(job: UploadJob, file: JobFile) -> int:
    folder, _, name = file.path.rpartition("/")
    try:
        root = open_pinned(job.pins, job.roots[file.part], job.rights)
        try:
            directory = open_dir_below(root, folder)
        finally:
            os.close(root)
        try:
            descriptor = open_regular(directory, name)
        finally:
            os.close(directory)
    except PermissionError as error:
        user = "podwatch's user" if job.rights is None else f"user {job.rights.uid}"
        raise SourceForeign(
            f"{user}, to whom the directory belongs, cannot read the file", where=file.remote
        ) from error
    except OSError as error:
        what = "a symbolic link is on its path" if error.errno in (errno.ELOOP, errno.ENOTDIR) else error.strerror
        raise SourceChanged(f"the file cannot be opened: {what}", where=file.remote) from error
    found = os.fstat(descriptor)
    if _identity(found) != _expected(file):
        os.close(descriptor)
        raise SourceChanged("the file is not the one that was found complete", where=file.remote)
    return descriptor


def _identity(found: os.stat_result) -> tuple[int, int, int, int]:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _expected(file: JobFile) -> tuple[int, int, int, int]:
    return (file.device, file.inode, file.size, file.mtime_ns)
