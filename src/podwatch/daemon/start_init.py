"""Starts podwatch's own init (init.py), as this process or in the background: the side of ``podwatch run``."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

INIT = Path(__file__).absolute().with_name("init.py")
READY_WAIT = 30.0


def start_init(argv: list[str], *, detach: bool, log_path: Path, run_dir: Path, job: tuple[str, ...] = ()) -> int:
    """Run init for the daemon ``argv``; creates the directories of both paths.

    ``job``: init's options in job mode. With ``detach``, starts init in the background and returns 0 once the daemon is
    ready, else the daemon's exit code, after at most 30 s, with a message on stderr. Otherwise this process becomes
    init and does not return.
    """
    for directory in (run_dir, log_path.parent):
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError:
            pass  # init works without init.pid and without a log
    command = [getattr(sys, "_base_executable", "") or sys.executable, "-I", "-S", "-E", str(INIT)]
    command += ["--run-dir", str(run_dir)]
    if not detach:
        sys.stdout.flush()
        sys.stderr.flush()
        if job:  # kept until init has its handlers: a signal in between must not end the job with its own code
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
        os.execv(command[0], [*command, *job, "--", *argv])  # noqa: S606 - argv by design
    report_r, report_w = os.pipe()
    child = subprocess.Popen(
        [*command, "--detached", "--log", str(log_path), "--report-fd", str(report_w), "--", *argv],
        stdin=subprocess.DEVNULL,
        pass_fds=(report_w,),
        start_new_session=True,
    )
    child.wait()  # forks and ends at once
    os.close(report_w)
    return _await_report(report_r, str(log_path))


def _await_report(fd: int, log_path: str) -> int:
    said = b""
    deadline = time.monotonic() + READY_WAIT
    try:
        while b"\n" not in said:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                print(f"podwatch is starting in the background, and is not ready yet; log: {log_path}", file=sys.stderr)
                return 0
            chunk = os.read(fd, 4096)
            if not chunk:
                print(f"podwatch cannot run in the background; log: {log_path}", file=sys.stderr)
                return 1
            said += chunk
    finally:
        os.close(fd)
    word, _, number = said.decode().strip().partition(" ")
    if word == "ready":
        print(f"podwatch runs in the background (init {number}); log: {log_path}", file=sys.stderr)
        return 0
    print(f"podwatch ended before it was ready (exit code {number}); log: {log_path}", file=sys.stderr)
    for line in _tail(log_path):
        print(f"  {line}", file=sys.stderr)
    return int(number)


def _tail(path: str, count: int = 5) -> list[str]:
    try:
        with Path(path).open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - 4096))
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    # A start-up error is plain text; JSON lines can be of another podwatch that runs with the same log.
    return ([line for line in lines if not line.startswith("{")] or lines)[-count:]
