"""Progress of a restore: one rewritten line on a terminal, a line every 30 s elsewhere, nothing with --json."""

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

import click

from podwatch.client.format import size, span
from podwatch.domain.errors import RemoteError

LINE_SECONDS = 30.0
"""Between two lines in a log: about a dozen for a 47 GB restore."""
DRAW_SECONDS = 0.2
"""Between two drawings on a terminal."""
_REWRITE = "\r\x1b[K"
"""Go to the start of the line and erase it."""


class Showing(AbstractContextManager["Showing"]):
    """Callbacks of a restore: ``told`` shows progress, ``waiting`` a store that does not answer."""

    def __init__(self, *, quiet: bool, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._quiet, self._monotonic = quiet, monotonic
        self._began: tuple[float, int] | None = None
        self._last = 0.0
        self._drawn = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_line()

    def told(self, done: int, total: int) -> None:
        if self._quiet:
            return
        now = self._monotonic()
        if self._began is None:
            self._began, self._last = (now, done), now
        if sys.stderr.isatty():
            if now - self._last >= DRAW_SECONDS or not self._drawn or done >= total:
                self._last, self._drawn = now, True
                click.echo(f"{_REWRITE}{self._text(now, done, total)}", err=True, nl=False)
        elif now - self._last >= LINE_SECONDS and done < total:
            self._last = now
            click.echo(self._text(now, done, total), err=True)

    def waiting(self, error: RemoteError, seconds: float) -> None:
        if not self._quiet:
            self._end_line()
            click.echo(f"{error.what}; podwatch retries in {span(seconds)}", err=True)

    def _text(self, now: float, done: int, total: int) -> str:
        assert self._began is not None
        seconds = now - self._began[0]
        speed = (done - self._began[1]) / seconds if seconds > 0 else 0.0
        left = f", about {span((total - done) / speed)} left" if speed > 0 and done < total else ""
        return f"{size(done)} of {size(total)} ({100 * done // max(1, total)} %), {size(speed)}/s{left}"

    def _end_line(self) -> None:
        if self._drawn:
            self._drawn = False
            click.echo(err=True)
