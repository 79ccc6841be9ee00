"""``podwatch runs show`` and ``podwatch runs diff``: a run as a record, from the store alone."""

import shlex
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import Where, clean, common, json_option, say
from podwatch.cli.offline import checked_run_id, fixes_for, opened
from podwatch.cli.runs_check import store_option
from podwatch.domain.times import ago, amount, rfc3339, size, span

if TYPE_CHECKING:
    from podwatch.store.runs.difference import StartedWith
    from podwatch.store.runs.read import RunInStore

_LABEL = 10


@click.command("show", short_help="One run as a record: when, how long, what cost, how it ended.")
@common
@click.argument("run_id", metavar="RUN")
@store_option
@click.option("--files", "with_files", is_flag=True, help="Also print the stored configuration and files.")
@json_option
def show(where: Where, run_id: str, store: str, with_files: bool, as_json: bool) -> None:
    """Show what the store holds of RUN: start, end, duration, cost, best result, last step, outcome, checkpoints, the
    command and the stored files. Times and money are those of the run's last pod. Reads only; works without a
    daemon."""
    run = _read(where, store, checked_run_id(run_id))
    files = run.texts.files.items() if with_files else ()
    texts = (line for path, text in files for line in (f"\n=== {clean(path)}", *map(clean_line, text.splitlines())))
    document = {"schema_version": 1} | run_document(run, texts=with_files)
    say(document, [*_lines(run, time.time()), *texts], as_json=as_json)


@click.command("diff", short_help="How the stored configurations and commands of two runs differ.")
@common
@click.argument("run_a", metavar="A")
@click.argument("run_b", metavar="B")
@store_option
@json_option
def diff(where: Where, run_a: str, run_b: str, store: str, as_json: bool) -> None:
    """Print a unified diff of the commands, the configuration files and the settings that runs A and B were started
    with, as the store holds them: without secrets. Files belong together by path, else by name."""
    from podwatch.store.runs.difference import difference

    a, b = checked_run_id(run_a), checked_run_id(run_b)
    old, new = _read(where, store, a).texts, _read(where, store, b).texts
    lines = difference(a, old, b, new)
    problems = {a: list(old.problems), b: list(new.problems)}
    document = {"schema_version": 1, "a": a, "b": b, "same": not lines, "diff": lines, "problems": problems}
    say(document, map(clean_line, lines), as_json=as_json)
    for name, texts in ((a, old), (b, new)) if not as_json else ():
        for problem in texts.problems:
            click.echo(f"{name}: {clean(problem)}", err=True)
    if not lines and not as_json:
        click.echo("no difference in what the store holds of both", err=True)


def _read(where: Where, store_url: str, run_id: str) -> "RunInStore":
    from podwatch.store.keys import RunKeys
    from podwatch.store.runs.read import read_run

    with fixes_for(store_url, run_id), opened(where, store_url) as (store, prefix, _):
        return read_run(store, RunKeys(run_id, prefix), time.time())


def clean_line(text: str) -> str:
    """A line of a stored file: without control characters, indentation kept."""
    return "".join(c if c.isprintable() or c == "\t" else "?" for c in text)


# -- text ------------------------------------------------------------------------------------------------------------


def _lines(run: "RunInStore", now: float) -> Iterator[str]:
    for label, text in _rows(run, now):
        yield f"{label:<{_LABEL}}{clean(text)}"


