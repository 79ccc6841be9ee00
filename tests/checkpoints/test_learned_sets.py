"""Learned file sets: what is asked of a save without a marker."""

from hypothesis import given
from hypothesis import strategies as st

from podwatch.checkpoints.expected_files import (
    KEPT,
    SMALL,
    FileSet,
    agree,
    asked,
    counterpart,
    from_plain,
    lacking,
    remember,
    to_plain,
)

MIB = 1 << 20
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
FILES = st.dictionaries(NAMES, st.integers(0, 10**12), max_size=12)
STEPS = st.integers(0, 10**7)


def saved(step: int, size: int = 10 * MIB, **more: int) -> FileSet:
    files = {f"checkpoint/rank_{rank}.pt": size for rank in range(8)}
    return FileSet(step, files | {f"checkpoint/model_{step}.safetensors": size, "checkpoint/info.json": 120} | more)


def test_what_is_missing_and_compared_to_which_step() -> None:
    known = (saved(5), saved(10))
    whole = saved(15)
    assert lacking(whole, known) == ""
    for path in whole.files:
        cut = FileSet(15, {p: n for p, n in whole.files.items() if p != path})
        assert "of step 10" in lacking(cut, known)
    assert "and 7 more" in lacking(FileSet(15, {p: n for p, n in whole.files.items() if "rank" not in p}), known)


def test_sizes_may_vary_a_little_or_grow() -> None:
    known = (saved(5), saved(10))
    assert lacking(saved(15, 10 * MIB - 50_000), known) == ""
    assert lacking(saved(15, 20 * MIB), known) == ""
    reason = lacking(saved(15, 9 * MIB), known)
    assert f"{9 * MIB} bytes, in step 10 it had {10 * MIB}" in reason


def test_small_files_must_only_not_be_empty() -> None:
    known = (saved(5), saved(10))
    shorter = FileSet(15, saved(15).files | {"checkpoint/info.json": 40})
    assert lacking(shorter, known) == ""
    assert "info.json has 0 bytes" in lacking(FileSet(15, saved(15).files | {"checkpoint/info.json": 0}), known)


def test_a_rank_with_the_number_of_the_step_is_no_step() -> None:
    assert counterpart("rank_5.pt", 5, {"rank_5.pt": 1, "rank_10.pt": 1}, 10) == "rank_5.pt"
    assert counterpart("iter_0000005/x", 5, {"iter_0000010/x": 1}, 10) == "iter_0000010/x"
    assert counterpart("a5b15", 5, {"a6b15": 1}, 6) == "a6b15"
    assert counterpart("step_5.pt", 5, {}, 6) is None


def test_a_file_that_only_one_set_has_is_not_asked_for() -> None:
    known = (saved(5), saved(10, best=3 * MIB))
    assert lacking(saved(15), known) == ""
    assert "best" in lacking(saved(15), (*known[1:],))


def test_an_old_set_is_asked_for_names_only() -> None:
    known = (saved(90, 50 * MIB), saved(95, 50 * MIB))
    assert lacking(saved(5, 10 * MIB), known) == ""
    assert lacking(FileSet(5, {}), known) != ""


def test_two_that_agree() -> None:
    assert agree(saved(5), saved(10))
    assert not agree(saved(5), saved(10, 8 * MIB))
    assert not agree(saved(5), saved(10, extra=SMALL))


@given(FILES, STEPS, STEPS)
def test_a_set_lacks_nothing_of_itself(files: dict[str, int], one: int, two: int) -> None:
    new = FileSet(two, files)
    assert lacking(new, (FileSet(one, files),)) == ""
    assert lacking(new, remember((), new)) == ""


@given(FILES, FILES, STEPS, STEPS)
def test_nothing_is_asked_that_the_newest_lacks(one: dict[str, int], two: dict[str, int], a: int, b: int) -> None:
    wanted = asked((FileSet(a, one), FileSet(b, two)))
    assert {w.path for w in wanted} <= set(two)
    assert all(w.size <= two[w.path] for w in wanted)


@given(st.lists(st.builds(FileSet, STEPS, FILES), max_size=5), NAMES)
def test_what_is_kept_comes_back(sets: list[FileSet], whose: str) -> None:
    known: tuple[FileSet, ...] = ()
    for one in sets:
        known = remember(known, one)
    assert len(known) <= KEPT
    assert from_plain(to_plain(known, whose), whose) == known
    assert from_plain(to_plain(known, whose), whose + "x") == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["whose", "sets", "step", "files", "a"]), x),
    max_leaves=12,
)


@given(JSON)
def test_garbage_is_forgotten(data: object) -> None:
    assert isinstance(from_plain(data, "x"), tuple)
    assert from_plain({"whose": "x", "sets": data}, "x") in ((), from_plain({"whose": "x", "sets": data}, "x"))
