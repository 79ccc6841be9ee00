"""What an earlier tool left in a bucket is taken in: whole or not at all, and the old objects stay as they are."""

import base64
import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.checkpoints.layouts import KINDS, Layout
from podwatch.checkpoints.layouts.base import Site
from podwatch.config.settings import CustomLayoutSettings
from podwatch.domain.errors import RemoteError
from podwatch.domain.manifest import Keys, Pointer
from podwatch.stores.base import ObjectStore
from podwatch.sync.inventory import inventory
from podwatch.sync.publish_and_pointer import read_pointer
from podwatch.sync.runs.import_backups import Backup, Fit, Importer, Unfit, find_backups, judge
from podwatch.sync.verify_stored import verify_save
from podwatch.system.clock import SystemClock
from tests.support.checkpoints import safetensors_bytes, write_hf_step, write_prime_rl_step
from tests.support.past_runs import PART_SIZE, into_bucket, into_directory, past_run, tree
from tests.support.s3server import S3Server
from tests.sync.conftest import World

pytestmark = pytest.mark.slow

KEYS = Keys("old")


def leave(world: World, prefix: str, source: Path, *, times: bool = True) -> None:
    """Another tool copies ``source`` below ``prefix``."""
    if isinstance(world.server, S3Server):
        for name, path in tree(source).items():
            data = base64.b64encode(path.read_bytes()).decode()
            world.server.admin("put", key=f"{prefix}/{name}", data=data)
    elif world.server is not None:
        into_bucket(world.server, prefix, tree(source), times=times)
    else:
        into_directory(Path(world.store_url.removeprefix("file://")), prefix, tree(source))


def maker(name: str, custom: CustomLayoutSettings | None = None) -> Callable[[Path], Layout]:
    return lambda output: KINDS[name].make(Site(output, custom=custom))


CUSTOM = maker("custom", CustomLayoutSettings(step_dir="ckpt/s{step}", required=("model.safetensors",)))


