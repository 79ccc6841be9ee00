"""The training metrics of the last steps under podwatch's names: reward, entropy, kl, grad_norm, loss. The trainers'
own names are in their layouts (``TrainerLog.metrics``).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from podwatch.domain.snapshot import Reading, SensorState, TrainingMetrics, observed, unobserved
from podwatch.domain.trainer_log import TrainerLog
from podwatch.sensors.log_tail import SILENT_SECONDS, FileNews, LogLine, LogReader, silent
from podwatch.system.clock import Clock

# prime-rl from v0.8 reports the reward per agent, and for all environments together under "agg".
_AGENT_REWARD = re.compile(r"train/(?:agg/)?effective/[^/]+/reward/mean")

_STEP = re.compile(r"^[\d\s:.,TZ/+|-]{0,40}SUCCESS\s+(Step (\d{1,12}) \|.*)")
_MESSAGE = re.compile(r"Step (\d{1,12}) \|")
_COLUMN = re.compile(
    r"\| *(Reward|Loss|Entropy|Mismatch KL|Grad\. Norm):? +(nan|[+-]?inf|[+-]?\d[\d.e+-]*)", re.IGNORECASE
)
_COLUMNS = {"reward": "reward", "loss": "loss", "entropy": "entropy", "mismatch kl": "kl", "grad. norm": "grad_norm"}
_VERL = re.compile(r"^step:(\d{1,12}) - (.*)")
_PAIR = re.compile(r"([\w./@-]{1,80}):(?:np\.float\d+\()?(nan|[+-]?inf|[+-]?\d[\d.e+-]*)\)?(?: - |$)")
_HF = re.compile(r"""^\{(?:['"][\w./@-]{1,60}['"]: ?['"]?[\w.+-]{1,40}['"]?(?:, ?|\}$))+$""")
_HF_PAIR = re.compile(r"""['"]([\w./@-]{1,60})['"]: ?['"]?([\w.+-]{1,40})['"]?""")

_OTHERS = TrainerLog(metrics={"reward": ("env/reward_mean",)})

Figures = tuple[int | None, dict[str, float]]
"""A step (None: the next one, whatever its number) and its metrics under podwatch's names."""


class MetricReader:
    """Reads rows and lines. ``trainers`` give the names; of several in one row the first one counts."""

    def __init__(self, trainers: Iterable[TrainerLog]) -> None:
        self._wanted: dict[str, tuple[str, int]] = {}
        for trainer in (*trainers, _OTHERS):
            for ours, names in trainer.metrics.items():
                for theirs in names:
                    self._wanted.setdefault(theirs, (ours, len(self._wanted)))

    def named(self, row: Mapping[str, object]) -> dict[str, float]:
        """The metrics of one row, under podwatch's names. Text that is a number (``"nan"``) counts."""
        ranked: dict[str, tuple[int, float]] = {}
        agents = []
        for theirs, raw in row.items():
            value = _number(raw)
            if value is None:
                continue
            if theirs in self._wanted:
                ours, rank = self._wanted[theirs]
                if ours not in ranked or rank < ranked[ours][0]:
                    ranked[ours] = (rank, value)
            elif _AGENT_REWARD.fullmatch(theirs):
                agents.append((not theirs.startswith("train/agg/"), value))
        found = {ours: value for ours, (_, value) in ranked.items()}
        if agents and "reward" not in found:
            best = min(apart for apart, _ in agents)
            values = [value for apart, value in agents if apart == best]
            found["reward"] = sum(values) / len(values)
        return found

    def from_row(self, line: LogLine) -> tuple[int, dict[str, float]] | None:
        """One line of a ``metrics.jsonl``. None for anything that is not a row with a step and a known metric."""
        row = line.row
        step = next((row[k] for k in ("step", "global_step", "training/global_step") if k in row), None)
        data = row["data"] if isinstance(row.get("data"), dict) else row  # verl's file logger nests them
        found = self.named(data)
        if not found or isinstance(step, bool) or not isinstance(step, int | float) or step != step or step < 0:
            return None
        return int(min(step, 10**12)), found

    def from_line(self, line: LogLine) -> Figures | None:
        """A step line of prime-rl (text or JSON mode), verl's console line, or the dictionary that Hugging Face
        trainers print. Never raises."""
        text = line.text
        match = _STEP.match(text)
        if match is not None:
            return _columns(match[1], int(match[2]))
        match = _VERL.match(text)
        if match is not None:
            found = self.named(dict(_PAIR.findall(match[2])))
            return (int(match[1]), found) if found else None
        if not text.startswith("{"):
            return None
        if _HF.match(text) is not None:
            pairs = dict(_HF_PAIR.findall(text))
            found = self.named(pairs)
            step = pairs.get("global_step") or pairs.get("step") or ""
            return (int(step) if step.isdigit() else None, found) if "loss" in found else None
        match = _MESSAGE.match(line.message)
        return _columns(line.message, int(match[1])) if match is not None else None


def _columns(text: str, step: int) -> Figures | None:
    found: dict[str, float] = {}
    for name, raw in _COLUMN.findall(text):
        value = _number(raw)
        if value is not None:
            found.setdefault(_COLUMNS[name.lower()], value)
    return (step, found) if found else None


def merge(kept: dict[int, dict[str, float]], new: Iterable[tuple[int, dict[str, float]]], most: int) -> None:
    """Merge the rows of one step (prime-rl writes four, and its orchestrator another) into ``kept``. Keeps the ``most``
    highest steps; an existing value stays."""
    for step, values in new:
        known = kept.setdefault(step, {})
        for name, value in values.items():
            known.setdefault(name, value)
    for step in sorted(kept)[:-most]:
        del kept[step]


def _number(raw: object) -> float | None:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        return None
    try:
        return float(raw)
    except (ValueError, OverflowError):
        return None


# -- sensor ----------------------------------------------------------------------------------------------------------

STEPS_KEPT = 8
"""Steps in a reading: prime-rl's orchestrator is up to two ahead of its trainer, and writes several rows per step."""
FIGURES_GLOBS = ("metrics.jsonl", "*/metrics.jsonl")
"""prime-rl v0.8 writes it into the output directory, its HEAD below the run's name."""


@dataclass(slots=True)
class _Source:
    """One source's steps since the start; ``at`` is when each was first seen."""

    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    at: dict[int, float] = field(default_factory=dict)

    def take(self, rows: Iterable[tuple[int, dict[str, float]]], now: float) -> None:
        merge(self.steps, rows, STEPS_KEPT)
        self.at = {step: self.at.get(step, now) for step in self.steps}


class TrainingSensor(LogReader[tuple[tuple[Figures, ...], tuple[Figures, ...]]]):
    """Reads the trainer's ``metrics.jsonl`` and its step lines. The first of the two that has values counts."""

    name = "training"

    def __init__(self, clock: Clock, reader: MetricReader) -> None:
        super().__init__(clock)
        self._reader = reader
        self.reset()

    def reset(self) -> None:
        """Forget all values: training was started."""
        self._rows, self._lines = _Source(), _Source()

    def look(self, news: Sequence[FileNews]) -> tuple[tuple[Figures, ...], tuple[Figures, ...]]:
        rows, lines = [], []
        for item in news:
            if item.figures:
                rows += [self._reader.from_row(line) for line in item.lines]
            else:
                lines += [self._reader.from_line(line) for line in item.lines]
        return tuple(filter(None, rows)), tuple(filter(None, lines))

    def count(self, found: tuple[tuple[Figures, ...], tuple[Figures, ...]], now: float) -> None:
        for source, figures in zip((self._rows, self._lines), found, strict=True):
            steps: list[tuple[int, dict[str, float]]] = []
            newest = max(source.steps, default=0)
            for step, values in figures:
                newest = step if step is not None else newest + 1
                steps.append((newest, values))
            source.take(steps, now)

    def latest(self) -> Reading[tuple[TrainingMetrics, ...]]:
        for source, name in ((self._rows, "metrics.jsonl"), (self._lines, "step-line")):
            if source.steps:
                newest = tuple(
                    TrainingMetrics(step, source.at[step], tuple(sorted(source.steps[step].items())), name)
                    for step in sorted(source.steps)
                )
                return observed(newest, max(source.at.values()))
        now = self._clock.monotonic()
        if (silence := self.silence(now)) > SILENT_SECONDS:
            return unobserved(SensorState.BLIND, now, silent(silence))
        return unobserved(SensorState.ABSENT, now, "no training metrics seen since this start")
