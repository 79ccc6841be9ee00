"""Rented machines as their provider lists them: labels, states, prices. What a provider's command answers is never
trusted: parsing refuses it, and an answer of another shape is never "no machines". Pure."""

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from podwatch.domain.errors import IntegrityError
from podwatch.domain.safe_names import deceives

_NUMBERED: Final = re.compile(r"([1-9][0-9]{0,17}):(s[a-z2-7]{7})")
"""The end of a label: the number, and the tag of the store."""
MOST_INSTANCES: Final = 10_000
"""Instances in one list; no account of one person has more."""


def store_tag(place: str) -> str:
    """The tag of a store in the labels of its machines. ``place``: its whole name, with endpoint and prefix. It begins
    with a letter, so that no number is one."""
    digest = base64.b32encode(hashlib.sha256(place.encode()).digest()).decode().lower()
    return f"s{digest[:7]}"


def label_of(run_id: str, number: int, tag: str) -> str:
    """The label of the machine that the controller requests as ``number`` of a run in the store with this tag."""
    return f"podwatch:{run_id}:{number}:{tag}"


def number_of(label: str, run_id: str, tag: str) -> int | None:
    """The number in a label of exactly this run in exactly this store; None for every other text. Run ids contain no
    colon."""
    start = f"podwatch:{run_id}:"
    found = _NUMBERED.fullmatch(label[len(start) :]) if label.startswith(start) else None
    return int(found[1]) if found is not None and found[2] == tag else None


# -- the provider's list ---------------------------------------------------------------------------------------------


class RentedState(StrEnum):
    """State of a rented machine in the provider's list."""

    PENDING = "pending"
    RUNNING = "running"
    STOPPED = "stopped"
    """Paused: it still costs, and can wake up."""
    ENDED = "ended"
    """It costs nothing any more."""
    UNKNOWN = "unknown"


LIVING: Final = frozenset({RentedState.PENDING, RentedState.RUNNING, RentedState.UNKNOWN})
"""An unknown state counts as living: nothing is created beside it."""


@dataclass(frozen=True, slots=True)
class Rented:
    """One machine in a provider's list. ``created_wall``: by the provider's clock."""

    id: str
    label: str
    state: RentedState
    price_per_hour: float
    created_wall: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """A complete list of one account. Never made from an answer that was empty, unreadable or incomplete."""

    account: str
    instances: tuple[Rented, ...] = ()


_LISTING = {"version", "account", "complete", "instances"}
_RENTED = {"id", "label", "state", "price_per_hour", "created_at", "detail"}


def parse_listing(data: bytes) -> Listing:
    """The answer to ``list``. Raises IntegrityError: an answer of another shape is never "no machines"."""
    document = strict_object(data, _LISTING)
    if document["complete"] is not True:
        raise IntegrityError("the list is not complete")
    account = _said(document["account"], "account")
    found = document["instances"]
    if not isinstance(found, list) or len(found) > MOST_INSTANCES:
        raise IntegrityError("`instances` is not a list, or too long")
    instances = tuple(_rented(one) for one in found)
    if len({one.id for one in instances}) != len(instances):
        raise IntegrityError("the list names one instance twice")
    return Listing(account, instances)


def _rented(value: object) -> Rented:
    if not isinstance(value, dict) or set(value) != _RENTED:
        raise IntegrityError("an instance has unknown or missing fields", fix=f"expected {', '.join(sorted(_RENTED))}")
    state = value["state"]
    if state not in list(RentedState):
        raise IntegrityError(f"an instance has an unknown state {str(state)[:40]!r}")
    label = value["label"]
    if not isinstance(label, str) or len(label) > 300:
        raise IntegrityError("an instance has no usable label")
    detail = value["detail"]
    if not isinstance(detail, str):
        raise IntegrityError("`detail` of an instance is not a text")
    made = value["created_at"]
    wall = None if made is None else _wall(made)
    price = price_of(value["price_per_hour"])
    return Rented(_said(value["id"], "id"), label, RentedState(state), price, wall, detail[:300])


def parse_created(data: bytes, label: str) -> tuple[str, float]:
    """(id, price per hour) from the answer to ``create``. Raises IntegrityError."""
    document = strict_object(data, {"version", "id", "label", "price_per_hour"})
    if document["label"] != label:
        raise IntegrityError("the answer names another label")
    return _said(document["id"], "id"), price_of(document["price_per_hour"])


def parse_destroyed(data: bytes, machine: str) -> None:
    """Check the answer to ``destroy``. Raises IntegrityError."""
    document = strict_object(data, {"version", "id", "destroyed"})
    if document["id"] != machine or document["destroyed"] is not True:
        raise IntegrityError("the answer does not confirm that the instance is destroyed")


def strict_object(data: bytes, keys: set[str]) -> dict[str, Any]:
    """A JSON object with exactly these keys and ``version`` 1. Raises IntegrityError."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IntegrityError("the answer is empty or not valid JSON") from error
    if not isinstance(document, dict) or set(document) != keys:
        raise IntegrityError("the answer has unknown or missing fields", fix=f"expected {', '.join(sorted(keys))}")
    if type(document["version"]) is not int or document["version"] != 1:
        raise IntegrityError("the answer has an unknown version")
    return document


def price_of(value: object) -> float:
    """A price per hour. Raises IntegrityError."""
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value < 1e6:  # type: ignore[arg-type,operator]
        raise IntegrityError("a price is not a number")
    return float(value)  # type: ignore[arg-type]


def _said(value: object, name: str) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > 200 or deceives(value):
        raise IntegrityError(f"`{name}` is empty or not plain text")
    return value


def _wall(value: object) -> float:
    try:
        at = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        raise IntegrityError("`created_at` is not a time in RFC 3339")
    return at.timestamp()


def plain(values: Mapping[str, object]) -> str:
    """One line of JSON."""
    return json.dumps(values, sort_keys=True)
