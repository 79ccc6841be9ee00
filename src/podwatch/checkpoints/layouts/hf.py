"""Hugging Face Trainer and what is built on it (TRL, axolotl, LLaMA-Factory, ms-swift): ``checkpoint-N`` directories.

``tmp-checkpoint-N`` (transformers 4.36 to 4.38) is not a checkpoint. Automatic resumes take the highest name without
checking the content, so podwatch always passes the step.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from podwatch.checkpoints.layouts import command_line, deepspeed
from podwatch.checkpoints.layouts.base import (
    SAVES,
    Concern,
    Judgement,
    Kind,
    Marker,
    Recognition,
    Site,
    Source,
    Weights,
)
from podwatch.checkpoints.layouts.command_line import Program, program
from podwatch.checkpoints.layouts.resume_flags import Preset
from podwatch.checkpoints.layouts.shared_rules import Inside, StepView
from podwatch.checkpoints.layouts.step_dirs import Rules, StepDirs, step_names
from podwatch.domain.trainer_log import StepRecord, TrainerLog
from podwatch.system.files import read_file

# -- resume arguments ------------------------------------------------------------------------------------------------
# ``resume_from_checkpoint`` among the training arguments has no effect alone: the program must pass it to
# ``Trainer.train()``. axolotl, LLaMA-Factory and ms-swift do; trl's own scripts do not.

FLAG = "--resume_from_checkpoint"
_AXOLOTL = "--auto-resume-from-checkpoints"
_SCRIPT_LIMIT = 1 << 20


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


# -- rule for a complete checkpoint ----------------------------------------------------------------------------------
# ``trainer_state.json`` is written last, but without a barrier, and an old one survives an overwrite; a resume with a
# missing optimizer or scheduler silently starts a fresh one. So all files are required.

STATE = "trainer_state.json"
UNFINISHED = "checkpoint-is-incomplete.txt"
_FSDP_MODEL = r"pytorch_model_fsdp_\d+$"
_FSDP_OPTIMIZER = r"optimizer_\d+$"
_RNG = r"rng_state_(\d+)\.pth"
_DATA = r".*\.(?:safetensors|bin|pt|distcp|metadata|index\.json)|(?:adapter_)?config\.json"
"""Files that are written before the state file. Not other ranks' random state (.pth), which can come later: there is no
barrier. Of JSON files only those of a save's start and the shard indexes: operators add tokenizers and evaluations
later."""


def judge_checkpoint(view: StepView) -> Judgement:
    """Apply the rule to one directory."""
    inside, step = view.only, view.step
    if UNFINISHED in inside.files:
        raise inside.fault(f"{UNFINISHED} is present: a save at a stop signal that was not finished")
    inside.require(STATE, why="it is written last")
    state = inside.json(STATE)
    recorded = state.get("global_step") if isinstance(state, dict) else None
    if recorded != step:
        raise inside.fault(f"{STATE} contains step {recorded}, not {step}", damaged=True)
    inside.written_last(STATE, _DATA)
    zero = _deepspeed(inside)
    world_size, tokens = None if zero is None else zero.ranks, list[str]()
    if zero is None:
        for pattern in (_FSDP_MODEL, _FSDP_OPTIMIZER):
            for folder in inside.folders(pattern):
                verdict = inside.below(folder).dcp()
                tokens.append(verdict.save_id)
                world_size = world_size or verdict.world_size
        if not (inside.hf_weights() or inside.folders(_FSDP_MODEL) or "pytorch_model_fsdp.bin" in inside.files):
            raise inside.fault("the weights are missing")
        if not ({"optimizer.pt", "optimizer.bin"} & inside.files.keys() or inside.folders(_FSDP_OPTIMIZER)):
            raise inside.fault("optimizer.pt is missing: a resume would silently start a fresh optimizer")
        inside.require("scheduler.pt")
    ranks = [int(m.group(1)) for m in inside.matches(_RNG)]
    inside.sound()
    # The state file is really the last one only with a single rank or a closing barrier (DeepSpeed).
    last = (bool(zero.ranks) if zero is not None else not ranks) and not inside.has_holes()
    return Judgement(
        True,
        marker=Marker.LAST_FILE if last else Marker.NONE,
        save_token="-".join(tokens),
        world_size=world_size or (max(ranks) + 1 if ranks else None),
    )


def _deepspeed(inside: Inside) -> deepspeed.Zero | None:
    """``latest`` names a tag whose ZeRO shards must all be there; None if this is no DeepSpeed checkpoint."""
    tags = inside.folders(r"global_step\d+$")
    if not tags and "latest" not in inside.files:
        return None
    tag = inside.text("latest")
    if tag not in tags:
        raise inside.fault(f"latest names {tag[:60]!r}, which does not exist")
    return deepspeed.check(inside.below(tag))


# -- layout ----------------------------------------------------------------------------------------------------------

CHECKPOINT = re.compile(r"^checkpoint-(0|[1-9][0-9]{0,17})$")
_STATE_LIMIT = 64 << 20
"""Bytes. It holds every logged row of the run."""
_PROGRAMS = ("axolotl", "llamafactory-cli", "swift", "trl")
_MODULES = ("axolotl.cli", "llamafactory", "swift.cli", "trl")
_ARGUMENTS = ("--per_device_train_batch_size", "--num_train_epochs", "--save_steps", "--gradient_accumulation_steps")


def _states(root: Path, most: int = 3) -> list[dict[str, Any]]:
    """State files of the newest readable checkpoints."""
    found = []
    for _, name in sorted(step_names(root, CHECKPOINT).items(), reverse=True)[:most]:
        try:
            state = json.loads(read_file(root / name / STATE, _STATE_LIMIT))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(state, dict):
            found.append(state)
    return found


def _pinned(root: Path) -> Mapping[int, str]:
    """The best checkpoint so far: ``load_best_model_at_end`` reads it at the end of training."""
    for state in _states(root, 1):
        match = CHECKPOINT.match(Path(str(state.get("best_model_checkpoint") or "")).name)
        if match:
            return {int(match.group(1)): f"best_model_checkpoint in {STATE}"}
    return {}


def _target(_site: Site, command: Sequence[str], root: Path) -> int | None:
    direct = command_line.positive(command_line.flag_value(command, ("--max_steps",)))
    if direct is not None:
        return direct
    for state in _states(root):
        value = state.get("max_steps")
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


RULES = Rules(
    name="hf",
    step=CHECKPOINT,
    directory="checkpoint-{step}",
    judge=judge_checkpoint,
    preset=preset,
    sources=(
        Source("huggingface/transformers", "src/transformers/trainer.py", "5.23.0"),
        Source("axolotl-ai-cloud/axolotl", "src/axolotl/cli/config_options.py", "067b021c8"),
        Source("hiyouga/LLaMA-Factory", "src/llamafactory/hparams/parser.py", "ff6d4d12e"),
        Source("modelscope/ms-swift", "swift/arguments/sft_args.py", "3602360a5"),
        Source("huggingface/trl", "trl/scripts/sft.py", "f2cd57710"),
    ),
    reshards=True,
    saves_block=True,
    pinned=_pinned,
    # An evaluation at the start (eval_on_start) is reported under the loaded step.
    first_after=0,
    target=_target,
    told_by=STATE,
    finish_lines=("train_runtime",),  # in the last metrics line, by every version and at every log level
)


class HFLayout(StepDirs):
    """``output_dir/checkpoint-N``, one part."""

    def __init__(self, output_dir: Path) -> None:
        super().__init__(Site(output_dir), RULES)


def recognise(site: Site) -> Recognition | None:
    seen = program(site.command, site.working_directory)
    named = seen.calls(*_PROGRAMS) or seen.runs(*_MODULES)
    if named:
        return Recognition("hf", f"the command runs {named}", certain=True)
    for step, name in sorted(step_names(site.output_dir, CHECKPOINT).items(), reverse=True)[:3]:
        if (site.output_dir / name / STATE).is_file():
            return Recognition("hf", f"checkpoint-{step} holds {STATE}", certain=True)
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

KIND = Kind("hf", lambda site: StepDirs(site, RULES), recognise, log=LOG, weights=WEIGHTS, concerns=concerns)
