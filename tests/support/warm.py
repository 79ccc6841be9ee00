"""Start podwatch's commands, and the tests' stores, from a process that has imported them already.

A command of a test takes 0.5 s of CPU to import what it needs, and 0.02 s to do its work. Here each pytest worker
imports podwatch once, and a process that it forks for each test file forks a child for each command: with its own
environment, directory, standard streams, arguments and exit. What matters about the start itself (which modules are
imported, the console script, closed descriptors) is for tests that start an interpreter:
test_commands_in_a_poisoned_directory.py starts every command that way.

The same for the children of an upload and of a restore (``children``), which import for 0.2 s: they are forked there as
children of the process that starts them, which waits for them and whose end ends them.
"""

import array
import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import namespaces

ROOT = Path(__file__).parents[2]
CHILDREN = {"podwatch.store.transfer": "podwatch.store.transfer.__main__"}
"""As ``python -I -m`` names it -> the module whose ``main`` that calls."""
IMPORTED = (
    *CHILDREN.values(),
    "podwatch.config.loading",
    "pydantic_settings",
    "podwatch.app.main",
    "podwatch.store.objects.b2",
    "podwatch.store.objects.s3",
    "podwatch.store.restore.restore",
    "tests.cli.fake_daemon",
    "tests.support.b2server.server",
    "tests.support.s3server.server",
)


class Started:
    """A child of the warm process: what tests use of ``subprocess.Popen``."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._answer = line.makefile("r")
        self.pid = int(self._answer.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._line.settimeout(timeout)
            self.returncode = int(self._answer.readline())
            self._answer.close()
            self._line.close()
        return self.returncode

    def leave(self) -> int:
        """Its pid, for who waits for it otherwise."""
        self._answer.close()
        self._line.close()
        return self.pid

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class _Warm:
    """The warm process, seen from the process that starts children with it."""

    def __init__(self, line: socket.socket, pid: int) -> None:
        self.owner, self.pid = os.getpid(), pid
        self._line = line

    def usable(self) -> bool:
        """Whether it lives, and is ours and not that of the process that forked us."""
        return self.owner == os.getpid() and os.waitpid(self.pid, os.WNOHANG) == (0, 0)

    def start(self, request: dict[str, Any], streams: Sequence[int]) -> Started:
        answer, theirs = socket.socketpair()
        with theirs:
            fds = array.array("i", [*streams, theirs.fileno()])
            data = json.dumps(request).encode()
            self._line.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        return Started(answer)


_lock = threading.Lock()
_warm: _Warm | None = None


def import_all() -> None:
    """Import what the commands need: once, in the process whose children call ``fork_here``."""
    commands = pkgutil.iter_modules(importlib.import_module("podwatch.cli").__path__, "podwatch.cli.")
    for name in (*IMPORTED, *(module.name for module in commands)):
        importlib.import_module(name)


def fork_here() -> int:
    """Make the warm process of this process, by a fork; its pid. Call it while there is no other thread."""
    global _warm
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        line.close()
        interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.disable()
        gc.freeze()  # a collection would write to every page, and so copy it
        command = _serve(theirs)
        signal.signal(signal.SIGINT, interrupted)
        _exit_from(command)
    theirs.close()
    _warm = _Warm(line, pid)
    return pid


def _running() -> _Warm:
    if _warm is None or not _warm.usable():
        import_all()
        fork_here()
    assert _warm is not None
    return _warm


def start(
    module: str, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], streams: Sequence[int]
) -> Started:
    """``python -m module arguments`` with these descriptors as standard input, output and error."""
    with _lock:
        request = {"module": module, "arguments": list(arguments), "cwd": str(cwd), "env": dict(env)}
        return _running().start(request, streams)


@contextlib.contextmanager
def children() -> Iterator[None]:
    """In the block, the child of an upload or a restore is no new interpreter. Enter it in the main thread: the end of
    the thread that started the warm process would end these children."""
    start_interpreter = subprocess._fork_exec  # type: ignore[attr-defined]
    if not namespaces.can_clone():
        yield
        return
    with _lock:
        _running()

    def start_child(*given: Any) -> int:
        words, _, _, keep, cwd, env, stdin, _, _, stdout, _, stderr, _, failed, _, session = given[:16]
        argv = [os.fsdecode(word) for word in words]
        if CHILDREN.keys().isdisjoint(argv):
            pid: int = start_interpreter(*given)
            return pid
        assert argv[:3] == [sys.executable, "-I", "-m"], f"started in another way than here: {argv}"
        assert -1 not in (stdin, stdout, stderr), f"without pipes of its own: {argv}"
        variables = dict(os.fsdecode(pair).split("=", 1) for pair in env)
        kept = [fd for fd in keep if fd != failed]  # the pipe for a failed exec
        request = {
            "module": CHILDREN[argv[3]], "arguments": argv[4:], "cwd": os.fsdecode(cwd), "env": variables,
            "session": session, "child": True, "numbers": [0, 1, 2, *kept],
        }  # fmt: skip
        with _lock:
            return _running().start(request, [stdin, stdout, stderr, *kept]).leave()

    subprocess._fork_exec = start_child  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess._fork_exec = start_interpreter  # type: ignore[attr-defined]


def podwatch(
    *arguments: str, env: Mapping[str, str], cwd: Path | None = None, stdin: int | None = None, timeout: float = 150.0
) -> subprocess.CompletedProcess[str]:
    """``python -m podwatch arguments``, as ``subprocess.run`` with ``capture_output`` and ``text`` returns it.

    With a PYTHONPATH of the test's own it is a new interpreter: that is read at its start."""
    if env.get("PYTHONPATH", str(ROOT)) not in ("", str(ROOT)):
        return subprocess.run(
            [sys.executable, "-m", "podwatch", *arguments],
            cwd=cwd, env=env, stdin=subprocess.DEVNULL if stdin is None else stdin, capture_output=True, text=True,
            timeout=timeout,
        )  # fmt: skip
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, Path(os.devnull).open() as nothing:
        streams = [nothing.fileno() if stdin is None else stdin, out.fileno(), err.fileno()]
        child = start("podwatch.__main__", arguments, cwd=cwd or Path.cwd(), env=env, streams=streams)
        try:
            code = child.wait(timeout)
        except TimeoutError:
            child.kill()
            raise subprocess.TimeoutExpired(["podwatch", *arguments], timeout) from None
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(io.TextIOWrapper(file, encoding="utf-8").read())
    return subprocess.CompletedProcess(["podwatch", *arguments], code, *texts)


