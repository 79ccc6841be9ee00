"""Fetching piece by piece: what is there counts only when its hash is right, and no single answer is trusted."""

import os
import time
from pathlib import Path

import pytest
from podwatch.sync.restore.child_job import Fetched, FetchJob
from podwatch.sync.restore.fetch import Fetching

from podwatch.domain.errors import IntegrityError, SaveGone
from podwatch.domain.manifest import Manifest
from podwatch.stores import b2_session, receive_download
from podwatch.system.pinned_directories import PinnedTree
from podwatch.system.rights import Rights
from tests.support.stored_set import put_set
from tests.sync.conftest import World
from tests.sync.test_restore import damage, drop, tree

pytestmark = pytest.mark.slow

PIECE = 5 << 20


def stored(world: World, size: int = 16_000_000, step: int = 10) -> Manifest:
    world.write_set(step, size=size)
    world.scan()
    store = world.store()
    manifest = put_set(store, world.keys, world.catalogue, step, layout="custom", seq=step)
    store.close()
    return manifest


def job(world: World, manifest: Manifest, staging: Path, *, target: Path | None = None, **changes: object) -> FetchJob:
    options: dict[str, object] = {"connections": 4} | changes
    return FetchJob(
        step=manifest.step,
        store=world.store_url,
        writer_id="writer-2",
        part_size=manifest.part_size,
        files=manifest.files,
        symlinks=manifest.symlinks,
        staging={"checkpoint": str(staging)},
        targets={"checkpoint": str(target or staging / "nowhere")},
        pins=PinnedTree((staging.parent, world.output)).pins(),
        **options,  # type: ignore[arg-type]
    )


def fetch(world: World, wanted: FetchJob) -> Fetched:
    store = world.store()
    try:
        return Fetching(wanted, store, lambda _here, _came: None).run()
    finally:
        store.close()


def same(world: World, staging: Path) -> bool:
    return tree(staging / "checkpoint") == tree(world.output / "checkpoints" / "step_10")


def test_all_of_it_and_then_nothing(world: World, tmp_path: Path) -> None:
    manifest = stored(world)
    told: list[tuple[int, int]] = []
    done = Fetching(job(world, manifest, tmp_path / "s"), world.store(), lambda *seen: told.append(seen)).run()
    assert done == Fetched(("checkpoint",), manifest.total_bytes)
    assert told[-1] == (manifest.total_bytes, manifest.total_bytes)
    assert same(world, tmp_path / "s")
    assert fetch(world, job(world, manifest, tmp_path / "s")).downloaded == 0, "what is staged is hashed, not fetched"
    there = world.output / "checkpoints" / "step_10"
    assert fetch(world, job(world, manifest, tmp_path / "t", target=there)) == Fetched((), 0), "it is in place"
    assert not (tmp_path / "t").exists()


def test_one_wrong_byte_is_refused(world: World, tmp_path: Path) -> None:
    manifest = stored(world)
    damage(world, 10, "model.bin", at=PIECE + 3)
    with pytest.raises(IntegrityError, match="does not match its recorded hash") as caught:
        fetch(world, job(world, manifest, tmp_path / "s"))
    assert caught.value.where == "checkpoint/model.bin part 2"


@pytest.mark.parametrize("where", ["staging", "target"])
def test_one_wrong_byte_on_this_disk_is_fetched_again(b2: World, tmp_path: Path, where: str) -> None:
    manifest = stored(b2)
    there = b2.output / "checkpoints" / "step_10"
    before = tree(there)
    fetch(b2, job(b2, manifest, tmp_path / "s"))
    found = (tmp_path / "s" / "checkpoint" if where == "staging" else there) / "model.bin"
    time_of_it = found.stat().st_mtime_ns
    with found.open("r+b") as file:
        file.seek(2 * PIECE + 11)
        file.write(bytes([before["model.bin"][0][2 * PIECE + 11] ^ 1]))
    os.utime(found, ns=(time_of_it, time_of_it))
    target, staging = (there, tmp_path / "t") if where == "target" else (None, tmp_path / "s")
    came = PIECE if where == "staging" else manifest.total_bytes  # nothing is taken from a damaged copy
    assert fetch(b2, job(b2, manifest, staging, target=target)).downloaded == came
    assert tree(staging / "checkpoint") == before


