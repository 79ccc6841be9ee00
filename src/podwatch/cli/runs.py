"""``podwatch runs``: all runs in the store. Works without a daemon."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import SuggestingGroup, Where, clean, columns, common, confirm, json_option, print_json, say
from podwatch.cli.offline import checked_run_id, fixes_for, opened, pins_here, require_store
from podwatch.cli.runs_check import check, store_option
from podwatch.cli.runs_show_and_diff import diff, show, summary_document
from podwatch.domain.errors import PermissionDenied
from podwatch.domain.times import ago, amount, rfc3339, size

if TYPE_CHECKING:
    from podwatch.config.settings import Settings
    from podwatch.store.runs.archive import ArchivePlan
    from podwatch.store.runs.read import RunInStore


@click.group("runs", cls=SuggestingGroup, short_help="All runs in the store: check, list, archive, restore.")
def command() -> None:
    """All runs below the store's prefix: check, list, archive, restore."""


command.add_command(check)
command.add_command(show)
command.add_command(diff)


@command.command("list", short_help="List the runs in the store.")
@common
@store_option
@json_option
def list_command(where: Where, store: str, as_json: bool) -> None:
    """List every run below the store's prefix: newest step, checkpoints, size, last heartbeat, cost. Costs one listing
    (a class C call per 1,000 objects) and two or three small reads per run."""
    from podwatch.store.runs.read import list_runs

    now = time.time()
    with opened(where, store) as (reading, prefix, own):
        runs, remark = list_runs(reading, prefix, own, now)
        url = reading.url
    document = {"schema_version": 1, "store_url": url, "remark": remark, "runs": [_run_document(r) for r in runs]}
    say(document, _table(runs, now) or [f"no runs in {clean(url)}"], as_json=as_json)
    if remark and not as_json:
        click.echo(clean(remark), err=True)


def _table(runs: "tuple[RunInStore, ...]", now: float) -> list[str]:
    if not runs:
        return []
    rows = [("RUN", "STEP", "SAVES", "SIZE", "LAST HEARTBEAT")]
    for run in runs:
        step = "-" if run.newest.step is None else str(run.newest.step)
        figures = (step, str(len(run.listing.saves)), size(run.listing.size_bytes), _life(run, now))
        rows.append((clean(run.run_id), *figures))
    head, *lines = columns(rows, right=(1, 2, 3))
    problems = [
        f"  the newest pointer is not usable: {clean(run.newest.problem)}" if run.newest.problem else "" for run in runs
    ]
    return [head, *(text for pair in zip(lines, problems, strict=True) for text in pair if text)]


def _life(run: "RunInStore", now: float) -> str:
    if run.archived_wall is not None:
        return f"archived {ago(now - run.archived_wall)}"
    if run.active.written_wall is None:
        return "none" if run.active.seconds is None else f"claimed {ago(run.active.seconds)}"
    last = run.active.said
    where = f"{last.instance.provider} {last.instance.id}" if last.instance.provider else ""
    money = run.account.money
    cost = amount(money.so_far, money.currency) if money.so_far is not None else ""
    said = (
        ago(max(0.0, now - run.active.written_wall)),
        clean(last.outcome or last.left_as),
        clean(where),
        clean(cost),
    )
    return ", ".join(text for text in said if text)


def _run_document(run: "RunInStore") -> dict[str, Any]:
    last = run.active.said
    return {
        "run_id": run.run_id,
        "newest_step": run.newest.step,
        "saves": len(run.listing.saves),
        "size_bytes": run.listing.size_bytes,
        "heartbeat_at": rfc3339(run.active.written_wall),
        "state": last.left_as,
        "outcome": last.outcome or None,
        "instance": last.instance.to_dict() if last.instance.provider else None,
        "alive": run.active.seconds is not None,
        "archived": run.archived_wall is not None,
        "archived_at": rfc3339(run.archived_wall),
        "problem": run.newest.problem,
        "record": None if run.active.beat is None else summary_document(run),
    }


def _of_store(url: str, run_id: str, to: Path) -> "Settings":
    """Settings for a restore without a configuration. The layout plays no part in one into another directory; it has to
    be one that needs no detection."""
    from podwatch.config.loading import load_settings

    given = {"run_id": run_id, "sync.store": url, "trainer.output_dir": str(to), "trainer.layout": "dcp"}
    return load_settings(None, environ=os.environ, overrides=given, search=False).settings


