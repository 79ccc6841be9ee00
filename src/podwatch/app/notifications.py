"""The notices that are made of events and findings, the digest, the dead-man's switch and podwatch's own W&B run.

The notification policy and the channels are imported only where a notification is configured.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from podwatch.checkpoints.command_table import command_of
from podwatch.checkpoints.trainers import site_of
from podwatch.config.settings import NotifySettings, Settings
from podwatch.config.trusted_files import check_command, read_trusted
from podwatch.domain.errors import ConfigurationError
from podwatch.domain.event import Event
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.secrets import register_address
from podwatch.domain.snapshot import Snapshot
from podwatch.journal import AsyncJournal, Journal
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock
from podwatch.trainer.environment import build_environment

if TYPE_CHECKING:
    from podwatch.app.shutdown import BackgroundTasks
    from podwatch.app.status_view import StatusSource
    from podwatch.app.store_jobs import Jobs, StoreJobs
    from podwatch.domain.event import Notice
    from podwatch.report.daemon_view import DaemonView
    from podwatch.report.dead_man import DeadMan
    from podwatch.report.deliver_notices import Channel
    from podwatch.report.run_cost import Account
    from podwatch.report.wandb import WandbPlan, WandbRun

R = TypeVar("R")

NOTIFIED = "notices"
"""Journal key of the open findings that were notified."""
DIGEST = "digest"
"""Journal key of the time of the last digest."""
DIGEST_LOOK_SECONDS = 60.0
REMEMBER_TURNS = 30
CLOSE_SECONDS = 1.5
"""Time for the last notices at exit: the start of a child process, and one slow response."""


class Notifying:
    """Call ``turn`` and ``event`` from the daemon; neither blocks."""

    def __init__(
        self,
        settings: Settings,
        channels: "Sequence[Channel]",
        clock: Clock,
        journal: AsyncJournal,
        kept: object,
        wandb: "WandbRun | None" = None,
        dead_man: "DeadMan | None" = None,
    ) -> None:
        """``kept``: the state of an earlier podwatch, from the journal."""
        from podwatch.report import alerts
        from podwatch.report.deliver_notices import Notifier

        self._judge, self._clock, self._journal = alerts, clock, journal
        self._run_id, self._host = settings.run_id, socket.gethostname()
        self._whole, self._settings = settings, settings.notify
        asked = [getattr(channel, "least", None) for channel in channels]
        self._lowest = alerts.lowest_of(asked, Severity(settings.notify.min_severity))
        self.digest_every = settings.notify.digest
        self._state = alerts.continued(kept, at=clock.monotonic(), wall=clock.wall())
        self._notifier = Notifier(channels, clock.sleep)
        self.wandb, self.dead_man = wandb, dead_man
        self._turns = 0
        self._broken = ""

    def turn(self, findings: tuple[Finding, ...], snapshot: Snapshot) -> None:
        self._turns += 1
        with self._held_back():
            before = self._state.told.keys()
            self._state, found = self._judge.on_turn(
                self._state, findings, self._settings, at=snapshot.at, wall=snapshot.wall, lowest=self._lowest
            )
            self._send(found)
            if found or self._turns % REMEMBER_TURNS == 0 or self._state.told.keys() != before:
                self._remember()

    def event(self, event: Event, account: "Callable[[], Account | None]") -> None:
        """``account``: the run's time and money as of now."""
        with self._held_back():
            at = self._clock.monotonic()
            self._state, found = self._judge.on_event(self._state, event, self._settings, at=at, account=account())
            self._send(found)
            if found:
                self._remember()

    def findings(self, now: float) -> tuple[Finding, ...]:
        text = f"podwatch sends no notifications because of an internal error: {self._broken}"
        broken = Finding(FindingKind.NOTIFY_FAILING, Severity.WARNING, text, now, "report this bug")
        wandb = self.wandb.findings(now) if self.wandb is not None else ()
        switch = self.dead_man.findings(now) if self.dead_man is not None else ()
        return (*self._notifier.findings(now), *switch, *wandb, *((broken,) if self._broken else ()))

    @contextlib.contextmanager
    def _held_back(self) -> Iterator[None]:
        """Keep exceptions of this module away from the sensing loop; they become a finding."""
        try:
            yield
        except Exception as error:
            self._broken = repr(error)[:200]

    async def close(self, seconds: float) -> None:
        """Send the pending notices for at most ``seconds``, then close the channels."""
        end = self._clock.monotonic() + seconds
        await self._notifier.flush(seconds)
        await self._notifier.close()
        if self.wandb is not None:
            await self.wandb.close(max(0.1, end - self._clock.monotonic()))

    def begin(self, jobs: "Jobs", tasks: "BackgroundTasks", status: "StatusSource", run: "StoreJobs") -> None:
        """Schedule what is sent at an interval."""
        wandb, dead_man = self.wandb, self.dead_man

        async def push() -> None:
            from podwatch.report.metrics import for_wandb

            assert wandb is not None
            await wandb.push(for_wandb(status.view()))

        async def call_dead_man() -> None:
            from podwatch.report.status import build_status

            assert dead_man is not None
            with self._held_back():
                await dead_man.beat(build_status(status.view()))

        async def send_digest() -> None:
            await self.digest(status.view(), run)

        if wandb is not None:
            jobs.every(self._whole.wandb.every, "wandb", push)
        if self.digest_every > 0:
            tasks.spawn(send_digest(), "first look at the digest")
            jobs.every(DIGEST_LOOK_SECONDS, "digest", send_digest)
        if dead_man is not None:
            tasks.spawn(call_dead_man(), "first call of the dead-man's switch")
            jobs.every(self._settings.heartbeat_every, "dead-man's switch", call_dead_man)

    async def digest(self, view: "DaemonView", run: "StoreJobs | None" = None) -> None:
        """Send a digest if one is due. The time is kept before it is sent, here and for the other pods of the run: a
        podwatch that ends in between sends none rather than two."""
        from podwatch.report import digest
        from podwatch.report.status import build_status

        with self._held_back():
            kept = await self._journal.run(Journal.learned, DIGEST, None)
            before, now = digest.LastDigest.kept(kept), self._clock.wall()
            if run is not None and not run.sends_digests(known=before is not None):
                return
            earlier = run.digest_wall if run is not None else None
            if earlier is not None and (before is None or before.wall < earlier):
                before = digest.LastDigest(earlier)  # sent by another pod
            elif run is not None and before is not None and before.wall != earlier:
                await run.keep_digest(before.wall)
            last = None if before is None else before.wall
            due = self._judge.digest_due(last, now, self.digest_every)
            if not due and last is not None:
                return
            await self._journal.run(Journal.learn, DIGEST, digest.LastDigest(now).to_json())
            if run is not None:
                await run.keep_digest(now)
            if due:
                self._send((digest.notice(build_status(view), now),))

    def _send(self, found: "Sequence[Notice]") -> None:
        from podwatch.report.deliver_notices import document_of

        for notice in found:
            self._notifier.tell(document_of(notice, run_id=self._run_id, host=self._host), notice)

    def _remember(self) -> None:
        document = self._judge.kept(self._state, at=self._clock.monotonic(), wall=self._clock.wall()).to_json()
        self._journal.post(Journal.learn, NOTIFIED, document)


