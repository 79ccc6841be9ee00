"""``podwatch check``: check the pod before training runs unattended.

The files of this folder hold the checks: each examines one thing and yields ok, warn or fail, with the fix. They change
nothing, except for probe files beside output_dir and in the store, which are deleted again, and a test notice (with
``send_notice``).
"""

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from podwatch.cli.common import Where, clean, colours, common, for_terminal, json_option, print_json
from podwatch.cli.job_assumptions import assume, given_options
from podwatch.domain.errors import ConfigurationError, ExitCode, PodwatchError

if TYPE_CHECKING:
    from podwatch.cli.check.report import Line
    from podwatch.config.settings import Settings

_TONE = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command("check")
@common
@click.option("--notify", is_flag=True, help="Send a test notice to each channel of [notify].")
@json_option
@given_options
def command(where: Where, overrides: dict[str, object], notify: bool, as_json: bool) -> None:
    """Check this pod before training runs unattended. Exit: 0 ok or warnings, 1 a check failed, 78 configuration.

    With a command after --, as `podwatch run --job` takes it, settings that are not given are detected and shown.
    """
    from podwatch.cli.check.report import CheckReport, Line
    from podwatch.config.loading import load_settings
    from podwatch.config.problems import ConfigurationProblems

    lines: list[Line] = []

    def show(line: Line) -> None:
        lines.append(line)
        if not as_json:
            _print(line)

    try:
        assumed = assume(where, overrides)
        loaded = load_settings(where.path, environ=os.environ, overrides=assumed.overrides, run=where.run)
    except ConfigurationError as error:
        code = int(error.exit_code)
        for one in error.problems if isinstance(error, ConfigurationProblems) else (error,):
            show(Line("config", "fail", f"{one.what}{f' ({one.where})' if one.where else ''}", one.fix))
    else:
        show(Line("config", "ok", f"{loaded.path or 'environment and flags'}, run {loaded.settings.run_id}"))
        if "PODWATCH_TEST_TIMES" in loaded.sources.values():
            show(Line("config", "warn", "PODWATCH_TEST_TIMES sets times of podwatch's own", "unset it"))
        for text in assumed.lines:
            show(Line("assumed", "ok", text.removeprefix("assumed ")))
        for result in examine(loaded.settings, send_notice=notify):
            show(result)
        code = int(ExitCode.FAILED if any(line.level == "fail" for line in lines) else ExitCode.OK)
    if as_json:
        print_json(CheckReport(code == 0, tuple(lines)).to_json())
    raise click.exceptions.Exit(code)


def examine(settings: "Settings", *, send_notice: bool = False) -> "Iterator[Line]":
    """The results of every check, in the order in which an operator fixes things. A check that fails to run yields a
    result, too, and does not stop the others."""
    from podwatch.cli.check import before_a_start, disk, machine, notify, operator_commands, training_command
    from podwatch.cli.check.report import Line, failed, sets_of
    from podwatch.cli.check.store import store
    from podwatch.cli.offline import training_here

    present, sets = training_here(settings), sets_of(settings)
    now = present.text
    checks: dict[str, Callable[[], Iterator[Line]]] = {
        "output_dir": lambda: disk.output_dir(settings),
        "directories": lambda: disk.own_directory(settings),
        "state_dir": lambda: disk.state_dir(settings),
        "layout": lambda: training_command.layout(settings, sets),
        "command": lambda: training_command.command(settings),
        "wandb": lambda: training_command.keys(settings),
        "packages": lambda: training_command.packages(settings),
        "gpu": lambda: machine.gpus(settings, now),
        "supervise": lambda: before_a_start.supervise(settings, present),
        "leftovers": lambda: before_a_start.leftovers(settings),
        "ports": lambda: machine.ports(settings, now),
        "signals": lambda: machine.signals(settings),
        "disk": lambda: disk.disk(settings, sets),
        "store": lambda: store(settings),
        "nofile": lambda: machine.limits(settings),
        "http": lambda: machine.http(settings),
        "notify": lambda: notify.notify(settings, send=send_notice),
        "wandb run": lambda: notify.own_wandb(settings, send=send_notice),
        "hooks": lambda: operator_commands.hooks(settings),
        "checks": lambda: operator_commands.checks(settings),
        "host": lambda: machine.host(settings),
        "pause": lambda: before_a_start.paused(settings),
    }
    told: set[str] = set()
    for name, check in checks.items():
        try:
            yield from check()
        except PodwatchError as error:
            if str(error) in told:
                continue  # several checks need the layout
            told.add(str(error))
            yield failed(name, error)
        except TimeoutError:
            yield Line(name, "fail", "the file system does not answer", "check its mount (NFS, FUSE) and dmesg")
        except OSError as error:
            yield Line(name, "fail", f"cannot run this check: {error}", "check the path and its permissions")


def _print(line: "Line") -> None:
    word = click.style(f"{line.level:<4}", fg=_TONE[line.level], bold=line.level == "fail") if colours() else None
    first, *more = for_terminal(clean(line.text), first=f"{line.level:<4}  {line.name:<11} ", rest=" " * 18)
    click.echo("\n".join([word + first[4:] if word else first, *more]))
    if line.fix and line.level != "ok":
        click.echo("\n".join(for_terminal(clean(line.fix), first=f"{'':18}do: ", rest=" " * 22)))
