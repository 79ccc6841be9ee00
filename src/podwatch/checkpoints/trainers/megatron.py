"""Megatron-LM: a garbled tracker makes it exit with status 0, which looks like a clean end."""

import re
from collections.abc import Sequence
from pathlib import Path

from podwatch.checkpoints import command_line
from podwatch.checkpoints.command_line import program
from podwatch.checkpoints.layout import Kind, Recognition, Site, Weights
from podwatch.checkpoints.resume_flags import Preset
from podwatch.checkpoints.step_names import named_place, step_names
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer
from podwatch.domain.trainer_log import StepPattern, TrainerLog

TRACKER = "latest_checkpointed_iteration.txt"


def _place(site: Site) -> Path | None:
    return named_place(site, command_line.flag_value(site.command, ("--save",)))


def _preset(site: Site, _command: Sequence[str]) -> Preset:
    """``--load`` names a base model at a fresh start, so it is replaced only for a resume, like the flags that would
    restart at iteration 0."""
    return Preset(
        add=("--load", str(_place(site) or site.output_dir), "--ckpt-step", "{step}"),
        flags=("--ckpt-step",),
        resuming=("--load",),
        resuming_bare=("--finetune", "--no-load-optim", "--no-load-rng"),
    )


def _target(_site: Site, command: Sequence[str]) -> int | None:
    return command_line.positive(command_line.flag_value(command, ("--train-iters",)))


def recognise(site: Site) -> Recognition | None:
    root = _place(site) or site.output_dir
    for name in step_names(root, "iter_{step:07d}").values():
        if (root / TRACKER).is_file():
            return Recognition("megatron", f"{name} is beside {TRACKER}", certain=True)
        return Recognition("megatron", f"{name} exists")
    seen = program(site.command, site.working_directory)
    if re.fullmatch(r"(?:pretrain|train)_\w+\.py", seen.name) and seen.says("--train-iters", "--ckpt-format"):
        return Recognition("megatron", f"the command runs {seen.name} with Megatron's arguments", certain=True)
    told = seen.says("--tensor-model-parallel-size")
    return Recognition("megatron", f"the command has {told}") if told else None


LOG = TrainerLog(
    steps=(
        StepPattern(
            re.compile(r"^(?:\[[\d\s:.-]{1,30}\]\s*)?iteration {1,12}(\d{1,12})/ {0,12}\d{1,12} \| consumed samples:")
        ),
    )
)
WEIGHTS = Weights(note="the exporter of the model's architecture, for example Megatron Bridge")


TRAINER = Trainer("megatron", _preset, _target, place=_place)
KIND = Kind("megatron", lambda site: TableLayout(TRAINER, site), recognise, log=LOG, weights=WEIGHTS)
