"""Child process that runs one command of the operator: ``python -m podwatch.hooks.child_main``. Standard library only.

Between podwatch and the command, so that nothing the command does reaches podwatch: it has the lowest CPU priority, is
the first that the kernel kills when memory runs out, its output is read and bounded here, and everything that it
started ends with it: at the time limit, when it ends, and when podwatch ends, by SIGKILL too (standard input closes).

These are two processes: the worker does all that, and the one above it only waits. If the worker is killed, its
orphans get that one as their parent, which ends them. If both are killed, the command ends too, and what it had
started in other sessions stays.

Reads one JSON line (``start_child.Order``) from standard input, writes one JSON line with the result to its output.
"""

import ctypes
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IDLE = 3 << 13
LOG_BYTES = 1 << 20
"""The log is rotated once it is longer; one older file is kept."""
HEAD_BYTES, TAIL_BYTES = 512 << 10, 64 << 10
"""Of the output of one run, the start and the end are kept."""
LOCK_SECONDS = 20.0
"""How long an interrupted run may take to end before the next one of this hook starts."""
TURN_SECONDS = 0.2
"""Between two looks at the command."""


def give_way() -> None:
    """Lowest priority for CPU and disk, first choice of the kernel when memory runs out. Each where it is allowed."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 19)
    for name, value in (("autogroup", "19"), ("oom_score_adj", "1000")):
        with suppress(OSError), open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
            file.write(value)
    with suppress(OSError, AttributeError):
        if number := _IOPRIO_SET.get(os.uname().machine):
            ctypes.CDLL(None).syscall(number, 1, 0, _IDLE)


class Output:
    """The command's output: start and end, with the number of bytes in between that were dropped."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._in_tail = 0
        self.dropped = 0

    def add(self, data: bytes) -> None:
        free = HEAD_BYTES - len(self._head)
        if free > 0:
            self._head += data[:free]
            data = data[free:]
        if data:
            self._tail.append(data)
            self._in_tail += len(data)
        while self._tail and self._in_tail - len(self._tail[0]) >= TAIL_BYTES:
            gone = self._tail.popleft()
            self._in_tail -= len(gone)
            self.dropped += len(gone)

    def kept(self) -> bytes:
        middle = f"\n[podwatch: {self.dropped} bytes of output dropped]\n".encode() if self.dropped else b""
        return bytes(self._head) + middle + b"".join(self._tail)

    def end(self) -> str:
        return self.kept()[-TAIL_BYTES:].decode("utf-8", "replace")


