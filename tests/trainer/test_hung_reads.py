"""A process whose memory cannot be read because it is stuck in the kernel: nobody else is held up by it.

The stand-in is a /proc of our own in which its cmdline and environ are FIFOs: opening one hangs as the real read does,
and ends when the test wants it to.
"""

import asyncio
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.domain.errors import Busy
from podwatch.domain.process import ProcessIdentity
from podwatch.recovery import stale_files
from podwatch.system import procfs
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import SystemClock
from podwatch.system.procfs import boot_id, patiently, pid_namespace
from podwatch.trainer.find import read_pod
from podwatch.trainer.process_tree import LocalTree, in_session
from podwatch.trainer.rules import SoughtRun
from podwatch.trainer.start_and_adopt import SupervisorLauncher
from tests.support.known_trainers import ROLES
from tests.support.pod import eventually

pytestmark = pytest.mark.slow

MARK = b"PODWATCH_START_ID=s1\0"
PATIENCE = 0.3
"""Seconds of podwatch for one look. Far more than one that does not hang needs, on a busy machine too."""


class FakeProc:
    """``stuck`` are processes whose memory cannot be read, until ``free``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stuck: set[int] = set()
        (root / str(os.getpid()) / "task" / str(os.getpid())).mkdir(parents=True)
        (root / "meminfo").write_text("no process")

    def add(
        self, pid: int, *, ticks: int = 5, session: int = 0, tty: int = 0, stuck: bool = False, cuda: bool = False,
        command: bytes = b"python\0x.py\0", ours: bool = True,
    ) -> None:  # fmt: skip
        """``ours``: a child of this process."""
        home = self.root / str(pid)
        (home / "task" / str(pid)).mkdir(parents=True)
        (home / "task" / str(pid) / "children").write_text("")
        (home / "fd").mkdir()
        (home / "stat").write_text(
            f"{pid} (name {pid}) D {os.getpid() if ours else 1} 0 {session} {tty} {'0 ' * 14} {ticks} 0\n"
        )
        (home / "status").write_text(f"Uid:\t{os.geteuid()}\t{os.geteuid()}\t0\t0\n")
        (home / "fd" / "0").symlink_to("/dev/nvidia-uvm" if cuda else "/dev/null")
        for name, value in (("cmdline", command), ("environ", MARK), ("maps", b"")):
            if stuck:
                os.mkfifo(home / name)
                self.stuck.add(pid)
            else:
                (home / name).write_bytes(value)
        if not ours:
            return
        own = self.root / str(os.getpid()) / "task" / str(os.getpid()) / "children"
        own.write_text(f"{own.read_text() if own.exists() else ''}{pid} ")

    def free(self) -> None:
        """Every read that hangs comes back."""
        for pid in self.stuck:
            for name in ("cmdline", "environ", "maps"):
                path = self.root / str(pid) / name
                try:
                    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                except OSError:
                    continue  # nobody reads it


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeProc]:
    made = FakeProc(tmp_path)
    monkeypatch.setattr(procfs, "PROC", str(tmp_path))
    yield made
    end = time.monotonic() + 60
    while (procfs._avoided or procfs._reading) and time.monotonic() < end:
        made.free()
        time.sleep(0.005)
    assert (procfs._avoided, procfs._reading) == ({}, {}), "what came back is forgotten"


# --- survivors of a start whose supervisor was killed -----------------------------------------------------------------


def with_earlier_start(root: Path, start_id: str, pid: int) -> SupervisorLauncher:
    directory = root / "state" / "r1" / "supervisor"
    directory.mkdir(parents=True)
    record = {
        "boot_id": boot_id(), "pid_namespace": pid_namespace(), "supervisor": 1 << 30, "supervisor_ticks": 4,
        "pid": pid, "ticks": 5, "run_id": "r1", "start_id": start_id, "argv": [], "started_wall": 0.0, "log": "",
    }  # fmt: skip
    (directory / "record.json").write_text(json.dumps(record))
    return SupervisorLauncher("r1", root / "out", root / "state", SystemClock(), roles=ROLES)


async def searched(launcher: SupervisorLauncher) -> list[str]:
    return await patiently(launcher._worker, launcher._search_earlier_starts, timeout=20.0, patience=PATIENCE)


@pytest.mark.parametrize(("ticks", "refused"), [(7, True), (3, False)])
async def test_nothing_is_started_beside_one_that_may_be_a_survivor_and_does_not_answer(
    proc: FakeProc, tmp_path_factory: pytest.TempPathFactory, ticks: int, refused: bool
) -> None:
    """Stuck in the kernel, and not older than that earlier start."""
    launcher = with_earlier_start(tmp_path_factory.mktemp("pod"), "s0", 700)
    proc.add(701, ticks=ticks, stuck=True, ours=False)
    proc.add(702, ours=False)
    if refused:
        with pytest.raises(Busy, match=": 701:"):
            await searched(launcher)
    else:
        assert await searched(launcher) == ["s0"]


async def test_survivors_are_found_beside_one_that_hangs(
    proc: FakeProc, tmp_path_factory: pytest.TempPathFactory
) -> None:
    proc.add(301, ticks=3, stuck=True, ours=False)
    proc.add(302, ours=False)
    with pytest.raises(Busy, match=": 302:"):
        await searched(with_earlier_start(tmp_path_factory.mktemp("pod"), "s1", 300))


async def test_survivors_are_found_by_their_session(proc: FakeProc, tmp_path_factory: pytest.TempPathFactory) -> None:
    launcher = with_earlier_start(tmp_path_factory.mktemp("pod"), "s0", 300)
    proc.add(303, session=300, ours=False)
    proc.add(304, session=300, ticks=3, ours=False)
    with pytest.raises(Busy, match=": 303:"):
        await searched(launcher)
    proc.add(300, ticks=9, session=300, ours=False)
    assert await searched(launcher) == ["s0"], "the number is another process's by now"


# --- podwatch --------------------------------------------------------------------------------------------------------


def test_a_session_that_began_after_the_launchers_end_is_a_strangers(proc: FakeProc) -> None:
    """The number went to another session leader, and that one is gone too."""
    second = os.sysconf("SC_CLK_TCK")
    proc.add(311, session=310, ticks=9 * second)
    proc.add(312, session=310, ticks=8 * second)
    launcher = ProcessIdentity(310, 5, boot_id(), pid_namespace())
    for ended, found in ((7.0, []), (8.0, [311, 312]), (None, [311, 312])):
        assert sorted(i.pid for i in in_session(launcher, ended)) == found, ended
    known = ProcessIdentity(311, 9 * second, boot_id(), pid_namespace())
    assert len(in_session(launcher, 7.0, {known})) == 2, "one that was seen while it was ours holds the number"
    tree = LocalTree(launcher, ROLES, own_session=True)
    assert {p.identity.pid for p in tree.living(sweep=True)} == {311, 312}, "nobody recorded the end: they may be ours"
    for pid in (311, 312):
        shutil.rmtree(proc.root / str(pid))
    assert tree.living(sweep=True) == ()
    proc.add(313, session=310, ticks=int(time.clock_gettime(time.CLOCK_BOOTTIME) * second) + 9 * second)
    assert tree.living(sweep=True) == ()


async def test_podwatch_looks_at_all_others(proc: FakeProc, tmp_path: Path) -> None:
    proc.add(401, cuda=True)
    proc.add(402, stuck=True, cuda=True)
    worker = Worker("test")
    try:
        found = await patiently(
            worker,
            lambda: read_pod(SoughtRun(str(tmp_path)), ROLES, own_pid=1),
            timeout=20.0,
            patience=PATIENCE,
        )
        seen = {p.identity.pid: (p.argv, p.cuda) for p in found}
        assert seen[401] == (("python", "x.py"), True)
        assert seen[402] == (("name 402",), True), "stuck with the GPU in its hands: still a candidate"
        assert worker.abandoned == 1
        found = await patiently(
            worker,
            lambda: read_pod(SoughtRun(str(tmp_path)), ROLES, own_pid=1),
            timeout=20.0,
            patience=PATIENCE,
        )
        assert len(found) == 2
        assert worker.abandoned == 1, "it is known by now"
    finally:
        worker.close()


async def test_a_tree_with_a_stuck_process_is_seen_whole(proc: FakeProc) -> None:
    proc.add(501, ticks=7, session=501)
    proc.add(502, session=501, ticks=8, stuck=True)
    proc.add(503, session=9)
    launcher = ProcessIdentity(501, 7, boot_id(), pid_namespace())
    tree = LocalTree(launcher, ROLES, own_session=True)
    worker = Worker("test")
    try:
        living = await patiently(worker, lambda: tree.living(sweep=True), timeout=20.0, patience=PATIENCE)
        assert [(p.identity.pid, p.command) for p in living] == [(501, "python x.py"), (502, "name 502")]
    finally:
        worker.close()


async def test_a_trainer_that_is_stuck_is_attached(proc: FakeProc, tmp_path: Path) -> None:
    proc.add(551, ticks=7, stuck=True)
    launcher = SupervisorLauncher("r1", tmp_path / "out", tmp_path / "state", SystemClock(), roles=ROLES)
    stuck = ProcessIdentity(551, 7, boot_id(), pid_namespace())
    handle = await asyncio.wait_for(launcher.attach(stuck), 20)
    assert handle.launcher == stuck


def test_nothing_is_cleared_while_one_cannot_be_looked_into(
    proc: FakeProc, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("shm")
    (place / "vllm-1").write_text("")
    proc.add(601, stuck=True)
    found: list[stale_files.StaleFiles] = []
    thread = threading.Thread(
        target=lambda: found.append(stale_files.find_stale(os.geteuid(), 0.0, [(place, "vllm-*")])), daemon=True
    )
    thread.start()
    eventually(lambda: procfs.give_up_hung(PATIENCE) == [601])
    later = stale_files.find_stale(os.geteuid(), 0.0, [(place, "vllm-*")])
    assert (later.stale, later.unseen) == ((), 1)
    end = time.monotonic() + 60
    while not found and time.monotonic() < end:
        proc.free()
        time.sleep(0.005)
    assert found


async def test_a_call_that_is_merely_long_is_let_finish(proc: FakeProc) -> None:
    def long(go: threading.Event) -> str:
        assert go.wait(20)
        return "done"

    for end, timeout in (("done", 20.0), ("late", 0.1), ("cancelled", 20.0)):
        worker, go = Worker("test"), threading.Event()
        call = asyncio.ensure_future(patiently(worker, long, go, timeout=timeout, patience=0.02))
        if end == "done":
            await asyncio.sleep(0.2)
            assert not call.done()
            go.set()
            assert await call == "done"
        elif end == "late":
            with pytest.raises(TimeoutError):
                await call
        else:
            await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        go.set()
        worker.close()


def test_a_launcher_that_is_stuck_is_not_taken_for_a_shell(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is left to see of ``bash train.sh`` then is its name, as of an operator's shell."""
    proc.add(301, ticks=7, command=b"bash\0", tty=34816)
    local = LocalTree(ProcessIdentity(301, 7, boot_id(), pid_namespace()), ROLES)
    monkeypatch.setattr(procfs, "hangs", lambda pid: pid == 301)
    assert [p.identity.pid for p in local.living(sweep=True)] == [301]
    assert not local.turned
    monkeypatch.setattr(procfs, "hangs", lambda pid: False)
    assert local.living(sweep=True) == ()
    assert local.turned
    monkeypatch.setattr(procfs, "hangs", lambda pid: pid == 301)
    assert local.living(sweep=True) == (), "it stays what it was seen to be"
