"""What a record answers: same save, loss, deletion, what a save must have; and that a lost one does no harm."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.checkpoints.records import (
    MOST,
    RECENT,
    CheckpointRecord,
    CheckpointRecords,
    RecordedFile,
    RecordFiles,
    RecordSource,
    agree,
    is_left_of,
    is_same_save,
    is_suspect,
    lacking,
    lost_files,
)
from podwatch.domain.starts import Recorded

FILES = (RecordedFile("trainer", "a/b.pt", 10, 1000, 1), RecordedFile("orchestrator", "p.pt", 5, 2000, 2))
MIB = 1 << 20


def record(
    step: int = 5, files: tuple[RecordedFile, ...] = FILES, wall: float = 1.0, **changes: object
) -> CheckpointRecord:
    made = CheckpointRecord(step, f"save{step}", "hf", "boot-1", files, wall, {"trainer": 10}, len(files))
    return replace(made, **changes)  # type: ignore[arg-type]


file_names = st.from_regex(r"[a-z]{1,3}_[0-9]{1,3}\.pt", fullmatch=True)
listings = st.dictionaries(
    file_names, st.tuples(st.integers(1, 1 << 50), st.integers(0, 1 << 60)), min_size=1, max_size=6
)


def listed(found: dict[str, tuple[int, int]]) -> tuple[RecordedFile, ...]:
    return tuple(RecordedFile("checkpoint", name, size, mtime) for name, (size, mtime) in sorted(found.items()))


# -- one save ----------------------------------------------------------------------------------------------------------


@given(listings, listings, st.data())
def test_a_change_of_any_recorded_file_is_another_save_and_an_addition_is_not(
    found: dict[str, tuple[int, int]], added: dict[str, tuple[int, int]], data: st.DataObject
) -> None:
    known = record(files=listed(found))
    assert is_same_save(known, listed({**added, **found}))
    assert lost_files(known, listed({**added, **found})) == ""
    name = data.draw(st.sampled_from(sorted(found)))
    size, mtime = found[name]
    without = {n: f for n, f in found.items() if n != name}
    for changed in (without, {**found, name: (size, mtime + 1)}, {**found, name: (size + 1, mtime)}):
        assert not is_same_save(known, listed(changed))
    assert is_left_of(known, listed(without))
    assert not is_left_of(known, listed({**found, name: (size, mtime + 1)}))
    if without:
        assert lost_files(known, listed(without)) == f"was complete, but now {name} is gone"
        smaller = {**found, name: (size - 1, mtime)}
        assert lost_files(known, listed(smaller)) == f"was complete, but now {name} is smaller than it was"
    else:
        assert lost_files(known, ()) == "", "nothing of it is left: it is not here"


@given(listings)
def test_the_same_step_saved_again_lost_nothing(found: dict[str, tuple[int, int]]) -> None:
    again = {name: (0, mtime + 1) for name, (size, mtime) in list(found.items())[:1]}
    assert lost_files(record(files=listed(found)), listed(again)) == ""


@given(listings)
def test_a_record_is_read_as_it_was_written(found: dict[str, tuple[int, int]]) -> None:
    known = record(files=listed(found), source=RecordSource.RESTORED, deleted=True)
    assert CheckpointRecord.from_bytes(known.to_bytes()) == known


def test_identity_leaves_out_what_a_resume_writes_again() -> None:
    again = (FILES[0], replace(FILES[1], mtime_ns=9999))
    assert not is_same_save(record(), again)
    assert is_same_save(record(), again, ("trainer",))
    assert not is_same_save(record(), (FILES[1],), ("trainer",))


@pytest.mark.parametrize(
    ("known", "before_boot", "suspect"),
    [
        (None, True, True),
        (None, False, False),
        (record(boot_id="now"), True, False),
        (record(), False, True),
        (record(sparse=True), True, False),
    ],
)
def test_ranges_that_were_never_written(known: CheckpointRecord | None, before_boot: bool, suspect: bool) -> None:
    assert is_suspect(known, "now", before_boot=before_boot) is suspect


# -- what a save without a mark at its end must have -------------------------------------------------------------------


def saved(step: int, size: int = 10 * MIB, ranks: int = 8, **more: int) -> tuple[RecordedFile, ...]:
    files = {f"rank_{rank}.pt": size for rank in range(ranks)}
    files |= {f"model_{step}.safetensors": size, "info.json": 120} | more
    return tuple(RecordedFile("checkpoint", name, n, 1) for name, n in files.items() if n >= 0)


def known(*steps: int, **more: int) -> list[CheckpointRecord]:
    return [record(step, saved(step, **(more if step == steps[-1] else {})), wall=float(step)) for step in steps]


def test_each_file_is_missed() -> None:
    whole = saved(15)
    assert lacking(15, whole, known(5, 10)) == ""
    for file in whole:
        assert "step 10" in lacking(15, [f for f in whole if f != file], known(5, 10)), file.path


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (saved(15, 10 * MIB - 50_000), ""),
        (saved(15, 20 * MIB), ""),
        (saved(15, ranks=9), ""),
        (saved(15, 9 * MIB), f"{9 * MIB} bytes, in step 10 it had {10 * MIB}"),
        (saved(15, **{"info.json": 40}), ""),
        (saved(15, **{"info.json": 0}), "info.json has 0 bytes"),
        (saved(15, **{"info.json": -1}), "0 files like checkpoint/info.json"),
        (saved(15, ranks=7), "7 files like checkpoint/rank_#.pt, step 10 has 8"),
    ],
)
def test_sizes_may_vary_a_little_or_grow(new: tuple[RecordedFile, ...], reason: str) -> None:
    found = lacking(15, new, known(5, 10))
    assert (reason in found) if reason else not found


def test_a_file_that_only_one_save_has_is_not_asked_for() -> None:
    assert lacking(15, saved(15), known(5, 10, best=3 * MIB)) == ""
    assert "best" in lacking(15, saved(15), known(10, best=3 * MIB))


def test_only_the_saves_before_it_count_and_those_without_a_mark() -> None:
    assert lacking(5, saved(5, ranks=1), known(90, 95)) == ""
    marked = [replace(r, ends="last") for r in known(5, 10)]
    assert lacking(15, saved(15, ranks=1), marked) == ""


def test_two_that_agree() -> None:
    assert agree(saved(5), saved(10))
    assert not agree(saved(5), saved(10, 8 * MIB))
    assert not agree(saved(5), saved(10, ranks=7))
    assert not agree(saved(5), saved(10, extra=MIB))


@given(listings, st.integers(1, 10**7))
def test_a_save_lacks_nothing_of_itself(found: dict[str, tuple[int, int]], step: int) -> None:
    assert lacking(step, listed(found), [record(step - 1, listed(found))]) == ""
    assert agree(listed(found), listed(found))


# -- files -------------------------------------------------------------------------------------------------------------


def test_the_copy_brings_back_what_is_lost(tmp_path: Path) -> None:
    kept = RecordFiles(tmp_path / "state", tmp_path / "beside")
    kept.write(record(5))
    kept.write(record(6, wall=2.0))
    (tmp_path / "state" / record(5).name).unlink()
    (tmp_path / "state" / record(6).name).write_bytes(b"{")
    assert sorted(r.step for r in kept.read()) == [5, 6]
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


def test_a_later_podwatch_knows_what_an_earlier_one_wrote(tmp_path: Path) -> None:
    def begun(layout: str = "hf", *, writes: bool = True) -> CheckpointRecords:
        found = CheckpointRecords(RecordFiles(tmp_path), writes=writes)
        found.begin(layout)
        return found

    first, other = begun(), begun(writes=False)
    first.note(record(5))
    first.note(record(6, save_id="first", wall=2.0))
    first.note(record(6, save_id="second", wall=3.0))
    first.grow((5, "save5"), {"weights": 7, "trainer": 3}, 9)
    again = begun()
    assert again.all == first.all
    assert [(r.save_id, r.deleted) for r in again.all] == [("save5", False), ("first", True), ("second", False)]
    assert (again.all[0].bytes, again.all[0].file_count) == (17, 9)
    assert {step: found.save_id for step, found in again.known.items()} == {5: "save5", 6: "second"}
    assert begun("verl").all == ()
    other.note(record(7))
    assert len(RecordFiles(tmp_path).read()) == 3, "it only looks"
    other.begin("hf")
    assert {r.step for r in other.all} == {5, 6, 7}


def test_a_record_that_another_command_writes_meanwhile_is_read_although_this_one_writes_too(tmp_path: Path) -> None:
    """A restore, while the daemon rescans."""
    kept, other = CheckpointRecords(RecordFiles(tmp_path)), CheckpointRecords(RecordFiles(tmp_path))
    kept.begin("hf")
    other.note(record(7))
    kept.note(record(5))
    kept.begin("hf")
    assert {r.step for r in kept.all} == {5, 7}


def test_what_was_held_back_stays_so_until_the_operator_names_it(tmp_path: Path) -> None:
    def begun() -> CheckpointRecords:
        found = CheckpointRecords(RecordFiles(tmp_path))
        found.begin("hf")
        return found

    first = begun()
    first.note(record(5))
    first.note(record(6))
    first.change((5, "save5"), held="a second trainer")
    first.change((7, "none"), held="a second trainer")
    assert begun().decided == {(5, "save5"): "a second trainer"}
    begun().change((5, "save5"), released=True)
    after = begun()
    after.change((5, "save5"), held="a second trainer")
    assert after.decided == {(5, "save5"): ""}


def test_records_of_checkpoints_that_are_gone_stay_only_for_the_comparison() -> None:
    kept = CheckpointRecords()
    for step in range(RECENT + 8):
        kept.note(record(step, wall=float(step + 1)))
    kept.keep_only({0, RECENT})
    assert len(kept.all) == RECENT + 1
    assert {r.step for r in kept.all if not r.deleted} == {0, RECENT} == set(kept.known)
    assert kept.of(8) is None
    assert kept.same_save(8, FILES) is not None, "it can come back from quarantine"


def test_there_are_never_more_than_the_newest() -> None:
    kept = CheckpointRecords()
    for step in range(MOST + 9):
        kept.note(record(step, wall=float(step + 1)))
    kept.keep_only(set(range(MOST + 9)))
    assert {r.step for r in kept.all} == set(range(9, MOST + 9)) == set(kept.known)


def test_a_full_disk_forgets_nothing_now(tmp_path: Path) -> None:
    (tmp_path / "records").write_text("in the way")
    kept = CheckpointRecords(RecordFiles(tmp_path / "records"))
    kept.begin("hf")
    kept.note(record(5))
    kept.begin("hf")
    assert kept.of(5) == record(5)


# -- which start wrote it ----------------------------------------------------------------------------------------------


def test_the_start_that_wrote_it_is_read_by_the_next(tmp_path: Path) -> None:
    records = CheckpointRecords(RecordFiles(tmp_path / "records", tmp_path / "copy"))
    records.begin("hf")
    records.note(record())
    assert records.origins == {(5, "save5"): Recorded()}
    records.change((5, "save5"), start_id="start-1")
    again = CheckpointRecords(RecordFiles(tmp_path / "elsewhere", tmp_path / "copy"))
    again.begin("hf")
    assert again.origins == {(5, "save5"): Recorded("start-1")}, "the copy beside output_dir has it, too"


def test_what_the_store_has_is_of_the_start_in_its_manifest() -> None:
    records = CheckpointRecords()
    records.note(record())
    records.change((5, "save5"), source=RecordSource.RESTORED, start_id="theirs", branch="line-1")
    assert (records.origins, records.restored) == ({(5, "save5"): Recorded("theirs", True, "line-1")}, {(5, "save5")})
