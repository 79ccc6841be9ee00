"""The controller against real stores (a directory, the tests' B2 and S3 servers); provider commands are processes."""

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from podwatch.controller.loop import Controller, Look, once
from podwatch.controller.providers import ProviderCommand
from podwatch.controller.run_store import RunStore
from podwatch.domain.earlier_attempts import LastEnd, OpenAttempt, RunVerdict, verdict_document
from podwatch.domain.errors import ExitCode, RemoteError
from podwatch.domain.lease import Heartbeat
from podwatch.domain.manifest import Keys
from podwatch.policy.replacement import Action
from podwatch.stores.base import ObjectStore
from podwatch.stores.credentials import Credentials
from podwatch.stores.local import LocalStore
from podwatch.stores.open_store import open_store
from podwatch.stores.s3 import S3Store
from podwatch.stores.s3_credentials import S3Credentials
from tests.support import provider_commands
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.provider_commands import change
from tests.support.s3server import BUCKET as S3_BUCKET
from tests.support.s3server import KEY as S3_KEY
from tests.support.s3server import KEY_ID as S3_KEY_ID
from tests.support.s3server import S3Server

pytestmark = pytest.mark.slow

A_TAG = "s[a-z2-7]{7}"
RULES = {"providers": ["vast"], "max_price_per_hour": 2, "max_spend_per_day": 100, "max_spend_total": 500}
KEYS = Keys("r")


@dataclass
class Clock:
    """Real, but the waits for claims pass at once: ``skipped`` seconds ahead."""

    skipped: float = 0.0

    def wall(self) -> float:
        return time.time()

    def boottime(self) -> float:
        return time.monotonic() + self.skipped

    def sleep(self, seconds: float) -> None:
        self.skipped += seconds


@dataclass
class Place:
    store: ObjectStore
    state: Path

    def controller(self, clock: Clock | None = None, *, act: bool = True) -> Controller:
        argv = (sys.executable, "-I", provider_commands.__file__, str(self.state))
        vast = ProviderCommand("vast", argv, 60.0, {"PATH": os.environ["PATH"]})
        clock = clock or Clock()
        return Controller(RunStore(self.store, KEYS, clock), "r", {"vast": vast}, clock, act=act)

    def machines(self) -> dict[str, Any]:
        found: dict[str, Any] = change(self.state, lambda state: state["machines"])
        return found

    def faults(self, **kinds: object) -> None:
        change(self.state, lambda state: state["faults"].update({verb: [fault] for verb, fault in kinds.items()}))

    def beat(self, **fields: object) -> None:
        """``preempted`` by default: of the store's clock a test cannot wait five minutes."""
        said = Heartbeat(state="preempted", desired="running", host="old", step=40).to_json()
        self.store.put_bytes(KEYS.heartbeat, json.dumps(said | fields).encode())

    def control(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.store.get_bytes(KEYS.control) or b"{}")
        return found

    def journal(self) -> list[dict[str, Any]]:
        keys = sorted(item.key for item in self.store.list(KEYS.controller + "journal/"))
        return [json.loads(self.store.get_bytes(key) or b"") for key in keys]


