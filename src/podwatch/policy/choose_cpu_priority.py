"""The CPU priority of the upload process (docs/sync.md). Pure.

It is the lowest while the backup keeps pace, and higher while it is behind. On a pod whose cores are all busy, an
upload at the lowest priority makes little progress (measured: 268 MB in 76 s, at ordinary priority 2 s). A higher
priority helps only if the upload waits for a CPU, so podwatch raises it only if there is a need and the child's threads
wait for a CPU. A slow uplink is no reason to take CPU time from training. ``step`` is called every few seconds while an
upload runs; times are monotonic seconds, rates bytes per second.
"""

from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum


class Level(IntEnum):
    """How the upload competes with everything else on the pod."""

    LOWEST = 0
    RAISED = 1
    ORDINARY = 2

    @property
    def word(self) -> str:
        return self.name.lower()


class Need(StrEnum):
    """Why the upload is behind. The values are shown to the operator."""

    FIRST = "no checkpoint of this run is in the store yet"
    SLOW = "the upload is slower than the uplink was before"
    LATE = "the upload will not finish before the next save"
    NEWER = "a newer checkpoint is waiting for upload"
    RISK = "more and more steps are not in the store"
    DISK = "the disk needs the space of checkpoints that are not in the store"
    OVER = "training has ended, and nothing else of this run needs the CPU"


_UP_TO = {Need.FIRST: Level.RAISED, Need.SLOW: Level.RAISED}
"""Needs that cost nothing yet justify only 10 to 20 % of one core. Every other need justifies ordinary priority."""
_HEAVIEST = (Need.OVER, Need.DISK, Need.NEWER, Need.LATE, Need.RISK, Need.SLOW, Need.FIRST)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, and thresholds in pairs: the first of a pair starts a need, the second ends it."""

    look: float = 3.0
    """Between two looks: long enough to measure a share of time; each costs about 0.3 ms."""
    settle: float = 6.0
    """Between a change and the next raise: two looks that show its effect."""
    patience: float = 60.0
    """One level down after this time without a need."""
    patience_most: float = 3600.0
    """Patience doubles each time a need returns after a lowering, so that a pod that is always busy sees fewer changes;
    at most this."""
    waits: float = 0.2
    waits_no_more: float = 0.05
    """Share of the time that the child's threads wait for a CPU."""
    slow: float = 0.5
    slow_no_more: float = 0.8
    """Share of the rate that the uplink delivered before."""
    late: float = 1.0
    late_no_more: float = 0.7
    """Time that the upload still takes, as a share of the time to the next save."""
    risk: float = 2.0
    """Steps not in the store, in save intervals: one save waiting for its upload is normal, two are not."""
    report: float = 30.0
    """A need and a busy CPU are reported after this time."""


@dataclass(frozen=True, slots=True)
class Look:
    """The state of a running upload at one moment. None: unknown, which is never a need.

    ``rate``: over the last looks; ``usual_rate``: the best of this upload and the ones before. ``cpu_wait``: how long
    the child's threads waited for a CPU since the last look, as a share of that time (0 to 1). ``steps_at_risk``: steps
    that are not in the store. ``partly``: the last raise could not be applied in full to the running child."""

    at: float
    left_bytes: int = 0
    rate: float | None = None
    usual_rate: float | None = None
    cpu_wait: float | None = None
    next_save_in: float | None = None
    newer_waits: bool = False
    nothing_stored: bool = False
    steps_at_risk: int | None = None
    steps_per_save: int | None = None
    disk_waits: bool = False
    training_over: bool = False
    partly: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """The state kept between looks and between uploads."""

    level: Level = Level.LOWEST
    reason: str = ""
    """Why it is at this level; empty at the lowest."""
    changed_at: float = float("-inf")
    calm_since: float | None = None
    """Since when no need justifies this level; None while one does."""
    patience: float = 0.0
    """0: that of ``Timing``."""
    lowered_at: float | None = None
    """The last lowering, if there was no raise since."""
    pressed_since: float | None = None
    """Since when there is a need and the CPU is the cause."""
    eased_since: float | None = None
    needs: tuple[Need, ...] = ()
    """The needs at the last look."""


@dataclass(frozen=True, slots=True)
class Change:
    """``replace``: the priority of the running child cannot be raised further, so a new child must replace it."""

    before: Level
    level: Level
    reason: str
    replace: bool = False


@dataclass(frozen=True, slots=True)
class Judged:
    standing: Standing
    change: Change | None = field(default=None)


