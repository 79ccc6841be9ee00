"""``podwatch clean``: move an old run to quarantine for a fresh start."""

import asyncio
import os
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import Where, ask, clean, common, confirm, find_daemon, json_option, say
from podwatch.domain.errors import ExitCode
from podwatch.domain.finding import counted

if TYPE_CHECKING:
    from podwatch.config.settings import Settings

SHOWN = 12


@click.command("clean", short_help="Move an old run to quarantine.")
@common
@click.option("--dry-run", is_flag=True, help="Only show what clean would do.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def command(where: Where, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Move checkpoints, trackers, broadcasts and rollouts to quarantine: training then starts from the beginning.

    podwatch deletes nothing: `podwatch quarantine return N` moves everything back. It refuses while training runs.
    podwatch starts a new lineage, so the next start does not resume from checkpoints in the store. They stay there
    until newer ones replace them ([sync] keep_last, six hours); `podwatch checkpoints pin N` keeps one.
    """
    from podwatch.cli.offline import load

    plan = _plan(load(where))
    if dry_run:
        say(plan, _describe(plan), as_json=as_json)
        raise click.exceptions.Exit(int(ExitCode.TRY_AGAIN if plan["running"] else ExitCode.OK))
    if not plan["running"] and not yes:  # else the refusal comes from where it is decided
        confirm("Move all of this to quarantine?", _describe(plan))
    if find_daemon(where) is not None:
        answer = ask(where, "clean", purpose="move the old run to quarantine", timeout=600.0)
    else:
        answer = asyncio.run(_alone(where))
    say(answer, as_json=as_json)


def _plan(settings: "Settings") -> dict[str, Any]:
    """The paths and checkpoints to move. Changes nothing."""
    from podwatch.checkpoints.trainers import make_layout
    from podwatch.cli.offline import look, training_here

    paths = make_layout(settings).ahead_of(None)
    steps = {str(s.step): str(s.completeness) for s in look(settings).sets}
    return {
        "schema_version": 1,
        "running": training_here(settings).possible,
        "paths": [str(path) for path in paths],
        "steps": steps,
    }


def _describe(plan: dict[str, Any]) -> list[str]:
    if not plan["paths"]:
        lines = ["nothing to do: no files of an old run found"]
    else:
        steps = ", ".join(f"{n} ({state})" for n, state in plan["steps"].items()) or "none"
        entries = counted(len(plan["paths"]), "entry", "entries")
        lines = [f"to quarantine: {entries} (moved, not deleted); checkpoints: {steps}"]
        lines += [f"  {clean(path)}" for path in plan["paths"][:SHOWN]]
        if len(plan["paths"]) > SHOWN:
            lines.append(f"  ... and {len(plan['paths']) - SHOWN} more (--json lists all)")
    if plan["running"]:
        lines.append(f"not possible now: {clean(plan['running'])}")
    return lines


async def _alone(where: Where) -> dict[str, Any]:
    """Clean without a daemon, under its lock and with its code."""
    from podwatch.app.build import Foundation, StartOptions, build
    from podwatch.app.commands import cleaned_document
    from podwatch.app.event_bus import EventBus
    from podwatch.app.paths_and_run_lock import run_paths
    from podwatch.cli.offline import load
    from podwatch.journal import AsyncJournal, Journal
    from podwatch.recovery.clean import clean_alone
    from podwatch.system.clock import SystemClock
    from podwatch.system.files import FileLock

    settings = load(where)
    paths = run_paths(settings.state_dir, settings.run_id, os.environ)
    with FileLock(paths.lock):
        clock, journal = SystemClock(), AsyncJournal(Journal.open(paths.journal))
        alone = Foundation(paths, clock, journal, EventBus(journal, clock, quiet=True))
        try:
            parts = build(settings, alone, StartOptions())
            try:
                return cleaned_document(await clean_alone(parts.recovery), daemon=False)
            finally:
                await parts.training.launcher.close()
        finally:
            await alone.close()