def custom_step(root: Path, size: int = 3_000_000) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "model.safetensors").write_bytes(safetensors_bytes({"w": size // 4}, b"\x07"))
    (root / "sub").mkdir(exist_ok=True)
    (root / "sub" / "empty").write_bytes(b"")
    return root


def importer(store: ObjectStore, notes: Path | None = None, source: str = "old") -> Importer:
    return Importer(store, KEYS, source=source, part_size=PART_SIZE, clock=SystemClock(), notes=notes)


def fits(store: ObjectStore, make: Callable[[Path], Layout], source: str = "old") -> dict[int, Fit | str]:
    found: dict[int, Fit | str] = {}
    for backup in find_backups(store, source):
        try:
            found[backup.step] = judge(store, backup, make)
        except Unfit as error:
            found[backup.step] = str(error)
    return found


def whole(found: Fit | str) -> Fit:
    assert isinstance(found, Fit), found
    return found


def state(store: ObjectStore, prefix: str) -> list[tuple[str, int, str, float]]:
    return [(v.key, v.size, v.file_id, v.uploaded_wall) for v in store.versions(prefix)]


@pytest.mark.parametrize("size", [3_000_000, 12_000_000])
def test_taken_in_whole_and_published(world: World, size: int) -> None:
    leave(world, "old/step_7", custom_step(world.directory / "a", size))
    leave(world, "old/step_12", custom_step(world.directory / "b", 1000))
    store = world.store()
    before = state(store, "old/step_")
    found = fits(store, CUSTOM)
    mine = importer(store)
    for step in (7, 12):
        fit = whole(found[step])
        assert (fit.layout, fit.others, len(fit.files)) == ("custom", 0, 2)
        mine.take_in(fit)
        assert mine.there(fit)
    assert read_pointer(store, KEYS) is None
    assert mine.point(whole(found[12]), alive=False).moves
    pointer = read_pointer(store, KEYS)
    assert pointer is not None
    assert (pointer.step, pointer.order, pointer.lineage) == (12, (1, 1), mine.lineage)
    saves, problem = inventory(store, KEYS)
    assert ([s.step for s in saves], problem) == ([12, 7], "")
    assert all(verify_save(store, s, deep=True) == () for s in saves)
    (seven,) = [s for s in saves if s.step == 7]
    assert seven.manifest is not None
    (model,) = [f for f in seven.manifest.files if f.path.endswith("model.safetensors")]
    real = (world.directory / "a" / "model.safetensors").stat().st_mtime_ns
    unit = 1_000_000_000 if isinstance(world.server, S3Server) else 1_000_000  # S3 lists only the upload, in seconds
    assert abs(model.mtime_ns // unit - real // unit) <= (60 if unit > 1_000_000 else 0)
    assert state(store, "old/step_") == before
    assert world.violations() == []
    store.close()


def test_restored_as_if_podwatch_had_saved_it(world: World) -> None:
    leave(world, "old/step_7", custom_step(world.directory / "a"))
    store = world.store()
    found = whole(fits(store, CUSTOM)[7])
    importer(store).take_in(found)
    importer(store).point(found, alive=False)
    world.keys = KEYS
    assert world.restorer().fetch(to=world.directory / "there").step == 7
    restored = {n: p.read_bytes() for n, p in tree(world.directory / "there" / "checkpoint").items()}
    assert restored == {n: p.read_bytes() for n, p in tree(world.directory / "a").items()}
    store.close()


def test_again_changes_nothing(world: World) -> None:
    leave(world, "old/step_7", custom_step(world.directory / "a"))
    store = world.store()
    for _ in range(2):
        found = whole(fits(store, CUSTOM)[7])
        importer(store).take_in(found)
        importer(store).point(found, alive=False)
    versions = [v.key for v in store.versions(KEYS.root)]
    assert len(versions) == len(set(versions)) == 4
    pointer = read_pointer(store, KEYS)
    assert pointer is not None
    assert pointer.seq == 1
    store.close()


def test_a_pointer_of_ours_stays(world: World) -> None:
    store = world.store()
    past_run(store, KEYS, 5)
    leave(world, "old/step_7", custom_step(world.directory / "a"))
    found = whole(fits(store, CUSTOM)[7])
    importer(store).take_in(found)
    placing = importer(store).point(found, alive=False)
    assert (placing.moves, "step 5" in placing.reason) == (False, True)
    pointer = read_pointer(store, KEYS)
    assert pointer is not None
    assert pointer.step == 5
    store.close()


# -- which are whole


@pytest.mark.parametrize("variant", ["A", "B"])
def test_prime_rl_by_its_parts(world: World, variant: str) -> None:
    """Whatever the trainer's own directories are: the backup holds its parts side by side."""
    out = world.directory / "prl"
    write_prime_rl_step(out, 40, variant=variant)
    own = out / "run_default" if variant == "A" else out
    old = world.directory / "copy"
    old.mkdir()
    for part, path in {
        "trainer": out / "checkpoints" / "step_40" / "trainer",
        "orchestrator": own / "checkpoints" / "step_40" / "orchestrator",
        **({"broadcast": own / "broadcasts" / "step_40"} if variant == "A" else {}),
    }.items():
        path.rename(old / part)
    leave(world, "old/step_40", old)
    (old / "trainer" / ".metadata").unlink()
    leave(world, "old/step_41", old)
    store = world.store()
    found = fits(store, maker("prime-rl"))
    parts = {f.part for f in whole(found[40]).files}
    assert parts == {"trainer", "orchestrator", *(["broadcast"] if variant == "A" else [])}
    assert "no .metadata" in str(found[41])
    importer(store).take_in(whole(found[40]))
    store.close()


def test_the_output_tree_as_it_was(local: World) -> None:
    """A tool that mirrored output_dir below each step."""
    out = local.directory / "prl"
    write_prime_rl_step(out, 40, variant="A")
    leave(local, "old/step_40", out)
    found = whole(fits(local.store(), maker("prime-rl"))[40])
    assert {f.part for f in found.files} == {"trainer", "orchestrator", "broadcast"}


def test_a_step_directory_under_another_name(local: World) -> None:
    out = local.directory / "hf"
    write_hf_step(out, 30, shards=2)
    leave(local, "old/step_30", out / "checkpoint-30")
    write_hf_step(out, 60, shards=2)
    (out / "checkpoint-60" / "model-00002-of-00002.safetensors").unlink()
    leave(local, "old/step_60", out / "checkpoint-60")
    leave(local, "old/step_90", out / "checkpoint-30")
    found = fits(local.store(), maker("hf"))
    assert whole(found[30]).layout == "hf"
    assert "model-00002-of-00002.safetensors is missing" in str(found[60])
    assert "contains step 30, not 90" in str(found[90])


def test_damage_shows_in_heads_and_tails_of_large_files(world: World) -> None:
    """Ten megabytes, of which the rule sees four: a file that was cut off is refused all the same."""
    root = custom_step(world.directory / "a", 10_000_000)
    leave(world, "old/step_1", root)
    data = (root / "model.safetensors").read_bytes()
    (root / "model.safetensors").write_bytes(data[:-100])
    leave(world, "old/step_2", root)
    store = world.store()
    found = fits(store, CUSTOM)
    whole(found[1])
    assert "model.safetensors" in str(found[2])
    store.close()


def test_times_that_only_tell_of_the_copying(local: World) -> None:
    """A plain ``cp`` gives files the times of the copying: the rule then sees an overwritten step."""
    out = local.directory / "prl"
    write_prime_rl_step(out, 40, variant="B")
    late = max(p.stat().st_mtime_ns for p in out.rglob("*.distcp")) + 60_000_000_000
    for shard in out.rglob("*.distcp"):
        os.utime(shard, ns=(late, late))
    leave(local, "old/step_40", out)
    store = local.store()
    assert "newer than .metadata" in str(fits(store, maker("prime-rl"))[40])
    (backup,) = find_backups(store, "old", ignore_times=True)
    assert len({i.mtime_ns for i in backup.items}) == 1
    judge(store, backup, maker("prime-rl"))


def test_no_times_at_all(b2: World) -> None:
    leave(b2, "old/step_7", custom_step(b2.directory / "a"), times=False)
    store = b2.store()
    (backup,) = find_backups(store, "old")
    assert len({i.mtime_ns for i in backup.items}) == 1
    judge(store, backup, CUSTOM)
    store.close()


# -- hostile buckets


def test_hostile_names_are_refused_by_step(b2: World) -> None:
    assert b2.server is not None
    root = custom_step(b2.directory / "a", 1000)
    leave(b2, "old/step_1", root)
    model = {"x": root / "model.safetensors"}
    for step, name in enumerate(("../../../etc/passwd", "a\u202eb", "..", "a/./b"), 2):
        leave(b2, f"old/step_{step}", root)
        into_bucket(b2.server, f"old/step_{step}", {name: model["x"]})
    into_bucket(b2.server, "old/step_20", {"model.safetensors": model["x"], "model.safetensors/x": model["x"]})
    into_bucket(b2.server, "old/step_21", {".bzEmpty": model["x"]})
    into_bucket(b2.server, "old/step_022", model)
    into_bucket(b2.server, "old/step_23", {"readme.txt": model["x"]})
    store = b2.store()
    found = fits(store, CUSTOM)
    assert sorted(found) == [1, 2, 3, 4, 5, 20, 23]
    assert [step for step in sorted(found) if isinstance(found[step], Fit)] == [1]
    assert all("unsafe object name" in str(found[step]) for step in (2, 3, 4, 5))
    assert "a file and a directory" in str(found[20])
    assert "model.safetensors" in str(found[23])
    assert not (b2.directory.parent / "etc").exists()
    store.close()


def test_our_own_saves_are_no_backups(world: World) -> None:
    store = world.store()
    store.put_bytes("old/step_3/model.safetensors", b"x")
    assert "podwatch wrote it" in str(fits(store, CUSTOM)[3])
    past_run(store, KEYS, 5)
    assert all(isinstance(f, str) for f in fits(store, CUSTOM, source=KEYS.root).values())
    store.close()


# -- kills


class Dying:
    def __init__(self, store: ObjectStore, left: int) -> None:
        self._store, self.left = store, left

    def __getattr__(self, name: str) -> object:
        inner = getattr(self._store, name)
        if name not in ("put_bytes", "replace", "copy_small", "begin_large", "copy_part", "finish_large"):
            return inner

        def call(*arguments: object) -> object:
            if self.left <= 0:
                raise KeyboardInterrupt
            self.left -= 1
            return inner(*arguments)

        return call


def test_killed_at_every_step(world: World, tmp_path: Path) -> None:
    """No manifest names what is not there, and what was copied is not copied again."""
    store = world.store()
    root = custom_step(world.directory / "a", 12_000_000)
    leave(world, "old/step_7", root)
    found = whole(fits(store, CUSTOM)[7])
    kills = 0
    while kills < 20:
        dying = Dying(store, 1)
        mine = importer(dying, tmp_path / "notes")  # type: ignore[arg-type]
        try:
            mine.take_in(found)
            mine.point(found, alive=False)
        except KeyboardInterrupt:
            kills += 1
            saves, _ = inventory(store, KEYS)
            assert all(verify_save(store, s, deep=True) == () for s in saves)
            assert world.violations() == []
            continue
        break
    assert kills == 7, "a copy, begin, three parts, finish, manifest, pointer: each done once"
    (save,), problem = inventory(store, KEYS)
    assert (save.named, problem, verify_save(store, save, deep=True)) == (True, "", ())
    assert list(store.unfinished("old/")) == []
    assert not list((tmp_path / "notes").iterdir())
    store.close()


def test_an_upload_begun_in_other_parts_is_not_gone_on_with(world: World) -> None:
    store = world.store()
    leave(world, "old/step_7", custom_step(world.directory / "a", 13_000_000))
    found = whole(fits(store, CUSTOM)[7])
    (large,) = [f for f in found.files if f.item.stored.size > PART_SIZE]
    key = KEYS.data(7, found.save_id, f"{large.part}/{large.path}")
    upload = store.begin_large(key, large.item.stored.size)
    store.copy_part(upload, 1, large.item.stored, 0, 6_000_000)
    importer(store).take_in(found)
    (save,), _ = inventory(store, KEYS)
    assert verify_save(store, save, deep=True) == ()
    store.close()


def test_the_source_goes_away_meanwhile(world: World) -> None:
    store = world.store()
    leave(world, "old/step_7", custom_step(world.directory / "a"))
    found = whole(fits(store, CUSTOM)[7])
    stale = [replace(f.item.stored, key="old/step_7/gone", file_id="4_zgone") for f in found.files]
    broken = replace(
        found, files=tuple(replace(f, item=replace(f.item, stored=s)) for f, s in zip(found.files, stale, strict=True))
    )
    with pytest.raises(RemoteError):
        importer(store).take_in(broken)
    assert inventory(store, KEYS)[0] == []
    store.close()


def test_no_byte_of_a_large_file_passes_through_here(b2: World) -> None:
    assert b2.server is not None
    leave(b2, "old/step_7", custom_step(b2.directory / "a", 12_000_000))
    store = b2.store()
    found = whole(fits(store, CUSTOM)[7])
    before = b2.server.calls()
    importer(store).take_in(found)
    after = b2.server.calls()
    assert after["b2_copy_part"] == 3
    assert after.get("b2_upload_part", 0) == before.get("b2_upload_part", 0)
    data = (b2.directory / "a" / "model.safetensors").read_bytes()
    (save,), _ = inventory(store, KEYS)
    assert save.manifest is not None
    (model,) = [f for f in save.manifest.files if f.size > PART_SIZE]
    assert model.parts_sha1[0] == hashlib.sha1(data[:PART_SIZE]).hexdigest()
    assert isinstance(read_pointer(store, KEYS), Pointer | None)
    assert Backup(1).size_bytes == 0
    store.close()
