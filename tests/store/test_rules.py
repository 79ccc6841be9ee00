"""What is stored, published and deleted, on a store in which strangers write, too."""

import contextlib
import json
from dataclasses import replace

import pytest

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.store.evidence import Evidence, EvidenceKeeper
from podwatch.store.interfaces import Permit
from podwatch.store.inventory import DocumentCache, take_inventory
from podwatch.store.objects.base import Objects
from podwatch.store.publish import LeaseLost, LeaseUnsettled, PiecesMissing
from podwatch.store.remove import SaveRemover
from podwatch.store.retention import RetentionRules, plan
from tests.support.memory_objects import AUTHOR, KEYS, AlwaysHolds, MemoryObjects, intent_of, publisher, send

DAY = 86400.0
RULES = RetentionRules(keep_last=1, keep_every=0)


@pytest.fixture
def store() -> MemoryObjects:
    return MemoryObjects()


def stored(store: MemoryObjects, *steps: int) -> None:
    one = publisher(store)
    for step in steps:
        one.publish(*send(store, intent_of(step, f"s{step}")), AUTHOR)
        store.wall += 60


def retain(store: MemoryObjects, rules: RetentionRules = RULES) -> list[tuple[int, str]]:
    store.put(KEYS.heartbeat, b"{}")  # shows the store's time
    inventory = take_inventory(store, KEYS)
    removed = SaveRemover(store, KEYS, AlwaysHolds(), AlwaysHolds()).carry_out(plan(inventory, rules), inventory)
    return [(step, save_id) for step, save_id, _ in removed.saves]


def test_a_lost_state_directory_a_new_pod_and_a_copied_store_see_the_same(store: MemoryObjects) -> None:
    stored(store, 10, 20)
    found = take_inventory(store, KEYS)
    assert [(s.step, s.generation, s.seq, s.total_bytes, s.files, s.problem) for s in found.saves] == [
        (10, 1, 1, 320, 2, ""), (20, 1, 2, 320, 2, ""),
    ]  # fmt: skip
    assert found.newest == found.saves[1]
    assert (found.foreign, found.problems) == (0, ())
    again = found.find_save(20, intent_of(20, "x").files)
    assert again is not None
    assert again.save_id == "s20"
    assert found.find_save(20, intent_of(21, "x").files) is None


def test_each_document_is_read_once(store: MemoryObjects) -> None:
    stored(store, 1, 2, 3)
    cache = DocumentCache()
    take_inventory(store, KEYS, cache)
    store.reads = 0
    take_inventory(store, KEYS, cache)
    assert store.reads == 0


def test_pieces_are_in_order_and_a_small_file_has_its_own_name(store: MemoryObjects) -> None:
    stored(store, 5)
    names = [key.removeprefix(KEYS.save(5, "s5")) for key in store.data if key.startswith(KEYS.save(5, "s5"))]
    pieces = [f"w/model.piece-0000{n}" for n in range(4)]
    assert sorted(names) == ["intent.json", "manifest.json", *pieces, "w/sub/state"]
    assert b"".join(store.data[KEYS.save(5, "s5") + name][0] for name in pieces) == b"weights " * 40


@pytest.mark.parametrize("harm", ["gone", "shrunk", "other bytes", "no intent"])
def test_what_is_not_there_as_it_was_sent_is_not_published(store: MemoryObjects, harm: str) -> None:
    sent = send(store, intent_of(7, "s7"))
    name = KEYS.save(7, "s7") + ("intent.json" if harm == "no intent" else "w/model.piece-00001")
    before = store.data.pop(name)
    if harm in ("shrunk", "other bytes"):
        store.data[name] = (before[0][:-1] if harm == "shrunk" else b"x" * len(before[0]), before[1])
    with pytest.raises(PiecesMissing) as caught:
        publisher(store).publish(*sent, AUTHOR)
    assert caught.value.names == (name.removeprefix(KEYS.save(7, "s7")),)
    assert take_inventory(store, KEYS).newest is None
    assert not [key for key in store.data if key.endswith("manifest.json")]


