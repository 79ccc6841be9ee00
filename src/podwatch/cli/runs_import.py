"""``podwatch runs import``: copy backups of another tool into podwatch's format."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import Where, clean, common, json_option, print_json
from podwatch.cli.offline import checked_run_id, guarded_here, store_and_prefix
from podwatch.client.format import size
from podwatch.domain.errors import ExitCode, IntegrityError, UsageError

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
    from podwatch.policy.store_archive import sign_of_life
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
    from podwatch.domain.manifest import check_relative_path, valid_run_id

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