def all_urls(settings: NotifySettings) -> tuple[str, ...]:
    """The URLs of the configuration and of ``urls_file``, registered with the scrubber. Raises ConfigurationError if
    the file cannot be used. Blocks."""
    return _registered(settings.urls, settings.urls_file)


def heartbeat_urls(settings: NotifySettings) -> tuple[str, ...]:
    """The URLs of the dead-man's switch, as ``all_urls``. Raises ConfigurationError. Blocks."""
    urls = _registered(settings.heartbeat_urls, settings.heartbeat_urls_file)
    if any(not url.startswith(("https://", "http://")) for url in urls):
        where = str(settings.heartbeat_urls_file or "[notify] heartbeat_urls")
        raise ConfigurationError("a URL is no web address", where=where, fix="write https://...")
    return urls


def _registered(urls: tuple[str, ...], file: Path | None) -> tuple[str, ...]:
    found = (*urls, *(read_urls(file) if file is not None else ()))
    for url in found:
        register_address(url)
    return found


def read_urls(path: Path) -> tuple[str, ...]:
    """The URLs in the file: one a line, without blank lines, ``#`` lines and remarks after two spaces. Raises
    ConfigurationError, also if other users can read the file."""
    text = read_trusted(path, "the file of URLs", secret=True)
    lines = [line.partition("  #")[0].strip() for line in text.splitlines()]
    urls = tuple(line for line in lines if line and not line.startswith("#"))
    for number, url in enumerate(urls, start=1):
        if "://" not in url:
            raise ConfigurationError(f"URL number {number} has no scheme", where=str(path), fix="write https://...")
    return urls


