"""What the run costs, as the status and the heartbeat have it (docs/runs.md). Pure."""

from dataclasses import dataclass

from podwatch.domain.document import At, Document, Label, Size, Text, Whole


@dataclass(frozen=True, slots=True)
class LossDocument(Document):
    """What failures have cost."""

    without_training_seconds: Size
    lost_training_seconds: Size | None
    """steps_lost times the time of a step; null if one of them is unknown."""
    steps_lost: Whole | None
    money: Size | None
    currency: Text


@dataclass(frozen=True, slots=True)
class Finish(Document):
    """Seconds to the target step, saves included: without another failure, and with failures as so far."""

    low: Size
    high: Size


@dataclass(frozen=True, slots=True)
class MoneyDocument(Document):
    """Amounts are null without [cost] per_hour."""

    per_hour: Size | None = None
    currency: Label = ""
    so_far: Size | None = None
    lost: Size | None = None
    at_end: Size | None = None


@dataclass(frozen=True, slots=True)
class CauseDocument(LossDocument):
    cause: Text
    """Kind of the incident; down: no training, and no incident is open."""
    times: Whole


@dataclass(frozen=True, slots=True)
class AccountTotals(Document):
    """What the run costs (docs/runs.md)."""

    since: At = None
    total_seconds: Size = 0.0
    """That podwatch guarded the run, on all its pods."""
    goodput_ratio: Size | None = None
    """1 - lost_seconds / total_seconds; null before the time of a step is known."""
    failures: Whole | None = None
    lost_seconds: Size | None = None
    """By failures: time without training, and training that was lost; null if that is unknown."""
    steps_lost: Whole | None = None
    finish_seconds: Finish | None = None
    """Time to the target step; null while target, step or pace is unknown."""
    money: MoneyDocument = MoneyDocument()


@dataclass(frozen=True, slots=True)
class AccountDocument(AccountTotals):
    causes: tuple[CauseDocument, ...] = ()
    """Of this pod."""
