"""One attempt to train: what podwatch observed since its start, for confirmation and for the decision after a
failure."""

from dataclasses import dataclass, field

from podwatch.domain.snapshot import ProgressSample, ProgressSource, Snapshot
from podwatch.policy.other_trainers import ALONE, Beside, made_by_us
from podwatch.policy.restart import Confirmation, confirm

MAX_SAMPLES = 64
LOADED_ABOVE_BASE = 2 << 30
"""Bytes. A bare CUDA context is 0.3-0.7 GiB; a process with 2 GiB has loaded something."""


@dataclass
class Attempt:
    """``started_at`` is monotonic. ``resumed_from`` is None for a fresh start; ``known`` is false for an
    attached trainer: podwatch does not know which checkpoint it started from."""

    start_id: str
    started_at: float
    resumed_from: int | None = None
    first_step: int | None = None
    known: bool = True
    incident_id: int | None = None
    step_at_death: int | None = None
    """Highest step seen before the start; lost steps are counted from it."""
    lost_seconds: float | None = None
    """Seconds of training between the checkpoint that this start was made from and the failure before it. Measured
    before the start, which can write into that checkpoint again."""
    steps_read: bool = False
    """A source other than checkpoints has shown steps, so the steps lost at a failure are known."""
    made_step: bool = False
    loaded: bool = False
    last_step: int | None = None
    samples: list[ProgressSample] = field(default_factory=list)
    unproven: list[ProgressSample] = field(default_factory=list)
    """Samples that are not yet proved to come from this start's own process tree."""

    def see(self, snapshot: Snapshot, gpu_base: dict[int, int], gpus: tuple[int, ...], beside: Beside = ALONE) -> bool:
        """Add one snapshot; return True when it shows a new step. A save, or a number in a file, that another process
        may have written (``beside``) is neither a step nor a confirmation."""
        for gpu in (snapshot.gpus.value or ()) if snapshot.gpus.at >= self.started_at else ():
            used = gpu.memory_used_bytes or 0
            if (not gpus or gpu.index in gpus) and used - gpu_base.get(gpu.index, 0) > LOADED_ABOVE_BASE:
                self.loaded = True
        fresh = False
        for sample in snapshot.progress.value or ():
            if sample.step is None or not sample.trained or sample.at < self.started_at:
                continue
            if sample not in self.samples and sample not in self.unproven:
                self.unproven.append(sample)
        waiting, self.unproven = self.unproven[-MAX_SAMPLES:], []
        for sample in waiting:
            made = made_by_us(sample, beside)
            if made is None:
                self.unproven.append(sample)
            if not made or sample.step is None:
                continue
            self.samples.append(sample)
            self.steps_read = self.steps_read or sample.source is not ProgressSource.CHECKPOINT
            if self.last_step is None or sample.step > self.last_step:
                # The first number seen of an attached trainer is its current step, not a step it made.
                fresh = fresh or self._is_new(sample.step)
                self.last_step = sample.step
        del self.samples[:-MAX_SAMPLES]
        self.made_step = self.made_step or fresh
        return fresh

    def _is_new(self, step: int) -> bool:
        if not self.known:
            return self.last_step is not None
        lowest = self.first_step if self.first_step is not None else self.resumed_from
        return lowest is None or step >= lowest

    def confirmation(self, now: float, patience: float) -> Confirmation:
        return confirm(self.resumed_from, self.first_step, self.samples, self.started_at, now, patience)
