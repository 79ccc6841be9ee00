"""Checks by read leases whether files are open for writing. A script: ``python -I -S open_for_writing.py`` reads a
JSON list of paths from stdin and writes one JSON object.

A lease is held for the few microseconds between two system calls of this single thread, one file at a time. While it is
held, the trainer's open for writing waits, so this must never run in a process that can be stopped or that has other
threads; an alarm ends it even if podwatch does not kill it. Standard library only, no import of podwatch.
"""

import errno
import fcntl
import json
import os
import signal
import stat
import sys

SECONDS = 1
"""Seconds until the alarm: far more than 256 files need, far less than the 45 s after which the kernel breaks a
lease."""


def ask(path: str) -> str:
    """``no``, ``yes`` or ``unknown`` for one file. ``no`` for a file that vanished."""
    try:
        # First without opening it: only a regular file must be opened (opening a FIFO would release its writer).
        place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return "no"
    except OSError:
        return "unknown"
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            return "unknown"
        fd = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return "unknown"
    finally:
        os.close(place)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        # EAGAIN also where the file system gives no leases (NFS without a delegation): those are never checked.
        return "yes" if error.errno == errno.EAGAIN else "unknown"
    finally:
        os.close(fd)
    return "no"


def main() -> None:
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # another process opens the file: the lease ends anyway
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
