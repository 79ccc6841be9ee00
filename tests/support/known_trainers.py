"""What the layouts declare of their trainers, as the daemon's wiring passes it on."""

import re

from podwatch.checkpoints.trainer import all_trainers
from podwatch.checkpoints.trainers import process_names
from podwatch.sensors.log_tail import StepLines
from podwatch.sensors.read_step_lines import StepReader
from podwatch.trainer.process_roles import Roles

LINES = StepLines(kind.log for kind in all_trainers().values())
ROLES = Roles(process_names())


def step_reader(*, target: int | None = None, custom: re.Pattern[str] | None = None) -> StepReader:
    return StepReader(LINES, target=target, custom=custom)
