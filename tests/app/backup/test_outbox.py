"""Links of what is being sent: exactly the files that were found complete, removed when they are done with, and the
originals where no link is possible."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podwatch.app.backup.outbox import Outbox, OutgoingSave, outgoing_files, outgoing_links
from podwatch.store.transfer.job import SentPiece
from podwatch.store.transfer.send import SourceForeign
from podwatch.system.procfs import boot_id
from tests.app.backup.backup_world import World


class Rig:
    """An outbox, and a checkpoint of step 5 that it can take."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.root = world.save(5)
        self.scan()

    @property
    def outbox(self) -> Outbox:
        return Outbox(self.world.directory / "state" / "sent", self.world.workspace, 1.1)

    def scan(self) -> None:
        self.world.scan()
        self.contents = self.world.catalogue.contents(5)

    def save(self) -> OutgoingSave:
        found = self.contents.set
        roots = {p.part.name: str(p.part.path) for p in self.contents.parts}
        files = outgoing_files(self.contents.files)
        return OutgoingSave(
            "run", 5, found.save_id, "stored1", "custom", 100, files, roots, outgoing_links(self.contents),
            boot_id=boot_id(),
        )  # fmt: skip

    def take(self) -> OutgoingSave:
        return self.outbox.take(self.save(), self.contents)


@pytest.fixture
def rig(local: World) -> Rig:
    return Rig(local)


async def test_its_files_get_names_of_podwatchs_own(rig: Rig) -> None:
    taken = rig.take()
    assert taken.linked
    assert all("/.podwatch/" in root for root in taken.roots.values())
    linked = {name.rpartition("/")[2]: path for name, path in _links(rig).items()}
    assert set(linked) == {"model.bin", "optim.bin", "DONE"}
    assert linked["model.bin"].stat().st_ino == (rig.root / "model.bin").stat().st_ino
    assert rig.outbox.found() == (taken,), "the record has them"
    assert not list(rig.root.rglob(".podwatch*")), "nothing of ours in the trainer's directory"


def _links(rig: Rig) -> dict[str, Path]:
    home = rig.world.workspace.movable / "uploading"
    return {str(path.relative_to(home)): path for path in home.rglob("*") if path.is_file()}


async def test_what_is_released_leaves_nothing(rig: Rig) -> None:
    taken = rig.take()
    rig.outbox.sent_path(taken).write_text("")
    rig.outbox.release(taken)
    assert (rig.world.links(), rig.world.lists()) == ([], [])
    assert (rig.root / "model.bin").exists()
    assert not (rig.world.workspace.movable / "uploading").exists()


async def test_after_the_trainer_removed_it_the_links_have_it(rig: Rig) -> None:
    taken = rig.take()
    body = (rig.root / "model.bin").read_bytes()
    rig.world.remove(5)
    assert rig.outbox.is_unchanged(taken)
    (path,) = (path for name, path in _links(rig).items() if name.endswith("model.bin"))
    assert path.read_bytes() == body


