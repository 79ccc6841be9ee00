"""The tables find what the layouts find: steps, what is ahead of a start, trackers, pins, facts of the trainer."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.checkpoints.layouts import KINDS
from podwatch.checkpoints.tables.inspector import Inspector
from podwatch.checkpoints.tables.layout import TableLayout
from podwatch.checkpoints.tables.rules import InspectionOutcome
from podwatch.checkpoints.tables.special import prime_rl_wandb
from podwatch.checkpoints.tables.table import SaveEnd, all_tables, custom_table, table_from
from podwatch.checkpoints.tables.templates import name_of, number_in
from podwatch.domain.errors import ConfigurationError
from tests.drivers.checkpoints import Layout, open_layout
from tests.support.golden import GOLDENS, Golden
from tests.support.layout_makers import core, more, run
from tests.support.shadow import Shadow

pytestmark = pytest.mark.slow

MAKERS = {**core.MAKERS, **more.MAKERS}


@pytest.fixture(scope="module")
def inspector() -> Iterator[Inspector]:
    with Inspector() as found:
        yield found


def same_places(old: Layout, new: TableLayout, steps: tuple[int, ...]) -> None:
    assert sorted(new.steps()) == sorted(old.steps()) == sorted(steps)
    for step in (*steps, steps[0] + 1000):
        assert set(new.newer_than(step)) == set(old.ahead_of(step))
        assert {(t.path, t.content, t.target) for t in new.trackers(step)} == {
            (t.path, t.content, t.target) for t in old.trackers(step)
        }
    assert set(new.newer_than(None)) == set(old.ahead_of(None))
    assert new.by_products(steps[-1] + 1) == old.spare_paths(steps[-1] + 1)
    for step in steps:
        assert set(new.step_paths(step)) == set(old.step_paths(step))
    export = {s: w for s, w in old.pinned().items() if "export" in w or "best_model_path" in w}
    assert set(new.pinned()) == set(old.pinned()) - set(export)


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda g: g.name)
def test_a_real_run(golden: Golden, tmp_path: Path, inspector: Inspector) -> None:
    old = golden.copy(tmp_path / "out")
    new = Shadow(inspector, golden.kind, tmp_path / "out" / golden.below).layout
    same_places(old, new, (*golden.steps, *golden.others))


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_made_run(name: str, tmp_path: Path, inspector: Inspector) -> None:
    kind, maker = MAKERS[name]
    for step in (10, 20):
        run(maker(tmp_path, step))
    new = Shadow(inspector, kind, tmp_path).layout
    same_places(open_layout(kind, tmp_path, more.COMMANDS.get(name, ())), new, (10, 20))


def test_prime_rl_leaves_by_products_and_names_its_wandb_runs(tmp_path: Path, inspector: Inspector) -> None:
    for name, table in (("prime-rl-a", "prime-rl-2025"), ("prime-rl-b", "prime-rl")):
        out = tmp_path / name
        run(core.MAKERS[name][1](out, 10))
        own = out / "run_default" if table == "prime-rl-2025" else out
        for step in (3, 7, 10):
            (own / "rollouts" / f"step_{step}").mkdir(parents=True, exist_ok=True)
            (own / "broadcasts" / f"step_{step}").mkdir(parents=True, exist_ok=True)
        for place, run_id in ((out, "abc123"), (out / "run_default", "def456")):
            (place / "wandb").mkdir(parents=True, exist_ok=True)
            if table == "prime-rl-2025" or place == out:
                (place / "wandb" / "latest-run").symlink_to(f"run-20260101_000000-{run_id}")
        if table == "prime-rl":
            shutil.rmtree(out / "run_default")
        old, new = open_layout("prime-rl", out), Shadow(inspector, "prime-rl", out).layout
        assert new.name == table
        assert len(old.spare_paths(10)) == 4
        assert new.by_products(10) == old.spare_paths(10)
        assert set(new.newer_than(5)) == set(old.ahead_of(5))
        assert prime_rl_wandb(out, table) == old.wandb_identity() != {}


VARIANTS = {
    "prime-rl-2025", "prime-rl-2025-nccl", "prime-rl-sft", "skyrl-async", "skyrl-late", "openrlhf-with-critic",
    "openrlhf-without-critic",
}  # fmt: skip


def test_every_trainer_has_a_table_with_its_facts(tmp_path: Path) -> None:
    assert set(all_tables()) - VARIANTS == set(KINDS) - {"custom"}
    for name in set(KINDS) - {"custom"}:
        old, table = open_layout(name, tmp_path), all_tables()[name]
        assert table.checked_against == tuple(f"{s.project} {s.file} {s.commit}" for s in old.sources)
        assert (table.reshards, table.saves_block) == (old.reshards, old.saves_block), name
        assert (table.finish_lines, table.world_size_is_total) == (old.finish_lines, old.counts_all), name
        if name != "prime-rl":
            assert (table.first_step_after, table.logs) == (old.first_step_after(0), old.log_globs()), name


def test_a_name_is_written_as_the_others_are() -> None:
    assert name_of("{name}{number}", 30, "ckpt_000010") == "ckpt_000030"
    assert name_of("{name}{number}", 30, "step-10") == "step-30"
    assert name_of("iter_{step:07d}", 30) == "iter_0000030"
    assert number_in("iter_{step:07d}", "iter_30") is None
    assert number_in("step_{step}", "step_030") is None
    assert number_in("*step={number}.ckpt", "epoch=1-step=30.ckpt") == 30


def test_a_table_with_a_mistake_names_it() -> None:
    with pytest.raises(ConfigurationError, match="requires"):
        table_from("mine", {"parts": {"checkpoint": "step_{step}"}, "requires": [["a"]]})
    with pytest.raises(ConfigurationError, match="ends"):
        table_from("mine", {"parts": {"checkpoint": "step_{step}"}, "ends": "sometimes"})


def test_a_table_of_the_operator(tmp_path: Path, inspector: Inspector) -> None:
    """``custom`` is the same table: a file per step, a directory per step, with a file that is written last."""
    for step in (5, 10):
        (tmp_path / f"ckpt_{step:04d}").mkdir()
        (tmp_path / f"ckpt_{step:04d}" / "weights.txt").write_text("w")
        (tmp_path / f"ckpt_{step:04d}" / "notes.log").write_text("n")
    table = custom_table("ckpt_{step}", required=("weights*",), optional=("*.log",), last="DONE")
    layout = TableLayout("custom", table, tmp_path, inspector=inspector)
    assert sorted(layout.steps()) == [5, 10]
    places = layout.steps()[10]
    parts = {p.name: p.path for p in places.parts}
    found = inspector.inspect(table, 10, parts, layout.files_of(places))
    assert found.outcome is InspectionOutcome.NOT_COMPLETE
    (tmp_path / "ckpt_0010" / "DONE").write_text("")
    found = inspector.inspect(table, 10, parts, layout.files_of(places))
    assert (found.outcome, found.end, found.unlisted) == (InspectionOutcome.WHOLE, SaveEnd.LAST, ("notes.log",))
    assert layout.newer_than(5) == (tmp_path / "ckpt_0010",)
    assert layout.place("checkpoint", 30).path == tmp_path / "ckpt_0030"
    with pytest.raises(ConfigurationError):
        layout.place("actor", 30)
