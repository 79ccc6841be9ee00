"""Restores: everything verified and inspected, nothing trusted, nothing written over, a kill survived."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podwatch.checkpoints.inspection import InspectionOutcome
from podwatch.checkpoints.records import RecordSource
from podwatch.domain.errors import HostError, IntegrityError, RemoteError, SaveGone
from podwatch.recovery import quarantine
from podwatch.store.keys import RunKeys
from podwatch.store.objects.b2 import B2Access
from podwatch.store.objects.errors import StoreOutage, StoreRefused
from podwatch.store.objects.s3 import S3Access
from podwatch.store.restore import inspect_staged as inspection
from podwatch.store.restore.inspect_staged import NotInspected, StagedDamaged
from podwatch.store.restore.restore import Restorer, StoreOfRun
from podwatch.store.restore.staging import StagedPart, StagingArea
from podwatch.store.transfer.job import TransferJob
from podwatch.store.transfer.start import Message, Transfer
from tests.store.restore_world import RestorePod, RestoreWorld, in_directory, swap
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.checkpoints import write_prime_rl_step
from tests.support.s3server import BUCKET as S3_BUCKET
from tests.support.s3server import KEY as S3_KEY
from tests.support.s3server import KEY_ID as S3_KEY_ID
from tests.support.s3server import S3Server
from tests.support.stored_save import PIECE, tree, write_checkpoint

pytestmark = pytest.mark.usefixtures("reader_of_the_file")


@pytest.fixture
def world(tmp_path: Path) -> RestoreWorld:
    return in_directory(tmp_path)


@pytest.fixture
def b2world(tmp_path: Path, b2server: B2Server) -> Iterator[RestoreWorld]:
    access = B2Access(KEY_ID, KEY, b2server.url)
    run = RunKeys("run", f"prefix/{tmp_path.name}")  # the bucket has the saves of other tests, too
    yield RestoreWorld(tmp_path, StoreOfRun(f"b2://{BUCKET}/{run.prefix}", run, lambda: access, 3))
    b2server.admin("clear")


@pytest.fixture
def s3world(tmp_path: Path, s3server: S3Server) -> Iterator[RestoreWorld]:
    access = S3Access(S3_KEY_ID, S3_KEY, endpoint=s3server.url)
    keys = RunKeys("run", f"deep/{tmp_path.name}")
    yield RestoreWorld(tmp_path, StoreOfRun(f"s3://{S3_BUCKET}/{keys.prefix}", keys, lambda: access, 3))
    s3server.admin("clear")


def is_restored(pod: RestorePod, world: RestoreWorld, step: int) -> None:
    """Whole, known as this run's, and nothing of the restore is left."""
    assert tree(pod.step(step)) == tree(world.source(step))
    (found,) = pod.catalogue().sets
    assert (found.step, found.complete) == (step, True)
    own = {r.key for r in pod.records.read() if r.source is RecordSource.RESTORED}
    assert (step, found.save_id) in own, "it is this run's"
    assert pod.left_in_staging() == []


@pytest.mark.parametrize("kind", ["file", "b2", "s3"])
def test_a_fresh_pod_gets_the_same_files(kind: str, request: pytest.FixtureRequest) -> None:
    world: RestoreWorld = request.getfixturevalue({"file": "world", "b2": "b2world", "s3": "s3world"}[kind])
    world.save(5, 10)
    pod = world.pod()
    seen: list[tuple[int, int]] = []
    report = pod.restorer().fetch(progress=lambda done, total: seen.append((done, total)))
    is_restored(pod, world, 10)
    size = world.shelf.put[10].total_bytes
    assert (report.step, report.total_bytes, report.downloaded_bytes, report.refused) == (10, size, size, ())
    assert report.parts == (str(pod.step(10)),)
    assert seen[-1] == (size, size)
    again = pod.restorer().fetch()
    assert (again.step, again.downloaded_bytes, again.moved) == (10, 0, ()), "what is there is not fetched again"