def test_a_save_that_lost_an_object_is_not_the_newest(store: MemoryObjects) -> None:
    stored(store, 1, 2)
    del store.data[KEYS.save(2, "s2") + "w/sub/state"]
    found = take_inventory(store, KEYS)
    assert found.newest is not None
    assert found.newest.step == 1
    assert "w/sub/state" in found.saves[1].problem


@pytest.mark.parametrize("hook", ["before", "after"])
@pytest.mark.parametrize("number", range(8))
def test_a_request_whose_answer_is_lost_costs_no_lie_and_no_second_save(hook: str, number: int) -> None:
    """Each request of a publication in turn fails, or is carried out and its answer is lost."""
    store, calls = MemoryObjects(), iter(range(1000))
    sent, one = send(store, intent_of(1, "s1")), publisher(store)

    def lose(*_what: str) -> None:
        if next(calls) == number:
            raise RemoteError("no answer")

    setattr(store, hook, lose)
    for _ in range(2):
        with contextlib.suppress(RemoteError):
            one.publish(*sent, AUTHOR)
    found = take_inventory(store, KEYS)
    assert found.newest is not None
    assert (found.newest.key, len(found.saves), found.problems) == ((1, "s1"), 1, ())


@pytest.mark.parametrize("puts", [0, 1])
def test_a_publication_that_was_frozen_leaves_nothing_that_readers_see(store: MemoryObjects, puts: int) -> None:
    """Before its manifest, and between that and the pointer."""
    sent, left = send(store, intent_of(1, "s1")), iter((0.0,) * puts)
    store.boottime = lambda: next(left, 100.0)
    with pytest.raises(LeaseUnsettled):
        publisher(store, AlwaysHolds(until=30.0)).publish(*sent, AUTHOR)
    assert [key for key in store.data if key.startswith(KEYS.pointers) or key == KEYS.latest] == []
    assert len([key for key in store.data if key.endswith("manifest.json")]) == puts


def test_a_deletion_that_was_frozen_goes_on_with_a_new_confirmation_or_not_at_all(store: MemoryObjects) -> None:
    stored(store, 1, 2)
    store.wall += 2 * DAY
    store.put(KEYS.heartbeat, b"{}")
    inventory, holds, lost = take_inventory(store, KEYS), AlwaysHolds(until=30.0), False

    class Lease(AlwaysHolds):
        def confirm(self, _store: Objects) -> Permit:
            if lost:
                raise LeaseLost("another pod")
            return Permit(1, store.boottime() + 30.0)

    def freeze(operation: str, key: str) -> None:
        nonlocal lost
        if operation == "delete" and key.endswith("piece-00001"):
            lost, store.boottime, store.before = True, lambda: 500.0, lambda _operation, _key: None

    store.before = freeze
    with pytest.raises(LeaseLost):
        SaveRemover(store, KEYS, Lease(), holds).carry_out(plan(inventory, RULES), inventory)
    there = [key for key in store.data if key.startswith(KEYS.save(1, "s1"))]
    assert KEYS.save(1, "s1") + "w/model.piece-00001" in there, "nothing was deleted after the other pod came"
    lost = False
    assert SaveRemover(store, KEYS, Lease(), holds).carry_out(plan(inventory, RULES), inventory).saves
    assert [key for key in store.data if key.startswith(KEYS.save(1, "s1"))] == []


def test_after_a_fresh_start_nothing_is_the_newest_until_the_next_save(store: MemoryObjects) -> None:
    stored(store, 10)
    one = publisher(store)
    one.repoint(None, AUTHOR)
    found = take_inventory(store, KEYS)
    assert (found.newest, len(found.saves)) == (None, 1)
    one.repoint(found.saves[0], AUTHOR)
    newest = take_inventory(store, KEYS).newest
    assert newest is not None
    assert newest.step == 10


