"""The keeper has its own code for /proc, because it imports nothing of podwatch. On a live tree it must see what
``podwatch.system.procfs`` sees."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from podwatch.domain.process import ProcessIdentity
from podwatch.system import procfs
from podwatch.trainer import keeper, operator_shells, process_tree
from tests.support.pod import eventually

LAUNCHER = """
import os, socket, subprocess, sys, threading, time
open("/proc/self/comm", "w").write("a ) (b c")
listening = socket.create_server(("127.0.0.1", 0))
held = open(sys.argv[1])
started = []
def start():  # a child that another thread than the first one has started
    started.append(subprocess.Popen([sys.executable, "-S", "-c", CHILD]))
    time.sleep(600)
CHILD = "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
threading.Thread(target=start, daemon=True).start()
subprocess.Popen(["sleep", "600"], start_new_session=True)
zombie = subprocess.Popen(["true"])
subprocess.Popen(["sleep", "600"], env={})
print("up", flush=True)
time.sleep(600)
"""


@dataclass(frozen=True)
class Tree:
    launcher: subprocess.Popen[str]
    start_id: str

    @property
    def pids(self) -> list[int]:
        return [self.launcher.pid, *procfs.descendants(self.launcher.pid)]


@pytest.fixture
def tree() -> Iterator[Tree]:
    start_id = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", LAUNCHER, os.devnull, "", "last"],
        env={**os.environ, "PODWATCH_START_ID": start_id},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    made = Tree(process, start_id)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        eventually(lambda: len(made.pids) == 6 and [state_of(pid) for pid in made.pids].count("Z") == 1)
        eventually(lambda: all(procfs.command(pid) for pid in made.pids if state_of(pid) != "Z"))
        yield made
    finally:
        for pid in reversed(made.pids):
            identity = procfs.identify(pid)
            if identity is not None:
                procfs.send_signal(identity, 9)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def state_of(pid: int) -> str | None:
    found = procfs.read_stat(pid)
    return found.state if found else None


def agree_on_stat(pid: int) -> bool:
    theirs = procfs.read_stat(pid)
    assert theirs is not None
    shown = (theirs.name, theirs.state, theirs.parent_pid, theirs.start_ticks, theirs.session)
    return keeper.stat_of(pid) == shown


def test_they_agree_on_each_process(tree: Tree) -> None:
    for pid in tree.pids:
        eventually(lambda pid=pid: agree_on_stat(pid))  # between two reads a process can begin to run or to wait
        assert keeper.ticks_of(pid) == procfs.start_ticks(pid)
        line, cuda, gpus = keeper.look_into(pid)
        assert tuple(line) == procfs.command(pid)
        use = procfs.cuda_use(pid)
        assert (cuda, gpus) == ((None, []) if use is None else (use.context, sorted(use.gpus)))
        links = procfs.open_files(pid) or {}
        inodes = [int(target[8:-1]) for target in links.values() if target.startswith("socket:[")]
        assert sorted(keeper.sockets_of(pid) or []) == sorted(inodes)
        same = keeper.environ_of(pid) == procfs._environment(pid)
        assert same, "not shown: an environment can hold secrets"
    assert keeper.stat_of(tree.launcher.pid)[0] == "a ) (b c"  # type: ignore[index] - the loop has seen that it is there
    assert keeper.sockets_of(tree.launcher.pid), "it listens"


def test_they_agree_on_the_tree(tree: Tree) -> None:
    for pid in tree.pids:
        assert keeper.children_of(pid) == procfs.children(pid)
        assert keeper.descendants_of(pid) == procfs.descendants(pid)
    assert len(keeper.descendants_of(tree.launcher.pid)) == 5


def test_they_agree_on_who_lives_and_who_is_signalled(tree: Tree) -> None:
    assert (keeper.boot_id(), keeper.pid_namespace()) == (procfs.boot_id(), procfs.pid_namespace())
    for pid in tree.pids:
        identity = procfs.identify(pid)
        assert identity is not None
        assert keeper.is_alive(pid, identity.start_ticks) == procfs.is_alive(identity) == (state_of(pid) != "Z")
        later = ProcessIdentity(pid, identity.start_ticks + 1, identity.boot_id, identity.pid_namespace)
        assert keeper.is_alive(pid, later.start_ticks) is procfs.is_alive(later) is False
        assert keeper.send_signal(pid, later.start_ticks, 9) is procfs.send_signal(later, 9) is False
        assert keeper.send_signal(pid, identity.start_ticks, 0) is procfs.send_signal(identity, 0) is True


def test_they_agree_on_what_belongs_to_a_start(tree: Tree) -> None:
    """By the mark in the environment, and by the session of the launcher."""
    marked = {identity.pid for identity in process_tree.marked(tree.start_id)}
    assert set(keeper.marked([tree.start_id])[0]) == marked
    assert len(marked) == 4, "not the one without environment, and not the zombie"
    launcher = procfs.identify(tree.launcher.pid)
    assert launcher is not None
    by_session = {identity.pid for identity in process_tree.in_session(launcher)}
    assert set(keeper.in_session(launcher.pid, launcher.start_ticks)) | {launcher.pid} == by_session | {launcher.pid}
    assert len(by_session | {launcher.pid}) == 4, "not the one with a session of its own, and not the zombie"


def test_they_agree_on_a_process_that_is_gone() -> None:
    with subprocess.Popen(["true"]) as process:
        ticks = keeper.ticks_of(process.pid)
    identity = ProcessIdentity(process.pid, ticks, procfs.boot_id(), procfs.pid_namespace())
    assert keeper.stat_of(process.pid) is procfs.read_stat(process.pid) is None
    assert keeper.children_of(process.pid) == procfs.children(process.pid) == []
    assert keeper.is_alive(process.pid, ticks) is procfs.is_alive(identity) is False
    assert keeper.send_signal(process.pid, ticks, 0) is procfs.send_signal(identity, 0) is False
    assert keeper.cuda_of(process.pid) == (None, [])
    assert procfs.cuda_use(process.pid) is None
    assert keeper.sockets_of(process.pid) is procfs.open_files(process.pid) is None


def test_they_wait_equally_long_for_an_exec() -> None:
    assert (keeper.EXEC_LOOKS, keeper.EXEC_PAUSE) == (procfs.EXEC_LOOKS, procfs.EXEC_PAUSE)
    assert keeper.KTHREADD == procfs.KTHREADD


def test_what_is_an_operators_for_the_keeper_is_one_for_podwatch() -> None:
    assert keeper.SHELLS <= operator_shells.SHELLS
    assert {name[:15] for name in operator_shells.TERMINALS} >= keeper.TERMINAL_SERVERS
