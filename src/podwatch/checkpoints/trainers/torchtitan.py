"""torchtitan: ``<dump_folder>/checkpoint/step-N``. ``step-0`` is a seed made by the operator, no save of this run."""

import re
from collections.abc import Sequence
from pathlib import Path

from podwatch.checkpoints import command_line
from podwatch.checkpoints.command_line import program
from podwatch.checkpoints.layout import Kind, Recognition, Site, Weights
from podwatch.checkpoints.resume_flags import Preset
from podwatch.checkpoints.step_names import named_place, step_names
from podwatch.checkpoints.structures import INDEX
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer
from podwatch.domain.trainer_log import StepPattern, TrainerLog

_FLAG = "--checkpoint.load_step"


def _place(site: Site) -> Path | None:
    folder = command_line.flag_value(site.command, ("--checkpoint.folder",)) or "checkpoint"
    for document in command_line.toml_documents(_config(site), site.cwd):
        section = document.get("checkpoint")
        if isinstance(section, dict) and isinstance(section.get("folder"), str) and folder == "checkpoint":
            folder = section["folder"]
    return named_place(site, str(site.output_dir / folder))


def _config(site: Site) -> list[str]:
    name = command_line.flag_value(site.command, ("--job.config_file",))
    return ["@", name] if name else []


def _target(site: Site, command: Sequence[str]) -> int | None:
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


def recognise(site: Site) -> Recognition | None:
    seen = program(site.command, site.working_directory)
    module = seen.runs("torchtitan")
    if module:
        return Recognition("torchtitan", f"the command runs {module}", certain=True)
    if seen.name == "run_train.sh" or re.search(r"torchtitan[/.]train", seen.shell + " " + seen.script):
        return Recognition("torchtitan", f"the command runs {seen.script or 'torchtitan'}", certain=True)
    root = _place(site) or site.output_dir / "checkpoint"
    for step, name in step_names(root, "step-{step}").items():
        if step and (root / name / INDEX).is_file():
            return Recognition("torchtitan", f"{root.name}/{name} contains {INDEX}", certain=True)
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


TRAINER = Trainer("torchtitan", _preset, _target, place=_place)
KIND = Kind("torchtitan", lambda site: TableLayout(TRAINER, site), recognise, log=LOG, weights=WEIGHTS)
