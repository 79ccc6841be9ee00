"""What the controller knows about rented machines: their labels, the provider's list, controller.json, and the journal
of what it created (docs/controller.md). Data from a store or a provider is never trusted: parsing refuses it.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, TypeVar

from podwatch.domain.document import (
    SCHEMA_VERSION,
    Document,
    Flag,
    Form,
    Label,
    Many,
    Real,
    Strictly,
    Whole,
    shown,
)
from podwatch.domain.errors import IntegrityError
from podwatch.domain.safe_names import deceives

_NUMBERED: Final = re.compile(r"([1-9][0-9]{0,17})(?::(s[a-z2-7]{7}))?")
"""The end of a label: the number, and the store's tag in labels of newer controllers."""
PROVIDER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
LONGEST_CALL_SECONDS: Final = 300.0
"""Longest time limit of a provider command."""
_Money = Annotated[float, Strictly(0, 1_000_000)]
_Reason = Annotated[str, shown(1000)]
MOST_INSTANCES: Final = 10_000
"""Instances in one list; no account of one person has more."""


def store_tag(place: str) -> str:
    """The tag of a store in the labels of its machines. ``place``: its whole name, with endpoint and prefix. It begins
    with a letter, so that no number is one."""
    digest = base64.b32encode(hashlib.sha256(place.encode()).digest()).decode().lower()
    return f"s{digest[:7]}"


def label_of(run_id: str, generation: int, tag: str = "") -> str:
    """The label of the machine that the controller creates as number ``generation`` of a run. Without ``tag``: the
    label that controllers wrote before labels had one."""
    return f"podwatch:{run_id}:{generation}:{tag}" if tag else f"podwatch:{run_id}:{generation}"


def parse_label(label: str, run_id: str) -> tuple[int, str] | None:
    """(number, tag of the store or "") in a label of exactly this run; None for every other text. Run ids contain no
    colon."""
    start = f"podwatch:{run_id}:"
    found = _NUMBERED.fullmatch(label[len(start) :]) if label.startswith(start) else None
    return (int(found[1]), found[2] or "") if found is not None else None


def generation_of(label: str, run_id: str) -> int | None:
    """The number in a label of exactly this run, whichever store's; None for every other text."""
    found = parse_label(label, run_id)
    return found[0] if found is not None else None


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


# -- controller.json -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rules(Document):
    """controller.json: what people allow the controller. Money is in the provider's currency, times in seconds.

    ``boot_seconds``: from the request to the first heartbeat. ``silent_seconds``: without a heartbeat, until a machine
    that the provider shows as living is given up: three times as long as another pod would wait.
    ``final_checkpoint_seconds``: for what is not stored yet, before a machine that has ended is destroyed.
    """

    FILE = "controller.json"
    ONLY_KNOWN = True

    providers: Many[Annotated[str, Form(PROVIDER_NAME.pattern)]]
    max_price_per_hour: _Money
    max_spend_per_day: _Money
    max_spend_total: _Money
    max_replacements_per_day: Annotated[int, Strictly(0, 1000)] = 6
    max_boot_failures: Annotated[int, Strictly(1, 100)] = 3
    boot_seconds: Annotated[float, Strictly(60, 86_400)] = 1800.0
    silent_seconds: Annotated[float, Strictly(300, 86_400)] = 900.0
    final_checkpoint_seconds: Annotated[float, Strictly(0, 21_600)] = 900.0
    paused: Flag = False
    reason: Label = ""
    schema_version: Annotated[int, Strictly(SCHEMA_VERSION, SCHEMA_VERSION)] = SCHEMA_VERSION
    kind: Literal["podwatch-controller"] = "podwatch-controller"
    digest: Label = field(default="", kw_only=True)
    """Of the document: an edit allows a new attempt after boot failures."""


def parse_rules(data: bytes | None) -> Rules:
    """controller.json. Raises IntegrityError that names the mistake; also if there is none."""
    if data is None:
        what, fix = "there is no controller.json in the store", "write one (docs/controller.md)"
        raise IntegrityError(what, where="controller.json", fix=fix)
    rules = Rules.from_bytes(data)
    if not rules.providers or len(set(rules.providers)) != len(rules.providers):
        raise IntegrityError("controller.json names no providers, or one twice", where="controller.json")
    return replace(rules, digest=hashlib.sha256(data).hexdigest()[:16])


# -- what the controller created -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Billed:
    """One machine, as long as it costs money. ``since``, ``until`` (None: it still costs) and ``seen`` (last time in a
    list; None: not yet): epoch seconds of the store's clock."""

    provider: Label
    id: Label
    price_per_hour: Real
    since: Real
    until: Real | None = None
    seen: Real | None = None


