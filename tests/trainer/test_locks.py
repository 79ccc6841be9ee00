"""The run lock against another user of the pod, and beside keepers of 772aae4. Real files, locks, users, keepers."""

import fcntl
import json
import lzma
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.domain.errors import Busy
from podwatch.trainer import keeper, keeper_client
from podwatch.trainer.keeper import LockDirectory, LockHeldError, lock_directories
from tests.support import strangers
from tests.support.examples import examples
from tests.support.pod import Pod, eventually
from tests.support.strangers import needs_root

pytestmark = pytest.mark.slow

OLD_KEEPER = Path(__file__).parents[1] / "support" / "keeper_772aae4.py.xz"
ENVIRONMENT = {"pid": 1, "ticks": keeper.ticks_of(1), "start_id": "forged", "run_id": "x", "keeper": 1}


@pytest.fixture
def public() -> Iterator[Path]:
    with strangers.public_directory() as directory:
        yield directory


class Places:
    """The usual places of the run lock, in a directory of this test: two parents, of which the first is writable for
    all, and the old directory, writable for all."""

    def __init__(self, root: Path) -> None:
        self.open, self.closed, self.old = root / "open", root / "closed", root / "old"
        self.name = f"podwatch-locks-{os.geteuid()}"  # of the directory in each parent
        for directory in (self.open, self.closed, self.old):
            directory.mkdir()
        for directory in (self.open, self.old):
            directory.chmod(0o1777)

    @property
    def options(self) -> dict[str, object]:
        return {"lock_dir": None, "lock_parents": (self.open, self.closed), "old_lock_dirs": (self.old,)}

    @property
    def spec(self) -> dict[str, object]:
        return {"lock_dir": "", "lock_parents": [str(self.open), str(self.closed)], "old_lock_dirs": [str(self.old)]}


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
    """The forged lock names process 1. It is put at each name of the old directory, and at our directory's name."""
    pod.output.mkdir()
    target = places.closed / "precious"
    target.write_bytes(b"root's own")
    target.chmod(0o644)
    spots = [places.open / places.name, *(places.old / name for name in names(pod.output))]

    def squat() -> None:
        for path in spots:
            plant(kind, path, target)

    with strangers.staying(squat):
        handle = await pod.launcher(**places.options).start(pod.script("exec sleep 300"))
        assert sorted(path.name for path in (places.closed / places.name).iterdir()) == sorted(names(pod.output))
        assert any("cannot use" in warning for warning in handle.record.warnings)
        with pytest.raises(Busy, match="already kept"):  # what is closed to him still holds
            await pod.launcher(state=pod.root / "other", **places.options).start(pod.script("exit 0", start_id="s2"))
    assert target.read_bytes() == b"root's own"


@needs_root
async def test_a_hard_link_to_a_file_of_roots_is_no_lock_and_is_not_written(pod: Pod, places: Places) -> None:
    """Where the kernel does not protect hard links, anybody can give root's files such a name."""
    pod.output.mkdir()
    target = places.closed / "precious"
    target.write_bytes(forged())
    for name in names(pod.output):
        (places.old / name).hardlink_to(target)
    await pod.launcher(**places.options).start(pod.script("exec sleep 300"))
    assert target.read_bytes() == forged()
    assert target.stat().st_mode & 0o777 == 0o644


@needs_root
async def test_another_user_who_locks_a_file_of_roots_blocks_no_start(pod: Pod, places: Places) -> None:
    """Whoever can read a file can lock it. Afterwards no other user can read it."""
    pod.output.mkdir()
    paths = [places.old / name for name in names(pod.output)]
    for path in paths:
        path.write_bytes(json.dumps({"pid": 1}).encode())
        path.chmod(0o644)

    def lock_them() -> list[int]:
        fds = [os.open(path, os.O_RDONLY) for path in paths]
        for fd in fds:
            fcntl.flock(fd, fcntl.LOCK_EX)
        return fds

    with strangers.staying(lock_them) as stranger:
        handle = await pod.launcher(**places.options).start(pod.script("exec sleep 300"))
        assert any(f"process {stranger}" in warning for warning in handle.record.warnings)
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}


