"""A command: docs/contributing.md."""

import click

from podwatch.cli.common import Where, ask, common, json_option, print_json


@click.command("phase", short_help="Show what training is doing.")
@common
@json_option
def command(where: Where, as_json: bool) -> None:
    """Show the state of training in one word."""
    state = ask(where, "status", purpose="show the phase")["training"]["state"]
    if as_json:
        print_json({"schema_version": 1, "state": state})
    else:
        click.echo(state)
