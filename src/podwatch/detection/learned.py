"""Values learned about a run; the journal keeps them across restarts of training and of podwatch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

STEPS_KEPT = 64
"""Intervals in the median: some hours of a run with steps of 3 to 5 min, so that it follows a changed batch size."""
SAVES_KEPT = 16
STARTS_KEPT = 8
"""Start-ups, one per start."""


@dataclass(frozen=True, slots=True)
class Learned:
    """``step_seconds``: seconds per step. ``gap_seconds``: seconds between two progress samples (longer if only
    checkpoints show progress). ``save_seconds``: how long saves took. ``startups``: seconds from a start to its first
    step. All newest last. ``seen`` names the signals that were healthy during start ``start_id``, so that a detector
    stays armed when podwatch itself is restarted. ``about``: the run these were learned from (see ``for_run``).
    """

    gpu_baseline_bytes: tuple[tuple[int, int], ...] = ()
    """By NVML index: the highest sustained memory level while training worked."""
    gpu_windows: tuple[tuple[int, int], ...] = ()
    """By NVML index: the number of complete windows of healthy observations behind the baseline."""
    step_seconds: tuple[float, ...] = ()
    gap_seconds: tuple[float, ...] = ()
    save_seconds: tuple[float, ...] = ()
    save_gaps: tuple[float, ...] = ()
    """Seconds from one complete save to the next."""
    startups: tuple[float, ...] = ()
    utilization_works: bool = False
    """The GPUs of this run have been seen busy: a device that always reports 0 % proves nothing."""
    start_id: str = ""
    seen: tuple[str, ...] = ()
    clean_exit_start_id: str = ""
    """The newest start that ended with exit 0 and no known target. ``clean_exit_step``: the highest step until then."""
    clean_exit_step: int | None = None
    about: tuple[str, str] = ("", "")
    """(run_id and layout, GPUs configured)."""

    @property
    def median_step_seconds(self) -> float | None:
        return median(self.step_seconds) if self.step_seconds else None

    @property
    def median_gap_seconds(self) -> float | None:
        return median(self.gap_seconds) if self.gap_seconds else None

    @property
    def median_save_seconds(self) -> float | None:
        return median(self.save_seconds) if self.save_seconds else None

    @property
    def median_save_gap_seconds(self) -> float | None:
        return median(self.save_gaps) if self.save_gaps else None

    @property
    def startup_seconds(self) -> float | None:
        """The usual time from a start to its first step."""
        return median(self.startups) if self.startups else None

    @property
    def baselines(self) -> Mapping[int, int]:
        """By NVML index: the baseline in bytes."""
        return dict(self.gpu_baseline_bytes)

    @property
    def observations(self) -> Mapping[str, int]:
        """The observations behind each value: ``step``, ``startup``, ``save``, ``save interval``, ``gpu0``."""
        return {
            "step": len(self.step_seconds),
            "startup": len(self.startups),
            "save": len(self.save_seconds),
            "save interval": len(self.save_gaps),
            **{f"gpu{index}": count for index, count in self.gpu_windows},
        }

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of the inference servers that were healthy during the start ``start_id``."""
        return tuple(name.removeprefix("health:") for name in self.seen if name.startswith("health:"))

    def baseline(self, index: int) -> int | None:
        return next((value for i, value in self.gpu_baseline_bytes if i == index), None)

    def windows(self, index: int) -> int:
        return next((value for i, value in self.gpu_windows if i == index), 0)

    def with_baseline(self, index: int, value: int) -> "Learned":
        if self.baseline(index) == value:
            return self
        merged = dict(self.gpu_baseline_bytes) | {index: value}
        return replace(self, gpu_baseline_bytes=tuple(sorted(merged.items())))

    def with_window(self, index: int) -> "Learned":
        merged = dict(self.gpu_windows) | {index: self.windows(index) + 1}
        return replace(self, gpu_windows=tuple(sorted(merged.items())))

    def saw(self, *names: str) -> "Learned":
        new = {name for name in names if name not in self.seen}
        return replace(self, seen=tuple(sorted({*self.seen, *new}))) if new else self

    def with_interval(self, step_seconds: float, gap_seconds: float | None) -> "Learned":
        """``gap_seconds``: between two signs of progress; None: pings come between the steps that are seen."""
        gaps = self.gap_seconds if gap_seconds is None else (*self.gap_seconds, gap_seconds)[-STEPS_KEPT:]
        return replace(self, step_seconds=(*self.step_seconds, step_seconds)[-STEPS_KEPT:], gap_seconds=gaps)

    def with_save(self, seconds: float) -> "Learned":
        return replace(self, save_seconds=(*self.save_seconds, seconds)[-SAVES_KEPT:])

    def with_save_gap(self, seconds: float) -> "Learned":
        return replace(self, save_gaps=(*self.save_gaps, seconds)[-SAVES_KEPT:])

    def with_startup(self, seconds: float) -> "Learned":
        return replace(self, startups=(*self.startups, seconds)[-STARTS_KEPT:])

    def for_run(self, run: str, gpus: str) -> "Learned":
        """The part that is valid for ``run`` (run_id and layout) on ``gpus`` (as configured).

        For another run: nothing. For other GPUs: only the clean exits, because times and sizes depend on the hardware.
        Another lineage (a step back, a fresh start) is the same program on the same machine and keeps everything.
        """
        about = (run, gpus)
        if self.about in (about, ("", "")):
            return self if self.about == about else replace(self, about=about)
        if self.about[0] != run:
            return Learned(about=about)
        return Learned(clean_exit_start_id=self.clean_exit_start_id, clean_exit_step=self.clean_exit_step, about=about)

    def to_dict(self) -> dict[str, object]:
        return {
            "gpu_baseline_bytes": [list(pair) for pair in self.gpu_baseline_bytes],
            "gpu_windows": [list(pair) for pair in self.gpu_windows],
            "step_seconds": list(self.step_seconds),
            "gap_seconds": list(self.gap_seconds),
            "save_seconds": list(self.save_seconds),
            "save_gaps": list(self.save_gaps),
            "startups": list(self.startups),
            "utilization_works": self.utilization_works,
            "start_id": self.start_id,
            "seen": list(self.seen),
            "clean_exit_start_id": self.clean_exit_start_id,
            "clean_exit_step": self.clean_exit_step,
            "about": list(self.about),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> "Learned":
        """The inverse of ``to_dict``. Unreadable data is dropped: learning it again only delays a verdict."""
        try:
            exit_step = data.get("clean_exit_step")
            about = [str(part) for part in _rows(data.get("about"))]
            # The first version stored only the last start-up, as "startup_seconds".
            startups = data.get("startups", [s for s in [data.get("startup_seconds")] if s is not None])
            return cls(
                gpu_baseline_bytes=tuple((int(i), int(b)) for i, b in _rows(data.get("gpu_baseline_bytes"))),
                gpu_windows=tuple((int(i), int(n)) for i, n in _rows(data.get("gpu_windows"))),
                step_seconds=_seconds(data.get("step_seconds"), STEPS_KEPT),
                gap_seconds=_seconds(data.get("gap_seconds"), STEPS_KEPT),
                save_seconds=_seconds(data.get("save_seconds"), SAVES_KEPT),
                save_gaps=_seconds(data.get("save_gaps"), SAVES_KEPT),
                startups=_seconds(startups, STARTS_KEPT),
                utilization_works=data.get("utilization_works") is True,
                start_id=str(data.get("start_id", "")),
                seen=tuple(str(s) for s in _rows(data.get("seen"))),
                clean_exit_start_id=str(data.get("clean_exit_start_id", "")),
                clean_exit_step=exit_step if isinstance(exit_step, int) else None,
                about=(about[0], about[1]) if len(about) == 2 else ("", ""),
            )
        except (TypeError, ValueError):
            return cls()


def _seconds(value: object, kept: int) -> tuple[float, ...]:
    return tuple(float(s) for s in _rows(value))[-kept:]


def _rows(value: object) -> list[Any]:
    """``value`` as a list. Raises TypeError; the caller converts each row and catches errors."""
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise TypeError("not a list")
    return list(value)
