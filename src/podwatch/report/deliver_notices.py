"""Sends notices to the operator's command and to URLs, without blocking the daemon.

Each channel has its own queue and task, so that a hung one does not block the others. Every attempt is a short child
process with a deadline: the daemon never imports HTTP clients.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from podwatch.domain.errors import PodwatchError
from podwatch.domain.event import NOTICE_SCHEMA_VERSION, Notice
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.secrets import scrub, scrub_all
from podwatch.report.alerts import body, reaches
from podwatch.system.child import run_child
from podwatch.system.clock import either
from podwatch.system.environment_without_secrets import scrubbed_environment
from podwatch.trainer.environment import build_environment

QUEUE = 32
"""Pending notices of one channel: more than the hourly limit. A full queue drops the oldest that is not critical."""
ATTEMPTS = 8
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 600.0
"""Seconds; each backoff is three times the one before, so that eight attempts take half an hour."""
HURRY_PAUSE = 0.2
"""Seconds of backoff while podwatch exits."""
FAILING_AFTER = 2
"""Failed attempts in a row before the finding: one lost packet is none."""

_IN_ENVIRONMENT = ("run_id", "host", "topic", "change", "severity", "key", "title", "text", "cost", "do", "at")


class NotSent(Exception):  # noqa: N818
    """One attempt failed. ``final``: a retry would fail, too."""

    def __init__(self, why: str, *, final: bool = False) -> None:
        super().__init__(why)
        self.final = final


class Channel(Protocol):
    @property
    def name(self) -> str:
        """For display; without secrets."""
        ...

    async def send(self, document: Mapping[str, Any]) -> None:
        """Send one notice within a deadline. Raises NotSent."""
        ...


def document_of(notice: Notice, *, run_id: str, host: str) -> dict[str, Any]:
    """The notice as the scrubbed document that channels get (docs/notifications.md)."""
    document = {
        "schema_version": NOTICE_SCHEMA_VERSION,
        "run_id": run_id,
        "host": host,
        "topic": str(notice.topic),
        "change": str(notice.change),
        "severity": str(notice.severity),
        "key": notice.key,
        "title": f"{run_id}: {notice.title}",
        "text": body(notice),
        "cost": notice.cost,
        "do": notice.do,
        "at": datetime.fromtimestamp(notice.wall, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "unsent": notice.unsent,
        "fields": dict(notice.fields),
    }
    cleaned: dict[str, Any] = scrub_all(document)
    return cleaned


@dataclass(frozen=True, slots=True)
class CommandChannel:
    """The operator's program: gets the document on standard input, and its main fields in ``PODWATCH_*``. ``user``: it
    runs as this user; empty: as podwatch's own."""

    argv: Sequence[str]
    timeout: float
    name: str = "notify.command"
    least: Severity | None = None
    user: str = ""

    async def send(self, document: Mapping[str, Any]) -> None:
        said = {f"PODWATCH_{name.upper()}": str(document.get(name, "")) for name in _IN_ENVIRONMENT}
        try:
            done = await run_child(
                self.argv,
                timeout=self.timeout,
                env={
                    **build_environment(os.environ, {}, None, user=self.user),
                    **{n: v.replace("\0", "") for n, v in said.items()},
                },
                cwd=Path("/"),
                stdin=json.dumps(document).encode() + b"\n",
                limit=4096,
                user=self.user,
            )
        except PodwatchError as error:
            raise NotSent(f"{error.what}; {error.fix}" if error.fix else error.what, final=True) from error
        if done.timed_out:
            raise NotSent(f"the command did not end within {self.timeout:g} s")
        if not done.ok:
            raise NotSent(_last(f"exit {done.code}", done.output))


@dataclass(frozen=True, slots=True)
class UrlChannel:
    """One URL. It is a secret, so the child process gets it on standard input."""

    url: str
    timeout: float
    least: Severity | None = None

    @property
    def name(self) -> str:
        return shown_url(self.url)

    async def send(self, document: Mapping[str, Any]) -> None:
        await ask_child({"url": self.url, "timeout": self.timeout, "notice": dict(document)})