def _rows(run: "RunInStore", now: float) -> Iterator[tuple[str, str]]:
    said, pointer = run.said, run.newest.pointer
    yield "run", run.run_id + (f" ({run.newest.layout})" if run.newest.layout else "")
    written = run.active.written_wall
    beat = "no heartbeat" if written is None else f"last heartbeat {ago(max(0.0, now - written))}"
    yield "outcome", f"{said.outcome or 'none yet'} ({beat})" + (f": {said.reason}" if said.reason else "")
    if run.last is not None and run.last.outcome:
        yield "verdict", f"{run.last.outcome}, exit code {run.last.code}: {run.last.reason}"
    yield from _spent(run)
    if said.host:
        where = f" ({said.instance.provider} {said.instance.id})" if said.instance.provider else ""
        yield "last pod", said.host + where
    newest = "no checkpoint" if run.newest.step is None else f"newest: step {run.newest.step}"
    yield "stored", f"{newest}; {len(run.listing.steps)} steps, {size(run.listing.size_bytes)} in all"
    yield from (("wandb", f"{name} {identity}") for name, identity in sorted(pointer.wandb.items() if pointer else ()))
    if run.texts.command:
        yield "command", shlex.join(run.texts.command)
    yield from (("file", f"{path} ({size(len(text.encode()))})") for path, text in run.texts.files.items())
    yield from (("note", problem) for problem in run.texts.problems)


def _spent(run: "RunInStore") -> Iterator[tuple[str, str]]:
    """When it trained, how far, and at what cost."""
    said, account = run.said, run.account
    if run.started_wall is not None:
        took = "" if run.duration is None else f", {span(run.duration)}"
        yield "from", f"{_minute(run.started_wall)} to {_minute(run.ended_wall)}{took}"
    if run.step is not None:
        yield "step", f"{run.step}" + (f" of {said.target}" if said.target is not None else "")
    if said.account is not None and said.account.goodput_ratio is not None:
        count = f"{account.failures} failure" + "s" * (account.failures != 1)
        lost = f", {count} cost {span(account.lost_seconds)}" if account.failures and account.lost_seconds else ""
        yield "goodput", f"{100 * said.account.goodput_ratio:.0f} %{lost}"
    if (money := account.money).so_far is not None:
        lost = f", {amount(money.lost, money.currency)} of it lost" if money.lost else ""
        yield "cost", amount(money.so_far, money.currency) + lost
    if said.best_result:
        yield "best", said.best_result


def _minute(wall: float | None) -> str:
    return "-" if wall is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(wall))


# -- documents -------------------------------------------------------------------------------------------------------


def summary_document(run: "RunInStore") -> dict[str, Any]:
    said, account = run.said, run.account
    return {
        "started_at": rfc3339(run.started_wall),
        "ended_at": rfc3339(run.ended_wall) if run.ended else None,
        "duration_seconds": None if run.duration is None else round(run.duration),
        "step": run.step,
        "target_step": said.target,
        "goodput_ratio": None if said.account is None else said.account.goodput_ratio,
        "failures": account.failures,
        "lost_seconds": account.lost_seconds,
        "steps_lost": account.steps_lost,
        "cost": account.money.so_far,
        "cost_lost": account.money.lost,
        "currency": account.money.currency,
        "best_result": said.best_result or None,
    }


def run_document(run: "RunInStore", *, texts: bool) -> dict[str, Any]:
    """``texts``: with the stored files."""
    said, pointer = run.said, run.newest.pointer
    return {
        "run_id": run.run_id,
        "outcome": said.outcome or None,
        "reason": said.reason,
        "heartbeat_at": rfc3339(run.active.written_wall),
        "host": said.host,
        "layout": run.newest.layout,
        "lineage": "" if pointer is None else pointer.lineage,
        "wandb": {} if pointer is None else dict(pointer.wandb),
        "newest_step": run.newest.step,
        "stored_steps": list(run.listing.steps),
        "size_bytes": run.listing.size_bytes,
        **summary_document(run),
        **texts_document(run.texts, contents=texts),
    }


def texts_document(texts: "StartedWith", *, contents: bool) -> dict[str, Any]:
    return {
        "command": list(texts.command),
        "files": [
            {"path": path, "size_bytes": len(text.encode())} | ({"text": text} if contents else {})
            for path, text in texts.files.items()
        ],
        "settings": dict(texts.settings),
        "problems": list(texts.problems),
    }
