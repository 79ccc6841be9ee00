"""Shared by the commands: common options, calls to the daemon, output. Imports nothing heavier than click."""

import functools
import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from podwatch.cli.ask_daemon import NotRunning, call
from podwatch.cli.find_daemon import Found, locate, searched
from podwatch.domain.errors import ExitCode
from podwatch.domain.times import from_rfc3339

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Where:
    """The configuration file and the run given on the command line; empty if not given."""

    config: str = ""
    run: str = ""

    @property
    def path(self) -> Path | None:
        """Of the configuration file, if one is given."""
        return Path(self.config) if self.config else None


def common(function: Callable[..., R]) -> Callable[..., R]:
    """Accept ``-c`` and ``--run`` also after the command, and pass the command a ``where``."""

    @functools.wraps(function)
    def wrapper(*args: Any, config: str, run_name: str, **kwargs: Any) -> R:
        ctx = click.get_current_context()
        above = ctx.obj if isinstance(ctx.obj, Where) else Where()
        ctx.obj = Where(config or above.config, run_name or above.run)
        return function(ctx.obj, *args, **kwargs)

    named = click.option("--run", "run_name", metavar="NAME", default="", help="Which run.")(wrapper)
    return click.option("-c", "--config", metavar="FILE", default="", help="Configuration file.")(named)


class MonitoringCommand(click.Command):
    """Its exit code is the state of a run, 0 to 3. An error of the command itself ends with 3: monitoring reads 1 as a
    warning about the run, and knows no others."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        errors_end_with(ExitCode.STATUS_UNKNOWN)
        return super().make_context(*args, **kwargs)


_of_errors: list[ExitCode] = []


def errors_end_with(code: ExitCode | None) -> None:
    """Every error from now on ends this process with ``code``; None: each with its own."""
    _of_errors[:] = [] if code is None else [code]


def code_of_error(usual: ExitCode) -> ExitCode:
    """The exit code for an error whose own one is ``usual``."""
    return _of_errors[0] if _of_errors else usual


OTHER_WORDS = {
    "backup": "sync",
    "doctor": "check",
    "evaluate": "eval",
    "init": "config init",
    "kill": "stop-training",
    "list": "checkpoints",
    "ls": "checkpoints",
    "resume": "start --step N",
    "snapshots": "checkpoints",
    "stop": "stop-training",
    "upload": "sync",
    "validate": "config validate",
    "version": "--version",
    "wait": "stop-training --wait",
}
"""What people type who know other tools -> the command for it."""


class SuggestingGroup(click.Group):
    """A group that names the command that a wrong word probably means, also one of a group below it."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            path = ctx.command_path
            likely = " or ".join(f"`{path} {name}`" for name in self._likely(ctx, args[0].lower()))
            hint = f"Did you mean {likely}?" if likely else f"`{path} --help` lists the commands."
            raise click.UsageError(f"No such command {args[0]!r}. {hint}", ctx) from error

    def _likely(self, ctx: click.Context, word: str) -> list[str]:
        """The commands that are probably meant, with the groups above them; empty if none resembles ``word``."""
        import difflib

        if ctx.parent is None and word in OTHER_WORDS:
            return [OTHER_WORDS[word]]
        names = self.list_commands(ctx)
        near = difflib.get_close_matches(word, names, n=1)
        if near:
            return near
        groups = ((name, self.get_command(ctx, name)) for name in names)
        below = {name: group.list_commands(ctx) for name, group in groups if isinstance(group, click.Group)}
        near = difflib.get_close_matches(word, {leaf for leaves in below.values() for leaf in leaves}, n=1)
        return [f"{name} {leaf}" for name, leaves in below.items() for leaf in leaves if leaf in near]


json_option = click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")


def find_daemon(where: Where) -> Found | None:
    """The running daemon of the run, or None. UsageError if several runs match."""
    found = locate(where.run, where.config)
    return found if found is not None and found.alive else None


