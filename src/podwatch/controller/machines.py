"""Rented machines as their provider lists them: labels, states, prices. What a provider's command answers is never
trusted: parsing refuses it, and an answer of another shape is never "no machines". Pure."""

import base64
import hashlib
import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Final

from pydantic import BeforeValidator

from podwatch.domain.document import Document, Flag, Many, Text, checked, strictly
from podwatch.domain.errors import IntegrityError
from podwatch.domain.safe_names import deceives

_NUMBERED: Final = re.compile(r"([1-9][0-9]{0,17}):(s[a-z2-7]{7})")
"""The end of a label: the number, and the tag of the store."""


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
    """It counts as living: nothing is created while there is one."""


def _check_name(text: str) -> None:
    if not text.strip() or len(text) > 200 or deceives(text):
        raise ValueError("is empty or not plain text")


def _wall_of(value: object) -> float | None:
    if value is None:
        return None
    at = datetime.fromisoformat(value) if isinstance(value, str) else None
    if at is None or at.tzinfo is None:
        raise ValueError("is not a time in RFC 3339")
    return at.timestamp()


Name = Annotated[str, checked(_check_name)]
Price = Annotated[float, strictly(least=0, below=1e6)]
Version = Annotated[int, strictly(1, 1)]


@dataclass(frozen=True, slots=True)
class Rented:
    """One machine in a provider's list; the labels of foreign ones are of any form. ``created_at``: epoch seconds by
    the provider's clock, in the list a time in RFC 3339 or null."""

    id: Name
    label: Text
    state: RentedState
    price_per_hour: Price
    created_at: Annotated[float | None, BeforeValidator(_wall_of)]
    detail: Text


@dataclass(frozen=True, slots=True)
class Listing:
    """A complete list of one account. Never made from an answer that was empty, unreadable or incomplete."""

    account: str
    instances: tuple[Rented, ...] = ()


class Answer(Document):
    """Of a provider's command. Every field is required, and no other is accepted."""

    __slots__ = ()
    FILE = "the answer"
    LARGEST = 8 << 20
    ONLY_KNOWN = True


@dataclass(frozen=True, slots=True)
class ListAnswer(Answer):
    version: Version
    account: Name
    complete: Flag
    instances: Many[Rented]


@dataclass(frozen=True, slots=True)
class CreateAnswer(Answer):
    version: Version
    id: Name
    label: Text
    price_per_hour: Price


@dataclass(frozen=True, slots=True)
class DestroyAnswer(Answer):
    version: Version
    id: Name
    destroyed: Flag


def parse_listing(data: bytes) -> Listing:
    """The answer to ``list``. Raises IntegrityError: an answer of another shape is never "no machines"."""
    found = ListAnswer.from_bytes(data)
    if not found.complete:
        raise IntegrityError("the list is not complete")
    if len({one.id for one in found.instances}) != len(found.instances):
        raise IntegrityError("the list names one instance twice")
    return Listing(found.account, found.instances)


def parse_created(data: bytes, label: str) -> tuple[str, float]:
    """(id, price per hour) from the answer to ``create``. Raises IntegrityError."""
    found = CreateAnswer.from_bytes(data)
    if found.label != label:
        raise IntegrityError("the answer names another label")
    return found.id, found.price_per_hour


def parse_destroyed(data: bytes, machine: str) -> None:
    """Check the answer to ``destroy``. Raises IntegrityError."""
    found = DestroyAnswer.from_bytes(data)
    if found.id != machine or not found.destroyed:
        raise IntegrityError("the answer does not confirm that the instance is destroyed")
