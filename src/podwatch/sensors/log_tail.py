"""Follows log files by name (new lines since the last poll, across truncation, replacement and rotation; blocks), and
reads steps and finish lines from their lines.
"""

import contextlib
import glob
import json
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from podwatch.domain.trainer_log import StepPattern, StepRecord, TrainerLog
from podwatch.system.clock import Clock
from podwatch.system.files import open_file

# -- lines, and the step in a line -----------------------------------------------------------------------------------
# Pure. Logs can have no date, ANSI colours, torchrun's prefixes, or JSON records. The patterns of steps are data of
# the layouts.

MAX_LINE = 16 << 10
"""Bytes of one line that are kept; a log without line ends must not fill the memory."""

_LINE_END = re.compile(rb"[\r\n]")
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_PREFIX = re.compile(r"^\s*(?:\[(?P<name>[A-Za-z_][\w.-]{0,40})\]:\s*|\([\w :=.,+-]{1,80}\)\s*)")
_BARE = re.compile(r"^[\d\s:.,TZ/+|-]{0,40}(?:\b[A-Z]{4,8}\b[\s|:-]*)?")
_LOCATION = re.compile(r"\s*\[[\w./-]+::\d+\]$")


@dataclass(frozen=True, slots=True)
class Carry:
    """State of a splitter between two chunks: the unfinished line, and whether to drop its rest."""

    begun: bytes = b""
    overlong: bool = False


def split_lines(carry: Carry, chunk: bytes) -> tuple[Carry, tuple[bytes, ...]]:
    """Add a chunk; returns the lines it completed, without line ends and empty lines, cut to MAX_LINE bytes.

    A carriage return also ends a line: progress bars use it. The result does not depend on the chunk boundaries.
    """
    lines: list[bytes] = []
    *complete, rest = _LINE_END.split(chunk)
    begun, overlong = carry.begun, carry.overlong
    for piece in complete:
        line = begun if overlong else (begun + piece)[:MAX_LINE]
        if line:
            lines.append(line)
        begun, overlong = b"", False
    if not overlong:
        begun += rest
        if len(begun) > MAX_LINE:
            begun, overlong = begun[:MAX_LINE], True
    return Carry(begun, overlong), tuple(lines)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One decoded line. ``prefix`` is torchrun's name ("trainer0", "default0"), else empty."""

    text: str
    prefix: str = ""
    nested: bool = False
    """The line is a bar below another bar: tqdm moves the cursor up again after it."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The JSON object that the line is."""
    level: str = ""
    message: str = ""
    exception: str = ""
    """Of a JSON-mode log line, flat or in loguru's ``record``; the level in capitals. Empty if it is something else."""


@dataclass(frozen=True, slots=True)
class StepLine:
    """A finished step. ``role`` is empty where the line does not show it."""

    step: int
    role: str = ""


def clean(raw: bytes) -> LogLine:
    """Decode, strip colours and ``[trainer0]:``-like prefixes. Never raises."""
    decoded = raw.decode("utf-8", errors="replace")
    text = _ANSI.sub("", decoded)
    prefix = ""
    while (match := _PREFIX.match(text)) is not None:
        prefix = match["name"] or prefix
        text = text[match.end() :]
    text = text.strip()
    nested = "\x1b[A" in decoded and not decoded.startswith("\x1b[A")
    return _json_line(text, prefix, nested) if text.startswith("{") else LogLine(text, prefix, nested)


def _json_line(text: str, prefix: str, nested: bool) -> LogLine:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return LogLine(text, prefix, nested)
    record = row["record"] if isinstance(row.get("record"), dict) else row
    level = record.get("level")
    level = level.get("name") if isinstance(level, dict) else level
    message, exception = record.get("message"), record.get("exception")
    if not isinstance(message, str):
        return LogLine(text, prefix, nested, row)
    level = level.strip().upper() if isinstance(level, str) else ""
    return LogLine(text, prefix, nested, row, level, message.strip(), exception if isinstance(exception, str) else "")


