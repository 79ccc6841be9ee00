"""``podwatch logs``: the trainer's output."""

import os
import sys
import time
from pathlib import Path
from typing import BinaryIO

import click

from podwatch.cli.common import Where, common
from podwatch.client.ask import ask_status
from podwatch.domain.errors import HostError, PermissionDenied

_BLOCK = 1 << 16
POLL_SECONDS = 0.5


@click.command("logs", short_help="Print the end of the trainer's log.")
@common
@click.option("-f", "--follow", is_flag=True, help="Go on as it grows, through rotations, until Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=50, show_default=True, help="Last lines first.")
def command(where: Where, follow: bool, lines: int) -> None:
    """Print the end of the log that holds the trainer's stdout and stderr."""
    document = ask_status(where.run, where.config)
    name = str((document.get("training") or {}).get("log_path") or "")
    if not name:
        raise HostError("no log file is known", fix="start podwatch; a trainer it only watches keeps its own log")
    path = Path(name)
    file = _open(path)
    try:
        _last_lines(file, lines)
        while follow:
            if not _copy(file):
                sys.stdout.flush()
                time.sleep(POLL_SECONDS)
                file = _reopened(file, path)
    except KeyboardInterrupt:
        pass
    finally:
        file.close()


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except PermissionError as error:
        raise PermissionDenied("the log is not yours to read", where=str(path), fix="use root") from error
    except OSError as error:
        raise HostError(
            f"cannot read the log: {error.strerror}", where=str(path), fix="see `podwatch status`"
        ) from error


def _last_lines(file: BinaryIO, lines: int) -> None:
    """Print the last ``lines`` lines, reading backwards in blocks."""
    position = file.seek(0, os.SEEK_END)
    tail = b""
    while position > 0 and tail.count(b"\n") <= lines:
        step = min(_BLOCK, position)
        position = file.seek(position - step)
        tail = file.read(step) + tail
    file.seek(0, os.SEEK_END)
    kept = tail.splitlines(keepends=True)
    _write(b"".join(kept[-lines:] if lines else []))


def _copy(file: BinaryIO) -> bool:
    block = file.read(_BLOCK)
    _write(block)
    return bool(block)


def _write(data: bytes) -> None:
    """Raw to a pipe; to a terminal without what could move the cursor."""
    if sys.stdout.isatty():
        text = data.decode("utf-8", "replace")
        data = "".join(c if c.isprintable() or c in "\n\t" else "" for c in text).encode()
    sys.stdout.buffer.write(data)
    sys.stdout.flush()


def _reopened(file: BinaryIO, path: Path) -> BinaryIO:
    """The same file, from the start if it was truncated; the new one after a rotation."""
    try:
        now, open_one = path.stat(), os.fstat(file.fileno())
    except OSError:
        return file
    if (now.st_dev, now.st_ino) != (open_one.st_dev, open_one.st_ino):
        file.close()
        return _open(path)
    if now.st_size < file.tell():
        file.seek(0)
    return file
