"""A layout in a package of its own: docs/contributing.md."""

import re
from collections.abc import Sequence

from podwatch.checkpoints.layouts.base import Judgement, Kind, Layout, Marker, Recognition, Site
from podwatch.checkpoints.layouts.command_line import program
from podwatch.checkpoints.layouts.resume_flags import Preset
from podwatch.checkpoints.layouts.shared_rules import StepView
from podwatch.checkpoints.layouts.step_dirs import Rules, StepDirs, step_names
from podwatch.domain.process import ProcessNames, ProcessRole
from podwatch.domain.trainer_log import StepPattern, TrainerLog

STEP = re.compile(r"shelf_(\d{1,18})")


def judge(view: StepView) -> Judgement:
    inside = view.only
    inside.require("model.safetensors")
    inside.written_last("DONE")  # it exists, and no other file is newer
    inside.sound()  # no file is damaged, as far as its format shows
    return Judgement(True, marker=Marker.LAST_FILE)


def preset(_site: Site, _command: Sequence[str]) -> Preset:
    return Preset(add=("--resume", "{checkpoint}"), flags=("--resume",))


RULES = Rules(
    name="shelf",
    step=STEP,
    directory="shelf_{step}",
    judge=judge,
    preset=preset,
    sources=(),
    reshards=False,  # it loads a checkpoint only with the same number of processes
    finish_lines=("shelf is done",),
)
LOG = TrainerLog(steps=(StepPattern(re.compile(r"^shelf step (\d{1,12}): loss ")),))
PROCESSES = ProcessNames(programs={"shelf": ProcessRole.TRAINER})


def make(site: Site) -> Layout:
    return StepDirs(site, RULES)


def recognise(site: Site) -> Recognition | None:
    module = program(site.command, site.working_directory).runs("shelf")
    if module:
        return Recognition("shelf", f"the command runs {module}", certain=True)
    for name in step_names(site.output_dir, STEP).values():
        if (site.output_dir / name / "DONE").is_file():
            return Recognition("shelf", f"{name} contains DONE", certain=True)
    return None


KIND = Kind("shelf", make, recognise, log=LOG, processes=PROCESSES)
