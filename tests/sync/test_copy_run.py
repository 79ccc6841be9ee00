"""A run is copied into another store: every checkpoint whole, the pointer last, and nothing of another training's."""

import hashlib
import io
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.domain.errors import Busy, IntegrityError, RemoteError
from podwatch.domain.lease import Claim, Pod, sign_document
from podwatch.domain.manifest import Keys, Manifest, ManifestFile, Pointer, Proof
from podwatch.domain.stored_checkpoint import StoredSave
from podwatch.policy.store_retention import place_copy
from podwatch.stores.base import ObjectStore
from podwatch.stores.part_reader import StreamSource
from podwatch.sync.inventory import inventory
from podwatch.sync.publish_and_pointer import read_optional, read_pointer
from podwatch.sync.runs.copy_run import CopyPace, RunCopier, RunPlace
from podwatch.sync.verify_stored import examine_save
from podwatch.system.clock import SystemClock
from tests.support.past_runs import past_run, point, save
from tests.support.put_file import put_file
from tests.sync.conftest import World, local_violations

pytestmark = pytest.mark.slow

KEYS = Keys("past", "pre")
THERE = Keys("past")
PART = 5 << 20
"""Bytes: S3 refuses smaller parts."""


def copier(source: ObjectStore, target: ObjectStore, notes: Path | None = None, keys: Keys = THERE) -> RunCopier:
    """With one connection: a KeyboardInterrupt does not end the others, as a kill does."""
    pace = CopyPace(1, 1) if notes is not None else CopyPace(2, 4)
    return RunCopier(RunPlace(source, KEYS), RunPlace(target, keys), SystemClock(), pace=pace, notes=notes)


def with_large(store: ObjectStore, keys: Keys, step: int, size: int = 12_000_000) -> Manifest:
    """A save of podwatch's with one file in parts."""
    manifest = save(store, keys, step)
    data = os.urandom(size)
    key = keys.data(step, manifest.save_id, "checkpoint/large.bin")

    stored = put_file(store, key, io.BytesIO(data), size, part_size=PART)
    hashes = tuple(hashlib.sha1(data[i : i + PART]).hexdigest() for i in range(0, size, PART))
    file = ManifestFile("checkpoint/large.bin", "checkpoint", size, 0, 0o644, key, stored.file_id, hashes)
    files = (*manifest.files, file)
    manifest = replace(manifest, files=files, total_bytes=manifest.total_bytes + size, part_size=PART)
    store.put_bytes(keys.manifest(step, manifest.save_id), manifest.to_bytes())
    return manifest


def with_optional(store: ObjectStore, keys: Keys, step: int) -> Manifest:
    (there,) = [s.content for s in inventory(store, keys)[0] if s.step == step]
    stored = store.put_bytes(keys.data(step, there.save_id, "extra/notes.txt"), b"why")
    hashes = (hashlib.sha1(b"why").hexdigest(),)
    file = ManifestFile("extra/notes.txt", "extra", 3, 0, 0o644, stored.key, stored.file_id, hashes)
    beside = replace(there, files=(file,), total_bytes=3)
    store.put_bytes(keys.optional(step, there.save_id), beside.to_bytes())
    return beside


def sound(store: ObjectStore, keys: Keys = THERE) -> dict[int, StoredSave]:
    """Every checkpoint, read back whole."""
    found, problem = inventory(store, keys)
    assert problem == ""
    for item in found:
        verified = examine_save(store, item, deep=True)
        assert (verified.reasons, verified.proof) == ((), Proof.READ_BACK)
    return {s.step: s for s in found}


@pytest.fixture
def both(local: World, b2: World) -> Iterator[tuple[ObjectStore, ObjectStore]]:
    directory, bucket = local.store(), b2.store()
    yield directory, bucket
    directory.close()
    bucket.close()


S3 = ("b2 to s3", "s3 to local", "local to s3careless", "s3versions to b2")


def slow(*names: str) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(
    params=["local to b2", "b2 to local", *slow("b2 to s3", "s3 to local", "local to s3careless", "s3versions to b2")]
)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[ObjectStore, ObjectStore]]:
    source, target = (request.getfixturevalue(name).store() for name in request.param.split(" to "))
    yield source, target
    source.close()
    target.close()


