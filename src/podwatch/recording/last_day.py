"""The last day of the run for the page's plots: one line a minute, and one at each change, in ``history.jsonl``.

Appended to and never kept in memory: without a reader the page costs one line a minute. A line that cannot be read is
left out, a disk that is full leaves a hole. ``podwatch replay`` reads the recording instead, which has every turn.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from podwatch.recording.recorder import MIN_FREE_BYTES

DAY: Final = 86400.0
MAX_BYTES: Final = 2 << 20
"""About four days of a pod with 8 GPUs; then the file is written again with the last two."""
MAX_LINE: Final = 8 << 10


@dataclass(frozen=True, slots=True)
class Moment:
    """The run at ``at`` (epoch seconds). ``state``: of training, until the next one.
    ``started``: a trainer is started now. ``gpus``: index -> (used, total) bytes. ``step_at``: epoch seconds of
    ``step``. Only ``at`` and ``state`` are known at a change between two looks."""

    at: float
    state: str
    started: bool = False
    gpus: tuple[tuple[int, int, int], ...] = ()
    disk: tuple[int, int] | None = None
    """Used and capacity in bytes."""
    next_save: int | None = None
    step: int | None = None
    step_at: float | None = None
    reward: float | None = None
    loss: float | None = None


_SHORT: Final = {"started": "s", "gpus": "g", "disk": "d", "next_save": "n", "step": "i", "step_at": "j"}


def to_line(moment: Moment) -> str:
    """One line of JSON without what is not known."""
    kept: dict[str, Any] = {"t": round(moment.at, 1), "u": moment.state}
    for name in ("started", "gpus", "disk", "next_save", "step", "step_at", "reward", "loss"):
        value = getattr(moment, name)
        if value is not None and value is not False and value != ():
            if name in ("reward", "loss"):
                value = float(f"{value:.6g}")
            kept[_SHORT.get(name, name)] = round(value, 1) if name == "step_at" else value
    return json.dumps(kept, separators=(",", ":"))


def from_line(line: str) -> Moment | None:
    """None for a line that is torn or not ours."""
    try:
        found = json.loads(line)
        disk, numbers = found.get("d"), {name: found.get(name) for name in ("reward", "loss")}
        return Moment(
            float(found["t"]),
            str(found["u"]),
            bool(found.get("s")),
            tuple((int(index), int(used), int(total)) for index, used, total in found.get("g", ())),
            None if disk is None else (int(disk[0]), int(disk[1])),
            None if found.get("n") is None else int(found["n"]),
            None if found.get("i") is None else int(found["i"]),
            None if found.get("j") is None else float(found["j"]),
            **{name: None if value is None else float(value) for name, value in numbers.items()},
        )
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError):
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
