"""``podwatch pause``: maintenance. podwatch goes on watching, syncing and pruning, but kills and starts nothing."""

import getpass

import click

from podwatch.cli.common import Where, ask, common, json_option, say
from podwatch.domain.errors import UsageError


@click.command("pause", short_help="Maintenance: kill and start nothing.")
@common
@click.option("--for", "duration", metavar="TIME", default="", help='How long, as "2h"; without it, until `unpause`.')
@click.option("--reason", metavar="TEXT", default="", help="Shown in the status.")
@json_option
def command(where: Where, duration: str, reason: str, as_json: bool) -> None:
    """Kill and start nothing until it is over, whatever is found. Sync and pruning go on.

    It survives a restart of podwatch. What a person asks for (start, restart, stop-training) is done all the same. When
    the time is over and others hold the run's GPUs, it goes on until they are free.
    """
    params = {"seconds": _seconds(duration), "reason": reason, "by": who()}
    say(ask(where, "pause", params, purpose="pause"), as_json=as_json)


def _seconds(text: str) -> float | None:
    if not text:
        return None
    from podwatch.config.units import parse_duration

    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise UsageError(str(error), where="--for", fix="leave --for out to pause until `podwatch unpause`") from error
    if seconds <= 0:
        raise UsageError("a pause of no time", where=f"--for {text}", fix="`podwatch unpause` ends one")
    return seconds


def who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as containers have them
        return ""
