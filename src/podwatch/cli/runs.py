"""``podwatch runs``: all runs in the store, and backups of other tools, which ``runs import`` copies into podwatch's
format. Works without a daemon."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import Where, clean, common, json_option, print_json
from podwatch.cli.offline import checked_run_id, guarded_here, require_store, state_here, store_and_prefix
from podwatch.cli.runs_check import check, fixes_for, opened, store_option, watch
from podwatch.cli.runs_copy import copy
from podwatch.cli.runs_show_and_diff import completed_table, diff, show, summary_document
from podwatch.client.times_and_sizes import ago, amount, rfc3339, size
from podwatch.domain.errors import ExitCode, IntegrityError, PermissionDenied, UsageError

if TYPE_CHECKING:
    from podwatch.config.settings import Settings
    from podwatch.stores.base import ObjectStore
    from podwatch.sync.runs.import_backups import Backup, Fit


@click.command("import", short_help="Import another tool's backups from <run>/step_N/.")
@common
@click.argument("source", metavar="RUN|PREFIX")
@click.option("--as", "target", metavar="RUN", default="", help="Target run id (default: that of the backups).")
@click.option("--step", "steps", type=click.IntRange(min=0), multiple=True, help="Only this step (repeatable).")
@click.option("--layout", "layout", metavar="NAME", default="", help="The trainer's layout, if not the configured one.")
@click.option("--ignore-times", is_flag=True, help="Ignore the file times of the backups: they are those of the copy.")
@click.option("--dry-run", is_flag=True, help="Only show which backups are complete.")
@json_option
def import_command(
    where: Where,
    source: str,
    target: str,
    steps: tuple[int, ...],
    layout: str,
    ignore_times: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Check each backup by its layout's completeness rule and copy the complete ones (inside B2, without a download)
    under podwatch's names. latest.json then names the newest, if the run has no podwatch checkpoint yet. The original
    objects are not changed. PREFIX is the object-name prefix that contains the step_N/."""
    import socket
    import time

    from podwatch.cli.offline import load
    from podwatch.domain.manifest import Keys
    from podwatch.policy.store_retention import sign_of_life
    from podwatch.stores.base import store_time
    from podwatch.sync.runs.archive import signs
    from podwatch.sync.runs.import_backups import Importer, find_backups
    from podwatch.system.clock import SystemClock

    settings = load(where)
    with store_and_prefix(settings) as (store, prefix):
        place, run = _source(source, target, prefix)
        keys = Keys(run, prefix)
        backups = [b for b in find_backups(store, place, ignore_times=ignore_times) if not steps or b.step in steps]
        missing = set(steps) - {b.step for b in backups}
        if not backups or missing:
            what = f"backup of step {min(missing)} not found" if missing else "no step_N/ with another tool's objects"
            raise IntegrityError(what, where=f"{store.url}/{place}/", fix="`podwatch runs list` shows the backups")
        importer = Importer(
            store,
            keys,
            source=place,
            part_size=settings.sync.part_size,
            clock=SystemClock(),
            host=socket.gethostname(),
            notes=settings.state_dir / "imports",
        )
        judged = _judge(settings, store, backups, layout, run)
        answers, newest = [], None
        for backup, found, reason in judged:
            answer = {"step": backup.step, "size_bytes": backup.size_bytes, "taken_in": False, "reason": reason}
            if found is not None:
                there = importer.there(found)
                if not dry_run:
                    _say(as_json or there, f"step {backup.step}: complete, copying {size(found.total_bytes)} ...")
                    importer.take_in(found)
                    newest = found
                answer |= {
                    "taken_in": not dry_run,
                    "reason": "already imported" if there else "",
                    "others": found.others,
                }
                answer |= {"save_id": found.save_id, "layout": found.layout}
            answers.append(answer)
            _say(as_json, _import_line(answer, dry_run=dry_run))
        pointed = ""
        if newest is not None:
            walls = list(signs(store, keys))
            alive = sign_of_life(walls, store_time(store, time.time())) is not None or guarded_here(settings, run)
            placing = importer.point(newest, alive=alive)
            pointed = placing.reason
            what = f"latest.json now names step {newest.step}" if placing.moves else "latest.json is unchanged"
            _say(as_json, f"{what}: {placing.reason}")
    if as_json:
        print_json({"schema_version": 1, "run_id": run, "dry_run": dry_run, "pointer": pointed, "backups": answers})
    if not any(found for _, found, _ in judged):
        raise click.exceptions.Exit(int(ExitCode.FAILED))


