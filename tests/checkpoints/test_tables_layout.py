"""The tables: one for each trainer, what a mistake in one says, and the operator's own."""

from pathlib import Path

import pytest

from podwatch.checkpoints.table import table_from
from podwatch.checkpoints.templates import name_of, number_in
from podwatch.checkpoints.trainer import all_trainers
from podwatch.config.settings import CustomLayoutSettings
from podwatch.domain.errors import ConfigurationError
from tests.drivers.checkpoints import SaveEnd, custom_layout, judge, open_layout
from tests.support.checkpoints import torch_zip_bytes
from tests.support.golden import GOLDENS, Golden

VARIANTS = {
    "prime-rl-2025", "prime-rl-2025-nccl", "prime-rl-sft", "skyrl-async", "skyrl-late", "openrlhf-with-critic",
    "openrlhf-without-critic",
}  # fmt: skip


def test_every_trainer_has_a_table_that_was_checked_against_a_version() -> None:
    tables = {name: table for trainer in all_trainers().values() for name, table in trainer.tables.items()}
    assert set(tables) - VARIANTS == set(all_trainers()) - {"custom"}
    assert all(table.checked_against for table in tables.values())


def test_a_name_is_written_as_the_others_are() -> None:
    assert name_of("{name}{number}", 30, "ckpt_000010") == "ckpt_000030"
    assert name_of("{name}{number}", 30, "step-10") == "step-30"
    assert name_of("iter_{step:07d}", 30) == "iter_0000030"
    assert name_of("*.ckpt", 30, "epoch=0-step=10.ckpt") == "step=30.ckpt", "Lightning's names need not tell the step"
    assert number_in("iter_{step:07d}", "iter_30") is None
    assert number_in("step_{step}", "step_030") is None
    assert number_in("*step={number}.ckpt", "epoch=1-step=30.ckpt") == 30


def test_a_table_with_a_mistake_names_it() -> None:
    with pytest.raises(ConfigurationError, match="requires"):
        table_from("mine", {"parts": {"checkpoint": "step_{step}"}, "requires": [["a"]]})
    with pytest.raises(ConfigurationError, match="ends"):
        table_from("mine", {"parts": {"checkpoint": "step_{step}"}, "ends": "sometimes"})


def test_a_table_of_the_operator(tmp_path: Path) -> None:
    """``custom`` is the same table: a directory per step, with a file that is written last."""
    for step in (5, 10):
        (tmp_path / f"ckpt_{step:04d}").mkdir()
        (tmp_path / f"ckpt_{step:04d}" / "weights.txt").write_text("w")
        (tmp_path / f"ckpt_{step:04d}" / "notes.log").write_text("n")
    settings = CustomLayoutSettings(parts="ckpt_{step}", require=("weights*",), not_part=("*.log",), last="DONE")
    layout = custom_layout(tmp_path, settings)
    assert sorted(layout.steps()) == [5, 10]
    found = judge(layout, 10)
    assert found is not None
    assert not found.whole
    assert not found.damaged
    (tmp_path / "ckpt_0010" / "DONE").write_text("")
    found = judge(layout, 10)
    assert found is not None
    assert (found.whole, found.ends, found.leftovers) == (True, SaveEnd.LAST, ("checkpoint/notes.log",))
    assert layout.ahead_of(5) == (tmp_path / "ckpt_0010",)
    assert layout.part_dir("checkpoint", 30) == tmp_path / "ckpt_0030"
    with pytest.raises(ConfigurationError):
        layout.part_dir("actor", 30)


def test_the_operators_table_has_every_key_of_a_trainers_table(tmp_path: Path) -> None:
    settings = CustomLayoutSettings.model_validate(
        {
            "parts": {"model": "m/{step}", "optimizer": ["o/{step}"]},
            "require": [["model:*.pt", "model:*.bin"], "optimizer:state.pt"],
            "last": {"model:DONE": ["model:*"]},
            "table": {
                "optional": {"samples": "samples/{step}"},
                "identity": ["model"],
                "first_step_after": 1,
                "command": {"resume": {"add": ["--from", "{step}"]}},
            },
        }
    )
    for name in ("m/5", "o/5", "samples/5", "samples/9"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "m/5/a.bin").write_text("w")
    (tmp_path / "o/5/state.pt").write_bytes(torch_zip_bytes({"step": 5}))
    layout = custom_layout(tmp_path, settings)
    found = judge(layout, 5)
    assert found is not None
    assert (found.whole, found.reason) == (False, "model:DONE is missing")
    (tmp_path / "m/5/DONE").touch()
    found = judge(layout, 5)
    assert found is not None
    assert (found.whole, found.ends) == (True, SaveEnd.LAST)
    assert (layout.table.identity, layout.first_step_after(5)) == (("model",), 6)
    assert set(layout.ahead_of(5)) == {tmp_path / "samples/9"}
    assert layout.resume_command(("python", "t.py"), 5, "auto", {}).argv == ("python", "t.py", "--from", "5")
    wrong = settings.model_copy(update={"table": {"identities": ["model"]}})
    with pytest.raises(ConfigurationError, match="identities"):
        custom_layout(tmp_path, wrong)


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_the_command_for_a_step_that_is_not_there_is_no_error_of_ours(golden: Golden, tmp_path: Path) -> None:
    """podwatch tries it at its start, to say what would prevent a restart; checkpoints of other steps are there."""
    golden.copy(tmp_path / "out")
    layout = open_layout(golden.kind, tmp_path / "out" / golden.below, ("python", "train.py"))
    assert layout.steps()
    for step in (1, 10**6):
        assert (
            layout.resume_command(("python", "train.py"), step, ["--resume", "{checkpoint}"], {}).argv[-2] == "--resume"
        )
        assert str(layout.part_dir(next(iter(layout.steps().values()))[0].name, step)).startswith(str(tmp_path))
