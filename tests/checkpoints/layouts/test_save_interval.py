"""Steps between two saves, read from the command."""

from pathlib import Path

import pytest

from podwatch.checkpoints.command import Command
from podwatch.checkpoints.trainer import all_trainers


@pytest.mark.parametrize(
    ("layout", "command", "steps"),
    [
        ("prime-rl", "rl @ rl.toml --ckpt --ckpt.interval 20", 20),
        ("prime-rl", "rl @ rl.toml --ckpt", 5),
        ("prime-rl", "rl @ trainer.toml", 7),
        ("prime-rl", "rl @ other.toml --ckpt", None),
        ("hf", "python train.py --save_steps 50", 50),
        ("hf", "python train.py --save-steps=50 --save_strategy steps", 50),
        ("hf", "python train.py --save_steps 0.1", None),
        ("hf", "python train.py --save_steps 50 --save_strategy epoch", None),
        ("verl", "python -m verl.trainer.main_ppo trainer.save_freq=20", 20),
        ("verl", "python -m verl.trainer.main_ppo trainer.save_freq=-1", None),
        ("torchtitan", "torchrun train.py --checkpoint.interval 100", 100),
        ("megatron", "torchrun pretrain_gpt.py --save-interval 250", 250),
        ("skyrl", "python -m skyrl trainer.ckpt_interval=10", 10),
        ("nemo-rl", "python run_grpo.py ++checkpointing.save_period=3", 3),
        ("custom", "python train.py --save_steps 50", None),
    ],
)
def test_as_configured(tmp_path: Path, layout: str, command: str, steps: int | None) -> None:
    (tmp_path / "rl.toml").write_text("[ckpt]\ninterval = 5\n")
    (tmp_path / "trainer.toml").write_text("[trainer.ckpt]\ninterval = 7\n")
    (tmp_path / "other.toml").write_text("ckpt = true\n[trainer]\nckpt = { interval = 'x' }\n")
    assert all_trainers()[layout].command.save_interval(Command(command.split(), tmp_path)) == steps
