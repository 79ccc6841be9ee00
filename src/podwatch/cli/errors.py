"""End a command: an error is one line on stderr with its exit code; a traceback only with PODWATCH_DEBUG=1."""

import os
import sys
from typing import NoReturn

import click

from podwatch.domain.errors import ExitCode, PodwatchError

INTERRUPTED = 130


def run(command: click.Command) -> NoReturn:
    """Run ``command`` with the process's arguments and exit. ``PODWATCH_DEBUG=1`` shows tracebacks."""
    try:
        code = command.main(prog_name="podwatch", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        error.show()
        _exit(ExitCode.USAGE)
    except click.ClickException as error:
        error.show()
        _exit(ExitCode.FAILED)
    except (click.Abort, KeyboardInterrupt):
        _exit(INTERRUPTED)
    except BrokenPipeError:
        # `podwatch events | head`: the reader is gone. Redirect stdout so that the interpreter's flush at exit works.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _exit(ExitCode.OK)
    except PodwatchError as error:
        _debug()
        click.echo(f"podwatch: {error}", err=True)
        _exit(error.exit_code)
    except Exception as error:
        _debug()
        click.echo(
            f"podwatch: internal error ({type(error).__name__}: {error}): report it with the output of"
            " PODWATCH_DEBUG=1",
            err=True,
        )
        _exit(ExitCode.FAILED)
    _exit(code if isinstance(code, int) else ExitCode.OK)


def _debug() -> None:
    if os.environ.get("PODWATCH_DEBUG"):
        raise  # noqa: PLE0704 - only called while an exception is handled


def _exit(code: int) -> NoReturn:
    raise SystemExit(int(code))
