"""Nothing leads podwatch out of its directories: links in any segment, exchanged roots, foreign owners (promise 9)."""

import contextlib
import ctypes
import errno
import os
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.domain.errors import HostError
from podwatch.system import pinned_directories
from podwatch.system.pinned_directories import HIDDEN, USER, Identity, PinnedTree, RootReplaced

T, E = 54_321, 54_322
"""Uids that no account has: the trainer's user, and a stranger."""
as_root = pytest.mark.root


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """output_dir of T in a directory of T's, as a training user has it."""
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.geteuid() and path != Path("/") and path != Path("/tmp"):
            path.chmod(path.stat().st_mode | 0o755)
    home = tmp_path / "home"
    (home / "out" / "step_5").mkdir(parents=True)
    (home / "out" / "step_5" / "model.bin").write_bytes(b"weights")
    if os.geteuid() == 0:
        for path in (home, home / "out", home / "out" / "step_5", home / "out" / "step_5" / "model.bin"):
            os.chown(path, T, T)
    return home / "out"


@pytest.fixture
def tree(out: Path) -> Iterator[PinnedTree]:
    found = PinnedTree([out], owner=T if os.geteuid() == 0 else None)
    yield found
    found.close()


def own(path: Path, uid: int) -> Path:
    os.chown(path, uid, uid, follow_symlinks=False)
    return path


@pytest.mark.parametrize("name", ["lock", "guard.lock"])
def test_a_directory_with_nothing_but_a_lock_of_podwatchs_is_podwatchs(tree: PinnedTree, out: Path, name: str) -> None:
    """Where output_dir has two names, the supervisor of one makes its lock before podwatch is there under the other."""
    outside = out.parent / HIDDEN / "out"
    outside.mkdir(parents=True)
    (outside / name).touch()
    tree.make(outside / USER / "trash")
    assert tree.names(outside) == tuple(sorted([name, USER]))


def test_a_rename_into_our_directory_and_back(tree: PinnedTree, out: Path) -> None:
    kept = out.parent / HIDDEN / "out" / USER / "quarantine"
    tree.make(kept)
    assert tree.rename(out / "step_5", kept / "0-step_5")
    assert tree.names(kept) == ("0-step_5",)
    assert tree.read(kept / "0-step_5" / "model.bin") == b"weights"
    assert tree.rename(kept / "0-step_5", out / "step_5")
    assert not tree.rename(out / "step_6", kept / "1-step_6"), "a source that is gone is no error"


def test_nothing_is_written_over(tree: PinnedTree, out: Path) -> None:
    (out / "step_6").mkdir()
    with pytest.raises(FileExistsError):
        tree.rename(out / "step_5", out / "step_6")


def test_what_was_judged_is_what_is_moved(tree: PinnedTree, out: Path) -> None:
    judged = tree.identity(out / "step_5")
    (out / "step_5").rename(out / "old")
    (out / "step_5").mkdir()
    assert not tree.rename(out / "step_5", out / "moved", expected=judged)
    assert (out / "step_5").is_dir()
    assert not (out / "moved").exists()


