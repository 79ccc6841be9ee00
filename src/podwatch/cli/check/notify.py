"""Check the notification channels. Sends a test notice only on request."""

import asyncio
import importlib.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from podwatch.cli.check.report import Line, failed
from podwatch.config.settings import Settings
from podwatch.domain.errors import ConfigurationError, PodwatchError

if TYPE_CHECKING:
    from podwatch.report.deliver_notices import Channel
    from podwatch.report.wandb import WandbPlan, WandbRun

_WEB = ("http", "https")


def notify(settings: Settings, *, send: bool) -> Iterator[Line]:
    """Whether each channel can work; with ``send``, the result of one test notice."""
    from podwatch.app.notifications import all_urls, channels_of
    from podwatch.report.alerts import channel_of
    from podwatch.report.deliver_notices import shown_url

    chosen = settings.notify
    yield from _dead_man(settings, send=send)
    if not (chosen.command or chosen.urls or chosen.urls_file):
        text = "podwatch sends no notices: [notify] is empty"
        yield Line("notify", "warn" if send else "ok", text, "see docs/notifications.md")
        return
    urls = all_urls(chosen)
    try:
        channels = channels_of(settings, urls)
    except ConfigurationError as error:
        yield failed("notify", error)
        return
    if send:
        for channel in channels:
            yield _sent(channel, settings.run_id)
        return
    if chosen.command:
        found = shutil.which(chosen.command[0]) if not chosen.command[0].startswith(".") else None
        if found is None:
            fix = "use an absolute path, and make it executable"
            yield Line("notify", "fail", f"{chosen.command[0]} not found", fix)
        else:
            yield Line("notify", "ok", f"podwatch sends notices to {found}")
    for _, url in map(channel_of, urls):
        scheme = url.partition(":")[0]
        if scheme in _WEB or importlib.util.find_spec("apprise") is not None:
            unsafe = scheme == "http" and not shown_url(url).startswith(("http://127.", "http://localhost"))
            text = f"podwatch sends notices to {shown_url(url)}"
            yield Line("notify", "warn" if unsafe else "ok", f"{text}{', unencrypted' if unsafe else ''}", "use https")
        else:
            fix = "install podwatch[notify], or use an https:// URL"
            yield Line("notify", "fail", f"{scheme}:// needs apprise, which is not installed", fix)


def _dead_man(settings: Settings, *, send: bool) -> Iterator[Line]:
    """The dead-man's switch; with ``send``, the response to one call of each URL."""
    from podwatch.app.notifications import heartbeat_urls
    from podwatch.report.dead_man import Signal, call_of
    from podwatch.report.dead_man import send as make
    from podwatch.report.deliver_notices import shown_url

    try:
        urls = heartbeat_urls(settings.notify)
    except ConfigurationError as error:
        yield Line("dead-man's switch", "fail", f"{error.what}: {error.where}", error.fix)
        return
    for url in urls:
        shown = shown_url(url)
        if not send:
            unsafe = url.startswith("http://") and not shown.startswith(("http://127.", "http://localhost"))
            text = f"podwatch calls {shown} while the run is well{', unencrypted' if unsafe else ''}"
            yield Line("dead-man's switch", "warn" if unsafe else "ok", text, "use https")
            continue
        call = call_of(url, Signal.SUCCESS, f"{settings.run_id}: test of `podwatch check --notify`")
        why = asyncio.run(make(call, settings.notify.timeout)) if call is not None else ""
        if why:
            from podwatch.domain.secrets import scrub

            fix = "correct the URL in [notify] heartbeat_urls (docs/notifications.md)"
            yield Line("dead-man's switch", "fail", f"{shown}: {scrub(why)}", fix)
        else:
            yield Line("dead-man's switch", "ok", f"{shown}: call accepted")


def own_wandb(settings: Settings, *, send: bool) -> Iterator[Line]:
    """podwatch's own W&B run: whether its Python has wandb; with ``send``, the result of one alert."""
    if not settings.wandb.enabled:
        return
    from podwatch.app.notifications import wandb_plan
    from podwatch.report.wandb import WandbRun
    from podwatch.system.clock import SystemClock

    plan = wandb_plan(settings, settings.state_dir / settings.run_id)
    try:
        plan.check_python()
        found = _wandb_version(plan)
    except PodwatchError as error:
        yield failed("wandb run", error)
        return
    if not found:
        who = f", or {plan.user} cannot run it" if plan.user else ""
        fix = "set wandb.python to the trainer's Python, or install podwatch[wandb]"
        yield Line("wandb run", "fail", f"{plan.python} has no wandb{who}", fix)
        return
    mode = plan.environment(os.environ).get("WANDB_MODE", "online")
    if mode == "disabled":
        fix = "remove WANDB_MODE, set it to offline, or set wandb.enabled = false"
        yield Line("wandb run", "warn", "WANDB_MODE=disabled: podwatch's own run is not recorded", fix)
        return
    where = f"in {plan.place}" if mode == "offline" else f"in the project {plan.project}"
    yield Line("wandb run", "ok", f"podwatch's own run: wandb {found}, {mode}, {where}")
    if send:
        run = WandbRun(plan, SystemClock())
        yield _sent(run, settings.run_id, run)


def _wandb_version(plan: "WandbPlan") -> str:
    """The version of wandb in that Python, without the slow import, asked as the child's user; empty without one.
    Raises HostError if podwatch cannot work as this user."""
    from podwatch.system.child import working_as

    argv = [plan.python, "-I", "-c", "import importlib.metadata as m; print(m.version('wandb'))"]
    given: dict[str, Any] = {"env": plan.environment(os.environ), "cwd": "/"}
    try:
        with working_as(plan.user) as account:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False, **given, **account)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.strip()


def _sent(channel: "Channel", run_id: str, own: "WandbRun | None" = None) -> Line:
    """The result of one test notice. ``own``: the same channel, if it is podwatch's W&B run, which is then closed."""
    from podwatch.domain.event import Change, Notice, Topic
    from podwatch.domain.finding import Severity
    from podwatch.report.deliver_notices import NotSent, document_of

    text = "test notice of `podwatch check --notify`; nothing is wrong"
    notice = Notice(Topic.FINDINGS, Change.HAPPENED, Severity.INFO, "a test", text, "test", time.time())

    async def send() -> None:
        try:
            await channel.send(document_of(notice, run_id=run_id, host=socket.gethostname()))
        finally:
            if own is not None:
                await own.close()

    try:
        asyncio.run(send())
    except NotSent as error:
        from podwatch.domain.secrets import scrub

        fix = "fix the channel (docs/notifications.md): it would not deliver notices about failures"
        return Line("notify", "fail", f"{channel.name}: {scrub(str(error))}", fix)
    return Line("notify", "ok", f"{channel.name}: test notice accepted")
