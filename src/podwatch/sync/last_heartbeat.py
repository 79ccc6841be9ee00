"""The last heartbeat of a run, as another machine reads it from the store."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from podwatch.domain.engine_and_attempt import NO_INSTANCE, Instance, parse_instance
from podwatch.domain.errors import IntegrityError
from podwatch.domain.lease import HolderState, parse_pins
from podwatch.domain.manifest import Keys
from podwatch.stores.base import ObjectStore

_SMALL_JSON = 1 << 20
_LEFT = frozenset(HolderState) - {HolderState.RUNNING}


@dataclass(frozen=True, slots=True)
class LastWord:
    """The run's last heartbeat. ``state``: the state in which its pod left, else the phase; empty if neither can be
    read, as ``outcome`` is."""

    state: str = ""
    outcome: str = ""
    instance: Instance = NO_INSTANCE
    pins: Mapping[int, str] = field(default_factory=dict)
    """Step: reason."""


def last_word(store: ObjectStore, keys: Keys) -> LastWord:
    """Raises RemoteError."""
    with contextlib.suppress(IntegrityError, ValueError, RecursionError):
        data = store.get_bytes(keys.heartbeat, limit=_SMALL_JSON)
        doc: Any = json.loads(data) if data is not None else None
        if isinstance(doc, dict):
            return parse_last_word(doc)
    return LastWord()


def parse_last_word(doc: Mapping[str, Any]) -> LastWord:
    state, outcome = str(doc.get("state", "")), doc.get("outcome")
    return LastWord(
        (state if state in _LEFT or not doc.get("phase") else str(doc["phase"]))[:40],
        outcome[:40] if isinstance(outcome, str) else "",
        parse_instance(doc.get("instance")),
        parse_pins(doc),
    )
