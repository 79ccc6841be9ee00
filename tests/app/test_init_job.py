"""init as an engine's job: it returns the daemon's verdict, and nothing outlives it. Real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.system import procfs
from tests.app.test_init import SERVE, Box, until
from tests.support import forking

pytestmark = pytest.mark.slow

VERDICT = "tell('PODWATCH_END={code}')\nsys.exit({code})"
PIPE = "PODWATCH_JOB_PIPE"
SUPERVISOR = """
import os, select, signal, sys, time
fd, where = int(sys.argv[1]), sys.argv[2]
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a supervisor, which only passes it on
open(where + "/supervisor", "w").write(str(os.getpid()))
poll = select.poll()
poll.register(fd, 0)
poll.poll()
open(where + "/told", "w").write("end of file")
time.sleep(float(sys.argv[3]))
"""


class JobBox(Box):
    def job(self, body: str, *options: str, grace: float = 20.0) -> "subprocess.Popen[bytes]":
        return self.start(body, "--job", "--grace", str(grace), "--standby", "30", *options)

    def supervisor(self, seconds: float) -> str:
        """Code of a daemon that leaves a process behind, which waits for the end of the pipe and so many seconds."""
        (self.root / "supervise.py").write_text(SUPERVISOR)
        argv = [sys.executable, "-S", str(self.root / "supervise.py")]
        words = f"{argv!r} + [os.environ['{PIPE}'], where, '{seconds}']"
        return (
            f"import subprocess\nsubprocess.Popen({words}, start_new_session=True,"
            f" pass_fds=(int(os.environ['{PIPE}']),))\n"
            "p = where + '/supervisor'\nwhile not os.path.exists(p) or not open(p).read(): time.sleep(0.01)\n"
        )

    def kept(self) -> int:
        return int((self.root / "supervisor").read_text())


@pytest.fixture
def box(tmp_path: Path) -> Iterator[JobBox]:
    made = JobBox(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()
    for pid in procfs.all_pids():
        if str(tmp_path) in " ".join(procfs.command(pid)):
            forking.kill(pid)


@pytest.mark.parametrize("code", [0, 65, 69, 86])
def test_the_daemons_verdict_is_the_jobs_code(box: JobBox, code: int) -> None:
    assert box.job(VERDICT.format(code=code)).wait(60) == code
    assert len(box.starts) == 1


def test_a_signal_while_the_job_exits_does_not_replace_its_code(box: JobBox) -> None:
    """Slurm signals every other task of a job as soon as one has ended: at the interpreter's end a SIGTERM has its
    default action again, and the job would not be started again."""
    for _ in range(20):
        process = box.job("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + VERDICT.format(code=86))
        count = len(box.processes)
        until(lambda n=count: len(box.starts) >= n)  # type: ignore[misc]
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert process.returncode == 86


@pytest.mark.parametrize("code", [64, 65, 77, 78])
def test_an_error_that_every_attempt_repeats_ends_the_job(box: JobBox, code: int) -> None:
    assert box.job(f"sys.exit({code})").wait(60) == code
    assert len(box.starts) == 1


@pytest.mark.parametrize("ends", ["sys.exit(0)", "sys.exit(69)", "os.kill(os.getpid(), 9)"])
def test_an_end_without_a_verdict_is_retried_and_is_never_0(box: JobBox, ends: str) -> None:
    process = box.job(ends, "--standby", "300")
    until(lambda: len(box.starts) > 1)
    process.terminate()
    assert process.wait(60) == 86


def test_a_daemon_that_is_never_ready_uses_up_the_standby(box: JobBox) -> None:
    assert box.job("sys.exit(75)", "--standby", "0.2").wait(60) == 86
    assert "was not ready within 0.2 s" in box.said


def test_training_ends_before_the_job_and_gets_the_end_of_the_pipe(box: JobBox) -> None:
    process = box.job(box.supervisor(0.5) + VERDICT.format(code=0))
    assert process.wait(60) == 0
    assert (box.root / "told").exists()
    assert procfs.read_stat(box.kept()) is None


def test_what_does_not_end_within_the_grace_is_killed(box: JobBox) -> None:
    orphan = (
        "if os.fork() == 0:\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    os.setsid()\n"
        "    open(where + '/orphan', 'w').write(str(os.getpid()))\n    time.sleep(300)\n"
        "while not os.path.exists(where + '/orphan'): time.sleep(0.01)\n"
    )
    process = box.job(box.supervisor(300) + orphan + VERDICT.format(code=0), grace=1.0)
    assert process.wait(60) == 0
    assert procfs.read_stat(box.kept()) is None
    assert procfs.read_stat(int((box.root / "orphan").read_text())) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_daemon_and_training_at_once_and_repeats_change_nothing(
    box: JobBox, number: signal.Signals
) -> None:
    body = box.supervisor(1.0) + "signal.signal(signal.SIGTERM, lambda *_: None)\n" + SERVE
    process = box.job(body, grace=2.0)
    until(lambda: len(box.starts) == 1 and (box.root / "supervisor").exists())
    for again in (number, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        process.send_signal(again)
    until((box.root / "told").exists)
    assert process.poll() is None, "the daemon still says its last words"
    assert process.wait(60) == 86, "a job that was told to end is never completed"
    assert procfs.read_stat(box.kept()) is None


def test_a_verdict_that_was_reached_before_the_signal_counts(box: JobBox) -> None:
    body = (
        "signal.signal(signal.SIGTERM, lambda *_: (tell('PODWATCH_END=0'), os._exit(0)))\nopen(where + '/set', 'w')\n"
    )
    process = box.job(body + SERVE)
    until((box.root / "set").exists)
    process.terminate()
    assert process.wait(60) == 0


def test_a_killed_init_takes_the_daemon_and_training_with_it(box: JobBox) -> None:
    process = box.job(box.supervisor(0.1) + SERVE)
    until(lambda: len(box.starts) == 1 and (box.root / "supervisor").exists() and (box.root / "supervisor").read_text())
    daemon, supervisor = box.starts[0], box.kept()
    process.kill()
    process.wait()
    until((box.root / "told").exists)
    until(lambda: procfs.read_stat(daemon) is None)
    until(lambda: procfs.read_stat(supervisor) is None)


def test_the_daemon_knows_its_job(box: JobBox) -> None:
    body = "open(where + '/job', 'w').write(os.environ['PODWATCH_JOB_PROCESS'])\n" + VERDICT.format(code=0)
    process = box.job(body)
    assert process.wait(60) == 0
    boot, namespace, pid, ticks = (box.root / "job").read_text().split(":")
    assert (boot, int(namespace), int(pid)) == (procfs.boot_id(), procfs.pid_namespace(), process.pid)
    assert int(ticks) > 0
    assert (box.root / "starts").read_text().split()[1] == "job"


def test_a_signal_before_init_is_there_ends_the_job_with_86(tmp_path: Path) -> None:
    """From the moment at which podwatch can handle one: an engine may end a job while it starts."""
    config = tmp_path / "podwatch.toml"
    config.write_text(f'run_id = "early"\nstate_dir = "{tmp_path}/state"\n[trainer]\noutput_dir = "{tmp_path}/out"\n')
    config.chmod(0o600)
    command = [sys.executable, "-m", "podwatch", "-c", str(config), "run", "--job"]
    environ = {**os.environ, "PODWATCH_RUNTIME_DIR": str(tmp_path / "runtime")}
    process = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        until(lambda: _handled(process.pid, signal.SIGTERM))
        process.terminate()
        assert process.wait(60) == 86
    finally:
        process.kill()


def _handled(pid: int, number: int) -> bool:
    """Whether the process catches or blocks this signal."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    masks = {line.split(":")[0]: int(line.split()[1], 16) for line in lines if line.startswith(("SigCgt", "SigBlk"))}
    return any(mask & (1 << (number - 1)) for mask in masks.values())
