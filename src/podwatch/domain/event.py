"""Events, incidents and notices: what podwatch records, and what it sends to the operator. docs/json.md lists the
names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from podwatch.domain.finding import Severity
from podwatch.domain.secrets import scrub, scrub_field


class EventName(StrEnum):
    """Every event podwatch can record. Stable: programs match on these."""

    DAEMON_STARTED = "daemon-started"
    DAEMON_STOPPING = "daemon-stopping"
    CONFIG_RELOADED = "config-reloaded"
    CONFIG_REFUSED = "config-refused"
    CONFIG_WARNING = "config-warning"
    SENSOR_CHANGED = "sensor-changed"
    DETECTOR_ARMED = "detector-armed"
    FINDING_RAISED = "finding-raised"
    FINDING_CLEARED = "finding-cleared"
    TRAINER_ADOPTED = "trainer-adopted"
    TRAINER_ATTACHED = "trainer-attached"
    TRAINER_STARTING = "trainer-starting"
    TRAINER_STARTED = "trainer-started"
    START_WARNING = "start-warning"
    TRAINER_CONFIRMED = "trainer-confirmed"
    TRAINER_EXITED = "trainer-exited"
    TRAINER_FINISHED = "trainer-finished"
    TRAINER_STOPPING = "trainer-stopping"
    TRAINER_STOPPED = "trainer-stopped"
    DESIRED_CHANGED = "desired-changed"
    INCIDENT_OPENED = "incident-opened"
    INCIDENT_CLOSED = "incident-closed"
    RECOVERY_BLOCKED = "recovery-blocked"
    RECOVERY_BACKOFF = "recovery-backoff"
    STEPPED_BACK = "stepped-back"
    LINEAGE_OPENED = "lineage-opened"
    GAVE_UP = "gave-up"
    POD_ENDING = "pod-ending"
    HOOK_DONE = "hook-done"
    HOOK_FAILED = "hook-failed"
    EVALUATION_STARTED = "evaluation-started"
    EVALUATION_DONE = "evaluation-done"
    EVALUATION_FAILED = "evaluation-failed"
    QUARANTINED = "quarantined"
    CHECKPOINT_COMPLETE = "checkpoint-complete"
    CHECKPOINT_DAMAGED = "checkpoint-damaged"
    CHECKPOINT_GONE = "checkpoint-gone"
    UPLOAD_STARTED = "upload-started"
    UPLOAD_ABANDONED = "upload-abandoned"
    UPLOAD_SKIPPED = "upload-skipped"
    PUBLISHED = "published"
    STORED = "stored"
    OPTIONAL_PARTS = "optional-parts"
    FINAL_SYNC = "final-sync"
    RUN_ENDED = "run-ended"
    SYNC_FAILED = "sync-failed"
    STORE_RECOVERED = "store-recovered"
    REMOTE_PRUNED = "remote-pruned"
    RESTORED = "restored"
    PRUNED = "pruned"
    PRUNE_STUCK = "prune-stuck"
    STATE_REBUILT = "state-rebuilt"
    STATE_RECOVERED = "state-recovered"
    PAUSED = "paused"
    UNPAUSED = "unpaused"
    RECORDING_CHANGED = "recording-changed"
    RUN_CLAIMED = "run-claimed"
    RUN_HELD_ELSEWHERE = "run-held-elsewhere"
    SUPERSEDED = "superseded"
    CONTROL_CHANGED = "control-changed"
    CONTROL_REFUSED = "control-refused"


@dataclass(frozen=True, slots=True)
class Event:
    """One event. ``fields`` are JSON-safe scalars; ``id`` is the journal row (0 until stored). Secrets are removed from
    message and fields here."""

    name: EventName
    wall: float
    message: str
    severity: Severity = Severity.INFO
    fields: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    id: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", scrub(self.message))
        object.__setattr__(self, "fields", {name: scrub_field(name, value) for name, value in self.fields.items()})


Emit = Callable[[Event], None]
"""Records one event, and passes it on to whoever listens."""


@dataclass(frozen=True, slots=True)
class Incident:
    """One failure of the run and its resolution (empty while it is open). Secrets are removed from its text here."""

    id: int
    kind: str
    opened_wall: float
    summary: str
    evidence: str = ""
    """The finding's evidence as JSON."""
    bundle: str = ""
    """Directory with logs and tables captured at the failure; empty if none was kept."""
    closed_wall: float | None = None
    resolution: str = ""
    resumed_step: int | None = None
    lost_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("summary", "evidence", "resolution"):
            object.__setattr__(self, name, scrub(getattr(self, name)))


# -- notices ---------------------------------------------------------------------------------------------------------
# Messages to the operator. docs/notifications.md describes the document.

NOTICE_SCHEMA_VERSION = 1


class Topic(StrEnum):
    """The topic of a notice; ``[notify] events`` selects among these. Stable names."""

    FINDINGS = "findings"
    """Findings, and whatever has no topic of its own below."""
    RESTARTS = "restarts"
    GAVE_UP = "gave-up"
    NEEDS_OPERATOR = "needs-operator"
    """A critical finding that podwatch cannot repair; a preemption; the end of podwatch after an error of its own.
    FINDINGS includes these."""
    FINISHED = "finished"
    DIGEST = "digest"
    """The state of the run every ``[notify] digest``; not among ``events``."""


class Change(StrEnum):
    OPENED = "opened"
    REMINDER = "reminder"
    CLOSED = "closed"
    HAPPENED = "happened"


@dataclass(frozen=True, slots=True)
class Notice:
    """``key`` is the same for the opening, the reminders and the closing of one condition. ``wall``: epoch seconds.
    ``text``: what happened and what podwatch does; ``cost``: in time and money, empty if unknown; ``do``: what the
    operator does.

    ``weight``: the severity that decides which channels get it; the closing of a critical condition has severity info
    and weight critical. ``usual``: channels without a severity of their own get it. ``unsent``: how many notices before
    this one the rate limit dropped. Secrets are removed from its text here.
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
    cost: str = ""
    do: str = "nothing"
    weight: Severity | None = None
    """None: the severity."""
    usual: bool = True

    def __post_init__(self) -> None:
        for name in ("title", "text", "key", "cost", "do"):
            object.__setattr__(self, name, scrub(getattr(self, name)))
        object.__setattr__(self, "fields", {name: scrub_field(name, value) for name, value in self.fields.items()})
