"""``podwatch status``: is training alive, which step, is it backed up, what is podwatch doing."""

import sys
import time

import click

from podwatch.cli.common import Where, colours, common, json_option, print_json
from podwatch.client.ask import ask_status, exit_code
from podwatch.client.plugin import plugin_line
from podwatch.client.render import render

WATCH_SECONDS = 2.0
_HOME_AND_CLEAR = "\x1b[H\x1b[J"


@click.command("status")
@common
@json_option
@click.option("--watch", is_flag=True, help="Refresh every two seconds until Ctrl-C.")
@click.option("--plugin", is_flag=True, help="One line for monitoring systems, with performance data.")
def command(where: Where, as_json: bool, watch: bool, plugin: bool) -> None:
    """Show what is true right now. Exit: 0 ok, 1 warning, 2 critical, 3 unknown or not running."""
    if sum((as_json, watch, plugin)) > 1:
        raise click.UsageError("--json, --watch and --plugin exclude each other")
    document = ask_status(where.run, where.config)
    if as_json:
        print_json(document)
    elif plugin:
        click.echo(plugin_line(document))
    else:
        try:
            _show(document, clear=watch)
            while watch:
                time.sleep(WATCH_SECONDS)
                document = ask_status(where.run, where.config)
                _show(document, clear=True)
        except KeyboardInterrupt:
            pass
    sys.stdout.flush()
    raise click.exceptions.Exit(exit_code(document))


def _show(document: dict[str, object], *, clear: bool) -> None:
    import os

    try:
        width = os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        width = 80
    text = render(document, width=width, colour=colours())
    click.echo((_HOME_AND_CLEAR if clear and sys.stdout.isatty() else "") + text, nl=False)
