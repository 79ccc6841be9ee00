"""The run lock against another user of the pod. Real files, locks, users, keepers."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from podwatch.domain.errors import Busy
from podwatch.trainer import keeper
from podwatch.trainer.keeper import LockHeldError, lock_directories
from tests.support import strangers
from tests.support.pod import Pod, eventually
from tests.support.strangers import needs_root

pytestmark = pytest.mark.slow

ENVIRONMENT = {"pid": 1, "ticks": keeper.ticks_of(1), "start_id": "forged", "run_id": "x", "keeper": 1}


@pytest.fixture
def public() -> Iterator[Path]:
    with strangers.public_directory() as directory:
        yield directory


class Places:
    """The usual places of the run lock, in a directory of this test: two parents, of which the first is writable for
    all."""

    def __init__(self, root: Path) -> None:
        self.open, self.closed = root / "open", root / "closed"
        self.name = f"podwatch-locks-{os.geteuid()}"  # of the directory in each parent
        for directory in (self.open, self.closed):
            directory.mkdir()
        self.open.chmod(0o1777)

    @property
    def options(self) -> dict[str, object]:
        return {"lock_dir": None, "lock_parents": (self.open, self.closed)}

    @property
    def spec(self) -> dict[str, object]:
        return {"lock_dir": "", "lock_parents": [str(self.open), str(self.closed)]}


@pytest.fixture
def places(public: Path) -> Places:
    return Places(public)


def forged() -> bytes:
    """What a lock says that names process 1, which lives."""
    here = {"boot_id": keeper.boot_id(), "pid_namespace": keeper.pid_namespace(), "directory": "/"}
    return json.dumps(ENVIRONMENT | here).encode()


def plant(kind: str, path: Path, target: Path) -> None:
    """As another user: something of this kind at ``path``. ``target`` is a file of root's."""
    if kind == "directory":
        path.mkdir(0o777)
        (path / "inside").touch()
    elif kind == "link":
        path.symlink_to(target)
    elif kind == "dangling":
        path.symlink_to(path.with_name("nowhere"))
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "leased":
        path.write_bytes(forged())
        fd = os.open(path, os.O_RDWR)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    else:
        path.write_bytes(forged())
        path.chmod(0o666)
        fd = os.open(path, os.O_RDONLY)
        if kind == "held":
            fcntl.flock(fd, fcntl.LOCK_EX)


KINDS = ("file", "held", "directory", "link", "dangling", "fifo", "leased")


def names(output: Path) -> list[str]:
    return [name for name in (keeper.path_lock_name(str(output)), keeper.inode_lock_name(str(output))) if name]


# -- another user's files


@needs_root
@pytest.mark.parametrize("kind", KINDS)
async def test_what_another_user_puts_in_our_places_blocks_no_start(pod: Pod, places: Places, kind: str) -> None:
    """The forged lock names process 1. It is put at our directory's name."""
    pod.output.mkdir()
    target = places.closed / "precious"
    target.write_bytes(b"root's own")
    target.chmod(0o644)

    with strangers.staying(lambda: plant(kind, places.open / places.name, target)):
        handle = await pod.launcher(**places.options).start(pod.script("exec sleep 300"))
        assert sorted(path.name for path in (places.closed / places.name).iterdir()) == sorted(names(pod.output))
        assert any("cannot use" in warning for warning in handle.record.warnings)
        with pytest.raises(Busy, match="already kept"):  # what is closed to him still holds
            await pod.launcher(state=pod.root / "other", **places.options).start(pod.script("exit 0", start_id="s2"))
    assert target.read_bytes() == b"root's own"


@needs_root
async def test_a_hard_link_to_a_file_of_roots_is_no_lock_and_is_not_written(pod: Pod, places: Places) -> None:
    """Where the kernel does not protect hard links, anybody can give root's files such a name in a directory that was
    open to all."""
    pod.output.mkdir()
    target = places.closed / "precious"
    target.write_bytes(forged())
    target.chmod(0o644)
    (places.closed / places.name).mkdir()
    for name in names(pod.output):
        (places.closed / places.name / name).hardlink_to(target)
    await pod.launcher(**places.options).start(pod.script("exec sleep 300"))
    assert target.read_bytes() == forged()
    assert target.stat().st_mode & 0o777 == 0o644


