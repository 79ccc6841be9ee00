"""Sets that the trainer removes while they are sent: held by links of podwatch's own (DESIGN section 5)."""

import itertools
import os
import re
import shutil
from pathlib import Path

import pytest

from podwatch.domain.run import IntentKind, IntentState
from podwatch.sync.upload.keep_files_until_sent import Held, Holder
from podwatch.system.own_directories import Workspace
from tests.sync.conftest import World


def ours(world: World) -> list[str]:
    """Held files and directories. os.walk: the podwatch under test removes them meanwhile."""
    found = (Path(top) / name for top, *inside in os.walk(world.directory) for name in itertools.chain(*inside))
    return sorted(
        str(p.relative_to(world.directory)) for p in found if re.search(r"/\.podwatch/(?:.*/)?uploading/.", str(p))
    )


def holder(world: World, margin: float = 1.1) -> Holder:
    return Holder(Workspace(world.output), world.journal, margin)


def held(world: World, step: int = 5) -> Held:
    found = holder(world).hold(world.catalogue.contents(step))
    assert found is not None
    return found


@pytest.fixture
def pod(tmp_path: Path) -> World:
    world = World(tmp_path / "pod", f"file://{tmp_path}/store")
    world.write_set(5)
    world.scan()
    return world


def test_links_are_the_very_files_and_outside_of_the_trainers_directories(pod: World) -> None:
    contents = pod.catalogue.contents(5)
    found = held(pod)
    for place in found.places:
        assert pod.output not in place.parents
    for part, copy in zip(contents.parts, found.contents.parts, strict=True):
        for file in (f for f in contents.files if f.part == part.part.name):
            assert (copy.part.path / file.path).samefile(part.part.path / file.path)
    assert holder(pod).unchanged(found)
    shutil.rmtree(pod.output / "checkpoints" / "step_5")
    assert holder(pod).unchanged(found)
    holder(pod).release(found)
    assert ours(pod) == []
    assert pod.journal.open_intents(IntentKind.HOLD) == []


def test_a_set_that_changes_meanwhile_is_not_held(pod: World) -> None:
    contents = pod.catalogue.contents(5)
    model = pod.output / "checkpoints" / "step_5" / "model.bin"
    model.unlink()
    model.write_bytes(b"another save")
    assert holder(pod).hold(contents) is None
    assert ours(pod) == []


def test_no_room_no_links(pod: World) -> None:
    assert holder(pod, margin=1e12).hold(pod.catalogue.contents(5)) is None
    assert ours(pod) == []


def test_where_links_are_refused_nothing_is_held(pod: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(18, os.strerror(18))

    monkeypatch.setattr("podwatch.sync.upload.keep_files_until_sent.os.link", refused)
    assert holder(pod).hold(pod.catalogue.contents(5)) is None
    assert ours(pod) == []
    assert pod.journal.open_intents(IntentKind.HOLD) == []


def test_a_directory_that_became_a_link_is_not_followed(pod: World, tmp_path: Path) -> None:
    contents = pod.catalogue.contents(5)
    root = pod.output / "checkpoints" / "step_5"
    root.rename(tmp_path / "elsewhere")
    root.symlink_to(tmp_path / "elsewhere")
    assert holder(pod).hold(contents) is None
    assert ours(pod) == []


def test_what_a_killed_podwatch_held_is_let_go_at_the_next_start(pod: World) -> None:
    held(pod)
    shutil.rmtree(pod.output / "checkpoints" / "step_5")
    assert ours(pod)
    holder(pod).take_over(None)  # another object, as after a restart
    assert ours(pod) == []
    assert pod.journal.open_intents(IntentKind.HOLD) == []


def test_what_is_still_wanted_is_taken_over(pod: World) -> None:
    was = held(pod)
    shutil.rmtree(pod.output / "checkpoints" / "step_5")
    kept = holder(pod).take_over(was.lineage)
    assert kept is not None
    assert (kept.contents.set, kept.contents.files, kept.contents.symlinks) == (
        was.contents.set,
        was.contents.files,
        was.contents.symlinks,
    )
    assert [p.part for p in kept.contents.parts] == [p.part for p in was.contents.parts]
    assert holder(pod).unchanged(kept)
    holder(pod).release(kept)
    assert ours(pod) == []
    assert pod.journal.open_intents(IntentKind.HOLD) == []


@pytest.mark.parametrize("harm", ["written", "missing", "elsewhere", "unreadable", "older"])
def test_what_is_not_whole_any_more_is_let_go(pod: World, tmp_path: Path, harm: str) -> None:
    was = held(pod)
    shutil.rmtree(pod.output / "checkpoints" / "step_5")
    file = was.places[0] / "checkpoint" / "model.bin"
    intent = pod.journal.open_intents(IntentKind.HOLD)[0]
    data = dict(intent.data)
    if harm == "written":
        with file.open("r+b") as out:
            out.write(b"other")
    elif harm == "missing":
        file.unlink()
    else:
        pod.journal.settle(intent.id, IntentState.UNDONE, "exchanged by the test")
        changed = {
            "elsewhere": {"places": [str(tmp_path)]},
            "unreadable": {"contents": {"set": 5}},
            "older": {},
        }[harm]
        if harm == "older":
            data.pop("contents")
        pod.journal.open_intent(IntentKind.HOLD, data | changed)
    assert holder(pod).take_over(was.lineage) is None
    assert ours(pod) == []
    assert pod.journal.open_intents(IntentKind.HOLD) == []
    assert tmp_path.exists()
