"""``podwatch wait``: block until the run ends, for scripts."""

import time
from collections.abc import Mapping
from typing import Any

import click

from podwatch.cli.common import Where, clean, common, json_option, print_json
from podwatch.client.ask_daemon import NotRunning, ask_status
from podwatch.domain.errors import Busy

POLL_SECONDS = 1.0
STARTING_SECONDS = 5.0
GONE_SECONDS = 60.0
"""How long podwatch can be away before the wait ends: init or systemd restarts it within seconds."""


@click.command("wait", short_help="Wait until the run ends, and return its exit code.")
@common
@click.option("--timeout", metavar="DURATION", default="", help="Give up after this time with exit code 75, e.g. 2h.")
@json_option
def command(where: Where, timeout: str, as_json: bool) -> None:
    """Wait until the run ends, then exit with the code that `podwatch run --job` gives for this end (docs/jobs.md).

    0 finished and stored, 65 do not run again, 69 finished but not everything is stored, 86 run again; 75 after
    --timeout, 69 if podwatch does not run here.
    """
    until = time.monotonic() + _seconds(timeout) if timeout else None
    gone_since: float | None = None
    seen = False
    while True:
        document = ask_status(where.run, where.config)
        now = time.monotonic()
        seen = seen or bool(document.get("running"))
        gone_since = None if document.get("running") else gone_since or now
        end = document.get("end")
        # The last status of an earlier attempt is not the end of one that is just starting.
        if isinstance(end, dict) and (seen or (gone_since is not None and now - gone_since >= STARTING_SECONDS)):
            _say(document, end, as_json)
            raise click.exceptions.Exit(int(end["exit_code"]))
        if gone_since is not None and now - gone_since >= GONE_SECONDS:
            reasons = document.get("reasons") or [{}]
            raise NotRunning(
                f"cannot wait: {clean(reasons[0].get('summary', 'podwatch is not running'))}",
                fix="start it with `podwatch run`; training may still run",
            )
        if until is not None and now >= until:
            raise Busy(f"the run has not ended after {timeout}", fix="wait longer; `podwatch status` shows its state")
        time.sleep(POLL_SECONDS)


def _seconds(text: str) -> float:
    from podwatch.config.units import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.UsageError(f"--timeout {text}: {error}") from error


def _say(document: Mapping[str, Any], end: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json({"schema_version": 1, "run_id": document.get("run_id", ""), **end})
    else:
        click.echo(clean(end.get("summary", "")))
