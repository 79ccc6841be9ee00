"""``podwatch controller``: replaces a dead pod, from a laptop, a small server or a scheduled job. Needs no daemon."""

import os
import signal
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podwatch.cli.common import Where, clean, common, json_option, print_json
from podwatch.cli.offline import checked_run_id
from podwatch.domain.errors import UsageError

if TYPE_CHECKING:
    from podwatch.controller.configuration import ProviderConfiguration
    from podwatch.controller.decide import Decision
    from podwatch.controller.provider import ProviderCommand

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
@json_option
def command(where: Where, place: tuple[str, ...], mode: str | None, as_json: bool) -> None:
    """Judge a run by its heartbeat in the store and the list of its provider, and replace its pod if that is dead:
    docs/controller.md. Caps, provider commands, the store and the run are in a file of the controller's own, which -c
    names: ./controller.toml or /etc/podwatch/controller.toml by default.

    Exit of --once and --dry-run: 0 nothing is wrong, or something was done; 1 an operator must decide (a cap, boot
    failures, no heartbeat); 65 the run must not run again; 69 store or provider did not answer: nothing was created;
    75 another controller has the run, or it is not decided yet: run it again; 78 controller.toml, its records or a
    provider command is wrong."""
    from podwatch.config.test_times import seconds
    from podwatch.config.trusted_files import read_trusted
    from podwatch.controller.configuration import find_configuration, parse_configuration
    from podwatch.controller.loop import Controller, loop, once
    from podwatch.controller.machines import store_tag
    from podwatch.controller.records import RecordFile
    from podwatch.controller.run_view import RunView
    from podwatch.store.keys import RunKeys
    from podwatch.store.objects.access import access_from
    from podwatch.store.objects.open import open_objects, parse_url
    from podwatch.system.clock import SystemClock

    if mode is None:
        raise UsageError("say what to do", fix="add --once, --loop or --dry-run")
    url, run_id = _place(place)
    file_of_caps = find_configuration(where.config)
    text = read_trusted(file_of_caps, "the controller's configuration")
    caps = parse_configuration(text, file_of_caps, url, run_id or where.run)
    checked_run_id(caps.run_id)
    access = access_from(caps.store, os.environ)
    tag = store_tag(f"{caps.store} {getattr(access, 'endpoint', '')}")
    clock, keys = SystemClock(), RunKeys(caps.run_id, parse_url(caps.store).prefix)
    store = open_objects(caps.store, access, connections=1)
    file, act = RecordFile(caps.records_path, caps.run_id, tag), mode != "dry-run"
    try:
        with file if act else nullcontext():
            records = file.load()
            view = RunView(store, keys, clock, records.controller, seconds("controller.claim_wait"))
            controller = Controller(caps, view, file, records, _command(caps.provider), clock, act=act)
            if mode == "loop":
                stop = _Stop()
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, stop)
                code = loop(controller, stop.sleep, _Reporter(as_json))
            else:
                code = once(controller, time.sleep, _Reporter(as_json))
    finally:
        store.close()
    raise click.exceptions.Exit(int(code))


def _place(place: tuple[str, ...]) -> tuple[str, str]:
    """(store URL or "", run or "")."""
    url = place[0] if place and "://" in place[0] else ""
    rest = place[1:] if url else place
    if len(rest) > 1:
        raise UsageError("too many arguments", where=" ".join(place), fix="write: podwatch controller [STORE] [RUN]")
    return url, rest[0] if rest else ""


def _command(provider: "ProviderConfiguration") -> "ProviderCommand":
    from podwatch.controller.provider import ProviderCommand

    return ProviderCommand(provider.command, provider.timeout, _environment(provider.env_file, provider.timeout))


def _environment(env_file: Path | None, seconds: float) -> Mapping[str, str]:
    """Of a provider command: this process's without podwatch's own keys, then the file's."""
    from podwatch.config.env_files import read_env_file
    from podwatch.domain.secrets import register_named
    from podwatch.system.environment_without_secrets import scrubbed_environment

    register_named(os.environ)
    own = read_env_file(env_file) if env_file is not None else {}
    limit = {"PODWATCH_PROVIDER_SECONDS": f"{max(1.0, seconds - SETTLED_SECONDS):g}"}
    return {**scrubbed_environment(os.environ), **own, **limit}


@dataclass
class _Reporter:
    as_json: bool
    last: str = ""

    def __call__(self, decision: "Decision") -> None:
        if self.as_json:
            print_json({"schema_version": 1, **decision.to_dict(), "exit_code": int(decision.code)})
            return
        text = f"{decision.action.upper()}: {decision.reason}"
        text += f" {decision.result[:1].upper()}{decision.result[1:]}." if decision.result else ""
        kind = "".join(c for c in text if not c.isdigit())
        if kind != self.last:  # --loop says the same thing once
            click.echo(clean(text))
        self.last = kind
