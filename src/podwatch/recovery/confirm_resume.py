"""Whether training that was started again continues at the step it was resumed from. Pure.

Only a *step number* of the trainer itself, written
after this start, counts. A heartbeat has no number, and the orchestrator numbers its batches ahead of the trainer:
neither is evidence for or against a correct resume.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from podwatch.domain.snapshot import ProgressSample

SAME_SIGHTING_SECONDS = 1.0
"""The same step number within this time is the same sighting, read twice."""


class ConfirmationState(StrEnum):
    PENDING = "pending"
    CONFIRMED = "confirmed"
    RESUMED_WRONG = "resumed-wrong"
    UNCONFIRMED = "unconfirmed"
    """``patience`` ended without a usable number: podwatch deletes nothing locally before the next save."""


@dataclass(frozen=True, slots=True)
class Confirmation:
    """``step`` and ``sources`` (``role/source``) are what was seen."""

    state: ConfirmationState
    step: int | None = None
    sources: tuple[str, ...] = ()


def confirm(
    resumed_from: int | None,
    first_step_after: int | None,
    samples: Sequence[ProgressSample],
    started_at: float,
    now: float,
    patience: float,
) -> Confirmation:
    """Judge a start.

    ``resumed_from``: the step passed to the trainer (None: a fresh start, which any number confirms).
    ``first_step_after``: the lowest number that a correct resume can show (``Layout.first_step_after``). ``samples``:
    all progress samples since the start, not only the newest of each source; the same sample given twice counts once.
    ``started_at``, ``now`` and ``at`` of the samples are monotonic seconds, ``patience`` is seconds.

    A lower number must be seen twice, or by two sources: a single one can be a log line of an earlier attempt that was
    read again. It is judged first, because a run that resumed too low reaches the expected number later.
    """
    after = _distinct(s for s in samples if s.trained and s.at >= started_at)
    lowest = first_step_after if first_step_after is not None else resumed_from
    low = [s for s in after if lowest is not None and s.step is not None and s.step < lowest]
    if len(low) >= 2:
        return Confirmation(ConfirmationState.RESUMED_WRONG, low[-1].step, _names(low))
    good = [s for s in after if s not in low]
    if good:
        return Confirmation(ConfirmationState.CONFIRMED, good[0].step, _names(good[:1]))
    if now - started_at >= patience:
        return Confirmation(ConfirmationState.UNCONFIRMED, low[-1].step if low else None, _names(low))
    return Confirmation(ConfirmationState.PENDING, low[-1].step if low else None, _names(low))


def _distinct(samples: Iterable[ProgressSample]) -> list[ProgressSample]:
    """Oldest first, without repeats. ``at`` varies slightly when a file's time is converted to monotonic seconds."""
    kept: list[ProgressSample] = []
    for sample in sorted(samples, key=lambda s: (s.at, s.source, s.role)):
        same = (k for k in kept if (k.source, k.role, k.step) == (sample.source, sample.role, sample.step))
        if not any(abs(k.at - sample.at) < SAME_SIGHTING_SECONDS for k in same):
            kept.append(sample)
    return kept


def _names(samples: Sequence[ProgressSample]) -> tuple[str, ...]:
    return tuple(sorted({f"{s.role}/{s.source}" for s in samples}))
