"""``podwatch logs``: print the trainer's log with secrets removed, because logs are shared and pasted into issues."""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import BinaryIO

import click

from podwatch.cli.common import Where, common
from podwatch.client.api import ask_status
from podwatch.domain.errors import HostError, PermissionDenied, PodwatchError
from podwatch.domain.secrets import scrub

_BLOCK = 1 << 16
POLL_SECONDS = 0.5


@click.command("logs", short_help="Print the end of the trainer's log.")
@common
@click.option("-f", "--follow", is_flag=True, help="Continue with new lines, through rotations, until Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=50, show_default=True, help="Number of last lines.")
def command(where: Where, follow: bool, lines: int) -> None:
    """Print the end of the log with the trainer's stdout and stderr. Secrets are removed from the output, not from the
    file."""
    document = ask_status(where.run, where.config)
    name = str((document.get("training") or {}).get("log_path") or "")
    if not name:
        raise HostError(
            "no log file known",
            fix="start podwatch; if podwatch did not start the trainer, read the trainer's own log",
        )
    path = Path(name)
    file = _open(path)
    _learn_secrets(where)
    try:
        _last_lines(file, lines)
        held = b""
        """The unfinished last line: half a secret would not be recognised."""
        while follow:
            block = file.read(_BLOCK)
            whole, newline, rest = (held + block).rpartition(b"\n")
            held = rest if block and len(rest) < _BLOCK else b""
            _write(whole + newline if held else whole + newline + rest)
            if not block:
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
        raise PermissionDenied(
            "Permission denied: cannot read the log", where=str(path), fix="run the command as root"
        ) from error
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


def _learn_secrets(where: Where) -> None:
    """Register the secrets of the configuration and its files with the scrubber, as far as this user can read them."""
    from podwatch.config.loading import load_settings
    from podwatch.daemon.environment import learn_secrets

    with contextlib.suppress(PodwatchError):
        named = Path(where.config) if where.config else None
        learn_secrets(load_settings(named, environ=os.environ, run=where.run).settings)


def _write(data: bytes) -> None:
    """Write ``data`` without secrets, and to a terminal also without control characters."""
    if not data:
        return
    text = scrub(data.decode("utf-8", "surrogateescape"))
    if sys.stdout.isatty():
        text = "".join(c if c.isprintable() or c in "\n\t" else "" for c in text)
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
    sys.stdout.flush()


def _reopened(file: BinaryIO, path: Path) -> BinaryIO:
    """The same file, from its start after a truncation; the new file after a rotation."""
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
