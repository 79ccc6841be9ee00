"""Short commands, the scrubbed environment, and a lock between real processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from podwatch.domain.errors import Busy, HostError
from podwatch.system import procfs
from podwatch.system.child import run_child
from podwatch.system.environment_without_secrets import scrubbed_environment
from podwatch.system.files import FileLock
from tests.support.pod import LIMITS


def test_scrubbing() -> None:
    secret = {
        "B2_APPLICATION_KEY": "s",
        "B2_ENVIRONMENT": "x",
        "PODWATCH_SYNC__STORE": "x",
        "PODWATCH_CONFIG": "x",
        "NOTIFY_SOCKET": "/x",
        "WATCHDOG_USEC": "1",
        "WATCHDOG_PID": "1",
        "CREDENTIALS_DIRECTORY": "/x",
        "JOURNAL_STREAM": "1:2",
        "INVOCATION_ID": "x",
        "LISTEN_FDS": "1",
        "LISTEN_PID": "1",
        "STATE_DIRECTORY": "/x",
    }
    kept = {"PATH": "/bin", "HOME": "/root", "WANDB_API_KEY": "w", "PYTHONPATH": "/x", "CUDA_VISIBLE_DEVICES": "0"}
    assert scrubbed_environment({**secret, **kept}) == kept
    assert "PYTHONPATH" not in scrubbed_environment(kept, keep_python=False)


async def test_output_code_stdin_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("B2_APPLICATION_KEY", "topsecret")
    done = await run_child(
        ["sh", "-c", "cat; echo $B2_APPLICATION_KEY-; echo err >&2; exit 3"], timeout=60, stdin=b"hi\n"
    )
    assert (done.code, done.output, done.timed_out, done.ok) == (3, "hi\n-\nerr\n", False, False)


async def test_timeout_kills_the_whole_group(tmp_path: Path) -> None:
    pidfile = tmp_path / "pid"
    for limit in LIMITS:
        done = await run_child(["sh", "-c", f"sleep 61 & echo $! > {pidfile}; wait"], timeout=limit)
        assert done.timed_out
        assert not done.ok
        if pidfile.exists() and pidfile.read_text():
            break
    sleeper = int(pidfile.read_text())
    deadline = time.monotonic() + 60
    while (found := procfs.read_stat(sleeper)) is not None and found.state not in "ZX":
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_a_background_child_that_keeps_the_pipe_open_ends_at_the_timeout() -> None:
    done = await run_child(["sh", "-c", "sleep 61 & exit 0"], timeout=0.3)
    assert done.timed_out


async def test_too_much_output_is_cut() -> None:
    done = await run_child(["sh", "-c", "head -c 300000 /dev/zero"], timeout=60, limit=1000)
    assert done.ok
    assert len(done.output) == 1000


async def test_a_program_that_does_not_exist() -> None:
    with pytest.raises(HostError, match="no-such-program"):
        await run_child(["no-such-program"], timeout=1)


def test_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lock"
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom podwatch.system.files import FileLock\n"
        "FileLock(Path(sys.argv[1])).acquire(); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        lock = FileLock(path)
        with pytest.raises(Busy, match=f"process {holder.pid} ") as caught:
            lock.acquire(what="run demo")
        assert "run demo" in str(caught.value)
        holder.kill()
        holder.wait()
        lock.acquire()
        assert lock.held
        lock.release()
        with lock:
            assert f'"pid": {os.getpid()}' in path.read_text()
