"""Times as documents have them: RFC 3339 in UTC with milliseconds. Pure."""

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
