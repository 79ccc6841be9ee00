"""JSON documents that leave the process or outlive it: one way to read them and one way to write them. Pure.

A document is a frozen dataclass whose fields have the types below. pydantic checks and builds it; it is imported with
the first document, so that a process that reads none does without its 9 MiB. Unknown fields are ignored, because newer
versions add fields; a wrong value makes the whole document unreadable; a field with a default may be absent.
"""

import gc
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar, cast

from podwatch.domain.errors import IntegrityError, InternalError
from podwatch.domain.safe_names import check_relative_path, deceives, valid_run_id
from podwatch.domain.times import from_rfc3339, rfc3339

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import CoreSchema, ErrorDetails

T = TypeVar("T")
SCHEMA_VERSION = 1
_MOST_VALUES = 2_000_000
"""In one document: more than 100,000 files. A parsed value takes up to 30 times its bytes in memory."""
_DEEPEST = 32
"""Levels of a value of any form. What has a type has the depth of its type."""


class Document:
    """Base of every document. ``KIND`` is the value of its field ``kind``; empty: it has neither that nor
    ``schema_version``. ``FILE`` names it in errors. ``LARGEST``: bytes."""

    __slots__ = ()
    KIND: ClassVar[str] = ""
    FILE: ClassVar[str] = "document"
    LARGEST: ClassVar[int] = 1 << 20
    ONLY_KNOWN: ClassVar[bool] = False
    """Whether an unknown field is an error: of what people write, because it may be a typing error."""

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = "") -> Self:
        """The document in ``data``. Raises IntegrityError, which names the document, the field and what is wrong."""
        with _no_collection():
            return cls.from_json(_parsed(cls, data, where), where=where)

    @classmethod
    def from_json(cls, found: object, *, where: str = "") -> Self:
        """The same for what is parsed already."""
        from pydantic import ValidationError

        _check_kind(cls, found, where)
        _check_names(cls, found, where)
        try:
            return cast("Self", _adapter(cls).validate_python(found, extra="ignore"))
        except ValidationError as error:
            raise _bad(cls, where, _first(error.errors(include_url=False, include_input=False))) from None

    @classmethod
    def kept(cls, found: object) -> Self | None:
        """The document that podwatch kept as ``to_json`` made it; None if it cannot be read, or there is none."""
        try:
            return cls.from_json(found)
        except IntegrityError:
            return None

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        from pydantic_core import PydanticSerializationError

        try:
            found: dict[str, Any] = _adapter(type(self)).dump_python(self, mode="json", warnings="error")
        except PydanticSerializationError as error:
            raise InternalError(f"{self.FILE} cannot be written: {error}") from error
        return {**found, "kind": self.KIND, "schema_version": SCHEMA_VERSION} if self.KIND else found

    def to_bytes(self) -> bytes:
        """Canonical: the same document always has the same bytes."""
        return canonical(self.to_json())


