"""A finished run is archived: the newest save stays whole, whatever happens, and nothing foreign is touched."""

import time
from pathlib import Path

import pytest

from podwatch.domain.document import canonical
from podwatch.domain.errors import Busy, HostError, IntegrityError, RemoteError
from podwatch.domain.lease import Heartbeat, pins_of
from podwatch.domain.manifest import Keys
from podwatch.policy.store_retention import Keep
from podwatch.stores.base import ObjectStore, StoredObject
from podwatch.sync.inventory import inventory
from podwatch.sync.runs.archive import Archiver, read_record
from podwatch.sync.runs.read_runs import list_runs
from podwatch.sync.verify_stored import verify_save
from tests.support.past_runs import past_run, point, save
from tests.sync.conftest import Shifted, World

pytestmark = pytest.mark.slow

DAY = 86400.0


def archiver(store: ObjectStore, keys: Keys, days: float = 3.0) -> Archiver:
    return Archiver(store, keys, Shifted(days * DAY))


def steps(store: ObjectStore, keys: Keys) -> list[int]:
    found, problem = inventory(store, keys)
    assert problem == ""
    assert all(verify_save(store, s, deep=True) == () for s in found)
    return sorted(s.step for s in found)


def test_only_the_newest_stays(world: World) -> None:
    store, keys = world.store(), Keys("past")
    past_run(store, keys, 10, 20, 30)
    foreign = "past/step_10/model.bin"
    store.put_bytes(foreign, b"an earlier backup")
    plan = archiver(store, keys).look(Keep.LATEST, keep_every=10)
    assert [(d.save.step, d.stays) for d in plan.decisions] == [(10, False), (20, False), (30, True)]
    assert plan.freed_bytes == sum(d.save.total_bytes for d in plan.decisions[:2]) > 0
    forgotten: list[int] = []
    Archiver(store, keys, Shifted(3 * DAY), forget=lambda step, _: forgotten.append(step)).carry_out(plan)
    assert steps(store, keys) == [30]
    assert forgotten == [10, 20]
    assert not [o.key for o in store.list(keys.step(10))]
    assert store.stat(foreign) is not None
    assert world.violations() == []
    again = archiver(store, keys).look(Keep.LATEST, keep_every=10)
    assert again.nothing
    runs, _ = list_runs(store, "", "past", time.time())
    assert [(r.run_id, r.newest_step, len(r.sets), r.archived_wall is not None) for r in runs] == [
        ("past", 30, 1, True)
    ]
    save(store, keys, 40)
    point(store, keys, save(store, keys, 50), seq=2)
    (run,), _ = list_runs(store, "", "past", time.time())
    assert run.archived_wall is None, "it goes on"
    store.close()


def test_what_was_superseded_today_stays(world: World) -> None:
    store, keys = world.store(), Keys("past")
    past_run(store, keys, 10, 20)
    plan = archiver(store, keys, days=0.5).look(Keep.LATEST, keep_every=10)
    assert plan.nothing
    decision = plan.decisions[0]
    assert (decision.stays, "less than a day" in decision.reason) == (True, True)
    assert decision.until is not None
    assert decision.until == pytest.approx(time.time() + DAY, abs=30)
    store.close()


def test_a_guarded_run_is_refused(world: World) -> None:
    store, keys = world.store(), Keys("past")
    past_run(store, keys, 10, 20)
    plan = archiver(store, keys).look(Keep.LATEST, keep_every=10)
    store.put_bytes(keys.heartbeat, Heartbeat(writer_id="pod", state="running", phase="training").to_bytes())
    with pytest.raises(Busy, match="podwatch is active"):
        archiver(store, keys, days=0).look(Keep.LATEST, keep_every=10)
    with pytest.raises(Busy, match="podwatch is active"):
        archiver(store, keys, days=0).carry_out(plan)
    assert archiver(store, keys).look(Keep.LATEST, keep_every=10).last_word == "training"
    store.put_bytes(f"{keys.claims}2-abc", b"{}")
    with pytest.raises(Busy):
        archiver(store, keys, days=0).look(Keep.LATEST, keep_every=10)
    assert steps(store, keys) == [10, 20]
    store.close()


def test_pins_that_cannot_be_read_are_not_taken_for_none(world: World) -> None:
    """Of the last heartbeat only figures may be wrong: one of them hides no pin."""
    store, keys = world.store(), Keys("past")
    past_run(store, keys, 10, 20, 30)
    beat = Heartbeat(writer_id="pod", state="running", phase="training", pins=pins_of({10: "best"})).to_json()
    store.put_bytes(keys.heartbeat, canonical({**beat, "rate": "fast", "step": -1, "saves": {"known": []}}))
    plan = archiver(store, keys).look(Keep.LATEST, keep_every=10)
    assert [save.step for save in plan.going] == [20]
    assert plan.last_word == "training"
    for wrong in ({"pins": [{"step": "10"}]}, {"schema_version": 2}, {"writer_id": 5}):
        store.put_bytes(keys.heartbeat, canonical({**beat, **wrong}))
        with pytest.raises(IntegrityError, match="heartbeat cannot be read"):
            archiver(store, keys).look(Keep.LATEST, keep_every=10)
    assert steps(store, keys) == [10, 20, 30]
    store.close()


