"""A set that was complete and lost or shrank a file is damaged, whatever its layout asks for."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.records import CheckpointRecords, RecordFiles
from podwatch.config.settings import CustomLayoutSettings
from podwatch.domain.checkpoint import CheckpointSet, Completeness
from tests.drivers.checkpoints import custom_layout, file_problem, hf_layout, prime_rl_layout
from tests.support.checkpoints import ManualClock, write_hf_step, write_prime_rl_step

FILES = 7


def write_custom(out: Path, step: int, files: int = FILES, size: int = 100) -> Layout:
    directory = out / f"ckpt_{step}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for number in range(files):
        (directory / f"rank_{number}.dat").write_bytes(bytes([number]) * size)
    return custom_layout(out, CustomLayoutSettings(parts="ckpt_{step}", require=("rank_*.dat",)))


def write_hf(out: Path, step: int) -> Layout:
    write_hf_step(out, step)
    return hf_layout(out)


def write_prime(out: Path, step: int) -> Layout:
    write_prime_rl_step(out, step, ranks=2)
    return prime_rl_layout(out)


MAKERS = [write_custom, write_hf, write_prime]


class Pod:
    """One podwatch after the other over the same files and the same records."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.clock = layout, ManualClock()
        self.files = RecordFiles(layout.output_dir.parent / "records")
        self.restart()

    def restart(self) -> None:
        self.catalogue = Catalogue(
            self.layout, self.clock, settle=5.0, settle_weak=60.0, records=CheckpointRecords(self.files)
        )

    def settle(self) -> CheckpointSet:
        for seconds in (0.0, 400.0, 400.0):
            self.clock.advance(seconds)
            self.catalogue.rescan()
        return self.catalogue.sets[-1]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("make", MAKERS)
def test_any_file_of_a_complete_set_that_is_lost_is_damage(
    out: Path, make: Callable[[Path, int], Layout], restarted: bool
) -> None:
    """Seen: three of seven files deleted from the newest set, and half a checkpoint was published as complete."""
    pod = Pod(make(out, 10))
    assert pod.settle().complete
    required = [Path(p.path) for p in pod.catalogue.sets[-1].parts if p.required]
    for file in sorted(f for root in required for f in root.rglob("*") if f.is_file()):
        content, status = file.read_bytes(), file.stat()
        file.unlink()
        if restarted:
            pod.restart()
        lacking = pod.settle()
        assert not lacking.complete, file
        assert (lacking.completeness, lacking.unclear) == (Completeness.DAMAGED, True), lacking.reason
        assert f"was complete, but now {file.name} is gone" in lacking.reason
        file.write_bytes(content)
        os.utime(file, ns=(status.st_mtime_ns, status.st_mtime_ns))
        assert pod.settle().complete, "put back as it was"


def test_a_file_that_shrank_is_damage(out: Path) -> None:
    pod = Pod(write_custom(out, 10))
    assert pod.settle().complete
    os.truncate(out / "ckpt_10" / "rank_3.dat", 50)
    lacking = pod.settle()
    assert (lacking.completeness, lacking.save_id) == (Completeness.DAMAGED, "")
    assert "rank_3.dat is smaller than it was" in lacking.reason


def test_three_of_seven_files_gone_names_one_and_counts_the_others(out: Path) -> None:
    pod = Pod(write_custom(out, 10))
    pod.settle()
    for number in (1, 2, 5):
        (out / "ckpt_10" / f"rank_{number}.dat").unlink()
    assert pod.settle().reason == "was complete, but now rank_1.dat is gone (and 2 more)"


@pytest.mark.parametrize("restarted", [False, True])
def test_the_same_step_saved_again_with_fewer_and_smaller_files_is_another_save(out: Path, restarted: bool) -> None:
    pod = Pod(write_custom(out, 10))
    first = pod.settle()
    write_custom(out, 10, files=4, size=60)
    if restarted:
        pod.restart()
    again = pod.settle()
    assert again.complete, again.reason
    assert again.save_id != first.save_id


def test_a_file_that_was_added_later_is_no_loss(out: Path) -> None:
    pod = Pod(write_custom(out, 10))
    pod.settle()
    (out / "ckpt_10" / "evaluation.json").write_text("{}")
    assert pod.settle().complete