@needs_root
async def test_a_lock_directory_that_was_open_to_all_is_closed_and_cleared(pod: Pod, public: Path) -> None:
    pod.output.mkdir()
    chosen = public / "locks"
    chosen.mkdir()
    chosen.chmod(0o1777)
    spots = [chosen / name for name in names(pod.output)]

    def squat() -> None:
        for path in spots:
            plant("held", path, Path("/"))

    with strangers.staying(squat):
        await pod.launcher(lock_dir=chosen).start(pod.script("exec sleep 300"))
        with pytest.raises(Busy, match="already kept"):
            await pod.launcher(lock_dir=chosen, state=pod.root / "other").start(pod.script("exit 0", start_id="s2"))
    assert chosen.stat().st_mode & 0o777 == 0o700
    assert {(path.stat().st_uid, path.stat().st_mode & 0o777) for path in chosen.iterdir()} == {(0, 0o600)}


async def test_directories_and_files_are_ours_alone(pod: Pod, places: Places) -> None:
    await pod.launcher(**places.options).start(pod.script(f"mkdir {pod.output}; exec sleep 300"))
    eventually(lambda: len(list((places.closed / places.name).iterdir())) == 2)  # the inode's as well
    for parent in (places.open, places.closed):
        assert (parent / places.name).stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in (parent / places.name).iterdir()} == {0o600}
    assert (pod.directory / "lock").stat().st_mode & 0o777 == 0o600


async def test_contents_that_name_no_trainer_block_no_start(pod: Pod, places: Places) -> None:
    here = {"boot_id": keeper.boot_id(), "pid_namespace": keeper.pid_namespace()}
    for text in (json.dumps(here), json.dumps(here | {"pid": "1", "ticks": None}), "[]", "{", "\0" * 5000):
        (places.closed / places.name).mkdir(exist_ok=True)
        (places.closed / places.name / keeper.path_lock_name(str(pod.output))).write_text(text)
        start_id = f"s{len(text)}"
        handle = await pod.launcher(**places.options).start(pod.script("exec sleep 300", start_id=start_id))
        await handle.stop(grace=20.0, save_grace=20.0, saving=lambda: False)
        await handle.release()


def test_no_place_at_all_is_an_error_that_names_each(tmp_path: Path) -> None:
    spec = {"lock_dir": "", "lock_parents": [str(tmp_path / "a"), str(tmp_path / "b")]}
    with pytest.raises(keeper.StartError, match="No such file") as caught:
        lock_directories(spec)
    assert all(f"/{name}/podwatch-locks-" in caught.value.text for name in "ab")


@needs_root
@pytest.mark.parametrize("squatted", [False, True])
def test_an_ordinary_user_whose_only_place_is_taken_by_another_starts_with_a_warning(
    places: Places, squatted: bool
) -> None:
    """No parent is closed to others there. The lock of the state directory and the look at what runs are left."""
    user, name = strangers.UID + 1, f"podwatch-locks-{strangers.UID + 1}"
    if squatted:
        assert strangers.as_stranger((places.open / name).mkdir) == 0

    def start() -> None:
        directories, said = lock_directories(places.spec)
        assert [directory.path for directory in directories] == ([] if squatted else [str(places.open / name)])
        assert bool(said) is squatted
        if not squatted:
            assert directories[0].take("path-1.lock") is not None
            assert (places.open / name).stat().st_mode & 0o777 == 0o700

    assert strangers.as_stranger(start, user) == 0


# -- whatever another user does first


def all_of(spec: dict[str, object], output: Path) -> list[int]:
    """The locks of one keeper, as it takes them."""
    found: list[int] = []
    directories, _ = lock_directories(spec)
    try:
        for directory in directories:
            for name in names(output):
                found.append(directory.take(name))
    except BaseException:
        for fd in found:
            os.close(fd)
        raise
    finally:
        for directory in directories:
            os.close(directory.fd)
    return found


@needs_root
@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_keeper_starts_and_the_second_does_not(kind: str, leave: bool) -> None:
    """Whatever another user has put there, and whether or not he takes it away between the two."""
    with strangers.public_directory() as root, ExitStack() as stack:
        places, output = Places(root), root / "outputs"
        output.mkdir()
        target = places.closed / "precious"
        target.write_bytes(b"root's own")
        spot = places.open / places.name

        def take_away() -> None:
            if spot.is_dir() and not spot.is_symlink():
                shutil.rmtree(spot)
            else:
                spot.unlink()

        stack.enter_context(strangers.staying(lambda: plant(kind, spot, target)))
        held = all_of(places.spec, output)
        try:
            if leave:
                assert strangers.as_stranger(take_away) == 0
            with pytest.raises(LockHeldError):
                all_of(places.spec, output)
        finally:
            for fd in held:
                os.close(fd)
        for fd in all_of(places.spec, output):  # and one after the other
            os.close(fd)
        assert target.read_bytes() == b"root's own"
