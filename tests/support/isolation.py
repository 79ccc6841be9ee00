"""A pytest plugin: each test file that starts podwatch or looks at processes runs in a PID namespace of its own.

podwatch attaches to training it finds, and commands end it. So no test may see a process that it did not start, and
none of its own may outlive it. The tests of a file run in a child process inside a new namespace (a suite's files share
one, because they share a booted machine): they see its processes only, /run, podwatch's own directories and $HOME are
empty, and the kernel ends all of it with the last test, or when pytest is killed. After each test whatever it left
running is killed, so that the next one finds only what fixtures of the file keep.

Where no namespace can be made these tests are skipped, with one line; with TESTS_MUST_ISOLATE=1 (the gate)
that is an error.
"""

import contextlib
import math
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import namespaces, warm

PURE = ("decisions", "detection", "domain", "policy")
"""Folders whose tests neither start podwatch nor look at processes."""
WAITING = ("blackbox",)
"""Folders whose tests mostly wait for processes."""
PRIVATE = (Path("/run"), Path("/var/lib/podwatch"), Path("/etc/podwatch"))
SPARE = 120.0
"""Seconds after a test's own timeout until the process that runs it is given up."""


def group_of(path: Path, tests: Path) -> str:
    """The tests that share a process have the same group. Empty for suites/gpu: a driver names pids of the machine."""
    folders = path.relative_to(tests).parts
    if folders[0] == "suites":
        return "" if folders[1] == "gpu" else "/".join(folders[:2])
    return folders[0] if folders[0] in PURE else "/".join(folders)


