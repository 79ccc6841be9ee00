"""A notice: a message sent to the operator. docs/notifications.md describes the document."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from podwatch.domain.finding import Severity
from podwatch.domain.secrets import scrub, scrub_field

NOTICE_SCHEMA_VERSION = 1


class Topic(StrEnum):
    """The topic of a notice; ``[notify] events`` selects among these. Stable names."""

    FINDINGS = "findings"
    """Findings without a topic of their own below, and the end of podwatch after an error of its own."""
    RESTARTS = "restarts"
    GAVE_UP = "gave-up"
    DISK = "disk"
    STORE = "store"
    SUPERSEDED = "superseded"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    TEST = "test"


class Change(StrEnum):
    OPENED = "opened"
    REMINDER = "reminder"
    CLOSED = "closed"
    HAPPENED = "happened"


@dataclass(frozen=True, slots=True)
class Notice:
    """``key`` is the same for the opening, the reminders and the closing of one condition. ``wall``: epoch seconds.

    ``unsent``: how many notices before this one the rate limit dropped. Secrets are removed from its text here.
    """

    topic: Topic
    change: Change
    severity: Severity
    title: str
    text: str
    key: str
    wall: float
    unsent: int = 0
    fields: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("title", "text", "key"):
            object.__setattr__(self, name, scrub(getattr(self, name)))
        object.__setattr__(self, "fields", {name: scrub_field(name, value) for name, value in self.fields.items()})
