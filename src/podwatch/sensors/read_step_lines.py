"""Reads the training step from a line of a log: step lines of trainers, the configured pattern, progress bars. Pure.

Steps also come from progress bars: tqdm's, and those that a layout describes. A bar can count anything: samples of an
evaluation, shards, batches of one epoch. A number counts as a training step only if there is evidence: a description
that a trainer uses for the whole run or for an epoch, the configured number of steps as the total, or a training log
between two states of the same bar. Otherwise the step is unknown.
"""

import re
from dataclasses import dataclass

from podwatch.sensors.log_tail import LogLine, StepLine, StepLines

_BAR = re.compile(
    r"^(?:(?P<name>[^|%\[\]]{1,80}?):\s+)?(?P<percent>\d{1,3})%\|[^|]{0,400}\|\s*(?P<done>\d{1,12})/(?P<total>\d{1,12})\s"
    r"\[(?P<elapsed>[\d:]+)<(?P<left>[\d:?]+(?: days?, [\d:]+)?),\s+(?P<rate>\?|[\d.]+)[^\]\s,]{0,12}(?:[\],]|$)"
)


@dataclass(frozen=True, slots=True)
class _Bar:
    name: str
    done: int
    total: int
    moved: bool
    """The bar has advanced since its start: its rate is known."""


class StepReader:
    """Reads the steps of one log file. ``lines`` are the known trainers'. ``target`` is the configured number of steps;
    ``custom`` is the operator's pattern, whose first group is the step: if it is set, nothing else counts."""

    def __init__(self, lines: StepLines, *, target: int | None = None, custom: re.Pattern[str] | None = None) -> None:
        self._lines, self._target, self._custom = lines, target, custom
        self._bar: _Bar | None = None
        self._trusted: int | None = None
        """Total of the unnamed bar that had a training log printed between two of its states."""

    def read(self, line: LogLine, file_role: str = "") -> StepLine | None:
        """The step that this line reports as done, or None. Never raises. Call it for every line, in order."""
        if self._custom is not None:
            return _custom_step(self._custom, line)
        found = self._lines.parse(line, file_role)
        if found is not None:
            return found
        if "%|" in line.text:
            return self._read_bar(line, file_role)
        for pattern in self._lines.epoch_lines:
            if (match := pattern.match(line.text)) is not None:
                return _epochs(int(match[1]), int(match[2]), int(match[3]), file_role)
        if (bar := self._bar) is not None and bar.moved and bar.done < bar.total and self._lines.is_record(line.text):
            self._trusted = bar.total
            return StepLine(bar.done, file_role)
        return None

    def _read_bar(self, line: LogLine, role: str) -> StepLine | None:
        match = _BAR.match(line.text)
        if match is None or line.nested:
            return None
        name, done, total = match["name"] or "", int(match["done"]), int(match["total"])
        moved = match["rate"] != "?" and 0 < done <= total
        for bar in self._lines.epoch_bars:
            if (epoch := bar.name.fullmatch(name)) is not None:
                return _epochs(int(epoch[1]), done, total, role) if moved and bar.needs in line.text else None
        if name and self._lines.run_bars.fullmatch(name) is None:
            return None
        if not name:
            self._bar = _Bar(name, done, total, moved)
        if moved and (name or total in (self._target, self._trusted)):
            return StepLine(done, role)
        return None


def _epochs(epoch: int, done: int, total: int, role: str) -> StepLine | None:
    step = epoch * total + done
    return StepLine(step, role) if 0 < done <= total and step < 10**12 else None


def _custom_step(pattern: re.Pattern[str], line: LogLine) -> StepLine | None:
    match = pattern.search(line.text[:1000])
    if match is None or not match.re.groups or not (text := match[1] or "").isascii() or not text.isdigit():
        return None
    return StepLine(int(text)) if len(text) <= 12 else None
