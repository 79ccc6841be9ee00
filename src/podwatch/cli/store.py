"""``podwatch store``: list, verify and sweep the content of the store. Works without a daemon."""

import sys
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import Where, clean, common, json_option, print_json
from podwatch.client.times_and_sizes import ago, size
from podwatch.domain.errors import IntegrityError

if TYPE_CHECKING:
    from podwatch.config.settings import Settings
    from podwatch.domain.stored_checkpoint import StoredSave


_PROVED = {
    "store-checked": " (by the hashes that the store checked)",
    "read-back": " (every byte read and hashed)",
    "flushed": "",
    "": " (by size only: this store keeps no hash; --deep reads every byte)",
}
"""By ``Proof``: what a sound checkpoint was verified by. Of a directory nothing more is known than what it holds."""


@click.group("store", short_help="Content of the store: list, verify, sweep.")
def command() -> None:
    """List, verify or sweep the store directly, without the daemon."""


@command.command("ls", short_help="List every checkpoint of this run in the store, newest first.")
@common
@json_option
def ls(where: Where, as_json: bool) -> None:
    """List every checkpoint of this run in the store, newest first. A * marks the one that latest.json names."""
    from podwatch.cli.offline import load

    settings = load(where)
    saves, pointer_problem, now = _inventory(settings)
    if as_json:
        print_json(
            {
                "schema_version": 1,
                "store_url": settings.sync.store,
                "pointer_problem": pointer_problem,
                "saves": [_document(s, now) for s in saves],
                "calls": _calls(),
            }
        )
        return
    if pointer_problem:
        click.echo(f"latest.json is not usable: {clean(pointer_problem)}", err=True)
    if not saves:
        click.echo(f"no checkpoints of run {settings.run_id} in {settings.sync.store}")
        _tell_calls()
        return
    for save in saves:
        mark = "*" if save.named else " "
        what = clean(save.problem) if save.problem else f"{_files(save)} files, {size(save.total_bytes)}"
        what += ", and optional parts" if save.optional else ""
        click.echo(f"{mark} step {save.step:<8} {save.save_id:<18} {what}, {ago(_age(save, now))}")
    if any(s.named for s in saves):
        click.echo("* named by latest.json")
    _tell_calls()


@command.command("verify", short_help="Verify each checkpoint by its manifest and objects.")
@common
@click.option("--step", type=click.IntRange(min=0), help="Only this step.")
@click.option("--deep", is_flag=True, help="Download every byte and compare the hashes (costs as much as a restore).")
@json_option
def verify(where: Where, step: int | None, deep: bool, as_json: bool) -> None:
    """Verify each checkpoint: its manifest, and every object by id, size, writer tag and what else the store proves;
    with --deep every hash, by reading every byte. Objects without the writer tag (a copy that another tool made) are
    always read."""
    from podwatch.cli.offline import load
    from podwatch.sync.upload.child_job import keys_for
    from podwatch.sync.verify_stored import examine_save, verify_optional

    settings = load(where)
    saves, pointer_problem, _ = _inventory(settings)
    chosen = [s for s in saves if step in (None, s.step)]
    if not chosen:
        raise IntegrityError(
            "nothing to verify" if step is None else f"step {step} is not in the store",
            where=settings.sync.store,
            fix="`podwatch store ls` lists the checkpoints",
        )
    answers = []
    store = _open(settings)
    try:
        for save in chosen:
            found = examine_save(store, save, deep=deep)
            reasons = found.reasons
            keys = keys_for(settings.sync.store, settings.run_id)
            beside = verify_optional(store, keys, save, deep=deep) if save.optional else ()
            answers.append({"step": save.step, "save_id": save.save_id, "sound": not reasons, "reasons": list(reasons),
                            "proof": str(found.proof),
                            "optional": save.optional, "optional_reasons": list(beside)})  # fmt: skip
            if not as_json:
                word = f"sound{_PROVED[found.proof]}" if not reasons else f"DAMAGED: {clean('; '.join(reasons[:3]))}"
                word += f"; optional parts DAMAGED: {clean('; '.join(beside[:3]))}" if beside else ""
                click.echo(f"step {save.step} {save.save_id}: {word}")
    finally:
        store.close()
    if as_json:
        print_json({"schema_version": 1, "deep": deep, "pointer_problem": pointer_problem, "saves": answers,
                    "calls": _calls()})  # fmt: skip
    elif pointer_problem:
        click.echo(f"latest.json is not usable: {clean(pointer_problem)}")
    if pointer_problem or not all(a["sound"] and not a["optional_reasons"] for a in answers):
        sys.exit(1)


