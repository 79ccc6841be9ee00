"""Values learned about a run; the journal keeps them across restarts of training and of podwatch."""

from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from podwatch.domain.document import Document, Flag, Integer, Many, Real, Text, Whole

KEPT = {"step_seconds": 64, "gap_seconds": 64, "save_seconds": 16, "save_gaps": 16, "startups": 8}
"""Values in each list. The intervals of some hours of a run with steps of 3 to 5 min, so that their median follows a
changed batch size."""


@dataclass(frozen=True, slots=True)
class Learned(Document):
    """``step_seconds``: seconds per step. ``gap_seconds``: seconds between two progress samples (longer if only
    checkpoints show progress). ``save_seconds``: how long saves took. ``startups``: seconds from a start to its first
    step. All newest last. ``seen`` names the signals that were healthy during start ``start_id``, so that a detector
    stays armed when podwatch itself is restarted. ``about``: the run these were learned from (see ``for_run``).
    """

    FILE = "learned values"

    gpu_baseline_bytes: Many[tuple[Whole, Whole]] = ()
    """By NVML index: the highest sustained memory level while training worked."""
    step_seconds: Many[Real] = ()
    gap_seconds: Many[Real] = ()
    save_seconds: Many[Real] = ()
    save_gaps: Many[Real] = ()
    """Seconds from one complete save to the next."""
    startups: Many[Real] = ()
    utilization_works: Flag = False
    """The GPUs of this run have been seen busy: a device that always reports 0 % proves nothing."""
    start_id: Text = ""
    seen: Many[Text] = ()
    clean_exit_start_id: Text = ""
    """The newest start that ended with exit 0 and no known target. ``clean_exit_step``: the highest step until then."""
    clean_exit_step: Integer | None = None
    about: tuple[Text, Text] = ("", "")
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
    def servers(self) -> tuple[str, ...]:
        """Addresses of the inference servers that were healthy during the start ``start_id``."""
        return tuple(name.removeprefix("health:") for name in self.seen if name.startswith("health:"))

    def baseline(self, index: int) -> int | None:
        return next((value for i, value in self.gpu_baseline_bytes if i == index), None)

    def with_baseline(self, index: int, value: int) -> "Learned":
        merged = dict(self.gpu_baseline_bytes) | {index: value}
        return replace(self, gpu_baseline_bytes=tuple(sorted(merged.items())))

    def saw(self, *names: str) -> "Learned":
        return replace(self, seen=tuple(sorted({*self.seen, *names}))) if set(names) - set(self.seen) else self

    def add(self, **values: float) -> "Learned":
        """Each value becomes the newest of the list that has its name."""
        lists: dict[str, Any] = {name: (*getattr(self, name), v)[-KEPT[name] :] for name, v in values.items()}
        return replace(self, **lists)

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
