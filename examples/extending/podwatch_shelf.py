"""A layout in a package of its own: docs/contributing.md."""

import re
from collections.abc import Sequence

from podwatch.checkpoints.command_line import program
from podwatch.checkpoints.layout import Kind, Layout, Recognition, Site
from podwatch.checkpoints.resume_flags import Preset
from podwatch.checkpoints.step_names import step_names
from podwatch.checkpoints.table import SaveEnd, TrainerTable
from podwatch.checkpoints.table_layout import TableLayout
from podwatch.checkpoints.table_places import Trainer
from podwatch.domain.process import ProcessNames, ProcessRole
from podwatch.domain.trainer_log import StepPattern, TrainerLog

STEP = "shelf_{step}"
TABLE = TrainerTable(
    parts={"checkpoint": (STEP,)},
    require=(("model.safetensors",), ("DONE",)),
    last={"DONE": ("*",)},  # no other file is newer
    ends=SaveEnd.LAST,
    reshards=False,  # it loads a checkpoint only with the same number of processes
    finish_lines=("shelf is done",),
)


def preset(_site: Site, _command: Sequence[str]) -> Preset:
    return Preset(add=("--resume", "{checkpoint}"), flags=("--resume",))


TRAINER = Trainer("shelf", preset, table=lambda _site: TABLE)
LOG = TrainerLog(steps=(StepPattern(re.compile(r"^shelf step (\d{1,12}): loss ")),))
PROCESSES = ProcessNames(programs={"shelf": ProcessRole.TRAINER})


def make(site: Site) -> Layout:
    return TableLayout(TRAINER, site)


def recognise(site: Site) -> Recognition | None:
    module = program(site.command, site.working_directory).runs("shelf")
    if module:
        return Recognition("shelf", f"the command runs {module}", certain=True)
    for name in step_names(site.output_dir, STEP).values():
        if (site.output_dir / name / "DONE").is_file():
            return Recognition("shelf", f"{name} contains DONE", certain=True)
    return None


KIND = Kind("shelf", make, recognise, log=LOG, processes=PROCESSES)
