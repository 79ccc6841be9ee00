# ruff: noqa: E501, PLW0108
"""The init with real processes: restarts, watchdog, signals, reaping, --detach."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podwatch.system import procfs
from podwatch.trainer import supervise
from tests.support import forking

pytestmark = pytest.mark.slow

DAEMON = """
import os, signal, socket, sys, time
where = sys.argv[1]
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
def tell(text): s.sendto(text.encode(), "\\0" + os.environ["NOTIFY_SOCKET"][1:])
def note(n, f):
    open(where + "/signals", "a").write(f"{n}\\n")
    if n == signal.SIGTERM: sys.exit(0)
for n in (signal.SIGTERM, signal.SIGHUP): signal.signal(n, note)
# Only now: who sees this start may signal it.
with open(where + "/starts", "a") as f: f.write(f"{os.getpid()} {os.environ['PODWATCH_UNDER_INIT']}\\n")
count = len(open(where + "/starts").readlines())
assert int(os.environ["WATCHDOG_PID"]) == os.getpid()
exec(sys.argv[2])
"""
SERVE = "tell('READY=1')\nwhile True:\n    tell('WATCHDOG=1'); time.sleep(0.05)"


def until(check: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


class Box:
    program: tuple[str, ...] = (supervise.__file__, "init")

    def __init__(self, root: Path) -> None:
        self.root = root
        self.processes: list[subprocess.Popen[bytes]] = []

    def daemon(self, body: str) -> list[str]:
        return [sys.executable, "-S", "-c", DAEMON, str(self.root), body]

    def start(self, body: str, *options: str, wrap: tuple[str, ...] = ()) -> "subprocess.Popen[bytes]":
        base = [sys.executable, "-I", "-S", "-E", *self.program, "--run-dir", str(self.root), "--backoff", "0.05"]
        with (self.root / "init.log").open("ab") as log:
            process = subprocess.Popen([*wrap, *base, *options, "--", *self.daemon(body)], stdout=log, stderr=log)
        self.processes.append(process)
        return process

    @property
    def starts(self) -> list[int]:
        try:
            return [int(line.split()[0]) for line in (self.root / "starts").read_text().splitlines()]
        except FileNotFoundError:
            return []

    @property
    def said(self) -> str:
        return (self.root / "init.log").read_text()


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()
    for pid in procfs.all_pids():
        if str(tmp_path) in " ".join(procfs.command(pid)):
            forking.kill(pid)


def test_restarts_after_a_crash_with_pauses_then_serves(box: Box) -> None:
    process = box.start("sys.exit(3) if count == 1 else os.kill(os.getpid(), 9) if count == 2 else None\n" + SERVE)
    until(lambda: len(box.starts) == 3)
    assert "exit code 3" in box.said
    assert "signal 9" in box.said
    assert "0.05 s" in box.said
    assert "0.1 s" in box.said
    assert (box.root / "init.pid").read_text() == f"{process.pid}\n"
    process.terminate()
    assert process.wait(60) == 0
    assert (box.root / "signals").read_text() == f"{signal.SIGTERM}\n"
    assert not (box.root / "init.pid").exists()


@pytest.mark.parametrize("code", [0, 64, 65, 77, 78, 86])
def test_not_restarted(box: Box, code: int) -> None:
    assert box.start(f"sys.exit({code})").wait(60) == code
    assert len(box.starts) == 1


def test_a_hung_daemon_is_aborted_then_killed_and_started_again(box: Box) -> None:
    body = "signal.signal(signal.SIGABRT, signal.SIG_IGN); tell('READY=1'); time.sleep(300)"
    process = box.start(f"if count == 1:\n    {body}\n" + SERVE, "--watchdog", "5", "--abort-wait", "0.2")
    until(lambda: len(box.starts) == 2)
    assert "no heartbeat" in box.said
    time.sleep(6)  # a fed watchdog stays quiet
    assert len(box.starts) == 2
    assert process.poll() is None


def test_the_next_daemon_learns_for_how_long_none_responded(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in a row did not: the time counts from the last word of the first. Once one is ready nothing is known of it
    any more."""
    body = (
        "open(where + '/silent', 'a').write(os.environ.get('PODWATCH_SILENT_SECONDS', 'none') + '\\n')\n"
        "if count in (1, 2):\n    if count == 1: tell('READY=1')\n    time.sleep(300)\n"
        "tell('READY=1')\nif count == 3: time.sleep(0.2); sys.exit(3)\n"
    )
    flags = ("--watchdog", "5", "--start-timeout", "5", "--abort-wait", "0.2")
    monkeypatch.setenv("PODWATCH_SILENT_SECONDS", "77")  # of an init further up: not of this one
    box.start(body + SERVE, *flags)
    until(lambda: (box.root / "silent").exists() and len((box.root / "silent").read_text().split()) >= 4)
    first, second, third, fourth = (box.root / "silent").read_text().split()[:4]
    assert (first, fourth) == ("none", "none")
    assert 5 <= float(second) < float(third)
    assert float(third) >= 10


