"""``podwatch runs import``: take in what an earlier tool backed up."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import Where, clean, common, json_option, print_json
from podwatch.cli.runs_common import checked_run_id, guarded_here, open_store
from podwatch.client.times import size
from podwatch.domain.errors import ExitCode, IntegrityError, UsageError

if TYPE_CHECKING:
    from podwatch.config.settings import Settings
    from podwatch.stores.base import ObjectStore
    from podwatch.sync.importing import Backup
    from podwatch.sync.importing_skeleton import Fit


@click.command("import", short_help="Take in backups that another tool left under <run>/step_N/.")
@common
@click.argument("source", metavar="RUN|PREFIX")
@click.option("--as", "target", metavar="RUN", default="", help="Under this run id (default: that of the backups).")
@click.option("--step", "steps", type=click.IntRange(min=0), multiple=True, help="Only this step (repeatable).")
@click.option("--layout", "layout", metavar="NAME", default="", help="The trainer's layout, if not the configured one.")
@click.option(
    "--ignore-times", is_flag=True, help="The backups' file times are those of the copying: do not go by them."
)
@click.option("--dry-run", is_flag=True, help="Only judge which are whole.")
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
    """Check each step of an earlier tool by its layout's own rule, copy the whole ones (inside B2, without a download)
    under podwatch's names, and let latest.json name the newest if the run has nothing of podwatch's yet. The old
    objects stay as they are. PREFIX is an object-name prefix in which the step_N/ lie."""
    import socket
    import time

    from podwatch.cli.offline import load
    from podwatch.domain.remote import Keys
    from podwatch.judgement.archive import sign_of_life
    from podwatch.stores.base import store_time
    from podwatch.sync.archiving import signs
    from podwatch.sync.importing import Importer, find_backups

    settings = load(where)
    with open_store(settings) as (store, prefix):
        place, run = _source(source, target, prefix)
        keys = Keys(run, prefix)
        backups = [b for b in find_backups(store, place, ignore_times=ignore_times) if not steps or b.step in steps]
        missing = set(steps) - {b.step for b in backups}
        if not backups or missing:
            what = f"no backup of step {min(missing)}" if missing else "no step_N/ with objects of another tool"
            raise IntegrityError(what, where=f"{store.url}/{place}/", fix="podwatch runs list shows what there is")
        importer = Importer(
            store,
            keys,
            source=place,
            part_size=settings.sync.part_size,
            wall=time.time,
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
                    _say(as_json or there, f"step {backup.step}: whole, {size(found.total_bytes)}: being copied ...")
                    importer.take_in(found)
                    newest = found
                answer |= {
                    "taken_in": not dry_run,
                    "reason": "was taken in before" if there else "",
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
            what = f"latest.json names step {newest.step} now" if placing.moves else "latest.json stays"
            _say(as_json, f"{what}: {placing.reason}")
    if as_json:
        print_json({"schema_version": 1, "run_id": run, "dry_run": dry_run, "pointer": pointed, "backups": answers})
    if not any(found for _, found, _ in judged):
        raise click.exceptions.Exit(int(ExitCode.FAILED))


def _judge(
    settings: "Settings", store: "ObjectStore", backups: "list[Backup]", layout: str, run: str
) -> "list[tuple[Backup, Fit | None, str]]":
    from dataclasses import replace

    from podwatch.checkpoints.layouts import KINDS, Layout, make_layout, site_of
    from podwatch.sync.importing import judge
    from podwatch.sync.importing_skeleton import Unfit

    site = replace(site_of(settings), checkpoint_dir=None)
    if run != settings.run_id:
        site = replace(site, command=())  # the configured command says nothing of another run
    name = layout or (make_layout(settings).name if settings.trainer.layout == "auto" else settings.trainer.layout)
    if name not in KINDS:
        raise UsageError(f"layout {name!r} is not known", where="--layout", fix=f"choose one of {', '.join(KINDS)}")
    if name == "custom" and site.custom is None:
        raise UsageError("a custom layout needs its section", where="--layout", fix="add [checkpoints.custom]")

    def make(output: Path) -> Layout:
        return KINDS[name].make(replace(site, output_dir=output))

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
    others = f"; {answer['others']} objects of it are no part of a checkpoint" if answer["others"] else ""
    if answer["reason"]:
        return f"{head}: {answer['reason']}{others}"
    return f"{head}: {'whole, would be taken in' if dry_run else 'taken in, every object verified'}{others}"


def _source(source: str, target: str, prefix: str) -> tuple[str, str]:
    """(object-name prefix of the step_N/, run id they go to)."""
    from podwatch.domain.remote import check_relative_path, valid_run_id

    place = source.strip("/")
    if valid_run_id(source):
        return (f"{prefix}/{source}" if prefix else source), checked_run_id(target or source)
    try:
        check_relative_path(place)
    except IntegrityError:
        raise UsageError("not a run id and not a prefix of object names", where=repr(source)[:120]) from None
    return place, checked_run_id(target or place.rpartition("/")[2])


def _say(quiet: bool, line: str) -> None:
    if not quiet:
        click.echo(line)