@needs_root
@pytest.mark.parametrize("ended", [False, True], ids=["held", "left"])
async def test_another_user_who_owns_the_old_directory_cannot_give_a_lock_another_name(
    pod: Pod, places: Places, ended: bool
) -> None:
    """He made it before the first podwatch did. The lock of one run, under the names of another, blocks no start."""
    os.chown(places.old, strangers.UID, strangers.UID)
    (pod.root / "another").mkdir()
    other = Pod(pod.root / "another")
    try:
        other.output.mkdir()
        pod.output.mkdir()
        first = await other.launcher(**places.options).start(other.script("exec sleep 300"))
        if ended:  # its trainer lives
            os.kill(first.record.keeper.pid, 9)
            eventually(lambda: not keeper.is_alive(first.record.keeper.pid, first.record.keeper.start_ticks))
        renamed = list(zip(names(other.output), names(pod.output), strict=True))

        def rename() -> None:
            for mine, yours in renamed:
                (places.old / mine).rename(places.old / yours)

        assert strangers.as_stranger(rename) == 0
        await pod.launcher(**places.options).start(pod.script("exec sleep 300"))
    finally:
        for made in other.launchers:
            await made.close()
        other.cleanup()


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
        (places.old / keeper.path_lock_name(str(pod.output))).write_text(text)
        start_id = f"s{len(text)}"
        handle = await pod.launcher(**places.options).start(pod.script("exec sleep 300", start_id=start_id))
        await handle.stop(grace=20.0, save_grace=20.0, saving=lambda: False)
        await handle.release()


def test_no_place_at_all_is_an_error_that_names_each(tmp_path: Path) -> None:
    spec = {"lock_dir": "", "lock_parents": [str(tmp_path / "a"), str(tmp_path / "b")], "old_lock_dirs": []}
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
        private = [directory.path for directory in directories if directory.private]
        assert private == ([] if squatted else [str(places.open / name)])
        assert bool(said) is squatted
        if not squatted:
            assert directories[0].take("path-1.lock") is not None
            assert (places.open / name).stat().st_mode & 0o777 == 0o700

    assert strangers.as_stranger(start, user) == 0


