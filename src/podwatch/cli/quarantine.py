"""``podwatch quarantine``: what was set aside before a restart, and how to get it back."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import Where, ask, clean, common, find_daemon, json_option, print_json, say
from podwatch.client.times import ago

if TYPE_CHECKING:
    from podwatch.config.settings import Settings


@click.group("quarantine")
def command() -> None:
    """What restarts have set aside: renamed, never destroyed."""


@command.command("list")
@common
@json_option
def list_(where: Where, as_json: bool) -> None:
    """List everything that is set aside, oldest first."""
    from podwatch.cli.offline import load
    from podwatch.recovery.quarantine import listing
    from podwatch.system.workspace import Workspace

    settings = load(where)
    entries = listing(Workspace(settings.trainer.output_dir).probe(), roots(settings))
    if as_json:
        print_json({"schema_version": 1, "quarantines": entries})
    else:
        now = time.time()
        click.echo("\n".join(line(entry, now) for entry in entries) or "nothing is set aside")


@command.command("return")
@common
@click.argument("number", type=click.IntRange(min=1))
@json_option
def return_(where: Where, number: int, as_json: bool) -> None:
    """Put quarantine NUMBER back where it was. Not while training runs: it could read what appears."""
    if find_daemon(where) is not None:
        answer = ask(where, "quarantine_return", {"id": number}, purpose="return a quarantine", timeout=120.0)
        say(answer, as_json=as_json)
        return
    from podwatch.cli.offline import load
    from podwatch.recovery.quarantine import give_back
    from podwatch.system.workspace import Workspace

    settings = load(where)
    back = give_back(Workspace(settings.trainer.output_dir).probe(), number, roots(settings))
    say({"message": f"{len(back)} entries are back", "paths": [str(p) for p in back]}, as_json=as_json)


def roots(settings: "Settings") -> tuple[Path, ...]:
    """The only directories anything is returned to."""
    trainer = settings.trainer
    return tuple(p for p in (trainer.output_dir, trainer.checkpoint_dir) if p is not None)


def line(entry: dict[str, Any], now: float) -> str:
    """One quarantine: number, age, what lies in it."""
    wall = entry.get("wall")
    age = ago(now - wall) if isinstance(wall, int | float) else "at an unknown time"
    steps = ", ".join(f"step {n} ({clean(state)})" for n, state in (entry.get("steps") or {}).items())
    begun = entry.get("step")
    start = "a fresh start" if begun is None else f"a start from step {begun}"
    what = steps or f"{len(entry.get('moves') or ())} entries"
    return f"{entry['id']:>4}  {age:<16} {what}; ahead of {start}"
