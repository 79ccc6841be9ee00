"""``python -m podwatch.sync.restore.child_main``: fetches one checkpoint into staging, reports progress as JSON lines.

A separate process, as for uploads: the daemon keeps its rhythm, memory is returned, and a cancel is a kill. It ends
when its standard input closes or its parent dies. Its priority is not lowered: training waits for it.
"""

import sys
from typing import Any

from podwatch.domain.errors import HostError, IntegrityError, PodwatchError, RemoteError, SaveGone
from podwatch.stores.base import TOTAL
from podwatch.stores.open_store import open_store
from podwatch.sync.child_protocol import JsonLinesOut, job_line, leave
from podwatch.sync.restore.child_job import FetchJob
from podwatch.sync.restore.fetch import Fetching
from podwatch.system.child import die_with_parent


def explain(error: BaseException) -> dict[str, Any]:
    """As much of an error as the parent needs to raise the same one."""
    if isinstance(error, PodwatchError):
        kinds = ((SaveGone, "gone"), (IntegrityError, "damaged"), (RemoteError, "store"), (HostError, "host"))
        kind = next((name for type_, name in kinds if isinstance(error, type_)), "refused")
        transient = isinstance(error, RemoteError) and error.transient
        return {"kind": kind, "what": error.what, "where": error.where, "fix": error.fix, "transient": transient}
    if isinstance(error, OSError):
        return {"kind": "disk", "what": error.strerror or str(error), "where": str(error.filename or "")}
    return {"kind": "internal", "what": f"{type(error).__name__}: {str(error)[:200]}"}


def main() -> int:
    die_with_parent(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    out = JsonLinesOut()
    line = job_line()
    if not line:
        return 1
    job, credentials = FetchJob.from_line(line)

    def progress(here: int, downloaded: int) -> None:
        out.progress(lambda: {"bytes": here, "downloaded": downloaded, "calls": TOTAL.snapshot()})

    try:
        store = open_store(
            job.store, credentials, writer_id=job.writer_id, connections=job.connections, features=job.features
        )
        done = Fetching(job, store, progress).run()
    except BaseException as error:
        out.say("error", **explain(error), calls=TOTAL.snapshot())
        return 1
    out.say("done", staged=done.staged, downloaded=done.downloaded, calls=TOTAL.snapshot())
    return 0


if __name__ == "__main__":
    leave(main())
