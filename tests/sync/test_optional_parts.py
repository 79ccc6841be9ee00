"""What no resume needs travels after the set, never in its way, and comes back only for who asks."""

import json
import os
import time
from pathlib import Path

import pytest

from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.layout import PartDir
from podwatch.checkpoints.trainers import make_layout
from podwatch.config.settings import Settings, SyncSettings
from podwatch.domain.errors import RemoteError
from podwatch.domain.manifest import Manifest, Proof
from podwatch.policy.store_retention import EXTRA
from podwatch.stores.base import ObjectStore
from podwatch.sync.inventory import inventory
from podwatch.sync.publish_and_pointer import read_manifest, read_optional
from podwatch.sync.store_removal import RemoteRetention
from podwatch.sync.upload.optional_parts import OptionalParts, look
from podwatch.sync.verify_stored import Verified, examine_save, verify_optional, verify_save
from podwatch.system.clock import SystemClock
from tests.support.checkpoints import write_prime_rl_step
from tests.sync.conftest import Run, Shifted, World, until

pytestmark = pytest.mark.slow


class Confirmed:
    """A lease that is always held."""

    def confirm(self, _store: ObjectStore) -> tuple[int, float]:
        return 1, 1e18


def prime(world: World, **sync: object) -> World:
    """As prime-rl with exported weights, quiet at once."""
    document = world.settings.model_dump()
    document["trainer"] |= {"layout": "prime-rl"}
    document["checkpoints"] |= {"settle_weak": 0.0, "custom": None}
    document["sync"] |= sync
    world.settings = Settings.model_validate(document)
    world.layout = make_layout(world.settings)
    world.catalogue = Catalogue(world.layout, SystemClock(), settle=0.0, settle_weak=0.0)
    return world


def optional(world: World, step: int) -> Manifest | None:
    store = world.store()
    try:
        found = next(s for s in inventory(store, world.keys)[0] if s.step == step)
        return read_optional(store, world.keys, step, found.save_id)
    finally:
        store.close()


