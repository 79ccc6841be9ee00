"""What serves nobody leaves the store; everything else stays, whatever else lies in the bucket."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.errors import RemoteError
from podwatch.domain.run import IntentKind
from podwatch.policy.store_retention import (
    ABANDONED_SECONDS,
    SUPERSEDED_SECONDS,
    abandoned_uploads,
    old_controller_records,
    old_probes,
    orphaned_saves,
    superseded_versions,
)
from podwatch.stores import s3_features
from podwatch.stores.base import StoredObject, Unfinished, Upload
from podwatch.stores.part_reader import StreamSource
from podwatch.sync.inventory import inventory
from podwatch.sync.store_removal import Sweeper
from podwatch.sync.verify_stored import verify_save
from tests.support.s3server import S3Server
from tests.sync.conftest import Run, Shifted, World, until

pytestmark = pytest.mark.slow

DAY = 86400.0
NOW = 1_800_000_000.0


def sweeper(world: World, later: float) -> Sweeper:
    return Sweeper(world.store(), world.keys, world.journal, Shifted(later))


async def published(world: World, run: Run, *steps: int) -> None:
    syncer = await run(world)
    for step in steps:
        world.write_set(step, size=1000)
        world.scan()
        syncer.notify()
        await until(lambda step=step: syncer.status().last_step == step)  # type: ignore[misc]
    await syncer.stop()


async def test_a_whole_store_is_left_alone(world: World, run: Run) -> None:
    await published(world, run, 1, 2)
    assert sweeper(world, 0).look() == ()
    left = sweeper(world, 30 * DAY).look()
    assert {item.what for item in left} <= {"version"}, "older versions of the pointer, in a store that has versions"
    assert all(item.key == world.keys.latest for item in left)
    swept = sweeper(world, 30 * DAY).carry_out()
    assert (len(swept.gone), swept.warning) == (len(left), "")
    assert world.violations() == []
    saves, problem = inventory(world.store(), world.keys)
    assert ([s.step for s in saves], problem) == ([2, 1], "")
    assert [s.named for s in saves] == [True, False]
    assert all(verify_save(world.store(), s, deep=True) == () for s in saves)


async def test_leftovers_go_when_they_are_old(world: World, run: Run) -> None:
    await published(world, run, 1)
    store = world.store()
    data = b"x" * 6_000_000
    upload = store.begin_large(world.keys.data(2, "save", "p/large"), len(data))
    store.put_part(upload, 1, StreamSource(io.BytesIO(data)), 0, 5_000_000)
    store.put_bytes(world.keys.data(3, "gone", "p/a"), b"a")
    store.put_bytes(world.keys.data(3, "gone", "p/b"), b"b")
    foreign = f"{world.keys.root}/../step_9/optimizer.pt".replace("podwatch/../", "")
    store.put_bytes(foreign, b"an earlier backup under the same run id")
    assert sweeper(world, DAY / 2).look() == (), "somebody may be at work on them"
    (left,) = store.unfinished(world.keys.root)
    known = ["upload"] if left.ours else []  # S3 does not show whose it is: only the journal of its pod does
    assert [i.what for i in sweeper(world, 2 * DAY).look([(3, "gone")]) if i.what != "version"] == known
    swept = sweeper(world, 2 * DAY).carry_out()
    assert sorted(i.what for i in swept.gone if i.what != "version") == ["save", *known]
    assert (store.parts_there(upload) is None) == bool(known)
    assert list(store.list(world.keys.step(3))) == []
    assert store.stat(foreign) is not None
    assert world.journal.open_intents(IntentKind.REMOTE_DELETE) == []
    assert world.violations() == []
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("versions", [False, True])
def test_a_store_whose_listings_show_no_mark(s3: World, s3server: S3Server, versions: bool) -> None:
    """Only what was identified as ours is removed; an upload that the journal does not know stays."""
    s3server.traits(versions=versions)
    store = s3.store()
    store.put_bytes(s3.keys.data(3, "gone", "p/a"), b"a")
    store.put_bytes(s3.keys.data(3, "gone", "p/b"), b"b")
    store.put_bytes(s3.keys.data(4, "mixed", "p/a"), b"a")
    foreign = s3.keys.data(4, "mixed", "p/foreign")
    s3server.admin("put", key=foreign, text="precious")
    upload = store.begin_large(s3.keys.data(2, "save", "p/large"), 6_000_000)
    swept = sweeper(s3, 2 * DAY).carry_out()
    assert [i.key for i in swept.gone if i.what != "version"] == [s3.keys.save(3, "gone")]
    assert list(store.list(s3.keys.step(3))) == []
    assert store.stat(foreign) is not None
    assert store.stat(s3.keys.data(4, "mixed", "p/a")) is not None
    assert store.parts_there(upload) is not None
    store.close()


async def test_what_is_not_ours_is_left_alone(local: World, run: Run) -> None:
    await published(local, run, 1)

    root = Path(local.store_url.removeprefix("file://"))
    mine = root / local.keys.data(3, "hand", "p/a")
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"put there by hand")
    assert sweeper(local, 30 * DAY).carry_out().gone == ()
    assert mine.exists()


async def test_an_upload_that_goes_on_is_not_swept(b2: World, run: Run) -> None:
    assert b2.server is not None
    b2.write_set(5, size=45_000_000)
    b2.scan()
    b2.server.fault("b2_upload_part", "slow", seconds=0.2, count=100)
    syncer = await run(b2)
    await until(b2.journal.begun)
    assert [i.what for i in sweeper(b2, 30 * DAY).look([(5, b2.catalogue.sets[0].save_id)])] == []
    b2.server.admin("clear")
    await until(lambda: syncer.status().last_step == 5)


async def test_a_key_that_may_not_delete(b2: World, run: Run) -> None:
    assert b2.server is not None
    b2.server.add_key(
        "nodelete", "secret", bucket=b2.server.bucket, capabilities=["listFiles", "readFiles", "writeFiles"]
    )
    b2.key_id, b2.key = "nodelete", "secret"
    store = b2.store()
    store.put_bytes(b2.keys.data(3, "gone", "p/a"), b"a")
    swept = sweeper(b2, 2 * DAY).carry_out()
    assert swept.gone == ()
    assert "deleteFiles" in swept.warning
    assert store.stat(b2.keys.data(3, "gone", "p/a")) is not None
    assert b2.journal.open_intents(IntentKind.REMOTE_DELETE) == []
    store.close()


def test_damage_in_the_store_is_found(local: World) -> None:

    from tests.support.put_file import put_file
    from tests.sync.test_crash import Fuse, once

    local.write_set(1, size=5000)
    once(local, 1, Fuse(None, lambda: None))
    root = Path(local.store_url.removeprefix("file://"))
    (save,), _ = inventory(local.store(), local.keys)
    assert verify_save(local.store(), save, deep=True) == ()
    assert save.manifest is not None
    victim = root / next(f.key for f in save.manifest.files if f.path.endswith("model.bin"))
    body = bytearray(victim.read_bytes())
    body[4000] ^= 1
    put_file(local.store(), str(victim.relative_to(root)), io.BytesIO(bytes(body)), len(body), part_size=400)
    assert verify_save(local.store(), save) == (), "sizes and marks cannot tell"
    (reason,) = verify_save(local.store(), save, deep=True)
    assert "part 11 does not match" in reason
    victim.unlink()
    (reason,) = verify_save(local.store(), save)
    assert "is not in the store" in reason


# -- the judgement, over random stores

UPLOADS = st.lists(
    st.builds(
        Unfinished,
        st.builds(Upload, st.sampled_from(["a", "b"]), st.uuids().map(str)),
        started_wall=st.floats(NOW - 3 * DAY, NOW + DAY),
        ours=st.sampled_from([True, False, None]),
    ),
    max_size=8,
)
VERSIONS = st.lists(
    st.builds(
        StoredObject,
        key=st.sampled_from(["s/1/manifest.json", "s/1/x", "s/2/x", "s/2/y", "latest"]),
        size=st.integers(0, 9),
        file_id=st.uuids().map(str),
        ours=st.booleans(),
        uploaded_wall=st.floats(NOW - 3 * DAY, NOW),
    ),
    max_size=12,
).map(lambda found: sorted(found, key=lambda v: (v.key, -v.uploaded_wall)))
SAVE_OF = {"s/1/manifest.json": "s/1/", "s/1/x": "s/1/", "s/2/x": "s/2/", "s/2/y": "s/2/"}


@given(unfinished=UPLOADS, live=st.integers(0, 8))
def test_only_old_unowned_uploads_of_ours(unfinished: list[Unfinished], live: int) -> None:
    kept = {u.id for u in unfinished[:live]}
    gone = {x.identifier for x in abandoned_uploads(unfinished, kept, NOW)}
    for upload in unfinished:
        old = NOW - upload.started_wall >= ABANDONED_SECONDS
        assert (upload.id in gone) == (upload.ours is True and old and upload.id not in kept)


@given(versions=VERSIONS, named=st.integers(0, 12))
def test_the_newest_version_and_the_named_stay(versions: list[StoredObject], named: int) -> None:
    kept = {v.file_id for v in versions[:named]}
    gone = {x.identifier for x in superseded_versions(versions, kept, NOW)}
    newest: dict[str, StoredObject] = {}
    for version in versions:
        newest.setdefault(version.key, version)
        if version.file_id in gone:
            assert version.ours
            assert version.file_id not in kept
            assert newest[version.key].file_id != version.file_id
            assert NOW - newest[version.key].uploaded_wall >= 0
    assert not gone & {v.file_id for v in newest.values()}
    assert all(NOW - v.uploaded_wall >= SUPERSEDED_SECONDS for v in versions if v.file_id in gone)


@given(versions=VERSIONS, live=st.sampled_from([(), ("s/2/",)]))
def test_a_save_with_a_manifest_or_a_stranger_in_it_stays(versions: list[StoredObject], live: tuple[str, ...]) -> None:
    for item in orphaned_saves(versions, SAVE_OF, live, NOW):
        inside = [v for v in versions if v.key.startswith(item.key)]
        assert item.key not in live
        assert inside
        assert all(v.ours and NOW - v.uploaded_wall >= ABANDONED_SECONDS for v in inside)
        assert not any(v.key.endswith("manifest.json") for v in inside)


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_in_an_empty_store(count: int) -> None:
    versions = [StoredObject("latest", 1, file_id="1", ours=True, uploaded_wall=0.0)][:count]
    assert superseded_versions(versions, (), NOW) == ()
    assert orphaned_saves(versions, SAVE_OF, (), NOW) == ()


# -- records of the controller, and trials of a store ------------------------------------------------------------------

PROBE = "podwatch-probe-0123456789abcdef"


def test_old_records_and_probes_go_and_what_counts_stays(world: World) -> None:
    store, keys = world.store(), world.keys
    probes = keys.probes.removesuffix("podwatch-probe-")
    claims = [f"{keys.controller}claims/{number}-only" for number in (1, 2, 3)]
    decision = f"{keys.controller}journal/20260101T000000Z-01234567.json"
    others = (f"{keys.controller}record.json", f"{keys.controller}claims/notes.txt", f"{probes}podwatch-probe-notes")
    for key in (*claims, decision, *others, f"{probes}{PROBE}", f"{probes}{PROBE}-parts"):
        store.put_bytes(key, b"{}")
    assert sweeper(world, DAY / 2).look() == ()
    gone = {item.key for item in sweeper(world, 2 * DAY).carry_out().gone}
    assert gone == {claims[0], claims[1], f"{probes}{PROBE}", f"{probes}{PROBE}-parts"}
    assert {item.key for item in sweeper(world, 91 * DAY).carry_out().gone} == {decision}
    assert all(store.stat(key) is not None for key in (claims[2], *others))


def test_uploads_of_an_interrupted_trial_are_cancelled_and_no_others(world: World) -> None:
    """Where a store shows no mark of an unfinished upload, the exact name and the size of its parts prove it."""
    store = world.store()
    first = world.keys.probes.removesuffix("podwatch-probe-")
    data, large = s3_features._DATA, b"x" * 6_000_000
    trial, empty = (store.begin_large(f"{first}{PROBE[:-1]}{end}-parts", len(data)) for end in "ab")
    store.put_part(trial, 1, StreamSource(io.BytesIO(data)), 0, len(data))
    others = [store.begin_large(f"{first}{name}", len(large)) for name in (f"{PROBE}-parts", "podwatch-probe-mine")]
    store.put_part(others[0], 1, StreamSource(io.BytesIO(large)), 0, 5_000_000)
    assert sweeper(world, DAY / 2).look() == ()
    swept = sweeper(world, 2 * DAY).carry_out()
    assert {item.identifier for item in swept.gone} == {trial.id, empty.id}
    assert all(store.parts_there(one) is None for one in (trial, empty))
    assert all(store.parts_there(one) is not None for one in others)


def test_objects_of_an_interrupted_measurement_go(world: World) -> None:
    store, root = world.store(), world.keys.root
    for name in ("0123456789abcdef-0", "0123456789abcdef-4", "notes", "0123456789abcdef"):
        store.put_bytes(f"{root}/check/{name}", b"x")
    assert sweeper(world, DAY / 2).look() == ()
    gone = {item.key for item in sweeper(world, 2 * DAY).carry_out().gone}
    assert gone == {f"{root}/check/0123456789abcdef-{number}" for number in (0, 4)}


def listed(key: str, age: float, *, ours: bool | None = True) -> StoredObject:
    return StoredObject(key, 2, file_id=f"id of {key}", uploaded_wall=NOW - age, ours=ours)


def test_a_claim_stays_for_a_day_after_the_one_that_replaced_it_and_foreign_objects_for_ever() -> None:
    old, new = listed("c/claims/1-a", 9 * DAY), listed("c/claims/2-b", DAY / 2)
    assert old_controller_records([old, new], "c/", NOW) == ()
    assert [i.key for i in old_controller_records([old, listed("c/claims/2-b", 2 * DAY)], "c/", NOW)] == [old.key]
    assert old_controller_records([listed("c/claims/1-a", 9 * DAY, ours=False), new], "c/", NOW + DAY) == ()
    assert old_controller_records([old], "c/", NOW) == (), "the highest"
    assert old_controller_records([listed("d/claims/1-a", 9 * DAY), listed("d/claims/2-a", 9 * DAY)], "c/", NOW) == ()
    assert old_probes([listed(PROBE, 2 * DAY, ours=False), listed(PROBE, DAY / 2)], "", NOW) == ()
    assert old_probes([listed(f"x/{PROBE}", 2 * DAY)], "", NOW) == ()
    assert [i.key for i in old_probes([listed(PROBE, 2 * DAY)], "", NOW)] == [PROBE]


def test_a_key_that_is_limited_to_the_run_still_sweeps_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    store, keys = world.store(), world.keys
    for number in (1, 2):
        store.put_bytes(f"{keys.controller}claims/{number}-only", b"{}")
    swept = sweeper(world, 2 * DAY)
    real = swept._store.versions

    def limited(prefix: str) -> object:
        if not prefix.startswith(f"{keys.root}/"):
            raise RemoteError("the key cannot list this", where=prefix, transient=False)
        return real(prefix)

    monkeypatch.setattr(swept._store, "versions", limited)
    assert [item.key for item in swept.carry_out().gone] == [f"{keys.controller}claims/1-only"]
