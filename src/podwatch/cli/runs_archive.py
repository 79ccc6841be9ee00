"""``podwatch runs archive``: keep only the newest checkpoint of a finished run in the store."""

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import Where, clean, common, json_option, print_json
from podwatch.cli.runs_common import checked_run_id, open_store, state_here
from podwatch.client.format import rfc3339, size
from podwatch.domain.errors import ExitCode, PermissionDenied, UsageError

if TYPE_CHECKING:
    from podwatch.sync.runs.archive import ArchivePlan


@click.command("archive", short_help="Keep only the newest checkpoint of a finished run.")
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
    from podwatch.policy.store_archive import Keep
    from podwatch.sync.runs.archive import FINISHED, Archiver

    settings, keys_run = load(where), checked_run_id(run_id)
    with state_here(settings, keys_run) as here, open_store(settings) as (store, prefix):
        archiver = Archiver(store, Keys(keys_run, prefix), time.time, host=socket.gethostname(), forget=here.forget)
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
        lines.append(f"step {save.step:<8} {size(save.size_bytes):>8}  {what}")
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
                "size_bytes": d.save.size_bytes,
                "stays": d.stays,
                "reason": d.reason,
                "may_go_at": rfc3339(d.until),
            }
            for d in plan.decisions
        ],
    }
