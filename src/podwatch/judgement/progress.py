"""Signs of progress since the trainer was started, and the step time learned from them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from podwatch.domain.reading import Reading
from podwatch.domain.snapshot import ProgressSample, ProgressSource
from podwatch.judgement.learned import Learned

SAME_INSTANT_SECONDS = 0.05
"""Two numbers this close are one write seen twice; nothing is learned from them."""

_RANK = {ProgressSource.STEP_LINE: 0, ProgressSource.MARKER: 1, ProgressSource.CHECKPOINT: 2}


@dataclass(frozen=True, slots=True)
class Stream:
    source: ProgressSource
    role: str
    step: int
    at: float


@dataclass(frozen=True, slots=True)
class Progress:
    """What was seen since ``started_at``. All times are monotonic seconds; ``step`` is the highest number seen."""

    started_at: float | None = None
    streams: tuple[Stream, ...] = ()
    step: int | None = None
    first_at: float | None = None
    """When the first numbered sign of this start was seen."""
    numbered_at: float | None = None
    ping_at: float | None = None
    saving_at: float | None = None
    """Newest moment at which a checkpoint was being written."""

    @property
    def newest_at(self) -> float | None:
        """The newest sign. A ping counts only where no numbered source exists: anybody can send one."""
        return self.numbered_at if self.numbered_at is not None else self.ping_at

    @property
    def made_step(self) -> bool:
        return self.numbered_at is not None

    @property
    def active_at(self) -> float | None:
        """The newest sign of progress or of a save in flight."""
        times = [t for t in (self.newest_at, self.saving_at) if t is not None]
        return max(times) if self.newest_at is not None else None


def follow(
    progress: Progress,
    reading: Reading[tuple[ProgressSample, ...]],
    *,
    at: float,
    saving: bool,
    learned: Learned,
) -> tuple[Progress, Learned]:
    """Take one reading in. Samples from before the start, and numbers that do not change, are not progress."""
    if saving:
        progress = replace(progress, saving_at=at)
    if not reading.ok or reading.value is None:
        return progress, learned
    for sample in _since_start(reading.value, progress.started_at):
        progress, learned = _take(progress, sample, learned)
    return progress, learned


def _since_start(samples: Iterable[ProgressSample], started_at: float | None) -> list[ProgressSample]:
    return sorted((s for s in samples if started_at is None or s.at >= started_at), key=lambda s: s.at)


def _take(progress: Progress, sample: ProgressSample, learned: Learned) -> tuple[Progress, Learned]:
    if not sample.trained or sample.step is None:
        return replace(progress, ping_at=max(progress.ping_at or sample.at, sample.at)), learned
    old = next((s for s in progress.streams if (s.source, s.role) == (sample.source, sample.role)), None)
    # A lower number is taken too (a trainer that goes back by itself makes progress of its own kind).
    if old is not None and (sample.step == old.step or sample.at <= old.at):
        return progress, learned
    new = Stream(sample.source, sample.role, sample.step, sample.at)
    streams = (*(s for s in progress.streams if s is not old), new)
    if old is not None and new.step > old.step and _leads(new, streams):
        gap = new.at - old.at
        if gap > SAME_INSTANT_SECONDS:
            learned = learned.with_interval(gap / (new.step - old.step), gap)
    if progress.first_at is None and progress.started_at is not None:
        learned = replace(learned, startup_seconds=sample.at - progress.started_at)
    return (
        replace(
            progress,
            streams=tuple(sorted(streams, key=lambda s: (s.source, s.role))),
            step=max(progress.step if progress.step is not None else sample.step, sample.step),
            first_at=progress.first_at if progress.first_at is not None else sample.at,
            numbered_at=max(progress.numbered_at or sample.at, sample.at),
        ),
        learned,
    )


def _leads(stream: Stream, streams: Iterable[Stream]) -> bool:
    """Intervals are learned from one stream only: the trainer's own, then step lines, markers, checkpoints."""
    best = min(streams, key=lambda s: (s.role != "trainer", _RANK.get(s.source, 9), s.role))
    return (best.source, best.role) == (stream.source, stream.role)
