"""DeepSpeed alone: ``<dir>/global_stepN`` with ``latest`` beside it.

N counts the engine's optimizer steps (a script can pass another number). Only tags of this form are steps; for others
use ``custom``. OpenRLHF's SFT, DPO and reward trainers and open-instruct's GRPO use this layout. How a script resumes
is unknown: most call ``load_checkpoint(dir)``, which reads ``latest``, and podwatch writes N there.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from podwatch.checkpoints.layouts import command_line, shared_rules, zero_shards
from podwatch.checkpoints.layouts.base import Judgement, Kind, Marker, Recognition, Site, Source, Tracker
from podwatch.checkpoints.layouts.command_line import program
from podwatch.checkpoints.layouts.openrlhf_command import LOAD, PLAIN_MODULES, load_preset
from podwatch.checkpoints.layouts.resume_flags import Preset
from podwatch.checkpoints.layouts.shared_rules import StepView
from podwatch.checkpoints.layouts.step_dirs import Rules, StepDirs, step_names
from podwatch.domain.trainer_log import StepPattern, TrainerLog

STEP = re.compile(r"global_step(0|[1-9]\d{0,17})$")
LATEST = "latest"
_TARGETS = ("--max-steps", "--max_train_steps", "--train_steps", "--num_training_steps")


def judge(view: StepView) -> Judgement:
    tag = view.only
    zero = zero_shards.check(tag)
    tag.sound()
    marker = zero_shards.over(view.root / LATEST, view, tag, STEP, shared_rules.has_later(view, STEP))
    return Judgement(True, marker=marker if zero.ranks else Marker.NONE, world_size=zero.ranks)


def trackers(root: Path, step: int | None) -> tuple[Tracker, ...]:
    return () if step is None else (Tracker(root / LATEST, content=f"global_step{step}".encode()),)


def pinned(root: Path) -> Mapping[int, str]:
    step = shared_rules.number(root / LATEST, STEP)
    return {} if step is None else {step: LATEST}


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


def _target(_site: Site, command: Sequence[str], _root: Path) -> int | None:
    return command_line.positive(command_line.flag_value(command, _TARGETS))


RULES = Rules(
    name="deepspeed",
    step=STEP,
    directory="global_step{step}",
    judge=judge,
    preset=_preset,
    sources=(
        zero_shards.SOURCE,
        Source("allenai/open-instruct", "open_instruct/grpo_fast.py", "e6c3044aa6201c8bfa4573c1b03142af599e730d"),
    ),
    reshards=False,
    rests_on=lambda root: (root / LATEST,),
    trackers=trackers,
    pinned=pinned,
    target=_target,
)


def recognise(site: Site) -> Recognition | None:
    root = site.checkpoint_dir or site.output_dir
    for step, name in sorted(step_names(root, STEP).items(), reverse=True)[:3]:
        if any(zero_shards.MODEL.fullmatch(p.name) for p in (root / name).iterdir()):
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

KIND = Kind("deepspeed", lambda site: StepDirs(site, RULES), recognise, log=LOG)
