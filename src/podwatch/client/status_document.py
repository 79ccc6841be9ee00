"""Reads the status document of any version of the daemon: unknown and missing fields are ignored. Control characters
are removed from every value, because the trainer wrote some of them.
"""

from collections.abc import Mapping
from typing import Any

from podwatch.client.times_and_sizes import from_rfc3339

Document = Mapping[str, Any]


def clean(value: object) -> str:
    """One line without control characters."""
    text = "" if value is None else str(value)
    return "".join(c if c.isprintable() else " " for c in text).strip()


def now_of(document: Document) -> float | None:
    return from_rfc3339(document.get("time"))


def age_of(document: Document, at: object) -> float | None:
    """Seconds from ``at`` to the document's own time; negative for the future."""
    then, now = from_rfc3339(at), now_of(document)
    return None if then is None or now is None else now - then


def section(document: Document, key: str) -> dict[str, Any]:
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def entries(document: Document, key: str) -> list[dict[str, Any]]:
    value = document.get(key)
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []
