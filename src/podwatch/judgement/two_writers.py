"""Two trainers that write into one output_dir mix their checkpoints: which saves are in doubt, and whose save it is.

Pure. A span is a time in which a second writer was there, from its start (or the last look that did not see it) to the
first look that does not see it any more: longer than the truth rather than shorter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.snapshot import ProgressSample

SPANS_KEPT = 32
"""Older ones only concern checkpoints that were moved away, or decided about, long ago."""


@dataclass(frozen=True, slots=True)
class Span:
    """``end`` is None while the other one is still there. ``who`` names it for people."""

    start: float
    end: float | None = None
    who: str = ""

    def meets(self, start: float, end: float) -> bool:
        return self.start <= end and (self.end is None or self.end >= start)


def follow(spans: tuple[Span, ...], present_since: float | None, who: str, now: float) -> tuple[Span, ...]:
    """After one look. ``present_since``: since when another one is there, None if none is."""
    last = spans[-1] if spans and spans[-1].end is None else None
    if present_since is None:
        return (*spans[:-1], replace(last, end=now)) if last is not None else spans
    if last is None:
        return (*spans, Span(present_since, None, who))[-SPANS_KEPT:]
    start = min(last.start, present_since)
    return spans if (start, who) == (last.start, last.who) else (*spans[:-1], Span(start, None, who))


def why_held(found: CheckpointSet, spans: Sequence[Span]) -> str:
    """Why this set is in doubt: it was written, in part or in whole, while two trainers were there. Empty if not."""
    began = found.began_wall or found.changed_wall
    met = next((s for s in spans if s.meets(began, found.changed_wall)), None)
    return f"written while a second trainer was running ({met.who})" if met is not None else ""


@dataclass(frozen=True, slots=True)
class Beside:
    """What is known of processes beside ours that may write into output_dir. ``looked_at``: the last look, ``spans``
    when there were any; monotonic seconds. The default says that no other process can be there."""

    looked_at: float = float("inf")
    spans: tuple[Span, ...] = ()


ALONE = Beside()


def made_by_us(sample: ProgressSample, beside: Beside) -> bool | None:
    """Is this sign of progress our own trainer's? What our own log says is; a file or another log only if no other
    process was there when it was written. None: a look at the processes that is newer than the sample has to tell."""
    if sample.own:
        return True
    if any(span.meets(sample.at, sample.at) for span in beside.spans):
        return False
    return True if beside.looked_at >= sample.at else None
