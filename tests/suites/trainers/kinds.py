"""The trainers of this suite: how each is started, and which of its checkpoints the real library can load.

``load`` is the judge of the tests. It shares nothing with podwatch: it hands the files to the library that wrote them,
and asks for what a resume needs. Any exception means: not whole.
"""

import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).with_name("programs")
INTERVAL = 8
"""Steps between two saves; one epoch of the Lightning program."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """``name`` says the variant, ``layout`` is podwatch's. ``settings`` are lines of [trainer]. ``ranks`` processes
    train; with more than one, their launcher is the process that podwatch started."""

    name: str
    layout: str
    program: str
    arguments: Callable[[int], list[str]]
    checkpoint: re.Pattern[str]
    """Name of a checkpoint's file or directory; its group is the step."""
    load: Callable[[Path, int], None]
    settings: str = ""
    below: str = ""
    """Where checkpoints are, below the output directory."""
    ranks: int = 1

    def command(self, output: Path, steps: int) -> list[str]:
        binaries = Path(sys.executable).parent
        start = [sys.executable] if self.ranks == 1 else [
            str(binaries / "torchrun"), "--standalone", "--nproc-per-node", str(self.ranks),
        ]  # fmt: skip
        return [*start, str(PROGRAMS / self.program), "--output_dir", str(output), *self.arguments(steps)]

    def found(self, directory: Path) -> dict[int, Path]:
        """Checkpoints in one directory by their step."""
        matches = ((self.checkpoint.search(p.name), p) for p in directory.iterdir() if not p.is_symlink())
        return {int(match.group(1)): path for match, path in matches if match is not None}

    def whole(self, path: Path, step: int) -> bool:
        """Does the real library load this as the checkpoint of this step?"""
        try:
            self.load(path, step)
        except Exception:
            return False
        return True


def _torch(path: Path) -> Any:
    import torch

    return torch.load(path, weights_only=False, map_location="cpu")


def _hf(path: Path, step: int) -> None:
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.trainer_callback import TrainerState

    state = TrainerState.load_from_json(str(path / "trainer_state.json"))
    assert state.global_step == step
    model = GPT2LMHeadModel(GPT2Config.from_pretrained(path))
    missing = set(model.state_dict()) - set(load_file(path / "model.safetensors")) - {"lm_head.weight"}
    assert not missing, missing
    assert _torch(path / "optimizer.pt")["state"]
    assert _torch(path / "scheduler.pt")["last_epoch"] == step
    assert _torch(path / "rng_state.pth")["cpu"] is not None


def _lightning(path: Path, step: int) -> None:
    found = _torch(path)
    assert found["global_step"] == step
    assert found["state_dict"]
    assert found["optimizer_states"][0]["state"]
    assert found["loops"]["fit_loop"]


def _accelerate(path: Path, step: int) -> None:
    from safetensors.torch import load_file

    assert load_file(path / "model.safetensors")
    assert _torch(path / "optimizer.bin")["state"]
    assert _torch(path / "scheduler.bin")["last_epoch"] == step
    assert "torch_manual_seed" in _torch(path / "random_states_0.pkl")
    assert _torch(path / "custom_checkpoint_0.pkl")["step"] == step


def _dcp(path: Path, step: int) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as scratch:
        try:
            dcp_to_torch_save(path, Path(scratch) / "all.pt")
        except CheckpointException as error:  # a BaseException
            raise ValueError(f"{path} cannot be loaded") from error
        found = _torch(Path(scratch) / "all.pt")
    assert found["step"] == step
    assert len(found["model"]) == len(found["optimizer"]["state"]) == 4


def _hf_trainer(name: str, *flags: str) -> Trainer:
    return Trainer(
        name, "hf", "hf_train.py",
        lambda steps: ["--max_steps", str(steps), "--save_steps", str(INTERVAL), *flags],
        re.compile(r"^(?:\d+-)?checkpoint-(\d+)$"), _hf,
    )  # fmt: skip


TRAINERS = (
    _hf_trainer("hf, save_total_limit 1", "--save_total_limit", "1"),
    _hf_trainer("hf, save_total_limit 2", "--save_total_limit", "2"),
    _hf_trainer("hf, best model", "--save_total_limit", "2", "--best"),
    Trainer(
        "lightning, two newest", "lightning", "lightning_train.py",
        lambda steps: ["--max_epochs", str(steps // INTERVAL), "--keep", "2"],
        re.compile(r"epoch=\d+-step=(\d+)\.ckpt$"), _lightning,
        'resume_args = ["--ckpt_path", "{checkpoint}"]', "checkpoints",
    ),
    Trainer(
        "accelerate", "accelerate", "accelerate_train.py",
        lambda steps: ["--max_train_steps", str(steps), "--checkpointing_steps", str(INTERVAL)],
        re.compile(r"step_(\d+)$"), _accelerate, "max_steps = {steps}",
    ),
    Trainer(
        "dcp, two ranks", "dcp", "dcp_train.py",
        lambda steps: ["--steps", str(steps), "--interval", str(INTERVAL)], re.compile(r"step-(\d+)$"), _dcp,
        'resume_args = ["--resume", "{checkpoint}"]\nmax_steps = {steps}', "", 2,
    ),
)  # fmt: skip
