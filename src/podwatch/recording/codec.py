"""Frozen dataclasses as JSON, and the difference between two of them: the encoding of a recording. Pure.

The types themselves are the schema: fields are read from their annotations once. A field that is missing in a record
takes its default, a field that this version does not know is ignored, and anything else that does not fit raises
``CodecError``: a recording comes from a file, and files are not trusted.

A change is written as ``{"field": change}`` for a dataclass, ``{"3": change}`` for items of a tuple that kept its
length, ``{"~": [first, last, [items]]}`` for one that did not (so many items kept at either end, new ones between), and
``{"=": whole}`` for a value given whole. Everything else is the new value itself.
"""

import math
import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, Generic, TypeVar, Union, cast, get_args, get_origin, get_type_hints

Mask = Callable[[str], str]
T = TypeVar("T")

WHOLE, SPLICE = "=", "~"
MAX_ITEMS = 100_000
"""Limit of items per tuple: a tree has hundreds of processes, and a file must not make podwatch allocate a billion."""


class CodecError(ValueError):
    """Data that does not fit the type."""


class _Part:
    """One type's rules. ``change`` is only called for values that differ."""

    def encode(self, value: Any, mask: Mask) -> Any:
        return value

    def decode(self, data: Any) -> Any:
        raise NotImplementedError

    def change(self, old: Any, new: Any, mask: Mask) -> Any:
        return self.encode(new, mask)

    def apply(self, old: Any, data: Any) -> Any:
        return self.decode(data)


