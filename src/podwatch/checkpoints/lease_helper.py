"""Ask by read leases whether files are open for writing. Runs as a script of its own: ``python -I -S lease_helper.py``,
a JSON list of paths on its input, one JSON object as its answer.

A lease is held for the few microseconds between two system calls of this single thread, one file at a time. While it is
held the trainer's open for writing waits, so this must never live in a process that can be stopped or that has other
threads; an alarm ends it even if nobody kills it. Standard library only, no import of podwatch.
"""

import errno
import fcntl
import json
import os
import signal
import sys

SECONDS = 1
"""The alarm: far above the work of 256 files, far below the 45 s after which the kernel breaks a lease itself."""


def ask(path: str) -> str:
    """``no``, ``yes`` or ``unknown`` for one file. A file that vanished is held by nobody."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except FileNotFoundError:
        return "no"
    except OSError:
        return "unknown"
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        # EAGAIN also where the file system gives no leases to us (NFS without a delegation): such are never asked.
        return "yes" if error.errno == errno.EAGAIN else "unknown"
    finally:
        os.close(fd)
    return "no"


def main() -> None:
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel's word that somebody wants in: we are leaving anyway
    signal.alarm(SECONDS)
    unknown = ""
    for path in json.load(sys.stdin):
        verdict = ask(path)
        if verdict == "yes":
            print(json.dumps({"held": "yes", "path": path}))
            return
        if verdict == "unknown":
            unknown = unknown or path
    print(json.dumps({"held": "unknown" if unknown else "no", "path": unknown}))


if __name__ == "__main__":
    main()
