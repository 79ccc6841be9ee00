"""``podwatch restore``: bring a checkpoint back from the store, verified. Works without a daemon, on a fresh pod."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podwatch.cli.common import Where, clean, common, find_daemon, json_option, print_json
from podwatch.cli.restoring import Showing
from podwatch.client.times import size
from podwatch.domain.errors import Busy, ConfigurationError, HostError

if TYPE_CHECKING:
    from podwatch.config.settings import Settings
    from podwatch.journal.journal import Journal
    from podwatch.sync.restore import Restorer, RestoreReport
    from podwatch.system.workspace import Workspace

PATIENCE_SECONDS = 600.0
"""A person who asked for a restore would rather wait through an outage of some minutes than begin it again."""


@click.command("restore", short_help="Fetch a checkpoint from the store, verified.")
@common
@click.option("--step", type=click.IntRange(min=0), help="This step instead of the newest.")
@click.option(
    "--to", metavar="DIR", type=click.Path(file_okay=False, path_type=Path), help="Put it below DIR, not in place."
)
@click.option("--all-parts", is_flag=True, help="Also what no resume needs: exported weights, [sync] extra.")
@json_option
def command(where: Where, step: int | None, to: Path | None, all_parts: bool, as_json: bool) -> None:
    """Fetch a checkpoint, check every size and hash, and put it where the trainer looks for it."""
    from podwatch.checkpoints.layouts import make_layout
    from podwatch.cli.offline import journal_path, load, require_store
    from podwatch.journal.journal import Journal

    settings = load(where)
    require_store(settings)
    if to is None:
        _refuse_beside_a_daemon(Where(where.config, settings.run_id))
        _refuse_another_run(settings)
    alone = not make_layout(settings).steps()
    journal = Journal.open(journal_path(settings))
    try:
        with Showing(quiet=as_json) as showing:
            restorer = _restorer(settings, journal, showing, in_place=to is None)
            report = restorer.fetch(step, to=to, progress=showing.told, all_parts=all_parts)
    finally:
        journal.close()
    known = True
    if to is None:
        known = _record_run(settings, report.lineage, alone=alone)
    if as_json:
        print_json(
            {
                "schema_version": 1,
                "step": report.step,
                "save_id": report.save_id,
                "lineage": report.lineage,
                "parts": list(report.parts),
                "total_bytes": report.total_bytes,
                "downloaded_bytes": report.downloaded_bytes,
                "set_aside": list(report.set_aside),
                "refused": list(report.refused),
                "optional": list(report.optional.parts),
                "left_out": list(report.optional.left_out),
                "train_command": list(report.train_command),
            }
        )
    else:
        click.echo("\n".join(describe(report)))
        if not known:
            click.echo(
                "other checkpoints lie there without a record: `podwatch run --adopt-existing` if they are yours"
            )


def describe(report: "RestoreReport") -> list[str]:
    """What was done. The command from the store is shown, never run (docs/security.md)."""
    import shlex

    lines = [f"restored step {report.step}: {size(report.total_bytes)}, every size and hash checked"]
    if report.downloaded_bytes < report.total_bytes:
        here = size(report.total_bytes - report.downloaded_bytes)
        lines.append(f"  {here} of it were here already")
    lines += [f"  {clean(path)}" for path in report.parts]
    lines += [f"  {clean(path)} (not needed for a resume)" for path in report.optional.parts]
    lines += [f"  left out: {clean(reason)}" for reason in report.optional.left_out]
    lines += [f"  set aside: {clean(path)}" for path in report.set_aside]
    lines += [f"  passed over: {clean(reason)}" for reason in report.refused]
    if report.train_command:
        lines.append(f"  it was trained with: {clean(shlex.join(report.train_command))}")
    return lines


def _refuse_beside_a_daemon(where: Where) -> None:
    if find_daemon(where) is not None:
        raise Busy(
            "podwatch guards this run, and its trainer may be using these directories",
            where=where.run,
            fix="stop podwatch first, or use --to DIR",
        )


def _restorer(settings: "Settings", journal: "Journal", showing: "Showing", *, in_place: bool) -> "Restorer":
    from podwatch.checkpoints.layouts import make_layout
    from podwatch.cli.offline import credentials, open_configured_store
    from podwatch.stores.base import ObjectStore
    from podwatch.sync.fetch_process import FetchProcess
    from podwatch.sync.job import keys_for
    from podwatch.sync.restore import FetchPace, Restorer
    from podwatch.system.run_tree import run_tree
    from podwatch.system.workspace import Workspace

    def open_one() -> ObjectStore:
        return open_configured_store(settings)

    return Restorer(
        open_one,
        keys_for(settings.sync.store, settings.run_id),
        make_layout(settings),
        _workspace(settings) if in_place else Workspace(settings.trainer.output_dir),
        journal,
        tree=run_tree(settings.trainer),
        store_url=settings.sync.store,
        writer_id="by-hand",
        fetcher=FetchProcess(lambda: credentials(settings)),
        pace=FetchPace(settings.sync.connections, settings.sync.connections_max, float(settings.sync.max_rate or 0)),
        roots=tuple(p for p in (settings.trainer.checkpoint_dir,) if p is not None),
        user=settings.trainer.user,
        patience=PATIENCE_SECONDS,
        waiting=showing.waiting,
    )


def _workspace(settings: "Settings") -> "Workspace":
    """Outside output_dir where a rename from there works, else inside; tried, not guessed (DESIGN section 6)."""
    from podwatch.system.files import can_rename
    from podwatch.system.workspace import Workspace

    output_dir = settings.trainer.output_dir
    workspace = Workspace(output_dir)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        workspace.outside.mkdir(parents=True, exist_ok=True)
        return Workspace(output_dir, use_inside=not can_rename(workspace.outside, output_dir))
    except OSError as error:
        raise HostError(
            f"output_dir cannot be written: {error.strerror}",
            where=str(output_dir),
            fix="correct its rights, or use --to",
        ) from error


def _refuse_another_run(settings: "Settings") -> None:
    from podwatch.journal import load_run_record
    from podwatch.system.workspace import Workspace

    path = Workspace(settings.trainer.output_dir).record
    record = load_run_record(path)
    if record is not None and record.run_id != settings.run_id:
        raise ConfigurationError(
            f"output_dir belongs to run {record.run_id!r}, not to {settings.run_id!r}",
            where=str(path),
            fix="correct run_id or output_dir, or use --to DIR",
        )


def _record_run(settings: "Settings", lineage: str, *, alone: bool) -> bool:
    """On a fresh pod, say whose these checkpoints are, so that ``podwatch run`` resumes from them.

    Not when other checkpoints lay there without a record: those are nobody's, and adopting them is for a person.
    """
    from podwatch.domain.run import Lineage, RunRecord
    from podwatch.journal import load_run_record, save_run_record
    from podwatch.system.workspace import Workspace

    path = Workspace(settings.trainer.output_dir).record
    if load_run_record(path) is not None:
        return True
    if alone:
        save_run_record(path, RunRecord(settings.run_id, Lineage(lineage), first_seen_wall=time.time()))
    return alone
