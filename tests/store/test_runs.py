"""What a store says of runs: the list, one run as a record, the evidence of a check; for each kind of store."""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.cli.runs_show_and_diff import _spent, run_document
from podwatch.domain.account_document import AccountTotals
from podwatch.domain.earlier_attempts import LastEnd, RunVerdict
from podwatch.domain.errors import HostError, RemoteError
from podwatch.domain.lease import Control
from podwatch.store.documents import RunPointer
from podwatch.store.interfaces import Author, list_bounded
from podwatch.store.inventory import take_inventory
from podwatch.store.keys import RunKeys
from podwatch.store.objects.base import Objects
from podwatch.store.objects.errors import StoreOutage, StoreRefused
from podwatch.store.runs.difference import difference
from podwatch.store.runs.judge import Level, Limits, judge
from podwatch.store.runs.read import list_runs, read_newest, read_run, read_run_to_check, run_ids
from podwatch.store.runs.start import RunStart, start_evidence
from podwatch.store.verdict import read_verdict, write_verdict
from tests.store.test_run_summary import BEAT
from tests.support.memory_objects import MemoryItem, MemoryObjects
from tests.support.stored_runs import directory_of, past_run, publisher_of, put_beat, send_save

LIMITS = Limits()


@pytest.fixture(params=["file", "b2", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "file":
        return directory_of(tmp_path / "store")
    return request.getfixturevalue(request.param)()  # type: ignore[no-any-return]


@pytest.fixture
def team() -> str:
    """A prefix of its own: the servers are shared."""
    return f"team-{uuid.uuid4().hex[:8]}"


def configured(store: Objects, keys: RunKeys, tmp_path: Path, *, lr: str) -> None:
    config = tmp_path / f"{keys.run_id}.d" / "train.toml"
    config.parent.mkdir(exist_ok=True)
    config.write_text(f"lr = {lr}\n")
    config.chmod(0o644)
    text = f'run_id = "{keys.run_id}"\n[trainer]\ncommand = ["rl", "@", "{config}"]\n'
    start = RunStart(keys.run_id, text, str(tmp_path / "podwatch.toml"), str(tmp_path), (str(config),))
    for one in start_evidence(start):
        store.put(keys.evidence(one.kind) + one.name, one.data)
    beat = replace(BEAT, account=replace(BEAT.account or AccountTotals(), since=time.time()))
    store.put(keys.heartbeat, beat.to_bytes())


def test_a_record_a_difference_and_the_list(store: Objects, team: str, tmp_path: Path) -> None:
    a, b = RunKeys("one", team), RunKeys("two", team)
    for keys, lr in ((a, "1e-5"), (b, "3e-5")):
        past_run(store, keys, 10, 20)
        configured(store, keys, tmp_path, lr=lr)
    found = read_run(store, a, time.time())
    assert (found.newest.step, found.listing.steps, found.newest.layout) == (20, (10, 20), "custom")
    assert run_document(found, texts=False)["lineage"] == "line"
    assert (found.said.outcome, found.account.money.so_far, found.texts.command) == (
        "finished", 8.47, ("python", "train.py"),
    )  # fmt: skip
    assert found.started_wall is not None
    assert abs(found.started_wall - time.time()) < 3600
    assert ("goodput", "98 %, 1 failure cost 60 s") in list(_spent(found))
    assert any(one["text"] == "lr = 1e-5\n" for one in run_document(found, texts=True)["files"])
    lines = difference("one", found.texts, "two", read_run(store, b, time.time()).texts)
    assert {"-lr = 1e-5", "+lr = 3e-5"} <= set(lines)
    runs, remark = list_runs(store, team, "one", time.time())
    assert [(r.run_id, r.newest.step, len(r.listing.saves), r.newest.problem) for r in runs] == [
        ("one", 20, 2, ""), ("two", 20, 2, ""),
    ]  # fmt: skip
    assert remark == ""


def test_a_run_that_is_not_there_and_one_without_a_configuration(store: Objects, team: str) -> None:
    with pytest.raises(HostError, match="holds nothing of run"):
        read_run(store, RunKeys("none", team), time.time())
    past_run(store, RunKeys("bare", team), 10)
    found = read_run(store, RunKeys("bare", team), time.time())
    assert "no configuration is stored" in found.texts.problems[0]
    assert (found.said.outcome, found.last) == ("", None)


def test_what_podwatch_did_not_write_is_named_and_not_shown(store: Objects, team: str, tmp_path: Path) -> None:
    keys = RunKeys("one", team)
    past_run(store, keys, 10)
    configured(store, keys, tmp_path, lr="1")
    store.put(keys.heartbeat, b"[1, 2")
    store.put(f"{keys.evidence('config')}bootstrap.json", b'{"kind": "evil"}')
    store.put(keys.verdict, b"{")
    found = read_run(store, keys, time.time())
    assert (found.said.outcome, found.last) == ("", None)
    assert "not usable" in found.texts.problems[0]


def test_other_names_are_no_runs(store: Objects, team: str) -> None:
    past_run(store, RunKeys("mine", team), 10)
    for name in ("plain", "..x/podwatch/latest.json", "a b/podwatch/latest.json", "other/data.bin", "b/podwatch/mine"):
        store.put(f"{team}/{name}", b"x")
    assert run_ids(store, team) == ["mine"]
    runs, _ = list_runs(store, team, "", time.time())
    assert [run.run_id for run in runs] == ["mine"]


def test_the_newest_is_what_the_pointers_say(store: Objects, team: str) -> None:
    keys = RunKeys("r", team)
    past_run(store, keys, 10, 20)
    store.put(keys.latest, b'{"kind": "podwatch-pointer", "step": 99}')
    newest = read_newest(store, keys)
    assert newest.pointer is not None
    assert (newest.pointer.step, newest.problem) == (20, ""), "latest.json is a copy"
    store.delete([keys.save(20, "save20") + "manifest.json"])
    evidence = read_run_to_check(store, keys, time.time())
    assert (evidence.newest.step, judge(evidence, LIMITS).level) == (20, Level.CRITICAL)
    assert "is not in the store" in evidence.newest.problem
    (run,), _ = list_runs(store, team, "", time.time())
    assert run.newest == evidence.newest


def test_a_manifest_of_other_bytes_is_not_the_one_that_was_published(store: Objects, team: str) -> None:
    keys = RunKeys("r", team)
    past_run(store, keys, 10)
    key = keys.save(10, "save10") + "manifest.json"
    store.put(key, store.read(key).replace(b'"custom"', b'"hacked"'))
    assert "another one than the pointer names" in read_run_to_check(store, keys, time.time()).newest.problem


def test_after_a_fresh_start_no_checkpoint_is_the_newest(store: Objects, team: str) -> None:
    keys = RunKeys("r", team)
    past_run(store, keys, 10)
    publisher_of(store, keys, 2).repoint(None, Author("r", "w1"))
    evidence = read_run_to_check(store, keys, time.time())
    assert (evidence.newest.step, evidence.newest.problem) == (None, "")
    (run,), _ = list_runs(store, team, "", time.time())
    assert run.newest.step is None


def test_ages_are_those_of_the_store(store: Objects, team: str) -> None:
    keys = RunKeys("r", team)
    past_run(store, keys, 10)
    put_beat(store, keys, written_wall=1e9)
    evidence = read_run_to_check(store, keys, time.time())
    assert evidence.active.beat is not None
    assert evidence.active.beat.age < 30, "the pod's own clock is years behind"
    assert judge(evidence, LIMITS).level is Level.OK


def test_control_and_the_verdict(store: Objects, team: str) -> None:
    keys = RunKeys("r", team)
    assert read_verdict(store, keys) == RunVerdict()
    ended = RunVerdict(digest="d", last=LastEnd(65, "gave-up", "why", "command", 5.0), failures=3)
    write_verdict(store, keys, ended, time.time())
    assert read_verdict(store, keys) == ended
    store.put(keys.verdict, replace(ended, run_id="another").to_bytes())
    assert read_verdict(store, keys) == RunVerdict(), "a copy of another run's"
    put_beat(store, keys)
    store.put(keys.control, Control(desired="stopped", reason="over budget").to_bytes())
    evidence = read_run_to_check(store, keys, time.time())
    assert (evidence.stopped_by_control, judge(evidence, LIMITS).level) == ("over budget", Level.OK)


# -- keys, refusals, listings without an end -------------------------------------------------------------------------


class Skewed(MemoryObjects):
    skew: float | None = 0.0


class NoListing(Skewed):
    """A key that can read, and not list."""

    def list(self, prefix: str) -> Iterator[MemoryItem]:
        raise StoreRefused("permission", "the key may not do this", where=prefix, fix="")


@pytest.fixture
def memory() -> Skewed:
    store = Skewed(wall=time.time(), hashes=False)
    past_run(store, RunKeys("r"), 10, 20)  # type: ignore[arg-type]
    put_beat(store, RunKeys("r"))
    return store


def test_a_key_that_can_only_read_is_enough_for_a_check(memory: Skewed) -> None:
    limited = NoListing(data=memory.data)
    evidence = read_run_to_check(limited, RunKeys("r"), time.time())
    assert (evidence.newest.step, judge(evidence, LIMITS).level) == (20, Level.OK)
    put_beat(memory, RunKeys("r"), written_wall=time.time() - 400)
    assert judge(read_run_to_check(limited, RunKeys("r"), time.time()), LIMITS).level is Level.CRITICAL


@pytest.mark.parametrize(
    "error", [StoreOutage("away", where="x"), StoreRefused("key", "the store refuses the key", where="x", fix="y")]
)
@pytest.mark.parametrize("operation", ["read", "list"])
def test_an_outage_and_a_refused_key_are_no_evidence(memory: Skewed, operation: str, error: RemoteError) -> None:
    def fail(what: str, _key: str) -> None:
        if what == operation:
            raise error

    memory.before = fail
    with pytest.raises(type(error)):
        read_run_to_check(memory, RunKeys("r"), time.time())


def test_a_listing_without_an_end_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(Skewed):
        def list(self, prefix: str) -> Iterator[MemoryItem]:
            number = 0
            while True:
                yield MemoryItem(f"{prefix}{(number := number + 1):09}", 1, 1.0)

    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr("podwatch.store.interfaces.boottime", clock)
    with pytest.raises(StoreOutage, match="did not end within 40 s"):
        list(list_bounded(Endless(), "x/", 40.0))


def test_a_heartbeat_of_any_size_is_no_absent_one(memory: Skewed) -> None:
    memory.put(RunKeys("r").heartbeat, b" " * (2 << 20))
    evidence = read_run_to_check(memory, RunKeys("r"), time.time())
    assert evidence.active.beat is not None
    assert judge(evidence, LIMITS).level is Level.UNKNOWN


def test_a_forged_pointer_is_passed_over(memory: Skewed) -> None:
    keys = RunKeys("r")
    forged = RunPointer("r", 7, 7, None, "x", 1.0)
    memory.put(keys.pointer(9, 9, "aa"), forged.to_bytes())
    memory.put(keys.pointer(9, 8, "bb"), RunPointer("other", 9, 8, None, "x", 1.0).to_bytes())
    memory.data.pop(keys.latest)
    newest = read_newest(memory, keys)
    assert newest.pointer is not None
    assert newest.pointer.step == 20, "its name says another number, or it is of another run"


def test_a_pointer_of_a_generation_that_no_pod_has_claimed_counts_for_nobody(memory: Skewed) -> None:
    keys = RunKeys("r")
    memory.put(keys.claim(2, "aa"), b"{}")
    forged = RunPointer("r", 7, 1, None, "x", 1.0)
    memory.put(keys.pointer(7, 1, "f0"), forged.to_bytes())
    memory.put(keys.latest, forged.to_bytes())
    newest = read_newest(memory, keys)
    assert (newest.pointer.step if newest.pointer is not None else None, newest.problem) == (20, "")
    (run,), _ = list_runs(memory, "", "", time.time())
    assert (run.newest.step, run.newest.problem) == (20, "")
    memory.put(keys.claim(7, "bb"), b"{}")
    newest = read_newest(memory, keys)
    assert (newest.pointer, newest.problem) == (forged, ""), "a pod has claimed it"
    (run,), _ = list_runs(memory, "", "", time.time())
    assert run.newest.step is None


@pytest.mark.parametrize("first", ["aa", "zz"])
def test_of_two_pointers_with_one_number_the_first_received_counts(memory: Skewed, first: str) -> None:
    keys, second = RunKeys("r"), "mm"
    memory.data.pop(keys.latest)
    for step, nonce in ((30, first), (40, second)):
        memory.wall += 1.0
        pointer = RunPointer("r", 3, 1, step, "x", 1.0, save_id=f"save{step}", manifest_hash="sha256:" + "0" * 64)
        memory.put(keys.pointer(3, 1, nonce), pointer.to_bytes())
    newest = read_newest(memory, keys)
    (run,), _ = list_runs(memory, "", "", time.time())
    seen = take_inventory(memory, keys).pointer
    assert newest.pointer is not None
    assert seen is not None
    assert (newest.pointer.step, run.newest.step, seen.step) == (30, 30, 30)


def test_a_check_of_a_healthy_run_costs_one_billed_listing(memory: Skewed) -> None:
    listed: list[str] = []
    memory.before = lambda what, key: listed.append(key) if what == "list" else None
    read_run_to_check(memory, RunKeys("r"), time.time())
    assert listed == [RunKeys("r").heartbeat]


# -- starts ----------------------------------------------------------------------------------------------------------


def test_a_start_has_no_secret_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    files: dict[str, Callable[[Path], object]] = {
        "train.toml": lambda path: path.write_text("lr = 1\n"),
        "id_rsa": lambda path: path.write_text("x"),
        "private.toml": lambda path: path.write_text("x"),
        "large.bin": lambda path: path.write_bytes(b"x" * (1 << 20) + b"y"),
        "binary.bin": lambda path: path.write_bytes(b"\0"),
    }
    for name, make in files.items():
        make(tmp_path / name)
        (tmp_path / name).chmod(0o600 if name == "private.toml" else 0o644)
    named = tuple(str(tmp_path / name) for name in files)
    secret = {str(tmp_path / ".env"): ("WANDB_API_KEY",)}
    found = start_evidence(RunStart("r", "x = 1\n", "/etc/podwatch.toml", "/", named, secret))
    record = found[-1]
    assert (record.name, record.fixed) == ("bootstrap.json", False)
    data = b"".join(one.data for one in found)
    assert b"WANDB_API_KEY=" in data
    for reason in (b"key file", b"only its owner", b"larger than 1 MiB", b"not text"):
        assert reason in record.data
    assert b'"path":' in record.data
    assert os.fsencode(str(tmp_path / "train.toml")) in record.data


def test_an_unfinished_upload_is_no_checkpoint(store: Objects, team: str) -> None:
    keys = RunKeys("r", team)
    past_run(store, keys, 10)
    send_save(store, keys, 20)
    found = read_run(store, keys, time.time())
    assert (found.newest.step, found.listing.steps) == (10, (10,))
