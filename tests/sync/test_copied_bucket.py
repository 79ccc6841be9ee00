"""A bucket that another tool downloaded into a directory: names and bytes are kept, file ids, marks and the bucket's
prefix are not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.domain.errors import IntegrityError
from podwatch.domain.lease import Heartbeat
from podwatch.domain.manifest import Keys, Pointer
from podwatch.stores.base import ObjectStore
from podwatch.stores.local import LocalStore
from podwatch.sync.inventory import inventory, stock
from podwatch.sync.publish_and_pointer import newest_pointer, read_manifest
from podwatch.sync.runs.read_runs import list_runs, read_evidence, read_run
from podwatch.sync.verify_stored import examine_save
from tests.support.past_runs import past_run
from tests.sync.conftest import World

BEFORE, KEYS = Keys("past", "team/ppo"), Keys("past")


def download(bucket: ObjectStore, prefix: str, target: Path) -> LocalStore:
    for item in bucket.list(prefix):
        path = target / item.key.removeprefix(prefix)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bucket.get_bytes(item.key) or b"")
    return LocalStore(target, writer_id="w")


@pytest.fixture(params=["with its prefix", "without"])
def copy(b2: World, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[LocalStore, Keys]:
    """The copy, and where the run is in it."""
    bucket, whole = b2.store(), request.param == "with its prefix"
    past_run(bucket, BEFORE, 10, 20)
    bucket.put_bytes(BEFORE.heartbeat, Heartbeat(state="running", written_wall=1e9).to_bytes())
    store = download(bucket, "" if whole else BEFORE.outside, tmp_path / "copy")
    bucket.close()
    return store, BEFORE if whole else KEYS


def test_it_is_read_as_the_bucket_was(copy: tuple[LocalStore, Keys]) -> None:
    store, keys = copy
    (run,), _ = list_runs(store, keys.prefix, "", 2e9)
    assert (run.newest_step, len(run.sets), run.problem, run.heartbeat_wall) == (20, 2, "", 1e9)
    evidence = read_evidence(store, keys, lambda: 2e9)
    assert (evidence.pointer_step, evidence.pointer_problem) == (20, "")
    assert read_run(store, keys).newest_step == 20
    assert stock(store, keys).stored_wall is not None
    found, problem = inventory(store, keys)
    assert ({s.step: s.named for s in found}, problem) == ({20: True, 10: False}, "")
    assert [examine_save(store, s).reasons for s in found] == [(), ()]


@pytest.mark.parametrize(
    "change",
    [
        lambda p: replace(p, manifest_key=p.manifest_key.replace("/past/", "/other/")),
        lambda p: replace(p, manifest_key=p.manifest_key.replace("step_20", "step_10")),
        lambda p: replace(p, manifest_key=f"x{p.manifest_key.removeprefix('team/ppo/')}"),
    ],
)
def test_only_the_prefix_can_differ(copy: tuple[LocalStore, Keys], change: Callable[[Pointer], Pointer]) -> None:
    store, keys = copy
    path = store.root / keys.latest
    path.write_bytes(change(Pointer.from_bytes(path.read_bytes())).to_bytes())
    pointer = newest_pointer(store, keys)
    assert pointer is not None
    with pytest.raises(IntegrityError, match="outside its run"):
        read_manifest(store, keys, pointer)


def test_a_manifest_that_the_pointer_does_not_name_is_no_newest(copy: tuple[LocalStore, Keys]) -> None:
    """A directory has one manifest per name: it can be of an earlier copy."""
    store, keys = copy
    (path,) = (store.root / keys.step(20)).glob("*/manifest.json")
    path.write_bytes(path.read_bytes() + b" ")
    newest, _ = inventory(store, keys)[0]
    assert (newest.named, newest.manifest) == (True, None)
    assert "is not the one that the pointer names" in newest.problem


def test_a_run_whose_directory_was_renamed(copy: tuple[LocalStore, Keys]) -> None:
    store, keys = copy
    other = Keys("renamed", keys.prefix)
    (store.root / keys.root).parent.rename((store.root / other.root).parent)
    (run,), _ = list_runs(store, keys.prefix, "", 2e9)
    assert "belongs to run past" in run.problem
    assert "rename its directory to past" in run.problem
