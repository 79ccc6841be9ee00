"""Values that must never be printed (promise 11), and the one place that takes them out."""

import re
import threading
from typing import Any
from urllib.parse import quote

MIN_LENGTH = 6
"""Shorter values would blank out ordinary words; no credential is that short."""
HIDDEN = "[hidden]"
_NAMED = re.compile(
    r"(?i)(authorization|password|passwd|secret|api[_-]?key|application[_-]?key|access[_-]?token|auth[_-]?token)"
    r"([\"']?\s*[=:]\s*[\"']?)(?:(?:basic|bearer)\s+)?[^\s\"',;&}]{6,}"
)
"""``KEY=value`` shapes whose value is hidden even when it was never registered."""


class Redactor:
    """Thread-safe. Registered values are hidden wherever they occur, percent-encoded ones too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: frozenset[str] = frozenset()
        self._pattern: re.Pattern[str] | None = None

    def register(self, *values: str) -> None:
        """Values shorter than 6 characters are ignored."""
        with self._lock:
            kept = {v for v in values if len(v) >= MIN_LENGTH}
            self._values |= kept | {quote(v, safe="") for v in kept}
            longest_first = sorted(self._values, key=len, reverse=True)
            self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def text(self, text: str) -> str:
        if self._pattern is not None:
            text = self._pattern.sub(HIDDEN, text)
        return _NAMED.sub(rf"\1\2{HIDDEN}", text)

    def clean(self, value: Any) -> Any:
        """The same shape with every string cleaned; anything that is not plain data becomes its cleaned text."""
        match value:
            case None | bool() | int() | float():
                return value
            case str():
                return self.text(value)
            case dict():
                return {self.text(str(k)): self.clean(v) for k, v in value.items()}
            case list() | tuple() | set() | frozenset():
                return [self.clean(v) for v in value]
        return self.text(str(value))
