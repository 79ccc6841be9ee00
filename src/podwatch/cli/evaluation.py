"""``podwatch eval``: the table of results, and evaluations of checkpoints now (docs/hooks.md)."""

from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import Where, ask, clean, columns, common, json_option, say

if TYPE_CHECKING:
    from podwatch.hooks.evaluations_due import Result

SHOWN_METRICS = 6
"""Columns that fit on a screen; --json has all."""
NO_RESULTS = "no evaluation has ended yet (docs/hooks.md)"


@click.command("eval", short_help="Show the results of evaluations; evaluate checkpoints now.")
@common
@click.option("--steps", metavar="N,N", default="", help="Evaluate these steps.")
@click.option("--all", "every", is_flag=True, help="Evaluate every checkpoint here and in the store.")
@json_option
def command(where: Where, steps: str, every: bool, as_json: bool) -> None:
    """Show the results of all evaluations, by step; with --steps or --all, run [evaluation] command for checkpoints on
    this pod and in the store, one after the other.

    The table needs no running podwatch. Evaluations do: it runs them as [evaluation] gpus says, and fetches a
    checkpoint that is only in the store into a directory of its own.
    """
    if steps and every:
        raise click.UsageError("--steps and --all cannot be used together")
    if steps or every:
        wanted = None if every else _steps(steps)
        say(ask(where, "evaluate", {"steps": wanted}, purpose="evaluate"), as_json=as_json)
    else:
        _show_results(where, as_json=as_json)


def _steps(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        found = []
    if not found or min(found) < 0:
        raise click.UsageError(f"Invalid value for --steps: {text!r} (expected step numbers, such as 10,20)")
    return found


def _show_results(where: Where, *, as_json: bool) -> None:
    from podwatch.cli.offline import load, read_journal
    from podwatch.domain.times import rfc3339
    from podwatch.hooks import evaluations_due
    from podwatch.journal.journal import Journal

    settings = load(where).evaluation
    with read_journal(where) as journal:
        rows = evaluations_due.results_from_list(Journal.learned(journal, evaluations_due.RESULTS_KEY))
    top = evaluations_due.best(rows, settings.metric, lower=settings.lower_is_better) if settings.metric else None
    documents = [_document(r, best=r is top, at=rfc3339(r.wall)) for r in rows]
    document = {"schema_version": 1, "metric": settings.metric or None, "results": documents}
    lines = _lines(rows, evaluations_due.columns(rows, settings.metric), top) if rows else [NO_RESULTS]
    say(document, lines, as_json=as_json)


def _document(row: "Result", *, best: bool, at: str | None) -> dict[str, Any]:
    return {
        "step": row.step,
        "save_id": row.save_id,
        "ok": row.ok,
        "best": best,
        "at": at,
        "seconds": round(row.seconds, 3),
        "source": row.source,
        "why": row.why,
        "metrics": dict(row.metrics),
    }


def _lines(rows: "tuple[Result, ...]", names: tuple[str, ...], top: "Result | None") -> list[str]:
    shown = names[:SHOWN_METRICS]
    table = [["step", "seconds", *(clean(name)[-24:] for name in shown), ""]]
    for r in rows:
        numbers = [f"{r.metrics[name]:.6g}" if name in r.metrics else "-" for name in shown]
        remark = "best" if r is top else "" if r.ok else f"failed: {clean(r.why)}"
        table.append([str(r.step), f"{r.seconds:.1f}", *numbers, remark])
    lines = columns(table, right=range(len(shown) + 2))
    if len(names) > len(shown):
        lines.append(f"({len(names) - len(shown)} more numbers: --json)")
    return lines