class Isolation:
    """In the process that pytest (or xdist) started: hands each test to the process of its group."""

    def __init__(self, config: pytest.Config) -> None:
        self._tests = config.rootpath / "tests"
        self._worker: _Worker | None = None
        self._impossible = namespaces.why_impossible()
        if self._impossible and os.environ.get("TESTS_MUST_ISOLATE"):
            raise pytest.UsageError(f"no PID namespace can be made here, and the gate needs them: {self._impossible}")

    # -- one after another

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        group = self._group(item)
        if not group or group in PURE:
            return None
        item.config.pluginmanager.hook.pytest_timeout_cancel_timer(item=item)  # the child sets one of its own
        if self._impossible:
            self._skip(item)
            return True
        if self._worker is None or self._worker.group != group:
            self._leave()
            self._worker = _Worker(group, item.session)
        self._worker.begin(item, nextitem)
        while self._worker.advance():
            pass
        if nextitem is None or self._group(nextitem) != group or self._worker.broken:
            self._leave()
        return True

    def pytest_sessionfinish(self) -> None:
        self._leave()

    # -- several groups at a time

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """With --parallel. A worker of pytest-xdist would collect all tests and import all of podwatch for itself."""
        size = session.config.getoption("parallel")
        if not size or self._impossible or session.config.option.collectonly or session.testsfailed:
            return None
        if reporter := session.config.pluginmanager.get_plugin("terminalreporter"):
            reporter.showfspath = False  # reports of several files come in turn
        waiting = self._groups(session.items)
        workers: dict[socket.socket, _Worker] = {}
        ending: list[_Worker] = []
        try:
            while waiting or workers:
                while waiting and len(workers) < size:
                    items = _next(waiting, sum(worker.waits for worker in workers.values()) < size / 2)
                    worker = _Worker(self._group(items[0]), session)
                    worker.run_all(items)
                    workers[worker.line] = worker
                for line in select.select(list(workers), [], [], 1.0)[0]:
                    workers[line].advance()
                for worker in [worker for worker in workers.values() if worker.finished or worker.overdue]:
                    del workers[worker.line]
                    worker.end()
                    ending.append(worker)
                    waiting += [worker.left] if worker.left else []
                ending = [worker for worker in ending if not worker.reaped(os.WNOHANG)]
                if session.shouldfail or session.shouldstop:
                    raise session.Interrupted(str(session.shouldfail or session.shouldstop))
        finally:
            for worker in (*workers.values(), *ending):
                worker.close()
        return True

    def _groups(self, items: list[pytest.Item]) -> list[list[pytest.Item]]:
        """Those with most tests first, so that the end waits for none of them."""
        groups: dict[str, list[pytest.Item]] = {}
        for item in items:
            groups.setdefault(self._group(item), []).append(item)
        return sorted(groups.values(), key=len, reverse=True)

    def _group(self, item: pytest.Item) -> str:
        return group_of(item.path, self._tests) if self._tests in item.path.parents else ""

    def _leave(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def _skip(self, item: pytest.Item) -> None:
        why = f"no PID namespace can be made here: {self._impossible}"
        place = (str(Path(__file__)), 1, f"Skipped: {why}")
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        report = pytest.TestReport(item.nodeid, item.location, {}, "skipped", place, "setup")
        item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _next(groups: list[list[pytest.Item]], waits: bool) -> list[pytest.Item]:
    """Take the next group: one that mostly waits, if ``waits``, else one that does not. While there are both, half of
    the workers wait and the others compute, and none of the long ones is left for the end."""
    first = next((group for group in groups if (group[0].path.parent.name in WAITING) == waits), groups[0])
    groups.remove(first)
    return first


class _Worker:
    """The process inside a namespace that runs the tests of one group, seen from outside."""

    def __init__(self, group: str, session: pytest.Session) -> None:
        self.group, self.broken = group, False
        self._config = session.config
        self._home = Path(tempfile.mkdtemp(prefix="podwatch-test-"))
        self._index = {item: number for number, item in enumerate(session.items)}
        self._item: pytest.Item | None = None
        self.left: list[pytest.Item] = []
        """Tests that it will run after the present one."""
        self._deadline = math.inf
        self.line, theirs = socket.socketpair()
        self._suite = group.startswith("suites/")
        warm.import_all()  # here, once for all files
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all, which this process removes

        def work() -> int:
            self.line.close()
            return _Inside(session, theirs, None if self._suite else self._home).serve()

        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = namespaces.fork_into_namespace(work, () if self._suite else PRIVATE)
        theirs.close()

    def run_all(self, items: list[pytest.Item]) -> None:
        """Begin with the first; ``advance`` begins the others."""
        self.left = items[1:]
        self.begin(items[0], items[1] if items[1:] else None)

    def begin(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        self._item, self._deadline = item, time.monotonic() + _timeout(item) + SPARE
        self.line.settimeout(_timeout(item) + SPARE)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        with contextlib.suppress(OSError):  # ``advance`` reports it
            _send(self.line, (self._index[item], None if nextitem is None else self._index[nextitem]))

    def advance(self) -> bool:
        """Wait for the next report of the present test and pass it on; whether it has more."""
        item = self._item
        assert item is not None
        try:
            data = _receive(self.line)
        except (OSError, EOFError) as error:
            self._give_up(f"the process that runs this test gave no answer: {error!r}")
            return False
        if data is not None:
            report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
            item.ihook.pytest_runtest_logreport(report=report)
            return True
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        self._item = None
        if self.left:
            self.run_all(self.left)
        return False

    def _give_up(self, why: str) -> None:
        """The present test has failed, and its process is of no more use."""
        item, self._item, self.broken = self._item, None, True
        assert item is not None
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
        item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    @property
    def waits(self) -> bool:
        return self.group.partition("/")[0] in WAITING

    @property
    def finished(self) -> bool:
        return self._item is None

    @property
    def overdue(self) -> bool:
        """Whether its present test took so long that it is given up: reports it then."""
        if time.monotonic() > self._deadline and not self.finished:
            self._give_up("the process that runs this test did not end it in time")
        return self.broken

    def close(self) -> None:
        """End the process and the namespace, and wait for that. ``left`` are the tests that it has not begun."""
        self.end()
        self.reaped()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.line.shutdown(socket.SHUT_RDWR)  # the processes above it have copies
        self.line.close()
        if self.broken or not self.finished:
            os.kill(self._pid, signal.SIGKILL)

    def reaped(self, options: int = 0) -> bool:
        """Whether the namespace has ended: with os.WNOHANG without waiting for it."""
        if os.waitpid(self._pid, options) == (0, 0):
            return False
        shutil.rmtree(self._home, ignore_errors=True)
        return True


def _timeout(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    own = (*marker.args, marker.kwargs.get("timeout"))[0] if marker else None
    return float(own or item.config.getoption("timeout") or item.config.getini("timeout") or 600)


def _send(line: socket.socket, message: Any) -> None:
    data = pickle.dumps(message)
    line.sendall(len(data).to_bytes(8, "big") + data)


def _receive(line: socket.socket) -> Any:
    return pickle.loads(_exactly(line, int.from_bytes(_exactly(line, 8), "big")))


def _exactly(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = line.recv(size - len(data))
        if not more:
            raise EOFError("it has ended")
        data += more
    return data


class _Inside:
    """In the namespace: runs the tests whose numbers it gets, and sends their reports."""

    def __init__(self, session: pytest.Session, line: socket.socket, home: Path | None) -> None:
        self._session, self._line, self._suite = session, line, home is None
        self._kept = set[int]()
        plugins = session.config.pluginmanager
        for name, plugin in plugins.list_name_plugin():
            reports = hasattr(plugin, "pytest_runtest_logreport") and name not in ("session", "logging-plugin")
            if reports or isinstance(plugin, Isolation):
                plugins.unregister(plugin)  # it reports to whoever started pytest
        plugins.register(self, "inside-a-namespace")
        _forget_this_namespace()
        _hear_signals()
        if home is not None:
            _use_own_directories(home)
        self._kept.add(warm.fork_here())

    def serve(self) -> int:
        """Until the line is closed."""
        items = self._session.items
        while True:
            try:
                number, following = _receive(self._line)
            except EOFError:
                sys.stdout.flush()
                sys.stderr.flush()
                return 0
            before = namespaces.others()
            nextitem = None if following is None else items[following]
            self._session.config.hook.pytest_runtest_protocol(item=items[number], nextitem=nextitem)
            if not self._suite:  # a booted system starts processes when it likes
                _end_all(lambda before=before: namespaces.others() - before - self._kept)
            _send(self._line, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self._session.config
        _send(self._line, config.hook.pytest_report_to_serializable(config=config, report=report))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """What a fixture of a file starts lives as long as the fixture, not as its first test."""
        before = namespaces.others() if fixturedef.scope != "function" else None
        result = yield
        if before is not None:
            self._kept |= namespaces.others() - before
        return result


def _forget_this_namespace() -> None:
    """What podwatch's modules cached before the fork, such as the number of the PID namespace, is asked for again."""
    for name, module in list(sys.modules.items()):
        for value in vars(module).values() if name.startswith("podwatch.") else ():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def _hear_signals() -> None:
    """Whoever started pytest may have ignored some (a job in the background, nohup): processes would inherit that."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _use_own_directories(home: Path) -> None:
    """No setting, key or directory of whoever runs the tests reaches podwatch."""
    for name in list(os.environ):
        if name.startswith(("B2_", "AWS_", "XDG_", "NOTIFY_", "WANDB_")) or (
            name.startswith("PODWATCH_") and "__" in name
        ):
            del os.environ[name]
    for name in ("PODWATCH_CONFIG", "PODWATCH_RUN", "PODWATCH_RUNTIME_DIR", "PODWATCH_TEST_TIMES"):
        os.environ.pop(name, None)
    os.environ["HOME"] = str(home)


def _end_all(left: Callable[[], set[int]]) -> None:
    """SIGKILL until none is left, for 10 s at most: what is stuck in the kernel ends with the namespace."""
    end = time.monotonic() + 10
    while (pids := left()) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
