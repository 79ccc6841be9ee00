"""A notice: one thing worth telling somebody who does not look. The document is described in docs/notifications.md."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from podwatch.domain.finding import Severity
from podwatch.domain.secrets import scrub, scrub_field

NOTICE_SCHEMA_VERSION = 1


class Topic(StrEnum):
    """What a notice is about; ``[notify] events`` chooses among these. Stable names."""

    FINDINGS = "findings"
    """Findings that have no topic of their own below, and the end of podwatch by a failure of its own."""
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
    """``key`` is the same for the opening, the reminders and the closing of one thing. ``wall`` is epoch seconds.

    ``unsent`` is how many notices before this one were held back because there were too many. Its text is
    scrubbed here.
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
