"""Intent before act (promise 10): what is about to be done is written down first and settled afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class IntentKind(StrEnum):
    STOP = "stop"
    START = "start"
    QUARANTINE = "quarantine"
    PRUNE = "prune"
    PUBLISH = "publish"
    REMOTE_DELETE = "remote-delete"
    RESTORE = "restore"
    HOLD = "hold"


class IntentState(StrEnum):
    OPEN = "open"
    DONE = "done"
    FAILED = "failed"
    UNDONE = "undone"


@dataclass(frozen=True, slots=True)
class Intent:
    """One act. ``data`` is JSON-safe and holds all that finishing or undoing it needs."""

    id: int
    kind: IntentKind
    wall: float
    data: Mapping[str, object] = field(default_factory=dict)
    state: IntentState = IntentState.OPEN
    note: str = ""