def _judge(
    settings: "Settings", store: "ObjectStore", backups: "list[Backup]", layout: str, run: str
) -> "list[tuple[Backup, Fit | None, str]]":
    from dataclasses import replace

    from podwatch.checkpoints.layouts import KINDS, Layout, kind_of, make_layout, site_of
    from podwatch.config import plugins
    from podwatch.sync.runs.import_backups import Unfit, judge

    site = replace(site_of(settings), checkpoint_dir=None)
    if run != settings.run_id:
        site = replace(site, command=())  # the configured command belongs to another run
    name = layout or (make_layout(settings).name if settings.trainer.layout == "auto" else settings.trainer.layout)
    if name not in KINDS and name not in plugins.names(plugins.LAYOUTS):
        raise UsageError(f"unknown layout {name!r}", where="--layout", fix=f"choose one of {', '.join(KINDS)}")
    if name == "custom" and site.custom is None:
        raise UsageError("layout custom needs its section", where="--layout", fix="add [checkpoints.custom]")

    kind = kind_of(name)

    def make(output: Path) -> Layout:
        return kind.make(replace(site, output_dir=output))

    judged: list[tuple[Backup, Fit | None, str]] = []
    for backup in backups:
        try:
            judged.append((backup, judge(store, backup, make), ""))
        except Unfit as error:
            judged.append((backup, None, str(error)))
    return judged


def _import_line(answer: dict[str, Any], *, dry_run: bool) -> str:
    head = f"step {answer['step']}"
    if "save_id" not in answer:
        return f"{head}: REFUSED, {clean(answer['reason'])[:300]}"
    others = f"; {answer['others']} other objects are not part of the checkpoint" if answer["others"] else ""
    if answer["reason"]:
        return f"{head}: {answer['reason']}{others}"
    return f"{head}: {'complete, would be imported' if dry_run else 'imported, every object verified'}{others}"


def _source(source: str, target: str, prefix: str) -> tuple[str, str]:
    """(object-name prefix of the step_N/, target run id)."""
    from podwatch.domain.safe_names import check_relative_path, valid_run_id

    place = source.strip("/")
    if valid_run_id(source):
        return (f"{prefix}/{source}" if prefix else source), checked_run_id(target or source)
    try:
        check_relative_path(place)
    except IntegrityError:
        raise UsageError("neither a run id nor an object-name prefix", where=repr(source)[:120]) from None
    return place, checked_run_id(target or place.rpartition("/")[2])


def _say(quiet: bool, line: str) -> None:
    if not quiet:
        click.echo(line)


if TYPE_CHECKING:
    from podwatch.sync.runs.archive import ArchivePlan
    from podwatch.sync.runs.read_runs import RemoteRun


@click.group("runs", short_help="All runs in the store: check, watch, list, archive, restore, import.")
def command() -> None:
    """All runs below the store's prefix: check, watch, list, archive, restore, import."""


command.add_command(import_command)
command.add_command(check)
command.add_command(watch)
command.add_command(copy)
command.add_command(show)
command.add_command(diff)


@command.command("list", short_help="List the runs in the store, and backups of other tools.")
@common
@store_option
@click.option("--completed", is_flag=True, help="Only runs that ended: start, end, duration, cost, step, outcome.")
@json_option
def list_command(where: Where, store: str, completed: bool, as_json: bool) -> None:
    """List every run below the store's prefix: newest step, checkpoints, size, last heartbeat, cost. Costs one listing
    (a class C call per 1,000 objects) and two or three small reads per run."""
    import time

    from podwatch.sync.runs.read_runs import list_runs

    now = time.time()
    with opened(where, store) as (reading, prefix, own):
        runs, remark = list_runs(reading, prefix, own, now)
        url = reading.url
    remark = remark or _without_files(url, runs)
    denied = any(run.unreadable for run in runs)
    if completed:
        runs = tuple(run for run in runs if run.summary is not None and run.summary.ended)
    if as_json:
        document = {"schema_version": 1, "store_url": url, "remark": remark}
        print_json(document | {"runs": [_run_document(r) for r in runs]})
    else:
        if not runs:
            click.echo(f"no {'completed ' if completed else ''}runs in {clean(url)}")
        lines = completed_table(r.summary for r in runs if r.summary is not None) if completed else _table(runs, now)
        for line in lines:
            click.echo(line)
        if remark:
            click.echo(clean(remark), err=True)
    if denied:
        raise click.exceptions.Exit(int(ExitCode.FAILED))


