"""How far a long command is, for people on a terminal and for logs."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

import click

from podwatch.domain.errors import RemoteError
from podwatch.domain.times import size, span
from podwatch.system.clock import Clock

LINE_SECONDS = 30.0
"""Between two lines in a log: about a dozen for a 47 GB restore."""
DRAW_SECONDS = 0.2
"""Between two drawings on a terminal."""
_REWRITE = "\r\x1b[K"
"""Go to the start of the line and erase it."""


class Progress(AbstractContextManager["Progress"]):
    """Shows on standard error how far a download or a comparison is: on a terminal one line that is redrawn, else a
    line now and then. ``what``: the beginning of each line."""

    def __init__(self, clock: Clock, *, quiet: bool, what: str = "") -> None:
        self._quiet, self._clock, self._what = quiet, clock, what
        self._began: tuple[float, int] | None = None
        self._last = 0.0
        self._drawn = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_line()

    def show(self, done: int, total: int) -> None:
        if self._quiet:
            return
        now = self._clock.monotonic()
        if self._began is None:
            self._began, self._last = (now, done), now
        if sys.stderr.isatty():
            if now - self._last >= DRAW_SECONDS or not self._drawn or done >= total:
                self._last, self._drawn = now, True
                click.echo(f"{_REWRITE}{self._text(now, done, total)}", err=True, nl=False)
        elif now - self._last >= LINE_SECONDS and done < total:
            self._last = now
            click.echo(self._text(now, done, total), err=True)

    def counting(self, total: int) -> Callable[[int], None]:
        """What shows the sum of the numbers that it is called with."""
        done = 0

        def add(count: int) -> None:
            nonlocal done
            done += count
            self.show(done, total)

        return add

    def waiting(self, error: RemoteError, seconds: float) -> None:
        """A store does not answer: podwatch tries again after ``seconds``."""
        if not self._quiet:
            self._end_line()
            click.echo(f"{error.what}; podwatch retries in {span(seconds)}", err=True)

    def _text(self, now: float, done: int, total: int) -> str:
        assert self._began is not None
        seconds = now - self._began[0]
        speed = (done - self._began[1]) / seconds if seconds > 0 else 0.0
        left = f", about {span((total - done) / speed)} left" if speed > 0 and done < total else ""
        return f"{self._what}{size(done)} of {size(total)} ({100 * done // max(1, total)} %), {size(speed)}/s{left}"

    def _end_line(self) -> None:
        if self._drawn:
            self._drawn = False
            click.echo(err=True)
