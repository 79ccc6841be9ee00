"""``podwatch unpause``: end a pause."""

import click

from podwatch.cli.common import Where, ask, common, json_option, say


@click.command("unpause", short_help="End a pause: podwatch restarts training again when needed.")
@common
@json_option
def command(where: Where, as_json: bool) -> None:
    """End the pause. podwatch reacts immediately to problems that it found meanwhile and that still exist."""
    say(ask(where, "unpause", purpose="end the pause"), as_json=as_json)
