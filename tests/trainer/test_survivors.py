"""What is left of a tree whose supervisor was killed: found by marker and by session, ended, and never started
beside."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from podwatch.domain.errors import Busy
from podwatch.system import procfs
from podwatch.system.procfs import identify
from podwatch.trainer.supervisor_files import read_end
from tests.support.pod import Pod, eventually
from tests.support.ptys import terminal

pytestmark = pytest.mark.slow

TREE = """
(env -i sh -c 'trap "" TERM; echo $$ >> {pids}; while :; do sleep 0.05; done') &
(setsid sh -c 'echo $$ >> {pids}; exec sleep 300') &
python3 -c 'import os,time
if os.fork() == 0: os._exit(0)
open("{pids}", "a").write(str(os.getpid()) + "\\n"); time.sleep(300)' &
until [ $(wc -l < {pids} 2>/dev/null || echo 0) -ge 3 ]; do sleep 0.01; done
touch {ready}
wait
"""


def living(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        status = procfs.read_stat(pid)
        if status is not None and status.state not in "ZX":
            found.append(pid)
    return found


async def test_without_supervisor_and_launcher_everything_is_still_found(pod: Pod) -> None:
    """One that lost its environment (session tells), one that left the session (environment tells), one with a zombie
    child that it never reaps; nobody of the family is left to ask."""
    pids, ready = pod.root / "pids", pod.root / "ready"
    launcher = pod.launcher()
    handle = await launcher.start(pod.script(TREE.format(pids=pids, ready=ready)))
    eventually(ready.exists)
    tree = [int(line) for line in pids.read_text().split()]
    (forker,) = [pid for pid in tree if "os.fork()" in " ".join(procfs.command(pid))]
    (zombie,) = procfs.children(forker)
    eventually(lambda: (status := procfs.read_stat(zombie)) is not None and status.state == "Z")
    os.kill(handle.record.supervisor.pid, signal.SIGKILL)
    eventually(lambda: not handle.supervisor_lives())
    os.kill(handle.launcher.pid, signal.SIGKILL)
    eventually(lambda: procfs.read_stat(handle.launcher.pid) is None)

    other = pod.launcher()
    with pytest.raises(Busy, match="still running"):
        await other.start(pod.script("exec sleep 300", start_id="s2"))
    found = (await other.look()).handle
    assert found is not None
    assert (await found.exit_status()) is not None, "the launcher has ended"
    seen = (await found.tree()).value
    assert seen is not None
    assert set(tree) <= {p.identity.pid for p in seen}
    assert zombie not in {p.identity.pid for p in seen}
    report = await found.stop(grace=0.3, save_grace=0.3, saving=lambda: False)
    assert (report.survivors, report.killed >= 1) == ((), True)
    assert living(tree) == []
    await found.release()
    again = await other.start(pod.script("exec sleep 300", start_id="s3"))
    await again.stop(grace=5.0, save_grace=5.0, saving=lambda: False)
    await again.release()


async def test_a_persons_shell_is_not_the_trainers_session(pod: Pod) -> None:
    """Attached, the session is that of the shell it was started in: only what descends from the trainer is ended."""
    note = f"{pod.root}/pids"
    script = f"sleep 301 & a=$!; sh -c 'sleep 302 & wait' & echo $a $! > {note}.new; mv {note}.new {note}; wait"
    with subprocess.Popen(["sh", "-c", script], start_new_session=True) as shell:
        try:
            eventually((pod.root / "pids").exists)
            neighbour, pid = (int(word) for word in (pod.root / "pids").read_text().split())
            eventually(lambda: len(procfs.children(pid)) == 1)
            identity = identify(pid)
            assert identity is not None
            handle = await pod.launcher().attach(identity)
            report = await handle.stop(grace=5.0, save_grace=5.0, saving=lambda: False)
            assert report.survivors == ()
            assert living([pid, neighbour, shell.pid]) == [neighbour, shell.pid]
        finally:
            os.killpg(shell.pid, signal.SIGKILL)


async def test_a_port_of_an_engine_that_outlived_its_server_is_free_after_the_stop(pod: Pod) -> None:
    up = pod.root / "up"
    engine = (
        "import os, socket, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.setsid();"
        's = socket.create_server(("127.0.0.1", 0));'
        f'open("{up}.new", "w").write(str(s.getsockname()[1])); os.rename("{up}.new", "{up}"); time.sleep(300)'
    )
    handle = await pod.launcher().start(
        pod.script(f"python3 -c '{engine}' & until [ -e {up} ]; do sleep 0.01; done; exit 0")
    )
    eventually(up.exists)
    port = int(up.read_text())
    eventually(lambda: procfs.read_stat(handle.launcher.pid) is None)
    status = await handle.exit_status()
    assert status is not None
    assert status.code == 0, "the server says it ended well"
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port)).close()
    report = await handle.stop(grace=0.2, save_grace=0.2, saving=lambda: False)
    assert (report.killed, report.survivors) == (1, ())
    socket.create_server(("127.0.0.1", port)).close()
    await handle.release()
    eventually(
        lambda: not Path(f"/proc/{handle.record.supervisor.pid}").exists()
    )  # it has ended, and is reaped after that


async def test_the_end_of_the_launcher_is_recorded_and_its_survivors_are_found_by_it(pod: Pod) -> None:
    """The session's opener has ended and its supervisor too: who began before that end is still of this start."""
    pid = pod.root / "pid"
    left = f"env -i sh -c 'echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 300' &"
    handle = await pod.launcher().start(pod.script(f"{left} until [ -e {pid} ]; do sleep 0.01; done; exit 3"))
    eventually((pod.directory / f"exit-{pod.start_id()}.json").exists)
    at = read_end(pod.directory, pod.start_id())
    assert at is not None
    assert 0 <= time.clock_gettime(time.CLOCK_BOOTTIME) - at < 60
    os.kill(handle.record.supervisor.pid, signal.SIGKILL)
    eventually(lambda: not handle.supervisor_lives())
    with pytest.raises(Busy, match=pid.read_text().strip()):
        await pod.launcher().start(pod.script("exec sleep 300", start_id="s2"))
    found = (await pod.launcher().look()).handle
    assert found is not None
    assert {p.identity.pid for p in (await found.tree()).value or ()} == {int(pid.read_text())}
    report = await found.stop(grace=2.0, save_grace=2.0, saving=lambda: False)
    assert (report.survivors, living([int(pid.read_text())])) == ((), [])
    await found.release()


