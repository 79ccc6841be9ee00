"""``python -m podwatch.sync.child``: uploads one set and tells about it, one JSON line after the other.

A process of its own, so that detection keeps its rhythm, memory comes back afterwards, and a cancel is a kill. It ends
when its standard input closes or its parent dies, and never publishes: manifest and pointer are the daemon's.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import queue
import signal
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

from podwatch.domain.errors import IntegrityError, PodwatchError, RemoteError
from podwatch.stores.base import ObjectStore
from podwatch.stores.open import open_store
from podwatch.sync.job import JobFile, UploadJob
from podwatch.system.files import open_below, open_root

_PR_SET_PDEATHSIG = 1
_TELL_EVERY = 0.25
"""Seconds between progress lines: enough for a person, nothing for a pipe."""


class SourceChanged(PodwatchError):  # noqa: N818
    """A file is not what the catalogue saw: the set is void."""


class _Out:
    """Standard output, shared by the connections. A closed pipe means that nobody listens any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0
        self._told = 0.0

    def say(self, type_: str, **details: Any) -> None:
        line = json.dumps({"type": type_, **details}).encode() + b"\n"
        with self._lock:
            try:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            except OSError:
                os._exit(1)

    def progress(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            now = time.monotonic()
            if now - self._told < _TELL_EVERY:
                return
            self._told, total = now, self._bytes
        self.say("progress", bytes=total)


def lower_priority(parent: int) -> None:
    """Behind everything else on the pod (measured: own session + autogroup 19 + nice 19), and never an orphan."""
    with contextlib.suppress(OSError):
        os.setsid()
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")
    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)  # it died before we asked to be told


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def _open(job: UploadJob, file: JobFile) -> int:
    try:
        root = open_root(Path(job.roots[file.part]))
        try:
            descriptor = open_below(root, file.path, os.O_RDONLY | os.O_NONBLOCK)
        finally:
            os.close(root)
    except OSError as error:
        raise SourceChanged(f"file cannot be opened: {error.strerror}", where=file.remote) from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or _identity(found) != (file.device, file.inode, file.size, file.mtime_ns):
        os.close(descriptor)
        raise SourceChanged("file is not the one that was found complete", where=file.remote)
    return descriptor


def _identity(found: os.stat_result) -> tuple[int, int, int, int]:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _source(found: os.stat_result) -> dict[str, int]:
    return dict(zip(("device", "inode", "size", "mtime_ns"), _identity(found), strict=True))


def upload_one(store: ObjectStore, job: UploadJob, file: JobFile, out: _Out) -> None:
    descriptor = _open(job, file)
    with os.fdopen(descriptor, "rb", buffering=0) as source:
        before = os.fstat(source.fileno())
        try:
            stored = store.put_file(file.key, source, file.size, part_size=job.part_size, progress=out.progress)
        except IntegrityError as error:
            if os.fstat(source.fileno()).st_size != file.size:
                raise SourceChanged("file changed while it was read", where=file.remote) from error
            raise
        after = os.fstat(source.fileno())
        with contextlib.suppress(OSError):
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if _identity(after) != _identity(before):
        raise SourceChanged("file changed while it was read", where=file.remote)
    os.close(_open(job, file))  # and the name still leads to it
    out.say(
        "object",
        remote=file.remote,
        file_id=stored.file_id,
        size=stored.size,
        parts_sha1=list(stored.parts_sha1),
        before=_source(before),
        after=_source(after),
    )


def run(job: UploadJob, store: ObjectStore, out: _Out) -> None:
    """Several files at once, each part after part. The first failure stops the others at their next file."""
    work: queue.SimpleQueue[JobFile] = queue.SimpleQueue()
    for file in job.files:
        work.put(file)
    failures: list[BaseException] = []

    def lane() -> None:
        while not failures:
            try:
                file = work.get_nowait()
            except queue.Empty:
                return
            try:
                upload_one(store, job, file, out)
            except BaseException as error:
                failures.append(error)

    lanes = [threading.Thread(target=lane, daemon=True) for _ in range(min(job.connections, len(job.files)))]
    for thread in lanes:
        thread.start()
    while any(thread.is_alive() for thread in lanes) and not failures:
        for thread in lanes:
            thread.join(0.05)
    if failures:
        raise failures[0]


def _explain(error: BaseException) -> dict[str, Any]:
    if isinstance(error, SourceChanged):
        return {"kind": "changed", "what": error.what, "where": error.where, "fix": "", "transient": False}
    if isinstance(error, RemoteError):
        transient = error.transient and not isinstance(error, IntegrityError)
        return {"kind": "store", "what": error.what, "where": error.where, "fix": error.fix, "transient": transient}
    if isinstance(error, PodwatchError):
        return {"kind": "refused", "what": error.what, "where": error.where, "fix": error.fix, "transient": False}
    if isinstance(error, OSError):
        what = f"a file cannot be read: {error.strerror}"
        return {"kind": "read", "what": what, "where": str(error.filename or ""), "fix": "", "transient": True}
    return {"kind": "internal", "what": f"{type(error).__name__}", "where": "upload", "fix": "", "transient": False}


def main() -> int:
    lower_priority(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    out = _Out()
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return 1
    job, credentials = UploadJob.from_line(line)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    with open(job.lock, "ab") as lock:  # noqa: PTH123
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            out.say(
                "error",
                kind="busy",
                what="another upload of this run is at work",
                where=job.lock,
                fix="",
                transient=True,
            )
            return 1
        try:
            run(job, open_store(job.store, credentials, writer_id=job.writer_id, connections=job.connections), out)
        except BaseException as error:
            out.say("error", **_explain(error))
            return 1
    out.say("done")
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads that still wait for the network do not hold us
