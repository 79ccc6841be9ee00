"""The keeper's locks: in the state directory, beside the output directory, and of its inode. Real files, users,
keepers."""

import fcntl
import json
import os
import subprocess
from pathlib import Path

import pytest

from podwatch.domain.errors import Busy, PermissionDenied
from podwatch.trainer import keeper
from podwatch.trainer.keeper import LockHeldError, take_lock
from tests.support import strangers
from tests.support.pod import Pod, eventually
from tests.support.strangers import needs_root

pytestmark = pytest.mark.slow


async def test_both_are_held_while_anything_of_the_tree_lives(pod: Pod) -> None:
    handle = await pod.launcher(linger=0.2).start(pod.script("(exec setsid sleep 300) & exit 0"))
    paths = (pod.directory.parent / "lock", pod.beside / "lock")
    eventually(lambda: not Path(f"/proc/{handle.launcher.pid}").exists())
    for path in paths:
        with pytest.raises(LockHeldError) as held:
            take_lock(str(path))
        assert held.value.holder["start_id"] == pod.start_id()
        assert path.stat().st_mode & 0o777 == 0o600
    await handle.stop(grace=20.0, save_grace=20.0, saving=lambda: False)
    await handle.release()
    eventually(lambda: not pod.keepers())
    for path in paths:
        os.close(take_lock(str(path)))


@pytest.mark.parametrize("same", ["state", "beside"])
async def test_either_of_them_refuses_a_second_trainer(pod: Pod, same: str) -> None:
    await pod.launcher().start(pod.script("exec sleep 300"))
    elsewhere = pod.root / "elsewhere"
    elsewhere.mkdir()
    other = pod.launcher(beside=elsewhere) if same == "state" else pod.launcher(state=elsewhere)
    with pytest.raises(Busy, match="already kept by keeper"):
        await other.start(pod.script("exit 0", start_id="s2"))


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
    try:
        await pod.launcher().start(pod.script("exec sleep 300"))
        (pod.root / "elsewhere").mkdir()
        second = pod.launcher(state=pod.root / "elsewhere", beside=pod.root / "elsewhere", output=alias)
        with pytest.raises(Busy, match="already kept by keeper"):
            await second.start(pod.script("exit 0", start_id="s2"))
    finally:
        if how.startswith("bind"):
            subprocess.run(["umount", "-l", pod.root / "alias"], check=True)


async def test_an_output_directory_that_the_trainer_makes_is_locked_then(pod: Pod) -> None:
    made = await pod.launcher().start(pod.script(f"mkdir {pod.output}; exec sleep 300"))
    eventually(pod.output.exists)
    found = pod.output.stat()
    lock = Path(keeper.machine_locks()) / f"dir-{found.st_dev:x}-{found.st_ino:x}.lock"
    eventually(lambda: lock.exists() and json.loads(lock.read_text() or "{}").get("start_id") == made.start_id)
    with pytest.raises(LockHeldError):
        take_lock(str(lock))