def test_a_daemon_that_is_never_ready_is_started_again(box: Box) -> None:
    box.start("time.sleep(300) if count == 1 else None\n" + SERVE, "--start-timeout", "0.5", "--abort-wait", "0.2")
    until(lambda: len(box.starts) >= 2)
    assert "not ready in time" in box.said


def test_extended_start_and_stopping_are_respected(box: Box) -> None:
    body = (
        "tell('EXTEND_TIMEOUT_USEC=20000000'); time.sleep(2.5); tell('READY=1\\nSTOPPING=1'); time.sleep(0.6)\n"
        "sys.exit(0)"
    )
    # The first word must come within the start timeout: a Python takes its time on a busy machine.
    assert box.start(body, "--start-timeout", "2", "--watchdog", "0.3").wait(60) == 0
    assert len(box.starts) == 1


def test_strangers_cannot_feed_the_watchdog(box: Box) -> None:
    body = (
        "tell('READY=1')\n"
        "if count == 1:\n"
        "    if os.fork() == 0:\n"
        "        while True: tell('WATCHDOG=1'); time.sleep(0.05)\n"
        "    time.sleep(300)\n"
    )
    box.start(body + SERVE, "--watchdog", "0.5", "--abort-wait", "0.2")
    until(lambda: len(box.starts) >= 2)


def test_sighup_is_forwarded_and_orphans_are_reaped(box: Box) -> None:
    orphan = "p = os.fork()\nif p == 0:\n    if os.fork() == 0: open(where + '/orphan', 'w').write(str(os.getpid())); time.sleep(0.3)\n    os._exit(0)\nos.waitpid(p, 0)\n"
    process = box.start(orphan + SERVE)
    until(lambda: (box.root / "orphan").exists() and (box.root / "orphan").read_text())
    pid = int((box.root / "orphan").read_text())
    until(lambda: (s := procfs.read_stat(pid)) is None or s.parent_pid == process.pid)
    until(lambda: procfs.read_stat(pid) is None)  # no zombie stays
    signals = box.root / "signals"

    def heard() -> bool:
        process.send_signal(signal.SIGHUP)  # not passed on before READY was heard
        return signals.exists() and bool(signals.read_text())

    until(heard)
    assert set(signals.read_text().split()) == {str(int(signal.SIGHUP))}
    assert process.poll() is None


def test_a_reload_that_comes_too_early_does_not_end_the_daemon(box: Box) -> None:
    """It reads the configuration all the same, a moment later."""
    unready = "signal.signal(signal.SIGHUP, signal.SIG_DFL)\nopen(where + '/up', 'w')\nwhile not os.path.exists(where + '/go'): time.sleep(0.01)\n"
    process = box.start(unready + SERVE)
    until(lambda: (box.root / "up").exists())
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    (box.root / "go").touch()
    time.sleep(0.3)
    assert len(box.starts) == 1
    assert "podwatch ended" not in box.said


NO_PROCESS = """
import errno, os, runpy, sys
fork, left = os.fork, [2]
def refused():
    left[0] -= 1
    if left[0] >= 0: raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return fork()
os.fork = refused
sys.argv = sys.argv[5:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_no_process_to_be_had_is_waited_for(box: Box) -> None:
    """As PID 1 its end would be that of training."""
    process = box.start(SERVE, wrap=(sys.executable, "-I", "-S", "-E", "-c", NO_PROCESS))
    until(lambda: len(box.starts) == 1)
    assert box.said.count("cannot start podwatch (Resource temporarily unavailable)") == 2
    assert process.poll() is None


def test_detached_sigterm_leaves_other_children_alone(box: Box) -> None:
    body = "import subprocess\np = subprocess.Popen(['sleep', '77'], start_new_session=True)\nopen(where + '/supervisor', 'w').write(str(p.pid))\n"
    process = box.start(body + SERVE)
    until(lambda: (box.root / "supervisor").exists() and (box.root / "supervisor").read_text())
    supervisor = int((box.root / "supervisor").read_text())
    process.terminate()
    assert process.wait(60) == 0
    status = procfs.read_stat(supervisor)
    assert status is not None
    assert status.state != "Z"
    os.kill(supervisor, signal.SIGKILL)


HELD = """
import os, runpy, signal, sys, time
def told():
    os.kill(os.getppid(), signal.SIGTERM)
    deadline = time.monotonic() + 60
    while not signal.sigpending() and time.monotonic() < deadline: time.sleep(0.01)
