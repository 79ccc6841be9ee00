"""``podwatch events``: list events from the daemon, or from the journal without one."""

import time
from collections.abc import Mapping
from typing import Any

import click

from podwatch.cli.common import Where, clean, common, find_daemon, json_option, moment
from podwatch.client.api import NotRunning, call
from podwatch.client.format import from_rfc3339, local

POLL_SECONDS = 1.0


@click.command("events")
@common
@click.option("--follow", "-f", is_flag=True, help="Continue with new events until Ctrl-C.")
@click.option("--since", metavar="TIME", default="", help='Start time: "2h" (2 hours ago), or a UTC time ending in Z.')
@click.option("-n", "--limit", type=click.IntRange(min=1, max=1000), default=100, show_default=True)
@json_option
def command(where: Where, follow: bool, since: str, limit: int, as_json: bool) -> None:
    """List events, oldest first. --json prints one JSON object per line."""
    last = 0
    try:
        for event in fetch(where, since_wall=moment("--since", since) or 0.0, limit=limit):
            last = max(last, int(event.get("id") or 0))
            _show(event, as_json)
        if not last and not follow and not as_json:
            click.echo("no events")
        while follow:
            time.sleep(POLL_SECONDS)
            for event in fetch(where, after_id=last, limit=1000):
                last = max(last, int(event.get("id") or 0))
                _show(event, as_json)
    except KeyboardInterrupt:
        pass


def fetch(where: Where, *, after_id: int = 0, since_wall: float = 0.0, limit: int) -> list[dict[str, Any]]:
    """Event documents, oldest first. Without a daemon they come from the journal on disk."""
    found = find_daemon(where)
    if found is not None:
        params = {"after_id": after_id, "since_wall": since_wall, "limit": limit}
        try:
            return list(call(found.control_path, "events", params)["events"])
        except NotRunning:
            pass  # it has just stopped
    from podwatch.cli.offline import read_journal
    from podwatch.reporting.documents import event_document

    with read_journal(where) as journal:
        events = journal.events(after_id=after_id, since_wall=since_wall, limit=limit)
        return [event_document(e) for e in events]


def line(event: Mapping[str, Any], now: float) -> str:
    """One event as text."""
    at = local(from_rfc3339(event.get("at")), now)
    mark = {"critical": "!!", "warning": "! "}.get(str(event.get("severity")), "  ")
    return f"{at}  {mark} {clean(event.get('name')):<20} {clean(event.get('message'))}"


def _show(event: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        import json

        click.echo(json.dumps(event, ensure_ascii=False))
    else:
        click.echo(line(event, time.time()))
