"""Intents: podwatch journals every action before it happens and settles the entry afterwards."""

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
    """One journaled action. ``data`` is JSON-safe and contains everything needed to finish or undo it."""

    id: int
    kind: IntentKind
    wall: float
    data: Mapping[str, object] = field(default_factory=dict)
    state: IntentState = IntentState.OPEN
    note: str = ""
