"""What podwatch finds in its own directories is never trusted from another user."""

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drivers.paths import HIDDEN, OPERATIONS, Guard, HostError, RootReplaced
from tests.paths.hostile import E, Site, T, as_root, fresh, in_memory, made, own, saved
from tests.support.examples import examples

pytestmark = as_root


@pytest.fixture
def site() -> Iterator[Site]:
    with in_memory() as memory, fresh(memory) as found:
        yield found


def index(directory: Path, *moves: tuple[str, str], uid: int = 0, name: str = "index.json") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    known = {"kind": "podwatch-quarantine", "schema_version": 1, "number": 1, "wall": 1.0, "steps": {"9": "complete"}}
    (directory / name).write_text(json.dumps({**known, "moves": moves}))
    for path in (directory, directory / name):
        os.chown(path, uid, uid)
    return directory


# -- of another user --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uid", [T, E])
def test_a_directory_of_ours_that_another_user_made_is_never_used(site: Site, uid: int) -> None:
    ours = site.home / HIDDEN / "out"
    secret = site.above / "secret"
    index(ours / "quarantine" / "1", (str(site.out / "taken"), f"../../../../../victim/{secret.name}"), uid=uid)
    os.mkfifo(ours / "run.json")
    for directory in (ours / "trash", ours / "staging"):
        directory.mkdir()
    for directory, _, names in os.walk(site.home / HIDDEN):
        for path in (Path(directory), *(Path(directory) / n for n in names)):
            own(path, uid)
    assert f"belongs to user {uid}" in site.guard.problem()
    for attempt in (
        lambda: site.guard.give_back(1),
        site.guard.entries,
        site.guard.has_record,
        site.guard.save_record,
        *(lambda name=name: OPERATIONS[name].act(site.guard) for name in ("quarantine", "restore", "restore over")),  # type: ignore[misc]
    ):
        with pytest.raises(RootReplaced, match=str(site.home / HIDDEN)):
            attempt()
    OPERATIONS["remove"].act(site.guard)
    assert (site.out / "checkpoints" / "step_9").is_dir(), "nothing is removed either"
    assert "podwatch's own directory" in site.guard.events[-1].message
    assert site.guard.entries_to_delete(verified=1 << 62) == []
    site.unharmed()


def test_an_index_moves_only_what_the_training_user_can_move(site: Site) -> None:
    """The quarantine is the training user's, who can write any index: it is carried out with that user's rights."""
    place = site.guard.probed()
    kept = index(place.quarantine / "1", (str(site.out / "back"), "0-step_9"), uid=T)
    saved(kept / "0-step_9", 0)
    with pytest.raises(HostError, match="Permission denied"):
        place.give_back(1)
    assert (kept / "0-step_9" / "model.bin").is_file()
    for path in (kept / "0-step_9", *(kept / "0-step_9").iterdir()):
        own(path, T)
    assert place.give_back(1) == (site.out / "back",)


def test_a_record_of_another_user_in_our_directory_is_not_used(site: Site) -> None:
    place = site.guard.probed()
    place.save_record()
    own(place.record, T)
    with pytest.raises(RootReplaced, match="file belongs to user"):
        place.has_record()


@pytest.mark.parametrize("odd", ["fifo", "directory", "link", "socket"])
def test_a_record_that_is_no_file_never_blocks(site: Site, odd: str) -> None:
    place = site.guard.probed()
    if odd == "fifo":
        os.mkfifo(place.record)
    elif odd == "directory":
        place.record.mkdir()
    elif odd == "link":
        place.record.symlink_to(site.above / "secret")
    else:
        os.mknod(place.record, stat.S_IFSOCK | 0o600)
    assert not place.has_record()
    place.save_record()
    assert place.has_record() is (odd != "directory"), "the copy is written where that is possible"
    site.unharmed()


NAMES = st.one_of(
    st.sampled_from(["../x", "0-../x", "0-a/b", "/etc/passwd", "", ".", "..", "0-", "x", "0-x\0", "-1-x", "٣-x"]),
    st.text(max_size=8).filter(lambda s: not (s[:1].isdigit() and "-" in s)),
)


