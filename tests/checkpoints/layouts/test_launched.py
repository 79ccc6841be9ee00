"""How many processes a command starts: only what it says for sure."""

import shlex
from pathlib import Path

import pytest

from podwatch.checkpoints.command import Command, launched_processes
from podwatch.checkpoints.shapes import Site
from podwatch.checkpoints.trainer import all_trainers
from podwatch.checkpoints.trainers import layout_of
from podwatch.recovery.choose import other_world
from podwatch.recovery.observe import saved_by
from tests.support.golden import GOLDENS


@pytest.mark.parametrize(
    ("command", "count"),
    [
        ("torchrun --nproc-per-node 8 train.py", 8),
        ("uv run torchrun --nnodes=2 --nproc_per_node=4 -m trainer --nproc-per-node 3", 8),
        ("python -m torch.distributed.run --nproc_per_node=2 x.py", 2),
        ("torchrun --nproc-per-node gpu train.py", None),
        ("torchrun --nnodes 1:4 --nproc-per-node 8 train.py", None),
        ("torchrun train.py --nproc-per-node 8", None),
        ("accelerate launch --num_processes 8 train.py", 8),
        ("accelerate launch --config_file c.yaml train.py --num_processes 8", None),
        ("deepspeed --num_gpus 4 --num_nodes 2 train.py", 8),
        ("deepspeed --include localhost:0,1 --num_gpus 4 train.py", None),
        ("deepspeed train.py", None),
        ("python train.py", None),
        ("bash run.sh", None),
        ("", None),
    ],
)
def test_launchers(command: str, count: int | None) -> None:
    assert launched_processes(Command(shlex.split(command))) == count


@pytest.mark.parametrize(
    ("command", "count"),
    [
        ("python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=8 trainer.nnodes=2", 16),
        ("python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=8", 8),
        ("python3 -m verl.trainer.main_ppo --config-name=mine trainer.n_gpus_per_node=8", None),
        ("python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=$GPUS", None),
        ("python3 -m verl.trainer.main_ppo", None),
        ("torchrun --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer", 4),
    ],
)
def test_verl(command: str, count: int | None, tmp_path: Path) -> None:
    layout = layout_of(all_trainers()["verl"], Site(tmp_path))
    assert layout.processes(shlex.split(command)) == count
    assert (layout.reshards, layout.counts_all) == (False, True)


def test_what_a_real_set_says(tmp_path: Path) -> None:
    golden = next(g for g in GOLDENS if g.name == "deepspeed")
    layout = golden.copy(tmp_path / "out")
    assert saved_by(layout, golden.steps[-1]) == 2
    assert saved_by(layout, 999) is None


def test_only_what_surely_does_not_fit_is_refused() -> None:
    assert "8 processes saved it and the command starts 4" in other_world(8, 4, counts_all=True)
    assert other_world(8, 8, counts_all=True) == ""
    assert other_world(None, 8, counts_all=True) == other_world(8, None, counts_all=True) == ""
    assert other_world(4, 8, counts_all=False) == "", "the rest may be model parallel"
    assert "data-parallel" in other_world(8, 4, counts_all=False)
    assert "data-parallel" in other_world(3, 8, counts_all=False)
