"""The step lines of all layouts, as the daemon's wiring gives them to the sensors."""

import re

from podwatch.checkpoints.layouts import KINDS
from podwatch.sensors.log_tail import StepLines
from podwatch.sensors.progress_bars import StepReader

LINES = StepLines(kind.log for kind in KINDS.values())


def step_reader(*, target: int | None = None, custom: re.Pattern[str] | None = None) -> StepReader:
    return StepReader(LINES, target=target, custom=custom)
