"""Hugging Face Trainer and what is built on it (TRL, axolotl, LLaMA-Factory, ms-swift).

Automatic resumes take the highest name without checking the content, so podwatch always passes the step.
``resume_from_checkpoint`` among the training arguments has no effect alone: the program must pass it to
``Trainer.train()``. axolotl, LLaMA-Factory and ms-swift do; trl's own scripts do not.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podwatch.checkpoints import command_line
from podwatch.checkpoints.command_line import Program, program
from podwatch.checkpoints.layout import SAVES, Concern, Kind, Recognition, Site, Weights
from podwatch.checkpoints.resume_flags import Preset
from podwatch.checkpoints.step_names import newest_names
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer
from podwatch.domain.trainer_log import StepRecord, TrainerLog
from podwatch.system.files import read_file

FLAG = "--resume_from_checkpoint"
_AXOLOTL = "--auto-resume-from-checkpoints"
_SCRIPT_LIMIT = 1 << 20
STATE = "trainer_state.json"
CHECKPOINT = "checkpoint-{step}"
_STATE_LIMIT = 64 << 20
"""Bytes. It holds every logged row of the run."""
_PROGRAMS = ("axolotl", "llamafactory-cli", "swift", "trl")
_MODULES = ("axolotl.cli", "llamafactory", "swift.cli", "trl")
_ARGUMENTS = ("--per_device_train_batch_size", "--num_train_epochs", "--save_steps", "--gradient_accumulation_steps")


def preset(site: Site, command: Sequence[str]) -> Preset:
    seen = program(command, site.working_directory)
    usual = Preset(add=(FLAG, "{checkpoint}"), flags=(FLAG,), example=f'["{FLAG}", "{{checkpoint}}"]')
    if seen.calls("llamafactory-cli") or seen.runs("llamafactory"):
        if any(a.endswith((".yaml", ".yml", ".json")) for a in seen.arguments):
            key = FLAG.lstrip("-")
            return Preset(add=(f"{key}={{checkpoint}}",), keys=(key,))
        return usual
    if seen.calls("axolotl") or seen.runs("axolotl.cli"):
        return _axolotl(command)
    if seen.calls("trl") or seen.runs("trl.scripts", "trl.cli"):
        return _unable(
            "trl's own scripts call Trainer.train() without a checkpoint, so they would restart at step 0",
            "a program of your own that calls trainer.train(resume_from_checkpoint=...)",
        )
    if (seen.calls("swift") or seen.runs("swift.cli")) and _versioned(command, seen):
        return _unable(
            "ms-swift writes every launch into a new versioned directory below output_dir",
            'the same after adding "--add_version", "false" to trainer.command',
        )
    if _ignores(seen, site.working_directory):
        return _unable(
            f"{seen.name} calls Trainer.train() without a checkpoint, so it would restart at step 0",
            f'["{FLAG}", "{{checkpoint}}"] once it calls trainer.train(resume_from_checkpoint=...)',
        )
    return usual


def _axolotl(command: Sequence[str]) -> Preset:
    flag = "--resume-from-checkpoint"
    if "--" in command and "{resume_args}" not in command:
        return Preset(
            add=None,
            flags=(flag,),
            bare=(_AXOLOTL,),
            ask='arguments after "--" go to the launcher, so a resume flag at the end would not reach axolotl',
            example='the same after putting "{resume_args}" before "--" in trainer.command',
        )
    return Preset(add=(flag, "{checkpoint}"), flags=(flag,), bare=(_AXOLOTL,))


def _unable(why: str, example: str) -> Preset:
    return Preset(add=None, flags=(FLAG,), ask=why, example=example)


def _versioned(command: Sequence[str], seen: Program) -> bool:
    value = command_line.flag_value(command, ("--add_version",))
    return (value or "true").lower() != "false" and "--add_version false" not in seen.shell


def _ignores(seen: Program, cwd: Path) -> bool:
    """Whether the script itself trains, without any mention of a checkpoint to resume from."""
    if not seen.script.endswith(".py"):
        return False
    path = cwd / seen.script
    try:
        text = read_file(path, _SCRIPT_LIMIT).decode(errors="replace")
    except (OSError, ValueError):
        return False
    return re.search(r"\.train\(\s*\)", text) is not None and "resume_from_checkpoint" not in text


def concerns(site: Site) -> tuple[Concern, ...]:
    """Reports a run that saves nothing."""
    if command_line.flag_value(site.command, ("--save_strategy",)) != "no":
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


def _target(site: Site, command: Sequence[str]) -> int | None:
    direct = command_line.positive(command_line.flag_value(command, ("--max_steps",)))
    if direct is not None:
        return direct
    for state in _states(site.checkpoint_dir or site.output_dir):
        value = state.get("max_steps")
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def recognise(site: Site) -> Recognition | None:
    seen = program(site.command, site.working_directory)
    named = seen.calls(*_PROGRAMS) or seen.runs(*_MODULES)
    if named:
        return Recognition("hf", f"the command runs {named}", certain=True)
    for name in newest_names(site.output_dir, CHECKPOINT):
        if (site.output_dir / name / STATE).is_file():
            return Recognition("hf", f"{name} holds {STATE}", certain=True)
    if seen.says(FLAG):
        return Recognition("hf", f"the command has {FLAG}")
    told = seen.says(*_ARGUMENTS)
    return Recognition("hf", f"the command has {told}, an argument of the Trainer") if told else None


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


TRAINER = Trainer("hf", preset, _target)
KIND = Kind("hf", lambda site: TableLayout(TRAINER, site), recognise, log=LOG, weights=WEIGHTS, concerns=concerns)
