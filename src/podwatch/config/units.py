"""Values with units: ``"2s"``, ``"35m"``, ``"47GB"``, ``"85%"``.

Sizes follow the SI: ``47GB`` is 47e9 bytes, ``1GiB`` is 2**30. A bare number is in the base unit (seconds, bytes, or a
ratio from 0 to 1).
"""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

_TIMES: Mapping[str, Decimal | int] = {
    "ms": Decimal("0.001"), "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400,
}  # fmt: skip
_SIZES: Mapping[str, Decimal | int] = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}  # fmt: skip
GIB = 1 << 30
_LONGEST = 36_500 * 86_400
"""Seconds. The system's own waits and times do not take much larger numbers."""
_MOST_BYTES = 2**63 - 1
_PIECE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


def parse_duration(value: Any) -> float:
    """Seconds from ``"1h30m"``, ``"2s"``, ``"250ms"`` or a bare number. ValueError with an example."""
    seconds = _number(value, _TIMES, 'a duration such as "2s", "35m" or "1h30m"')
    if seconds > _LONGEST:
        raise ValueError("a duration cannot be longer than 36500d")
    return float(seconds)


def parse_size(value: Any) -> int:
    """Bytes from ``"47GB"``, ``"1GiB"`` or a bare number. ValueError with an example. Not by pydantic's ByteSize: it
    takes ``"5 kbit"`` and true for sizes, rounds above 2**53 bytes, and does not read ``1e9``."""
    size = _number(value, _SIZES, 'a size such as "47GB" or "1GiB"')
    if size > _MOST_BYTES:
        raise ValueError(f"a size cannot be larger than {_MOST_BYTES} bytes")
    return int(size)


def _number(value: Any, units: Mapping[str, Decimal | int], what: str) -> Decimal:
    """The sum of the pieces in the base unit; a number without a unit is in the base unit. ValueError."""
    if isinstance(value, bool):
        raise ValueError("expected a number, got true/false")
    text = str(value).strip()
    try:
        number = Decimal(text)
    except InvalidOperation:
        pieces = _PIECE.findall(text)
        if not pieces or _PIECE.sub("", text).strip():
            raise ValueError(f"{value!r} is not {what}") from None
        known = {unit.lower(): factor for unit, factor in units.items()}
        if unknown := [unit for _, unit in pieces if unit.lower() not in known]:
            raise ValueError(f"unknown unit {unknown[0]!r} in {value!r}; use {', '.join(units)}") from None
        number = sum((Decimal(amount) * known[unit.lower()] for amount, unit in pieces), Decimal())
    if not number.is_finite() or number < 0:
        raise ValueError(f"{value!r} is not {what}")
    return number


def parse_ratio(value: Any) -> float:
    """A ratio from 0 to 1, from ``"85%"`` or ``0.85``. ValueError for a bare number above 1: "85" is ambiguous."""
    if isinstance(value, bool):
        raise ValueError("expected a number, got true/false")
    text = str(value).strip()
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        raise ValueError(f'{value!r} is not a percentage such as "85%"') from None
    if text.endswith("%"):
        number /= 100.0
    if not 0.0 <= number <= 1.0:
        raise ValueError(f'{value!r} is not between 0% and 100%; write it as a percentage such as "85%"')
    return number


def format_duration(seconds: float) -> str:
    """The shortest exact form, which parse_duration reads back: ``90.0`` is ``"1m30s"``."""
    if 0 < seconds < 1:
        text = f"{_plain(seconds * 1000)}ms"
        return text if parse_duration(text) == seconds else f"{_plain(seconds)}s"
    rest, parts = seconds, []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        whole = int(rest // size)
        if whole:
            parts.append(f"{whole}{unit}")
            rest -= whole * size
    if rest or not parts:
        parts.append(f"{_plain(rest)}s")
    text = "".join(parts)
    return text if parse_duration(text) == seconds else f"{_plain(seconds)}s"


def exact_size(size_bytes: int) -> str:
    """The shortest exact form for a configuration file: ``"1GiB"``, ``"47GB"``, ``"1234567B"``."""
    units = (("TiB", 1 << 40), ("TB", 10**12), ("GiB", 1 << 30), ("GB", 10**9), ("MiB", 1 << 20), ("MB", 10**6))
    for unit, factor in (*units, ("KiB", 1 << 10), ("KB", 10**3)):
        if size_bytes and size_bytes % factor == 0 and size_bytes // factor < 10_000:
            return f"{size_bytes // factor}{unit}"
    return f"{size_bytes}B"


def format_ratio(ratio: float) -> str:
    """The shortest exact form: ``0.85`` is ``"85%"``."""
    text = f"{ratio * 100:g}%"
    return text if parse_ratio(text) == ratio else _plain(ratio)


def _plain(number: float) -> str:
    """A float as text without an exponent, which reads back as the same float."""
    text = repr(float(number))
    if "e" in text:
        text = format(Decimal(text), "f")
    return text.removesuffix(".0")


FORMATS: Mapping[Any, Callable[[Any], str]] = {
    parse_duration: format_duration,
    parse_size: exact_size,
    parse_ratio: format_ratio,
}
"""How a value is written again, by its reader."""
