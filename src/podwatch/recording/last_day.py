"""The last day of the run for the page's plots: one line a minute, and one at each change, in ``history.jsonl``.

Appended to and never kept in memory: without a reader the page costs one line a minute. A line that cannot be read is
left out, a disk that is full leaves a hole. ``podwatch replay`` reads the recording instead, which has every turn.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from podwatch.domain.document import Document, Flag, Many, Real, Text, Whole, writable
from podwatch.domain.errors import IntegrityError
from podwatch.recording.recorder import MIN_FREE_BYTES

DAY: Final = 86400.0
MAX_BYTES: Final = 2 << 20
"""About four days of a pod with 8 GPUs; then the file is written again with the last two."""
MAX_LINE: Final = 8 << 10


@dataclass(frozen=True, slots=True)
class Moment(Document):
    """The run at ``at`` (epoch seconds). ``state``: of training, until the next one.
    ``started``: a trainer is started now. ``gpus``: index -> (used, total) bytes. ``step_at``: epoch seconds of
    ``step``. Only ``at`` and ``state`` are known at a change between two looks."""

    at: Real
    state: Text
    started: Flag = False
    gpus: Many[tuple[Whole, Whole, Whole]] = ()
    disk: tuple[Whole, Whole] | None = None
    """Used and capacity in bytes."""
    next_save: Whole | None = None
    step: Whole | None = None
    step_at: Real | None = None
    reward: Real | None = None
    loss: Real | None = None


def to_line(moment: Moment) -> str:
    """One line of JSON without what is not known."""
    known = {name: value for name, value in moment.to_json().items() if value or type(value) in (int, float)}
    return json.dumps(writable(known), separators=(",", ":"))


def from_line(line: str) -> Moment | None:
    """None for a line that is torn or not ours."""
    try:
        return Moment.from_bytes(line.encode())
    except IntegrityError:
        return None


def append(path: Path, moments: Iterable[Moment]) -> None:
    """``moments``: the last one is now. Raises OSError, also where less than ``MIN_FREE_BYTES`` are free. Blocks."""
    there = os.statvfs(path.parent)
    if there.f_bavail * there.f_frsize < MIN_FREE_BYTES:
        raise OSError(None, f"less than {MIN_FREE_BYTES >> 20} MiB are free", str(path))
    kept = tuple(moments)
    lines = "".join(f"{to_line(moment)}\n" for moment in kept).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        os.write(descriptor, (b"" if _whole(path, size) else b"\n") + lines)
    finally:
        os.close(descriptor)
    if kept and size + len(lines) > MAX_BYTES:
        _shorten(path, kept[-1].at)


def last_day(path: Path, now: float) -> tuple[Moment, ...]:
    """Those of the day before ``now`` (epoch seconds), oldest first. Empty if the file cannot be read. Blocks."""
    try:
        found = [moment for moment in _read(path) if now - DAY <= moment.at <= now]
    except OSError:
        return ()
    return tuple(sorted(found, key=lambda moment: moment.at))  # the clock may have been set back


def _whole(path: Path, size: int) -> bool:
    """Whether the file ends with a whole line: podwatch can be killed while it writes."""
    if not size:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _shorten(path: Path, now: float) -> None:
    """Write the file again with what half of its size holds, about two days. Not by age: the clock can have been set.
    What is later than ``now`` (epoch seconds) was written while it was wrong, and is dropped."""
    lines: list[str] = []
    room = MAX_BYTES // 2
    for moment in reversed(list(_read(path))):
        if not moment.at <= now:
            continue
        line = f"{to_line(moment)}\n"
        room -= len(line)
        if room < 0:
            break
        lines.append(line)
    staged = path.with_name(f".{path.name}.new")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write("".join(reversed(lines)))
    staged.replace(path)


def _read(path: Path) -> Iterator[Moment]:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), errors="replace") as file:
        while line := file.readline(MAX_LINE):
            if (moment := from_line(line)) is not None:
                yield moment