@given(name=NAMES)
@settings(max_examples=examples(30))
def test_a_name_that_is_not_one_plain_segment_moves_nothing(name: str) -> None:
    with in_memory() as memory, fresh(memory) as site:
        place = site.guard.probed()
        kept = index(place.quarantine / "1", (str(site.out / "good"), "0-good"), (str(site.out / "taken"), name))
        saved(kept / "0-good")
        with pytest.raises(HostError, match="cannot be returned"):
            place.give_back(1)
        assert (kept / "0-good").is_dir()
        index(place.quarantine / "2", (str(site.out / "checkpoints" / "step_9"), name), name="moving.json")
        assert place.finish_quarantines() == 0
        assert (site.out / "checkpoints" / "step_9").is_dir()
        site.unharmed()


@pytest.mark.parametrize(
    "place", ["{base}/x", "{out}", "{out}/../x", "{out}/.podwatch/x", "{home}/.podwatch/out/x", "x"]
)
def test_nothing_is_returned_to_or_taken_from_anywhere_else(site: Site, place: str) -> None:
    spelled = place.format(base=site.base, home=site.home, out=site.out)
    ours = site.guard.probed()
    kept = index(ours.quarantine / "1", (spelled, "0-x"))
    saved(kept / "0-x")
    with pytest.raises(HostError, match="outside the output directory"):
        ours.give_back(1)
    with pytest.raises(HostError, match="outside the output directory"):
        ours.set_aside(Path(spelled))
    assert (kept / "0-x").is_dir()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"moves": [1]}', b'{"moves": [], "steps": 3}', b"\xff\xfe"])
def test_a_damaged_index_moves_nothing_and_is_reported(site: Site, damage: bytes) -> None:
    place = site.guard.probed()
    kept = index(place.quarantine / "3")
    (kept / "index.json").write_bytes(damage)
    saved(kept / "0-step_9")
    (line,) = place.entries()
    assert "index cannot be used" in line
    with pytest.raises(HostError, match="cannot be returned"):
        place.give_back(3)
    assert sorted(p.name for p in kept.iterdir()) == ["0-step_9", "index.json"]
    assert place.free_number() == 4


# -- a removal that was begun ------------------------------------------------------------------------------------------


def test_what_a_cut_off_removal_left_is_nobodys_until_it_is_planned_again(site: Site) -> None:
    """The rest has the name of a step that may be written again: only what is in the trash goes by itself."""
    place = site.guard.probed()
    first, second = site.out / "checkpoints" / "step_9", site.out / "rollouts" / "step_9"
    place.was_killed_while_removing(9, first)
    place.sweep_trash()
    assert second.exists()
    assert list(place.trash.iterdir()) == []


# -- what is made in the trainer's directories ------------------------------------------------------------------------


def test_a_link_is_moved_itself(site: Site) -> None:
    link = site.out / "rollouts" / "step_12"
    own_link(link, site.above)
    assert site.guard.set_aside(link) == 1
    moved = site.guard.quarantine / "7" / "0-step_12"
    assert moved.readlink() == site.above
    assert not os.path.lexists(link)
    site.unharmed()