def test_only_the_missing_pieces_wherever_they_are(b2: World, tmp_path: Path) -> None:
    """What a kill leaves: pieces that never came, and one that was half written."""
    assert b2.server is not None
    manifest = stored(b2)
    fetch(b2, job(b2, manifest, tmp_path / "s"))
    model = tmp_path / "s" / "checkpoint" / "model.bin"
    whole = model.read_bytes()
    with model.open("r+b") as file:
        os.truncate(file.fileno(), PIECE + 1_000_000)  # the second is half there, the others are gone
        file.seek(3 * PIECE)
        file.write(whole[3 * PIECE :])
    (tmp_path / "s" / "stray").write_text("not in the manifest")
    before = b2.server.sent()
    done = fetch(b2, job(b2, manifest, tmp_path / "s"))
    assert done.downloaded == b2.server.sent() - before == 2 * PIECE
    assert same(b2, tmp_path / "s")
    assert not (tmp_path / "s" / "stray").exists()


FAULTS = {
    "503 with Retry-After": {"action": "status", "count": 3, "retry_after": "0"},
    "429": {"action": "status", "status": 429, "code": "too_many_requests", "count": 2},
    "reset": {"action": "reset", "count": 2},
    "cut off again and again": {"action": "lost", "after_bytes": 600_000, "count": 12},
    "a proxy's page": {"action": "page", "status": 200},
}


@pytest.mark.parametrize("name", FAULTS)
def test_one_pieces_trouble_is_its_own(b2: World, tmp_path: Path, name: str) -> None:
    assert b2.server is not None
    manifest = stored(b2)
    b2.server.fault("b2_download", **FAULTS[name])  # type: ignore[arg-type]
    done = fetch(b2, job(b2, manifest, tmp_path / "s"))
    assert same(b2, tmp_path / "s")
    assert done.downloaded == manifest.total_bytes, "a broken connection is taken up where it broke"


def test_an_expired_token(b2: World, tmp_path: Path) -> None:
    assert b2.server is not None
    manifest = stored(b2)
    store = b2.store()
    store.stat(b2.keys.latest)
    b2.server.admin("expire")
    Fetching(job(b2, manifest, tmp_path / "s"), store, lambda _here, _came: None).run()
    assert same(b2, tmp_path / "s")


def test_a_stall_and_a_crawl_are_given_up(b2: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert b2.server is not None
    manifest = stored(b2)
    monkeypatch.setattr(b2_session._Http, "TIMEOUT_FOR_DOWNLOAD", 2.0)
    b2.server.fault("b2_download", "stall", seconds=20.0, after_bytes=1_000_000)
    began = time.monotonic()
    fetch(b2, job(b2, manifest, tmp_path / "s"))
    assert time.monotonic() - began < 15
    assert same(b2, tmp_path / "s")
    monkeypatch.setattr(receive_download, "STALLED", 0.3)
    monkeypatch.setattr(receive_download, "CRAWL", 50_000_000)
    b2.server.pace(rate=1e6)
    before = b2.server.calls()["b2_download"]
    fetch(b2, job(b2, manifest, tmp_path / "t"))
    assert b2.server.calls()["b2_download"] - before > 10, "left for another connection, and taken up there"
    assert same(b2, tmp_path / "t")


def test_a_flipped_bit_is_read_again_once(b2: World, tmp_path: Path) -> None:
    assert b2.server is not None
    manifest = stored(b2)
    b2.server.fault("b2_download", "flip")
    assert fetch(b2, job(b2, manifest, tmp_path / "s")).downloaded > manifest.total_bytes
    assert same(b2, tmp_path / "s")
    damage(b2, 10, "model.bin", at=PIECE + 3)
    with pytest.raises(IntegrityError, match="does not match its recorded hash") as caught:
        fetch(b2, job(b2, manifest, tmp_path / "t"))
    assert caught.value.where == "checkpoint/model.bin part 2"
    drop(b2, 10, "model.bin")
    with pytest.raises(SaveGone):
        fetch(b2, job(b2, manifest, tmp_path / "u"))


def test_planted_names_in_the_staging_directory(local: World, tmp_path: Path) -> None:
    manifest = stored(local, size=1000)
    precious = tmp_path / "precious"
    precious.write_text("precious")
    staging = tmp_path / "s" / "checkpoint"
    (staging / "DONE").mkdir(parents=True)
    (staging / "model.bin").hardlink_to(precious)
    os.mkfifo(staging / "empty")
    fetch(local, job(local, manifest, tmp_path / "s"))
    assert same(local, tmp_path / "s")
    assert precious.read_text() == "precious"


@pytest.mark.root
def test_the_trainers_user_owns_it(local: World, tmp_path: Path) -> None:
    manifest = stored(local, size=1000)
    (tmp_path / "home").mkdir()
    os.chown(tmp_path / "home", 65534, 65534)
    staging = tmp_path / "home" / "s"
    fetch(local, job(local, manifest, staging, rights=Rights(65534, 65534)))
    found = [staging, *staging.rglob("*")]
    assert {(p.lstat().st_uid, p.lstat().st_gid) for p in found} == {(65534, 65534)}
