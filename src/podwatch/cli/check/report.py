"""What all checks share: a line of the report, the checkpoints on this pod."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from podwatch.config.settings import Settings
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.document import Document, Flag, Text
from podwatch.domain.errors import PodwatchError
from podwatch.domain.secrets import scrub
from podwatch.system.blocking_calls import in_time

Level = Literal["ok", "warn", "fail"]
Sets = Callable[[], tuple[CheckpointSet, ...]]


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


def sets_of(settings: Settings) -> Sets:
    """A cached function that returns the checkpoints on this pod. It raises the errors of ``make_layout``."""
    from podwatch.cli.offline import look

    return functools.cache(lambda: tuple(in_time(lambda: look(settings)).sets))


def nearest(path: Path) -> Path:
    """``path`` itself, or the closest directory above it that exists."""
    return next(p for p in (path, *path.parents) if p.exists())