def test_everything_arrives_whole(pair: tuple[ObjectStore, ObjectStore], local: World) -> None:
    source, target = pair
    past_run(source, KEYS, 10, 20)
    newest = with_large(source, KEYS, 30)
    point(source, KEYS, newest, seq=3)
    beside = with_optional(source, KEYS, 20)
    source.put_bytes(f"{KEYS.artefacts('logs')}pod__train.log", b"loss 0.1")
    plan = copier(source, target).look()
    assert [s.step for s in plan.saves] == [30, 20, 10], "what the pointer names first, then the newest"
    assert plan.placing.moves
    assert read_pointer(target, THERE) is None, "looking writes nothing"
    copied = copier(source, target).carry_out(plan)
    assert (len(copied.saves), copied.left_out, copied.placing.moves) == (3, (), True)
    there = sound(target)
    assert sorted(there) == [10, 20, 30]
    assert there[30].named
    assert there[30].content.proof is not Proof.NONE
    assert [f.parts_sha1 for f in there[30].content.files] == [f.parts_sha1 for f in newest.files]
    assert read_optional(target, THERE, 20, beside.save_id) is not None
    assert target.get_bytes(f"{THERE.artefacts('logs')}pod__train.log") == b"loss 0.1"
    assert all(o.ours for o in target.identify(target.list(f"{THERE.root}/")))
    before, pointer = read_pointer(source, KEYS), read_pointer(target, THERE)
    assert before is not None
    assert pointer is not None
    assert (pointer.order, pointer.step, pointer.lineage) == (before.order, 30, before.lineage)
    assert local_violations(Path(local.store_url.removeprefix("file://")), THERE) == []
    again = copier(source, target).look()
    assert (again.saves, len(again.there), again.placing.moves) == ((), 3, False)
    assert copier(source, target).carry_out(again).placing.reason == "the target's latest.json names step 30 already"


def test_a_later_copy_follows(pair: tuple[ObjectStore, ObjectStore]) -> None:
    source, target = pair
    past_run(source, KEYS, 10)
    copier(source, target).carry_out(copier(source, target).look())
    point(source, KEYS, save(source, KEYS, 20), seq=2)
    plan = copier(source, target).look()
    assert [s.step for s in plan.saves] == [20]
    assert copier(source, target).carry_out(plan).placing.moves
    pointer = read_pointer(target, THERE)
    assert pointer is not None
    assert pointer.step == 20


def test_some_steps_only(local: World) -> None:
    source = target = local.store()
    past_run(source, KEYS, 10, 20)
    copied = copier(source, target).carry_out(copier(source, target).look(frozenset({10})))
    assert [s.step for s in copied.saves] == [10]
    assert not copied.placing.moves
    assert read_pointer(target, THERE) is None
    assert "step 20" in copied.placing.reason


def test_another_run_id(local: World) -> None:
    source = target = local.store()
    past_run(source, KEYS, 10)
    elsewhere = Keys("again", "other/prefix")
    mine = copier(source, target, keys=elsewhere)
    assert mine.carry_out(mine.look()).placing.moves
    assert list(sound(target, elsewhere)) == [10]


def test_a_run_that_a_pod_holds_there_is_refused(local: World) -> None:
    store = local.store()
    past_run(store, KEYS, 10)
    plan = copier(store, store).look()
    claim = Claim(1, "nonce")
    store.put_bytes(THERE.heartbeat, sign_document(Pod("w", "m", "b", "p", "host"), claim, {"state": "running"}))
    with pytest.raises(Busy):
        copier(store, store).look()
    with pytest.raises(Busy):
        copier(store, store).carry_out(plan)
    assert inventory(store, THERE)[0] == [], "nothing was written"


def test_another_trainings_pointer_stays(local: World) -> None:
    store = local.store()
    past_run(store, KEYS, 10, 20)
    other = point(store, THERE, save(store, THERE, 5, lineage="other"))
    copied = copier(store, store).carry_out(copier(store, store).look())
    assert not copied.placing.moves
    assert read_pointer(store, THERE) == other
    assert sorted(sound(store)) == [5, 10, 20], "the checkpoints are there beside it"