class StepLines:
    """Finds the step in a line of any trainer. ``logs`` are what the layouts declare; a line of one trainer never
    matches a pattern of another."""

    def __init__(self, logs: Iterable[TrainerLog]) -> None:
        every = tuple(logs)
        patterns = [pattern for log in every for pattern in log.steps]
        self._plain = tuple(pattern for pattern in patterns if not pattern.json_level)
        self._json = tuple(pattern for pattern in patterns if pattern.json_level)
        self._records = tuple(record for log in every for record in log.records)
        self.run_bars = re.compile("|".join(name for log in every for name in log.run_bars) or "(?!)", re.IGNORECASE)
        self.epoch_bars = tuple(bar for log in every for bar in log.epoch_bars)
        self.epoch_lines = tuple(line for log in every for line in log.epoch_lines)

    def parse(self, line: LogLine, file_role: str = "") -> StepLine | None:
        """The step that this line reports as done, or None. Never raises. ``file_role`` is the result of
        role_of_file(). Progress bars need more than one line: ``sensors/progress.py``."""
        text = line.text
        role = _role_in(line.prefix) or file_role
        if not text.startswith("{"):
            return _first_step(self._plain, text, role)
        if line.level and any(pattern.json_level == line.level for pattern in self._json):
            return _first_step([p for p in self._json if p.json_level == line.level], line.message, role)
        record = self._record(text)
        match = record.step.search(text) if record is not None else None
        return StepLine(int(match[1]), role) if match is not None else None

    def is_record(self, text: str) -> bool:
        """Whether the text is a dictionary of training metrics, with or without a step."""
        return self._record(text) is not None

    def _record(self, text: str) -> StepRecord | None:
        for record in self._records if text.startswith("{") else ():
            if record.whole.match(text) is not None and record.needs.search(text) is not None:
                return record
        return None


def _first_step(patterns: Iterable[StepPattern], text: str, role: str) -> StepLine | None:
    for known in patterns:
        match = known.pattern.match(text)
        if match is not None and (known.also is None or known.also.search(text) is not None):
            shown = role or next((role for sign, role in known.roles.items() if sign in text), "")
            return StepLine(int(match[1]), shown)
    return None


def has_finish_line(line: LogLine, finish_line: str) -> bool:
    """Whether this line's message is the trainer's finish line (not merely a quotation of it)."""
    text = line.message if line.text.startswith("{") else line.text
    return finish_line in text and _BARE.sub("", _LOCATION.sub("", text), count=1) == finish_line


def role_of_file(path: str) -> str:
    """The role that writes this file. A step line alone does not show it: both formats start the same way."""
    return _role_in(path)


def _role_in(text: str) -> str:
    lowered = text.lower()
    if "orchestrator" in lowered:
        return "orchestrator"
    return "trainer" if "trainer" in lowered else ""


# -- files and positions ---------------------------------------------------------------------------------------------

BLOCK = 256 << 10
LINES_SHOWN = 50
"""Last lines of a log that are kept for display."""
READ_PER_LOOK = 4 << 20
"""Bytes of one file per poll. Older unread lines are skipped: the newest matter."""
FILES = 64
"""Maximum number of followed files, the last written first."""
TAIL = 16 << 10
"""Bytes read of a file that is followed from its end, so that its last lines can be shown."""
TAIL_LINES = 400
TAIL_BYTES = 256 << 10
HEAD = 64
"""Bytes that identify a file: file systems give a freed inode number to the next file at once."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far one file has been read. ``offset`` is in bytes; ``head`` are the file's first bytes."""

    device: int
    inode: int
    offset: int
    head: bytes = b""
    carry: Carry = field(default_factory=Carry)

    def same_file(self, info: os.stat_result, head: bytes) -> bool:
        return (
            (info.st_dev, info.st_ino) == (self.device, self.inode)
            and info.st_size >= self.offset
            and head.startswith(self.head)
        )


@dataclass(frozen=True, slots=True)
class FileNews:
    """New lines of one file in one poll. ``old`` lines were in the file before it was followed; they are only shown.

    ``mtime`` is the epoch second of the last write. ``error`` is the reason why the file could not be read. ``name`` is
    the path below the root.
    """

    path: str
    name: str = ""
    position: Position | None = None
    lines: tuple[LogLine, ...] = ()
    old: tuple[LogLine, ...] = ()
    mtime: float = 0.0
    error: str = ""
    figures: bool = False
    """It is a file of training metrics, not a log."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Which files to follow: globs below ``root`` (or absolute), and single paths."""

    root: Path
    globs: tuple[str, ...] = ()
    paths: tuple[Path, ...] = ()


