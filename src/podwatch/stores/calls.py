"""Counts the calls to the store by Backblaze's price classes.

Class A is free; B and C are free up to 2,500 a day each, then $0.004 per 10,000 of B and per 1,000 of C.
"""

import threading
from collections.abc import Mapping
from typing import Any

_FREE = frozenset(
    {
        "b2_upload_file", "b2_upload_part", "b2_get_upload_url", "b2_get_upload_part_url", "b2_start_large_file",
        "b2_finish_large_file", "b2_cancel_large_file", "b2_hide_file", "b2_delete_file_version",
    }
)  # fmt: skip
_READ = frozenset({"b2_download_file_by_id", "b2_download_file_by_name", "b2_get_file_info"})


def class_of(url: str) -> str:
    """A, B or C. An unknown call counts as the most expensive class."""
    path = url.partition("://")[2].partition("/")[2].partition("?")[0].split("/")
    if path[0] == "file":
        return "B"
    name = next((p for p in path if p.startswith("b2_")), "")
    return "A" if name in _FREE else "B" if name in _READ else "C"


class Calls:
    """Used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = {"A": 0, "B": 0, "C": 0}

    def note(self, url: str) -> None:
        self.add({class_of(url): 1})

    def add(self, more: Mapping[str, int]) -> None:
        with self._lock:
            for name, count in more.items():
                if name in self._count:
                    self._count[name] += count

    def snapshot(self) -> dict[str, int]:
        """All calls since this process started."""
        with self._lock:
            return dict(self._count)

    def told(self) -> str:
        """One line for the operator."""
        count = self.snapshot()
        return f"calls to the store: {count['A']} free (A), {count['B']} of class B, {count['C']} of class C"


TOTAL = Calls()
"""Calls of this process, over all stores that it opened, because the account is charged for their sum. The parent of a
child process adds the child's calls."""


class ChildCalls:
    """Adds to ``TOTAL`` the calls that one child reports; its messages carry the sum in ``calls``."""

    def __init__(self) -> None:
        self._counted: dict[str, int] = {}

    def hear(self, message: Mapping[str, Any]) -> None:
        calls = message.get("calls")
        if isinstance(calls, dict):
            TOTAL.add({name: count - self._counted.get(name, 0) for name, count in calls.items()})
            self._counted = calls