def own_link(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return own(path, T)


def test_a_link_on_the_way_is_refused_and_named(site: Site) -> None:
    (site.out / "rollouts").rename(site.out / "real")
    own_link(site.out / "rollouts", site.above)
    with pytest.raises(HostError, match="symbolic link") as caught:
        site.guard.set_aside(site.out / "rollouts" / "step_9")
    assert str(site.out / "rollouts") in str(caught.value)
    site.unharmed()


@pytest.mark.parametrize("user", [T, None])
def test_restored_directories_belong_to_the_trainer(site: Site, user: int | None) -> None:
    """Each level that is missing; also where trainer.user is not set and output_dir says whose it is."""
    site.guard.forget()
    site.guard = Guard(site.base, site.home, site.out, user)
    target = site.out / "run" / "default" / "checkpoints" / "step_7"
    staging = site.guard.restore_homes(target)
    assert not (site.out / "run").exists(), "nothing is to be seen before it is whole"
    assert staging.stat().st_uid == T
    assert stat.S_IMODE(staging.stat().st_mode) == 0o700
    OPERATIONS["restore deep"].act(site.guard)
    assert {p.stat().st_uid for p in (target, *list(target.parents)[:3])} == {T}


def test_a_restore_through_a_link_is_refused_before_anything_is_fetched(site: Site) -> None:
    own_link(site.out / "run", site.above)
    with pytest.raises(NotADirectoryError, match="out/run'"):
        site.guard.restore_homes(site.out / "run" / "b" / "c" / "step_7")


def test_a_repaired_tracker_belongs_to_the_trainer(site: Site) -> None:
    latest, link = site.out / "latest", site.out / "step_latest"
    assert site.guard.repair({latest: b"5"}, {link: "step_5"}) == (latest, link)
    assert {latest.lstat().st_uid, link.lstat().st_uid} == {T}
    latest.write_text("7")
    latest.chmod(0o640)
    site.guard.repair({latest: b"5"}, {})
    assert (latest.read_text(), latest.stat().st_uid, stat.S_IMODE(latest.stat().st_mode)) == ("5", T, 0o640)


@pytest.mark.parametrize("refused", [errno.ENOSPC])
def test_quarantine_on_a_full_disk_makes_nothing(site: Site, monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    place = site.guard.probed()
    place.make_spare()

    def full(*_: object, **__: object) -> None:
        raise OSError(refused, os.strerror(refused))

    monkeypatch.setattr(os, "mkdir", full)
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert place.set_aside(site.out / "checkpoints" / "step_9") == 1
    monkeypatch.undo()
    assert place.give_back(7) == (site.out / "checkpoints" / "step_9",)


# -- roots ------------------------------------------------------------------------------------------------------------


def test_an_output_directory_of_roots_that_the_user_may_have_put_there(site: Site) -> None:
    """T renames a directory of root's to the configured name before podwatch starts."""
    site.out.rename(site.home / "own")
    site.beside.rename(site.out)
    assert "cannot write to it" in site.guard.problem()
    with pytest.raises(RootReplaced):
        OPERATIONS["restore"].act(site.guard)
    site.unharmed()


@pytest.mark.parametrize(("where", "mode"), [("home/shared", 0o777), ("shared", 0o755)])
def test_an_output_directory_of_roots_that_is_meant(site: Site, where: str, mode: int) -> None:
    out = made(site.base / where, 0)
    out.chmod(mode)
    assert Guard(site.base, site.home, out, T).problem() == ""


def test_who_can_move_our_directory_away_is_said(site: Site) -> None:
    assert f"user {T} owns {site.home}" in site.guard.exposed()
    own(site.home, 0)
    assert site.guard.exposed() == ""
    site.home.chmod(0o777)
    assert "other users can write" in site.guard.exposed()
    site.home.chmod(0o1777)
    assert site.guard.exposed() == ""


@pytest.mark.parametrize("uid", [T, E, 0])
def test_a_quarantine_inside_the_output_directory_is_used_with_the_rights_of_its_user(site: Site, uid: int) -> None:
    inside = Guard(site.base, site.home, site.out, T, inside=True)
    index(made(inside.own_directory_inside / "quarantine", uid) / "1", (str(site.out / "x"), "0-x"), uid=uid)
    saved(inside.quarantine / "1" / "0-x", uid)
    if uid == T:
        assert inside.set_aside(site.out / "checkpoints" / "step_9") == 1
        assert inside.give_back(1) == (site.out / "x",)
        return
    with pytest.raises(HostError, match="Permission denied"):
        inside.set_aside(site.out / "checkpoints" / "step_9")
    with pytest.raises(HostError, match="Permission denied"):
        inside.give_back(1)
    assert (site.out / "checkpoints" / "step_9").is_dir()