@pytest.mark.parametrize("taken", [False, True])
def test_what_was_exchanged_at_the_last_moment_is_put_back(
    tree: PinnedTree, out: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    """Between the comparison and the rename another directory gets the name; then its place is taken as well."""
    judged = tree.identity(out / "step_5")
    (out / "precious").mkdir()
    (out / "precious" / "file").touch()
    real, turns = pinned_directories.rename_at, []

    def exchanging(source_dir: int, source: str, target_dir: int, target: str) -> None:
        turns.append(source)
        if len(turns) == 1:
            (out / "step_5").rename(out / "elsewhere")
            (out / "precious").rename(out / "step_5")
        elif len(turns) == 2 and taken:
            (out / "step_5").mkdir()
        real(source_dir, source, target_dir, target)

    monkeypatch.setattr(pinned_directories, "rename_at", exchanging)
    assert not tree.rename(out / "step_5", out / "trash", expected=judged)
    assert not (out / "trash").exists()
    assert (out / "elsewhere" / "model.bin").exists()
    assert [p.parent.name.startswith("step_5") for p in out.glob("*/file")] == [True]


@given(depth=st.integers(0, 3), absolute=st.booleans())
@settings(max_examples=12)
def test_a_link_in_any_segment_is_refused(tmp_path_factory: pytest.TempPathFactory, depth: int, absolute: bool) -> None:
    base = tmp_path_factory.mktemp("links")
    victim = base / "victim"
    names = ["a", "b", "c", "d"]
    victim.joinpath(*names[depth:]).mkdir(parents=True)
    (victim.joinpath(*names[depth:]) / "secret").write_text("root's")
    inside = (base / "out").joinpath(*names[:depth])
    inside.mkdir(parents=True)
    link = inside / names[depth]
    target = victim / names[depth]
    link.symlink_to(target if absolute else os.path.relpath(target, inside))
    tree = PinnedTree([base / "out"])
    path = (base / "out").joinpath(*names) / "secret"
    answers: list[object] = []
    refusals: list[int | None] = []
    for attempt in (
        lambda: tree.read(path),
        lambda: tree.rename(path, base / "out" / "stolen"),
        lambda: tree.unlink(path),
        lambda: tree.write(path, b"changed"),
        lambda: tree.make(path.parent / "new"),
        lambda: tree.names(path.parent),
        lambda: tree.remove_tree(path.parent).problems,
    ):
        try:
            answers.append(attempt())
        except OSError as error:
            refusals.append(error.errno)
    assert (target.joinpath(*names[depth + 1 :]) / "secret").read_text() == "root's"
    assert not (target.joinpath(*names[depth + 1 :]) / "new").exists()
    assert set(refusals) <= {errno.ELOOP, errno.ENOTDIR}
    assert len(answers) <= 1, "only remove_tree answers: it removes the link itself, or reports the refusal"
    tree.close()


@pytest.mark.parametrize("path", ["/etc/passwd", "{out}/../other", "relative/path", "{out}", "{out}2/x"])
def test_a_path_outside_is_refused(tree: PinnedTree, out: Path, path: str) -> None:
    with pytest.raises(HostError):
        tree.unlink(Path(path.format(out=out)))


@pytest.mark.parametrize("kind", ["fifo", "directory", "socket"])
def test_only_regular_files_are_read(tree: PinnedTree, out: Path, kind: str) -> None:
    odd = out / "odd"
    if kind == "fifo":
        os.mkfifo(odd)
    elif kind == "directory":
        odd.mkdir()
    else:
        os.mknod(odd, stat.S_IFSOCK | 0o600)
    if os.geteuid() == 0:
        own(odd, T)
    with pytest.raises(OSError, match=r"not a regular file|Is a directory|No such device"):
        tree.read(odd)


def test_a_file_is_read_up_to_its_limit(tree: PinnedTree, out: Path) -> None:
    (out / "large").write_bytes(b"x" * 101)
    with pytest.raises(OSError, match="larger than 100 bytes"):
        tree.read(out / "large", limit=100)


def test_a_root_that_its_owner_recreated_is_pinned_again(tree: PinnedTree, out: Path) -> None:
    assert tree.names(out) == ("step_5",)
    out.rename(out.with_name("earlier"))
    assert tree.problem() == "", "absent is not replaced"
    out.mkdir()
    if os.geteuid() == 0:
        own(out, T)
    (out / "step_1").mkdir()
    assert tree.names(out) == ("step_1",)


def test_a_root_that_was_missing_for_a_moment_is_pinned_again(tree: PinnedTree, out: Path) -> None:
    assert tree.names(out) == ("step_5",)
    out.rename(out.with_name("away"))
    for missing in (lambda: tree.names(out), tree.check):
        with contextlib.suppress(FileNotFoundError):
            missing()
    out.with_name("away").rename(out)
    assert tree.names(out) == ("step_5",), "the same directory as before, under its name again"
    assert tree.problem() == ""


@pytest.mark.parametrize("when", ["before", "after"])
@as_root
def test_a_root_replaced_by_a_link_stops_every_change(out: Path, when: str) -> None:
    victim = out.parent.parent / "victim"
    (victim / "step_9").mkdir(parents=True)
    tree = PinnedTree([out], owner=T)
    if when == "after":
        assert tree.problem() == ""
    out.rename(out.with_name("earlier"))
    own_link = out
    own_link.symlink_to(victim)
    own(own_link, T)
    assert "symbolic link of user" in tree.problem()
    for attempt in (lambda: tree.names(out), lambda: tree.remove_tree(out / "step_9"), tree.check):
        with pytest.raises(RootReplaced):
            attempt()
    assert (victim / "step_9").is_dir()


@pytest.mark.parametrize("owner", [0, E])
@as_root
def test_a_root_of_another_owner_stops_every_change(tree: PinnedTree, out: Path, owner: int) -> None:
    assert tree.problem() == ""
    out.rename(out.with_name("earlier"))
    out.mkdir()
    own(out, owner)
    assert f"by one of user {owner}" in tree.problem()
    with pytest.raises(RootReplaced):
        tree.make(out / "new")


@as_root
def test_a_link_above_the_root_leads_only_to_what_its_owner_owns(tmp_path: Path, out: Path) -> None:
    home = out.parent
    for victim_owner, refused in ((T, False), (E, True), (0, True)):
        elsewhere = tmp_path / f"elsewhere{victim_owner}"
        (elsewhere / "out").mkdir(parents=True)
        own(elsewhere / "out", victim_owner)
        link = own_link(tmp_path / f"way{victim_owner}", elsewhere, T)
        tree = PinnedTree([link / "out"], owner=T)
        assert bool(tree.problem()) is refused, (victim_owner, tree.problem())
        tree.close()
    assert home.exists()


def own_link(path: Path, target: Path, uid: int) -> Path:
    path.symlink_to(target)
    return own(path, uid)


@as_root
def test_a_link_that_root_made_is_followed(tmp_path: Path, out: Path) -> None:
    (tmp_path / "app").symlink_to(out)
    tree = PinnedTree([tmp_path / "app"], owner=T)
    assert tree.names(tmp_path / "app") == ("step_5",)
    tree.close()


@as_root
def test_a_directory_of_ours_that_somebody_else_made_is_refused(tree: PinnedTree, out: Path) -> None:
    hidden = out.parent / HIDDEN
    (hidden / "out").mkdir(parents=True)
    own(hidden, T)
    with pytest.raises(RootReplaced, match="belongs to user"):
        tree.make(hidden / "out" / "trash")


@as_root
def test_our_directory_replaced_or_moved_away_stops_every_change(tree: PinnedTree, out: Path) -> None:
    hidden = out.parent / HIDDEN
    tree.make(hidden / "out" / "trash")
    hidden.rename(hidden.with_name("away"))
    assert "moved away" in tree.problem()
    with pytest.raises(RootReplaced):
        tree.make(hidden / "out" / "trash")
    hidden.mkdir()
    assert "replaced" in tree.problem(), "even by one that belongs to root"
    hidden.rmdir()
    hidden.with_name("away").rename(hidden)
    assert tree.problem() == ""


def test_our_directory_that_was_deleted_is_made_again(tree: PinnedTree, out: Path) -> None:
    hidden = out.parent / HIDDEN
    tree.make(hidden / "out" / "trash")
    tree.remove_tree(hidden / "out")
    hidden.rmdir()
    assert tree.problem() == ""
    tree.make(hidden / "out" / "trash")
    assert tree.is_directory(hidden / "out" / "trash")


def test_rights_of_others_that_an_older_version_left_are_taken_away(tree: PinnedTree, out: Path) -> None:
    hidden = out.parent / HIDDEN
    hidden.mkdir(mode=0o777)
    hidden.chmod(0o777)
    tree.make(hidden / "out")
    assert stat.S_IMODE(hidden.stat().st_mode) == 0o755


@as_root
def test_directories_of_the_trainer_are_made_with_the_rights_of_its_user(tree: PinnedTree, out: Path) -> None:
    tree.make(out / "run" / "weights")
    assert {(out / "run").stat().st_uid, (out / "run" / "weights").stat().st_uid} == {T}
    assert os.geteuid() == 0
    fresh = out.parent.parent / "fresh"
    other = PinnedTree([fresh / "out"], owner=T)
    other.make(fresh / "out" / "weights")
    assert (fresh / "out" / "weights").stat().st_uid == T
    other.close()


@as_root
def test_a_directory_exchanged_while_it_is_made_is_not_given_away(tree: PinnedTree, out: Path) -> None:
    """The user exchanges each new directory for one of root's at once; whatever wins, root's stays root's."""
    prize = out / "prize"
    prize.mkdir()
    (prize / "root's").touch()  # so that the rmdir below cannot take it by mistake
    own(prize, 0)
    ended = threading.Event()
    flip = ctypes.CDLL(None, use_errno=True).renameat2

    def exchange() -> None:
        while not ended.is_set():
            flip(-100, os.fsencode(prize), -100, os.fsencode(out / "made"), 2)

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        for _ in range(300):
            tree.make(out / "made")
            for name in ("made", "prize"):
                with contextlib.suppress(OSError):
                    if (out / name).stat().st_uid == T:
                        (out / name).rmdir()
    except OSError:
        pass
    finally:
        ended.set()
        thread.join()
    owners = [p.stat().st_uid for p in (out / "made", prize) if p.exists()]
    assert 0 in owners, "the directory of root's is still root's"


@as_root
def test_the_users_directory_in_ours_belongs_to_the_user_and_its_owner_is_checked(tree: PinnedTree, out: Path) -> None:
    users = out.parent / HIDDEN / "out" / USER
    (users / "trash").mkdir(parents=True)
    tree.make(users / "trash")
    assert [p.stat().st_uid for p in (users.parent, users, users / "trash")] == [0, T, T], (
        "empty ones of ours are given"
    )
    own(users, E)
    with pytest.raises(RootReplaced) as caught:
        tree.names(users / "trash")
    assert caught.value.fix == f"chown -R {T} {users}"


@as_root
def test_a_directory_of_root_in_the_trainers_is_not_changed_with_roots_rights(tree: PinnedTree, out: Path) -> None:
    closed = out / "closed"
    closed.mkdir()
    (closed / "file").touch(0o600)
    for attempt in (
        lambda: tree.unlink(closed / "file"),
        lambda: tree.write(closed / "new", b""),
        lambda: tree.make(closed / "new"),
        lambda: tree.read(closed / "file"),
        lambda: tree.rename(closed, out.parent / HIDDEN / "out" / USER / "x"),
    ):
        tree.make(out.parent / HIDDEN / "out" / USER)
        with pytest.raises(PermissionError):
            attempt()
    assert tree.remove_tree(closed).problems
    assert (closed / "file").exists()


@as_root
def test_a_second_mount_of_the_device_is_not_emptied_with_the_users_rights(tree: PinnedTree, out: Path) -> None:
    tree.make(out / "a" / "mount")
    (out / "kept").mkdir()
    (own(out / "kept", T) / "file").touch()
    if subprocess.run(["mount", "--bind", out / "kept", out / "a" / "mount"], capture_output=True).returncode:
        pytest.skip("mounting needs CAP_SYS_ADMIN")
    try:
        assert tree.remove_tree(out / "a").problems
        assert (out / "kept" / "file").exists()
    finally:
        subprocess.run(["umount", out / "a" / "mount"], check=True)


def test_no_descriptor_is_left_open(out: Path) -> None:
    tree = PinnedTree([out])
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        tree.make(out.parent / HIDDEN / "out" / "trash")
        tree.names(out)
        tree.problem()
        with pytest.raises(OSError):
            tree.read(out / "none")
    tree.close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1


@as_root
def test_our_directory_removed_and_made_again_is_pinned_again(tree: PinnedTree, out: Path) -> None:
    """As the last of what it held goes, and something new is held; nobody looked in between."""
    hidden = out.parent / HIDDEN
    tree.make(hidden / "out")
    (hidden / "out").rmdir()
    hidden.rmdir()
    hidden.mkdir(0o700)
    assert tree.problem() == ""
    with tree.directory(hidden) as fd:
        assert Identity.of(os.fstat(fd)) == Identity.of(hidden.stat())
    hidden.rmdir()
    hidden.mkdir()
    own(hidden, T)
    assert f"belongs to user {T}" in tree.problem()
