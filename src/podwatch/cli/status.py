"""``podwatch status``: the state of training, its step, its backup, and what podwatch does."""

import sys
import time

import click

from podwatch.cli.ask_daemon import ask_live, ask_status, exit_code
from podwatch.cli.common import MonitoringCommand, Where, clean, colours, common, for_terminal, json_option, print_json
from podwatch.domain.errors import ExitCode, PodwatchError
from podwatch.report.status_screen import plugin_line, render
from podwatch.report.terminal_text import encodable, fit, repaint


@click.command("status", cls=MonitoringCommand)
@common
@json_option
@click.option("--watch", is_flag=True, help="Refresh every two seconds until Ctrl-C.")
@click.option("--plugin", is_flag=True, help="One line for monitoring systems, with performance data.")
@click.option("--digest", is_flag=True, help="The state in a few sentences, as the digest of [notify] sends it.")
@click.option("--live", is_flag=True, help="For exec probes: exit 0 if podwatch observes the run, else 1.")
def command(where: Where, as_json: bool, watch: bool, plugin: bool, digest: bool, live: bool) -> None:
    """Show the current state of the run. Exit: 0 ok, 1 warning, 2 critical, 3 unknown or not running.

    With --live: 0 if the sensing loop turned within its deadline, whatever the state of training is, else 1.
    """
    if sum((as_json, watch, plugin, digest, live)) > 1:
        raise click.UsageError("--json, --watch, --plugin, --digest and --live cannot be used together")
    if live:
        turns, why = ask_live(where.run, where.config)
        click.echo("live" if turns else f"not live: {why}")
        raise click.exceptions.Exit(0 if turns else 1)
    try:
        document = ask_status(where.run, where.config)
    except PodwatchError as error:
        if not plugin:
            raise
        problem = " ".join(str(error).split()).replace("|", "/")  # monitoring reads the first line of stdout
        click.echo(f"PODWATCH UNKNOWN - {clean(problem)}")
        raise click.exceptions.Exit(ExitCode.STATUS_UNKNOWN) from error
    if as_json:
        print_json(document)
    elif plugin:
        click.echo(plugin_line(document))
    elif digest:
        from podwatch.report.digest import text

        lines = (for_terminal(clean(line), rest="") for line in text(document).splitlines())
        click.echo("\n".join(line for wrapped in lines for line in wrapped))
    elif not watch:
        _show(document)
    else:
        document = _watch(where, document)
    sys.stdout.flush()
    raise click.exceptions.Exit(exit_code(document))


def _watch(where: Where, document: dict[str, object]) -> dict[str, object]:
    """Show the status until Ctrl-C; the last one. In a terminal each status is painted over the one before, in the
    window's size of that moment; a change of the size paints at once. Into a file they follow each other."""
    import signal

    from podwatch.config.test_times import seconds

    pause = seconds("status.watch")
    resized = {signal.SIGWINCH}
    signal.pthread_sigmask(signal.SIG_BLOCK, resized)  # taken by sigtimedwait(), as its end
    try:
        if sys.stdout.isatty():
            click.echo("\n" * _window()[1], nl=False)  # what the window showed moves into the terminal's history
        while True:
            _paint(document, pause) if sys.stdout.isatty() else _show(document)
            if signal.sigtimedwait(resized, pause) is None:
                document = ask_status(where.run, where.config)
    except KeyboardInterrupt:
        click.echo()  # so that the prompt starts on a new line
    return document


def _show(document: dict[str, object]) -> None:
    text = render(document, width=_window()[0] or 80, colour=colours())
    click.echo(encodable(text, sys.stdout.encoding), nl=False)
    sys.stdout.flush()


def _paint(document: dict[str, object], pause: float) -> None:
    """Show the status in a terminal, cut to its size, and in the last row when that was."""
    columns, rows = _window()
    foot = f"at {time.strftime('%H:%M:%S')}, every {pause:.0f} s; Ctrl-C ends"[: columns or 80]
    free = rows - 1 if rows > 3 else rows
    text = fit(render(document, width=columns or 80, height=free, colour=colours()), columns, free)
    if rows > 3:
        text += f"\n{foot}"
    click.echo(repaint(encodable(text, sys.stdout.encoding), columns), nl=False)
    sys.stdout.flush()


def _window() -> tuple[int, int]:
    """Columns and rows of the terminal; 0 if unknown."""
    import os

    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return 0, 0
    return size.columns, size.lines
