"""What commands share: where to look, how to reach the daemon, how to print. Only click and the client room."""

import functools
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from podwatch.client.control import NotRunning, call
from podwatch.client.discover import Found, locate
from podwatch.client.times import from_rfc3339

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
    """The same, or NotRunning (exit 69) that says where it was looked for and what to do."""
    found = find_daemon(where)
    if found is None:
        import os

        from podwatch.client.discover import read_hints, searched
        from podwatch.client.elsewhere import holder

        hints = read_hints(where.config)
        places = ", ".join(str(place) for place in searched(os.environ, hints))
        there = holder(where.run or hints.run_id, os.environ, hints)
        if there is not None:
            raise NotRunning(
                f"podwatch runs (pid {there.pid}), but cannot be asked to {purpose}: its runtime directory is none of"
                " those looked in",
                where=places,
                fix=f"set PODWATCH_RUNTIME_DIR to {there.runtime or 'the one it was started with'}",
            )
        config = f" -c {where.config}" if where.config else ""
        raise NotRunning(
            f"podwatch is not running, so nobody can {purpose}",
            where=f"looked in {places}",
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


def moment(option: str, text: str) -> float | None:
    """Seconds of the epoch from "2h" (so long ago) or an RFC 3339 time; None for nothing given. UsageError."""
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
            "not a time", where=f"{option} {text}", fix='write "2h" or for example "2026-01-31T03:00:00Z"'
        ) from error


def clean(text: object) -> str:
    """Without control characters: some text comes from the trainer and may try to move the cursor."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in str(text))


def colours() -> bool:
    """A terminal, and NO_COLOR is not set."""
    import os

    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