def test_the_pointer_moves_meanwhile(world: World) -> None:
    store, keys = world.store(), Keys("past")
    first, *_ = past_run(store, keys, 10, 20, 30)
    mine = archiver(store, keys)
    plan = mine.look(Keep.LATEST, keep_every=10)
    point(store, keys, first, seq=2)
    with pytest.raises(Busy, match="moved"):
        mine.carry_out(plan)
    assert steps(store, keys) == [10, 20, 30]
    store.close()


def test_no_pointer_or_a_damaged_newest_save(world: World) -> None:
    store, keys = world.store(), Keys("past")
    with pytest.raises(HostError, match=r"no latest\.json"):
        archiver(store, keys).look(Keep.LATEST, keep_every=10)
    newest = past_run(store, keys, 10, 20)[-1]
    gone = store.stat(newest.files[0].key, newest.files[0].file_id)
    assert gone is not None
    store.delete(gone)
    with pytest.raises(IntegrityError, match="damaged"):
        archiver(store, keys).look(Keep.LATEST, keep_every=10)
    store.close()


class Dying:
    """A store whose user is killed at its n-th call that changes something."""

    def __init__(self, store: ObjectStore, left: int) -> None:
        self._store, self.left = store, left

    def __getattr__(self, name: str) -> object:
        inner = getattr(self._store, name)
        if name not in ("delete", "put_bytes", "cancel_large"):
            return inner

        def call(*arguments: object) -> object:
            if self.left <= 0:
                raise KeyboardInterrupt
            self.left -= 1
            return inner(*arguments)

        return call


def test_killed_at_every_step(world: World) -> None:
    """Whatever is listed afterwards is whole, and the next archive finishes it."""
    store = world.store()
    tries = range(9) if world.server is None else (2, 5, 8)
    for left in tries:
        keys = Keys(f"past{left}")
        past_run(store, keys, 10, 20, 30)
        plan = archiver(store, keys).look(Keep.LATEST, keep_every=10)
        try:
            archiver(Dying(store, left), keys).carry_out(plan)  # type: ignore[arg-type]
            break
        except KeyboardInterrupt:
            pass
        assert steps(store, keys)[-1] == 30
        later = archiver(store, keys).look(Keep.LATEST, keep_every=10)
        archiver(store, keys).carry_out(later)
        assert steps(store, keys) == [30]
        assert {o.key for o in store.list(keys.step(30))} | {keys.latest, keys.archive} == {
            o.key for o in store.list(keys.root)
        }
        record = read_record(store, keys)
        assert record is not None
        assert record.done
    assert left == 8, "1 record, 2 x (manifest + 2 files), 1 record"
    assert world.violations() == []
    store.close()


def test_what_is_not_ours_inside_a_save_stays(local: World) -> None:
    store, keys = local.store(), Keys("past")
    past_run(store, keys, 10, 20)
    mine = Path(local.store_url.removeprefix("file://")) / keys.step(10) / "save10line" / "notes.txt"
    mine.write_text("by hand")
    plan = archiver(store, keys).look(Keep.LATEST, keep_every=10)
    archiver(store, keys).carry_out(plan)
    assert mine.exists()
    assert steps(store, keys) == [20]
    assert archiver(store, keys).look(Keep.LATEST, keep_every=10).nothing
    store.close()


def test_a_record_that_others_wrote_is_not_acted_upon(world: World) -> None:
    store, keys = world.store(), Keys("past")
    past_run(store, keys, 10, 20)
    orphan = store.put_bytes(keys.data(15, "abc", "checkpoint/x"), b"being uploaded")
    for text in (
        b"{}",
        b"[" * 100_000,
        b'{"kind":"podwatch-archive","schema_version":1,"run_id":"past","state":"begun","keep":"latest","generation":1,'
        b'"seq":1,"wall":0,"host":"x","removing":[{"step":15,"save_id":"../../other"}]}',
        b'{"kind":"podwatch-archive","schema_version":1,"run_id":"other","state":"begun","keep":"latest","generation":1,'
        b'"seq":1,"wall":0,"host":"x","removing":[{"step":15,"save_id":"abc"}]}',
    ):
        store.put_bytes(keys.archive, text)
        assert archiver(store, keys).look(Keep.LATEST, keep_every=10).leftovers == ()
    assert store.stat(orphan.key, orphan.file_id) is not None
    store.close()


