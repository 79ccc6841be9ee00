"""What a second writer in output_dir means for checkpoints and progress samples. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.document import Real, Text
from podwatch.domain.snapshot import ProgressSample

# Two trainers in one output_dir mix their checkpoints. A span is a period with a second writer, from its start (or the
# last look without it) to the first look without it again: rather too long than too short.

SPANS_KEPT = 32
"""Older spans concern only checkpoints that were moved away or judged long ago."""


@dataclass(frozen=True, slots=True)
class Span:
    """``end`` is None while the second writer is present. ``who`` names it in messages."""

    start: Real
    end: Real | None = None
    who: Text = ""

    def meets(self, start: float, end: float) -> bool:
        return self.start <= end and (self.end is None or self.end >= start)


def follow(spans: tuple[Span, ...], present_since: float | None, who: str, now: float) -> tuple[Span, ...]:
    """The spans after one look. ``present_since``: since when a second writer is present; None if there is none."""
    last = spans[-1] if spans and spans[-1].end is None else None
    if present_since is None:
        return (*spans[:-1], replace(last, end=now)) if last is not None else spans
    if last is None:
        return (*spans, Span(present_since, None, who))[-SPANS_KEPT:]
    start = min(last.start, present_since)
    return spans if (start, who) == (last.start, last.who) else (*spans[:-1], Span(start, None, who))


def why_held(found: CheckpointSet, spans: Sequence[Span]) -> str:
    """Why this checkpoint is in doubt: at least part of it was written while two trainers ran. Empty if it is not."""
    began = found.began_wall or found.changed_wall
    met = next((s for s in spans if s.meets(began, found.changed_wall)), None)
    return f"written while a second trainer was running ({met.who})" if met is not None else ""


@dataclass(frozen=True, slots=True)
class Beside:
    """Other processes that may write into output_dir. ``looked_at``: the last look; ``spans``: when there were any;
    monotonic seconds. The default means that no other process can exist."""

    looked_at: float = float("inf")
    spans: tuple[Span, ...] = ()


ALONE = Beside()


def made_by_us(sample: ProgressSample, beside: Beside) -> bool | None:
    """Whether podwatch's own trainer made this progress sample. True for the log that its supervisor writes; for a file
    or another log only if no other process existed at that time. None: unknown until the next look at the processes."""
    if sample.own:
        return True
    if any(span.meets(sample.at, sample.at) for span in beside.spans):
        return False
    return True if beside.looked_at >= sample.at else None
