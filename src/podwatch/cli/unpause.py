"""``podwatch unpause``: podwatch acts again."""

import click

from podwatch.cli.common import Where, ask, common, json_option, say


@click.command("unpause", short_help="End a pause: podwatch acts again.")
@common
@json_option
def command(where: Where, as_json: bool) -> None:
    """End the pause; what was found meanwhile and still holds is acted upon at once."""
    say(ask(where, "unpause", purpose="end the pause"), as_json=as_json)