def save(world: World, step: int, shard: str = "model-1.safetensors") -> None:
    write_prime_rl_step(world.output, step, "A")
    weights = world.output / "weights" / f"step_{step}"
    weights.mkdir(parents=True, exist_ok=True)
    (weights / "model-1.safetensors").write_bytes(os.urandom(1000))
    (weights / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    (weights / "STABLE").touch()
    world.scan()


def told(world: World) -> list[str]:
    return [e.message for e in world.events if e.name == "optional-parts"]


async def test_a_milestone_carries_them(world: World, run: Run) -> None:
    prime(world, keep_every=2, extra=["evals", "notes.txt", "away/passwd"])
    (world.output / "evals").mkdir()
    (world.output / "evals" / "scores.json").write_text("{}")
    (world.output / "evals" / "secret.env").write_text("KEY=1")
    (world.output / "evals" / ".podwatch").mkdir()
    (world.output / "evals" / ".podwatch" / "x").write_text("ours")
    (world.output / "evals" / "out").symlink_to("../notes.txt")
    (world.output / "notes.txt").write_text("n")
    (world.directory / "elsewhere").mkdir()
    (world.directory / "elsewhere" / "passwd").write_text("root")
    (world.output / "away").symlink_to(world.directory / "elsewhere")
    syncer = await run(world)
    for step in (5, 10):
        save(world, step)
        await syncer.sync_now()
    before = world.pointer()
    assert before is not None
    await until(lambda: told(world))
    await syncer.stop()
    assert optional(world, 5) is None, "the first of two is no milestone"
    assert world.pointer() == before, "the pointer and what it names stay as they are"
    assert before.seq == 2
    store = world.store()
    required = read_manifest(store, world.keys, before)
    saves, problem = inventory(store, world.keys)
    assert (problem, [(s.step, s.optional) for s in saves]) == ("", [(10, True), (5, False)])
    beside = verify_optional(store, world.keys, saves[0], deep=True)
    assert beside == ()
    assert examine_save(store, saves[0], deep=True) == Verified((), Proof.READ_BACK)
    found = optional(world, 10)
    assert found is not None
    assert not {f.path for f in required.files} & {f.path for f in found.files}
    assert {f.path for f in found.files if f.part == EXTRA} == {"extra/evals/scores.json", "extra/notes.txt"}
    weights = {f.path for f in found.files if f.part == "weights"}
    assert weights
    assert not found.symlinks
    assert world.violations() == []

    away = next(f for f in found.files if f.part == "weights" and f.size)
    for version in [v for v in store.versions(away.key) if v.key == away.key]:
        store.delete(version)
    assert verify_save(store, saves[0]) == ()
    assert verify_optional(store, world.keys, saves[0]) == (f"{away.path} is not in the store",)
    store.close()


async def test_the_end_of_the_run_sends_the_export_that_came_after_the_last_save(world: World, run: Run) -> None:
    prime(world, keep_every=1, extra=["final"])
    (world.output / "final").mkdir()
    (world.output / "final" / "model.bin").write_bytes(b"early")
    save(world, 5)
    syncer = await run(world)
    await until(lambda: told(world) and not syncer.status().uploading_step)
    early = optional(world, 5)
    (world.output / "final" / "model.bin").write_bytes(b"the end")
    syncer.notify()
    await until(lambda: syncer._wake.is_set() is False)
    assert optional(world, 5) == early, "a milestone is as it was at its time"
    world.finished = True
    syncer.notify()
    await until(lambda: len(told(world)) == 2)
    found = optional(world, 5)
    assert found is not None
    assert {f.part for f in found.files} == {"weights", EXTRA}
    store = world.store()
    end = next(f for f in found.files if f.part == EXTRA)
    assert store.get_bytes(end.key, end.file_id) == b"the end"
    store.close()
    pointer = world.pointer()
    assert pointer is not None
    assert pointer.seq == 1
    assert world.violations() == []
    await until(lambda: not syncer.status().uploading_step)
    count = len(told(world))
    syncer.notify()
    await until(lambda: syncer._wake.is_set() is False)
    assert len(told(world)) == count == 2


async def test_none_sends_no_weights_and_a_run_without_milestones_waits_for_its_end(local: World, run: Run) -> None:
    prime(local, optional_parts="none", extra=["notes.txt"])
    (local.output / "notes.txt").write_text("n")
    save(local, 5)
    syncer = await run(local)
    await syncer.sync_now()
    syncer.notify()
    await until(lambda: syncer._wake.is_set() is False)
    assert optional(local, 5) is None
    local.finished = True
    syncer.notify()
    await until(lambda: told(local))
    found = optional(local, 5)
    assert found is not None
    assert [f.path for f in found.files] == ["extra/notes.txt"]


async def test_what_is_not_whole_or_too_large_is_left_out_and_the_set_is_not(local: World, run: Run) -> None:
    prime(local, keep_every=1, extra=["big"], extra_max="1kB")
    (local.output / "big").write_bytes(os.urandom(2000))
    save(local, 5, "gone.safetensors")
    syncer = await run(local)
    await until(lambda: len(told(local)) == 2)
    assert syncer.status().last_step == 5
    assert optional(local, 5) is None
    assert "weights is not stored: model.safetensors.index.json names gone.safetensors" in told(local)[0]
    assert "its 2 kB exceed sync.extra_max (1 kB)" in told(local)[1]
    assert syncer.status().abandoned_in_a_row == 0


async def test_a_new_set_goes_first(b2: World, run: Run) -> None:
    assert b2.server is not None
    prime(b2, keep_every=1, extra=["big"])
    (b2.output / "big").write_bytes(os.urandom(12_000_000))
    save(b2, 5)
    b2.server.fault("b2_upload_part", "slow", seconds=20.0, count=50)
    syncer = await run(b2)
    await until(lambda: any(e["ep"] == "fault" for e in b2.server.events()))  # type: ignore[union-attr]
    assert syncer.status().uploading_step == 5, "not removed while it is read"
    save(b2, 10)
    syncer.notify()
    await until(lambda: syncer.status().last_step == 10)
    assert optional(b2, 5) is None
    b2.server.admin("clear")
    await until(lambda: len(told(b2)) == 2)
    assert optional(b2, 5) is not None
    assert optional(b2, 10) is not None
    assert b2.violations() == []
    assert "upload-abandoned" not in b2.names()


async def test_a_write_that_fails_sends_nothing_twice(world: World, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    prime(world, keep_every=1)
    save(world, 5)
    write, calls = OptionalParts._write, [0]

    def fails_once(self: OptionalParts, *args: object) -> bool:
        calls[0] += 1
        if calls[0] == 1:
            raise RemoteError("the line is cut", transient=True)
        return write(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(OptionalParts, "_write", fails_once)
    syncer = await run(world)
    await until(lambda: told(world))
    found = optional(world, 5)
    assert found is not None
    store = world.store()
    for file in found.files:
        assert len([v for v in store.versions(file.key) if v.key == file.key]) == 1
    retention = RemoteRetention(
        store,
        world.keys,
        world.journal,
        SyncSettings(keep_last=1, keep_every=0),
        Shifted(1e6),
        world.identity(),
        Confirmed(),
        {},
    )
    save(world, 10)
    await syncer.sync_now()
    await syncer.stop()
    assert [r[0] for r in retention.carry_out().removed] == [5]
    assert not list(store.list(world.keys.step(5))), "what was optional goes with it"
    store.close()
    assert world.violations() == []


def test_a_part_that_changes_is_not_quiet(tmp_path: Path) -> None:
    part = PartDir("weights", tmp_path / "w", required=False, uploaded=False, export=True)
    assert look(part, quiet=60, now_wall=time.time()).absent
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "a").write_text("a")
    assert look(part, quiet=60, now_wall=time.time()).problem == "it is still being written"
    assert look(part, quiet=60, now_wall=time.time() + 61).problem == ""
    (tmp_path / "w" / ".tmpabcdef").write_text("half")
    assert look(part, quiet=60, now_wall=time.time() + 61).problem == "it is still being written"


def test_the_secrets_file_stays_here_under_any_name(tmp_path: Path) -> None:
    private = tmp_path / "harmless"
    private.write_text("B2_APPLICATION_KEY=x")
    (tmp_path / "fine").write_text("x")
    part = PartDir(EXTRA, tmp_path, required=False, uploaded=False, names=("harmless", "fine"), export=True)
    found = look(part, quiet=0, now_wall=time.time() + 5, private=private).found
    assert [f.path for f in found.files] == ["fine"]


@pytest.mark.parametrize("path", ["", "/etc", "..", "a/../b", ".", "a//b"])
def test_extra_lies_below_output_dir(path: str) -> None:
    with pytest.raises(ValueError, match="must be a path below output_dir"):
        SyncSettings.model_validate({"extra": [path]})


def test_extra_names_nothing_twice() -> None:
    with pytest.raises(ValueError, match="is inside another"):
        SyncSettings.model_validate({"extra": ["a", "a/b"]})
    assert SyncSettings.model_validate({"extra": ["a/", "ab"]}).extra == ("a", "ab")
