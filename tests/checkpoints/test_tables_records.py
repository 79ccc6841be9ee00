"""What a record answers: same save, damage, deletion, size; and that a lost one does no harm."""

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from podwatch.checkpoints.records import (
    CheckpointRecord,
    RecordedFile,
    RecordFiles,
    RecordSource,
    is_same_save,
    lost_files,
    needs_inspection,
    next_save_bytes,
    was_deleted,
)

FILES = (RecordedFile("trainer", "a/b.pt", 10, 1000, 1), RecordedFile("orchestrator", "p.pt", 5, 2000, 2))


def record(
    step: int = 5, files: tuple[RecordedFile, ...] = FILES, wall: float = 1.0, **changes: object
) -> CheckpointRecord:
    made = CheckpointRecord(
        step, f"save{step}", "start-1", RecordSource.SAVED, "boot-1", "hf", files, sum(f.size for f in files), wall
    )
    return replace(made, **changes)  # type: ignore[arg-type]


file_names = st.from_regex(r"[a-z]{1,3}_[0-9]{1,3}\.pt", fullmatch=True)
listings = st.dictionaries(
    file_names, st.tuples(st.integers(1, 1 << 50), st.integers(0, 1 << 60)), min_size=1, max_size=6
)


def listed(found: dict[str, tuple[int, int]]) -> tuple[RecordedFile, ...]:
    return tuple(RecordedFile("checkpoint", name, size, mtime) for name, (size, mtime) in sorted(found.items()))


@given(listings, listings, st.data())
def test_a_change_of_any_recorded_file_is_another_save_and_an_addition_is_not(
    found: dict[str, tuple[int, int]], added: dict[str, tuple[int, int]], data: st.DataObject
) -> None:
    known = record(files=listed(found))
    assert is_same_save(known, listed({**added, **found}))
    assert lost_files(known, listed({**added, **found})) == ()
    name = data.draw(st.sampled_from(sorted(found)))
    size, mtime = found[name]
    assert not is_same_save(known, listed({**found, name: (size, mtime + 1)}))
    assert not is_same_save(known, listed({**found, name: (size + 1, mtime)}))
    assert lost_files(known, listed({**found, name: (size - 1, mtime)})) == (f"checkpoint/{name}",)
    assert lost_files(known, listed({n: f for n, f in found.items() if n != name})) == (f"checkpoint/{name}",)


@given(listings)
def test_a_record_is_read_as_it_was_written(found: dict[str, tuple[int, int]]) -> None:
    known = record(files=listed(found))
    assert CheckpointRecord.from_bytes(known.to_bytes()) == known


def test_identity_leaves_out_what_a_resume_writes_again() -> None:
    again = (FILES[0], replace(FILES[1], mtime_ns=9999))
    assert not is_same_save(record(), again)
    assert is_same_save(record(), again, ("trainer",))
    assert not is_same_save(record(), (FILES[1],), ("trainer",))


def test_what_a_deletion_leaves_is_no_damage() -> None:
    assert was_deleted(record(), (FILES[1],), "trainer")
    assert not was_deleted(record(), (replace(FILES[0], size=1), FILES[1]), "trainer")


def test_files_are_inspected_once_in_each_boot() -> None:
    assert needs_inspection(None, FILES, "boot-1")
    assert not needs_inspection(record(), FILES, "boot-1")
    assert needs_inspection(record(), FILES, "boot-2")
    assert needs_inspection(record(), FILES[:1], "boot-1")


def test_the_next_save_can_be_as_large_as_the_largest_of_the_last() -> None:
    saves = [record(n, wall=float(n + 1), bytes=100 - n) for n in range(20)]
    assert next_save_bytes(saves, "hf") == 92
    assert next_save_bytes(saves, "verl") is None


def test_the_copy_brings_back_what_is_lost(tmp_path: Path) -> None:
    kept = RecordFiles(tmp_path / "state", tmp_path / "beside")
    kept.write(record(5))
    kept.write(record(6, wall=2.0))
    (tmp_path / "state" / record(5).name).unlink()
    (tmp_path / "state" / record(6).name).write_bytes(b"{")
    assert [r.step for r in kept.read()] == [5, 6]
    kept.remove(record(5))
    assert [r.step for r in kept.read()] == [6]


def test_what_cannot_be_read_or_has_another_name_is_no_record(tmp_path: Path) -> None:
    kept = RecordFiles(tmp_path)
    kept.write(record(5))
    (tmp_path / "step_6.save6.json").write_bytes(record(5).to_bytes())
    (tmp_path / "step_7.save7.json").write_bytes(b"\x00")
    (tmp_path / "step_8.save8.json").mkdir()
    assert [r.step for r in kept.read()] == [5]
    assert RecordFiles(tmp_path / "nowhere").read() == ()


def test_records_of_checkpoints_that_are_gone_stay_only_for_the_comparison(tmp_path: Path) -> None:
    kept = RecordFiles(tmp_path)
    for step in range(5):
        kept.write(record(step, wall=float(step + 1)))
    left = kept.keep_only({(0, "save0")}, newest=2)
    assert [r.step for r in left] == [0, 3, 4]
    assert [r.step for r in kept.read()] == [0, 3, 4]
