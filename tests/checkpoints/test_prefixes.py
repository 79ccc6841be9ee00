"""Real saves replayed operation by operation: whole after the last one, and never before.

The order is what strace saw the library do. After each operation a writer may have been killed, or podwatch may look.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drivers.checkpoints import Inspection, SaveEnd, judge, one_reader
from tests.support.golden import GOLDENS, Done, Golden, replay, shift

pytestmark = pytest.mark.slow

each = pytest.mark.parametrize("golden", GOLDENS, ids=lambda g: g.name)

LATE: dict[str, tuple[str, ...]] = {
    # The library goes on after what makes a set whole, with files that no resume needs.
    # Without a GPU both processes take themselves for the first one, and each writes these.
    "hf-deepspeed": ("trainer_state.json", "rng_state.pth"),
    "lightning": ("last.ckpt",),
    "runner": ("step_latest",),
}


@pytest.fixture(autouse=True)
def reader() -> Iterator[None]:
    with one_reader():
        yield


def operations_of(golden: Golden, step: int) -> list[Done]:
    return list(replay(golden, Path("/nowhere"), dry=True, step=step))


def first_look(golden: Golden, step: int) -> int:
    """From which operation on it can be known what the save will have. OpenRLHF's two roles save side by side (the
    fixture wrote one after the other), and a run may have no critic at all."""
    if golden.name != "openrlhf":
        return 1
    return next(i for i, (_, path, _) in enumerate(operations_of(golden, step), 1) if path.startswith("_critic/"))


def vouched_for(verdict: Inspection | None) -> bool:
    """Would podwatch call it complete soon? Without a marker the learned set and a long quiet time stand before it."""
    return verdict is not None and verdict.whole and verdict.ends is not SaveEnd.NONE


@each
def test_whole_after_the_last_operation_and_never_before(golden: Golden, tmp_path: Path) -> None:
    for step in golden.steps[:1]:
        out = tmp_path / str(step)
        out.mkdir()
        layout = golden.make(out)
        total = len(operations_of(golden, step))
        late = LATE.get(golden.name, ())
        last = max(
            i for i, (_, path, _) in enumerate(operations_of(golden, step), 1) if not path.endswith(late or ("\0",))
        )
        for count, (what, path, _) in enumerate(replay(golden, out, step=step), 1):
            verdict = judge(layout, step)
            if first_look(golden, step) <= count < last:
                assert not vouched_for(verdict), f"after {what} {path}, {count} of {total}"
                assert verdict is None or verdict.whole or verdict.reason
        verdict = judge(layout, step)
        assert verdict is not None
        assert verdict.whole, verdict.reason


@each
def test_the_second_save_beside_the_first(golden: Golden, tmp_path: Path) -> None:
    """The order across saves as it was: the tracker still names the step before, and the first set stays whole."""
    out = tmp_path / "out"
    out.mkdir()
    layout = golden.make(out)
    first, second = golden.steps[0], (golden.steps + golden.others)[1]
    list(replay(golden, out, step=first))
    shift(out, -3600)
    operations = list(enumerate(operations_of(golden, second), 1))
    late = LATE.get(golden.name, ()) or ("\0",)
    last = max(i for i, (_, path, _) in operations if not path.endswith(late))
    for count, (what, path, _) in enumerate(replay(golden, out, step=second), 1):
        verdict = judge(layout, second)
        assert count >= last or not vouched_for(verdict), f"after {what} {path}"
        before = judge(layout, first)
        assert before is not None
        assert before.whole, f"step {first} after {what} {path}: {before.reason}"
    verdict = judge(layout, second)
    assert verdict is not None
    assert verdict.whole == (second in golden.steps), verdict.reason


OVER_ITSELF = tuple(g for g in GOLDENS if g.source not in ("orbax", "lightning", "accelerate"))
"""Orbax and accelerate refuse a directory that exists; a Lightning file is replaced in one rename."""


@pytest.mark.parametrize("golden", OVER_ITSELF, ids=lambda g: g.name)
def test_a_save_over_an_older_one_of_the_same_step(golden: Golden, tmp_path: Path) -> None:
    """After a rollback the step is saved again in its own directory: old markers and old sizes are all there."""
    out = tmp_path / "out"
    out.mkdir()
    layout = golden.make(out)
    step = golden.steps[0]
    list(replay(golden, out, step=step))
    shift(out, -3600)
    before = judge(layout, step)
    assert before is not None
    assert before.whole
    written = [i for i, (what, _, _) in enumerate(operations_of(golden, step), 1) if what in ("opened", "renamed")]
    # The tracker names this step already: the save is over when its own directory is.
    late = LATE.get(golden.name, ()) or ("\0",)
    own = [i for i, (_, path, _) in enumerate(operations_of(golden, step), 1) if golden.belongs(step, path)]
    last = max(i for i in own if not operations_of(golden, step)[i - 1][1].endswith(late))
    begun = first_harm(golden, step, written)
    for count, (what, path, _) in enumerate(replay(golden, out, step=step), 1):
        verdict = judge(layout, step)
        if begun <= count < last:
            assert not vouched_for(verdict), f"after {what} {path}"
    verdict = judge(layout, step)
    assert verdict is not None
    assert verdict.whole, verdict.reason


def first_harm(golden: Golden, step: int, written: list[int]) -> int:
    """The first operation that harms the old set. prime-rl's orchestrator saves up to two steps ahead of the trainer:
    until the trainer begins, its older half is still the one that counts."""
    if golden.source != "prime-rl":
        return next(i for i in written if i >= first_look(golden, step))
    operations = operations_of(golden, step)
    return next(i for i, (what, path, _) in enumerate(operations, 1) if what == "opened" and path.endswith(".distcp"))


@each
def test_a_stale_marker_with_nothing_else(golden: Golden, tmp_path: Path) -> None:
    """Only what is written last, from an earlier save, in an otherwise empty directory; and all but the first file."""
    out = tmp_path / "out"
    layout = golden.copy(out)
    step = golden.steps[-1]
    own = [p for p in sorted(out.rglob("*")) if p.is_file() and golden.belongs(step, str(p.relative_to(out)))]
    newest = max(own, key=lambda p: (p.stat().st_mtime_ns, str(p)))
    if len(own) == 1:
        pytest.skip("one file per checkpoint")
    kept = newest.read_bytes()
    for path in own:
        path.unlink()
    newest.write_bytes(kept)
    verdict = judge(layout, step)
    assert verdict is None or not verdict.whole
    shutil.rmtree(out)
