"""The dead-man's switch: URLs that are called while the run is well, so that a service reports a dead pod's silence.

Each call is a short child process with a deadline (``notify_child``): the daemon never imports an HTTP client. A call
is withheld while podwatch cannot observe training. A call that failed is not repeated: the next one follows soon.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.secrets import scrub
from podwatch.report.deliver_notices import FAILING_AFTER, NotSent, ask_child, shown_url

MOST_TEXT = 300


class Signal(StrEnum):
    """What the service learns. ``START``: podwatch has started."""

    START = "start"
    SUCCESS = "success"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    url: str
    body: str = ""


def call_of(url: str, signal: Signal, text: str) -> Call | None:
    """The HTTP call for ``url`` in its service's form, recognized by the URL: Uptime Kuma (``/api/push/``), Cronitor
    (``cronitor.link``), Better Stack (``/api/v1/heartbeat/``); all others as healthchecks.io. None: the service has no
    such signal. ``text`` is shown there; at most ``MOST_TEXT`` characters are sent."""
    parts, text = urlsplit(url), text[:MOST_TEXT]
    if "/api/push/" in parts.path:
        if signal is Signal.START:
            return None
        state = {"status": "down" if signal is Signal.FAIL else "up", "msg": text}
        return Call("GET", parts._replace(query=_query(parts.query, state)).geturl())
    if (parts.hostname or "").endswith(("cronitor.link", "cronitor.io")):
        named = {Signal.START: "run", Signal.SUCCESS: "complete", Signal.FAIL: "fail"}[signal]
        return Call("GET", parts._replace(query=_query(parts.query, {"state": named, "message": text})).geturl())
    if "/api/v1/heartbeat/" in parts.path and signal is Signal.START:
        return None
    ending = "" if signal is Signal.SUCCESS else f"/{signal}"
    return Call("POST", parts._replace(path=parts.path.rstrip("/") + ending).geturl(), text)


def _query(before: str, added: Mapping[str, str]) -> str:
    kept = [(name, value) for name, value in parse_qsl(before, keep_blank_values=True) if name not in added]
    return urlencode([*kept, *added.items()], quote_via=quote)


def signal_of(overall: str) -> Signal | None:
    """The signal for the status's ``overall``; None: withheld, because podwatch cannot observe training."""
    return {"ok": Signal.SUCCESS, "warning": Signal.SUCCESS, "critical": Signal.FAIL}.get(overall)


def text_of(status: Mapping[str, Any]) -> str:
    """One line for the service, from the status document (scrubbed): the run, its state and step, the worst reason."""
    training = status["training"]
    step = "" if training["step"] is None else f", step {training['step']}"
    reasons = status["reasons"]
    return f"{status['run_id']}: {training['state']}{step}" + (f"; {reasons[0]['summary']}" if reasons else "")


class _Line:
    """One URL, and how its last calls went."""

    def __init__(self, url: str) -> None:
        self.url, self.failures, self.why = url, 0, ""


class DeadMan:
    """Calls every URL. ``beat`` raises nothing; a URL that cannot be called is a finding."""

    def __init__(self, urls: Sequence[str], timeout: float) -> None:
        self._lines, self._timeout = [_Line(url) for url in urls], timeout
        self._started = False
        self._calling = asyncio.Lock()

    async def beat(self, status: Mapping[str, Any]) -> None:
        """``status``: the status document. The first call only says that podwatch has started: training is not
        running yet, which is no failure."""
        async with self._calling:
            signal = signal_of(str(status["overall"])) if self._started else Signal.START
            self._started = True
            if signal is not None:
                await self._send(signal, text_of(status))

    async def _send(self, signal: Signal, text: str) -> None:
        await asyncio.gather(*(self._call(line, signal, text) for line in self._lines))

    async def _call(self, line: _Line, signal: Signal, text: str) -> None:
        call = call_of(line.url, signal, text)
        if call is None:
            return
        try:
            why = await send(call, self._timeout)
        except Exception as error:  # an error here must never reach the daemon
            why = repr(error)
        line.failures, line.why = (line.failures + 1, scrub(why)[:MOST_TEXT]) if why else (0, "")

    def findings(self, at: float) -> tuple[Finding, ...]:
        return tuple(
            Finding(
                FindingKind.NOTIFY_FAILING,
                Severity.WARNING,
                f"the dead-man's switch cannot be called: {line.why}",
                at,
                "`podwatch check --notify` calls it and shows the response",
                subject=shown_url(line.url),
            )
            for line in self._lines
            if line.failures >= FAILING_AFTER
        )


async def send(call: Call, timeout: float) -> str:
    """Make the call in a child process. Returns why it failed; empty if the service accepted it."""
    try:
        await ask_child({"url": call.url, "timeout": timeout, "method": call.method, "body": call.body})
    except NotSent as error:
        return str(error)
    return ""