def need_daemon(where: Where, purpose: str) -> Found:
    """The running daemon, or NotRunning (exit 69) with the searched places and the fix."""
    found = find_daemon(where)
    if found is None:
        import os

        places = ", ".join(str(place) for place in searched(os.environ))
        config = f" -c {where.config}" if where.config else ""
        raise NotRunning(
            f"cannot {purpose}: podwatch is not running",
            where=f"no endpoint in {places}",
            fix=f"start it with `podwatch run{config}` (or: systemctl start podwatch)",
        )
    return found


def ask(
    where: Where,
    method: str,
    params: Mapping[str, Any] | None = None,
    *,
    purpose: str,
    timeout: float | None = 30.0,
) -> dict[str, Any]:
    """The daemon's answer to ``method``. ``purpose`` completes "cannot ..." in the error if no daemon runs."""
    return call(need_daemon(where, purpose).control_path, method, params, timeout=timeout)


def ask_if_it_runs(
    where: Where, method: str, params: Mapping[str, Any] | None = None, *, timeout: float | None = 30.0
) -> dict[str, Any] | None:
    """The daemon's answer to ``method``; None where none runs, so that the command reads what is on disk."""
    found = find_daemon(where)
    if found is None:
        return None
    try:
        return call(found.control_path, method, params, timeout=timeout)
    except NotRunning:
        return None  # it has just stopped


def confirm(question: str, lines: Sequence[str] = ()) -> None:
    """Ask on the terminal, after these lines. Exit 1 where the answer is no; UsageError without a terminal."""
    from podwatch.domain.errors import UsageError

    if not sys.stdin.isatty():
        raise UsageError(
            "this command asks for confirmation, but there is no terminal", fix="look with --dry-run, then add --yes"
        )
    if lines:
        click.echo("\n".join(lines), err=True)
    if not click.confirm(question, err=True):
        raise click.exceptions.Exit(int(ExitCode.FAILED))


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """One line for each row, its cells below each other; those of the columns ``right`` end at the same place."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def print_json(document: object) -> None:
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def say(document: Mapping[str, Any], lines: Iterable[str] | None = None, *, as_json: bool) -> None:
    """Print a document as JSON, or ``lines`` for people: without any, what an answer of the daemon has as message."""
    if as_json:
        print_json(document)
    else:
        for line in [clean(document.get("message", "done"))] if lines is None else lines:
            click.echo(line)


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A time above zero, such as 90s, 5m or 2h, in seconds. (Only new versions of click have a generic ParamType.)"""

    name = "duration"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        from podwatch.config.units import parse_duration
        from podwatch.domain.errors import UsageError

        where, fix = f"{param.opts[0]} {value}", 'write for example "5m" or "2h"'
        try:
            seconds = parse_duration(value)
        except ValueError as error:
            raise UsageError(str(error), where=where, fix=fix) from error
        if seconds <= 0:
            raise UsageError("the duration must be above zero", where=where, fix=fix)
        return seconds


def moment(option: str, text: str) -> float | None:
    """Epoch seconds of "2h" (2 hours ago) or of an RFC 3339 time; None for an empty text. UsageError."""
    if not text:
        return None
    at = from_rfc3339(text)
    if at is not None:
        return at
    from podwatch.config.units import parse_duration
    from podwatch.domain.errors import UsageError

    try:
        return time.time() - parse_duration(text)
    except ValueError as error:
        raise UsageError(
            "not a valid time", where=f"{option} {text}", fix='write for example "2h" or "2026-01-31T03:00:00Z"'
        ) from error


def clean(text: object) -> str:
    """``text`` without control characters, which text from the trainer can contain."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in str(text))


def for_terminal(text: str, *, first: str = "", rest: str = "  ", err: bool = False) -> list[str]:
    """``first`` and ``text`` as lines that end between words on a terminal, the others after ``rest``; one line where
    the output is no terminal: programs read lines."""
    import os

    from podwatch.report.terminal_text import wrap

    stream = sys.stderr if err else sys.stdout
    width = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    return wrap(text, width, first=first, rest=rest) if width >= 2 * len(rest) + 2 else [first + text]


def colours() -> bool:
    """Whether to print colours: on a terminal without NO_COLOR."""
    import os

    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
