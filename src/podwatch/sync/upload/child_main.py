"""``python -m podwatch.sync.upload.child_main``: uploads one checkpoint and reports progress, as JSON lines.

A separate process, so that detection keeps its rhythm, memory is returned afterwards, and a cancel is a kill. It ends
when its standard input closes or its parent dies. It never publishes: only the daemon writes manifest and pointer.
"""

import sys
import threading
from pathlib import Path
from typing import Any

from podwatch.domain.errors import Busy, IntegrityError, PodwatchError, RemoteError
from podwatch.stores.base import TOTAL
from podwatch.stores.open_store import load, open_store
from podwatch.sync.child_protocol import JsonLinesOut, job_line, leave
from podwatch.sync.upload.child_job import UploadJob
from podwatch.sync.upload.send_parts import Sending, SourceChanged, SourceForeign
from podwatch.system.child import die_with_parent, give_way, importing_without
from podwatch.system.files import FileLock
from podwatch.system.pinned_directories import RootReplaced


class _Sent:
    """Bytes sent, summed over the connections, and bytes that the store already had."""

    def __init__(self, out: JsonLinesOut) -> None:
        self._out, self._bytes, self._there, self._lock = out, 0, 0, threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._bytes += count
        self._tell()

    def add_there(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            self._there += count
        self._tell()

    def _tell(self) -> None:
        self._out.progress(lambda: {"bytes": self._bytes, "there": self._there, "calls": TOTAL.snapshot()})


def _explain(error: BaseException) -> dict[str, Any]:
    if isinstance(error, SourceChanged):
        return {"kind": "changed", "what": error.what, "where": error.where, "fix": "", "transient": False}
    if isinstance(error, SourceForeign):
        return {"kind": "foreign", "what": error.what, "where": error.where, "fix": "", "transient": False}
    if isinstance(error, RootReplaced):
        return {"kind": "replaced", "what": error.what, "where": error.where, "fix": error.fix, "transient": False}
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
    """``argv``: the parent's PID, the kind of store, which is loaded before the job is read, and our nice value."""
    parent, kind, nice = sys.argv[1:4]
    die_with_parent(int(parent))
    give_way(int(nice))
    with importing_without("pydantic"):  # b2sdk checks its own types only where it is installed
        load(kind)
    out = JsonLinesOut()
    line = job_line()
    if not line:
        return 1
    job, credentials = UploadJob.from_line(line)
    lock = FileLock(Path(job.lock))
    try:
        lock.acquire(what="the upload of this run")
        store = open_store(
            job.store, credentials, writer_id=job.writer_id, connections=job.connections, features=job.features
        )
        sent = _Sent(out)
        Sending(job, store, out.say, sent.add, sent.add_there).run()
    except BaseException as error:
        if isinstance(error, Busy) and not lock.held:
            what = "another upload of this run is running"
            out.say("error", kind="busy", what=what, where=job.lock, fix="", transient=True)
        else:
            out.say("error", **_explain(error), calls=TOTAL.snapshot())
        return 1
    out.say("done", calls=TOTAL.snapshot())
    return 0


if __name__ == "__main__":
    leave(main())