def _without_files(url: str, runs: "tuple[RemoteRun, ...]") -> str:
    """A remark about the runs of a directory store of which only empty directories are there: an interrupted copy."""
    from podwatch.domain.safe_names import valid_run_id

    if not url.startswith("file://"):
        return ""
    known = {run.run_id for run in runs}
    names = sorted(path.parent.name for path in Path(url.removeprefix("file://")).glob("*/podwatch"))
    empty = [name for name in names if valid_run_id(name) and name not in known]
    return f"without any file: {', '.join(empty[:10])} (empty directories; copy them again)" if empty else ""


def _table(runs: "tuple[RemoteRun, ...]", now: float) -> list[str]:
    if not runs:
        return []
    width = min(36, max(3, *(len(r.run_id) for r in runs)))
    lines = [f"{'RUN':<{width}}  {'STEP':>8} {'SAVES':>5} {'SIZE':>8}  LAST HEARTBEAT"]
    for run in runs:
        if run.ours or run.unreadable:
            step = "-" if run.newest_step is None else str(run.newest_step)
            lines.append(
                f"{clean(run.run_id):<{width}}  {step:>8} {len(run.sets):>5} {size(run.size_bytes):>8}"
                f"  {_life(run, now)}"
            )
        if run.earlier.steps:
            steps = run.earlier.steps
            lines.append(
                f"{clean(run.run_id):<{width}}  {max(steps):>8} {len(steps):>5} {size(sum(steps.values())):>8}"
                "  backups of another tool"
            )
        if run.problem:
            lines.append(f"  latest.json is not usable: {clean(run.problem)}")
        if run.unreadable:
            lines.append(f"  {clean(run.unreadable)}")
    names = [r.run_id for r in runs if r.earlier.steps]
    if names:
        lines.append(f"to copy such backups into podwatch's format: `podwatch runs import {clean(names[0])}`")
    return lines


def _life(run: "RemoteRun", now: float) -> str:
    if run.archived_wall is not None:
        return f"archived {ago(now - run.archived_wall)}"
    if run.heartbeat_wall is None:
        return "none" if run.alive is None else f"claimed {ago(run.alive)}"
    last = run.last
    where = f"{last.instance.provider} {last.instance.id}" if last.instance.provider else ""
    spent = run.summary
    cost = amount(spent.cost, spent.currency) if spent is not None and spent.cost is not None else ""
    said = (ago(max(0.0, now - run.heartbeat_wall)), clean(last.outcome or last.state), clean(where), clean(cost))
    return ", ".join(text for text in said if text)