def test_what_is_damaged_in_the_source_is_left_out(local: World) -> None:
    """No byte of it is under a manifest in the target, and the others are copied."""
    store = local.store()
    past_run(store, KEYS, 10, 20, 30)
    (broken,) = [o for o in store.list(KEYS.step(20)) if o.key.endswith("/0.bin")]
    path = Path(local.store_url.removeprefix("file://")) / broken.key
    path.write_bytes(bytes(len(path.read_bytes())))
    (garbled,) = [o for o in store.list(KEYS.step(10)) if o.key.endswith("manifest.json")]
    store.put_bytes(garbled.key, b"{}")
    copied = copier(store, store).carry_out(copier(store, store).look())
    assert sorted(step for step, _ in copied.left_out) == [10, 20]
    assert list(sound(store)) == [30]
    assert copied.placing.moves


def test_a_damaged_newest_moves_no_pointer(local: World) -> None:
    store = local.store()
    past_run(store, KEYS, 10, 20)
    (broken,) = [o for o in store.list(KEYS.step(20)) if o.key.endswith("/0.bin")]
    (Path(local.store_url.removeprefix("file://")) / broken.key).unlink()
    copied = copier(store, store).carry_out(copier(store, store).look())
    assert [step for step, _ in copied.left_out] == [20]
    assert list(sound(store)) == [10]
    assert read_pointer(store, THERE) is None


class Dying:
    """A store whose process is killed after so many writes."""

    def __init__(self, store: ObjectStore, left: int) -> None:
        self._store, self.left = store, left

    def __getattr__(self, name: str) -> object:
        inner = getattr(self._store, name)
        if name not in ("put_bytes", "replace", "put_small", "begin_large", "put_part", "finish_large"):
            return inner

        def call(*arguments: object) -> object:
            if self.left <= 0:
                raise KeyboardInterrupt
            self.left -= 1
            return inner(*arguments)

        return call


def test_killed_at_every_step(pair: tuple[ObjectStore, ObjectStore], tmp_path: Path) -> None:
    """What the pointer or a manifest names is always whole, and what was sent is not sent again."""
    source, target = pair
    point(source, KEYS, with_large(source, KEYS, 10))
    kills = 0
    while kills < 20:
        dying = Dying(target, 1)
        mine = copier(source, dying, tmp_path / "notes")  # type: ignore[arg-type]
        try:
            mine.carry_out(mine.look())
        except KeyboardInterrupt:
            kills += 1
            sound(target)
            pointer = read_pointer(target, THERE)
            assert pointer is None or pointer.step == 10
            continue
        break
    assert kills == 8, "two small files, begin, three parts, finish, manifest, pointer: each done once"
    assert sound(target)[10].named
    assert list(target.unfinished("past/")) == []
    assert not list((tmp_path / "notes").iterdir())


