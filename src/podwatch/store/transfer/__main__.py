"""``python -I -m podwatch.store.transfer PARENT``: sends or fetches the pieces of one job, and reports as JSON lines.

A process of its own, so that detection keeps its rhythm, memory is returned afterwards, and a cancel is a kill. It ends
when its standard input closes or its parent dies. It publishes nothing.
"""

import os
import sys
import threading
from typing import Any

from podwatch.domain.errors import HostError, IntegrityError, PodwatchError, RemoteError, SaveGone
from podwatch.domain.secrets import scrub_all
from podwatch.store.objects.base import Objects
from podwatch.store.objects.open import open_objects
from podwatch.store.transfer.fetch import Fetching
from podwatch.store.transfer.job import from_line
from podwatch.store.transfer.lanes import Report
from podwatch.store.transfer.send import Sending, SourceChanged, SourceForeign
from podwatch.system.child import die_with_parent, give_way

KINDS = (
    (SourceChanged, "changed"), (SourceForeign, "foreign"), (SaveGone, "gone"), (IntegrityError, "damaged"),
    (RemoteError, "store"), (HostError, "host"), (PodwatchError, "refused"),
)  # fmt: skip


def explain(error: BaseException) -> dict[str, Any]:
    """As much of an error as the parent needs to raise the same one."""
    if isinstance(error, PodwatchError):
        kind = next(name for type_, name in KINDS if isinstance(error, type_))
        details = {"transient": getattr(error, "transient", False), "refusal": getattr(error, "kind", "")}
        return {"kind": kind, "what": error.what, "where": error.where, "fix": error.fix, **details}
    if isinstance(error, OSError):
        return {"kind": "disk", "what": error.strerror or str(error), "where": str(error.filename or "")}
    return {"kind": "internal", "what": f"{type(error).__name__}: {str(error)[:200]}", "where": ""}


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def main() -> int:
    die_with_parent(int(sys.argv[1]))
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return 1  # the parent ended first
    threading.Thread(target=_end_with_input, daemon=True).start()
    store: Objects | None = None
    report = Report(lambda: dict(store.calls) if store is not None else {})
    try:
        job, access = from_line(line)
        give_way(job.nice)
        store = open_objects(job.store, access, connections=job.connections, checksum=job.checksum)
        (Sending if job.direction == "send" else Fetching)(job, store, report).run()
    except BaseException as error:
        report.say("error", **scrub_all(explain(error)))
        return 1
    report.say("done")
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads can still wait for the network
