"""The file format of a recording: what the sensors reported, turn by turn, small enough to keep for weeks.

A recording is a directory of segments (or one segment alone). A segment is JSON lines, gzipped (``zcat`` reads it; not
gzipped is read too): a header, then one line per turn with the changes since the turn before. The first turn is whole,
so each segment can be read alone and the oldest can be removed. How a change is written: recording/codec.py. Times
called ``at`` are seconds of CLOCK_MONOTONIC, ``boot_at`` of CLOCK_BOOTTIME, ``wall`` since the epoch; numbers that JSON
lacks are {"#": "inf"}, "-inf" and "nan". Readers ignore unknown fields.
"""

import contextlib
import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

from podwatch import __version__
from podwatch.config.settings import Policies
from podwatch.detection.learned import Learned
from podwatch.domain.document import Document, Label, strictly, unreadable_as, written_as
from podwatch.domain.errors import HostError, IntegrityError, UsageError
from podwatch.domain.snapshot import Snapshot
from podwatch.recording.codec import Mask, Turns, change

SUFFIX = ".jsonl.gz"
MAX_LINE = 8 << 20
"""One turn, unpacked: a tree of 10,000 processes takes 4 MB. A longer line is not from podwatch."""
MAX_SEGMENT = 1 << 30
"""One segment, unpacked: podwatch starts a new one at a few MB packed."""
LATEST_WALL = 250_000_000_000.0
"""Epoch seconds of the year 9892: calendars cannot show later times."""
_CHUNK = 1 << 16
_GZIP = zlib.MAX_WBITS | 16
_EITHER = zlib.MAX_WBITS | 32

Time = Annotated[float, strictly(above=-LATEST_WALL, below=LATEST_WALL)]


def _recorded(policies: Policies) -> dict[str, Any]:
    return policies.for_recording()


@dataclass(frozen=True, slots=True)
class Header(Document):
    """The first line of a segment.

    ``session`` is one uninterrupted recording: while it stays the same, no turn is missing between two segments.
    ``learned`` is what podwatch had learned of the run when the segment started, ``policies`` the rules it judged by.
    ``poll`` is the sensing loop's pause in seconds, ``wall`` the epoch second at which the segment started.
    """

    KIND = "podwatch-recording"
    FILE = "the header of this recording"

    run_id: Label
    layout: Label = ""
    session: Label = ""
    wall: Time = 0.0
    poll: Annotated[float, strictly(above=0.0, below=LATEST_WALL)] = 2.0
    policies: Annotated[Policies, written_as(_recorded)] = field(default_factory=Policies)
    learned: Annotated[Learned, unreadable_as(Learned())] = field(default_factory=Learned)
    version: Label = __version__


def not_a_recording(where: str, why: str = "") -> UsageError:
    return UsageError(
        "this is not a recording" + (f": {why}" if why else ""),
        where=where,
        fix="name a directory that podwatch recorded into, or one of the .jsonl.gz files in it",
    )


class SegmentWriter:
    """Writes one segment. Raises OSError, also when the disk is full. Blocks: not for the event loop."""

    def __init__(self, path: Path, header: Header, mask: Mask = str) -> None:
        self.path, self._mask = path, mask
        self._file = FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
        self._packer = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
        self._last: Snapshot | None = None
        self.written = 0
        """Bytes in the file."""
        self.turns = 0
        try:
            self._line(header.to_json())
            self.flush()
        except BaseException:
            self.abandon()
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    def turn(self, snapshot: Snapshot) -> None:
        self._line(change(self._last, snapshot, self._mask))
        self._last = snapshot
        self.turns += 1

    def flush(self) -> None:
        """Make everything written so far readable by others; it then survives this process."""
        self._put(self._packer.flush(zlib.Z_SYNC_FLUSH))

    def close(self) -> None:
        try:
            self._put(self._packer.flush())
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Close without writing, after an error."""
        self._file.close()

    def _line(self, data: dict[str, Any]) -> None:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
        self._put(self._packer.compress(text.encode("ascii") + b"\n"))

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            count = self._file.write(view) or 0
            self.written += count
            view = view[count:]


class Segment:
    """One segment, read from the front. ``problem``: why reading stopped early, if so."""

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises UsageError or HostError."""
        self.path = path
        self.problem = ""
        self.torn = False
        """It ends in the middle of a line: podwatch or the machine died while writing it."""
        self._lines = _lines(path, self)
        first = next(self._lines, None)
        if first is None:
            raise not_a_recording(
                str(path), self.problem or ("it has no whole line" if self.torn else "the file is empty")
            )
        self.header = _header(first, str(path))

    def __iter__(self) -> Iterator[Snapshot]:
        """The turns, once. Ends at the first unreadable line; earlier turns stay valid."""
        turns = Turns()
        for number, line in enumerate(self._lines, 2):
            try:
                last = turns.next(line)
                if not all(abs(t) < LATEST_WALL for t in (last.at, last.wall, last.boot_at or 0.0)):
                    raise ValueError("its times are invalid")
            except (ValueError, TypeError, RecursionError) as error:
                self.problem = f"line {number} cannot be read ({_short(error)}): the rest of this segment is left out"
                return
            yield last


