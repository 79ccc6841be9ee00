"""torchtitan: ``<dump_folder>/checkpoint/step-N``, each a DCP directory.

By default the last save of a run holds the model only, as DCP or as Hugging Face safetensors, and yet wins torchtitan's
own "latest". It is recognized by the missing entries of its index, is never a resume point and never removed.
``step-0`` is a seed made by the operator, not a save of this run.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from podwatch.checkpoints.formats import dcp, sandbox
from podwatch.checkpoints.layouts import command_line
from podwatch.checkpoints.layouts.base import Judgement, Kind, Marker, Recognition, Site, Source, Weights
from podwatch.checkpoints.layouts.command_line import program
from podwatch.checkpoints.layouts.resume_flags import Preset
from podwatch.checkpoints.layouts.shared_rules import WEIGHT_INDEXES, StepView
from podwatch.checkpoints.layouts.step_dirs import Rules, StepDirs, inside_output, step_names
from podwatch.domain.trainer_log import StepPattern, TrainerLog

STEP = re.compile(r"step-([1-9][0-9]{0,17})")
_FLAG = "--checkpoint.load_step"
_STATE = ("train_state", "optimizer")
"""A full save has these beside the model's own names."""
_EXPORT = "contains only the model: the export at the end of a run, not a resume point"


def judge(view: StepView) -> Judgement:
    inside = view.only
    if dcp.INDEX not in inside.files and set(WEIGHT_INDEXES) & inside.files.keys():
        inside.hf_weights()
        raise inside.fault(_EXPORT)
    verdict = inside.dcp()
    if not set(_STATE) & set(verdict.keys):
        raise inside.fault(_EXPORT)
    return Judgement(
        True,
        marker=Marker.COMMIT,
        save_token=verdict.save_id,
        world_size=verdict.world_size,
        leftovers=tuple(f"{inside.part}/{n}" for n in verdict.leftovers),
    )


def _pinned(root: Path) -> Mapping[int, str]:
    """The export, which must not count as an interrupted save."""
    try:
        newest = max(step_names(root, STEP).items(), default=None)
    except OSError:
        return {}
    if newest is None:
        return {}
    step, name = newest
    if (root / name / WEIGHT_INDEXES[0]).is_file():
        return {step: "the export at the end of the run"}
    answer = sandbox.parse("dcp", root / name / dcp.INDEX).answer
    if answer is not None and answer["keys"] and not set(_STATE) & set(answer["keys"]):
        return {step: "the export at the end of the run"}
    return {}


def _root(site: Site) -> Path:
    folder = command_line.flag_value(site.command, ("--checkpoint.folder",)) or "checkpoint"
    for document in command_line.toml_documents(_config(site), site.cwd):
        section = document.get("checkpoint")
        if isinstance(section, dict) and isinstance(section.get("folder"), str) and folder == "checkpoint":
            folder = section["folder"]
    return inside_output(site, str(site.output_dir / folder), "checkpoint")


def _config(site: Site) -> list[str]:
    name = command_line.flag_value(site.command, ("--job.config_file",))
    return ["@", name] if name else []


def _target(site: Site, command: Sequence[str], _root: Path) -> int | None:
    direct = command_line.positive(command_line.flag_value(command, ("--training.steps",)))
    if direct is not None:
        return direct
    for document in command_line.toml_documents(_config(site), site.cwd):
        section = document.get("training")
        value = section.get("steps") if isinstance(section, dict) else None
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _preset(_site: Site, _command: Sequence[str]) -> Preset:
    return Preset(add=(_FLAG, "{step}"), flags=(_FLAG,))


RULES = Rules(
    name="torchtitan",
    step=STEP,
    directory="step-{step}",
    judge=judge,
    preset=_preset,
    sources=(
        Source("pytorch/torchtitan", "torchtitan/components/checkpointer/dcp.py", "b5bcd76c6"),
        Source("pytorch/torchtitan", "torchtitan/components/checkpointer/base.py", "b5bcd76c6"),
        Source("pytorch/pytorch", "torch/distributed/checkpoint/filesystem.py", "2.13.0"),
    ),
    reshards=True,
    root=_root,
    pinned=_pinned,
    target=_target,
    told_by=dcp.INDEX,
    finish_lines=("Training completed",),
)


def recognise(site: Site) -> Recognition | None:
    seen = program(site.command, site.working_directory)
    module = seen.runs("torchtitan")
    if module:
        return Recognition("torchtitan", f"the command runs {module}", certain=True)
    if seen.name == "run_train.sh" or re.search(r"torchtitan[/.]train", seen.shell + " " + seen.script):
        return Recognition("torchtitan", f"the command runs {seen.script or 'torchtitan'}", certain=True)
    root = _root(site)
    for name in step_names(root, STEP).values():
        if (root / name / dcp.INDEX).is_file():
            return Recognition("torchtitan", f"{root.name}/{name} contains {dcp.INDEX}", certain=True)
    told = seen.says("--checkpoint.folder", "--job.dump_folder", "--dump_folder", "--job.config_file")
    return Recognition("torchtitan", f"the command has {told}") if told else None


LOG = TrainerLog(
    steps=(
        StepPattern(
            re.compile(
                r"^(?:\[titan\]\s*)?[\d\s:.,TZ/+|-]{0,40}(?:- \w{1,40} - INFO - )?step: {1,12}(\d{1,12})  loss: "
            )
        ),
    )
)

WEIGHTS = Weights(
    (".",),
    when="only the last step, with last_save_in_hf",
    convert="python scripts/checkpoint_conversion/convert_to_hf.py CHECKPOINT TARGET --hf_assets_path ASSETS"
    " --model_name NAME --model_flavor FLAVOR",
    note="in torchtitan's repository; config.json comes from the original model",
)

KIND = Kind("torchtitan", lambda site: StepDirs(site, RULES), recognise, log=LOG, weights=WEIGHTS)