def test_of_checkpoints_that_are_gone_only_the_newest_records_stay(out: Path) -> None:
    for step in range(1, 41):
        layout = write_custom(out, step, files=1)
    pod = Pod(layout)
    pod.settle()
    assert len(pod.files.read()) == 40
    for step in range(2, 41):
        shutil.rmtree(out / f"ckpt_{step}")
    pod.settle()
    assert {r.step for r in pod.files.read()} == {1, *range(9, 41)}
    assert {r.step for r in pod.files.read() if not r.deleted} == {1}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"kind": "checkpoint-record"}', b"\xff"])
def test_a_record_that_cannot_be_read_is_made_again(out: Path, content: bytes) -> None:
    pod = Pod(write_custom(out, 10))
    found = pod.settle()
    (record,) = pod.files.directory.iterdir()
    record.write_bytes(content)
    pod.restart()
    assert pod.settle() == found
    assert [r.key for r in pod.files.read()] == [(10, found.save_id)]


@pytest.mark.parametrize(
    ("name", "problem"),
    [("extra_state.bin", ""), ("notes.bin", ""), ("pytorch_model.bin", "is empty"), ("optimizer.bin", "is empty"),
     ("pytorch_model-00001-of-00002.bin", "is empty")],
)  # fmt: skip
def test_an_empty_file_of_unknown_kind_is_no_damage(tmp_path: Path, name: str, problem: str) -> None:
    """Seen: thirteen checkpoints in a row judged damaged, because each had an empty .bin of some extension."""
    (tmp_path / name).touch()
    assert file_problem(tmp_path / name) == problem


# -- what is left of a deleted checkpoint ------------------------------------------------------------------------------


def prime(out: Path, variant: str, *steps: int) -> Pod:
    for step in steps:
        write_prime_rl_step(out, step, variant, ranks=2, weights=True)
    return Pod(prime_rl_layout(out))


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("variant", ["A", "B"])
def test_what_is_left_of_a_deleted_checkpoint_is_no_damage(out: Path, variant: str, *, restarted: bool) -> None:
    pod = prime(out, variant, 5, 10)
    assert pod.settle().complete
    shutil.rmtree(out / "checkpoints/step_10")
    if restarted:
        pod.restart()
    left = pod.settle()
    assert (left.step, left.completeness, left.remainder) == (10, Completeness.INCOMPLETE, True)
    assert "deleted" in left.reason
    assert left.save_id == ""
    assert pod.catalogue.sets[0].complete
    write_prime_rl_step(out, 10, variant, ranks=2)
    again = pod.settle()
    assert (again.complete, again.remainder) == (True, False)


@pytest.mark.parametrize("what", ["step_10/trainer/__0_0.distcp", "step_10/trainer"])
def test_a_checkpoint_that_lost_something_while_its_directory_stays_is_damaged(out: Path, what: str) -> None:
    pod = prime(out, "A", 5, 10)
    pod.settle()
    path = out / "checkpoints" / what
    path.unlink() if path.is_file() else shutil.rmtree(path)
    found = pod.settle()
    assert (found.completeness, found.remainder) == (Completeness.DAMAGED, False)


def test_the_other_half_that_is_saved_again_is_a_save_in_progress_and_no_remainder(out: Path) -> None:
    """Training went back, and the orchestrator saves step 10 before the trainer does."""
    pod = prime(out, "A", 5, 10)
    pod.settle()
    shutil.rmtree(out / "checkpoints/step_10")
    pod.settle()
    for file in (out / "run_default").rglob("*"):
        if file.is_file():
            os.utime(file, (1_800_000_000, 1_800_000_000))
    pod.clock.advance(1.0)
    pod.catalogue.rescan()
    found = pod.catalogue.sets[-1]
    assert (found.completeness, found.remainder) == (Completeness.WRITING, False)
    assert "waiting for the trainer" in found.reason


def test_an_unreadable_directory_is_no_deletion(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = prime(out, "A", 5, 10)
    pod.settle()
    shutil.rmtree(out / "checkpoints/step_10")
    real = Path.lstat

    def denied(path: Path) -> os.stat_result:
        if path == out / "checkpoints/step_10":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "lstat", denied)
    assert not pod.settle().remainder