def find(sources: Sources) -> tuple[tuple[str, str], ...]:
    """(path, name below the root) of existing regular files, single paths first, each file once. Blocks; never raises
    OSError.

    A link that leads out of ``root`` is not followed: code that runs in training can write below it.
    """
    found: dict[tuple[int, int], tuple[float, str, str]] = {}
    root = os.path.realpath(sources.root)
    for pattern in sources.globs:
        absolute = os.path.isabs(pattern)  # noqa: PTH117 - glob wants and gives text
        for name in glob.iglob(pattern, root_dir=None if absolute else root, recursive=True):  # noqa: PTH207
            path = name if absolute else os.path.join(root, name)  # noqa: PTH118
            with contextlib.suppress(OSError, ValueError):
                if not absolute and os.path.commonpath([root, os.path.realpath(path)]) != root:
                    continue
                info = os.stat(path)  # noqa: PTH116
                if stat.S_ISREG(info.st_mode):
                    inside = os.path.basename(name) if absolute else name  # noqa: PTH119
                    found.setdefault((info.st_dev, info.st_ino), (info.st_mtime, path, inside))
    newest = sorted(found.values(), reverse=True)[:FILES]
    singles = {str(path): path.name for path in sources.paths}
    rest = {path: inside for _, path, inside in sorted(newest, key=lambda item: item[1]) if path not in singles}
    return tuple((singles | rest).items())


def tails(sources: Sources) -> dict[str, tuple[str, ...]]:
    """The last ``TAIL_LINES`` lines of each log, by its name below the root, without colours. Blocks.

    For incidents: the next start overwrites the logs of an engine that died. A file that cannot be read is left out.
    """
    found: list[tuple[float, str, tuple[str, ...]]] = []
    for path, name in find(sources):
        with contextlib.suppress(OSError):
            fd = open_file(path, shown=True)
            try:
                info = os.fstat(fd)
                if stat.S_ISREG(info.st_mode):
                    found.append((info.st_mtime, name, _tail(fd, info.st_size)))
            finally:
                os.close(fd)
    newest = sorted(found, reverse=True)[:16]  # the files that were written last
    return {name: lines for _, name, lines in newest if lines}


def look(
    sources: Sources,
    positions: Mapping[str, Position],
    *,
    from_end: bool,
    since_wall: float | None = None,
    go_on: bool = False,
) -> tuple[FileNews, ...]:
    """Read all files once. Blocks; never raises OSError.

    ``from_end``: all present lines are old, with two exceptions: files that are not in ``positions`` and were written
    since ``since_wall`` (the present start made them), and with ``go_on`` the files in ``positions`` (an earlier
    podwatch read the present start up to there).
    """
    found = []
    for path, name in find(sources):
        known = positions.get(path)
        old = from_end and not (go_on and known is not None)
        found.append(replace(_look_at(path, known, old, since_wall), name=name))
    return tuple(found)


def _look_at(path: str, position: Position | None, from_end: bool, since_wall: float | None) -> FileNews:
    try:
        fd = open_file(path, shown=True)  # the content becomes visible to everybody who can read podwatch's status
    except FileNotFoundError:
        return FileNews(path)
    except OSError as error:
        return FileNews(path, position=position, error=f"{path}: {error.strerror}")
    try:
        info = os.fstat(fd)
        head = os.pread(fd, HEAD, 0)
        rotated: tuple[bytes, ...] = ()
        if position is not None and not position.same_file(info, head):
            rotated = _rest_of_rotated(path, position)
            position = Position(info.st_dev, info.st_ino, 0, head)
        elif position is None:
            position = Position(info.st_dev, info.st_ino, 0, head)
            new = since_wall is not None and info.st_mtime >= since_wall
            if from_end and not new:
                position, lines = _start_at_end(fd, position, info.st_size)
            else:
                from_end = False
                position, lines = _read(fd, position, info.st_size)
            return _news(path, position, lines, info, old=from_end)
        position, lines = _read(fd, replace(position, head=head), info.st_size)
        return _news(path, position, rotated + lines, info, old=from_end)
    except OSError as error:
        return FileNews(path, position=position, error=f"{path}: {error.strerror}")
    finally:
        os.close(fd)


def _news(path: str, position: Position, raw: Sequence[bytes], info: os.stat_result, *, old: bool) -> FileNews:
    news = FileNews(path, position=position, mtime=info.st_mtime)
    if old:
        return replace(news, old=tuple(map(clean, raw[-LINES_SHOWN:])))
    return replace(news, lines=tuple(map(clean, raw)))


