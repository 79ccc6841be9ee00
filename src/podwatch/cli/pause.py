"""``podwatch pause`` and ``unpause``: maintenance. podwatch keeps watching, uploading and pruning, but does not stop or
start training on its own."""

import getpass

import click

from podwatch.cli.common import Where, ask, common, json_option, say
from podwatch.domain.errors import UsageError


@click.command("pause", short_help="Maintenance: podwatch does not stop or start training on its own.")
@common
@click.option("--for", "duration", metavar="TIME", default="", help='Duration, for example "2h"; else until `unpause`.')
@click.option("--reason", metavar="TEXT", default="", help="Reason, shown in the status.")
@json_option
def pause(where: Where, duration: str, reason: str, as_json: bool) -> None:
    """Pause: podwatch reports problems but does not restart training. Uploads and pruning continue.

    A pause survives a restart of podwatch. The commands start, restart and stop-training still work. If other processes
    use the run's GPUs when the time is over, the pause continues until the GPUs are free.
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
        raise UsageError(str(error), where="--for", fix="omit --for to pause until `podwatch unpause`") from error
    if seconds <= 0:
        raise UsageError(
            "the duration must be above zero", where=f"--for {text}", fix="to end a pause: `podwatch unpause`"
        )
    return seconds


def who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, for example in a container
        return ""


@click.command("unpause", short_help="End a pause: podwatch restarts training again when needed.")
@common
@json_option
def unpause(where: Where, as_json: bool) -> None:
    """End the pause. podwatch reacts immediately to problems that it found meanwhile and that still exist."""
    say(ask(where, "unpause", purpose="end the pause"), as_json=as_json)
