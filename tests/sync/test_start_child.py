"""The upload's process that is started ahead: there when it is needed, gone when it is not, never left over."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from podwatch.sync.upload.child_job import UploadJob
from podwatch.sync.upload.start_child import Children, Upload
from tests.sync.conftest import Run, World, until


def waiting_here() -> list[int]:
    """PIDs of our upload processes, by the kernel's word."""
    found = []
    for process in psutil.Process().children():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and "podwatch.sync.upload.child_main" in process.cmdline():
                found.append(process.pid)
        except psutil.NoSuchProcess:
            pass
    return found


@pytest.fixture
async def children(tmp_path: Path) -> AsyncIterator[Children]:
    children = Children(f"file://{tmp_path}/store")
    yield children
    await children.close()
    assert waiting_here() == []


def empty_job(tmp_path: Path) -> UploadJob:
    return UploadJob(
        step=1, save_id="s", store=f"file://{tmp_path}/store", writer_id="w", part_size=5_000_000, connections=1,
        lock=str(tmp_path / "lock"), roots={}, files=(),
    )  # fmt: skip


async def nothing(_: object) -> None:
    pass


async def test_one_is_started_ahead_and_gets_the_job(children: Children, tmp_path: Path) -> None:
    assert waiting_here() == []
    for _ in range(3):
        children.expect(True)
    await until(lambda: children.waiting is not None)
    await until(lambda: waiting_here() == [children.waiting])  # in the middle of its exec it shows no command
    pid, upload = children.waiting, Upload(empty_job(tmp_path), children)
    await upload.run(None, nothing, lambda _: None)
    assert upload.pid == pid
    assert (children.waiting, waiting_here()) == (None, [])
    children.expect(True)  # and again for the next set
    await until(lambda: children.waiting is not None)


async def test_one_that_is_not_needed_after_all_goes(children: Children) -> None:
    children.expect(True)
    await until(lambda: children.waiting is not None)
    children.expect(False)
    await until(lambda: waiting_here() == [])
    children.expect(True)
    children.expect(False)  # before it has even started
    await asyncio.sleep(0.05)
    await until(lambda: waiting_here() == [])


async def test_one_that_died_while_it_waited_is_not_given_the_job(children: Children, tmp_path: Path) -> None:
    children.expect(True)
    await until(lambda: children.waiting is not None)
    child = children._waiting
    assert child is not None
    os.kill(child.process.pid, signal.SIGKILL)
    await until(lambda: child.process.returncode is not None)  # the loop hears of it a little after the kernel
    upload = Upload(empty_job(tmp_path), children)
    await upload.run(None, nothing, lambda _: None)
    assert upload.pid != child.process.pid


PARENT = """
import asyncio, sys
from podwatch.sync.upload.start_child import Children
async def main():
    children = Children(sys.argv[1])
    children.expect(True)
    while children.waiting is None:
        await asyncio.sleep(0.01)
    print(children.waiting, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_it_does_not_outlive_podwatch(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, f"file://{tmp_path}"], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    gone, _ = psutil.wait_procs([child], timeout=60)
    assert gone or child.status() == psutil.STATUS_ZOMBIE


async def test_the_syncer_has_one_wait_while_a_save_is_written(local: World, run: Run) -> None:
    syncer = await run(local)

    def waits() -> bool:  # as after each rescan: at first it does not stand for the run yet
        syncer.notify()
        return len(waiting_here()) == 1

    local.write_set(5, done=False)
    local.catalogue.rescan()
    assert [s.completeness.value for s in local.catalogue.sets] == ["writing"]
    await until(waits)
    (pid,) = waiting_here()
    local.write_set(5)
    local.scan()
    sender, seen, started = syncer._sender, set[int | None](), {pid}
    publish = sender.publish

    async def published(*given: Any, **named: Any) -> Any:
        for _ in range(50):  # rescans go on while it is published
            syncer.notify()
            await asyncio.sleep(0.002)
        started.update(waiting_here())
        return await publish(*given, **named)

    sender.publish = published  # type: ignore[method-assign]
    syncer.notify()
    while syncer.status().last_step != 5:
        if sender.running is not None:
            seen.add(sender.running.pid)
        await asyncio.sleep(0.001)
    assert seen - {None} == {pid}
    assert started == {pid}, "no other is started for a set that has been sent"
    await until(lambda: waiting_here() == [])
    local.write_set(10, done=False)
    local.catalogue.rescan()
    await until(waits)
    await syncer.stop()
    assert waiting_here() == []


def test_the_process_loads_nothing_that_only_the_daemon_needs() -> None:
    """It is started for every checkpoint, at the lowest priority: beside busy cores each module takes its time."""
    needless = ("podwatch.config.settings", "podwatch.checkpoints", "podwatch.sync.upload.start_child", "pydantic")
    code = f"import sys, podwatch.sync.upload.child_main\nprint([name for name in {needless!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
