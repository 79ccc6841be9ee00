"""trainer.start_before: what it leaves running belongs to the start, and a failure of it leaves nothing running."""

import asyncio
from pathlib import Path

import pytest

from podwatch.domain.errors import HostError
from podwatch.system import procfs
from tests.support.pod import Pod, eventually

CLUSTER = (
    "sh",
    "-c",
    "setsid sh -c 'echo $$ > cluster.pid; sleep 300' >/dev/null 2>&1 & while ! test -s cluster.pid; do :; done",
)
"""Leaves a daemon behind, in a session of its own, as `ray start` does."""


def cluster(pod: Pod) -> int:
    path = pod.output.parent / "cluster.pid"
    pid = int(path.read_text()) if path.exists() else 0
    status = procfs.read_stat(pid) if pid else None
    return pid if status is not None and status.state not in "ZX" else 0


async def test_what_it_leaves_running_is_of_the_tree_and_ends_with_it(pod: Pod) -> None:
    launcher = pod.launcher()
    saying = ("sh", "-c", "echo $STEP > said; pwd >> said")
    script = "test -s said && test -s cluster.pid && exec sleep 300"
    plan = pod.plan("sh", "-c", script, env={"STEP": "40"}, before=(saying, CLUSTER))
    handle = await launcher.start(plan)
    assert (pod.output.parent / "said").read_text().split() == ["40", str(pod.output.parent)]
    pid = cluster(pod)
    assert pid, "the daemon that the command left runs"
    tree = (await handle.tree()).value or ()
    assert pid in {p.identity.pid for p in tree}
    assert tree[0].name in ("sleep", "sh"), "the launcher is still the trainer itself"
    report = await handle.stop(grace=2, save_grace=2, saving=lambda: False)
    assert not report.survivors
    assert not cluster(pod), "it has ended with its trainer"
    await handle.release()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("sh", "-c", "echo no head; exit 3"), "ended with exit code 3: sh -c"),
        (("no-such-program",), "could not be run"),
        (("sh", "-c", "kill -9 $$"), "ended by signal 9"),
    ],
)
async def test_a_failure_is_told_and_leaves_nothing(pod: Pod, command: tuple[str, ...], words: str) -> None:
    launcher = pod.launcher()
    plan = pod.plan("touch", "started", before=(CLUSTER, command))
    with pytest.raises(HostError, match=words) as caught:
        await launcher.start(plan)
    assert caught.value.where == "trainer.start_before"
    assert not (pod.output.parent / "started").exists(), "the trainer was not started"
    eventually(lambda: not cluster(pod) and not pod.members() and not pod.supervisors())
    handle = await launcher.start(pod.script("exec sleep 300", start_id="s2"))  # and the next start is free to begin
    assert await handle.exit_status() is None


async def test_one_that_hangs_is_ended(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podwatch.trainer.start_and_adopt._BEFORE_DEADLINE", 1.0)
    with pytest.raises(HostError, match="was not done after 1 s"):
        await pod.launcher().start(pod.plan("touch", "started", before=(("sleep", "60"),)))
    eventually(lambda: not pod.members())
    assert not Path(pod.output.parent, "started").exists()


async def test_a_podwatch_that_comes_in_between_finds_the_start(pod: Pod) -> None:
    """A start is known from its record on, also while the commands before it still run."""
    first, second = pod.launcher(), pod.launcher()
    wait = ("sh", "-c", "while ! test -e go; do sleep 0.02; done")
    starting = asyncio.create_task(first.start(pod.plan("sleep", "300", before=(wait,))))
    while not (pod.directory / "record.json").exists():
        await asyncio.sleep(0.01)
    look = asyncio.create_task(second.look())
    await asyncio.sleep(0.1)
    (pod.output.parent / "go").touch()
    found = (await look).handle
    assert found is not None
    assert found.launcher == (await starting).launcher