class _Number(_Part):
    """An int or a bool, which JSON has too."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def decode(self, data: Any) -> Any:
        return _exactly(self._kind, data)


class _Text(_Part):
    def __init__(self, masked: bool) -> None:
        self._masked = masked

    def encode(self, value: Any, mask: Mask) -> Any:
        return mask(value) if self._masked and value else value

    def decode(self, data: Any) -> Any:
        return _exactly(str, data)


class _Float(_Part):
    def encode(self, value: Any, mask: Mask) -> Any:
        return value if math.isfinite(value) else repr(float(value))  # strict JSON has no infinity

    def decode(self, data: Any) -> Any:
        if type(data) is float:
            return data
        if type(data) is int or data in ("inf", "-inf", "nan"):
            try:
                return float(data)
            except OverflowError:
                pass
        raise CodecError(f"{_shown(data)} is no number")


class _Enum(_Part):
    def __init__(self, kind: type[Enum]) -> None:
        self._kind = kind

    def encode(self, value: Any, mask: Mask) -> Any:
        return value.value

    def decode(self, data: Any) -> Any:
        try:
            return self._kind(data)
        except ValueError as error:
            raise CodecError(f"this version knows no {self._kind.__name__} {_shown(data)}") from error


class _Optional(_Part):
    def __init__(self, inner: _Part) -> None:
        self._inner = inner

    def encode(self, value: Any, mask: Mask) -> Any:
        return None if value is None else self._inner.encode(value, mask)

    def decode(self, data: Any) -> Any:
        return None if data is None else self._inner.decode(data)

    def change(self, old: Any, new: Any, mask: Mask) -> Any:
        if new is None:
            return None
        if old is None:
            return {WHOLE: self._inner.encode(new, mask)}
        return self._inner.change(old, new, mask)

    def apply(self, old: Any, data: Any) -> Any:
        if data is None:
            return None
        if isinstance(data, dict) and WHOLE in data:
            return self._inner.decode(data[WHOLE])
        if old is None:
            raise CodecError("a change of a value that does not exist")
        return self._inner.apply(old, data)


class _Set(_Part):
    def __init__(self, item: _Part) -> None:
        self._item = item

    def encode(self, value: Any, mask: Mask) -> Any:
        return sorted(self._item.encode(v, mask) for v in value)

    def decode(self, data: Any) -> Any:
        return frozenset(self._item.decode(v) for v in _list(data))


class _Row(_Part):
    """A tuple of a fixed length."""

    def __init__(self, items: tuple[_Part, ...]) -> None:
        self._items = items

    def encode(self, value: Any, mask: Mask) -> Any:
        return [part.encode(v, mask) for part, v in zip(self._items, value, strict=True)]

    def decode(self, data: Any) -> Any:
        if len(_list(data)) != len(self._items):
            raise CodecError(f"{len(data)} items instead of {len(self._items)}")
        return tuple(part.decode(v) for part, v in zip(self._items, data, strict=True))


class _Tuple(_Part):
    """A tuple of any length of one type."""

    def __init__(self, item: _Part) -> None:
        self._item = item

    def encode(self, value: Any, mask: Mask) -> Any:
        encode = self._item.encode
        return [encode(v, mask) for v in value]

    def decode(self, data: Any) -> Any:
        return tuple(self._item.decode(v) for v in _list(data))

    def change(self, old: Any, new: Any, mask: Mask) -> Any:
        if len(old) == len(new):
            change = self._item.change
            return {
                str(n): change(a, b, mask) for n, (a, b) in enumerate(zip(old, new, strict=True)) if not _same(a, b)
            }
        shorter = min(len(old), len(new))
        first = next((n for n in range(shorter) if not _same(old[n], new[n])), shorter)
        last = next((n for n in range(shorter - first) if not _same(old[-1 - n], new[-1 - n])), shorter - first)
        return {SPLICE: [first, last, self.encode(new[first : len(new) - last], mask)]}

    def apply(self, old: Any, data: Any) -> Any:
        if isinstance(data, list):
            return self.decode(data)
        if not isinstance(data, dict):
            raise CodecError(f"{_shown(data)} is no change of a list")
        if WHOLE in data:
            return self.decode(data[WHOLE])
        if SPLICE in data:
            return self._splice(old, data[SPLICE])
        items = list(old)
        for key, change in data.items():
            if not key.isdecimal() or len(key) > 6 or int(key) >= len(items):
                raise CodecError(f"there is no item {_shown(key)}")
            items[int(key)] = self._item.apply(items[int(key)], change)
        return tuple(items)

    def _splice(self, old: Any, data: Any) -> Any:
        match data:
            case [int(first), int(last), list(between)] if min(first, last) >= 0 and first + last <= len(old):
                if first + last + len(between) > MAX_ITEMS:
                    raise CodecError(f"more than {MAX_ITEMS} items")
                return (*old[:first], *self.decode(between), *(old[len(old) - last :] if last else ()))
        raise CodecError(f"{_shown(data)} is no change of {len(old)} items")


class _Object(_Part):
    """A dataclass."""

    def __init__(self, kind: type, free_text: frozenset[str], known: dict[Any, _Part], bound: dict[Any, Any]) -> None:
        self._kind = kind
        hints = get_type_hints(kind)
        self._fields = tuple(
            (f.name, _part(hints[f.name], f"{kind.__name__}.{f.name}" in free_text, free_text, known, bound))
            for f in fields(kind)
        )
        self._by_name = dict(self._fields)
        self._required = frozenset(
            f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING
        )

    def encode(self, value: Any, mask: Mask) -> Any:
        return {name: part.encode(getattr(value, name), mask) for name, part in self._fields}

    def decode(self, data: Any) -> Any:
        if not isinstance(data, dict):
            raise CodecError(f"{_shown(data)} is no {self._kind.__name__}")
        found = {name: part.decode(data[name]) for name, part in self._fields if name in data}
        if missing := self._required - found.keys():
            raise CodecError(f"a {self._kind.__name__} without {', '.join(sorted(missing))}")
        return self._kind(**found)

    def change(self, old: Any, new: Any, mask: Mask) -> Any:
        changed = {}
        for name, part in self._fields:
            before, after = getattr(old, name), getattr(new, name)
            if not _same(before, after):
                changed[name] = part.change(before, after, mask)
        return changed

    def apply(self, old: Any, data: Any) -> Any:
        if not isinstance(data, dict):
            raise CodecError(f"{_shown(data)} is no change of a {self._kind.__name__}")
        if WHOLE in data:
            return self.decode(data[WHOLE])
        values = {name: getattr(old, name) for name, _ in self._fields}
        for name, change in data.items():
            if (part := self._by_name.get(name)) is not None:
                values[name] = part.apply(values[name], change)
        return self._kind(**values)


class Codec(Generic[T]):
    """One dataclass, to JSON and back. ``free_text`` names the fields (``Class.field``) whose text is masked when
    writing."""

    def __init__(self, kind: type[T], free_text: frozenset[str] = frozenset()) -> None:
        self._root = _Object(kind, free_text, {}, {})

    def encode(self, value: T, mask: Mask = str) -> dict[str, Any]:
        return cast("dict[str, Any]", self._root.encode(value, mask))

    def decode(self, data: object) -> T:
        """Raises CodecError."""
        return cast("T", self._root.decode(data))

    def change(self, old: T | None, new: T, mask: Mask = str) -> dict[str, Any]:
        """The change from ``old`` to ``new``; with no ``old``, all of ``new``."""
        if old is None:
            return {WHOLE: self._root.encode(new, mask)}
        return cast("dict[str, Any]", self._root.change(old, new, mask))

    def apply(self, old: T | None, data: object) -> T:
        """Raises CodecError."""
        if old is None and not (isinstance(data, dict) and WHOLE in data):
            raise CodecError("a change without a whole value before it")
        return cast("T", self._root.apply(old, data))


def _part(hint: Any, masked: bool, free_text: frozenset[str], known: dict[Any, _Part], bound: dict[Any, Any]) -> _Part:
    hint = bound.get(hint, hint)
    origin, arguments = get_origin(hint), tuple(bound.get(a, a) for a in get_args(hint))

    def inner(argument: Any) -> _Part:
        return _part(argument, masked, free_text, known, bound)

    if hint is str:
        return _Text(masked)
    if hint is float:
        return _Float()
    if hint in (int, bool):
        return _Number(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _Enum(hint)
    if origin in (Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        return _Optional(inner(next(a for a in arguments if a is not type(None))))
    if origin is frozenset:
        return _Set(inner(arguments[0]))
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return _Tuple(inner(arguments[0]))
        return _Row(tuple(inner(a) for a in arguments))
    kind = origin or hint
    if isinstance(kind, type) and is_dataclass(kind):
        if hint not in known:
            parameters = getattr(kind, "__parameters__", ())
            known[hint] = _Object(kind, free_text, known, dict(zip(parameters, arguments, strict=False)))
        return known[hint]
    raise TypeError(f"a recording cannot encode {hint}")


def _same(old: Any, new: Any) -> bool:
    return old is new or old == new


def _exactly(kind: type, data: Any) -> Any:
    if type(data) is not kind:  # a bool is an int elsewhere, not here
        raise CodecError(f"{_shown(data)} is no {kind.__name__}")
    return data


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list) or len(data) > MAX_ITEMS:
        raise CodecError(f"{_shown(data)} is no list of at most {MAX_ITEMS} items")
    return data


def _shown(data: Any) -> str:
    return repr(data)[:60]