async def ask_child(order: Mapping[str, Any]) -> None:
    """Let a child process make one call (``notify_child``): the daemon never imports an HTTP client. Raises NotSent if
    the service did not accept it."""
    timeout = float(order["timeout"])
    done = await run_child(
        [sys.executable, "-P", "-m", "podwatch.report.notify_child"],
        timeout=timeout + 5.0,  # the child's own deadline is earlier and has a better message
        env=scrubbed_environment(os.environ),
        cwd=Path("/"),
        stdin=json.dumps(order).encode() + b"\n",
        limit=8192,
    )
    if done.timed_out:
        raise NotSent(f"no answer within {timeout:g} s")
    try:
        answer = json.loads(done.output.strip().splitlines()[-1])
        ok, why, final = bool(answer["ok"]), str(answer["why"]), bool(answer["final"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise NotSent(_last(f"exit {done.code}", done.output)) from None
    if not ok:
        raise NotSent(why, final=final)


Sleep = Callable[[float], Coroutine[Any, Any, None]]
"""``Clock.sleep`` outside tests."""


class Outbox:
    """One channel with its queue."""

    def __init__(self, channel: Channel, sleep: Sleep, *, first_pause: float = FIRST_PAUSE) -> None:
        self.channel, self._sleep, self._first = channel, sleep, first_pause
        self.least: Severity | None = getattr(channel, "least", None)
        """The lowest severity that this channel asks for; None: what ``[notify] min_severity`` says."""
        self._waiting: deque[dict[str, Any]] = deque()
        self._wake, self._idle, self._hurry = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._idle.set()
        self.failures = 0
        self.why = ""
        self.lost = 0
        self.sent = 0
        self._task = asyncio.create_task(self._run(), name=f"notify {channel.name}")

    def put(self, document: dict[str, Any]) -> None:
        if len(self._waiting) >= QUEUE:
            dropped = next((d for d in self._waiting if d["severity"] != str(Severity.CRITICAL)), self._waiting[0])
            self._waiting.remove(dropped)
            self.lost += 1
        self._waiting.append(document)
        self._idle.clear()
        self._wake.set()

    async def flush(self, seconds: float) -> None:
        """Try to send the pending notices within ``seconds``."""
        self._hurry.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        while True:
            if not self._waiting:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
                continue
            document = self._waiting[0]
            await self._deliver(document)
            if self._waiting and self._waiting[0] is document:
                self._waiting.popleft()

    async def _deliver(self, document: dict[str, Any]) -> None:
        for attempt in range(ATTEMPTS):
            try:
                await self.channel.send(document)
            except NotSent as error:
                self.failures, self.why = self.failures + 1, one_line(str(error))
                final = error.final
            except Exception as error:  # an error of a channel must never reach the daemon
                self.failures, self.why, final = self.failures + 1, one_line(repr(error)), True
            else:
                self.failures, self.why, self.lost = 0, "", 0
                self.sent += 1
                return
            if final or attempt + 1 == ATTEMPTS:
                self.failures = max(self.failures, FAILING_AFTER)
                self.lost += 1
                return
            await self._pause(min(LONGEST_PAUSE, self._first * 3.0**attempt))

    async def _pause(self, seconds: float) -> None:
        """Sleep for ``seconds``, at most ``HURRY_PAUSE`` once ``flush`` was called."""
        if self._hurry.is_set():
            await self._sleep(min(seconds, HURRY_PAUSE))
            return
        await either(self._sleep(seconds), self._hurry.wait())


class Notifier:
    """All configured channels. ``tell`` never blocks and never raises."""

    def __init__(self, channels: Sequence[Channel], sleep: Sleep, *, first_pause: float = FIRST_PAUSE) -> None:
        self.outboxes = [Outbox(channel, sleep, first_pause=first_pause) for channel in channels]

    def tell(self, document: dict[str, Any], notice: Notice | None = None) -> None:
        """Queue the document in each channel that the notice reaches; in all of them without a notice."""
        for outbox in self.outboxes:
            if notice is None or reaches(notice, outbox.least):
                outbox.put(document)

    def findings(self, at: float) -> tuple[Finding, ...]:
        """A warning for each failing channel."""
        return tuple(
            Finding(
                FindingKind.NOTIFY_FAILING,
                Severity.WARNING,
                f"notifications cannot be sent: {o.why}" + (f" ({o.lost} lost)" if o.lost else ""),
                at,
                "`podwatch check --notify` sends one and shows the response",
                subject=o.channel.name,
            )
            for o in self.outboxes
            if o.failures >= FAILING_AFTER
        )

    async def flush(self, seconds: float) -> None:
        await asyncio.gather(*(o.flush(seconds) for o in self.outboxes))

    async def close(self) -> None:
        await asyncio.gather(*(o.close() for o in self.outboxes))


def shown_url(url: str) -> str:
    """The scheme of the URL, and the host of a web address; the rest can be a secret."""
    scheme = url.partition(":")[0]
    if scheme not in ("http", "https"):
        return f"{scheme}://..."
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", f":{parts.port}" if parts.port else ""
    except ValueError:
        return f"{scheme}://..."
    return f"{scheme}://{host}{port}/..."


def one_line(text: str) -> str:
    """What a service or a program said, in one line without secrets."""
    return scrub("".join(c if c.isprintable() else " " for c in text))[:300]


def _last(lead: str, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f"{lead}: {lines[-1][:200]}" if lines else lead
