"""The output of the demo: one line per event, readable without colours."""

import contextlib
import os
import sys
import time
from typing import TextIO

from podwatch.domain.event import Event
from podwatch.domain.finding import Severity

STYLES = {"demo": "bold cyan", "fault": "bold magenta", "bad": "bold red", "warn": "yellow", "good": "green", "": ""}


class Screen:
    """Lines with the wall-clock time and the seconds since the start. Colours only on a terminal without NO_COLOR, and
    where rich is installed (``podwatch[demo]``)."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._began = time.monotonic()
        self._console = None
        if self._out.isatty() and not os.environ.get("NO_COLOR"):
            with contextlib.suppress(ImportError):
                from rich.console import Console

                self._console = Console(file=self._out, highlight=False, soft_wrap=True)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def say(self, who: str, text: str, style: str = "") -> None:
        """One line; ``who`` is the actor: demo, training or podwatch."""
        clean = "".join(c if c.isprintable() else " " for c in text)
        self.plain(f"{time.strftime('%H:%M:%S')} {self.elapsed:5.1f}s  {who:<9} {clean}", style)

    def plain(self, text: str, style: str = "") -> None:
        if self._console is not None:
            from rich.text import Text

            self._console.print(Text(text, style=STYLES[style]))
        else:
            print(text, file=self._out, flush=True)

    def event(self, event: Event) -> None:
        style = {Severity.CRITICAL: "bad", Severity.WARNING: "warn"}.get(event.severity, "")
        self.say("podwatch", event.message, style)