@needs_root
def test_another_user_sees_that_roots_keeper_holds_the_old_path(places: Places) -> None:
    """Root's lock is closed to him; that it is held is in /proc/locks, and that a keeper holds it in its command."""
    directory = places.closed
    script = directory / "keeper.py"
    script.write_text(
        "import fcntl, os, sys\nfd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)\n"
        "fcntl.flock(fd, fcntl.LOCK_EX)\nprint(flush=True)\nsys.stdin.read()\n"
    )

    def take() -> None:
        assert LockDirectory(str(places.old), private=False).take("path-1.lock") is None

    def refused() -> None:
        with pytest.raises(LockHeldError):
            LockDirectory(str(places.old), private=False).take("path-1.lock")

    command = [sys.executable, "-I", str(script), str(places.old / "path-1.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert strangers.as_stranger(refused) == 0
        holder.kill()
    assert strangers.as_stranger(take) == 0


# -- whatever another user does first


def all_of(spec: dict[str, object], output: Path) -> list[int]:
    """The locks of one keeper, as it takes them."""
    found: list[int] = []
    directories, _ = lock_directories(spec)
    try:
        for directory in directories:
            for name in names(output):
                fd = directory.take(name)
                if fd is not None:
                    found.append(fd)
    except BaseException:
        for fd in found:
            os.close(fd)
        raise
    finally:
        for directory in directories:
            os.close(directory.fd)
    return found


SPOTS = st.sampled_from(["ours", "old-path", "old-inode", "inside-old-root-file"])


@needs_root
@settings(max_examples=examples(40))
@given(st.lists(st.tuples(SPOTS, st.sampled_from(KINDS)), max_size=4, unique_by=lambda x: x[0]), st.booleans())
def test_the_first_keeper_starts_and_the_second_does_not(acts: list[tuple[str, str]], leave: bool) -> None:
    """Whatever another user has put there, and whether or not he takes it away between the two."""
    with strangers.public_directory() as root, ExitStack() as stack:
        places, output = Places(root), root / "outputs"
        output.mkdir()
        target = places.closed / "precious"
        target.write_bytes(b"root's own")
        spots = {
            "ours": places.open / places.name,
            "old-path": places.old / names(output)[0],
            "old-inode": places.old / names(output)[1],
        }

        def do() -> list[object]:
            kept: list[object] = []
            for spot, kind in acts:
                if spot in spots:
                    plant(kind, spots[spot], target)
                else:
                    kept.append(os.open(target, os.O_RDONLY))
                    fcntl.flock(kept[-1], fcntl.LOCK_EX)  # type: ignore[arg-type]
            return kept

        def take_away() -> None:
            for spot, _ in acts:
                path = spots.get(spot)
                if path is not None and path.is_dir() and not path.is_symlink():
                    with suppress(OSError):
                        shutil.rmtree(path)
                elif path is not None:
                    with suppress(OSError):
                        path.unlink()

        stack.enter_context(strangers.staying(do))
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


# -- an older keeper


@pytest.fixture
def as_of_772aae4(tmp_path: Path) -> Callable[[], AbstractContextManager[None]]:
    """In its block, launchers start the keeper of 772aae4."""
    source = tmp_path / "772aae4" / "keeper.py"
    source.parent.mkdir()
    source.write_bytes(lzma.decompress(OLD_KEEPER.read_bytes()))

    @contextmanager
    def in_use() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(keeper_client, "SOURCE", source)
            yield

    return in_use


async def test_no_second_trainer_beside_a_keeper_of_the_version_before(
    pod: Pod, places: Places, as_of_772aae4: Callable[[], AbstractContextManager[None]]
) -> None:
    """The old one holds its locks in the old directory only. Another state directory, and another name of the output
    directory; then the old one ends, and the new one starts; then the old version is refused beside it."""
    pod.output.mkdir()
    old_options = {"lock_dir": places.old, "lock_parents": None, "old_lock_dirs": None}
    with as_of_772aae4():
        old = await pod.launcher(**old_options).start(pod.script("exec sleep 300"))
    places.old.chmod(0o1777)
    found = (await pod.launcher(**places.options).look()).handle
    assert found is not None
    assert found.start_id == old.start_id
    for name in (pod.output, pod.root / "alias"):
        if name != pod.output:
            name.symlink_to(pod.output)
        there = pod.launcher(state=pod.root / "other", **places.options)
        there._output_dir = name  # by its inode alone
        with pytest.raises(Busy, match=f"kept by keeper {old.record.keeper.pid}"):
            await there.start(pod.script("exit 0", start_id="s2"))
    await found.stop(grace=20.0, save_grace=20.0, saving=lambda: False)
    await found.release()
    await pod.launcher(state=pod.root / "other", **places.options).start(pod.script("exec sleep 300", start_id="s3"))
    with as_of_772aae4(), pytest.raises(Busy, match="already kept"):
        await pod.launcher(**old_options).start(pod.script("exit 0", start_id="s4"))


@needs_root
async def test_what_a_keeper_holds_another_user_may_have_open(
    pod: Pod, places: Places, as_of_772aae4: Callable[[], AbstractContextManager[None]]
) -> None:
    pod.output.mkdir()
    with as_of_772aae4():
        await pod.launcher(lock_dir=places.old).start(pod.script("exec sleep 300"))
    paths = [places.old / name for name in names(pod.output)]
    for path in paths:
        path.chmod(0o644)
    reading = strangers.staying(lambda: [os.open(path, os.O_RDONLY) for path in paths])
    with reading, pytest.raises(Busy, match="already kept"):
        await pod.launcher(state=pod.root / "other", **places.options).start(pod.script("exit 0", start_id="s2"))


@needs_root
async def test_a_trainer_that_outlived_its_old_keeper_is_still_found_by_the_old_lock(
    pod: Pod, places: Places, as_of_772aae4: Callable[[], AbstractContextManager[None]]
) -> None:
    """The lock of a killed keeper is free; what its file says is root's, and names the trainer that lives."""
    old_options = {"lock_dir": places.old, "lock_parents": None, "old_lock_dirs": None}
    with as_of_772aae4():
        old = await pod.launcher(**old_options).start(pod.script("exec sleep 300"))
    os.kill(old.record.keeper.pid, 9)
    eventually(lambda: not keeper.is_alive(old.record.keeper.pid, old.record.keeper.start_ticks))
    with pytest.raises(Busy, match=f"process {old.launcher.pid} of start {old.start_id} is still running"):
        await pod.launcher(state=pod.root / "other", **places.options).start(pod.script("exit 0", start_id="s2"))
