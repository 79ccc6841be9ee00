"""Progress since the trainer was started, and the step time learned from it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from podwatch.config.settings import Policies
from podwatch.detection.learned import Learned
from podwatch.domain.snapshot import ProgressSample, ProgressSource, Reading, is_training

WATCHED_SECONDS = 120.0
"""A start first seen within this time was watched from its beginning."""
SAME_INSTANT_SECONDS = 0.05
"""Two step numbers this close are one write seen twice; nothing is learned from them."""

BELOW = 2
SAVE_FLOOR_SECONDS = 3600.0
"""Time allowed for a save before any was measured: 47 GB onto a network volume at 15 MB/s take 52 minutes."""
SAVE_K = 3.0
"""Time allowed for a save, as a multiple of the longest one seen. A save that hangs must not hide a hang forever."""

_RANK = {ProgressSource.STEP_LINE: 0, ProgressSource.MARKER: 1, ProgressSource.CHECKPOINT: 2}


@dataclass(frozen=True, slots=True)
class Fall:
    """Two steps in a row were below the highest one of their source (a single one can be an odd line). ``since``: the
    first of them; ``top_at``: when the highest was shown."""

    top: int
    top_at: float
    step: int
    since: float


@dataclass(frozen=True, slots=True)
class Stream:
    """The newest number of one source, and whether its numbers went back."""

    source: ProgressSource
    role: str
    step: int
    at: float
    top: int = 0
    """The highest step that it showed before it went back, and when; while it goes back, ``below`` samples were
    lower."""
    top_at: float = 0.0
    below: int = 0
    fell_at: float = 0.0
    fall: Fall | None = None
    """The newest time that it went back."""

    @property
    def trained(self) -> bool:
        return is_training(self.role)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress since ``started_at``. All times are monotonic seconds; ``step`` is the highest number seen.

    ``streams``: every source that shows numbers, also the orchestrator's, whose numbers are no steps of the trainer but
    go back with them."""

    started_at: float | None = None
    streams: tuple[Stream, ...] = ()
    step: int | None = None
    first_at: float | None = None
    """When the first step number of this start was seen."""
    numbered_at: float | None = None
    ping_at: float | None = None
    saving_at: float | None = None
    """Newest moment at which a checkpoint was being written, within the time allowed for a save."""
    saving_since: float | None = None
    """When the save in flight was first seen."""
    save_whole: bool = False
    """That save was seen from its beginning, so its length can be learned."""
    looked: bool = False
    """A turn without a save in flight was seen."""
    watched: bool = False
    """This start was watched from its beginning, so the moment of its first step will be known."""
    lost_seconds: float = 0.0
    """Seconds since the newest progress (or the start) in which podwatch observed nothing: a pod that was frozen made
    no step and is not hung."""
    taken: tuple[ProgressSample, ...] | None = None
    """The newest reading already processed."""

    @property
    def newest_at(self) -> float | None:
        """The newest progress. A ping counts only while no source but checkpoints shows steps, because any process can
        send one."""
        if self.numbered_at is None or self.ping_at is None or self.steps_between_saves:
            return self.numbered_at if self.numbered_at is not None else self.ping_at
        return max(self.numbered_at, self.ping_at)

    @property
    def steps_between_saves(self) -> bool:
        return any(s.trained and s.source is not ProgressSource.CHECKPOINT for s in self.streams)

    @property
    def fallen(self) -> Stream | None:
        """The source that went back last; None if none did."""
        return max((s for s in self.streams if s.fall is not None), key=lambda s: s.fell_at, default=None)

    @property
    def active_at(self) -> float | None:
        """The newest progress or save in flight."""
        newest = self.newest_at
        if newest is None:
            return None
        if self.saving_at is not None:
            newest = max(newest, self.saving_at)
        return newest + self.lost_seconds

    @property
    def awaited_since(self) -> float | None:
        """Since when podwatch waits for the first step."""
        return None if self.started_at is None else self.started_at + self.lost_seconds


def save_limit(learned: Learned) -> float:
    """Seconds after which a save in flight no longer explains missing progress."""
    return max(SAVE_FLOOR_SECONDS, SAVE_K * max(learned.save_seconds, default=0.0))


def target_reached(progress: Progress, policies: Policies) -> bool:
    """Whether the last step has been made. Trainers that count from 0 show ``max_steps - 1`` last."""
    target = policies.max_steps
    return target is not None and progress.step is not None and progress.step >= target - 1


