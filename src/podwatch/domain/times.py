"""Times as documents have them, RFC 3339 in UTC with milliseconds; times, sizes and money as people read them. Pure."""

import math
from datetime import UTC, datetime


def rfc3339(wall: float | None) -> str | None:
    """Epoch seconds as ``2026-01-31T03:00:00.250Z``; None for None and for times that are unknown (zero or below) or
    that a calendar cannot show."""
    if wall is None or wall <= 0 or not math.isfinite(wall):
        return None
    try:
        return datetime.fromtimestamp(math.floor(wall * 1000) / 1000, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
    except (ValueError, OverflowError, OSError):
        return None


def from_rfc3339(text: object) -> float | None:
    """Epoch seconds of an RFC 3339 time in UTC with ``Z``; None for anything else."""
    if not isinstance(text, str) or text[10:11] != "T" or text[16:17] != ":" or not text.endswith("Z"):
        return None  # fromisoformat() reads other forms of ISO 8601, too
    try:
        return datetime.fromisoformat(text).timestamp()  # time.strptime() costs `status` 6 ms
    except ValueError:
        return None


# -- for people ------------------------------------------------------------------------------------------------------


def between(low: float, high: float) -> str:
    """``5 h to 6 h 20 min``; one duration where both read the same."""
    return span(low) if span(low) == span(high) else f"{span(low)} to {span(high)}"


def span(seconds: float) -> str:
    """A duration in its two largest units: ``0.3 s``, ``18 s``, ``4 min``, ``1 h 12 min``, ``3 d 4 h``."""
    seconds = max(0.0, seconds)
    if seconds < 5 and seconds != int(seconds):
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def ago(seconds: float | None) -> str:
    """``18 s ago``; ``just now`` also for a future time (clock skew); ``never`` for None."""
    if seconds is None:
        return "never"
    return "just now" if seconds < 1 else f"{span(round(seconds))} ago"


def size(size_bytes: float | None) -> str:
    """SI units with three figures, ``47 GB``; None is ``?``."""
    if size_bytes is None:
        return "?"
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} PB"


def gib(size_bytes: float | None) -> str:
    """GPU memory in GiB with one decimal."""
    return "?" if size_bytes is None else f"{size_bytes / (1 << 30):.1f} GiB"


def local(wall: float | None, now: float) -> str:
    """Local time; with the date if it is more than 20 hours from ``now`` (both in epoch seconds)."""
    if wall is None:
        return "?"
    form = "%H:%M:%S" if abs(now - wall) < 20 * 3600 else "%Y-%m-%d %H:%M"
    return datetime.fromtimestamp(wall).astimezone().strftime(form)


def amount(money: float, currency: object) -> str:
    """``12.50 EUR``; without a currency the number alone."""
    unit = "".join(c for c in str(currency or "") if c.isprintable())
    return f"{money:.2f} {unit}".strip()
