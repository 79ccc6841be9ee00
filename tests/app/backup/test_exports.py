"""Files that are stored beside a save: at milestones and at the end of the run, whole or not at all."""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from podwatch.app.backup.exports import EXTRA, due_exports, read_part
from podwatch.app.backup.outbox import OutgoingSave
from podwatch.app.backup.uploads import UploadStopped
from podwatch.checkpoints.shapes import PartDir
from podwatch.domain.snapshot import Desired
from podwatch.domain.stored_checkpoint import StoredCheckpoint
from tests.app.backup.backup_world import World, until


@pytest.fixture
async def extra(tmp_path: Path) -> Any:
    world = World(tmp_path / "pod", f"file://{tmp_path}/store", keep_every=2, extra=("hf",))
    yield world
    await world.stop()


def export(world: World, text: str) -> Path:
    """As it was written a minute ago."""
    path = world.output / "hf" / "model.safetensors"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    os.utime(path, (time.time() - 60,) * 2)
    return path


def documents(world: World) -> dict[int, Any]:
    """exports.json by step."""
    found = {name: path for name, path in world.objects().items() if name.endswith("/exports.json")}
    return {
        int(name.split("/")[0].removeprefix("step_")): json.loads(path.read_bytes()) for name, path in found.items()
    }


async def test_a_milestone_carries_them_and_other_saves_do_not(extra: World) -> None:
    export(extra, "weights 1")
    backup = await extra.start()
    for step in (5, 10):  # the second publication is the first at a multiple of two
        extra.save(step)
        extra.scan()
        await backup.sync_now()
    await until(lambda: documents(extra).get(10, {}).get("complete"))
    assert set(documents(extra)) == {10}
    (file,) = documents(extra)[10]["files"]
    (path,) = (p for name, p in extra.objects().items() if name.endswith(f"/{file['part']}/{file['path']}"))
    assert path.read_text() == "weights 1"
    await until(lambda: [c.exports for c in backup.status().checkpoints if c.step == 10] == [True])


async def test_the_end_of_the_run_sends_what_came_after_the_last_save(extra: World) -> None:
    extra.save(5)
    extra.scan()
    backup = await extra.start()
    await backup.sync_now()
    assert documents(extra) == {}
    export(extra, "final weights")
    extra.edit(desired=Desired.FINISHED)
    backup.run_ended()
    await until(lambda: documents(extra).get(5, {}).get("complete"))
    async with asyncio.timeout(30):  # podwatch knows it a moment after the document is written
        while (await backup.unstored()).pending:
            await asyncio.sleep(0.05)


async def test_a_new_checkpoint_is_sent_before_them(extra: World, monkeypatch: pytest.MonkeyPatch) -> None:
    export(extra, "weights")
    backup = extra.backup()
    real, stopped = backup._uploads.send, asyncio.Event()

    async def send(save: OutgoingSave, **more: Any) -> Any:
        if save.save_id.endswith("-exports") and not stopped.is_set():
            await asyncio.wait_for(stopped.wait(), 60)
            raise UploadStopped("on purpose")
        return await real(save, **more)

    monkeypatch.setattr(backup._uploads, "send", send)
    monkeypatch.setattr(backup._uploads, "stop", lambda _why: stopped.set())
    await backup.start()
    for step in (5, 10):
        extra.save(step)
        extra.scan()
        await backup.sync_now()
    await until(lambda: backup._exports.sending)
    extra.scan()
    assert not stopped.is_set(), "nothing waits"
    extra.save(15)
    extra.scan()
    await until(lambda: extra.newest() == 15)
    await until(lambda: documents(extra).get(10, {}).get("complete"))


def test_what_this_pod_does_not_have_is_not_due() -> None:
    """An incomplete checkpoint of the same step here would pass for it."""
    stored = (
        StoredCheckpoint(5, "a", milestone=True),
        StoredCheckpoint(10, "b", milestone=True, here="own"),
        StoredCheckpoint(15, "c"),
    )
    for finished in (False, True):
        assert [due.saved.step for due in due_exports(stored, finished=finished)] == [10]


async def test_what_is_still_written_waits_and_the_save_does_not(extra: World) -> None:
    path = export(extra, "half")
    path.rename(path.with_suffix(".safetensors.tmp"))
    backup = await extra.start()
    for step in (5, 10):
        extra.save(step)
        extra.scan()
        await backup.sync_now()
    await until(lambda: "optional-parts" in extra.names())
    assert extra.newest() == 10
    assert documents(extra) == {}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda root: (root / "hf" / "x.tmp").write_text("x"), "still being written"),
        (lambda root: (root / "hf" / "big").write_bytes(b"x" * 2000), "exceed"),
        (lambda root: None, ""),
    ],
    ids=["being written", "too large", "fine"],
)
def test_what_is_not_whole_or_too_large_is_left_out(tmp_path: Path, change: Any, problem: str) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").write_text("x")
    change(tmp_path)
    part = PartDir(EXTRA, tmp_path, required=False, uploaded=False, names=("hf",), export=True)
    found = read_part(part, quiet=0.0, now_wall=time.time() + 60, most_bytes=1000)
    assert problem in found.problem
    assert bool(found.problem) is bool(problem)


@pytest.mark.parametrize("name", [".env", "id_rsa", ".podwatch/x"])
def test_keys_and_what_is_ours_stay_here(tmp_path: Path, name: str) -> None:
    for one in ("hf/model.safetensors", f"hf/{name}"):
        (tmp_path / one).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / one).write_text("x")
    part = PartDir(EXTRA, tmp_path, required=False, uploaded=False, names=("hf",), export=True)
    found = read_part(part, quiet=0.0, now_wall=time.time() + 60).found
    assert [file.path for file in found.files] == ["hf/model.safetensors"]