class Sparse:
    """Base of a frozen dataclass inside documents: a field that is 0 or empty by default is left out where it is."""

    __slots__ = ()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], "CoreSchema"]) -> "CoreSchema":
        from pydantic_core import core_schema

        written = core_schema.wrap_serializer_function_ser_schema(cls._written)
        return cast("CoreSchema", {**handler(source), "serialization": written})

    @staticmethod
    def _written(value: Any, inner: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        optional = _optional(cast("Any", type(value)))
        return {name: found for name, found in inner(value).items() if found or name not in optional}


@cache
def _optional(kind: Any) -> frozenset[str]:
    """The fields that are 0 or empty by default."""
    return frozenset(one.name for one in fields(kind) if not one.default)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Nothing of a document becomes garbage while it is read; searching it for garbage takes a quarter of the time.
    Another thread that ends earlier enables it again, and it is never off for good."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def canonical(found: object) -> bytes:
    """JSON with sorted keys that can be read again, whatever it contains (see ``writable``)."""
    try:
        text = _dumped(found)
    except ValueError:
        text = _dumped(writable(found))
    return (text if "\\ud" not in text else _dumped(writable(found))).encode()


def _dumped(found: object) -> str:
    return json.dumps(found, indent=1, sort_keys=True, ensure_ascii=True, allow_nan=False) + "\n"


def writable(value: Any) -> Any:
    """The value with what JSON does not have replaced: null for a number that is not finite, U+FFFD for half a
    character, as an argument of the training command can contain. Not to write a heartbeat would cost the run."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, Mapping):
        return {writable(name): writable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [writable(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_schema(kind: type[Document]) -> dict[str, Any]:
    """The JSON schema of what podwatch writes."""
    schema = _adapter(kind).json_schema(mode="serialization")
    if kind.KIND:
        schema["properties"] |= {"kind": {"const": kind.KIND}, "schema_version": {"const": SCHEMA_VERSION}}
        schema["required"] = [*schema.get("required", ()), "kind", "schema_version"]
    return schema


def of(kind: type[T], source: object, /, **others: Any) -> T:
    """A ``kind`` of ``others`` and, for the rest of its fields, what ``source`` has under the same names."""
    return kind(**{name: getattr(source, name) for name in _names(cast("Any", kind)) if name not in others}, **others)


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind))


_adapters: "dict[type[Document], TypeAdapter[Any]]" = {}


def _adapter(kind: type[Document]) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def _parsed(kind: type[Document], data: bytes, where: str) -> object:
    if len(data) > kind.LARGEST:
        raise _bad(kind, where, f"it has {len(data)} bytes, more than {kind.LARGEST}")
    if data.count(b",") > _MOST_VALUES:
        raise _bad(kind, where, f"it has more than {_MOST_VALUES} values")
    try:
        found = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique, parse_constant=_no_number)
        if b"\\ud" in data or b"\\uD" in data:  # halves of a character, which may stand alone
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except _KeyTwiceError as error:
        raise _bad(kind, where, f"the key {_printable(str(error)[:40])} is there twice") from error
    except (ValueError, RecursionError) as error:
        raise _bad(kind, where, "it is not valid JSON") from error


class _KeyTwiceError(ValueError):
    """Readers of JSON differ in which of two equal keys they use."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise _KeyTwiceError(next(name for name in names if names.count(name) > 1))
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _check_kind(kind: type[Document], found: object, where: str) -> None:
    if not isinstance(found, dict):
        raise _bad(kind, where, "it is not a JSON object")
    if not kind.KIND:
        return
    if found.get("kind") != kind.KIND:
        raise _bad(kind, where, f"its kind is not {kind.KIND}")
    if type(version := found.get("schema_version")) is not int or version != SCHEMA_VERSION:
        raise _bad(
            kind,
            where,
            f"this podwatch does not support schema_version {version!r:.40}",
            fix="use the version of podwatch that wrote it, or a newer one",
        )


def _check_names(kind: type[Document], found: Any, where: str) -> None:
    known = _names(cast("Any", kind)) if kind.ONLY_KNOWN else list(found)
    for name in found:
        if name not in known:
            raise _bad(kind, where, f"unknown field {_printable(name[:40])}", fix="known: " + ", ".join(known))


def _bad(kind: type[Document], where: str, what: str, *, fix: str = "") -> IntegrityError:
    return IntegrityError(f"{kind.FILE} cannot be read: {what}", where=where or kind.FILE, fix=fix)


def _first(problems: "list[ErrorDetails]") -> str:
    """Where the first problem is, and what. Names in it come from the document."""
    first = problems[0]
    place = ".".join(str(part)[:40] for part in first["loc"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    what = first["msg"].removeprefix("Value error, ") + more
    text = f"{place}: {what}" if place else what
    return _printable(text)[:300]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


@dataclass(frozen=True, slots=True)
class FieldRule:
    """What pydantic does with a field: ``change`` gets the schema of its type and pydantic's ``core_schema``, and
    returns the schema to use. Called with the first document of the kind, so that pydantic is imported no earlier."""

    change: Callable[[Any, Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], "CoreSchema"]) -> "CoreSchema":
        from pydantic_core import core_schema

        return cast("CoreSchema", self.change(handler(source), core_schema))


def strictly(
    least: int | None = None, most: int | None = None, above: float | None = None, below: float | None = None
) -> FieldRule:
    """No other value is taken for one of the type: no text for a number, no bool for an integer, no infinity. The
    limits are of numbers; ``above`` and ``below`` themselves are refused."""
    given = {"ge": least, "le": most, "gt": above, "lt": below}
    limits = {name: limit for name, limit in given.items() if limit is not None}

    def change(inner: Any, _: Any) -> Any:
        finite = {"allow_inf_nan": False} if inner["type"] == "float" else {}
        return inner | {"strict": True} | limits | finite

    return FieldRule(change)


def checked(check: Callable[[str], object], clean: Callable[[str], str] | None = None) -> FieldRule:
    """A text for which ``check`` returns nothing, and otherwise raises ValueError or IntegrityError. ``clean``, if
    there is one, makes every text such a text; it is applied when a document is written."""

    def read(value: str) -> str:
        try:
            check(value)
        except IntegrityError as error:
            raise ValueError(error.what) from error
        return value

    def change(_: Any, schema: Any) -> Any:
        written = schema.plain_serializer_function_ser_schema(clean) if clean else None
        return schema.no_info_after_validator_function(read, schema.str_schema(strict=True), serialization=written)

    return FieldRule(change)


def _check_shown(text: str, most: int) -> None:
    if len(text) > most:
        raise ValueError(f"longer than {most} characters")
    if deceives(text):
        raise ValueError("contains control characters, or others that hide what it is")


def _shown(text: str, most: int) -> str:
    return "".join("\ufffd" if deceives(c) else c for c in text[:most]) if deceives(text) else text[:most]


def shown(most: int) -> FieldRule:
    """For text that people read: at most this many characters, none that deceive."""
    return checked(partial(_check_shown, most=most), partial(_shown, most=most))


def matching(pattern: str) -> FieldRule:
    """A text that all of ``pattern`` matches. In the syntax of Rust's regular expressions: ``$`` is the end only."""
    return FieldRule(lambda _, schema: schema.str_schema(strict=True, pattern=f"^(?:{pattern})$"))


def _check_run_id(text: str) -> None:
    if not valid_run_id(text):
        raise ValueError("is no run id")


@dataclass(frozen=True, slots=True)
class _NullRule(FieldRule):
    """Of a field that is written as null although its type has none."""

    def __get_pydantic_json_schema__(self, schema: "CoreSchema", handler: Callable[[Any], Any]) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"type": "null"}]}