def needs_of(look: Look, timing: Timing, *, keep: bool = False) -> tuple[Need, ...]:
    """The current needs, most urgent first. ``keep``: by the thresholds that end a need, not those that start it."""
    found = set()
    if look.training_over:
        found.add(Need.OVER)
    if look.disk_waits:
        found.add(Need.DISK)
    if look.newer_waits:
        found.add(Need.NEWER)
    if look.rate is not None and look.next_save_in is not None and look.left_bytes > 0:
        share = timing.late_no_more if keep else timing.late
        if look.rate <= 0 or look.left_bytes / look.rate > share * look.next_save_in:
            found.add(Need.LATE)
    at_risk, per_save = look.steps_at_risk, look.steps_per_save
    if at_risk is not None and per_save is not None and per_save > 0 and at_risk >= timing.risk * per_save:
        found.add(Need.RISK)
    slow = timing.slow_no_more if keep else timing.slow
    if look.rate is not None and look.usual_rate is not None and look.rate < slow * look.usual_rate:
        found.add(Need.SLOW)
    if look.nothing_stored:
        found.add(Need.FIRST)
    return tuple(need for need in _HEAVIEST if need in found)


def highest(needs: tuple[Need, ...]) -> Level:
    """The level that these needs justify."""
    return max((_UP_TO.get(need, Level.ORDINARY) for need in needs), default=Level.LOWEST)


def step(standing: Standing, look: Look, timing: Timing) -> Judged:
    """The standing after this look, and the change to apply to the child, if any."""
    needs = needs_of(look, timing)
    held = needs_of(look, timing, keep=True) if standing.level > Level.LOWEST else needs
    waits = look.cpu_wait is not None and look.cpu_wait >= timing.waits
    now = _pressed(replace(standing, needs=held), look.at, bool(held) and waits, timing)
    most = highest(needs)
    helps = look.cpu_wait is None or look.cpu_wait >= timing.waits_no_more
    if highest(held) >= now.level > Level.LOWEST and helps:
        now = replace(now, calm_since=None)
    elif now.level > Level.LOWEST and now.calm_since is None:
        now = replace(now, calm_since=look.at)
    settled = look.at - now.changed_at >= timing.settle
    if waits and settled and (most > now.level or (look.partly and most >= now.level > Level.LOWEST)):
        return _raise(now, look, needs, most, timing)
    return lower(now, look.at, timing)


def lower(standing: Standing, at: float, timing: Timing) -> Judged:
    """One level down if no need justified the current one for long enough."""
    calm = standing.calm_since
    if standing.level is Level.LOWEST or calm is None or at - calm < _patience(standing, timing):
        return Judged(standing)
    level = Level(standing.level - 1)
    reason = f"not needed for {at - calm:.0f} s"
    now = replace(
        standing,
        level=level,
        reason="" if level is Level.LOWEST else standing.reason,
        changed_at=at,
        calm_since=at,
        lowered_at=at,
    )
    return Judged(now, Change(standing.level, level, reason))


def begin(standing: Standing, at: float, timing: Timing) -> Judged:
    """The standing at the start of an upload; the time without an upload counts as calm. ``settle`` does not begin
    again: uploads that are shorter than it would never be raised."""
    now = replace(standing, needs=())
    if standing.level is Level.LOWEST or standing.calm_since is None:
        return Judged(now)
    down = int((at - standing.calm_since) // _patience(standing, timing))
    level = Level(max(Level.LOWEST, standing.level - down))
    if level is standing.level:
        return Judged(now)
    reason = "" if level is Level.LOWEST else standing.reason
    now = replace(now, level=level, reason=reason, changed_at=at, calm_since=at, lowered_at=at)
    return Judged(now, Change(standing.level, level, f"not needed for {at - standing.calm_since:.0f} s"))


def ended(standing: Standing, at: float) -> Standing:
    """The standing after an upload if no other one is pending; the following time counts as calm."""
    calm = at if standing.calm_since is None else standing.calm_since
    return replace(standing, calm_since=calm, pressed_since=None, eased_since=None, needs=())


def slow_because_of_cpu(standing: Standing, at: float, timing: Timing) -> bool:
    """Whether the upload has been slow because of the CPU for long enough to report it."""
    return standing.pressed_since is not None and at - standing.pressed_since >= timing.report


def _pressed(standing: Standing, at: float, pressed: bool, timing: Timing) -> Standing:
    if pressed:
        since = at if standing.pressed_since is None else standing.pressed_since
        return replace(standing, pressed_since=since, eased_since=None)
    if standing.pressed_since is None:
        return standing
    eased = at if standing.eased_since is None else standing.eased_since
    if at - eased >= timing.report:
        return replace(standing, pressed_since=None, eased_since=None)
    return replace(standing, eased_since=eased)


def _raise(standing: Standing, look: Look, needs: tuple[Need, ...], most: Level, timing: Timing) -> Judged:
    level = Level(min(standing.level + 1, most))
    patience = standing.patience
    if standing.lowered_at is not None:
        again = look.at - standing.lowered_at < timing.patience_most
        patience = min(2 * _patience(standing, timing), timing.patience_most) if again else 0.0
    share = 100 * (look.cpu_wait or 0.0)
    reason = f"{needs[0]}; the upload's threads wait for a CPU {share:.0f} % of the time"
    now = replace(
        standing,
        level=level,
        reason=reason,
        changed_at=look.at,
        calm_since=None,
        patience=patience,
        lowered_at=None,
    )
    return Judged(now, Change(standing.level, level, reason, replace=look.partly))


def _patience(standing: Standing, timing: Timing) -> float:
    return standing.patience or timing.patience