@needs_root
def test_another_user_who_takes_our_name_blocks_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of the machine's locks is another user's: a warning, and the other two locks hold."""
    with strangers.public_directory() as root:
        monkeypatch.setattr(keeper, "MACHINE", (str(root),))
        (root / f"podwatch-locks-{os.geteuid()}").mkdir()
        os.chown(root / f"podwatch-locks-{os.geteuid()}", strangers.UID, strangers.UID)
        said = keeper.Warnings()
        (root / "keeper").mkdir()
        (root / "outputs").mkdir()
        monkeypatch.chdir(root / "keeper")
        locks = keeper.RunLocks(said)
        locks.take({"output_dir": str(root / "outputs"), "beside": ""})
        assert [Path(path).name for path, fd in locks.held.items() if fd >= 0] == ["lock"]
        assert any("podwatch-locks" in text for text in said.texts)
        for fd in locks.held.values():
            os.close(fd)


def test_the_directory_of_the_machines_locks_is_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "MACHINE", ("/nowhere", str(tmp_path)))
    path = Path(keeper.machine_locks())
    path.chmod(0o755)
    assert Path(keeper.machine_locks()) == path
    assert path.parent == tmp_path
    assert path.stat().st_mode & 0o777 == 0o700
    path.rmdir()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="belongs to"):
        keeper.machine_locks()


def test_another_users_directory_of_our_name_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for place in (first, second):
        place.mkdir()
    (first / f"podwatch-locks-{os.geteuid()}").symlink_to(second)
    monkeypatch.setattr(keeper, "MACHINE", (str(first), str(second)))
    assert Path(keeper.machine_locks()).parent == second


def test_a_sandbox_that_hides_the_first_place_hides_no_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """podwatch under its unit can write in other directories than one that was started by hand."""
    first, second, output = tmp_path / "first", tmp_path / "second", tmp_path / "outputs"
    for path in (first, second, output, tmp_path / "a" / "keeper", tmp_path / "b" / "keeper"):
        path.mkdir(parents=True)
    monkeypatch.setattr(keeper, "MACHINE", (str(first), str(second)))
    monkeypatch.chdir(tmp_path / "a" / "keeper")
    locks = keeper.RunLocks(keeper.Warnings())
    locks.take({"output_dir": str(output), "beside": ""})
    assert {Path(path).parent.parent for path in locks.held} >= {first}
    access = os.access
    monkeypatch.setattr(keeper.os, "access", lambda path, how: first not in Path(path).parents and access(path, how))
    monkeypatch.chdir(tmp_path / "b" / "keeper")
    others = keeper.RunLocks(keeper.Warnings())
    with pytest.raises(keeper.StartError, match="already kept"):
        others.take({"output_dir": str(output), "beside": ""})
    assert Path(others.machine).parent == second
    with pytest.raises(LockHeldError):
        keeper.refuse_beside_a_keeper("", "", str(output))
    for fd in (*locks.held.values(), *others.held.values()):
        os.close(fd)


async def test_without_the_one_beside_training_starts_with_a_warning(pod: Pod) -> None:
    (pod.beside / "lock").mkdir()
    handle = await pod.launcher().start(pod.script("exec sleep 300"))
    assert any(f"cannot lock {pod.beside}" in warning for warning in handle.record.warnings)
    assert pod.members()


async def test_without_the_one_of_the_state_directory_nothing_starts(pod: Pod) -> None:
    pod.directory.mkdir(parents=True)
    (pod.directory.parent / "lock").mkdir()
    with pytest.raises(PermissionDenied):
        await pod.launcher().start(pod.script("exec sleep 300"))
    assert pod.members() == []


async def test_contents_that_name_no_trainer_block_no_start(pod: Pod) -> None:
    here = {"boot_id": keeper.boot_id(), "pid_namespace": keeper.pid_namespace()}
    for text in (json.dumps(here), json.dumps(here | {"pid": "1", "ticks": None}), "[]", "{", "\0" * 5000):
        (pod.beside / "lock").write_text(text)
        handle = await pod.launcher().start(pod.script("exec sleep 300", start_id=f"s{len(text)}"))
        await handle.stop(grace=20.0, save_grace=20.0, saving=lambda: False)
        await handle.release()


def test_what_is_no_file_of_ours_is_no_lock(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("content")
    odd = {
        "link": lambda path: path.symlink_to(precious),
        "hard link": lambda path: path.hardlink_to(precious),
        "fifo": os.mkfifo,
        "directory": Path.mkdir,
    }
    for name, make in odd.items():
        make(tmp_path / name)
        with pytest.raises(OSError, match=r"podwatch.s file|symbolic links|directory"):
            take_lock(str(tmp_path / name))
    assert precious.read_text() == "content"


@needs_root
def test_another_user_can_neither_hold_nor_make_one() -> None:
    with strangers.public_directory() as root:
        root.chmod(0o755)
        path = root / "lock"
        os.close(take_lock(str(path)))

        def hold() -> None:
            with pytest.raises(PermissionError):
                os.open(path, os.O_RDONLY)

        assert strangers.as_stranger(hold) == 0
        path.unlink()
        path.write_text("")
        os.chown(path, strangers.UID, strangers.UID)
        with pytest.raises(OSError, match="not podwatch's file"):
            take_lock(str(path))


def test_a_file_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("")
    path.chmod(0o644)
    fd = take_lock(str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(BlockingIOError), path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)