def follow(
    progress: Progress,
    reading: Reading[tuple[ProgressSample, ...]],
    *,
    at: float,
    saving: bool,
    learned: Learned,
) -> tuple[Progress, Learned]:
    """Process one reading. Samples from before the start and unchanged step numbers are not progress."""
    if saving or progress.saving_since is not None or not progress.looked:
        progress, learned = _follow_save(progress, at, saving, learned)
    if not reading.ok or reading.value is None or reading.value is progress.taken:
        return progress, learned
    before = progress.newest_at
    for sample in _since_start(reading.value, progress.started_at):
        progress, learned = _take(progress, sample, learned)
    lost = progress.lost_seconds if progress.newest_at == before else 0.0
    return replace(progress, taken=reading.value, lost_seconds=lost), learned


def _follow_save(progress: Progress, at: float, saving: bool, learned: Learned) -> tuple[Progress, Learned]:
    if saving:
        since = at if progress.saving_since is None else progress.saving_since
        whole = progress.looked if progress.saving_since is None else progress.save_whole
        excused = at if at - since <= save_limit(learned) else progress.saving_at
        return replace(progress, saving_since=since, save_whole=whole, saving_at=excused), learned
    if progress.saving_since is not None and progress.save_whole:
        learned = learned.with_save(at - progress.saving_since)
    return replace(progress, saving_since=None, save_whole=False, looked=True), learned


def _since_start(samples: Iterable[ProgressSample], started_at: float | None) -> list[ProgressSample]:
    found = [s for s in samples if started_at is None or s.at >= started_at]
    return found if len(found) < 2 else sorted(found, key=lambda s: s.at)


def _take(progress: Progress, sample: ProgressSample, learned: Learned) -> tuple[Progress, Learned]:
    if not sample.trained:
        progress = replace(progress, ping_at=max(progress.ping_at or sample.at, sample.at))
    if sample.step is None:
        return progress, learned
    old = next((s for s in progress.streams if (s.source, s.role) == (sample.source, sample.role)), None)
    # A lower number counts too: a trainer that went back to an older step still makes progress.
    if old is not None and (sample.step == old.step or sample.at <= old.at):
        return progress, learned
    new = _stream(old, sample, sample.step)
    streams = (*(s for s in progress.streams if s is not old), new)
    progress = replace(progress, streams=tuple(sorted(streams, key=lambda s: (s.source, s.role))))
    if not sample.trained:
        return progress, learned
    if old is not None and new.step > old.step and _leads(new, streams):
        gap = new.at - old.at
        if gap > SAME_INSTANT_SECONDS:
            between_pings = new.source is ProgressSource.CHECKPOINT and progress.ping_at is not None
            learned = learned.with_interval(gap / (new.step - old.step), None if between_pings else gap)
    if progress.first_at is None and progress.started_at is not None and progress.watched:
        # A podwatch that started later sees a later step first and learns no start-up time from it.
        learned = learned.with_startup(sample.at - progress.started_at)
    return (
        replace(
            progress,
            step=max(progress.step if progress.step is not None else sample.step, sample.step),
            first_at=progress.first_at if progress.first_at is not None else sample.at,
            numbered_at=max(progress.numbered_at or sample.at, sample.at),
        ),
        learned,
    )


def _stream(old: Stream | None, sample: ProgressSample, step: int) -> Stream:
    """The source after this sample. It goes back while its steps are below the highest that it has shown."""
    if old is None:
        return Stream(sample.source, sample.role, step, sample.at, step, sample.at)
    if step >= old.top:
        return replace(old, step=step, at=sample.at, top=step, top_at=sample.at, below=0)
    fell_at = sample.at if not old.below else old.fell_at
    below = old.below + 1
    fall = Fall(old.top, old.top_at, step, fell_at) if below == BELOW else old.fall
    return replace(old, step=step, at=sample.at, below=below, fell_at=fell_at, fall=fall)


def _leads(stream: Stream, streams: Iterable[Stream]) -> bool:
    """Whether intervals are learned from this stream: the trainer's own, then step lines, markers, checkpoints."""
    best = min((s for s in streams if s.trained), key=lambda s: (s.role != "trainer", _RANK.get(s.source, 9), s.role))
    return (best.source, best.role) == (stream.source, stream.role)
