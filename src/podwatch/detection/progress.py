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
"""Steps in a row below the highest one: a single one can be an odd line."""
_RANK = {ProgressSource.STEP_LINE: 0, ProgressSource.MARKER: 1, ProgressSource.CHECKPOINT: 2}


@dataclass(frozen=True, slots=True)
class Fall:
    """Two steps in a row were below the highest one of their source. ``since``: the first of them; ``top_at``: when the
    highest was shown."""

    top: int
    top_at: float
    step: int
    since: float


@dataclass(frozen=True, slots=True)
class Stream:
    """The newest number of one source. ``top``: the highest step that it showed before it went back, and when; while it
    goes back, ``below`` samples were lower. ``fall``: the newest time that it went back."""

    source: ProgressSource
    role: str
    step: int
    at: float
    top: int = 0
    top_at: float = 0.0
    below: int = 0
    fell_at: float = 0.0
    fall: Fall | None = None

    @property
    def trained(self) -> bool:
        return is_training(self.role)

    def show(self, step: int, at: float) -> "Stream":
        """The source after this step. It goes back while its steps are below the highest that it has shown."""
        if step >= self.top:
            return replace(self, step=step, at=at, top=step, top_at=at, below=0)
        fell_at, below = self.fell_at if self.below else at, self.below + 1
        fall = Fall(self.top, self.top_at, step, fell_at) if below == BELOW else self.fall
        return replace(self, step=step, at=at, below=below, fell_at=fell_at, fall=fall)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress since ``started_at``. All times are monotonic seconds; ``step`` is the highest number seen.

    ``streams``: every source that shows numbers, also the orchestrator's, whose numbers are no steps of the trainer but
    go back with them. ``first_at``, ``numbered_at``: the first and the newest step number of this start."""

    started_at: float | None = None
    streams: tuple[Stream, ...] = ()
    step: int | None = None
    first_at: float | None = None
    numbered_at: float | None = None
    ping_at: float | None = None
    saving_at: float | None = None
    """Newest moment at which a checkpoint was being written, within the time allowed for a save."""
    saving_since: float | None = None
    """When the save in flight was first seen. ``save_whole``: from its beginning, so its length can be learned."""
    save_whole: bool = False
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
        shown = any(s.trained and s.source is not ProgressSource.CHECKPOINT for s in self.streams)
        times = (self.numbered_at, None if shown else self.ping_at)
        return max((at for at in times if at is not None), default=None)

    @property
    def fallen(self) -> Stream | None:
        """The source that went back last; None if none did."""
        return max((s for s in self.streams if s.fall is not None), key=lambda s: s.fell_at, default=None)

    @property
    def active_at(self) -> float | None:
        """The newest progress or save in flight."""
        newest = self.newest_at
        return None if newest is None else max(newest, self.saving_at or newest) + self.lost_seconds

    @property
    def awaited_since(self) -> float | None:
        """Since when podwatch waits for the first step."""
        return None if self.started_at is None else self.started_at + self.lost_seconds


def save_limit(learned: Learned) -> float:
    """Seconds after which a save in flight no longer explains missing progress: one that hangs must not hide a hang
    forever. Before one was measured an hour: 47 GB onto a network volume at 15 MB/s take 52 minutes."""
    return max(3600.0, 3.0 * max(learned.save_seconds, default=0.0))


def target_reached(progress: Progress, policies: Policies) -> bool:
    """Whether the last step has been made. Trainers that count from 0 show ``max_steps - 1`` last."""
    target = policies.max_steps
    return target is not None and progress.step is not None and progress.step >= target - 1


def follow(
    progress: Progress, reading: Reading[tuple[ProgressSample, ...]], *, at: float, saving: bool, learned: Learned
) -> tuple[Progress, Learned]:
    """Process one reading. Samples from before the start and unchanged step numbers are not progress."""
    progress, learned = _follow_save(progress, at, saving, learned)
    if not reading.ok or reading.value is None or reading.value is progress.taken:
        return progress, learned
    before, started = progress.newest_at, progress.started_at
    for sample in sorted(reading.value, key=lambda s: s.at):
        if started is None or sample.at >= started:
            progress, learned = _take(progress, sample, learned)
    lost = progress.lost_seconds if progress.newest_at == before else 0.0
    return replace(progress, taken=reading.value, lost_seconds=lost), learned


def _follow_save(progress: Progress, at: float, saving: bool, learned: Learned) -> tuple[Progress, Learned]:
    since = progress.saving_since
    if saving and since is None:
        progress = replace(progress, saving_since=at, save_whole=progress.looked)
    if saving:
        excused = at - (at if since is None else since) <= save_limit(learned)
        return replace(progress, saving_at=at) if excused else progress, learned
    if since is not None and progress.save_whole:
        learned = learned.add(save_seconds=at - since)
    return progress if since is None and progress.looked else replace(progress, saving_since=None, looked=True), learned


def _take(progress: Progress, sample: ProgressSample, learned: Learned) -> tuple[Progress, Learned]:
    if not sample.trained:
        progress = replace(progress, ping_at=max(progress.ping_at or sample.at, sample.at))
    if sample.step is None:
        return progress, learned
    old = next((s for s in progress.streams if (s.source, s.role) == (sample.source, sample.role)), None)
    # A lower number counts too: a trainer that went back to an older step still makes progress.
    if old is not None and (sample.step == old.step or sample.at <= old.at):
        return progress, learned
    new = (old or Stream(sample.source, sample.role, 0, 0.0)).show(sample.step, sample.at)
    streams = (*(s for s in progress.streams if s is not old), new)
    progress = replace(progress, streams=tuple(sorted(streams, key=lambda s: (s.source, s.role))))
    if not sample.trained:
        return progress, learned
    if old is not None and new.step > old.step and new.at - old.at > SAME_INSTANT_SECONDS and _leads(new, streams):
        gap = new.at - old.at
        learned = learned.add(step_seconds=gap / (new.step - old.step))
        if new.source is not ProgressSource.CHECKPOINT or progress.ping_at is None:  # pings come between saves
            learned = learned.add(gap_seconds=gap)
    if progress.first_at is None:
        progress = replace(progress, first_at=sample.at)
        if progress.started_at is not None and progress.watched:
            # A podwatch that started later sees a later step first and learns no start-up time from it.
            learned = learned.add(startups=sample.at - progress.started_at)
    step = sample.step if progress.step is None else max(progress.step, sample.step)
    return replace(progress, step=step, numbered_at=max(progress.numbered_at or sample.at, sample.at)), learned


def _leads(stream: Stream, streams: Iterable[Stream]) -> bool:
    """Whether intervals are learned from this stream: the trainer's own, then step lines, markers, checkpoints."""
    best = min((s for s in streams if s.trained), key=lambda s: (s.role != "trainer", _RANK.get(s.source, 9), s.role))
    return (best.source, best.role) == (stream.source, stream.role)
