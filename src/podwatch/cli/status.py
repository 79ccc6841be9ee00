"""``podwatch status``: the state of training, its step, its backup, and what podwatch does."""

import sys
import time

import click

from podwatch.cli.common import Where, colours, common, fit, json_option, print_json
from podwatch.client.api import ask_status, exit_code
from podwatch.client.status_screen import plugin_line, render

WATCH_SECONDS = 2.0
_HOME_AND_CLEAR = "\x1b[H\x1b[J"


@click.command("status")
@common
@json_option
@click.option("--watch", is_flag=True, help="Refresh every two seconds until Ctrl-C.")
@click.option("--plugin", is_flag=True, help="One line for monitoring systems, with performance data.")
def command(where: Where, as_json: bool, watch: bool, plugin: bool) -> None:
    """Show the current state of the run. Exit: 0 ok, 1 warning, 2 critical, 3 unknown or not running."""
    if sum((as_json, watch, plugin)) > 1:
        raise click.UsageError("--json, --watch and --plugin cannot be used together")
    document = ask_status(where.run, where.config)
    if as_json:
        print_json(document)
    elif plugin:
        click.echo(plugin_line(document))
    else:
        try:
            _show(document, paint=watch)
            while watch:
                time.sleep(WATCH_SECONDS)
                document = ask_status(where.run, where.config)
                _show(document, paint=True)
        except KeyboardInterrupt:
            click.echo()  # so that the prompt starts on a new line
    sys.stdout.flush()
    raise click.exceptions.Exit(exit_code(document))


def _show(document: dict[str, object], *, paint: bool) -> None:
    """Print the status. ``paint``: clear the window first and cut the text to its size."""
    columns, rows = _window()
    text = render(document, width=columns or 80, colour=colours())
    if paint and sys.stdout.isatty():
        text = _HOME_AND_CLEAR + fit(text, columns, rows)
    click.echo(text, nl=False)
    sys.stdout.flush()


def _window() -> tuple[int, int]:
    """Columns and rows of the terminal; 0 if unknown."""
    import os

    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return 0, 0
    return size.columns, size.lines
