"""Hugging Face Trainer and what is built on it (TRL, axolotl, LLaMA-Factory, ms-swift).

Automatic resumes take the highest name without checking the content, so podwatch always passes the step.
``resume_from_checkpoint`` among the training arguments has no effect alone: the program must pass it to
``Trainer.train()``. axolotl, LLaMA-Factory and ms-swift do; trl's own scripts do not.
"""

import json
import re
from pathlib import Path
from typing import Any

from podwatch.checkpoints.command import Command, Program
from podwatch.checkpoints.command_table import ResumeRule, command_of, recogniser
from podwatch.checkpoints.layout import SAVES, Concern, Kind, Recognition, Site, Weights
from podwatch.checkpoints.step_names import newest_names
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer
from podwatch.domain.trainer_log import StepRecord, TrainerLog
from podwatch.system.files import read_file

FLAG = "--resume_from_checkpoint"
_SCRIPT_LIMIT = 1 << 20
STATE = "trainer_state.json"
CHECKPOINT = "checkpoint-{step}"
_STATE_LIMIT = 64 << 20
"""Bytes. It holds every logged row of the run."""


def _unable(site: Site, command: Command) -> ResumeRule | None:
    """The rule of a script that trains itself, without any mention of a checkpoint to resume from."""
    scripts = [program for program in command.programs if program.script.endswith(".py")]
    script = next((program for program in scripts if _ignores(program, site)), None)
    if script is None:
        return None
    return ResumeRule(
        drop=("resume_from_checkpoint",),
        ask=f"{script.name} calls Trainer.train() without a checkpoint, so it would restart at step 0",
        example=f'["{FLAG}", "{{checkpoint}}"] once it calls trainer.train(resume_from_checkpoint=...)',
    )


def _ignores(program: Program, site: Site) -> bool:
    try:
        text = read_file((program.cwd or site.working_directory) / program.script, _SCRIPT_LIMIT)
    except (OSError, ValueError):
        return False
    return re.search(rb"\.train\(\s*\)", text) is not None and b"resume_from_checkpoint" not in text


def concerns(site: Site) -> tuple[Concern, ...]:
    """Reports a run that saves nothing."""
    if command_of(site).value("save_strategy") != "no":
        return ()
    fix = 'set "--save_strategy", "steps" and "--save_steps", "100" in trainer.command'
    return (Concern(SAVES, "the trainer saves no checkpoints: the command has --save_strategy no", fix, certain=True),)


def _states(root: Path) -> list[dict[str, Any]]:
    """State files of the newest readable checkpoints."""
    found = []
    for name in newest_names(root, CHECKPOINT):
        try:
            state = json.loads(read_file(root / name / STATE, _STATE_LIMIT))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(state, dict):
            found.append(state)
    return found


def _target(site: Site) -> int | None:
    for state in _states(site.checkpoint_dir or site.output_dir):
        value = state.get("max_steps")
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _on_disk(site: Site) -> Recognition | None:
    for name in newest_names(site.output_dir, CHECKPOINT):
        if (site.output_dir / name / STATE).is_file():
            return Recognition("hf", f"{name} holds {STATE}", certain=True)
    return None


LOG = TrainerLog(
    records=(
        StepRecord(
            # A flat dictionary of numbers and nothing else: a log message that quotes one must not match.
            whole=re.compile(r"""^\{(?:['"][\w./@-]{1,60}['"]: ?['"]?[\w.+-]{1,40}['"]?(?:, ?|\}$))+$"""),
            needs=re.compile(r"""['"]loss['"]:"""),  # not ``eval_loss``
            step=re.compile(r"""['"](?:global_step|step)['"]: ?['"]?(\d{1,12})['"]?[,}]"""),
        ),
    ),
    # TRL's logging page: GRPO and SFT, PPO
    metrics={
        "reward": ("reward", "objective/scores"),
        "entropy": ("entropy", "objective/entropy"),
        "kl": ("kl", "objective/kl"),
        "grad_norm": ("grad_norm",),
        "loss": ("loss",),
    },
)
WEIGHTS = Weights(
    (".",),
    when="not with ZeRO 3 or sharded FSDP; with LoRA the adapter only",
    convert="accelerate merge-weights CHECKPOINT/pytorch_model_fsdp_0 TARGET",
    note="sharded FSDP; for ZeRO 3, in CHECKPOINT: `python zero_to_fp32.py . TARGET --safe_serialization`. config.json"
    " and the tokenizer are in CHECKPOINT",
)


TRAINER = Trainer("hf", target=_target, unable=_unable)
KIND = Kind(
    "hf",
    lambda site: TableLayout(TRAINER, site),
    recogniser("hf", _on_disk),
    log=LOG,
    weights=WEIGHTS,
    concerns=concerns,
)
