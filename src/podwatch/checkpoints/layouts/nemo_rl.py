"""NeMo-RL: everything is written into ``tmp_step_N``, which is then renamed to ``step_N``: the name is the commit.

A save over an existing step renames that to ``old_step_N`` first, so between the two renames ``step_N`` is briefly
absent. The trainer always resumes from the highest ``step_N`` and accepts no step, so checkpoints ahead must be moved
to quarantine. N counts training steps over all epochs. output_dir is ``checkpointing.checkpoint_dir``.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from podwatch.checkpoints.layouts import command_line, step_dirs
from podwatch.checkpoints.layouts.base import Judgement, Kind, Marker, Recognition, Site, Source, Weights
from podwatch.checkpoints.layouts.command_line import program
from podwatch.checkpoints.layouts.resume_flags import Preset
from podwatch.checkpoints.layouts.shared_rules import Inside, StepView
from podwatch.checkpoints.layouts.step_dirs import STEP, Rules, StepDirs, inside_output, step_names

INFO = "training_info.json"
_SCRIPT = re.compile(r"run_(?:grpo|ppo|sft|dpo|rm|distillation|vlm_grpo|vlm_sft)\w*\.py")
_ALGORITHMS = ("grpo", "ppo", "sft", "dpo", "rm", "distillation")
_COMMIT = "7ea279abfbeb698b092856d0dab61e7cf39bc909"


def judge(view: StepView) -> Judgement:
    """The name commits the save; the other checks find later losses (a removal under way, a lost disk)."""
    inside = view.only
    info = inside.json(INFO)
    recorded = info.get("total_steps") if isinstance(info, dict) else None
    if isinstance(recorded, int) and recorded != view.step:
        raise inside.fault(f"{INFO} contains step {recorded}, not {view.step}", damaged=True)
    siblings = view.siblings()
    _component(inside, "policy", siblings)
    if any((s / "value").is_dir() for s in siblings):
        _component(inside, "value", siblings)
    token, leftovers = step_dirs.check(inside)
    inside.sound()
    return Judgement(True, marker=Marker.COMMIT, save_token=token, leftovers=leftovers)


def _component(inside: Inside, name: str, siblings: Sequence[Path]) -> None:
    component = inside.below(name)
    if not component.below("weights").files:
        raise inside.fault(f"{name}/weights is missing")
    if not component.below("optimizer").files and any((s / name / "optimizer").is_dir() for s in siblings):
        raise inside.fault(f"{name}/optimizer is missing, which other steps have")


def _also_ahead(root: Path, step: int | None) -> tuple[Path, ...]:
    """Unfinished and replaced copies of the steps ahead."""
    limit = -1 if step is None else step
    found = []
    for prefix in ("tmp", "old"):
        names = step_names(root, re.compile(rf"{prefix}_step_(0|[1-9][0-9]{{0,17}})$"))
        found += [root / name for number, name in sorted(names.items()) if number > limit]
    return tuple(found)


def _preset(_site: Site, _command: Sequence[str]) -> Preset:
    return Preset(add=())


def _target(_site: Site, command: Sequence[str], _root: Path) -> int | None:
    return command_line.positive(command_line.key_value(command, [f"{a}.max_num_steps" for a in _ALGORITHMS]))


def _root(site: Site) -> Path:
    named = command_line.key_value(site.command, ("checkpointing.checkpoint_dir",))
    return inside_output(site, None if named is None or "$" in named else named)


RULES = Rules(
    name="nemo-rl",
    step=STEP,
    directory="step_{step}",
    judge=judge,
    preset=_preset,
    sources=(
        Source("NVIDIA-NeMo/RL", "nemo_rl/utils/checkpoint.py", _COMMIT),
        Source("NVIDIA-NeMo/RL", "nemo_rl/algorithms/grpo.py", _COMMIT),
    ),
    reshards=True,
    root=_root,
    also_ahead=_also_ahead,
    first_after=1,
    target=_target,
    told_by=INFO,
)


def recognise(site: Site) -> Recognition | None:
    seen = program(site.command, site.working_directory)
    module = seen.runs("nemo_rl")
    if module or (_SCRIPT.fullmatch(seen.name) and seen.says("grpo.", "ppo.", "sft.", "dpo.", "cluster.", "policy.")):
        return Recognition("nemo-rl", f"the command runs {module or seen.name}", certain=bool(module))
    root = _root(site)
    for step, name in sorted(step_names(root).items(), reverse=True)[:3]:
        if (root / name / INFO).is_file() and (root / name / "policy").is_dir():
            return Recognition("nemo-rl", f"step_{step} contains policy/ and {INFO}", certain=True)
    return None


WEIGHTS = Weights(
    convert="uv run examples/converters/convert_dcp_to_hf.py --config=CHECKPOINT/config.yaml"
    " --dcp-ckpt-path=CHECKPOINT/policy/weights --hf-ckpt-path=TARGET",
    note="in NeMo-RL's repository; copy CHECKPOINT/policy/tokenizer beside it",
)

KIND = Kind("nemo-rl", lambda site: StepDirs(site, RULES), recognise, weights=WEIGHTS)