def with_environment_of(pid: int) -> dict[str, str]:
    """As an operator copies it from /proc, to repeat by hand what the trainer does."""
    words = (item.decode().partition("=") for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if item)
    return {name: value for name, _, value in words}


@pytest.mark.parametrize("supervisor", ["lives", "was killed"])
async def test_an_operators_terminal_with_the_trainers_environment_is_not_ended(pod: Pod, supervisor: str) -> None:
    """A shell and what runs in it; what it starts in another session; and what an unmarked shell runs."""
    launcher = pod.launcher()
    handle = await launcher.start(pod.script("sleep 300 & wait"))
    environ = with_environment_of(handle.launcher.pid)
    assert "PODWATCH_START_ID" in environ
    copy = " ".join(f"{name}='{value}'" for name, value in environ.items() if name.startswith("PODWATCH_"))
    notes = [pod.root / "foreground", pod.root / "apart", pod.root / "unmarked"]
    with terminal(["bash", "--norc"], environ=environ) as marked, terminal(["bash", "--norc"]) as plain:
        marked.type(f"setsid -w sh -c 'echo $$ > {notes[1]}; exec sleep 300' < /dev/null > /dev/null 2>&1 &")
        marked.type(f"sh -c 'echo $$ > {notes[0]}; exec sleep 300'")
        plain.type(f"env {copy} setsid -w sh -c 'echo $$ > {notes[2]}; exec sleep 300' < /dev/null > /dev/null 2>&1 &")
        eventually(lambda: all(note.exists() and note.read_text().strip() for note in notes))
        theirs = [marked.pid, plain.pid, *(int(note.read_text()) for note in notes)]
        try:
            if supervisor == "was killed":
                os.kill(handle.record.supervisor.pid, signal.SIGKILL)
                eventually(lambda: not handle.supervisor_lives())
            seen = (await handle.tree()).value
            assert seen is not None
            assert not {p.identity.pid for p in seen} & set(theirs)
            report = await handle.stop(grace=0.3, save_grace=0.3, saving=lambda: False)
            assert report.survivors == ()
            assert living(theirs) == theirs
            assert living([handle.launcher.pid]) == []
        finally:
            for pid in theirs[2:]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


async def test_a_task_that_a_service_starts_with_the_trainers_environment_is_ours(pod: Pod) -> None:
    """As Slurm's step daemon does for `srun` in a training command: it is not below the supervisor."""
    note = pod.root / "task"
    handle = await pod.launcher().start(pod.script("sleep 300 & wait"))
    task = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    environ = with_environment_of(handle.launcher.pid)
    service = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {task!r}], env={environ!r})"
    argv = ["sh", "-c", '"$@" > /dev/null 2>&1 & echo $!', "sh", "setsid", sys.executable, "-S", "-c", service]
    daemon = int(subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True).stdout)
    try:
        eventually(lambda: note.exists() and bool(note.read_text()))
        pid = int(note.read_text())
        os.kill(handle.record.supervisor.pid, signal.SIGKILL)
        eventually(lambda: not handle.supervisor_lives())
        report = await handle.stop(grace=5.0, save_grace=5.0, saving=lambda: False)
        assert report.survivors == ()
        assert living([pid]) == []
    finally:
        with suppress(ProcessLookupError):  # it ends with its task
            os.kill(daemon, signal.SIGKILL)
