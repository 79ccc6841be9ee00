"""``podwatch quarantine``: list what restarts moved away, and move it back."""

import time
from typing import Any

import click

from podwatch.cli.common import Where, ask, clean, common, find_daemon, json_option, print_json, say
from podwatch.client.format import ago
from podwatch.domain.finding import counted


@click.group("quarantine")
def command() -> None:
    """List or move back quarantined files.

    A restart moves the files ahead of its checkpoint to quarantine; it deletes none."""


@command.command("list")
@common
@json_option
def list_(where: Where, as_json: bool) -> None:
    """List everything in quarantine, oldest first."""
    from podwatch.cli.offline import load
    from podwatch.daemon.paths import workspace_of
    from podwatch.recovery.quarantine import listing

    entries = listing(workspace_of(load(where)))
    if as_json:
        print_json({"schema_version": 1, "quarantines": entries})
    else:
        now = time.time()
        click.echo("\n".join(line(entry, now) for entry in entries) or "the quarantine is empty")


@command.command("return")
@common
@click.argument("number", type=click.IntRange(min=1))
@json_option
def return_(where: Where, number: int, as_json: bool) -> None:
    """Move quarantine NUMBER back to its place. podwatch refuses while training runs, which could read the files."""
    if find_daemon(where) is not None:
        answer = ask(where, "quarantine_return", {"id": number}, purpose="move the quarantine back", timeout=120.0)
        say(answer, as_json=as_json)
        return
    from podwatch.cli.offline import load
    from podwatch.daemon.paths import workspace_of
    from podwatch.recovery.quarantine import give_back

    back = give_back(workspace_of(load(where)).probe(), number)
    say(
        {
            "message": f"moved {counted(len(back), 'entry', 'entries')} back from quarantine",
            "paths": [str(p) for p in back],
        },
        as_json=as_json,
    )


def line(entry: dict[str, Any], now: float) -> str:
    """One quarantine as a line: number, age, content."""
    wall = entry.get("wall")
    age = ago(now - wall) if isinstance(wall, int | float) else "at an unknown time"
    steps = ", ".join(f"step {n} ({clean(state)})" for n, state in (entry.get("steps") or {}).items())
    begun = entry.get("step")
    if problem := entry.get("problem"):
        return f"{entry['id']:>4}  {clean(problem)}; podwatch ignores it: check {clean(entry['path'])}"
    start = "a fresh start" if begun is None else f"a start from step {begun}"
    what = steps or counted(len(entry.get("moves") or ()), "entry", "entries")
    return f"{entry['id']:>4}  {age:<16} {what}; moved before {start}"
