"""What the lines of a trainer's log show, as data: each layout declares its trainer's, ``sensors`` applies all of them
to every log.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepPattern:
    """A line that reports a finished step. ``pattern`` matches from the start of the line, its first group is the
    step."""

    pattern: re.Pattern[str]
    also: re.Pattern[str] | None = None
    """Must be found in the line too: it tells training from validation."""
    json_level: str = ""
    """The line is a JSON record of this level, and ``pattern`` matches its message."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Text in the line -> role that writes it, where neither the log file nor torchrun's prefix shows the role."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A dictionary of metrics in one line, with or without a step. A progress bar that advances between two of them
    counts steps."""

    whole: re.Pattern[str]
    needs: re.Pattern[str]
    """Must be found in it: it tells training from evaluation."""
    step: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class EpochBar:
    """A tqdm bar for each epoch: the step is epoch * total + done. The epoch is the first group of ``name``, which is
    the bar's description; ``needs`` is text elsewhere in the line."""

    name: re.Pattern[str]
    needs: str


@dataclass(frozen=True, slots=True)
class TrainerLog:
    """The lines of one trainer. ``run_bars``: descriptions of tqdm bars that count the steps of the whole run.
    ``epoch_lines``: other bars of one epoch, with epoch, done and total as their groups."""

    steps: tuple[StepPattern, ...] = ()
    records: tuple[StepRecord, ...] = ()
    run_bars: tuple[str, ...] = ()
    epoch_bars: tuple[EpochBar, ...] = ()
    epoch_lines: tuple[re.Pattern[str], ...] = ()


NO_LINES = TrainerLog()
