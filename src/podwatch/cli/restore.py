"""``podwatch restore``: download and verify a checkpoint from the store. Works without a daemon, on a fresh pod."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podwatch.cli.common import Where, clean, common, find_daemon, json_option, say
from podwatch.cli.progress import Progress
from podwatch.domain.errors import Busy, HostError
from podwatch.domain.times import size

if TYPE_CHECKING:
    from podwatch.config.settings import Settings
    from podwatch.store.restore.restore import Restored, Restorer
    from podwatch.system.own_directories import Workspace


PATIENCE_SECONDS = 600.0
"""Seconds of a store outage that a restore waits for: longer than short outages."""


@click.command("restore", short_help="Download and verify a checkpoint from the store.")
@common
@click.option("--step", type=click.IntRange(min=0), help="Fetch this step instead of the newest.")
@click.option(
    "--to",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Restore below DIR instead of output_dir.",
)
@click.option(
    "--all-parts",
    "with_exports",
    is_flag=True,
    help="Also fetch the parts that no resume needs: exported weights, [sync] extra.",
)
@json_option
def command(where: Where, step: int | None, to: Path | None, with_exports: bool, as_json: bool) -> None:
    """Download a checkpoint, verify every size and hash, inspect it, and place it where the trainer looks for it. A
    damaged one is passed over for the next older one, unless --step names it."""
    from podwatch.checkpoints.trainers import make_layout
    from podwatch.cli.offline import load, require_store
    from podwatch.config.command_directory import absolute
    from podwatch.system.clock import SystemClock

    settings, to = load(where), to and absolute(to)  # the download process works in /
    require_store(settings)
    if to is None:
        _refuse_beside_a_daemon(Where(where.config, settings.run_id))
        _refuse_another_run(settings)
    alone = not make_layout(settings).steps()
    with Progress(SystemClock(), quiet=as_json) as progress:
        restorer = make_restorer(settings, progress, in_place=to is None)
        report = restorer.fetch(step, to=to, progress=progress.show, exports=with_exports)
    known = True
    if to is None:
        known = _record_run(settings, report, alone=alone)
    show(settings.run_id, report, as_json=as_json)
    if not known and not as_json:
        click.echo(
            "output_dir holds other checkpoints without a run record: podwatch does not resume from them; if they"
            " are yours: `podwatch run --adopt-existing`"
        )


def show(run_id: str, report: "Restored", *, as_json: bool) -> None:
    """Print the result of a restore."""
    document = {
        "schema_version": 1,
        "run_id": run_id,
        "step": report.step,
        "save_id": report.save_id,
        "lineage": report.lineage,
        "parts": list(report.parts),
        "total_bytes": report.total_bytes,
        "downloaded_bytes": report.downloaded_bytes,
        "set_aside": list(report.moved),
        "refused": list(report.refused),
        "doubt": report.doubt,
        "optional": list(report.exports.parts),
        "left_out": list(report.exports.left_out),
        "train_command": list(report.train_command),
    }
    say(document, describe(report), as_json=as_json)


def describe(report: "Restored") -> list[str]:
    """The result as lines. The command from the store is only shown, never run (docs/security.md)."""
    import shlex

    lines = [f"restored step {report.step}: {size(report.total_bytes)}, every size and hash verified"]
    if report.downloaded_bytes < report.total_bytes:
        here = size(report.total_bytes - report.downloaded_bytes)
        lines.append(f"  {here} of it were already on this pod")
    lines += [f"  {clean(path)}" for path in report.parts]
    if report.doubt:
        lines.append(f"  DAMAGED, restored because you named it: {clean(report.doubt)}")
    lines += [f"  {clean(path)} (not needed for a resume)" for path in report.exports.parts]
    lines += [f"  not restored: {clean(reason)}" for reason in report.exports.left_out]
    lines += [f"  moved to quarantine: {clean(path)}" for path in report.moved]
    lines += [f"  skipped: {clean(reason)}" for reason in report.refused]
    if report.train_command:
        lines.append(f"  training command: {clean(shlex.join(report.train_command))}")
    return lines


def _refuse_beside_a_daemon(where: Where) -> None:
    if find_daemon(where) is not None:
        raise Busy(
            "podwatch guards this run, and its trainer possibly uses these directories",
            where=where.run,
            fix="stop podwatch first, or use --to DIR",
        )


def make_restorer(settings: "Settings", progress: Progress, *, in_place: bool) -> "Restorer":
    from podwatch.app.paths_and_run_lock import workspace_of
    from podwatch.checkpoints.inspector import INSPECTOR
    from podwatch.checkpoints.trainers import make_layout
    from podwatch.cli.offline import record_files, store_of_run
    from podwatch.store.restore.restore import OutagePatience, Restorer

    workspace = _workspace(settings) if in_place else workspace_of(settings)
    INSPECTOR.tree = workspace.tree if in_place else None
    return Restorer(
        store_of_run(settings),
        make_layout(settings),
        workspace,
        record_files(settings, workspace),
        OutagePatience(PATIENCE_SECONDS, progress.waiting),
    )


def _workspace(settings: "Settings") -> "Workspace":
    """A workspace outside output_dir if a test rename from there works, else inside."""
    from podwatch.app.paths_and_run_lock import workspace_of

    workspace = workspace_of(settings)
    workspace.check()
    try:
        workspace.tree.make(workspace.output_dir)
        return workspace.probe()
    except OSError as error:
        raise HostError(
            f"cannot write to output_dir: {error.strerror}",
            where=str(workspace.output_dir),
            fix="correct its permissions, or use --to DIR",
        ) from error


def _refuse_another_run(settings: "Settings") -> None:
    from podwatch.cli.offline import run_file

    file = run_file(settings)
    file.load(looking=True)
    file.refuse_other_run()


def _record_run(settings: "Settings", report: "Restored", *, alone: bool) -> bool:
    """On a fresh pod, begin run.json, so that ``podwatch run`` resumes from these checkpoints. True if there is one.
    Not written if there are other checkpoints without one: the operator must adopt those.
    """
    from podwatch.checkpoints.trainers import make_layout
    from podwatch.cli.offline import run_file
    from podwatch.domain.starts import StartedBy, TrainerStart
    from podwatch.recovery.start_plan import new_id
    from podwatch.system.clock import SystemClock
    from podwatch.system.files_clock import FilesClock

    file = run_file(settings)
    if (run := file.load()) is not None and (run.wandb or not report.wandb):
        return True
    if run is not None:
        file.edit_now(lambda run: replace(run, wandb=report.wandb))
        file.close()
        return True
    if alone:
        workspace = _workspace(settings)
        wall = FilesClock(workspace, make_layout(settings).watch_roots()[0], SystemClock()).now()
        begun = TrainerStart(new_id(), wall=wall, by=StartedBy.GUARD, proved=False, branch=report.lineage)
        file.edit_now(lambda run: replace(run, starts=(begun,), wandb=report.wandb))
        file.close()
    return alone
