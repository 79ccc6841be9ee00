"""A layout in a package of its own: docs/contributing.md."""

import re

from podwatch.checkpoints.command_table import CommandSign, CommandTable, ResumeRule, command_of
from podwatch.checkpoints.layout import Kind, Layout, Recognition, Site
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


COMMAND = CommandTable(
    signs=(CommandSign(modules=("shelf",)),),
    resume=ResumeRule(add=("--resume", "{checkpoint}"), drop=("resume",)),
    target=("max_steps",),
)
TRAINER = Trainer("shelf", COMMAND, lambda _site: TABLE)
LOG = TrainerLog(steps=(StepPattern(re.compile(r"^shelf step (\d{1,12}): loss ")),))
PROCESSES = ProcessNames(programs={"shelf": ProcessRole.TRAINER})


def make(site: Site) -> Layout:
    return TableLayout(TRAINER, site)


def recognise(site: Site) -> Recognition | None:
    if by_command := COMMAND.recognised("shelf", command_of(site), certain=True):
        return by_command
    for name in step_names(site.output_dir, STEP).values():
        if (site.output_dir / name / "DONE").is_file():
            return Recognition("shelf", f"{name} contains DONE", certain=True)
    return None


KIND = Kind("shelf", make, recognise, log=LOG, processes=PROCESSES)