def test_an_upload_of_other_bytes_is_not_continued(both: tuple[ObjectStore, ObjectStore], tmp_path: Path) -> None:
    source, target = both
    point(source, KEYS, with_large(source, KEYS, 10))
    mine = copier(source, Dying(target, 4), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        mine.carry_out(mine.look())
    (left,) = target.unfinished("past/")

    other = os.urandom(PART)
    for number in (1, 2):
        target.put_part(left.upload, number, StreamSource(io.BytesIO(other)), 0, PART)
    again = copier(source, target, tmp_path)
    again.carry_out(again.look())
    sound(target)
    assert list(target.unfinished("past/")) == [], "the other one was cancelled"


def test_the_pointer_follows_only_its_own_training() -> None:
    def named(step: int, lineage: str, seq: int, generation: int = 1) -> Pointer:
        return Pointer(generation, seq, "past", lineage, step, "w", "2026-01-31T03:00:00Z")

    source = named(30, "b", 7)
    assert place_copy(None, source, {"a", "b"}).moves
    assert place_copy(named(20, "a", 5), source, {"a", "b"}).moves
    assert not place_copy(None, None, {"a"}).moves
    assert not place_copy(named(20, "c", 5), source, {"a", "b"}).moves
    assert not place_copy(named(30, "b", 7), source, {"a", "b"}).moves
    assert not place_copy(named(10, "b", 1, generation=2), source, {"a", "b"}).moves, "a pod went on there"


def test_a_source_that_goes_away_is_an_error(local: World) -> None:
    store = local.store()
    past_run(store, KEYS, 10)
    plan = copier(store, store).look()

    class Gone:
        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def get_range(self, *_: object, **__: object) -> int:
            raise RemoteError("store cannot be reached", where="x")

    mine = copier(Gone(), store)  # type: ignore[arg-type]
    with pytest.raises(RemoteError, match="reached") as caught:
        mine.carry_out(plan)
    assert not isinstance(caught.value, IntegrityError)
    assert read_pointer(store, THERE) is None


# -- logs and bundles of the target ----------------------------------------------------------------------------------


def artefacts_of(store: ObjectStore, kind: str) -> dict[str, bytes | None]:
    base = THERE.artefacts(kind)
    return {o.key.removeprefix(base): store.get_bytes(o.key) for o in store.list(base)}


def test_a_copy_never_loses_a_log_or_a_bundle_of_the_target(pair: tuple[ObjectStore, ObjectStore]) -> None:
    source, target = pair
    past_run(source, KEYS, 10)
    ours = {"logs": ("pod__train.log", b"the source's"), "incidents": ("20260101T000000Z-1.tar.gz", b"bundle 1")}
    for kind, (name, data) in ours.items():
        source.put_bytes(f"{KEYS.artefacts(kind)}{name}", data)
        target.put_bytes(f"{THERE.artefacts(kind)}{name}", f"the target's own {kind}".encode())
    for _ in range(2):
        copier(source, target).carry_out(copier(source, target).look())
        for kind, (name, data) in ours.items():
            found = artefacts_of(target, kind)
            assert found.pop(name) == f"the target's own {kind}".encode()
            ((other, copied),) = found.items()
            assert (other.partition(".")[0], copied) == (name.partition(".")[0], data)
            assert ".from-" in other


def test_a_file_of_equal_size_and_other_content_is_not_taken_for_the_same(
    pair: tuple[ObjectStore, ObjectStore],
) -> None:
    source, target = pair
    past_run(source, KEYS, 10)
    key = f"{KEYS.artefacts('logs')}pod__train.log"
    target.put_bytes(f"{THERE.artefacts('logs')}pod__train.log", b"loss 0.1")
    for text in (b"loss 0.2", b"loss 0.3", b"loss 0.3"):
        source.put_bytes(key, text)
        copier(source, target).carry_out(copier(source, target).look())
        found = artefacts_of(target, "logs")
        assert found.pop("pod__train.log") == b"loss 0.1"
        assert list(found.values()) == [text]


def test_a_file_that_the_target_has_is_not_sent_again(pair: tuple[ObjectStore, ObjectStore]) -> None:
    source, target = pair
    past_run(source, KEYS, 10)
    source.put_bytes(f"{KEYS.artefacts('logs')}pod__train.log", b"loss 0.1")
    times = []
    for _ in range(2):
        copier(source, target).carry_out(copier(source, target).look())
        (there,) = target.list(THERE.artefacts("logs"))
        times.append((there.file_id, there.uploaded_wall))
    assert times[0] == times[1]


def test_a_log_that_grew_in_the_source_is_copied_again_under_its_name(pair: tuple[ObjectStore, ObjectStore]) -> None:
    source, target = pair
    past_run(source, KEYS, 10)
    key = f"{KEYS.artefacts('logs')}pod__train.log"
    for text in (b"loss 0.3\n", b"loss 0.3\nloss 0.2\n"):
        source.put_bytes(key, text)
        copier(source, target).carry_out(copier(source, target).look())
        assert artefacts_of(target, "logs") == {"pod__train.log": text}
    for text in (b"loss 0.2\nloss 0.1\nloss 0.05\n", b"loss 0.05\n"):  # only its end is kept, and that moved on
        source.put_bytes(key, text)
        copier(source, target).carry_out(copier(source, target).look())
        found = artefacts_of(target, "logs")
        assert found.pop("pod__train.log") == b"loss 0.3\nloss 0.2\n"
        assert list(found.values()) == [text]