@command.command("restore", short_help="Download and verify a checkpoint of any run into a directory.")
@common
@click.argument("run_id", metavar="RUN")
@store_option
@click.option("--step", type=click.IntRange(min=0), help="Fetch this step instead of the newest.")
@click.option("--to", metavar="DIR", required=True, type=click.Path(file_okay=False, path_type=Path), help="Target.")
@json_option
def restore(where: Where, run_id: str, store: str, step: int | None, to: Path, as_json: bool) -> None:
    """Download a checkpoint of RUN into DIR and verify every size and hash; with --store from anywhere, with a key that
    can list and read. To restore this pod's own run to where its trainer looks for it, use `podwatch restore`."""
    from podwatch.cli.offline import load
    from podwatch.cli.progress import Progress
    from podwatch.cli.restore import make_restorer
    from podwatch.cli.restore import show as show_restored
    from podwatch.config.command_directory import absolute
    from podwatch.system.clock import SystemClock

    name, to = checked_run_id(run_id), absolute(to)  # the download process works in /
    settings = _of_store(store, name, to) if store else load(where)
    require_store(settings)
    of_run = settings.model_copy(update={"run_id": name})
    with fixes_for(store, name), Progress(SystemClock(), quiet=as_json) as progress:
        report = make_restorer(of_run, progress, in_place=False).fetch(step, to=to, progress=progress.show)
    show_restored(name, report, as_json=as_json)


# -- archive ---------------------------------------------------------------------------------------------------------


@command.command("archive", short_help="Keep only the newest checkpoint of a finished run.")
@common
@click.argument("run_id", metavar="RUN")
@click.option("--keep", type=click.Choice(["latest", "milestones"]), default="latest", help="What to keep.")
@click.option("--dry-run", is_flag=True, help="Only show which checkpoints are deleted or kept, and why.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def archive(where: Where, run_id: str, keep: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Delete all checkpoints of a finished run from the store except the newest (--keep milestones keeps those too).
    podwatch also keeps what a pointer names or named within a day, pinned checkpoints, and other tools' objects. It
    refuses while a podwatch guards the run."""
    import socket

    from podwatch.cli.offline import load
    from podwatch.store.keys import RunKeys
    from podwatch.store.runs.archive import CERTAIN, ArchiveKeep, Archiver
    from podwatch.system.clock import SystemClock

    settings, name = load(where), checked_run_id(run_id)
    with pins_here(settings, name) as pins, opened(where, "") as (store, prefix, _):
        archiver = Archiver(store, RunKeys(name, prefix), SystemClock(), socket.gethostname())
        plan = archiver.look(ArchiveKeep(keep), keep_every=settings.sync.keep_every, pins=pins)
        document = _plan_document(plan, dry_run=dry_run)
        refused = "" if dry_run or plan.is_empty else archiver.why_not_deletable()
        if not as_json:
            click.echo("\n".join(_plan_lines(plan, going="would delete" if dry_run or refused else "delete")))
        if refused:
            if as_json:
                print_json(document | {"warning": refused})
            raise PermissionDenied(
                f"nothing was deleted: {refused}",
                where=settings.sync.store,
                fix="use a key with the capability deleteFiles",
            )
        if not dry_run and not plan.is_empty and not yes:
            doubt = plan.last.left_as not in CERTAIN
            state = f"Its last heartbeat has the state {plan.last.left_as!r}. " if doubt else ""
            confirm(f"{state}Permanently delete {size(plan.freed_bytes)} from the store?")
        if not dry_run:
            archiver.carry_out(plan)
    say(document, [] if dry_run else [f"archived: deleted {size(plan.freed_bytes)} from the store"], as_json=as_json)


def _plan_lines(plan: "ArchivePlan", *, going: str) -> list[str]:
    lines = []
    for verdict in reversed(plan.retention.saves):
        word = "keep" if verdict.stays else going
        what = f"{word}: {clean(verdict.reason)}"
        if verdict.until is not None:
            until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(verdict.until))
            what = f"keep until {until}: a reader can still use it"
        lines.append(f"step {verdict.save.step:<8} {size(verdict.save.total_bytes):>8}  {what}")
    if plan.retention.unfinished:
        lines.append(f"{going}: {len(plan.retention.unfinished)} checkpoints whose upload or deletion was interrupted")
    if plan.is_empty:
        lines.append("nothing to delete")
    return lines


def _plan_document(plan: "ArchivePlan", *, dry_run: bool) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "dry_run": dry_run,
        "keep": str(plan.keep),
        "newest_step": plan.newest_step,
        "freed_bytes": plan.freed_bytes,
        "leftovers": len(plan.retention.unfinished),
        "warning": "",
        "saves": [
            {
                "step": verdict.save.step,
                "save_id": verdict.save.save_id,
                "size_bytes": verdict.save.total_bytes,
                "stays": verdict.stays,
                "reason": verdict.reason,
                "may_go_at": rfc3339(verdict.until),
            }
            for verdict in plan.retention.saves
        ],
    }
