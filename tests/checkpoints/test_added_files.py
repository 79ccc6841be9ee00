"""What people and systems put into a checkpoint directory or beside it: nothing is sent twice, lost or kept waiting."""

import os
import shutil
from pathlib import Path

import pytest

from podwatch.checkpoints import known_checkpoints as catalogues
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.records import CheckpointRecords, RecordFiles
from podwatch.checkpoints.shapes import Site
from podwatch.checkpoints.trainer import all_trainers
from podwatch.checkpoints.trainers import layout_of
from podwatch.domain.checkpoint import Completeness
from tests.checkpoints.test_known_checkpoints import SETTLE, WEAK, Bench
from tests.drivers.checkpoints import hf_layout
from tests.support.checkpoints import torch_zip_bytes, write_hf_step


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


@pytest.mark.parametrize("name", ["eval_results.json", "merged.safetensors", "eval/log.txt"])
@pytest.mark.parametrize("restarted", [False, True])
def test_what_is_added_later_does_not_make_it_another_save(out: Path, name: str, restarted: bool) -> None:
    """47 GB are not sent again, and nothing is thrown away as half a save, for a result written into the directory."""
    bench = Bench(hf_layout(out))

    def start() -> None:
        records = CheckpointRecords(RecordFiles(out.parent / "records"))
        bench.catalogue = Catalogue(hf_layout(out), bench.clock, settle=SETTLE, settle_weak=WEAK, records=records)

    start()
    write_hf_step(out, 10)
    step = out / "checkpoint-10"
    age_all(out, 7200)
    before = bench.settle()[10]
    assert before.complete
    if restarted:
        start()
        bench.settle()
    (step / name).parent.mkdir(exist_ok=True)
    for size in (10, 20, 30):  # being written
        (step / name).write_bytes(b"{" * size)
        after = bench.poll(30.0)[10]
        assert after.complete, after.reason
        assert after.save_id == before.save_id
    assert not bench.catalogue.saving
    assert bench.catalogue.verify(10) == ()
    contents = bench.catalogue.contents(10)
    assert contents.set.save_id == before.save_id
    assert name not in {f.path for f in contents.files}


def test_what_is_changed_later_does(out: Path) -> None:
    bench = Bench(hf_layout(out))
    write_hf_step(out, 10)
    step = out / "checkpoint-10"
    age_all(out, 7200)
    before = bench.settle()[10]
    (step / "eval.txt").write_text("1")
    (step / "scheduler.pt").write_bytes(torch_zip_bytes({"data": b"another"}))
    assert not bench.poll(30.0)[10].complete
    assert before.complete


def age_all(root: Path, seconds: float) -> None:
    for path in root.rglob("*"):
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - int(seconds * 1e9)))


@pytest.mark.parametrize("name", ["events.out.tfevents.1763720000.pod.1.0", ".nfs00000000006bb4e900000012"])
def test_logs_that_grow_inside_a_step_do_not_keep_it_from_being_quiet(out: Path, name: str) -> None:
    bench = Bench(hf_layout(out))
    write_hf_step(out, 10)
    for size in range(1, 5):
        (out / "checkpoint-10" / name).write_bytes(b"x" * size)
        found = bench.poll(30.0)[10]
    assert found.complete, found.reason
    assert name not in {f.path for f in bench.catalogue.contents(10).files}


def test_a_file_server_whose_clock_is_behind_ours(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written a moment ago there looks minutes old here: only what podwatch saw itself counts."""
    monkeypatch.setattr(catalogues, "slow_to_show", lambda _: True)
    write_hf_step(out, 10)
    bench = Bench(hf_layout(out))
    bench.clock.advance(600)
    bench.poll()
    assert not bench.poll(5.0)[10].complete
    assert bench.poll(60.0)[10].complete


def test_what_is_nested_too_deep_to_be_seen_is_told(out: Path) -> None:
    write_hf_step(out, 10)
    deep = out / "checkpoint-10" / "/".join("d" * 40)
    deep.mkdir(parents=True)
    (deep / "optimizer.pt").write_bytes(b"")
    found = Bench(hf_layout(out)).settle()[10]
    assert not found.complete
    assert "nested more than" in found.reason


@pytest.mark.parametrize(
    ("layout", "golden", "name", "twin"),
    [("dcp", "dcp-2-ranks/step-10", "step-10", "step-010"), ("orbax", "orbax/20", "actor_20", "critic_20")],
)
def test_two_directories_of_one_step(layout: str, golden: str, name: str, twin: str, tmp_path: Path) -> None:
    """One would be stored and both be removed: so neither is, until it is told which one counts."""
    for place in (name, twin):
        shutil.copytree(Path(__file__).parent / "golden" / golden, tmp_path / place)
    bench = Bench(layout_of(all_trainers()[layout], Site(tmp_path)))
    (found,) = bench.settle().values()
    assert found.completeness is Completeness.WRITING, "never removed"
    assert "move one of them away" in found.reason
    assert twin in found.reason
    shutil.rmtree(tmp_path / twin)
    (found,) = bench.settle().values()
    assert found.complete, found.reason
