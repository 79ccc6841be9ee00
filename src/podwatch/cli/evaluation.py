"""``podwatch eval``: evaluate checkpoints now, and the table of results (docs/evaluation.md)."""

import csv
import io
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import Where, ask, clean, common, json_option, print_json, say

if TYPE_CHECKING:
    from podwatch.policy.evaluation import Result

SHOWN_METRICS = 6
"""Columns that fit on a screen; --csv and --json have all."""


@click.group("eval", short_help="Evaluate checkpoints; show the table of results.", invoke_without_command=True)
@common
@click.option("--steps", metavar="N,N", default="", help="Evaluate these steps.")
@click.option("--all", "every", is_flag=True, help="Evaluate every checkpoint here and in the store.")
@json_option
@click.pass_context
def command(ctx: click.Context, where: Where, steps: str, every: bool, as_json: bool) -> None:
    """Run [evaluation] command for checkpoints on this pod and in the store, one after the other.

    A checkpoint that is only in the store is fetched into a directory of its own. Needs a running podwatch, which runs
    the evaluations as [evaluation] gpus says.
    """
    if ctx.invoked_subcommand is not None:
        if steps or every:
            raise click.UsageError("--steps and --all cannot be used with a subcommand")
        return
    if bool(steps) == every:
        raise click.UsageError("choose the checkpoints: --steps 10,20 or --all")
    wanted = None if every else _steps(steps)
    say(ask(where, "evaluate", {"steps": wanted}, purpose="evaluate"), as_json=as_json)


def _steps(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        found = []
    if not found or min(found) < 0:
        raise click.UsageError(f"Invalid value for --steps: {text!r} (expected step numbers, such as 10,20)")
    return found


@command.command("table")
@common
@click.option("--csv", "as_csv", is_flag=True, help="All numbers as CSV.")
@json_option
def table(where: Where, as_csv: bool, as_json: bool) -> None:
    """Show the results of all evaluations, by step. Works without a running podwatch."""
    from podwatch.cli.offline import load, read_journal
    from podwatch.client.times_and_sizes import rfc3339
    from podwatch.journal.journal import Journal
    from podwatch.policy import evaluation as policy

    settings = load(where).evaluation
    with read_journal(where) as journal:
        rows = policy.results_from_list(Journal.learned(journal, policy.RESULTS_KEY))
    top = policy.best(rows, settings.metric, lower=settings.lower_is_better) if settings.metric else None
    names = policy.columns(rows, settings.metric)
    if as_json:
        documents = [_document(r, best=r is top, at=rfc3339(r.wall)) for r in rows]
        print_json({"schema_version": 1, "metric": settings.metric or None, "results": documents})
    elif as_csv:
        click.echo(_csv(rows, names, top), nl=False)
    elif not rows:
        click.echo("no evaluation has ended yet (docs/evaluation.md)")
    else:
        click.echo("\n".join(_lines(rows, names, top)))


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


def _csv(rows: "tuple[Result, ...]", names: tuple[str, ...], top: "Result | None") -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["step", "save_id", "ok", "best", "seconds", "source", "why", *names])
    for r in rows:
        numbers = [r.metrics.get(name, "") for name in names]
        writer.writerow([r.step, r.save_id, int(r.ok), int(r is top), round(r.seconds, 3), r.source, r.why, *numbers])
    return out.getvalue()


def _lines(rows: "tuple[Result, ...]", names: tuple[str, ...], top: "Result | None") -> list[str]:
    shown = names[:SHOWN_METRICS]
    lines = [f"{'step':>8}  {'seconds':>8}  " + "  ".join(f"{clean(name)[-24:]:>12}" for name in shown)]
    for r in rows:
        numbers = [f"{r.metrics[name]:.6g}" if name in r.metrics else "-" for name in shown]
        cells = "  ".join(
            f"{number:>{max(12, len(clean(name)[-24:]))}}" for number, name in zip(numbers, shown, strict=True)
        )
        mark = "  best" if r is top else ""
        text = cells if r.ok else f"failed: {clean(r.why)}"
        lines.append(f"{r.step:>8}  {r.seconds:>8.1f}  {text}{mark}")
    if len(names) > len(shown):
        lines.append(f"({len(names) - len(shown)} more numbers: --csv or --json)")
    return lines
