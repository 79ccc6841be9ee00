"""What the controller knows about rented machines: their labels, the provider's list, controller.json, and the journal
of what it created (docs/controller.md). Data from a store or a provider is never trusted: parsing refuses it.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, TypeVar

from podwatch.domain.document import SCHEMA_VERSION
from podwatch.domain.errors import IntegrityError
from podwatch.domain.safe_names import deceives

_NUMBERED: Final = re.compile(r"([1-9][0-9]{0,17})(?::(s[a-z2-7]{7}))?")
"""The end of a label: the number, and the store's tag in labels of newer controllers."""
PROVIDER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
LONGEST_CALL_SECONDS: Final = 300.0
"""Longest time limit of a provider command."""
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
class Rules:
    """controller.json: what people allow the controller. Money is in the provider's currency, times in seconds.

    ``boot_seconds``: from the request to the first heartbeat. ``silent_seconds``: without a heartbeat, until a machine
    that the provider shows as living is given up: three times as long as another pod would wait.
    ``final_checkpoint_seconds``: for what is not stored yet, before a machine that has ended is destroyed.
    """

    providers: tuple[str, ...]
    max_price_per_hour: float
    max_spend_per_day: float
    max_spend_total: float
    max_replacements_per_day: int = 6
    max_boot_failures: int = 3
    boot_seconds: float = 1800.0
    silent_seconds: float = 900.0
    final_checkpoint_seconds: float = 900.0
    paused: bool = False
    reason: str = ""
    digest: str = ""
    """Of the document: an edit allows a new attempt after boot failures."""


_RULES_REQUIRED = ("providers", "max_price_per_hour", "max_spend_per_day", "max_spend_total")
_RULES_KEYS = tuple(name for name in Rules.__dataclass_fields__ if name != "digest")
_SPANS = {"boot_seconds": (60, 86_400), "silent_seconds": (300, 86_400), "final_checkpoint_seconds": (0, 21_600)}
_COUNTS = {"max_replacements_per_day": (0, 1000), "max_boot_failures": (1, 100)}