def _run_document(run: "RemoteRun") -> dict[str, Any]:
    earlier = run.earlier
    return {
        "run_id": run.run_id,
        "ours": run.ours,
        "newest_step": run.newest_step,
        "saves": len(run.sets),
        "size_bytes": run.size_bytes,
        "heartbeat_at": rfc3339(run.heartbeat_wall),
        "state": run.last.state,
        "outcome": run.last.outcome or None,
        "instance": run.last.instance.to_dict() if run.last.instance.provider else None,
        "alive": run.alive is not None,
        "archived": run.archived_wall is not None,
        "archived_at": rfc3339(run.archived_wall),
        "problem": run.problem or run.unreadable,
        "record": None if run.summary is None else summary_document(run.summary),
        "earlier_backups": None
        if not earlier.steps
        else {
            "steps": sorted(earlier.steps),
            "newest_step": max(earlier.steps),
            "size_bytes": sum(earlier.steps.values()),
            "latest_json": earlier.latest,
        },
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
    import tempfile

    from podwatch.cli.offline import load
    from podwatch.cli.restore import Showing, make_restorer
    from podwatch.config.command_directory import absolute
    from podwatch.journal.journal import Journal
    from podwatch.system.clock import SystemClock

    name, to = checked_run_id(run_id), absolute(to)  # the download process works in /
    settings = _of_store(store, name, to) if store else load(where)
    require_store(settings)
    with tempfile.TemporaryDirectory(prefix="podwatch-restore-") as scratch:
        # A temporary journal: this pod has none of another run.
        journal = Journal.open(Path(scratch) / "journal.sqlite")
        try:
            of_run = settings.model_copy(update={"run_id": name})
            with fixes_for(store, name), Showing(SystemClock(), quiet=as_json) as showing:
                report = make_restorer(of_run, journal, showing, in_place=False).fetch(
                    step, to=to, progress=showing.told
                )
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
    click.echo(f"restored step {report.step} of {name}: {size(report.total_bytes)}, every size and hash verified")
    for path in report.parts:
        click.echo(f"  {clean(path)}")
    for reason in report.refused:
        click.echo(f"  skipped: {clean(reason)}")


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
    podwatch also keeps the checkpoint that latest.json names, checkpoints pinned here, and other tools' objects. It
    refuses while a podwatch guards the run."""

    import socket

    from podwatch.cli.offline import load
    from podwatch.domain.manifest import Keys
    from podwatch.policy.store_retention import Keep
    from podwatch.sync.runs.archive import FINISHED, Archiver
    from podwatch.system.clock import SystemClock

    settings, keys_run = load(where), checked_run_id(run_id)
    with state_here(settings, keys_run) as here, store_and_prefix(settings) as (store, prefix):
        keys, host = Keys(keys_run, prefix), socket.gethostname()
        archiver = Archiver(store, keys, SystemClock(), host=host, forget=here.forget)
        plan = archiver.look(Keep(keep), keep_every=settings.sync.keep_every, pins=here.pins)
        document = _plan_document(plan, dry_run=dry_run)
        refused = "" if dry_run or plan.nothing else archiver.may_delete()
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
        if not dry_run and not plan.nothing:
            if not yes:
                doubt = plan.last_word not in FINISHED
                _confirm(
                    f"Its last heartbeat has the state {plan.last_word!r}. " if doubt else "", size(plan.freed_bytes)
                )
            archiver.carry_out(plan)
    if as_json:
        print_json(document)
    elif not dry_run and not plan.nothing:
        click.echo(f"archived: deleted {size(plan.freed_bytes)} from the store")


def _confirm(doubt: str, freed: str) -> None:
    if not sys.stdin.isatty():
        raise UsageError(
            "this command asks for confirmation, but there is no terminal", fix="look with --dry-run, then add --yes"
        )
    if not click.confirm(f"{doubt}Permanently delete {freed} from the store?", err=True):
        raise click.exceptions.Exit(int(ExitCode.FAILED))


def _plan_lines(plan: "ArchivePlan", *, going: str) -> list[str]:
    lines = []
    for decision in reversed(plan.decisions):
        save = decision.save
        word = "keep" if decision.stays else going
        what = f"{word}: {clean(decision.reason)}"
        if decision.until is not None:
            until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(decision.until))
            what = f"keep until {until}: a reader can still use it for a day"
        lines.append(f"step {save.step:<8} {size(save.total_bytes):>8}  {what}")
    if plan.leftovers:
        lines.append(f"{going}: objects of {len(plan.leftovers)} checkpoints whose deletion was interrupted")
    if plan.uploads:
        lines.append(f"{going}: {len(plan.uploads)} unfinished uploads")
    if plan.nothing:
        lines.append("nothing to delete")
    return lines


def _plan_document(plan: "ArchivePlan", *, dry_run: bool) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "dry_run": dry_run,
        "keep": str(plan.keep),
        "newest_step": plan.pointer.step,
        "freed_bytes": plan.freed_bytes,
        "leftovers": len(plan.leftovers),
        "uploads": len(plan.uploads),
        "warning": "",
        "saves": [
            {
                "step": d.save.step,
                "save_id": d.save.save_id,
                "size_bytes": d.save.total_bytes,
                "stays": d.stays,
                "reason": d.reason,
                "may_go_at": rfc3339(d.until),
            }
            for d in plan.decisions
        ],
    }
