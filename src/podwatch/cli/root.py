"""The ``podwatch`` command group, and how a command ends. A command's module is imported only for that command (or for
``--help``)."""

import importlib
import os
import sys
from typing import NoReturn

import click

from podwatch import __version__
from podwatch.cli.common import SuggestingGroup, Where, code_of_error, errors_end_with, for_terminal
from podwatch.domain.errors import ExitCode, PodwatchError

COMMANDS = {
    "run": "podwatch.cli.run",
    "status": "podwatch.cli.status",
    "check": "podwatch.cli.check",
    "checkpoints": "podwatch.cli.checkpoints",
    "start": "podwatch.cli.training",
    "restart": "podwatch.cli.training",
    "stop-training": "podwatch.cli.training",
    "pause": "podwatch.cli.training",
    "events": "podwatch.cli.events",
    "logs": "podwatch.cli.events",
    "unpause": "podwatch.cli.training",
    "preempt": "podwatch.cli.training",
    "incidents": "podwatch.cli.events",
    "sync": "podwatch.cli.checkpoints",
    "restore": "podwatch.cli.restore",
    "prune": "podwatch.cli.checkpoints",
    "quarantine": "podwatch.cli.checkpoints",
    "clean": "podwatch.cli.clean",
    "eval": "podwatch.cli.evaluation",
    "hooks": "podwatch.cli.hooks",
    "store": "podwatch.cli.store",
    "runs": "podwatch.cli.runs",
    "config": "podwatch.cli.config",
    "install": "podwatch.cli.install",
    "uninstall": "podwatch.cli.uninstall",
    "bootstrap": "podwatch.cli.bootstrap",
    "controller": "podwatch.cli.controller",
    "replay": "podwatch.cli.replay",
    "demo": "podwatch.cli.demo",
}
"""Name -> module, in the order of the help. The module defines the click command by its name, or as ``command``."""
EVERY_DAY = 10
"""How many commands at the beginning of the help are those of every day."""


class LazyGroup(SuggestingGroup):
    """The commands of ``COMMANDS``; the ten of every day come first in the help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name])
        named = (getattr(module, name, None) for name in (cmd_name.replace("-", "_"), "command"))
        return next((found for found in named if isinstance(found, click.Command)), None)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width, names = max(map(len, COMMANDS)), list(COMMANDS)
        for title, group in (("Every day", names[:EVERY_DAY]), ("More commands", names[EVERY_DAY:])):
            found = [(name, self.get_command(ctx, name)) for name in group]
            room = formatter.width - 6 - width
            rows = [(name, one.get_short_help_str(room)) for name, one in found if one is not None]
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog='Shell completion: add  eval "$(_PODWATCH_COMPLETE=bash_source podwatch)"  to ~/.bashrc'
    " (zsh_source and fish_source for the others).",
)
@click.version_option(__version__, prog_name="podwatch", message="%(prog)s %(version)s")
@click.option("-c", "--config", metavar="FILE", default="", help="Configuration file.")
@click.option("--run", "run_name", metavar="NAME", default="", help="Which run, if podwatch guards several here.")
@click.pass_context
def cli(ctx: click.Context, config: str, run_name: str) -> None:
    """Keep an unattended RL training run alive on a rented GPU pod, and its checkpoints safe."""
    ctx.obj = Where(config, run_name)


# -- how a command ends ----------------------------------------------------------------------------------------------


INTERRUPTED = 130


def run(command: click.Command) -> NoReturn:
    """Run ``command`` with the process's arguments and exit. ``PODWATCH_DEBUG=1`` shows tracebacks."""
    errors_end_with(None)
    try:
        code = command.main(prog_name="podwatch", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        error.show()
        _exit(code_of_error(ExitCode.USAGE))
    except click.ClickException as error:
        error.show()
        _exit(code_of_error(ExitCode.FAILED))
    except (click.Abort, KeyboardInterrupt):
        _exit(INTERRUPTED)
    except BrokenPipeError:
        # `podwatch events | head`: the reader is gone. Redirect stdout so that the interpreter's flush at exit works.
        _drop_output()
        _exit(ExitCode.OK)
    except PodwatchError as error:
        _debug()
        click.echo("\n".join(for_terminal(f"podwatch: {error}", err=True)), err=True)
        _exit(code_of_error(error.exit_code))
    except Exception as error:
        _debug()
        failed = code_of_error(ExitCode.FAILED)
        if problem := _output_problem(error):
            _drop_output()
            click.echo(f"podwatch: cannot write the output: {problem}", err=True)
            _exit(failed)
        click.echo(
            f"podwatch: internal error ({type(error).__name__}: {error}): report it with the output of"
            " PODWATCH_DEBUG=1",
            err=True,
        )
        _exit(failed)
    _exit(code if isinstance(code, int) else ExitCode.OK)


def _output_problem(error: Exception) -> str:
    """Why standard output takes nothing more (a full disk); empty if something else failed."""
    try:
        sys.stdout.flush()
    except OSError as refused:
        return refused.strerror or str(refused)
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    echoed = last is not None and last.tb_frame.f_globals.get("__name__") == "click.utils"
    return (error.strerror or str(error)) if echoed and isinstance(error, OSError) else ""


def _drop_output() -> None:
    """Redirect standard output to nowhere, so that the interpreter's flush at its end works."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _debug() -> None:
    if os.environ.get("PODWATCH_DEBUG"):
        raise  # noqa: PLE0704 - only called while an exception is handled


def _exit(code: int) -> NoReturn:
    raise SystemExit(int(code))
