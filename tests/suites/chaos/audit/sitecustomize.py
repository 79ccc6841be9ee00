"""Loaded by every Python of a run under chaos (PYTHONPATH): each process says who it is, and that it is the only one.

A process of a role (trainer, engine, ...) holds a lock for its whole life. One that finds it taken writes to
``double``: two were alive at once, however short.
"""

import fcntl
import json
import os
import sys
import time
from pathlib import Path

ROLES = ("rl", "trainer", "orchestrator", "inference", "engine")


def tell() -> None:
    role = next((Path(word).stem for word in sys.orig_argv[1:] if word.endswith(".py")), "")
    if role not in ROLES or "CHAOS_CONTROL" not in os.environ:
        return
    control = Path(os.environ["CHAOS_CONTROL"])
    lock = os.open(control / f"{role}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)  # never closed: the life's lock
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with (control / "double").open("a") as out:
            out.write(f"{role} {os.getpid()} {time.time()}\n")
    (control / f"{role}.new").write_text(str(os.getpid()))
    (control / f"{role}.new").replace(control / f"{role}.pid")
    with (control / "lives.jsonl").open("a") as out:
        out.write(json.dumps({"role": role, "pid": os.getpid(), "at": time.time(), "argv": sys.orig_argv}) + "\n")


tell()
