"""Hugging Face Trainer and what is built on it (TRL, axolotl, LLaMA-Factory, ms-swift): ``checkpoint-N`` directories.

``tmp-checkpoint-N`` (transformers 4.36 to 4.38) is not a checkpoint. Automatic resumes take the highest name without
checking the content, so podwatch always passes the step.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from podwatch.checkpoints.layouts import argv, hf_command
from podwatch.checkpoints.layouts.base import Kind, Recognition, Site, Source
from podwatch.checkpoints.layouts.hf_judge import STATE, judge_checkpoint
from podwatch.checkpoints.layouts.names import step_names
from podwatch.checkpoints.layouts.program import program
from podwatch.checkpoints.layouts.step_dirs import Rules, StepDirs
from podwatch.system.reading import read_file

CHECKPOINT = re.compile(r"^checkpoint-(0|[1-9]\d{0,17})$")
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
    direct = argv.positive(argv.flag_value(command, ("--max_steps",)))
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
    preset=hf_command.preset,
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
    if seen.says(hf_command.FLAG):
        return Recognition("hf", f"the command has {hf_command.FLAG}")
    told = seen.says(*_ARGUMENTS)
    return Recognition("hf", f"the command has {told}, an argument of the Trainer") if told else None


KIND = Kind("hf", lambda site: StepDirs(site, RULES), recognise)