def test_one_step_that_was_asked_for(world: RestoreWorld) -> None:
    world.save(5, 10)
    pod = world.pod()
    assert pod.restorer().fetch(5).step == 5
    is_restored(pod, world, 5)
    with pytest.raises(RemoteError, match="no whole checkpoint of step 7 is in the store"):
        pod.restorer().fetch(7)


def test_into_a_directory_nothing_else_is_touched(world: RestoreWorld) -> None:
    world.save(10)
    pod = world.pod()
    to = world.home / "there"
    report = pod.restorer().fetch(to=to)
    assert tree(to / "checkpoint") == tree(world.source(10))
    assert report.parts == (str(to / "checkpoint"),)
    assert sorted(p.name for p in to.iterdir()) == ["checkpoint"], "staging is gone"
    assert list(pod.output.iterdir()) == []
    assert pod.records.read() == ()
    (to / "checkpoint" / "DONE").write_text("changed")
    pod.restorer().fetch(to=to)
    assert tree(to / "checkpoint") == tree(world.source(10))
    assert (to / "checkpoint.aside" / "DONE").read_text() == "changed", "nothing is written over"


def test_what_is_in_the_way_goes_to_quarantine(world: RestoreWorld) -> None:
    world.save(10)
    pod = world.pod()
    write_checkpoint(pod.step(10), 50)
    before = tree(pod.step(10))
    report = pod.restorer().fetch()
    is_restored(pod, world, 10)
    assert report.moved == (str(pod.step(10)),)
    (entry,) = quarantine.listing(pod.workspace)
    assert tree(entry.paths[0] / "0-step_10") == before


def test_a_file_that_was_changed_in_place_is_seen_by_its_bytes(world: RestoreWorld) -> None:
    world.save(10)
    pod = world.pod()
    pod.restorer().fetch()
    swap(pod.step(10) / "sub" / "optim.bin", os.urandom(1000))
    assert pod.restorer().fetch().moved == (str(pod.step(10)),)
    is_restored(pod, world, 10)


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["model.bin.piece-00002", "sub/optim.bin"])
def test_bytes_that_differ_are_never_placed(world: RestoreWorld, ending: str) -> None:
    world.save(5, 10)
    world.shelf.damage(10, ending)
    pod = world.pod()
    report = pod.restorer().fetch()
    is_restored(pod, world, 5)
    assert len(report.refused) == 1
    assert "step 10" in report.refused[0]
    with pytest.raises(RemoteError, match="does not match its recorded hash"):
        pod.restorer().fetch(10)
    assert not pod.step(10).exists()
    assert pod.left_in_staging() == [], "what is damaged takes no room"


def test_an_object_that_is_missing(world: RestoreWorld) -> None:
    world.save(5, 10)
    world.shelf.remove(10, "piece-00001")
    pod = world.pod()
    report = pod.restorer().fetch()
    is_restored(pod, world, 5)
    assert "1 of its objects are missing" in report.refused[0]


def test_what_was_stored_damaged_is_found_in_staging(world: RestoreWorld) -> None:
    """Every hash is right, and the trainer could not load it."""
    world.save(5)
    write_checkpoint(world.source(10))
    (world.source(10) / "DONE").unlink()
    world.shelf.save(10, {"checkpoint": world.source(10)})
    pod = world.pod()
    seen: list[bool] = []
    report = pod.restorer().fetch(progress=lambda _done, _total: seen.append(pod.step(10).exists()))
    is_restored(pod, world, 5)
    assert not any(seen), "it was in its place at no moment"
    assert "DONE is missing" in report.refused[0]
    with pytest.raises(StagedDamaged, match="step 10 is damaged in the store"):
        pod.restorer().fetch_save((10, world.shelf.put[10].save_id))
    assert not pod.step(10).exists()
    named = pod.restorer().fetch(10)
    assert "DONE is missing" in named.doubt, "who names it gets it, and hears of it"
    assert tree(pod.step(10)) == tree(world.source(10))