@command.command("sweep", short_help="Delete useless objects; --dry-run lists them.")
@common
@click.option("--dry-run", is_flag=True, help="Only list what would be deleted.")
@json_option
def sweep(where: Where, dry_run: bool, as_json: bool) -> None:
    """Delete useless objects older than a day: unfinished uploads, superseded versions, and checkpoints without a
    manifest. Deletes only objects with podwatch's writer tag."""
    from podwatch.cli.offline import journal_path, load, look
    from podwatch.domain.manifest import Keys
    from podwatch.journal.journal import Journal
    from podwatch.stores.open_store import parse_store_url
    from podwatch.sync.store_removal import Sweeper
    from podwatch.system.clock import SystemClock

    settings = load(where)
    journal = Journal.open(journal_path(settings))
    store = _open(settings)
    try:
        keys = Keys(settings.run_id, parse_store_url(settings.sync.store).prefix)
        sweeper = Sweeper(store, keys, journal, SystemClock())
        live = [(s.step, s.save_id) for s in look(settings).sets if s.complete]
        found, warning = sweeper.look(live), ""
        if not dry_run:
            swept = sweeper.carry_out(live)
            found, warning = swept.gone, swept.warning
    finally:
        store.close()
        journal.close()
    if as_json:
        items = [{"what": i.what, "key": i.key, "reason": i.reason, "size_bytes": i.size_bytes} for i in found]
        print_json({"schema_version": 1, "dry_run": dry_run, "leftovers": items, "warning": warning,
                    "calls": _calls()})  # fmt: skip
        return
    for item in found:
        click.echo(f"{'would remove' if dry_run else 'removed'} {item.what} {clean(item.key)}: {item.reason}")
    if not found:
        click.echo("nothing to sweep")
    if warning:
        click.echo(clean(warning), err=True)
    _tell_calls()


def _calls() -> dict[str, int]:
    from podwatch.stores.base import TOTAL

    return {name.lower(): count for name, count in TOTAL.snapshot().items()}


def _tell_calls() -> None:
    """Print the number of billed calls, if the store bills calls."""
    from podwatch.stores.base import TOTAL

    if any(TOTAL.snapshot().values()):
        click.echo(TOTAL.told())


def _inventory(settings: "Settings") -> "tuple[list[StoredSave], str, float]":
    """The checkpoints, the pointer's problem, and the time by the store's clock (epoch seconds)."""
    import time

    from podwatch.domain.manifest import Keys
    from podwatch.stores.base import store_time
    from podwatch.stores.open_store import parse_store_url
    from podwatch.sync.inventory import inventory

    store = _open(settings)
    try:
        keys = Keys(settings.run_id, parse_store_url(settings.sync.store).prefix)
        return *inventory(store, keys), store_time(store, time.time())
    finally:
        store.close()


def _open(settings: "Settings") -> Any:
    from podwatch.cli.offline import open_configured_store

    return open_configured_store(settings)


def _age(save: "StoredSave", now: float) -> float:
    return max(0.0, now - save.uploaded_wall)


def _files(save: "StoredSave") -> int:
    return len(save.manifest.files) if save.manifest else 0


def _document(save: "StoredSave", now: float) -> dict[str, Any]:
    return {
        "step": save.step,
        "save_id": save.save_id,
        "named": save.named,
        "problem": save.problem,
        "total_bytes": save.total_bytes,
        "file_count": _files(save),
        "age_seconds": round(_age(save, now)),
        "lineage": save.lineage,
        "layout": save.manifest.layout if save.manifest else "",
        "optional": save.optional,
    }
