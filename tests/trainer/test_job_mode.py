"""Job mode: the supervisor ends with its owner, and an attempt does not train beside an earlier one that still ends."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.app.job_mode import refuse_during_earlier_attempt
from podwatch.domain.errors import Busy
from podwatch.domain.process import ProcessIdentity
from podwatch.system import procfs
from podwatch.trainer import supervisor_files
from podwatch.trainer.start_and_adopt import SupervisorJob
from podwatch.trainer.supervisor_files import read_record
from tests.support.pod import Pod, eventually


class Owner:
    """The process that stands for podwatch's init; the pipe is the test's."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        found = procfs.identify(self.process.pid)
        assert found is not None
        self.identity: ProcessIdentity = found
        self.read, self.write = os.pipe()

    def job(self, grace: float = 5.0) -> SupervisorJob:
        return SupervisorJob(self.read, grace, self.identity)

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
    eventually(lambda: not pod.members() and not pod.supervisors())
    assert said.read_text() == "saved\n", "training could save"
    assert supervisor_files.was_stopped(pod.directory, pod.start_id())


async def test_a_tree_that_ignores_sigterm_is_killed_after_the_grace(pod: Pod, owner: Owner) -> None:
    ready = pod.root / "ready"
    script = f"trap '' TERM; touch {ready}; while :; do sleep 0.05; done"
    await pod.launcher(job=owner.job(grace=0.5)).start(pod.script(script))
    eventually(ready.exists)
    owner.let_go()
    eventually(lambda: not pod.members() and not pod.supervisors())


async def test_a_start_whose_job_ends_meanwhile_leaves_nothing(pod: Pod, owner: Owner) -> None:
    plan = pod.plan("touch", "started", before=(("sh", "-c", "echo > begun; sleep 300"),))
    start = asyncio.create_task(pod.launcher(job=owner.job()).start(plan))
    while not (pod.output.parent / "begun").exists():
        await asyncio.sleep(0.01)
    owner.let_go()
    eventually(lambda: not pod.members() and not pod.supervisors())
    assert not (pod.output.parent / "started").exists()
    start.cancel()
    await asyncio.wait([start])


async def test_without_a_job_nothing_ends_and_the_record_says_so(pod: Pod, owner: Owner) -> None:
    await pod.launcher().start(pod.script("exec sleep 300"))
    record = read_record(pod.directory)
    assert record is not None
    assert record.job_owner is None
    owner.let_go()
    await asyncio.sleep(0.5)
    eventually(pod.members)


async def test_the_trainer_inherits_neither_the_pipe_nor_any_output(pod: Pod, owner: Owner) -> None:
    ready = pod.root / "ready"
    script = f"touch {ready}; while :; do sleep 0.05; done"
    handle = await pod.launcher(job=owner.job()).start(pod.script(script))
    eventually(ready.exists)  # from now on the shell itself opens and closes nothing
    links = {str(link.readlink()) for link in Path(f"/proc/{handle.launcher.pid}/fd").iterdir()}
    assert not any(link.startswith("pipe:") for link in links), links


# -- what an earlier attempt left ------------------------------------------------------------------------------------


def next_job() -> SupervisorJob:
    return SupervisorJob(-1, 5.0, ProcessIdentity(1, 1, procfs.boot_id(), procfs.pid_namespace()))


async def test_an_attempt_is_refused_while_the_supervisor_of_an_earlier_one_lives(pod: Pod, owner: Owner) -> None:
    await pod.launcher(job=owner.job()).start(pod.script("exec sleep 300"))
    refuse_during_earlier_attempt(pod.directory, owner.job())  # a daemon that its init has restarted takes it over
    owner.die()
    (supervisor,) = pod.supervisors()
    with pytest.raises(Busy, match=f"earlier attempt is still ending here .supervisor {supervisor}"):
        refuse_during_earlier_attempt(pod.directory, next_job())
    with pytest.raises(Busy, match=f"supervised by process {supervisor} "):  # with another state directory: the lock
        await pod.launcher(state=pod.root / "other").start(pod.script("exit 0", start_id="s2"))
    eventually(pod.members)
    owner.let_go()
    kept = read_record(pod.directory)
    assert kept is not None
    eventually(lambda: not pod.members() and not procfs.is_alive(kept.supervisor))
    refuse_during_earlier_attempt(pod.directory, next_job())
    assert read_record(pod.directory) is None, "its end is no failure of training"


async def test_one_that_ended_before_its_owner_keeps_its_record(pod: Pod, owner: Owner) -> None:
    """A trainer that finished in the moment in which podwatch was killed has finished."""
    handle = await pod.launcher(job=owner.job(), linger=0.1).start(pod.script("exit 0"))
    eventually(lambda: not procfs.is_alive(handle.record.supervisor))  # its command line is gone a little earlier
    owner.die()
    refuse_during_earlier_attempt(pod.directory, next_job())
    assert read_record(pod.directory) is not None
