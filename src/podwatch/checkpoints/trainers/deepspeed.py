"""DeepSpeed alone: ``<dir>/global_stepN`` with ``latest`` beside it; and how OpenRLHF loads what DeepSpeed saved.

N counts the engine's optimizer steps (a script can pass another number). Only tags of this form are steps; for others
use ``custom``. OpenRLHF's SFT, DPO and reward trainers and open-instruct's GRPO use this layout. How a script resumes
is unknown: most call ``load_checkpoint(dir)``, which reads ``latest``, and podwatch writes N there.
"""

import re
from collections.abc import Sequence

from podwatch.checkpoints import command_line
from podwatch.checkpoints.command_line import program
from podwatch.checkpoints.layout import Kind, Recognition, Site, Weights
from podwatch.checkpoints.resume_flags import Preset
from podwatch.checkpoints.step_names import step_names
from podwatch.checkpoints.structures import is_model_states
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer
from podwatch.domain.process import ProcessNames, ProcessRole
from podwatch.domain.trainer_log import StepPattern, TrainerLog

PLAIN_MODULES = ("openrlhf.cli.train_sft", "openrlhf.cli.train_dpo", "openrlhf.cli.train_rm", "openrlhf.cli.train_kd")
NEW, OLD = "--ckpt.load_enable", "--load_checkpoint"
LOAD = (NEW, OLD)
"""From 2026-04-19 (ed62d0e2) on every flag has dots."""
_TARGETS = ("--max-steps", "--max_train_steps", "--train_steps", "--num_training_steps")


def has_dots(command: Sequence[str]) -> bool | None:
    """Whether the command uses dotted flags. None if no flag shows it."""
    flags = [a.partition("=")[0] for a in command if a.startswith("--")]
    if any("." in f for f in flags):
        return True
    return False if any("_" in f for f in flags) else None


def load_preset(command: Sequence[str]) -> Preset:
    """OpenRLHF loads what ``latest`` names; no step can be passed. A fresh start must not load: with an empty directory
    it would fail."""
    dots = command_line.has_flag(command, (NEW,)) or has_dots(command)
    if dots is None and not command_line.has_flag(command, (OLD,)):
        return Preset(
            add=None,
            bare=LOAD,
            ask="podwatch cannot determine the OpenRLHF version, so not which flag makes it load",
            example=f'["{NEW}"], or for versions before April 2026 ["{OLD}"]',
        )
    return Preset(add=(NEW if dots else OLD,), bare=LOAD)


def _preset(site: Site, command: Sequence[str]) -> Preset:
    seen = program(command, site.working_directory)
    if seen.runs(*PLAIN_MODULES) or command_line.has_flag(command, LOAD):
        return load_preset(command)
    if command_line.has_flag(command, ("--checkpoint_state_dir",)):
        return Preset(add=())  # open-instruct's GRPO loads what latest names, whenever the directory exists
    return Preset(
        add=None,
        ask="DeepSpeed is a library, so podwatch cannot know how the script resumes",
        example='["--resume"]; podwatch writes the step into the file "latest", so if the script calls load_checkpoint'
        ' whenever that file exists, set it to "none"',
    )


def _target(_site: Site, command: Sequence[str]) -> int | None:
    return command_line.positive(command_line.flag_value(command, _TARGETS))


def recognise(site: Site) -> Recognition | None:
    root = site.checkpoint_dir or site.output_dir
    for step, name in sorted(step_names(root, "global_step{step}").items(), reverse=True)[:3]:
        if any(is_model_states(p.name) for p in (root / name).iterdir()):
            return Recognition("deepspeed", f"global_step{step} holds DeepSpeed's model states", certain=True)
    seen = program(site.command, site.working_directory).runs(*PLAIN_MODULES)
    return Recognition("deepspeed", f"the command runs {seen}: DeepSpeed's files", certain=True) if seen else None


LOG = TrainerLog(
    steps=(
        StepPattern(
            re.compile(
                r"^(?:\[[\d\s:.,-]{1,30}\] )?\[INFO\] \[logging\.py:[^\]]{1,40}\] (?:\[Rank 0\] )?"
                r"step=(\d{1,12}), skipped="
            )
        ),
    )
)
PROCESSES = ProcessNames(programs={"deepspeed": ProcessRole.LAUNCHER})
WEIGHTS = Weights(
    convert="python ../zero_to_fp32.py .. TARGET -t global_stepN --safe_serialization",
    note="in CHECKPOINT; config.json and the tokenizer come from the original model",
)


TRAINER = Trainer("deepspeed", _preset, _target)
KIND = Kind(
    "deepspeed", lambda site: TableLayout(TRAINER, site), recognise, log=LOG, processes=PROCESSES, weights=WEIGHTS
)