def descendants(root: int) -> list[int]:
    """All living processes below ``root``."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123 - no pathlib in this small process
                    rest = file.read().rpartition(b")")[2].split()
                if rest[0] not in (b"Z", b"X"):
                    children.setdefault(int(rest[1]), []).append(int(name))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def end_descendants(reap: Callable[[], None]) -> int:
    """SIGKILL everything below this process; returns how many could not be ended."""
    end = time.monotonic() + 10.0  # a process that the disk holds does not end at once
    while left := descendants(os.getpid()):
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        reap()
        if time.monotonic() > end:
            return len(left)
        time.sleep(0.01)
    reap()
    return 0


def prctl(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value)


class Run:
    """One run of the command."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self.output = Output()
        self.status: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._orphaned = False

    def go(self) -> dict[str, Any]:
        """Run it to its end; returns the result."""
        began = time.monotonic()
        timed_out, problem = False, ""
        try:
            reader = self._start()
        except (OSError, KeyError, ValueError, subprocess.SubprocessError) as error:
            problem = getattr(error, "strerror", None) or str(error)
            return self.result(began, f"cannot start {self._order['argv'][0]}: {problem}")
        try:
            end = began + float(self._order["timeout"])
            while self.status is None and not self._orphaned:
                if time.monotonic() >= end:
                    timed_out = True
                    break
                self._turn(reader, min(TURN_SECONDS, max(0.0, end - time.monotonic())))
            if self.status is None:
                self._end_politely(reader)
            left = self._end_all()
            self._drain(reader)
            problem = "interrupted: podwatch ended" if self._orphaned else problem
            problem = problem or (f"{left} processes cannot be ended" if left else "")
        finally:
            os.close(reader)
        return self.result(began, problem, timed_out=timed_out)

    def _start(self) -> int:
        order = self._order
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        document = os.memfd_create("hook")
        try:
            os.write(document, order["document"].encode())
            os.lseek(document, 0, os.SEEK_SET)
            account: dict[str, Any] = {}
            if order["uid"] is not None:
                account = {"user": order["uid"], "group": order["gid"], "extra_groups": order["groups"]}
            self._process = subprocess.Popen(
                order["argv"],
                stdin=document,
                stdout=writer,
                stderr=writer,
                cwd=order["cwd"],
                env=order["env"],
                start_new_session=True,
                preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 - one thread
                **account,
            )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
            os.close(document)
        return reader

    def _turn(self, reader: int, seconds: float) -> None:
        """Read output for at most ``seconds``; see whether the command or podwatch ended."""
        watched = [reader] if self._orphaned else [reader, 0]
        ready, _, _ = select.select(watched, [], [], seconds)
        if 0 in ready and not os.read(0, 4096):
            self._orphaned = True
        if reader in ready and not self._read(reader):
            time.sleep(min(0.05, seconds))  # closed by the command, which still runs
        self._reap()

    def _read(self, reader: int) -> bool:
        """False once it is closed."""
        try:
            data = os.read(reader, 1 << 16)
        except BlockingIOError:
            return True
        self.output.add(data)
        return bool(data)

    def _reap(self) -> None:
        assert self._process is not None
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if ended[0] == self._process.pid:
                    self.status = os.waitstatus_to_exitcode(ended[1])
                    self._process.returncode = self.status

    def _end_politely(self, reader: int) -> None:
        """SIGTERM, and ``grace`` seconds."""
        assert self._process is not None
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGTERM)
        end = time.monotonic() + float(self._order["grace"]) * (0.2 if self._orphaned else 1.0)
        while self.status is None and time.monotonic() < end:
            self._turn(reader, 0.1)

    def _end_all(self) -> int:
        assert self._process is not None
        if self.status is None:
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return end_descendants(self._reap)

    def _drain(self, reader: int) -> None:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            if not select.select([reader], [], [], 0.0)[0] or not self._read(reader):
                return

    def result(self, began: float, problem: str, *, timed_out: bool = False) -> dict[str, Any]:
        return {
            "code": self.status,
            "seconds": round(time.monotonic() - began, 3),
            "timed_out": timed_out,
            "problem": problem,
            "dropped": self.output.dropped,
            "tail": self.output.end(),
        }


def write_log(path: str, order: dict[str, Any], output: bytes, result: dict[str, Any]) -> None:
    """Append the run to the hook's log, rotated before if it is long. A full disk loses the output only."""
    with suppress(OSError):
        if os.path.exists(path) and os.path.getsize(path) > LOG_BYTES:  # noqa: PTH110, PTH202
            os.replace(path, f"{path}.1")  # noqa: PTH105
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        ended = "time limit" if result["timed_out"] else result["problem"] or f"exit code {result['code']}"
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        head = f"=== {now} {order['title']}: {ended} after {result['seconds']} s\n"
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            file.write(head.encode() + output + (b"" if output.endswith(b"\n") or not output else b"\n"))


def take_lock(path: str) -> bool:
    """Take the lock of this hook or evaluation, until this process ends: wait for the end of an interrupted run of the
    same one. False if that does not come. Without a path there is none. Raises OSError."""
    if not path:
        return True
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        else:
            return True


def main() -> int:
    """Fork the worker and wait for it. SIGTERM kills it. If it did not end by itself, end what it left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    awaited = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        return work()
    ended: dict[int, int] = {}

    def reap() -> None:
        with suppress(ChildProcessError):
            while (one := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                ended[one[0]] = one[1]

    while worker not in ended:
        if signal.sigwaitinfo(awaited).si_signo == signal.SIGTERM:
            os.kill(worker, signal.SIGKILL)
        reap()
    if ended[worker] != 0:
        end_descendants(reap)
    return os.waitstatus_to_exitcode(ended[worker]) & 0xFF


def work() -> int:
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return 1
        line += chunk
    order = json.loads(line)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    give_way()
    run = Run(order)
    try:
        free = take_lock(order["lock"])
    except OSError:
        free = True  # the state directory cannot be written: run it without
    result = run.go() if free else run.result(time.monotonic(), "an interrupted run of it still has not ended")
    if order["log"]:
        write_log(order["log"], order, run.output.kept(), result)
    with suppress(OSError):
        os.write(1, json.dumps(result).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