os.register_at_fork(after_in_child=told)
sys.argv = sys.argv[5:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Init whose child, just forked, lets it be told to end, and goes on only once that has been passed on to it."""


def test_a_daemon_that_is_just_being_started_is_told_too(box: Box) -> None:
    process = box.start(SERVE, "--grace", "20", wrap=(sys.executable, "-I", "-S", "-E", "-c", HELD))
    assert process.wait(60) == 128 + signal.SIGTERM
    assert box.starts == []
    assert "started again" not in box.said


unshare = pytest.mark.skipif(
    subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True).returncode != 0,
    reason="a pid namespace of its own needs root",
)
PID1 = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
SUPERVISOR = "import subprocess\nif count == 1:\n    subprocess.Popen(['sh', '-c', 'trap \"echo term >> ' + where + '/training; exit\" TERM; touch ' + where + '/up; while :; do sleep 0.05; done'], start_new_session=True)\n    while not os.path.exists(where + '/up'): time.sleep(0.01)\n"


@unshare
def test_pid_one_stays_for_training_when_the_configuration_is_bad_and_preempts_on_sigterm(box: Box) -> None:
    outer = box.start(SUPERVISOR + "sys.exit(78)", wrap=PID1)
    until(lambda: "init stays" in box.said)
    assert "pid1" in (box.root / "starts").read_text()
    assert outer.poll() is None
    (inner,) = procfs.children(outer.pid)
    os.kill(inner, signal.SIGTERM)
    assert outer.wait(60) == 78
    assert (box.root / "training").read_text() == "term\n"


@unshare
def test_a_job_whose_daemon_is_killed_after_it_decided_returns_what_it_decided(box: Box) -> None:
    """On a busy machine the exit can take longer than the grace: 137 would tell the engine nothing."""
    job = box.start("tell('PODWATCH_END=65')\nos.kill(os.getpid(), 9)", "--job", "--grace", "5", "--standby", "30")
    assert job.wait(60) == 65
    assert len(box.starts) == 1


def test_pid_one_tells_the_daemon_first_then_training(box: Box) -> None:
    outer = box.start(SUPERVISOR + SERVE, wrap=PID1)
    until(lambda: (box.root / "up").exists())
    (inner,) = procfs.children(outer.pid)
    os.kill(inner, signal.SIGTERM)
    assert outer.wait(60) == 0
    assert (box.root / "signals").read_text() == f"{signal.SIGTERM}\n"
    assert (box.root / "training").read_text() == "term\n"


def _detach(box: Box, body: str) -> "subprocess.CompletedProcess[str]":
    code = (
        "import sys; from pathlib import Path; from podwatch.app import entry\n"
        "r, argv = Path(sys.argv[1]), sys.argv[2:]\n"
        "sys.exit(entry.start_init(argv, detach=True, log_path=r / 'l' / 'log', run_dir=r))"
    )
    command = [sys.executable, "-c", code, str(box.root), *box.daemon(body)]
    return subprocess.run(command, capture_output=True, text=True, timeout=40)


@unshare
def test_pid_one_gives_the_daemon_the_grace_it_says_and_no_more(box: Box) -> None:
    """``preempt_grace`` is the daemon's to know; one that says nothing, or hangs, gets what init gives by itself."""
    stop = (
        "def term(*_):\n    {said}; time.sleep(30)\nsignal.signal(signal.SIGTERM, term)\nopen(where + '/armed', 'w')\n"
    )
    took = {}
    for said in ("pass", "tell('STOPPING=1\\nEXTEND_TIMEOUT_USEC=12000000')"):
        (box.root / "starts").unlink(missing_ok=True)
        process = box.start(stop.format(said=said) + SERVE, "--grace", "3", "--last", "0.3", wrap=PID1)
        until(lambda: box.starts)
        until(lambda: (box.root / "armed").exists())
        (box.root / "armed").unlink()
        (inner,) = procfs.children(process.pid)
        began = time.monotonic()
        os.kill(inner, signal.SIGTERM)
        process.wait(60)
        took[said] = time.monotonic() - began
    silent, asked = took.values()
    assert silent > 2.9
    assert 11.5 < asked < 28.0, "and not as long as the daemon would take"
    assert asked - silent > 1.0, "what it asks for is what it gets"


SAVES = "import subprocess\nif count == 1:\n    subprocess.Popen(['sh', '-c', 'trap \"sleep {seconds}; echo saved >> ' + where + '/training; exit\" TERM; touch ' + where + '/up; while :; do sleep 0.05; done'], start_new_session=True)\n    while not os.path.exists(where + '/up'): time.sleep(0.01)\n"
ASKS = "def term(*_):\n    tell('STOPPING=1\\nEXTEND_TIMEOUT_USEC={micro}'); os._exit(0)\nsignal.signal(signal.SIGTERM, term)\nopen(where + '/armed', 'w')\n"


@unshare
def test_training_that_saves_at_sigterm_has_the_rest_of_the_grace(box: Box) -> None:
    """``preempt_grace`` is for training, too, once podwatch's daemon has said its last words; and not more than that."""
    took = {}
    for seconds, micro in ((4, 40_000_000), (600, 8_000_000)):
        for name in ("starts", "up", "armed"):
            (box.root / name).unlink(missing_ok=True)
        body = SAVES.format(seconds=seconds) + ASKS.format(micro=micro) + SERVE
        process = box.start(body, "--last", "0.3", wrap=PID1)
        until(lambda: (box.root / "armed").exists())
        (inner,) = procfs.children(process.pid)
        began = time.monotonic()
        os.kill(inner, signal.SIGTERM)
        process.wait(120)
        took[seconds] = time.monotonic() - began
    assert (box.root / "training").read_text() == "saved\n"
    assert took[4] < 30, "it ends with the last process"
    assert 7.5 < took[600] < 25


def test_detach_returns_once_ready_and_leaves_a_small_init(box: Box) -> None:
    done = _detach(box, "print('hello', flush=True)\n" + SERVE)
    assert done.returncode == 0, done.stderr
    pid = int((box.root / "init.pid").read_text())
    assert f"(init {pid})" in done.stderr
    status = procfs.read_stat(pid)
    assert status is not None
    assert status.session != pid
    assert status.tty == 0
    assert (box.root / "l" / "log").read_text() == "hello\n"
    rss = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in x)
    assert int(rss.split()[1]) < 20 * 1024
    os.kill(pid, signal.SIGTERM)
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_a_second_init_leaves_the_number_of_the_first(box: Box) -> None:
    """A second podwatch of one run ends at once, being refused."""
    assert _detach(box, SERVE).returncode == 0
    first = (box.root / "init.pid").read_text()
    assert _detach(box, "sys.exit(75)").returncode == 75
    second = box.start("tell('READY=1'); sys.exit(0)")
    assert second.wait(60) == 0
    assert (box.root / "init.pid").read_text() == first
    os.kill(int(first), signal.SIGTERM)
    until(lambda: not (box.root / "init.pid").exists())
    (box.root / "init.pid").mkdir()  # nor is one that cannot be written a reason not to guard
    assert box.start("sys.exit(0)").wait(60) == 0
    assert len(box.starts) == 4


def test_detached_a_daemon_that_dies_later_is_started_again(box: Box) -> None:
    assert _detach(box, SERVE).returncode == 0
    init_pid = int((box.root / "init.pid").read_text())
    for count in (1, 2):
        os.kill(box.starts[-1], signal.SIGKILL)
        until(lambda count=count: len(box.starts) > count)
    assert int((box.root / "init.pid").read_text()) == init_pid
    os.kill(init_pid, signal.SIGTERM)
    until(lambda: not Path(f"/proc/{init_pid}").exists())


def test_detach_reports_what_went_wrong(box: Box) -> None:
    done = _detach(box, "print('bad: what, where, fix'); sys.exit(78)")
    assert done.returncode == 78
    assert "bad: what, where, fix" in done.stderr
    assert len(box.starts) == 1
    done = _detach(box, "sys.exit(75)")  # would be restarted, but somebody is here to read it
    assert done.returncode == 75
    until(lambda: not (box.root / "init.pid").exists())
    assert len(box.starts) == 2