def channels_of(settings: Settings, urls: Sequence[str]) -> "tuple[Channel, ...]":
    """``urls``: entries, each with the severity that it asks for before the URL, or without. ConfigurationError if
    another user could decide what the command runs with podwatch's rights. Blocks."""
    from podwatch.report.alerts import channel_of
    from podwatch.report.deliver_notices import CommandChannel, UrlChannel

    notify = settings.notify
    by_url = tuple(UrlChannel(url, notify.timeout, least) for least, url in map(channel_of, urls))
    if not notify.command:
        return by_url
    if settings.outranks_training(notify):
        check_command(notify.command, Path("/"), os.environ.get("PATH"))
    return (CommandChannel(notify.command, notify.timeout, user=settings.user_of(notify)), *by_url)


async def make_notifying(
    settings: Settings,
    clock: Clock,
    journal: AsyncJournal,
    disk: Worker,
    complain: Callable[[str], None],
    state: Path | None = None,
) -> Notifying | None:
    """None if no notification is configured. An unusable file is reported with ``complain``; the other channels work.

    ``state`` is the run's state directory."""
    notify, wandb, dead_man = settings.notify, None, None
    switched = notify.heartbeat_urls or notify.heartbeat_urls_file
    if not (notify.command or notify.urls or notify.urls_file or switched or settings.wandb.enabled):
        return None

    async def read(what: str, otherwise: R, call: Callable[..., R], *args: object) -> R:
        try:
            return await disk.call(call, *args)
        except ConfigurationError as error:
            complain(f"{what}: {error}")
            return otherwise

    if settings.wandb.enabled:
        from podwatch.report.wandb import WandbRun

        plan = await read("wandb", None, wandb_plan, settings, state or settings.state_dir / settings.run_id)
        wandb = None if plan is None else WandbRun(plan, clock)
    if switched:
        from podwatch.report.dead_man import DeadMan

        called = await read("dead-man's switch", notify.heartbeat_urls, heartbeat_urls, notify)
        dead_man = DeadMan(called, notify.timeout) if called else None
    urls = await read("notifications", notify.urls, all_urls, notify)
    without = settings.model_copy(update={"notify": notify.model_copy(update={"command": ()})})
    channels = await read("notifications", channels_of(without, urls), channels_of, settings, urls)
    kept = await journal.run(Journal.learned, NOTIFIED, {})
    alerts = () if wandb is None else (wandb,)
    return Notifying(settings, (*channels, *alerts), clock, journal, kept, wandb, dead_man)


def wandb_plan(settings: Settings, state: Path) -> "WandbPlan":
    """The plan of podwatch's W&B run. Blocks: reads the training's env_file and the files that its command names.
    Raises ConfigurationError."""
    from podwatch.report.wandb import WandbPlan

    chosen, trainer = settings.wandb, settings.trainer
    training = build_environment(os.environ, trainer.env, trainer.env_file, user=trainer.user)
    named = command_of(site_of(settings)).value("wandb.project", "wandb_project")
    return WandbPlan(
        python=str(chosen.python or sys.executable),
        directory=state / "wandb",
        run_id=settings.run_id,
        project=chosen.project or training.get("WANDB_PROJECT") or named or "podwatch",
        entity=chosen.entity or training.get("WANDB_ENTITY", ""),
        idle=3 * chosen.every + 300.0,
        user=settings.user_of(chosen),
        training=training,
    )
