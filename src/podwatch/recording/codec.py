"""Turns as JSON, and the difference between two of them: the lines of a recording. Pure.

A change is written as ``{"field": change}`` for an object, ``{"3": change}`` for items of a list that kept its length,
``{"~": [first, last, [items]]}`` for one that did not (so many items kept at either end, new ones between), and
``{"=": whole}`` for an object given whole. Everything else is the new value itself; ``{"#": "inf"}`` is a number that
JSON lacks, and a character that it lacks is written as U+FFFD.

The snapshot's types are the schema of what is read: a field that is missing takes its default, one that this version
does not know is ignored, and anything else that does not fit raises ValueError, because files are not trusted.
"""

import json
import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, cast, get_type_hints

from pydantic import TypeAdapter

from podwatch.domain.document import writable
from podwatch.domain.snapshot import Snapshot

Mask = Callable[[str], str]

WHOLE, SPLICE, NO_JSON = "=", "~", "#"
MAX_ITEMS = 100_000
"""Limit of items per tuple: a tree has hundreds of processes, and a file must not make podwatch allocate a billion."""
FREE_TEXT = frozenset(
    {
        "ProcessSample.command",
        "ProcessSample.name",
        "LogMatch.line",
        "Reading.detail",
        "GpuSample.detail",
        "InferenceSample.url",
    }
)
"""Text from outside that may hold a secret; it is masked before it is written (promise 11)."""


def change(old: Snapshot | None, new: Snapshot, mask: Mask = str) -> dict[str, Any]:
    """The change from ``old`` (None: none) to ``new``. ``mask`` goes over text from outside."""
    if old is None:
        return {WHOLE: _json(new, mask)}
    found: dict[str, Any] = {}
    for name, _ in _fields(Snapshot):
        before, after = getattr(old, name), getattr(new, name)
        if before is not after and before != after:
            found[name] = _difference(_json(before, mask), _json(after, mask))
    return found


def _difference(old: Any, new: Any) -> Any:
    """The change between two values as JSON has them."""
    if isinstance(old, dict) and isinstance(new, dict) and NO_JSON not in new:
        return {name: _difference(old[name], value) for name, value in new.items() if old[name] != value}
    if isinstance(old, list) and isinstance(new, list):
        return _items(old, new)
    return {WHOLE: new} if isinstance(new, dict) and NO_JSON not in new else new


def _items(old: list[Any], new: list[Any]) -> dict[str, Any]:
    if len(old) == len(new):
        return {str(n): _difference(a, b) for n, (a, b) in enumerate(zip(old, new, strict=True)) if a != b}
    shorter = min(len(old), len(new))
    first = next((n for n in range(shorter) if old[n] != new[n]), shorter)
    last = next((n for n in range(shorter - first) if old[-1 - n] != new[-1 - n]), shorter - first)
    return {SPLICE: [first, last, new[first : len(new) - last]]}


def _json(value: Any, mask: Mask, masked: bool = False) -> Any:
    """The value as JSON has it; ``masked``: text goes through the mask."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return writable(mask(value) if masked and value else value)
    if isinstance(value, float) and not math.isfinite(value):
        return {NO_JSON: repr(value)}
    if isinstance(value, tuple | frozenset):
        return [_json(item, mask) for item in (value if isinstance(value, tuple) else sorted(value))]
    if is_dataclass(value):
        return {name: _json(getattr(value, name), mask, free) for name, free in _fields(cast("Any", type(value)))}
    return value


@cache
def _fields(kind: Any) -> tuple[tuple[str, bool], ...]:
    """The names of its fields, and whether their text is masked."""
    return tuple((one.name, f"{kind.__name__}.{one.name}" in FREE_TEXT) for one in fields(kind))


class Turns:
    """The turns of a segment, one after the other."""

    def __init__(self) -> None:
        self._whole: dict[str, Any] = {}
        self._values: dict[str, Any] = {}

    def next(self, line: bytes | str) -> Snapshot:
        """The turn after the one before. Raises ValueError, TypeError or RecursionError."""
        found = json.loads(line, object_hook=_number, parse_constant=_number_of)
        if not isinstance(found, dict) or not (self._whole or WHOLE in found):
            raise ValueError("the first turn of a segment is whole")
        if WHOLE in found:
            self._values = {}
        self._whole = _applied(self._whole, found)
        kinds = get_type_hints(Snapshot)
        changed = self._whole.keys() if WHOLE in found else found.keys()
        for name in changed & kinds.keys():
            self._values[name] = _adapter(kinds[name]).validate_json(json.dumps(self._whole[name]), strict=True)
        return Snapshot(**self._values)


def _applied(old: Any, found: Any) -> Any:
    """``old``, as JSON has it, after the change."""
    if not isinstance(found, dict):
        return found
    if WHOLE in found:
        return found[WHOLE]
    if isinstance(old, dict):
        return {**old, **{name: _applied(old.get(name), inner) for name, inner in found.items()}}
    if not isinstance(old, list):
        raise ValueError("a change of a value that does not exist")
    if SPLICE in found:
        return _spliced(old, found[SPLICE])
    items = list(old)
    for key, inner in found.items():
        if not key.isdecimal() or len(key) > 6 or int(key) >= len(items):
            raise ValueError(f"there is no item {key!r:.60}")
        items[int(key)] = _applied(items[int(key)], inner)
    return items


def _spliced(old: list[Any], found: Any) -> list[Any]:
    match found:
        case [int(first), int(last), list(between)] if min(first, last) >= 0 and first + last <= len(old):
            if first + last + len(between) > MAX_ITEMS:
                raise ValueError(f"more than {MAX_ITEMS} items")
            return [*old[:first], *between, *(old[len(old) - last :] if last else ())]
    raise ValueError(f"{found!r:.60} is no change of {len(old)} items")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _number(found: dict[str, Any]) -> Any:
    return _number_of(found[NO_JSON]) if found.keys() == {NO_JSON} else found


def _number_of(text: object) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise ValueError(f"{text!r:.60} is no number")
    return float(str(text))
