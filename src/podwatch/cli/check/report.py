"""What all checks share: a line of the report, calls with a deadline, the checkpoints on this pod."""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from podwatch.config.settings import Settings
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.document import Document, Flag, Text
from podwatch.domain.errors import PodwatchError
from podwatch.domain.secrets import scrub

T = TypeVar("T")
Level = Literal["ok", "warn", "fail"]
Sets = Callable[[], tuple[CheckpointSet, ...]]
DEADLINE_SECONDS = 20.0
"""For calls that can hang: NVML, the store, a network file system."""


@dataclass(frozen=True, slots=True)
class Line:
    """One result. Scrubs its text."""

    name: Text
    level: Level
    text: Text
    fix: Text = ""
    """Only shown where ``level`` is not ok."""

    def __post_init__(self) -> None:
        for name in ("text", "fix"):
            object.__setattr__(self, name, scrub(getattr(self, name)))


@dataclass(frozen=True, slots=True)
class CheckReport(Document):
    """podwatch check --json."""

    ok: Flag
    """No check fails."""
    checks: tuple[Line, ...]
    """A name can occur several times."""
    schema_version: Literal[1] = 1


def failed(name: str, error: PodwatchError, *, level: Level = "fail", about: str = "") -> Line:
    """The line about an error. It names the setting or file that the error is about, which its fix does not repeat."""
    return Line(name, level, f"{about}{error.what}{f' ({error.where})' if error.where else ''}", error.fix)


def in_time(function: Callable[[], T], *, seconds: float = DEADLINE_SECONDS) -> T:
    """The result of a call that can hang. It runs in a daemon thread; TimeoutError after ``seconds``."""
    box: dict[str, Any] = {}

    def call() -> None:
        try:
            box["result"] = function()
        except BaseException as error:
            box["error"] = error

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    if "error" in box:
        raise box["error"]
    result: T = box["result"]
    return result


def sets_of(settings: Settings) -> Sets:
    """A cached function that returns the checkpoints on this pod. It raises the errors of ``make_layout``."""
    from podwatch.cli.offline import look

    return functools.cache(lambda: tuple(in_time(lambda: look(settings)).sets))


def nearest(path: Path) -> Path:
    """``path`` itself, or the closest directory above it that exists."""
    return next(p for p in (path, *path.parents) if p.exists())
