"""Job mode: the keeper ends with its owner, and what an earlier attempt left is ended only if it is provably ours."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.domain.engine_and_attempt import Instance
from podwatch.domain.errors import Busy
from podwatch.domain.process import ProcessIdentity
from podwatch.system import procfs
from podwatch.trainer import keeper_client
from podwatch.trainer.job_survivors import Kept, clear, kept_by_jobs
from podwatch.trainer.keeper_client import JobRecord, read_record
from podwatch.trainer.start_and_adopt import KeeperJob
from tests.support.pod import Pod, eventually

HERE = Instance("slurm", "7", "0")


class Owner:
    """The process that stands for podwatch's init; the pipe is the test's."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        found = procfs.identify(self.process.pid)
        assert found is not None
        self.identity: ProcessIdentity = found
        self.read, self.write = os.pipe()

    def job(self, instance: Instance = HERE, grace: float = 5.0) -> KeeperJob:
        return KeeperJob(self.read, grace, self.identity, instance)

    def die(self) -> None:
        self.process.kill()
        self.process.wait()

    def let_go(self) -> None:
        if self.write >= 0:
            os.close(self.write)
            self.write = -1


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.die()
    made.let_go()
    os.close(made.read)


async def test_the_end_of_the_pipe_ends_the_tree_by_sigterm(pod: Pod, owner: Owner) -> None:
    said, ready = pod.root / "said", pod.root / "ready"
    script = f"trap 'echo saved > {said}; exit 3' TERM; touch {ready}; while :; do sleep 0.05; done"
    handle = await pod.launcher(job=owner.job()).start(pod.script(script))
    eventually(ready.exists)
    assert await handle.exit_status() is None
    owner.let_go()
    eventually(lambda: not pod.members() and not pod.keepers())
    assert said.read_text() == "saved\n", "training could save"
    assert keeper_client.was_stopped(pod.directory, pod.start_id())


async def test_a_tree_that_ignores_sigterm_is_killed_after_the_grace(pod: Pod, owner: Owner) -> None:
    ready = pod.root / "ready"
    script = f"trap '' TERM; touch {ready}; while :; do sleep 0.05; done"
    await pod.launcher(job=owner.job(grace=0.5)).start(pod.script(script))
    eventually(ready.exists)
    owner.let_go()
    eventually(lambda: not pod.members() and not pod.keepers())


async def test_a_start_whose_job_ends_meanwhile_leaves_nothing(pod: Pod, owner: Owner) -> None:
    plan = pod.plan("touch", "started", before=(("sh", "-c", "echo > begun; sleep 300"),))
    start = asyncio.create_task(pod.launcher(job=owner.job()).start(plan))
    while not (pod.output.parent / "begun").exists():
        await asyncio.sleep(0.01)
    owner.let_go()
    eventually(lambda: not pod.members() and not pod.keepers())
    assert not (pod.output.parent / "started").exists()
    start.cancel()
    await asyncio.wait([start])


async def test_without_a_job_nothing_ends_and_the_record_says_so(pod: Pod, owner: Owner) -> None:
    await pod.launcher().start(pod.script("exec sleep 300"))
    record = read_record(pod.directory)
    assert record is not None
    assert record.job is None
    owner.let_go()
    await asyncio.sleep(0.5)
    eventually(pod.members)
    assert kept_by_jobs(pod.run_id, pod.directory, pod.output) == ()


async def test_the_trainer_inherits_neither_the_pipe_nor_any_output(pod: Pod, owner: Owner) -> None:
    ready = pod.root / "ready"
    script = f"touch {ready}; while :; do sleep 0.05; done"
    handle = await pod.launcher(job=owner.job()).start(pod.script(script))
    eventually(ready.exists)  # from now on the shell itself opens and closes nothing
    links = {str(link.readlink()) for link in Path(f"/proc/{handle.launcher.pid}/fd").iterdir()}
    assert not any(link.startswith("pipe:") for link in links), links