@pytest.mark.parametrize("error", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EROFS])
async def test_where_linking_fails_the_originals_are_sent(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(error, "no links")

    monkeypatch.setattr("podwatch.app.backup.outbox.os.link", refuse)
    taken = rig.take()
    monkeypatch.undo()
    assert not taken.linked
    assert set(taken.roots.values()) == {str(rig.root)}
    assert rig.world.links() == []
    assert rig.outbox.found() == (taken,), "it is recorded"
    assert rig.outbox.is_unchanged(taken)
    rig.world.remove(5)
    assert not rig.outbox.is_unchanged(taken)


async def test_where_linking_fails_in_the_middle_no_link_stays(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = os.link, [0]

    def some(*given: Any, **more: Any) -> None:
        count[0] += 1
        if count[0] > 2:
            raise OSError(errno.ENOSPC, "full")
        real(*given, **more)

    monkeypatch.setattr("podwatch.app.backup.outbox.os.link", some)
    taken = rig.take()
    assert count[0] == 3
    assert not taken.linked
    assert rig.world.links() == []


async def test_where_the_next_save_would_not_fit_nothing_is_linked(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podwatch.app.backup.outbox.Outbox._lacks_room", lambda *_: True)
    assert not rig.take().linked
    assert rig.world.links() == []


async def test_cramped_is_only_what_nobody_else_has(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """To release what the trainer has, too, would free nothing."""
    taken = rig.take()
    short = [False]
    monkeypatch.setattr("podwatch.app.backup.outbox.Outbox._lacks_room", lambda *_: short[0])
    rig.world.remove(5)
    assert not rig.outbox.is_cramped(taken)
    short[0] = True
    assert rig.outbox.is_cramped(taken)
    rig.outbox.release(taken)
    rig.root = rig.world.save(5)
    rig.scan()
    short[0] = False
    taken = rig.take()
    short[0] = True
    assert not rig.outbox.is_cramped(taken)
    assert not rig.outbox.is_cramped(replace(taken, linked=False))


# -- a source that changed


def _write_into(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1_000_000))


CHANGES = {
    "written into": _write_into,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "replaced": lambda path: (path.with_name("n").write_bytes(path.read_bytes()), path.with_name("n").rename(path)),
    "a link": lambda path: (path.unlink(), path.symlink_to("/etc/hostname")),
    "removed": lambda path: path.unlink(),
}


@pytest.mark.parametrize("change", ["written into", "longer"])
async def test_what_is_written_into_after_it_was_linked_is_another_save(rig: Rig, change: str) -> None:
    """A link shares its bytes with the trainer's name."""
    taken = rig.take()
    assert rig.outbox.is_unchanged(taken)
    CHANGES[change](rig.root / "model.bin")  # type: ignore[operator]
    assert not rig.outbox.is_unchanged(taken)


@pytest.mark.parametrize("change", CHANGES)
async def test_what_changed_before_it_was_linked_gets_no_link(rig: Rig, change: str) -> None:
    CHANGES[change](rig.root / "model.bin")  # type: ignore[operator]
    taken = rig.outbox.take(rig.save(), rig.contents)
    assert not taken.linked
    assert rig.world.links() == []
    assert not rig.outbox.is_unchanged(taken)


@pytest.mark.parametrize("change", CHANGES)
async def test_what_changed_is_noticed_without_links(rig: Rig, change: str) -> None:
    """Just before the manifest, where the originals are sent."""
    save = rig.save()
    assert rig.outbox.is_unchanged(save)
    CHANGES[change](rig.root / "sub" / "optim.bin")  # type: ignore[operator]
    assert not rig.outbox.is_unchanged(save)


async def test_a_link_to_a_file_of_another_user_is_not_sent(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user of the training cannot read it, and may not have it sent by podwatch, which can."""
    real = os.stat

    def foreign(path: Any, *given: Any, **more: Any) -> Any:
        found = real(path, *given, **more)
        if path != "model.bin":
            return found
        values = list(found)
        values[3], values[4] = 2, 12345  # names, owner
        return os.stat_result(values)

    monkeypatch.setattr("podwatch.app.backup.outbox.os.stat", foreign)
    with pytest.raises(SourceForeign, match="12345"):
        rig.take()
    monkeypatch.undo()
    assert (rig.world.links(), rig.world.lists()) == ([], [])


# -- what an earlier podwatch left


async def test_what_a_crash_left_is_found_or_removed(rig: Rig) -> None:
    taken = rig.take()
    state = rig.world.directory / "state" / "sent"
    for name in ("7.gone.sent", "8.torn.json", "half.tmp"):
        (state / name).write_text("{")
    home = rig.world.workspace.movable / "uploading"
    (home / "7.gone" / "part").mkdir(parents=True)
    (home / "7.gone" / "part" / "model.bin").write_text("x")
    assert rig.outbox.found() == (taken,)
    assert rig.world.lists() == [f"{taken.name}.json"]
    assert {name.partition("/")[0] for name in _links(rig)} == {taken.name}


async def test_only_pieces_that_are_missing_count_as_unsent(rig: Rig) -> None:
    taken = rig.take()
    lines = [SentPiece(f"k{n}", f"sha1:{'0' * 40}", 10, (1, 2, 3, 4)) for n in range(3)]
    rig.outbox.sent_path(taken).write_bytes(b"".join(line.to_line() for line in lines))
    rig.outbox.send_again(taken, ["k1"])
    assert set(rig.outbox.sent(taken)) == {"k0", "k2"}
    renamed = replace(taken, stored_as="stored2")
    rig.outbox.rename(renamed)
    assert rig.outbox.sent(taken) == {}
    assert rig.outbox.found() == (renamed,)
