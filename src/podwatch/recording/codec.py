"""Turns as JSON, and the difference between two of them: the lines of a recording. Pure.

A change is written as ``{"field": change}`` for a dataclass, ``{"3": change}`` for items of a tuple that kept its
length, ``{"~": [first, last, [items]]}`` for one that did not (so many items kept at either end, new ones between), and
``{"=": whole}`` for an object given whole. Everything else is the new value itself; ``{"#": "inf"}`` is a number that
JSON lacks, and a character that it lacks is written as U+FFFD.

The snapshot's types are the schema of what is read: a field that is missing takes its default, one that this version
does not know is ignored, and anything else that does not fit raises ValueError, because files are not trusted.
"""

import json
import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, cast, get_args, get_origin, get_type_hints

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


def change(old: Any, new: Any, mask: Mask = str, *, masked: bool = False) -> Any:
    """The change from ``old`` to ``new``."""
    if is_dataclass(new) and type(old) is type(new):
        return {
            name: change(before, after, mask, masked=free)
            for name, free in _fields(cast("Any", type(new)))
            if not _same(before := getattr(old, name), after := getattr(new, name))
        }
    if isinstance(old, tuple) and isinstance(new, tuple):
        return _items(old, new, mask)
    whole = _json(new, mask, masked)
    return {WHOLE: whole} if is_dataclass(new) else whole


def _items(old: tuple[Any, ...], new: tuple[Any, ...], mask: Mask) -> dict[str, Any]:
    if len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return {str(n): change(before, after, mask) for n, (before, after) in pairs if not _same(before, after)}
    shorter = min(len(old), len(new))
    first = next((n for n in range(shorter) if not _same(old[n], new[n])), shorter)
    last = next((n for n in range(shorter - first) if not _same(old[-1 - n], new[-1 - n])), shorter - first)
    return {SPLICE: [first, last, _json(new[first : len(new) - last], mask)]}


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


def _same(old: Any, new: Any) -> bool:
    return old is new or old == new


class Turns:
    """The turns of a segment, one after the other."""

    def __init__(self) -> None:
        self._last: Snapshot | None = None

    def next(self, line: bytes | str) -> Snapshot:
        """The turn after the one before. Raises ValueError, TypeError or RecursionError."""
        found = json.loads(line, object_hook=_number, parse_constant=_number_of)
        self._last = cast("Snapshot", _applied(Snapshot, self._last, found))
        return self._last


def _applied(kind: Any, old: Any, found: Any) -> Any:
    """``old``, of the type ``kind``, after the change. What did not change is not checked again."""
    if not isinstance(found, dict):
        return _value(kind, found)
    if WHOLE in found:
        return _value(kind, found[WHOLE])
    kinds = _kinds(kind)
    if is_dataclass(old):
        known = {name: inner for name, inner in found.items() if name in kinds}
        changed = {name: _applied(kinds[name], getattr(old, name), inner) for name, inner in known.items()}
        return replace(cast("Any", old), **changed)
    if not isinstance(old, tuple):
        raise ValueError("a change of a value that does not exist")
    if SPLICE in found:
        return _spliced(kind, old, found[SPLICE])
    items = list(old)
    for key, inner in found.items():
        if not key.isdecimal() or len(key) > 6 or int(key) >= len(items):
            raise ValueError(f"there is no item {key!r:.60}")
        items[int(key)] = _applied(kinds.get(key, kinds.get("...")), items[int(key)], inner)
    return tuple(items)


def _spliced(kind: Any, old: tuple[Any, ...], found: Any) -> tuple[Any, ...]:
    match found:
        case [int(first), int(last), list(between)] if min(first, last) >= 0 and first + last <= len(old):
            if first + last + len(between) > MAX_ITEMS:
                raise ValueError(f"more than {MAX_ITEMS} items")
            return (*old[:first], *_value(kind, between), *(old[len(old) - last :] if last else ()))
    raise ValueError(f"{found!r:.60} is no change of {len(old)} items")


def _value(kind: Any, found: Any) -> Any:
    return _adapter(kind).validate_json(json.dumps(found), strict=True)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@cache
def _kinds(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields, or of a tuple's items by number ("...": of each)."""
    if type(None) in get_args(kind):
        (kind,) = (one for one in get_args(kind) if one is not type(None))
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin is tuple:
        return {"...": arguments[0]} if arguments[1:] == (...,) else {str(n): one for n, one in enumerate(arguments)}
    bound = dict(zip(getattr(origin, "__parameters__", ()), arguments, strict=False))
    hints = get_type_hints(origin) if is_dataclass(origin) else {}
    free = {name: getattr(hint, "__parameters__", ()) for name, hint in hints.items()}
    return {name: hint[tuple(bound[p] for p in free[name])] if free[name] else hint for name, hint in hints.items()}


def _number(found: dict[str, Any]) -> Any:
    return _number_of(found[NO_JSON]) if found.keys() == {NO_JSON} else found


def _number_of(text: object) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise ValueError(f"{text!r:.60} is no number")
    return float(str(text))