# -- what an earlier attempt left ------------------------------------------------------------------------------------


async def started(pod: Pod, owner: Owner) -> tuple[Kept, ...]:
    await pod.launcher(job=owner.job()).start(pod.script("exec sleep 300"))
    found = kept_by_jobs(pod.run_id, pod.directory, pod.output)
    assert [kept.job.owner for kept in found] == [owner.identity]
    return found


def another_job() -> ProcessIdentity:
    return ProcessIdentity(1, 1, procfs.boot_id(), procfs.pid_namespace())


async def test_the_keeper_of_a_dead_owner_and_the_same_job_is_ended(pod: Pod, owner: Owner) -> None:
    kept = await started(pod, owner)
    owner.die()
    assert len(await asyncio.to_thread(clear, kept, another_job(), HERE, 5.0)) == 1
    eventually(lambda: not pod.members() and not pod.keepers())
    assert read_record(pod.directory) is None, "its end is no failure of training"


async def test_a_stuck_one_is_killed_with_its_tree(pod: Pod, owner: Owner) -> None:
    kept = await started(pod, owner)
    owner.die()
    eventually(pod.members)
    trainer = pod.members()
    # It stops again whenever it is continued: SIGTERM never reaches it.
    script = f"while kill -STOP {kept[0].keeper.pid} 2>/dev/null; do :; done"
    stopper = subprocess.Popen(["sh", "-c", script])
    try:
        await asyncio.to_thread(clear, kept, another_job(), HERE, 0.3)
    finally:
        stopper.kill()
        stopper.wait()
    eventually(lambda: not any(procfs.read_stat(pid) for pid in trainer))


async def test_that_of_a_living_owner_is_not_touched(pod: Pod, owner: Owner) -> None:
    kept = await started(pod, owner)
    with pytest.raises(Busy, match="another podwatch job of this run is alive"):
        clear(kept, another_job(), HERE, 1.0)
    eventually(pod.members)
    assert clear(kept, owner.identity, HERE, 1.0) == (), "a daemon that its init has restarted takes it over"
    eventually(pod.members)


@pytest.mark.parametrize("other", [Instance("slurm", "8", "0"), Instance("kubernetes", "7"), Instance()])
async def test_that_of_another_job_is_not_touched(pod: Pod, owner: Owner, other: Instance) -> None:
    kept = await started(pod, owner)
    owner.die()
    with pytest.raises(Busy, match="another job of this run is still ending here"):
        clear(kept, another_job(), other, 1.0)
    eventually(pod.members)


async def test_that_of_another_run_is_not_even_seen(pod: Pod, owner: Owner) -> None:
    await started(pod, owner)
    assert kept_by_jobs("another-run", pod.directory, pod.output) == ()


async def test_one_that_ended_before_its_owner_keeps_its_record(pod: Pod, owner: Owner) -> None:
    """A trainer that finished in the moment in which podwatch was killed has finished."""
    launcher = pod.launcher(job=owner.job(), linger=0.1)
    await launcher.start(pod.script("exit 0"))
    (kept,) = kept_by_jobs(pod.run_id, pod.directory, pod.output)
    eventually(lambda: not procfs.is_alive(kept.keeper))
    owner.die()
    assert clear((kept,), another_job(), HERE, 1.0) == ()
    assert read_record(pod.directory) is not None


def test_a_forged_pid_is_not_signalled(tmp_path: Path) -> None:
    """Of a record whose process was replaced by another one, nothing is ended."""
    victim = subprocess.Popen(["sleep", "300"])
    try:
        here = procfs.boot_id(), procfs.pid_namespace()
        gone = ProcessIdentity(2**22 - 2, 5, *here)
        kept = Kept(ProcessIdentity(victim.pid, 1, *here), JobRecord(gone, "slurm", "7"), tmp_path, "s1")
        assert clear((kept,), another_job(), HERE, 0.2) == ()
        assert victim.poll() is None
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait()
