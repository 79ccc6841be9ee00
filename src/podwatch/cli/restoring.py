"""How a restore shows itself while it runs: a bar on a terminal, a line now and then elsewhere, nothing with --json."""

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING

import click

from podwatch.client.times import size, span
from podwatch.domain.errors import RemoteError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_SECONDS = 30.0
"""Between two lines in a log: a 47 GB restore leaves about a dozen."""


class Showing(AbstractContextManager["Showing"]):
    """``told`` is the restore's progress, ``waiting`` its word about a store that does not answer."""

    def __init__(self, *, quiet: bool, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._quiet, self._monotonic = quiet, monotonic
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._began: tuple[float, int] | None = None
        self._last = 0.0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def told(self, done: int, total: int) -> None:
        if self._quiet:
            return
        if sys.stderr.isatty():
            self._draw(done, total)
        else:
            self._line(done, total)

    def waiting(self, error: RemoteError, seconds: float) -> None:
        if not self._quiet:
            click.echo(f"{error.what}; tried again in {span(seconds)}", err=True)

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None or self._task is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            columns = (TextColumn("restore"), BarColumn(bar_width=None), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, TimeRemainingColumn(compact=True), console=Console(stderr=True))
            self._task = self._bar.add_task("restore", total=total, completed=done)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total, refresh=done >= total)

    def _line(self, done: int, total: int) -> None:
        now = self._monotonic()
        if self._began is None:
            self._began, self._last = (now, done), now
        if now - self._last < LINE_SECONDS or done >= total:
            return
        self._last = now
        speed = (done - self._began[1]) / (now - self._began[0])
        left = f", about {span((total - done) / speed)} left" if speed > 0 else ""
        click.echo(f"{size(done)} of {size(total)} ({100 * done // max(1, total)} %), {size(speed)}/s{left}", err=True)