@pytest.fixture(params=["file", "b2", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "file":
        (tmp_path / "store").mkdir()
        yield made(LocalStore(tmp_path / "store", writer_id="w"), tmp_path)
        return
    if request.param == "s3":
        with S3Server(tmp_path / "s3") as bucket:
            store = S3Store(S3_BUCKET, S3Credentials(S3_KEY_ID, S3_KEY, endpoint=bucket.url), writer_id="w")
            yield made(store, tmp_path)
            store.close()
        return
    with B2Server(tmp_path / "b2") as server:
        key = Credentials(KEY_ID, KEY, server.url)
        store = open_store(f"b2://{BUCKET}", key, writer_id="w")
        yield made(store, tmp_path)
        store.close()


def made(store: ObjectStore, directory: Path) -> Place:
    store.put_bytes(KEYS.controller_rules, json.dumps(RULES).encode())
    found = Place(store, directory / "state.json")
    found.beat()
    return found


def looks(controller: Controller) -> tuple[list[Look], ExitCode]:
    found: list[Look] = []
    code = once(controller, controller.clock.sleep, found.append)  # type: ignore[attr-defined]
    return found, code


def test_a_dead_pod_is_replaced_and_the_new_one_is_named(place: Place) -> None:
    found, code = looks(place.controller())
    assert (code, found[-1].decision.action) == (ExitCode.OK, Action.WAIT)
    [(machine, shown)] = place.machines().items()
    label = shown["label"]
    assert re.fullmatch(f"podwatch:r:1:{A_TAG}", label)
    assert place.control() == {"desired": "running", "holder": label}
    place.beat(state="running", instance={"provider": "vast", "id": machine, "label": label})
    found, _ = looks(place.controller())
    assert "trains (step 40)" in found[-1].decision.reason
    assert place.control() == {"desired": "running"}
    place.beat(state="released", desired="finished", instance={"id": machine, "label": label})
    found, code = looks(place.controller())
    assert (code, found[-1].decision.action) == (ExitCode.OK, Action.WAIT)
    assert "are watched for a while" in found[-1].decision.reason
    assert place.machines() == {}
    assert [entry["action"] for entry in place.journal() if entry["result"]].count("destroy") == 1


def test_a_heartbeat_is_watched_without_a_gap_that_could_hide_an_outage(place: Place) -> None:
    clock = Clock()
    store = RunStore(place.store, KEYS, clock)

    def watched(after: float) -> float:
        clock.sleep(after)
        return store.facts({}).watched

    assert watched(0) == 0
    assert 75 <= watched(75) < 75 + 60
    assert 150 <= watched(75) < 150 + 60
    assert watched(151) == 0, "longer than WATCH_GAP_SECONDS"
    assert watched(75) >= 75
    place.beat(step=41)
    assert watched(0) == 0, "a new heartbeat"


def test_a_stop_that_is_foretold_counts_once_it_is_stored_or_its_pod_is_gone(place: Place) -> None:
    """While the pod lives it stores its last data: the time in which it may do that has not begun."""
    store = RunStore(place.store, KEYS, Clock())
    last = LastEnd(65, "stopped", "why", "unknown", time.time())
    open_ = RunVerdict(last=last, attempt=OpenAttempt("p", last.wall - 60))

    def code(kept: RunVerdict) -> int | None:
        place.store.put_bytes(KEYS.verdict, verdict_document(kept, run_id="r", written_at=""))
        return store.facts({}).end_code

    place.beat(state="running")
    assert code(open_) is None
    assert code(replace(open_, attempt=None)) == 65
    assert code(replace(open_, attempt=OpenAttempt("q", last.wall + 60))) is None, "a later attempt trains"
    for version in list(place.store.versions(KEYS.heartbeat)):
        place.store.delete(version)
    assert code(open_) == 65, "its pod is gone"


def test_a_decision_that_repeats_is_journaled_once_also_by_another_process(place: Place) -> None:
    place.beat(state="running")
    for _ in range(3):
        looks(place.controller())
    assert [entry["action"] for entry in place.journal()] == ["wait"]
    place.beat()
    looks(place.controller())
    assert [entry["action"] for entry in place.journal()].count("create") == 2, "claimed, and created"


def test_a_dry_run_writes_and_rents_nothing(place: Place) -> None:
    before = [item.key for item in place.store.list("")]
    found, code = looks(place.controller(act=False))
    assert (code, found[-1].decision.action) == (ExitCode.OK, Action.CREATE)
    assert [item.key for item in place.store.list("")] == before
    assert place.machines() == {}


@pytest.mark.parametrize("fault", ["garbage", "after", 75])
def test_a_request_of_unknown_outcome_is_never_repeated(place: Place, fault: object) -> None:
    place.faults(create=fault)
    found, _ = looks(place.controller())
    assert "unknown" in " ".join(look.result for look in found)
    looks(place.controller())
    assert len(place.machines()) == (0 if fault == 75 else 1)
    assert [c[0] for c in change(place.state, lambda state: state["calls"])].count("create") == 1


def test_a_second_machine_of_one_request_is_destroyed(place: Place) -> None:
    place.faults(create="twice")
    looks(place.controller())
    assert len(place.machines()) == 1


def test_a_failed_list_creates_nothing(place: Place) -> None:
    place.faults(list="empty")
    found, code = looks(place.controller())
    assert (code, found[-1].decision.action) == (ExitCode.UNAVAILABLE, Action.ALERT)
    assert place.machines() == {}


def test_two_controllers_at_once_create_one_machine(place: Place) -> None:
    controllers = [place.controller() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda one: one.look(), controllers))  # each claims; nobody can know yet who was first
        for one in controllers:
            one.clock.sleep(100.0)  # type: ignore[attr-defined]
        list(pool.map(looks, controllers))
    [machine] = place.machines().values()
    assert re.fullmatch(f"podwatch:r:1:{A_TAG}", machine["label"])


def test_two_runs_of_one_name_in_two_stores_have_their_own_machines(place: Place, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = made(LocalStore(tmp_path / "other", writer_id="w"), tmp_path)
    other.state = place.state
    looks(place.controller())
    looks(other.controller())
    labels = [machine["label"] for machine in place.machines().values()]
    assert len(set(labels)) == 2
    other.beat(desired="finished")
    looks(other.controller())
    assert [machine["label"] for machine in place.machines().values()] == labels[:1]


def test_a_machine_whose_record_is_lost_is_destroyed_at_its_bound_where_the_store_is_certain(place: Place) -> None:
    looks(place.controller())
    for item in list(place.store.list(KEYS.controller + "pods/")):
        place.store.delete(item)
    rules = {**RULES, "boot_seconds": 60, "max_replacements_per_day": 0}
    place.store.put_bytes(KEYS.controller_rules, json.dumps(rules).encode())
    place.beat(state="running")
    found, _ = looks(place.controller())
    if isinstance(place.store, LocalStore):
        assert found[-1].decision.action is Action.ALERT, "another machine can have a directory at the same path"
        return
    assert "has sent no heartbeat yet" in found[-1].decision.reason
    [record] = place.store.list(KEYS.controller + "pods/")
    document = json.loads(place.store.get_bytes(record.key) or b"")
    earlier = [{**one, "since": one["since"] - 3600} for one in document["billed"]]
    place.store.put_bytes(record.key, json.dumps({**document, "billed": earlier}).encode())
    clock = Clock()
    controller = place.controller(clock)
    for _ in range(6):  # the heartbeat is watched
        controller.look()
        clock.sleep(60.0)
    assert place.machines() == {}


class SlowList:
    """A provider whose list is read while another controller requests a machine."""

    def __init__(self, provider: Any, meanwhile: Callable[[], object]) -> None:
        self._provider, self._meanwhile = provider, meanwhile

    def list(self, run_id: str) -> Any:
        self._meanwhile()
        self._meanwhile = lambda: None
        return self._provider.list(run_id)


def test_a_record_that_another_controller_writes_meanwhile_is_not_taken_for_lost(place: Place) -> None:
    slow = place.controller()
    slow.providers = {"vast": cast(Any, SlowList(slow.providers["vast"], lambda: looks(place.controller())))}
    first = slow.look()
    [record] = place.store.list(KEYS.controller + "pods/")
    written = json.loads(place.store.get_bytes(record.key) or b"")
    assert written["max_price"] == RULES["max_price_per_hour"], "the record of the request, not an adopted machine's"
    if not isinstance(place.store, LocalStore):
        assert (first.decision.action, first.again) == (Action.WAIT, True)


class LosesAnswers:
    """The answers to the first writes below a name are lost, after the store has them."""

    def __init__(self, store: ObjectStore, name: str, times: int = 1) -> None:
        self._store, self._name, self._left = store, name, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create(self, key: str, data: bytes) -> Any:
        return self._lose(key, self._store.create(key, data))

    def put_bytes(self, key: str, data: bytes) -> Any:
        return self._lose(key, self._store.put_bytes(key, data))

    def put_small(self, key: str, source: Any, size: int, progress: Any = None) -> Any:
        return self._lose(key, self._store.put_small(key, source, size))

    def _lose(self, key: str, stored: Any) -> Any:
        if self._name in key and self._left > 0:
            self._left -= 1
            raise RemoteError("the answer is lost")
        return stored


@pytest.mark.parametrize("found_after", [0.0, 60.0])
def test_a_claim_whose_answer_is_lost_is_not_taken_for_another_controllers(place: Place, found_after: float) -> None:
    place.store = cast(ObjectStore, LosesAnswers(place.store, "/controller/claims/"))
    controller = place.controller()
    with pytest.raises(RemoteError):
        controller.look()
    controller.clock.sleep(found_after)  # type: ignore[attr-defined]
    looks(controller)
    assert len(place.machines()) == 1


@pytest.mark.parametrize(("lost", "results"), [(1, "created"), (3, "not sent, because its record was not confirmed")])
def test_a_request_is_sent_only_once_its_record_is_confirmed(place: Place, lost: int, results: str) -> None:
    place.store = cast(ObjectStore, LosesAnswers(place.store, "/controller/pods/", lost))
    found, _ = looks(place.controller())
    assert results in " ".join(look.result for look in found)
    assert len(place.machines()) == (1 if lost == 1 else 0)
    assert [look.decision.reason for look in found if "not known whether" in look.decision.reason] == []


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_two_controllers_that_write_one_record_at_once_lose_nothing_where_the_store_can_tell(place: Place) -> None:
    looks(place.controller())
    one, two = (RunStore(place.store, KEYS, Clock()) for _ in range(2))
    [base] = one.records()
    two.records()
    assert two.amend(replace(base, booted_at=2.0), base) is None
    between = InBetween(place.store, lambda: two.amend(replace(base, first_step=7), base))
    RunStore(cast(ObjectStore, between), KEYS, Clock()).amend(replace(base, ended="the cap", ended_at=9.0), base)
    [there] = one.records()
    assert (there.booted_at, there.first_step, there.ended) == (2.0, 7, "the cap")


class InBetween:
    """Another one writes between the read and the write of a record."""

    def __init__(self, store: ObjectStore, meanwhile: Callable[[], object]) -> None:
        self._store, self._meanwhile = store, meanwhile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, key: str, *, limit: int = 0) -> Any:
        found = self._store.read(key, limit=limit)
        self._meanwhile()
        self._meanwhile = lambda: None
        return found


@pytest.mark.parametrize("place", ["file"], indirect=True)
@pytest.mark.parametrize("hours", [0, 3])
def test_a_cap_holds_while_the_store_takes_no_writes(place: Place, hours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full quota: reading works, and each look of a schedule is a new process."""
    looks(place.controller())
    [(machine, shown)] = place.machines().items()
    place.beat(state="running", instance={"provider": "vast", "id": machine, "label": shown["label"]})
    place.store.put_bytes(KEYS.controller_rules, json.dumps({**RULES, "max_spend_total": 2.0}).encode())
    place.controller().look()
    [record] = place.store.list(KEYS.controller + "pods/")
    document = json.loads(place.store.get_bytes(record.key) or b"")
    earlier = [{**one, "since": one["since"] - hours * 3600} for one in document["billed"]]
    place.store.put_bytes(record.key, json.dumps({**document, "billed": earlier}).encode())

    def full(*_: object, **__: object) -> None:
        raise RemoteError("the account's space or quota in the store is used up", transient=False)

    for name in ("put_bytes", "put_small", "create"):
        monkeypatch.setattr(place.store, name, full)
    with contextlib.suppress(RemoteError):
        place.controller().look()
    assert len(place.machines()) == (0 if hours else 1)


@pytest.mark.parametrize("place", ["file"], indirect=True)
@pytest.mark.parametrize("broken", ["controller.json", "heartbeat.json", "latest.json", "verdict.json"])
def test_a_damaged_or_huge_object_does_not_end_the_caps(place: Place, broken: str) -> None:
    """Also in a new process: each look of a schedule is one."""
    looks(place.controller())
    [(machine, shown)] = place.machines().items()
    place.beat(state="running", instance={"provider": "vast", "id": machine, "label": shown["label"]})
    place.store.put_bytes(KEYS.controller_rules, json.dumps({**RULES, "max_spend_total": 0.6}).encode())
    looks(place.controller(act=False))
    place.controller().look()
    [record] = place.store.list(KEYS.controller + "pods/")
    document = json.loads(place.store.get_bytes(record.key) or b"")
    earlier = [{**one, "since": one["since"] - 3600} for one in document["billed"]]
    place.store.put_bytes(record.key, json.dumps({**document, "billed": earlier}).encode())
    place.store.put_bytes(f"{KEYS.root}/{broken}", b'{"max_spend_total": 0.6' + b" " * (2 << 20))
    place.controller().look()
    assert json.loads(place.store.get_bytes(record.key) or b"")["ended"] == "the spend cap is reached"


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_a_record_that_a_listing_leaves_out_is_read_by_its_name(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    looks(place.controller())
    store = RunStore(place.store, KEYS, Clock())
    known = store.records()
    monkeypatch.setattr(place.store, "list", lambda prefix: iter(()))
    assert store.records() == known != ()
    monkeypatch.setattr(place.store, "get_bytes", lambda *_, **__: None)
    assert store.records() == (), "a person has deleted it"


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_a_controller_that_was_frozen_after_it_recorded_a_request_does_not_send_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others count a request without an answer as failed after ten minutes, and send the next one."""
    controller, write = place.controller(), RunStore.write

    def frozen(self: RunStore, record: Any, *, until: float = math.inf) -> None:
        write(self, record, until=until)
        controller.clock.sleep(700.0 if not record.settled else 0.0)  # type: ignore[attr-defined]

    monkeypatch.setattr(RunStore, "write", frozen)
    results = [look.result for look in (controller.look() for _ in range(3)) if look.result]
    assert "not sent: this controller was frozen" in results
    assert place.machines() == {}


def test_without_controller_json_nothing_is_created(place: Place) -> None:
    place.store.put_bytes(KEYS.controller_rules, b'{"providers": ["vast"], "max_prise": 2}')
    found, code = looks(place.controller())
    assert (code, found[-1].decision.action) == (ExitCode.CONFIGURATION, Action.ALERT)
    assert "unknown field max_prise" in found[-1].decision.reason


# -- the command -----------------------------------------------------------------------------------------------------


def podwatch(directory: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    env = {"PATH": os.environ["PATH"], "HOME": str(directory), "PODWATCH_RUNTIME_DIR": str(directory)}
    command = [sys.executable, "-m", "podwatch", "controller", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env=env, cwd=directory, check=False)


def test_the_command_with_a_store_and_with_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    place, url = made(LocalStore(tmp_path / "store", writer_id="w"), tmp_path), f"file://{tmp_path / 'store'}"
    argv = [sys.executable, "-I", provider_commands.__file__, str(place.state)]
    shown = podwatch(tmp_path, url, "r", "--dry-run", "--json", "--provider", f"vast={' '.join(argv)}")
    assert shown.returncode == 0, shown.stderr
    assert (json.loads(shown.stdout)["action"], place.machines()) == ("create", {})
    missing = podwatch(tmp_path, url, "r", "--once")
    assert missing.returncode == 69
    assert "no command is configured for it on this machine" in missing.stdout
    assert podwatch(tmp_path, url, "r").returncode == 64
    assert podwatch(tmp_path, url, "r", "--once", "--provider", "vast").returncode == 78
    config = tmp_path / "podwatch.toml"
    config.write_text(
        f'run_id = "r"\n[trainer]\noutput_dir = "{tmp_path / "out"}"\n[sync]\nstore = "{url}"\n'
        f"[controller.providers.vast]\ncommand = {json.dumps(argv)}\ntimeout = '1m'\n"
    )
    config.chmod(0o600)
    done = podwatch(tmp_path, "-c", str(config), "--once")
    assert done.returncode == 1, done.stderr  # until its caps lie where no pod can write
    assert "CREATE: Pod old has left the run (preempted)" in done.stdout
    assert "Not created:" in done.stdout
    assert place.machines() == {}