def parse_rules(data: bytes | None) -> Rules:
    """controller.json. Raises IntegrityError that names the mistake; also if there is none."""
    if data is None:
        raise _rules_error("there is no controller.json in the store", "write one (docs/controller.md)")
    try:
        document = json.loads(data, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _rules_error("controller.json is not valid JSON", "correct it") from error
    if not isinstance(document, dict):
        raise _rules_error("controller.json is not a JSON object", "correct it")
    for key in document:
        if key not in (*_RULES_KEYS, "schema_version", "kind"):
            raise _rules_error(f"controller.json has an unknown entry {key[:40]!r}", f"known: {', '.join(_RULES_KEYS)}")
    for key, expected in (("schema_version", SCHEMA_VERSION), ("kind", "podwatch-controller")):
        if document.get(key, expected) != expected:
            raise _rules_error(f"controller.json has another `{key}`", f"write {expected!r} or remove it")
    missing = [key for key in _RULES_REQUIRED if key not in document]
    if missing:
        raise _rules_error(f"controller.json lacks {', '.join(missing)}", "add it")
    values = {key: _rule(key, document[key]) for key in _RULES_KEYS if key in document}
    return Rules(**values, digest=hashlib.sha256(data).hexdigest()[:16])


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON keeps the last of two entries of one name: here that could be the higher cap."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise _rules_error(f"controller.json has the entry {name[:40]!r} twice", "remove one")
    return dict(pairs)


def _rule(key: str, value: object) -> Any:
    if key == "providers":
        names = value if isinstance(value, list) else []
        good = all(isinstance(name, str) and PROVIDER_NAME.fullmatch(name) for name in names)
        if not names or not good or len(set(names)) != len(names):
            raise _rules_error("`providers` in controller.json is not a list of names", 'write for example ["vast"]')
        return tuple(names)
    if key == "paused":
        if not isinstance(value, bool):
            raise _rules_error("`paused` in controller.json is neither true nor false", "correct it")
        return value
    if key == "reason":
        if not isinstance(value, str) or len(value) > 200 or deceives(value):
            raise _rules_error("`reason` in controller.json is not plain text of at most 200 characters", "shorten it")
        return value
    least, most = _SPANS.get(key) or _COUNTS.get(key) or (0, 1e6)
    whole = key in _COUNTS
    if type(value) not in ((int,) if whole else (int, float)) or not least <= value <= most:  # type: ignore[operator]
        raise _rules_error(
            f"invalid `{key}` in controller.json", f"write a {'whole ' if whole else ''}number of {least} to {most:g}"
        )
    return int(value) if whole else float(value)  # type: ignore[call-overload,arg-type]


def _rules_error(what: str, fix: str) -> IntegrityError:
    return IntegrityError(what, where="controller.json", fix=fix)


# -- what the controller created -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Billed:
    """One machine, as long as it costs money. ``since``, ``until`` (None: it still costs) and ``seen`` (last time in a
    list; None: not yet): epoch seconds of the store's clock."""

    provider: str
    id: str
    price_per_hour: float
    since: float
    until: float | None = None
    seen: float | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One request for a machine, written before it is sent. Times are epoch seconds of the store's clock.

    ``lease``: the highest generation of the lease at that time. ``rules``: digest of controller.json. ``settled``: it
    is known what the request did; ``unsure_at``: when its outcome became unknown. ``failed``: why it created nothing.
    ``booted_at``, ``alive_at``: the first and the last heartbeat from it. ``ended``: why it is to be destroyed.
    ``label``: of its machine; empty: the one without a tag.
    """

    generation: int
    provider: str
    max_price: float
    intended_at: float
    account: str = ""
    lease: int = 0
    rules: str = ""
    settled: bool = False
    unsure_at: float | None = None
    failed: str = ""
    refused: bool = False
    booted_at: float | None = None
    alive_at: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    ended: str = ""
    ended_at: float | None = None
    boot_failure: bool = False
    billed: tuple[Billed, ...] = field(default=())
    label: str = ""

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
    document = {"schema_version": SCHEMA_VERSION, "kind": "podwatch-controller-pod", "run_id": run_id}
    label = record.label_in(run_id)
    return (json.dumps({**document, **asdict(record), "label": label}, indent=1, sort_keys=True) + "\n").encode()


def parse_record(data: bytes | None, run_id: str, *, where: str = "") -> Record:
    """Raises IntegrityError: a record that cannot be read could hide a machine that costs money."""
    try:
        document = json.loads(data or b"")
        values = {key: document[key] for key in Record.__dataclass_fields__}
        billed = tuple(Billed(**one) for one in values.pop("billed"))
        label, values["label"] = values["label"], ""
        record = Record(**values, billed=billed)
        if label != label_of(run_id, record.generation):
            record = replace(record, label=label)
        good = document["run_id"] == run_id and generation_of(label, run_id) == record.generation
        numbers = (record.max_price, record.intended_at, *(n for b in billed for n in (b.price_per_hour, b.since)))
        good = good and all(isinstance(n, int | float) and math.isfinite(n) for n in numbers)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        good = False
    if not good:
        what, fix = "a record of the controller in the store cannot be read", "restore or delete it"
        raise IntegrityError(what, where=where, fix=fix)
    return record


def settled(record: Record, machine: str, price: float, account: str) -> Record:
    """The record after ``create`` has answered."""
    new = Billed(record.provider, machine, price, record.intended_at)
    others = tuple(one for one in record.billed if (one.provider, one.id) != (record.provider, machine))
    return replace(record, settled=True, unsure_at=None, account=account, billed=(*others, new))


def plain(values: Mapping[str, object]) -> str:
    """One line of JSON."""
    return json.dumps(values, sort_keys=True)
