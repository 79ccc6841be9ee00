"""What each program of this suite says about itself, in the directory ``TRAINERS_CONTROL``; standard library only.

Imported before torch: ``lives.jsonl`` gets one line per process at its very start, with what is in the directory of
the checkpoints then (empty directories apart); ``saves.jsonl`` one line when the library's own save has returned
(``begun.jsonl``: before it, where the files themselves show too late that a save has begun); ``steps.jsonl`` one line
per finished step. A process holds a lock for its whole life, and one that finds it taken writes to ``double``. Without
the variable (the run that nobody touches) nothing of this happens.

``slow`` in that directory makes training slow enough to be hit: a pause at each step, and a moment before each file
that is written, renamed or removed in the output directory. The order of the trainer's own operations stays.
``order`` in it ("raise" or "hang") is carried out once, by the first rank, at its next step.
"""

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTROL = Path(os.environ["TRAINERS_CONTROL"]) if "TRAINERS_CONTROL" in os.environ else None
RANK = int(os.environ.get("RANK", "0"))
STEP_SECONDS, FILE_SECONDS = 0.15, 0.05


def _append(name: str, **line: Any) -> None:
    if CONTROL is not None and RANK == 0:
        with (CONTROL / name).open("a") as out:
            out.write(json.dumps({**line, "pid": os.getpid(), "at": time.time()}) + "\n")


def begin(output: Path, resumed: str) -> None:
    """Call it first of all, with the checkpoint that was passed (empty: none)."""
    if CONTROL is None:
        return
    lock = os.open(CONTROL / f"rank{RANK}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)  # never closed
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with (CONTROL / "double").open("a") as out:
            out.write(f"rank {RANK}: {os.getpid()} {time.time()}\n")
    (CONTROL / f"rank{RANK}.new").write_text(str(os.getpid()))
    (CONTROL / f"rank{RANK}.new").replace(CONTROL / f"rank{RANK}.pid")
    if RANK == 0:
        (CONTROL / "trainer.new").write_text(str(os.getpid()))
        (CONTROL / "trainer.new").replace(CONTROL / "trainer.pid")
    here = sorted(p.name for p in output.glob("*") if not p.is_dir() or any(p.iterdir()))
    _append("lives.jsonl", resumed=resumed, here=here)
    sys.addaudithook(_slow_motion(os.path.realpath(output)))


def _slow_motion(output: str) -> Callable[[str, tuple[Any, ...]], None]:
    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            writes = isinstance(path, str) and path.startswith(output) and bool(flags & (os.O_WRONLY | os.O_RDWR))
        else:  # removals name an entry of a directory that is open: whichever it is, training removes little else
            writes = event in ("os.remove", "os.rename", "os.mkdir")
        if writes:
            moment()

    return watch


def moment() -> None:
    """A pause before one file, while this is asked for."""
    if CONTROL is not None and (CONTROL / "slow").exists():
        time.sleep(FILE_SECONDS)


def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
    """For writers in C++ and Rust, whose files no audit hook sees."""

    def call(*arguments: Any, **named: Any) -> Any:
        moment()
        return function(*arguments, **named)

    return call


def step(number: int) -> None:
    """Call it after each step, before its save."""
    if CONTROL is None:
        return
    _append("steps.jsonl", step=number)
    if (CONTROL / "slow").exists():
        time.sleep(STEP_SECONDS)
    if RANK != 0:
        return
    try:
        order = (CONTROL / "order").read_text()
    except FileNotFoundError:
        return
    (CONTROL / "order").unlink()
    if order == "raise":
        raise RuntimeError("an exception in the training script, as it was ordered")
    while order == "hang":
        time.sleep(60)


def begins(number: int) -> None:
    """Call it before a save whose files appear at once."""
    _append("begun.jsonl", step=number)


def saved(number: int) -> None:
    """Call it when the library's save has returned."""
    _append("saves.jsonl", step=number)