def read_recording(path: Path) -> Iterator[Segment]:
    """The segments of a directory in order, or of one file. Raises UsageError or HostError for one that cannot be read
    at all; a damaged one ends early and has a ``problem``."""
    for segment in segments_of(path):
        yield Segment(segment)


def segments_of(path: Path) -> tuple[Path, ...]:
    """Raises UsageError or HostError."""
    try:
        if not path.is_dir():
            path.stat()
            return (path,)
        found = tuple(sorted(p for p in path.iterdir() if p.name.endswith((SUFFIX, ".jsonl"))))
    except FileNotFoundError as error:
        raise UsageError("recording not found", where=str(path)) from error
    except OSError as error:
        raise HostError(f"the recording cannot be read: {error.strerror or error}", where=str(path)) from error
    if not found:
        raise UsageError(
            "no recording found in this directory",
            where=str(path),
            fix="set [record] enabled = true and run the daemon first",
        )
    return found


def write_recording(path: Path, header: Header, snapshots: Iterable[Snapshot], mask: Mask = str) -> int:
    """Write one segment with all of them; returns the number of turns. Raises OSError."""
    writer = SegmentWriter(path, header, mask)
    try:
        for snapshot in snapshots:
            writer.turn(snapshot)
    finally:
        writer.close()
    return writer.turns


def _header(line: bytes, where: str) -> Header:
    """Raises UsageError for a line that is no header, or that of a later podwatch."""
    if b'"podwatch-recording"' not in line:
        raise not_a_recording(where)
    try:
        return Header.from_bytes(line, where=where)
    except IntegrityError as error:
        damaged = "this segment is damaged: move it away, or name the others one by one"
        raise UsageError(error.what, where=where, fix=error.fix or damaged) from error


def _lines(path: Path, segment: Segment) -> Iterator[bytes]:
    """Whole lines, unpacked, within the bounds."""
    rest: list[bytes] = []
    waiting = total = 0
    try:
        for piece in _unpacked(path):
            total += len(piece)
            if b"\n" in piece:
                *whole, last = b"".join((*rest, piece)).split(b"\n")
                yield from whole
                rest, waiting = [last], len(last)
            else:
                rest.append(piece)
                waiting += len(piece)
            if waiting > MAX_LINE or total > MAX_SEGMENT:
                segment.problem = "larger than any recording of podwatch: the rest of this segment is left out"
                return
    except zlib.error as error:
        segment.problem = f"damaged ({_short(error)}): the rest of this segment is left out"
    except OSError as error:
        raise HostError(f"the recording cannot be read: {error.strerror or error}", where=str(path)) from error
    segment.torn = waiting > 0


def _unpacked(path: Path) -> Iterator[bytes]:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would block forever
    with FileIO(fd) as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(None, "it is not a regular file")
        data = file.read(_CHUNK) or b""
        if not data.startswith(b"\x1f\x8b"):
            while data:
                yield data
                data = file.read(_CHUNK) or b""
            return
        packer = zlib.decompressobj(_EITHER)
        while data:
            yield packer.decompress(data, _CHUNK)
            data = packer.unconsumed_tail
            if packer.eof:
                data = packer.unused_data.lstrip(b"\0")  # a file of several streams is a gzip file, too
                packer = zlib.decompressobj(_EITHER)
            data = data or file.read(_CHUNK) or b""
        yield packer.flush()  # the rest of its buffer


def _short(error: Exception) -> str:
    return str(error)[:120]
