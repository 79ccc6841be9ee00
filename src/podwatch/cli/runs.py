"""``podwatch runs``: every run in the store, past ones and what an earlier tool backed up. Works without a daemon."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import Where, clean, common, json_option, print_json
from podwatch.cli.runs_archive import archive
from podwatch.cli.runs_common import checked_run_id, open_store, store_url
from podwatch.cli.runs_import import import_command
from podwatch.client.times import ago, rfc3339, size

if TYPE_CHECKING:
    from podwatch.sync.archiving_list import RemoteRun


@click.group("runs", short_help="All runs in the store: list, archive, restore, import old backups.")
def command() -> None:
    """Runs in the store, this one and others below the same prefix."""


command.add_command(archive)
command.add_command(import_command)


@command.command("list", short_help="Every run in the store, and backups that another tool made.")
@common
@json_option
def list_command(where: Where, as_json: bool) -> None:
    """Every run below the store's prefix: newest step, saves, bytes, sign of life. One listing (a class C call per
    1,000 objects) and two or three small reads per run."""
    import time

    from podwatch.cli.offline import load
    from podwatch.sync.archiving_list import list_runs

    settings = load(where)
    now = time.time()
    with open_store(settings) as (store, prefix):
        runs, remark = list_runs(store, prefix, settings.run_id, now)
    if as_json:
        document = {"schema_version": 1, "store_url": settings.sync.store, "remark": remark}
        print_json(document | {"runs": [_run_document(r) for r in runs]})
        return
    if not runs:
        click.echo(f"no runs in {settings.sync.store}")
    for line in _table(runs, now):
        click.echo(line)
    if remark:
        click.echo(clean(remark), err=True)


def _table(runs: "tuple[RemoteRun, ...]", now: float) -> list[str]:
    if not runs:
        return []
    width = min(36, max(3, *(len(r.run_id) for r in runs)))
    lines = [f"{'RUN':<{width}}  {'STEP':>8} {'SAVES':>5} {'SIZE':>8}  LAST SIGN OF LIFE"]
    for run in runs:
        if run.ours:
            step = "-" if run.newest_step is None else str(run.newest_step)
            lines.append(
                f"{clean(run.run_id):<{width}}  {step:>8} {len(run.sets):>5} {size(run.size_bytes):>8}"
                f"  {_life(run, now)}"
            )
        if run.earlier.steps:
            steps = run.earlier.steps
            lines.append(
                f"{clean(run.run_id):<{width}}  {max(steps):>8} {len(steps):>5} {size(sum(steps.values())):>8}"
                "  another tool's backups"
            )
        if run.problem:
            lines.append(f"  latest.json cannot be used: {clean(run.problem)}")
    names = [r.run_id for r in runs if r.earlier.steps]
    if names:
        lines.append(f"`podwatch runs import {clean(names[0])}` takes such backups in; they stay as they are")
    return lines


def _life(run: "RemoteRun", now: float) -> str:
    if run.archived_wall is not None:
        return f"archived {ago(now - run.archived_wall)}"
    if run.heartbeat_wall is None:
        return "none" if run.alive is None else f"claimed {ago(run.alive)}"
    return f"{ago(max(0.0, now - run.heartbeat_wall))}{f', {clean(run.state)}' if run.state else ''}"


def _run_document(run: "RemoteRun") -> dict[str, Any]:
    earlier = run.earlier
    return {
        "run_id": run.run_id,
        "ours": run.ours,
        "newest_step": run.newest_step,
        "saves": len(run.sets),
        "size_bytes": run.size_bytes,
        "heartbeat_at": rfc3339(run.heartbeat_wall),
        "state": run.state,
        "alive": run.alive is not None,
        "archived": run.archived_wall is not None,
        "archived_at": rfc3339(run.archived_wall),
        "problem": run.problem,
        "earlier_backups": None
        if not earlier.steps
        else {
            "steps": sorted(earlier.steps),
            "newest_step": max(earlier.steps),
            "size_bytes": sum(earlier.steps.values()),
            "latest_json": earlier.latest,
        },
    }


@command.command("restore", short_help="Fetch a save of any run into a directory, verified.")
@common
@click.argument("run_id", metavar="RUN")
@click.option("--step", type=click.IntRange(min=0), help="This step instead of the newest.")
@click.option("--to", metavar="DIR", required=True, type=click.Path(file_okay=False, path_type=Path), help="Where to.")
@json_option
def restore(where: Where, run_id: str, step: int | None, to: Path, as_json: bool) -> None:
    """Fetch a save of RUN below DIR, every size and hash checked. `podwatch restore` brings this pod's own run back to
    where its trainer looks for it."""
    import tempfile

    from podwatch.cli.offline import load
    from podwatch.cli.restore import _restorer
    from podwatch.cli.restoring import Showing
    from podwatch.journal.journal import Journal

    settings, name, to = load(where), checked_run_id(run_id), to.absolute()  # the process that fetches works in /
    store_url(settings)
    with tempfile.TemporaryDirectory(prefix="podwatch-restore-") as scratch:
        # A journal for this once: of another run this pod has none, and what lies below DIR speaks for itself.
        journal = Journal.open(Path(scratch) / "journal.sqlite")
        try:
            of_run = settings.model_copy(update={"run_id": name})
            with Showing(quiet=as_json) as showing:
                report = _restorer(of_run, journal, showing, in_place=False).fetch(step, to=to, progress=showing.told)
        finally:
            journal.close()
    if as_json:
        print_json(
            {
                "schema_version": 1,
                "run_id": name,
                "step": report.step,
                "save_id": report.save_id,
                "parts": list(report.parts),
                "total_bytes": report.total_bytes,
                "downloaded_bytes": report.downloaded_bytes,
                "refused": list(report.refused),
            }
        )
        return
    click.echo(f"restored step {report.step} of {name}: {size(report.total_bytes)}, every size and hash checked")
    for path in report.parts:
        click.echo(f"  {clean(path)}")
    for reason in report.refused:
        click.echo(f"  passed over: {clean(reason)}")
