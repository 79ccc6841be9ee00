"""``podwatch controller``: replaces a dead pod, from a laptop, a small server or a scheduled job. Needs no daemon."""

import os
import shlex
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podwatch.cli.common import Where, clean, common, json_option, print_json
from podwatch.cli.offline import checked_run_id
from podwatch.domain.errors import ConfigurationError, ExitCode, IntegrityError, PodwatchError, UsageError

if TYPE_CHECKING:
    from podwatch.config.settings import Settings
    from podwatch.controller.loop import Look
    from podwatch.controller.providers import ProviderCommand

EVERY_SECONDS = 30.0
SETTLED_SECONDS = 5.0
"""A command's own time limit is shorter than ours, so that it can still say what it did."""


@dataclass
class _Stop:
    """SIGTERM and SIGINT end ``--loop`` between two looks, so that no request is cut off."""

    asked: bool = False

    def __call__(self, *_: object) -> None:
        self.asked = True

    def sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.asked and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.5))
        if self.asked:
            raise click.exceptions.Exit(0)


@click.command("controller", short_help="Replace a dead pod, through provider commands and within caps.")
@common
@click.argument("place", metavar="[STORE] [RUN]", nargs=-1)
@click.option("--once", "mode", flag_value="once", help="One decision and what follows from it, then exit.")
@click.option("--loop", "mode", flag_value="loop", help="Look every half minute until the run has ended.")
@click.option("--dry-run", "mode", flag_value="dry-run", help="Show the decision; change and write nothing.")
@click.option(
    "--provider",
    "given",
    metavar="NAME=COMMAND",
    multiple=True,
    help="A provider command, instead of [controller.providers].",
)
@click.option("--env-file", metavar="FILE", help="NAME=value lines for the commands of --provider; mode 0600.")
@json_option
def command(
    where: Where, place: tuple[str, ...], mode: str | None, given: tuple[str, ...], env_file: str | None, as_json: bool
) -> None:
    """Judge a run by its heartbeat in the store and the lists of its providers, and replace its pod if that is dead:
    docs/controller.md. Caps and pause are in controller.json in the store; the provider commands come from
    [controller.providers] or --provider, never from the store. With STORE (b2://, s3://, file://) no configuration file
    is needed, as for `podwatch runs check`.

    Exit of --once and --dry-run: 0 nothing is wrong, or something was done; 1 an operator must decide (a cap, boot
    failures, no heartbeat); 65 the run must not run again; 69 store or provider did not answer: nothing was created;
    75 a request is not decided yet: run it again; 78 controller.json or a provider command is wrong."""
    from podwatch.cli.runs_check import opened
    from podwatch.controller.loop import Controller, loop, once
    from podwatch.controller.run_store import RunStore
    from podwatch.domain.manifest import Keys
    from podwatch.system.clock import SystemClock

    if mode is None:
        raise UsageError("say what to do", fix="add --once, --loop or --dry-run")
    url, run_id = _place(place)
    settings, commands = _commands(where, url, given, env_file)
    report = _reporter(as_json)
    with opened(where, url) as (store, prefix, own):
        run_id = checked_run_id(run_id or own)
        keys, clock = Keys(run_id, prefix), SystemClock()
        controller = Controller(
            RunStore(store, keys, clock), run_id, commands, clock, act=mode != "dry-run", creates=False
        )
        if mode == "loop":
            stop = _Stop()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, stop)
            every = settings.controller.every if settings is not None else EVERY_SECONDS
            raise click.exceptions.Exit(int(loop(controller, every, stop.sleep, report)))
        raise click.exceptions.Exit(int(once(controller, time.sleep, report)))


def _place(place: tuple[str, ...]) -> tuple[str, str]:
    """(store URL or "", run or "")."""
    url = place[0] if place and "://" in place[0] else ""
    rest = place[1:] if url else place
    if len(rest) > 1:
        raise UsageError("too many arguments", where=" ".join(place), fix="write: podwatch controller [STORE] [RUN]")
    return url, rest[0] if rest else ""


def _commands(
    where: Where, url: str, given: tuple[str, ...], env_file: str | None
) -> "tuple[Settings | None, dict[str, ProviderCommand]]":
    from podwatch.cli.offline import load
    from podwatch.controller.providers import ProviderCommand

    settings = None if url else load(where)
    found: dict[str, ProviderCommand] = {}
    for name, one in (settings.controller.providers if settings is not None else {}).items():
        found[name] = ProviderCommand(name, one.command, one.timeout, _environment(one.env_file, one.timeout))
    for text in given:
        name, argv = _given(text)
        seconds = ProviderCommand("", ()).timeout
        found[name] = ProviderCommand(name, argv, seconds, _environment(Path(env_file) if env_file else None, seconds))
    return settings, found


def _given(text: str) -> tuple[str, tuple[str, ...]]:
    from podwatch.domain.replacement import PROVIDER_NAME

    name, _, line = text.partition("=")
    try:
        argv = tuple(shlex.split(line))
    except ValueError:
        argv = ()
    if not PROVIDER_NAME.fullmatch(name) or not argv:
        fix = 'write for example --provider vast="python3 vast.py"'
        raise ConfigurationError("not a provider command", where=f"--provider {name}", fix=fix)
    return name, argv


def _environment(env_file: Path | None, seconds: float) -> Mapping[str, str]:
    """Of a provider command: this process's without podwatch's own keys, then the file's."""
    from podwatch.domain.secrets import register_named
    from podwatch.system.environment_without_secrets import scrubbed_environment
    from podwatch.trainer.environment import read_env_file

    register_named(os.environ)
    own = read_env_file(env_file) if env_file is not None else {}
    limit = {"PODWATCH_PROVIDER_SECONDS": f"{max(1.0, seconds - SETTLED_SECONDS):g}"}
    return {**scrubbed_environment(os.environ), **own, **limit}


@dataclass
class _Reporter:
    as_json: bool
    last: str = ""

    def __call__(self, found: "Look | PodwatchError") -> None:
        if isinstance(found, PodwatchError):
            document = {"schema_version": 1, "action": "wait", "reason": str(found), "result": None}
            code, text = int(found.exit_code), f"WAIT: the store does not answer: {clean(found)}"
            if isinstance(found, IntegrityError):  # waiting does not help
                text = f"ALERT: nothing is created or destroyed: {clean(found)}"
        else:
            document = {"schema_version": 1, **found.decision.to_dict(), "result": found.result or None}
            code, text = int(found.code or ExitCode.OK), f"{found.decision.action.upper()}: {found.decision.reason}"
            text += f" {found.result[:1].upper()}{found.result[1:]}." if found.result else ""
        if self.as_json:
            print_json({**document, "exit_code": code})
            return
        kind = "".join(c for c in text if not c.isdigit())
        if kind != self.last:  # --loop says the same thing once
            click.echo(clean(text))
        self.last = kind


def _reporter(as_json: bool) -> _Reporter:
    return _Reporter(as_json)