def test_a_key_that_may_not_delete(b2: World) -> None:
    assert b2.server is not None
    store, keys = b2.store(), Keys("past")
    past_run(store, keys, 10, 20)
    b2.server.add_key("nodelete", "s", bucket=b2.server.bucket, capabilities=["listFiles", "readFiles", "writeFiles"])
    b2.key_id, b2.key = "nodelete", "s"
    weak = b2.store()
    assert "cannot delete" in archiver(weak, keys).may_delete()
    assert [s.step for s in archiver(weak, keys).look(Keep.LATEST, keep_every=10).going] == [10]
    assert archiver(store, keys).may_delete() == ""
    with pytest.raises(RemoteError, match="deleteFiles"):
        archiver(weak, keys).carry_out(archiver(weak, keys).look(Keep.LATEST, keep_every=10))
    assert steps(store, keys) == [10, 20]
    store.close()
    weak.close()


def test_old_versions_of_a_removed_save_go_too(b2: World) -> None:
    """Deleting only the newest version would bring the one before it to light."""
    store, keys = b2.store(), Keys("past")
    first = save(store, keys, 10)
    save(store, keys, 10)
    point(store, keys, save(store, keys, 20))
    assert first.save_id == "save10line"
    plan = archiver(store, keys).look(Keep.LATEST, keep_every=10)
    archiver(store, keys).carry_out(plan)
    assert list(store.versions(keys.step(10))) == []
    store.close()


# -- list


def test_runs_are_told_apart(world: World) -> None:
    store = world.store()
    past_run(store, Keys("mine"), 10, 20)
    store.put_bytes(Keys("mine").heartbeat, Heartbeat(writer_id="pod", state="running", phase="training").to_bytes())
    now = time.time()
    runs, remark = list_runs(store, "", "mine", now)
    assert remark == ""
    (mine,) = runs
    assert (mine.newest_step, len(mine.sets), mine.last.left_as, mine.ours) == (20, 2, "training", True)
    assert mine.alive is not None
    assert mine.size_bytes == sum(o.size for o in store.list("mine/"))
    store.put_bytes(Keys("mine").latest, b"not json")
    (mine,), _ = list_runs(store, "", "mine", now + DAY)
    assert (mine.newest_step, "JSON" in mine.problem, mine.alive) == (20, True, None)
    store.close()


def test_one_listing_and_a_few_reads(b2: World) -> None:
    assert b2.server is not None
    store = b2.store()
    for number in range(3):
        past_run(store, Keys(f"run{number}"), 10, 20)
    before = b2.server.calls()
    runs, _ = list_runs(store, "", "run0", time.time())
    after = b2.server.calls()
    assert len(runs) == 3
    assert after["b2_list_file_names"] - before["b2_list_file_names"] == 1
    assert sum(after.values()) - sum(before.values()) == 1 + 3
    store.close()


def test_a_key_for_one_run_only(b2: World) -> None:
    assert b2.server is not None
    store = b2.store()
    past_run(store, Keys("run"), 10)
    past_run(store, Keys("other"), 10)
    b2.server.add_key("one", "s", bucket=b2.server.bucket, prefix="run/")
    b2.key_id, b2.key = "one", "s"
    narrow = b2.store()
    runs, remark = list_runs(narrow, "", "run", time.time())
    assert ([r.run_id for r in runs], "can list only run run" in remark) == (["run"], True)
    with pytest.raises(RemoteError):
        list_runs(narrow, "", "elsewhere", time.time())
    store.close()
    narrow.close()


def test_hostile_names(b2: World) -> None:
    """Other tools can name objects as they like: nothing of it becomes a run, or breaks the list."""
    from tests.support.past_runs import into_bucket

    assert b2.server is not None
    path = b2.directory / "x"
    path.write_bytes(b"x")
    names = ("..\u202e/step_1/x", "a\u2028b/step_1/x", "-rf/step_1/x", "run/step_01/x", "no-slash",
             "run/step_99999999999999999999/x", "run/podwatch/step_5/a/b/c", "run/podwatch/latest.json")  # fmt: skip
    for name in names:
        head, _, tail = name.rpartition("/")
        into_bucket(b2.server, head, {tail: path}) if head else into_bucket(b2.server, "no", {"slash": path})
    store = b2.store()
    runs, _ = list_runs(store, "", "run", time.time())
    assert runs == ()
    past_run(store, Keys("run"), 10)
    runs, _ = list_runs(store, "", "run", time.time())
    assert [(r.run_id, r.newest_step) for r in runs] == [("run", 10)]
    assert isinstance(next(iter(store.list(""))), StoredObject)
    store.close()