def test_another_pods_pointer_stops_a_former_holder(store: MemoryObjects) -> None:
    publisher(store, AlwaysHolds(5)).publish(*send(store, intent_of(9, "theirs")), replace(AUTHOR, writer_id="other"))
    for generation in (4, 5):
        with pytest.raises(LeaseLost):
            publisher(store, AlwaysHolds(generation)).publish(*send(store, intent_of(8, "mine")), AUTHOR)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b'{"kind": "podwatch-pointer"}', b" " * (2 << 20)]
)
def test_forged_pointers_hide_nothing_and_block_no_publication(store: MemoryObjects, body: bytes) -> None:
    stored(store, 1)
    forged = KEYS.pointer(999_999_999_999, 999_999_999_999, "evil")
    store.put(forged, body)
    store.put(f"{KEYS.pointers}../../../etc/passwd", body)
    stored(store, 2)
    found = take_inventory(store, KEYS)
    assert found.newest is not None
    assert found.newest.step == 2
    assert forged in found.problems[0]
    store.wall += 3 * DAY
    assert retain(store) == []  # it could name any save: a person decides
    del store.data[forged]
    assert retain(store) == [(1, "s1")]


@pytest.mark.parametrize(
    "change",
    [
        {"files": [{"part": "..", "path": "x", "size": 0, "mtime_ns": 1, "mode": 1, "hashes": []}]},
        {"files": [{"part": "w", "path": "../../x", "size": 0, "mtime_ns": 1, "mode": 1, "hashes": []}]},
        {"files": [{"part": "w", "path": "m", "size": 2**62, "mtime_ns": 1, "mode": 1, "hashes": []}], "piece_size": 1},
        {"symlinks": [{"part": "w", "path": "link", "target": "../../../root/.ssh"}]},
        {"step": 8},
        {"run_id": "another"},
        {"total_bytes": 1},
    ],
)
def test_a_hostile_manifest_is_a_problem_of_its_save_alone(store: MemoryObjects, change: dict[str, object]) -> None:
    stored(store, 1, 2)
    key = KEYS.save(2, "s2") + "manifest.json"
    store.put(key, json.dumps(json.loads(store.data[key][0]) | change).encode())
    outside = dict.fromkeys(("root", "etc/passwd", KEYS.root + "x"), (b"", 0.0))
    store.data |= outside
    found = take_inventory(store, KEYS)
    assert found.newest is not None
    assert found.newest.step == 1
    store.wall += 3 * DAY
    retain(store)
    assert outside.keys() <= store.data.keys()
    assert KEYS.save(1, "s1") + "manifest.json" in store.data


def test_two_names_that_meet_are_refused() -> None:
    intent = intent_of(1, "s")
    file = intent.files[0]
    for path in ("model.piece-00001", "model.piece-00001/x", "sub"):
        with pytest.raises(ValueError, match="name"):
            replace(intent, files=(*intent.files, replace(file, path=path, size=1)))
    with pytest.raises(ValueError, match="objects"):
        replace(intent, files=(replace(file, size=2**40),))


def test_only_what_a_document_lists_is_deleted(store: MemoryObjects) -> None:
    stored(store, 1, 2, 3)
    strangers = [KEYS.save(1, "s1") + "w/note", KEYS.save(1, "s1") + "w/model", KEYS.save(4, "x") + "w/model",
                 KEYS.pointers + "notes.txt", KEYS.root + "step_1/notes", KEYS.root + "mine.txt"]  # fmt: skip
    for key in strangers:
        store.put(key, b"foreign")
    assert retain(store) == []  # replaced less than 6 h ago, and named within a day
    store.wall += 23 * 3600.0
    assert retain(store) == []
    store.wall += 2 * 3600.0
    assert retain(store) == [(1, "s1"), (2, "s2")]
    assert [key for key in store.data if key.startswith((KEYS.save(1, "s1"), KEYS.save(2, "s2")))] == strangers[:2]
    assert set(strangers) <= store.data.keys()
    assert take_inventory(store, KEYS).foreign == len(strangers)