def test_an_inspection_without_an_answer_decides_nothing(world: RestoreWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(5, 10)
    pod = world.pod()
    real, count = pod.layout.inspect_staged, 0  # type: ignore[attr-defined]

    def unsure(step: int, parts: object) -> object:
        nonlocal count
        count += 1
        found, judgement = real(step, parts)
        return found, replace(judgement, outcome=InspectionOutcome.UNKNOWN, reason="the child was killed")

    monkeypatch.setattr(inspection, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(pod.layout, "inspect_staged", unsure)
    with pytest.raises(NotInspected, match="the child was killed"):
        pod.restorer().fetch()
    assert (count, pod.step(10).exists(), pod.step(5).exists()) == (inspection.INSPECTIONS, False, False)
    monkeypatch.setattr(pod.layout, "inspect_staged", real)
    assert pod.restorer().fetch().downloaded_bytes == 0, "what was fetched is still in staging"
    is_restored(pod, world, 10)


# -- what changes meanwhile ------------------------------------------------------------------------------------------


def before_each_fetch(monkeypatch: pytest.MonkeyPatch, act: Callable[[TransferJob], object]) -> None:
    real = Transfer.run

    def run(self: Transfer, access: B2Access | S3Access | None, on_message: Message) -> None:
        act(self.job)
        real(self, access, on_message)

    monkeypatch.setattr(Transfer, "run", run)


def test_one_that_is_deleted_meanwhile_is_replaced_by_a_newer_one(
    world: RestoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.save(5, 10)
    fetched: list[TransferJob] = []

    def replaced(job: TransferJob) -> None:
        fetched.append(job)
        if len(fetched) == 1:
            world.save(15)
            world.shelf.remove_save(10)

    before_each_fetch(monkeypatch, replaced)
    pod = world.pod()
    assert pod.restorer().fetch().step == 15
    is_restored(pod, world, 15)


def test_what_is_being_fetched_is_known_to_retention(world: RestoreWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(10)
    restorer, seen = world.pod().restorer(), list[object]()
    before_each_fetch(monkeypatch, lambda _job: seen.append(restorer.fetching))
    restorer.fetch()
    assert (seen, restorer.fetching) == ([(10, world.shelf.put[10].save_id)], None)


def test_exactly_one_save_or_none(world: RestoreWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(5, 10)
    pod, key = world.pod(), (10, world.shelf.put[10].save_id)
    before_each_fetch(monkeypatch, lambda _job: world.shelf.remove_save(10))
    with pytest.raises(SaveGone):
        pod.restorer().fetch_save(key)
    with pytest.raises(SaveGone):
        pod.restorer().fetch_save(key)
    assert list(pod.output.rglob("model.bin")) == []


def test_an_outage_is_waited_out(world: RestoreWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(10)
    pod = world.pod(patience=60.0)
    troubles = [StoreOutage("the store cannot be reached", where="x"), StoreOutage("again", where="x")]

    def fail(_job: TransferJob) -> None:
        if troubles:
            raise troubles.pop(0)

    before_each_fetch(monkeypatch, fail)
    restorer = pod.restorer()
    monkeypatch.setattr(restorer._stopped, "wait", lambda _seconds: False)
    assert restorer.fetch().step == 10
    assert pod.waited == ["the store cannot be reached", "again"]


def test_a_refusal_is_not_waited_for(b2world: RestoreWorld) -> None:
    b2world.save(10)
    pod = b2world.pod(patience=600.0)
    wrong = replace(b2world.store, access=lambda: B2Access(KEY_ID, "wrong", b2world.store.access().endpoint))  # type: ignore[union-attr]
    began = time.monotonic()
    with pytest.raises(StoreRefused) as caught:
        Restorer(wrong, pod.layout, pod.workspace, pod.records).fetch()
    assert (caught.value.kind, pod.waited) == ("key", [])
    assert time.monotonic() - began < 30
    assert "wrong" not in str(caught.value)


def test_a_directory_that_does_not_exist_is_no_empty_store(world: RestoreWorld) -> None:
    (world.home / "store").rmdir()
    pod = world.pod()
    with pytest.raises(StoreOutage, match="does not exist"):
        pod.restorer().saves()
    with pytest.raises(StoreOutage, match="does not exist"):
        pod.restorer().fetch()


# -- killed ----------------------------------------------------------------------------------------------------------


def test_a_fetch_that_was_killed_continues(b2world: RestoreWorld, b2server: B2Server) -> None:
    b2world.shelf.save(10, {"checkpoint": write_checkpoint(b2world.source(10), 12 * PIECE)})
    pod = b2world.pod()
    restorer, ended = pod.restorer(), list[BaseException]()
    b2server.pace(rate=2e5)

    def run() -> None:
        try:
            restorer.fetch()
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    staging, end = pod.workspace.staging, time.monotonic() + 60
    while sum(p.stat().st_blocks * 512 for p in staging.rglob("model.bin")) < 4 * PIECE:
        assert thread.is_alive(), ended or "it was done before it could be killed"
        assert time.monotonic() < end
        time.sleep(0.02)
    restorer.kill()
    thread.join(60)
    assert isinstance(ended[0], HostError)
    assert not pod.step(10).exists()
    b2server.pace()
    report = pod.restorer().fetch()
    is_restored(pod, b2world, 10)
    assert report.downloaded_bytes <= report.total_bytes - 2 * PIECE, "what was there was fetched again"


def test_a_second_restore_in_the_same_place_is_refused(world: RestoreWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(10)
    pod = world.pod()
    monkeypatch.setattr("podwatch.store.restore.staging.LOCK_SECONDS", 0.1)
    problems: list[BaseException] = []

    def again(_job: TransferJob) -> None:
        try:
            pod.restorer().fetch()
        except HostError as error:
            problems.append(error)

    before_each_fetch(monkeypatch, again)
    pod.restorer().fetch()
    assert ["another restore is running here" in str(p) for p in problems] == [True]


def test_what_an_earlier_restore_left_takes_no_room(world: RestoreWorld) -> None:
    world.save(10)
    pod = world.pod()
    left = pod.workspace.staging / "restore-3-old-12345678" / "checkpoint"
    left.mkdir(parents=True)
    (left / "model.bin").write_bytes(b"x" * 1000)
    pod.restorer().fetch()
    is_restored(pod, world, 10)


@pytest.mark.parametrize("where", ["before its record", "after its record", "between two renames"])
def test_killed_while_it_is_put_in_place(where: str, tmp_path: Path) -> None:
    """Two parts in two directories: the next restore completes it, and fetches nothing that is there already."""
    world = in_directory(tmp_path)
    world.shelf.layout = "prime-rl"
    source = RestorePod(tmp_path / "first", world.store, {"layout": "prime-rl"})
    write_prime_rl_step(source.output, 10, "B")
    world.shelf.save(10, {part: source.step(10) / part for part in ("trainer", "orchestrator")})
    pod = world.pod(trainer={"layout": "prime-rl"})
    pid = os.fork()
    if not pid:
        _die(where)
        pod.restorer().fetch()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    report = pod.restorer().fetch()
    assert tree(pod.step(10)) == tree(source.step(10))
    assert (report.downloaded_bytes, report.moved) == (0, ())
    (found,) = pod.catalogue().sets
    assert found.complete, found.reason
    assert (10, found.save_id) in {r.key for r in pod.records.read()}
    assert pod.left_in_staging() == []


@pytest.mark.parametrize("last", ["trainer", "orchestrator"])
def test_the_part_that_was_written_last_is_placed_last(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save's end is written last: what is killed in between looks like a save that was not finished."""
    world = in_directory(tmp_path)
    world.shelf.layout = "prime-rl"
    source = RestorePod(tmp_path / "first", world.store, {"layout": "prime-rl"})
    write_prime_rl_step(source.output, 10, "B")
    for path in source.step(10).rglob("*"):
        os.utime(path, (2e9, 2e9) if last in path.parts else (1e9, 1e9))
    world.shelf.save(10, {part: source.step(10) / part for part in ("trainer", "orchestrator")})
    placed: list[str] = []
    real = StagingArea._place_part

    def place(self: StagingArea, part: StagedPart, step: int, lineage: str) -> None:
        placed.append(part.part)
        real(self, part, step, lineage)

    monkeypatch.setattr(StagingArea, "_place_part", place)
    world.pod(trainer={"layout": "prime-rl"}).restorer().fetch()
    assert (len(placed), placed[-1]) == (2, last)


def _die(where: str) -> None:
    """This process is killed at that moment."""
    from podwatch.checkpoints.records import RecordFiles

    count, put, write = [0], StagingArea._place_part, RecordFiles.write

    def writing(self: RecordFiles, record: object) -> None:
        if where == "before its record":
            os.kill(os.getpid(), 9)
        write(self, record)  # type: ignore[arg-type]
        if where == "after its record":
            os.kill(os.getpid(), 9)

    def putting(self: StagingArea, part: StagedPart, *of: Any) -> None:
        count[0] += 1
        if count[0] == 2:
            os.kill(os.getpid(), 9)
        put(self, part, *of)

    StagingArea._place_part, RecordFiles.write = putting, writing  # type: ignore[method-assign, assignment]


# -- exports ---------------------------------------------------------------------------------------------------------


def test_exported_weights_come_on_request(world: RestoreWorld) -> None:
    world.save(10)
    world.shelf.exports(10, "weights", {"a.safetensors": b"w" * 1000, "sub/config.json": b"{}"})
    pod, to = world.pod(), world.home / "there"
    assert pod.restorer().fetch(to=to).exports.parts == ()
    report = pod.restorer().fetch(to=to, exports=True)
    assert report.exports.parts == (str(to / "weights"),)
    assert (to / "weights" / "a.safetensors").read_bytes() == b"w" * 1000
    assert (to / "weights" / "sub" / "config.json").read_bytes() == b"{}"
    assert report.exports.downloaded == 1002
    assert pod.restorer().fetch(to=to, exports=True).exports.downloaded == 0
    assert sorted(p.name for p in to.iterdir()) == ["checkpoint", "weights"]


@pytest.mark.parametrize("how", ["not complete", "damaged", "of the checkpoint"])
def test_exported_weights_that_are_not_whole_are_left_out(world: RestoreWorld, how: str) -> None:
    world.save(10)
    part = "checkpoint" if how == "of the checkpoint" else "weights"
    world.shelf.exports(10, part, {"extra.bin": b"w" * 1000}, complete=how != "not complete")
    if how == "damaged":
        swap(world.home / "store" / world.shelf.folder(10) / "weights" / "extra.bin", b"v" * 1000)
    pod, to = world.pod(), world.home / "there"
    report = pod.restorer().fetch(to=to, exports=True)
    assert tree(to / "checkpoint") == tree(world.source(10))
    assert (report.exports.parts, len(report.exports.left_out)) == ((), 1)
    assert not (to / "weights").exists()


def test_a_layout_that_is_another_one(world: RestoreWorld) -> None:
    world.shelf.layout = "dcp"
    world.save(10)
    pod = world.pod()
    with pytest.raises(HostError, match="saved with the layout 'dcp', this run has 'custom'"):
        pod.restorer().fetch()
    assert pod.restorer().fetch(to=world.home / "there").step == 10
    with pytest.raises(IntegrityError):
        pod.restorer().fetch_save((10, "another"))
