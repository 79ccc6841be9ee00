"""What commands share: where to look, how to reach the daemon, how to print. Only click and the client room."""

import functools
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from podwatch.client.control import NotRunning, call
from podwatch.client.discover import Found, locate

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Where:
    """The configuration file and the run that were named; empty where nothing was."""

    config: str = ""
    run: str = ""


def common(function: Callable[..., R]) -> Callable[..., R]:
    """Accept ``-c`` and ``--run`` after the command too, and hand the command a ``where``."""

    @functools.wraps(function)
    def wrapper(*args: Any, config: str, run_name: str, **kwargs: Any) -> R:
        ctx = click.get_current_context()
        above = ctx.obj if isinstance(ctx.obj, Where) else Where()
        ctx.obj = Where(config or above.config, run_name or above.run)
        return function(ctx.obj, *args, **kwargs)

    named = click.option("--run", "run_name", metavar="NAME", default="", help="Which run.")(wrapper)
    return click.option("-c", "--config", metavar="FILE", default="", help="Configuration file.")(named)


json_option = click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")


def find_daemon(where: Where) -> Found | None:
    """The living daemon of the run that is meant, or None. UsageError when that is ambiguous."""
    found = locate(where.run, where.config)
    return found if found is not None and found.alive else None


def need_daemon(where: Where, purpose: str) -> Found:
    """The same, or NotRunning (exit 69) that says what to do."""
    found = find_daemon(where)
    if found is None:
        config = f" -c {where.config}" if where.config else ""
        raise NotRunning(
            f"podwatch is not running, so nobody can {purpose}",
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
    """Call the daemon, or say that it is not there."""
    return call(need_daemon(where, purpose).control_path, method, params, timeout=timeout)


def print_json(document: object) -> None:
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def say(answer: Mapping[str, Any], *, as_json: bool) -> None:
    """The daemon's own message, or its whole answer."""
    if as_json:
        print_json(answer)
    else:
        click.echo(clean(answer.get("message", "done")))


def clean(text: object) -> str:
    """Without control characters: some text comes from the trainer and may try to move the cursor."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in str(text))


def colours() -> bool:
    """A terminal, and NO_COLOR is not set."""
    import os

    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