def test_a_deletion_that_dies_anywhere_is_finished_later_and_never_whole(store: MemoryObjects) -> None:
    for deaths in range(1, 8):  # a manifest, five objects, an intent
        store = MemoryObjects()
        stored(store, 1, 2)
        store.wall += 2 * DAY
        left = deaths

        def die(operation: str, key: str) -> None:
            nonlocal left
            left -= operation == "delete"
            if operation == "delete" and left <= 0:
                raise RemoteError("killed")

        store.before = die
        with pytest.raises(RemoteError):
            retain(store)
        store.before = lambda _operation, _key: None
        whole = take_inventory(store, KEYS).stored
        assert whole == ({(1, "s1"), (2, "s2")} if deaths == 1 else {(2, "s2")})
        assert retain(store) == [(1, "s1")]
        assert not [key for key in store.data if key.startswith(KEYS.save(1, "s1"))]


def test_pins_exports_milestones_and_uploads_stay(store: MemoryObjects) -> None:
    stored(store, *range(1, 8))
    store.put(KEYS.save(1, "s1") + "pinned", b"")
    store.put(KEYS.save(2, "s2") + "exports.json", b"not readable")
    send(store, intent_of(8, "s8"))
    store.wall += 23 * 3600.0
    send(store, intent_of(9, "s9"))
    store.wall += 2 * 3600.0
    assert retain(store, RetentionRules(keep_last=2, keep_every=4)) == [(3, "s3"), (5, "s5"), (8, "s8")]


def test_a_pointer_that_was_written_after_the_plan_ends_the_round(store: MemoryObjects) -> None:
    stored(store, 1, 2)
    store.wall += 3 * DAY
    store.put(KEYS.heartbeat, b"{}")
    inventory = take_inventory(store, KEYS)
    wanted = plan(inventory, RULES)
    assert wanted.deleted
    publisher(store).repoint(inventory.saves[0], AUTHOR)
    assert SaveRemover(store, KEYS, AlwaysHolds(), AlwaysHolds()).carry_out(wanted, inventory).saves == ()


def test_old_pointers_go_and_the_last_stay(store: MemoryObjects) -> None:
    stored(store, *range(1, 6))
    store.wall += 2 * DAY
    retain(store, RetentionRules(keep_last=9, keep_pointers=2))
    assert len([key for key in store.data if key.startswith(KEYS.pointers)]) == 2
    newest = take_inventory(store, KEYS).newest
    assert newest is not None
    assert newest.step == 5


def test_evidence_is_bounded_and_sent_once(store: MemoryObjects) -> None:
    keeper = EvidenceKeeper(store, KEYS)
    bundle, log = Evidence("incidents", "../a b.tar.gz", b"1"), Evidence("logs", "pod.log", b"x", fixed=False)
    assert keeper.put([bundle, log]) == 2
    assert keeper.put([bundle, log, replace(log, data=b"y")]) == 1
    assert EvidenceKeeper(store, KEYS).put([bundle]) == 0
    assert KEYS.root + "incidents/_a_b.tar.gz" in store.data
    store.put(KEYS.root + "logs/deep/foreign", b"")
    for number in range(40):
        store.wall += 60
        keeper.put([Evidence("logs", f"n{number}", b"z")])
    keeper.tidy()
    kept = [key for key in store.data if key.startswith(KEYS.root + "logs/")]
    assert len(kept) == 25
    assert KEYS.root + "logs/deep/foreign" in kept


def test_a_document_that_is_too_large_is_refused(store: MemoryObjects) -> None:
    with pytest.raises(IntegrityError):
        KEYS.pointer(10**12, 1, "n")
