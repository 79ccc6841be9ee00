"""The supervisor's locks: in the state directory and beside the output directory. Real files, users, supervisors."""

import fcntl
import json
import os
import subprocess
from pathlib import Path

import pytest

from podwatch.domain.errors import Busy, PermissionDenied
from podwatch.trainer import supervise
from podwatch.trainer.supervise import StartRefusedError, take_lock
from podwatch.trainer.supervisor_files import lock_holder
from tests.support import strangers
from tests.support.pod import Pod, eventually
from tests.support.strangers import needs_root

pytestmark = pytest.mark.slow


async def test_both_are_held_while_anything_of_the_tree_lives(pod: Pod) -> None:
    handle = await pod.launcher().start(pod.script("(exec setsid sleep 300) & exit 0"))
    paths = (pod.directory / "lock", pod.beside / "lock")
    eventually(lambda: not Path(f"/proc/{handle.launcher.pid}").exists())
    for path in paths:
        with pytest.raises(StartRefusedError, match=f"process {handle.record.supervisor.pid} ") as held:
            take_lock(str(path.parent))
        assert held.value.kind == "busy"
        assert str(handle.record.supervisor.pid) in lock_holder([path.parent])
        assert json.loads(path.read_text())["start_id"] == pod.start_id()
        assert path.stat().st_mode & 0o777 == 0o600
    await handle.stop(grace=20.0, save_grace=20.0, saving=lambda: False)
    await handle.release()
    assert not pod.supervisors()
    for path in paths:
        assert lock_holder([path.parent]) == ""
        os.close(take_lock(str(path.parent)))


@pytest.mark.parametrize("same", ["state", "beside"])
async def test_either_of_them_refuses_a_second_trainer(pod: Pod, same: str) -> None:
    await pod.launcher().start(pod.script("exec sleep 300"))
    elsewhere = pod.root / "elsewhere"
    elsewhere.mkdir()
    other = pod.launcher(beside=elsewhere) if same == "state" else pod.launcher(state=elsewhere)
    with pytest.raises(Busy, match="is supervised by process"):
        await other.start(pod.script("exit 0", start_id="s2"))


async def test_without_the_one_beside_training_starts_with_a_warning(pod: Pod) -> None:
    (pod.beside / "lock").mkdir()
    handle = await pod.launcher().start(pod.script("exec sleep 300"))
    assert any(f"cannot lock {pod.beside}" in warning for warning in handle.warnings)
    assert pod.members()


async def test_without_the_one_of_the_state_directory_nothing_starts(pod: Pod) -> None:
    pod.directory.mkdir(parents=True)
    (pod.directory / "lock").mkdir()
    with pytest.raises(PermissionDenied):
        await pod.launcher().start(pod.script("exec sleep 300"))
    assert pod.members() == []


async def test_contents_that_name_no_trainer_block_no_start(pod: Pod) -> None:
    here = {"boot_id": supervise.boot_id(), "pid_namespace": supervise.pid_namespace()}
    for text in (json.dumps(here), json.dumps(here | {"pid": "1", "ticks": None}), "[]", "{", "\0" * 5000):
        (pod.beside / "lock").write_text(text)
        handle = await pod.launcher().start(pod.script("exec sleep 300", start_id=f"s{len(text)}"))
        await handle.stop(grace=20.0, save_grace=20.0, saving=lambda: False)
        await handle.release()


@needs_root
def test_another_user_can_neither_hold_nor_make_one() -> None:
    with strangers.public_directory() as root:
        root.chmod(0o755)
        path = root / "lock"
        os.close(take_lock(str(root)))

        def hold() -> None:
            with pytest.raises(PermissionError):
                os.open(path, os.O_RDONLY)

        assert strangers.as_stranger(hold) == 0
        path.unlink()
        path.write_text("")
        os.chown(path, strangers.UID, strangers.UID)
        with pytest.raises(OSError, match="not podwatch's file"):
            take_lock(str(root))


def test_a_file_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("")
    path.chmod(0o644)
    fd = take_lock(str(tmp_path))
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(BlockingIOError), path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


def aliased(pod: Pod, how: str) -> Path:
    """Another name of the output directory, or of the directory above it."""
    alias = pod.root / "alias"
    if how == "link":
        alias.symlink_to(pod.output)
        return alias
    if how == "link to what the trainer makes":
        pod.output.rmdir()
        alias.symlink_to(pod.output)
        return alias
    alias.mkdir()
    source = pod.output if how == "bind mount" else pod.output.parent
    if os.geteuid() != 0 or subprocess.run(["mount", "--bind", source, alias], check=False).returncode != 0:
        pytest.skip("mounting is not allowed here")
    return alias if how == "bind mount" else alias / pod.output.name


@pytest.mark.parametrize("how", ["link", "link to what the trainer makes", "bind mount", "bind mount above"])
async def test_two_names_of_one_output_directory_meet(pod: Pod, how: str) -> None:
    pod.output.mkdir()
    alias = aliased(pod, how)
    real = pod.output.parent / ".podwatch" / pod.output.name
    real.mkdir(parents=True)
    try:
        first = pod.launcher(beside=real)
        await first.start(pod.script("exec sleep 300"))
        (pod.root / "elsewhere").mkdir()
        second = pod.launcher(state=pod.root / "elsewhere", beside=pod.root / "elsewhere", output=alias)
        assert "is supervised by process" in (await second.look()).kept
        with pytest.raises(Busy, match="is supervised by process"):
            await second.start(pod.script("exit 0", start_id="s2"))
    finally:
        if how.startswith("bind"):
            subprocess.run(["umount", "-l", pod.root / "alias"], check=True)


async def test_nodes_of_one_run_share_the_output_directory_and_another_run_meets_them(pod: Pod) -> None:
    pod.output.mkdir()
    nodes = [pod.root / name for name in ("node-0", "node-1", "elsewhere")]
    for directory in nodes:
        directory.mkdir()
    for number, directory in enumerate(nodes[:2]):
        node = pod.launcher(state=directory, beside=directory, several_nodes=True)
        assert (await node.look()).kept == ""
        await node.start(pod.script("exec sleep 300", start_id=f"s{number}"))
    again = pod.launcher(state=nodes[2], beside=nodes[1], several_nodes=True)
    other = pod.launcher(state=nodes[2], beside=nodes[2])
    for refused in (again, other):
        assert "is supervised by process" in (await refused.look()).kept
        with pytest.raises(Busy, match="is supervised by process"):
            await refused.start(pod.script("exit 0", start_id="s2"))


@needs_root
def test_another_user_who_locks_the_output_directory_holds_no_start_up(tmp_path: Path) -> None:
    """Who can read a directory can lock it."""
    with strangers.public_directory() as root:
        root.chmod(0o755)
        holder = subprocess.Popen(
            ["flock", "-x", str(root), "-c", "echo held; exec sleep 300"], user=strangers.UID, group=strangers.UID,
            stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        try:
            with pytest.raises(OSError, match="another user's process"):
                supervise.lock_output(str(root))
        finally:
            os.killpg(holder.pid, 9)
            holder.wait()
        os.close(supervise.lock_output(str(root)))
