"""What is learned about a run and outlives a restart, of the trainer and of podwatch (kept in the journal)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

STEPS_KEPT = 64
"""Intervals the median is taken over: some hours of a run with 3-5 min steps, so it follows a changed batch size."""


@dataclass(frozen=True, slots=True)
class Learned:
    """``step_seconds`` are seconds per step, ``gap_seconds`` seconds between two signs of progress (longer where only
    checkpoints tell), both newest last. ``seen`` names the signals that were healthy during start ``start_id``: a
    detector that was armed stays armed when podwatch itself is restarted.
    """

    gpu_baseline_bytes: tuple[tuple[int, int], ...] = ()
    step_seconds: tuple[float, ...] = ()
    gap_seconds: tuple[float, ...] = ()
    startup_seconds: float | None = None
    """From the start to the first step, last time."""
    start_id: str = ""
    seen: tuple[str, ...] = ()
    clean_exit_start_id: str = ""
    """The newest start that ended with exit 0 and no known target; ``clean_exit_step`` is the highest step until
    then.
    """
    clean_exit_step: int | None = None

    @property
    def median_step_seconds(self) -> float | None:
        return median(self.step_seconds) if self.step_seconds else None

    @property
    def median_gap_seconds(self) -> float | None:
        return median(self.gap_seconds) if self.gap_seconds else None

    def baseline(self, index: int) -> int | None:
        return dict(self.gpu_baseline_bytes).get(index)

    def with_baseline(self, index: int, value: int) -> "Learned":
        if self.baseline(index) == value:
            return self
        merged = dict(self.gpu_baseline_bytes) | {index: value}
        return replace(self, gpu_baseline_bytes=tuple(sorted(merged.items())))

    def saw(self, *names: str) -> "Learned":
        new = set(names) - set(self.seen)
        return replace(self, seen=tuple(sorted({*self.seen, *new}))) if new else self

    def with_interval(self, step_seconds: float, gap_seconds: float) -> "Learned":
        return replace(
            self,
            step_seconds=(*self.step_seconds, step_seconds)[-STEPS_KEPT:],
            gap_seconds=(*self.gap_seconds, gap_seconds)[-STEPS_KEPT:],
        )

    def to_dict(self) -> dict[str, object]:
        return {
            "gpu_baseline_bytes": [list(pair) for pair in self.gpu_baseline_bytes],
            "step_seconds": list(self.step_seconds),
            "gap_seconds": list(self.gap_seconds),
            "startup_seconds": self.startup_seconds,
            "start_id": self.start_id,
            "seen": list(self.seen),
            "clean_exit_start_id": self.clean_exit_start_id,
            "clean_exit_step": self.clean_exit_step,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> "Learned":
        """The inverse of ``to_dict``. Anything unreadable is forgotten: learning again only delays a verdict."""
        try:
            startup = data.get("startup_seconds")
            exit_step = data.get("clean_exit_step")
            return cls(
                gpu_baseline_bytes=tuple((int(i), int(b)) for i, b in _rows(data.get("gpu_baseline_bytes"))),
                step_seconds=tuple(float(s) for s in _rows(data.get("step_seconds")))[-STEPS_KEPT:],
                gap_seconds=tuple(float(s) for s in _rows(data.get("gap_seconds")))[-STEPS_KEPT:],
                startup_seconds=float(startup) if isinstance(startup, int | float) else None,
                start_id=str(data.get("start_id", "")),
                seen=tuple(str(s) for s in _rows(data.get("seen"))),
                clean_exit_start_id=str(data.get("clean_exit_start_id", "")),
                clean_exit_step=exit_step if isinstance(exit_step, int) else None,
            )
        except (TypeError, ValueError):
            return cls()


def _rows(value: object) -> list[Any]:
    """The caller converts each row and catches what does not fit."""
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise TypeError("not a list")
    return list(value)
