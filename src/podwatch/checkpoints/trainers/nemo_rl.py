"""NeMo-RL always resumes from the highest ``step_N`` and accepts no step. N counts training steps over all epochs."""

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

INFO = "training_info.json"
_SCRIPT = re.compile(r"run_(?:grpo|ppo|sft|dpo|rm|distillation|vlm_grpo|vlm_sft)\w*\.py")
_ALGORITHMS = ("grpo", "ppo", "sft", "dpo", "rm", "distillation")


def _preset(_site: Site, _command: Sequence[str]) -> Preset:
    return Preset(add=())


def _target(_site: Site, command: Sequence[str]) -> int | None:
    return command_line.positive(command_line.key_value(command, [f"{a}.max_num_steps" for a in _ALGORITHMS]))


def _place(site: Site) -> Path | None:
    named = command_line.key_value(site.command, ("checkpointing.checkpoint_dir",))
    return named_place(site, named)


def recognise(site: Site) -> Recognition | None:
    seen = program(site.command, site.working_directory)
    module = seen.runs("nemo_rl")
    if module or (_SCRIPT.fullmatch(seen.name) and seen.says("grpo.", "ppo.", "sft.", "dpo.", "cluster.", "policy.")):
        return Recognition("nemo-rl", f"the command runs {module or seen.name}", certain=bool(module))
    root = _place(site) or site.output_dir
    for step, name in sorted(step_names(root).items(), reverse=True)[:3]:
        if (root / name / INFO).is_file() and (root / name / "policy").is_dir():
            return Recognition("nemo-rl", f"step_{step} contains policy/ and {INFO}", certain=True)
    return None


WEIGHTS = Weights(
    convert="uv run examples/converters/convert_dcp_to_hf.py --config=CHECKPOINT/config.yaml"
    " --dcp-ckpt-path=CHECKPOINT/policy/weights --hf-ckpt-path=TARGET",
    note="in NeMo-RL's repository; copy CHECKPOINT/policy/tokenizer beside it",
)


TRAINER = Trainer("nemo-rl", _preset, _target, place=_place)
KIND = Kind("nemo-rl", lambda site: TableLayout(TRAINER, site), recognise, weights=WEIGHTS)