@dataclass(frozen=True, slots=True)
class Record(Document):
    """One request for a machine, written before it is sent. Times are epoch seconds of the store's clock.

    ``lease``: the highest generation of the lease at that time. ``rules``: digest of controller.json. ``settled``: it
    is known what the request did; ``unsure_at``: when its outcome became unknown. ``failed``: why it created nothing.
    ``booted_at``, ``alive_at``: the first and the last heartbeat from it. ``ended``: why it is to be destroyed.
    ``label``: of its machine; empty: the one without a tag.
    """

    KIND = "podwatch-controller-pod"
    FILE = "record of the controller"

    generation: Whole
    provider: Label
    max_price: Real
    intended_at: Real
    account: Label = ""
    lease: Whole = 0
    rules: Label = ""
    settled: Flag = False
    unsure_at: Real | None = None
    failed: _Reason = ""
    refused: Flag = False
    booted_at: Real | None = None
    alive_at: Real | None = None
    first_step: Whole | None = None
    last_step: Whole | None = None
    ended: _Reason = ""
    ended_at: Real | None = None
    boot_failure: Flag = False
    billed: Many[Billed] = ()
    label: _Reason = ""
    run_id: Label = field(default="", compare=False, kw_only=True)

    def label_in(self, run_id: str) -> str:
        """The whole label of its machine."""
        return self.label or label_of(run_id, self.generation)

    @property
    def costs(self) -> tuple[Billed, ...]:
        return tuple(one for one in self.billed if one.until is None)

    @property
    def open(self) -> bool:
        """Whether it costs money, or it is not known yet whether it does."""
        return not self.settled or bool(self.costs)

    def spent(self, start: float, now: float) -> float:
        """Money between the two times. An unknown outcome counts as the most expensive machine allowed."""
        hours = [
            (
                one.price_per_hour,
                max(0.0, min(now, one.until if one.until is not None else now) - max(start, one.since)),
            )
            for one in self.billed
        ]
        if not self.settled and not self.billed:
            hours.append((self.max_price, max(0.0, now - max(start, self.intended_at))))
        return sum(price * seconds for price, seconds in hours) / 3600


def joined(ours: Record, theirs: Record, base: Record) -> Record:
    """What two controllers know of one request: ``ours`` follows from ``base``, ``theirs`` was written meanwhile. No
    machine, no cost and no heartbeat that one of them saw is lost."""

    def changed(name: str) -> Any:
        mine = getattr(ours, name)
        return getattr(theirs, name) if mine == getattr(base, name) else mine

    other = {(one.provider, one.id): one for one in theirs.billed}
    mine = [_one_bill(one, other.pop((one.provider, one.id), one)) for one in ours.billed]
    names = ("account", "settled", "unsure_at", "failed", "refused", "ended", "ended_at", "boot_failure")
    return replace(
        ours,
        **{name: changed(name) for name in names},
        booted_at=_known(min, ours.booted_at, theirs.booted_at),
        alive_at=_known(max, ours.alive_at, theirs.alive_at),
        first_step=_known(min, ours.first_step, theirs.first_step),
        last_step=_known(max, ours.last_step, theirs.last_step),
        billed=(*mine, *other.values()),
    )


def _one_bill(a: Billed, b: Billed) -> Billed:
    """An end counts only if no list has shown the machine later: then it was back, and cost money in between."""
    seen = _known(max, a.seen, b.seen)
    ends = [one.until for one in (a, b) if one.until is not None and (seen is None or one.until >= seen)]
    since, price = min(a.since, b.since), max(a.price_per_hour, b.price_per_hour)
    return Billed(a.provider, a.id, price, since, max(ends, default=None), seen)


_Number = TypeVar("_Number", int, float)


def _known(choose: Callable[[_Number, _Number], _Number], a: _Number | None, b: _Number | None) -> _Number | None:
    return choose(a, b) if a is not None and b is not None else a if b is None else b


def record_document(record: Record, run_id: str) -> bytes:
    return replace(record, run_id=run_id, label=record.label_in(run_id)).to_bytes()


def parse_record(data: bytes | None, run_id: str, *, where: str = "") -> Record:
    """Raises IntegrityError: a record that cannot be read could hide a machine that costs money."""
    fix = "restore or delete it"
    try:
        record = Record.from_bytes(data or b"", where=where)
    except IntegrityError as error:
        raise IntegrityError(error.what, where=error.where, fix=fix) from error
    if record.run_id != run_id or generation_of(record.label, run_id) != record.generation:
        raise IntegrityError("a record of the controller belongs to another run or request", where=where, fix=fix)
    return replace(record, label="") if record.label == label_of(run_id, record.generation) else record


def settled(record: Record, machine: str, price: float, account: str) -> Record:
    """The record after ``create`` has answered."""
    new = Billed(record.provider, machine, price, record.intended_at)
    others = tuple(one for one in record.billed if (one.provider, one.id) != (record.provider, machine))
    return replace(record, settled=True, unsure_at=None, account=account, billed=(*others, new))


def plain(values: Mapping[str, object]) -> str:
    """One line of JSON."""
    return json.dumps(values, sort_keys=True)