def or_null(value: Any) -> FieldRule:
    """JSON's null stands for ``value``."""

    def read(found: Any, inner: Callable[[Any], Any]) -> Any:
        return value if found is None else inner(found)

    def write(found: Any, inner: Callable[[Any], Any]) -> Any:
        return None if found == value else inner(found)

    def change(inner: Any, schema: Any) -> Any:
        written = schema.wrap_serializer_function_ser_schema(write)
        return schema.no_info_wrap_validator_function(read, inner, serialization=written)

    return _NullRule(change)


def unreadable_as(value: Any) -> FieldRule:
    """A wrong value stands for ``value`` instead of making the document unreadable: for figures that people read, so
    that one of them hides nothing that a decision needs."""
    return FieldRule(
        lambda inner, schema: schema.with_default_schema(
            inner, default=value, on_error="default", serialization=inner.get("serialization")
        )
    )


def written_as(change: Callable[[Any], Any]) -> FieldRule:
    """What is written is what ``change`` makes of the value."""
    return FieldRule(
        lambda inner, schema: inner | {"serialization": schema.plain_serializer_function_ser_schema(change)}
    )


def read_as(change: Callable[[Any], Any]) -> FieldRule:
    """What is read goes through ``change``, which can raise ValueError."""
    return FieldRule(
        lambda inner, schema: schema.no_info_after_validator_function(
            change, inner, serialization=inner.get("serialization")
        )
    )


def _time_as_text(_: Any, schema: Any) -> Any:
    form = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}Z$"
    text = schema.nullable_schema(schema.str_schema(strict=True, pattern=form))
    written = schema.plain_serializer_function_ser_schema(rfc3339, return_schema=text)
    return schema.no_info_after_validator_function(_wall_of, text, serialization=written)


def _wall_of(text: str | None) -> float | None:
    wall = from_rfc3339(text)
    if text is not None and wall is None:
        raise ValueError("is no time")
    return wall


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > 1000:
        raise ValueError("more than 1000 entries")
    return value


def any_json(value: Any, depth: int = 0) -> Any:
    """``value``, if JSON has it and it is not too deep. Raises ValueError."""
    if depth > _DEEPEST:
        raise ValueError(f"more than {_DEEPEST} levels deep")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is not finite")
    for part in (*value, *value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        any_json(part, depth + 1)
    return value


_HIGHEST = 2**63 - 1
"""What SQLite and a file system can hold."""

Flag = Annotated[bool, strictly()]
Integer = Annotated[int, strictly(-_HIGHEST, _HIGHEST)]
Whole = Annotated[int, strictly(0, _HIGHEST)]
Positive = Annotated[int, strictly(1, _HIGHEST)]
FileMode = Annotated[int, strictly(0, 0o7777)]
Real = Annotated[float, strictly()]
Wall = Annotated[float, strictly(above=0.0, below=1e11)]
"""Epoch seconds; the limit is in the year 5138."""
Size = Annotated[float, strictly(0)]
"""A duration, a share, an amount of money: never below zero."""
At = Annotated[float | None, FieldRule(_time_as_text)]
"""Epoch seconds, which the document has in the form of RFC 3339; None: not known."""
Text = Annotated[str, strictly()]
"""Of any form: never a name, and not to be printed as it is."""
Label = Annotated[str, shown(200)]
"""A name or a short sentence that people read."""
RunId = Annotated[str, checked(_check_run_id)]
SaveId = Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")]
RelativePath = Annotated[str, checked(check_relative_path)]
"""Safe to join below a directory, and not a name that deceives."""
Many = Annotated[tuple[T, ...], FieldRule(lambda inner, _: inner | {"fail_fast": True})]
"""One problem is enough: each costs as much memory as a hundred values."""
Texts = Annotated[
    Mapping[Text, Text], FieldRule(lambda inner, schema: schema.no_info_before_validator_function(_few, inner))
]
Json = Annotated[Mapping[str, Any], read_as(any_json)]
"""A JSON object of any form."""