# -- the warm process -------------------------------------------------------------------------------------------------


def _serve(line: socket.socket) -> Callable[[], None]:
    """Forks for each request, and reports the exit of each child. Returns in the children only, with what they do."""
    answers: dict[int, tuple[int, int]] = {}
    waiting = select.poll()
    waiting.register(line, select.POLLIN)
    while True:
        for ready, _ in waiting.poll():
            if ready in answers:
                pid, answer = answers.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):
                    os.write(answer, f"{code}\n".encode())
                waiting.unregister(ready)
                os.close(ready)
                os.close(answer)
                continue
            data, extra, _, _ = line.recvmsg(1 << 18, socket.CMSG_SPACE(64))
            if not data:
                os._exit(0)  # pytest has ended
            fds = array.array("i")
            for _, _, payload in extra:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
            *streams, answer = fds
            request = json.loads(data)
            pid = namespaces.clone(_CLONE_PARENT) if request.get("child") else os.fork()
            if not pid:
                return _command(request, streams)
            os.write(answer, f"{pid}\n".encode())
            if request.get("child"):
                os.close(answer)
            else:
                pidfd = os.pidfd_open(pid)
                answers[pidfd] = pid, answer
                waiting.register(pidfd, select.POLLIN)
            for fd in streams:
                os.close(fd)


_CLONE_PARENT = 0x8000
"""The new process is a child of our parent."""


def _command(request: dict[str, Any], streams: list[int]) -> Callable[[], None]:
    numbers = request.get("numbers", [0, 1, 2])
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, 500) for fd in streams]
    for number, fd in zip(numbers, above, strict=True):
        os.dup2(fd, number)
    for last, number in zip(numbers[2:], [*numbers[3:], 1000], strict=True):
        os.closerange(last + 1, number)
    if request.get("session"):
        os.setsid()
    if request.get("child"):
        gc.enable()
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]  # as `python -m` does it
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    encoding = request["env"].get("PYTHONIOENCODING", "utf-8")
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding=encoding, errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    module = importlib.import_module(request["module"])
    sys.argv = [str(module.__file__), *request["arguments"]]
    found: Callable[[], None] = module.main
    return found


def _exit_from(command: Callable[[], Any]) -> None:
    """As the interpreter exits, but for the clearing of every module, which takes longer than the command."""
    code: Any = 0
    try:
        code = command()
    except SystemExit as end:
        code = end.code
        if not (code is None or isinstance(code, int)):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = 120
    os._exit(code or 0)
