"""What the lines of a trainer's log show, as data: each layout declares its trainer's, ``sensors`` applies all of them
to every log.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

# -- where a program's own message begins: parts of patterns --------------------------------------------------------

STAMP = r"^[\d\s:.,TZ/+|-]{0,40}"
BAD = STAMP + r"\[?(?:WARNING|WARN|ERROR|CRITICAL|FATAL)\b"
NEAR = r".{0,200}?"
"""Allowed distance between the level and the words: file, line number and logger name come first."""
RAISED = r"^(?:[A-Za-z_][\w.]{0,80}: ){0,2}"
"""The last line of a traceback: the exception's name, possibly after that of a wrapping exception."""

# -- lines ---------------------------------------------------------------------------------------------------------


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
class LogRule:
    """A pattern to find in the trainer's logs. ``count`` matches within ``within`` seconds raise a finding. It supports
    verdicts of the detectors named in ``supports``; alone it never leads to a restart."""

    name: str
    pattern: str
    count: int = 1
    within: float = 600.0
    critical: bool = False
    says: str = ""
    fix: str = ""
    supports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainerLog:
    """The lines of one trainer. ``run_bars``: descriptions of tqdm bars that count the steps of the whole run.
    ``epoch_lines``: other bars of one epoch, with epoch, done and total as their groups. ``errors``: its known errors,
    as log rules with meaning and fix; detection/log_rules.toml has those of programs that many trainers use.
    ``metrics``: podwatch's name of a training metric (detection/training_metrics.py) -> the trainer's names, of which
    the first one present counts."""

    steps: tuple[StepPattern, ...] = ()
    records: tuple[StepRecord, ...] = ()
    run_bars: tuple[str, ...] = ()
    epoch_bars: tuple[EpochBar, ...] = ()
    epoch_lines: tuple[re.Pattern[str], ...] = ()
    errors: tuple[LogRule, ...] = ()
    metrics: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


NO_LINES = TrainerLog()