def _tail(fd: int, size: int) -> tuple[str, ...]:
    begin = max(0, size - TAIL_BYTES)
    carry, lines = split_lines(Carry(overlong=begin > 0), os.pread(fd, size - begin, begin))
    if carry.begun:
        lines += (carry.begun,)  # a process that dies can leave its last line unfinished
    return tuple(clean(line).text for line in lines[-TAIL_LINES:])


def _start_at_end(fd: int, position: Position, size: int) -> tuple[Position, tuple[bytes, ...]]:
    begin = max(0, size - TAIL)
    _, lines = split_lines(Carry(overlong=begin > 0), os.pread(fd, size - begin, begin))
    # The next lines can continue an unfinished line: that line is old too, so its rest is dropped.
    last = os.pread(fd, 1, size - 1) if size else b"\n"
    return replace(position, offset=size, carry=Carry(overlong=last not in b"\r\n")), lines


def _read(fd: int, position: Position, size: int) -> tuple[Position, tuple[bytes, ...]]:
    offset, carry = position.offset, position.carry
    if size - offset > READ_PER_LOOK:
        offset, carry = size - READ_PER_LOOK, Carry(overlong=True)
    lines: list[bytes] = []
    while offset < size and (chunk := os.pread(fd, min(BLOCK, size - offset), offset)):
        carry, more = split_lines(carry, chunk)
        lines += more
        offset += len(chunk)
    return replace(position, offset=offset, carry=carry), tuple(lines)


def _rest_of_rotated(path: str, position: Position) -> tuple[bytes, ...]:
    """What was written to the old file before it became ``<path>.1``; nothing if it was truncated or deleted."""
    try:
        fd = open_file(path + ".1", shown=True)
    except OSError:
        return ()
    try:
        info = os.fstat(fd)
        if not position.same_file(info, os.pread(fd, HEAD, 0)):
            return ()
        end, lines = _read(fd, position, info.st_size)
        return lines + ((end.carry.begun,) if end.carry.begun else ())
    except OSError:
        return ()
    finally:
        os.close(fd)


def to_json(positions: Mapping[str, Position]) -> dict[str, list[object]]:
    """Positions in JSON form, for the journal. An unfinished line is read again from its first kept byte."""
    return {
        path: [p.device, p.inode, p.offset - (0 if p.carry.overlong else len(p.carry.begun)), p.head.hex()]
        for path, p in positions.items()
    }


def from_json(document: object) -> dict[str, Position] | None:
    """The inverse of ``to_json``; None where any entry is invalid: a file that seems new would be read from its
    beginning."""
    try:
        return {
            str(path): Position(int(device), int(inode), max(0, int(offset)), bytes.fromhex(head))
            for path, (device, inode, offset, head) in document.items()  # type: ignore[attr-defined]
        }
    except (AttributeError, TypeError, ValueError):
        return None


def known(news: Sequence[FileNews]) -> dict[str, Position]:
    """The positions for the next poll, without files that are gone."""
    return {item.path: item.position for item in news if item.position is not None}


# -- what reads the new lines besides the steps ---------------------------------------------------------------------

SILENT_SECONDS = 60.0
"""Seconds without a read after which a reading of the logs is BLIND: the disk or the progress sensor hangs."""

Found = TypeVar("Found")


def silent(seconds: float) -> str:
    return f"podwatch has not read the logs for {seconds:.0f} s"


class LogReader(ABC, Generic[Found]):
    """A sensor that gets the new lines of every log from the one that follows them, so that each is read once."""

    name = ""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked_at: float | None = None

    async def start(self) -> None:
        """Nothing of its own runs."""

    async def stop(self) -> None:
        """Nothing of its own runs."""

    @abstractmethod
    def look(self, news: Sequence[FileNews]) -> Found:
        """Runs in the thread, which can be abandoned: must not change any state."""

    @abstractmethod
    def count(self, found: Found, now: float) -> None:
        """Runs on the loop: ``found`` is the result of ``look`` for lines of the present start."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything: training was started."""

    def take(self, found: Found | None, now: float) -> None:
        """The logs were read. ``found`` is None where the lines belong to an earlier start."""
        self._looked_at = now
        if found is not None:
            self.count(found, now)

    def silence(self, now: float) -> float:
        """Seconds since the logs were last read; 0 before the first time."""
        return 0.0 if self._looked_at is None else now - self._looked_at
