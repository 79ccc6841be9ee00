"""``podwatch store``: list and verify what the store has of a run. Works without a daemon."""

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import SuggestingGroup, Where, clean, common, json_option, say
from podwatch.cli.offline import inventory_of, load
from podwatch.domain.errors import IntegrityError
from podwatch.domain.times import ago, size

if TYPE_CHECKING:
    from podwatch.store.inventory import Inventory, Stored
    from podwatch.store.objects.base import Objects
    from podwatch.store.verify import Verified


_PROVED = {
    "store-checked": " (by the hashes that the store checked)",
    "read-back": " (every byte read and hashed)",
    "": " (by size only: this store's listings have no hashes; --deep reads every byte)",
}
"""By ``Proof``: what a sound checkpoint was verified by."""


@click.group("store", cls=SuggestingGroup, short_help="Content of the store: list, verify.")
def command() -> None:
    """List or verify the store directly, without the daemon."""


@command.command("ls", short_help="List every checkpoint of this run in the store, newest first.")
@common
@json_option
def ls(where: Where, as_json: bool) -> None:
    """List every checkpoint of this run in the store, newest first. A * marks the one that the newest pointer names."""
    with inventory_of(load(where)) as (store, place, inventory):
        calls, now = _calls(store), time.time() - (store.skew or 0.0)
    saves = list(reversed(inventory.saves))
    document = {
        "schema_version": 1,
        "store_url": place.url,
        "pointer_problem": _problem(inventory),
        "saves": [_document(save, inventory, now) for save in saves],
        "unfinished": len(inventory.unfinished),
        "foreign": inventory.foreign,
        "calls": calls,
    }
    for problem in inventory.problems if not as_json else ():
        click.echo(f"cannot be used: {clean(problem)}", err=True)
    lines = [_listed(save, inventory, now) for save in saves]
    lines = lines or [f"no checkpoints of run {place.keys.run_id} in {place.url}"]
    lines += ["* named by the newest pointer"] if inventory.newest is not None else []
    say(document, [*lines, *_billed(calls)], as_json=as_json)


def _listed(save: "Stored", inventory: "Inventory", now: float) -> str:
    mark = "*" if _is_named(save, inventory) else " "
    what = clean(save.problem) if save.problem else f"{save.files} files, {size(save.total_bytes)}"
    what += ", pinned" if save.pinned else ""
    what += ", and exported weights" if save.exports else ""
    return f"{mark} step {save.step:<8} {save.save_id:<18} {what}, {ago(max(0.0, now - save.wall))}"


def _is_named(save: "Stored", inventory: "Inventory") -> bool:
    """By the newest pointer."""
    return inventory.newest is not None and save.key == inventory.newest.key


@command.command("verify", short_help="Verify each checkpoint by its manifest and objects.")
@common
@click.option("--step", type=click.IntRange(min=0), help="Only this step.")
@click.option("--deep", is_flag=True, help="Download every byte and compare the hashes (costs as much as a restore).")
@json_option
def verify(where: Where, step: int | None, deep: bool, as_json: bool) -> None:
    """Verify each checkpoint: its manifest, and every object by its size and by the hash that the store shows; with
    --deep every hash, by reading every byte."""
    from podwatch.store.verify import verify as verify_saves

    answers = list[dict[str, Any]]()
    with inventory_of(load(where)) as (store, place, inventory):
        chosen = [save for save in reversed(inventory.saves) if step in (None, save.step)]
        if not chosen and not inventory.problems:
            raise IntegrityError(
                "nothing to verify" if step is None else f"step {step} is not in the store",
                where=place.url,
                fix="`podwatch store ls` lists the checkpoints",
            )
        for found in verify_saves(store, place.keys, chosen, deep=deep):
            answers.append(_answer(found))
            if not as_json:
                click.echo(_line(found))
        calls = _calls(store)
    document = {"schema_version": 1, "deep": deep, "pointer_problem": _problem(inventory), "saves": answers}
    problems = [f"cannot be used: {clean(problem)}" for problem in inventory.problems]
    say(document | {"calls": calls}, problems, as_json=as_json)
    if inventory.problems or not all(a["sound"] and not a["optional_reasons"] for a in answers):
        sys.exit(1)


def _answer(found: "Verified") -> dict[str, Any]:
    save = found.save
    return {"step": save.step, "save_id": save.save_id, "sound": found.sound, "reasons": list(found.reasons),
            "optional": save.exports, "optional_reasons": list(found.exports_reasons)}  # fmt: skip


def _line(found: "Verified") -> str:
    save, reasons, exports = found.save, found.reasons, found.exports_reasons
    text = f"DAMAGED: {clean('; '.join(reasons[:3]))}" if reasons else f"sound{_PROVED[found.proof]}"
    text += f"; exported weights DAMAGED: {clean('; '.join(exports[:3]))}" if exports else ""
    return f"step {save.step} {save.save_id}: {text}"


def _problem(inventory: "Inventory") -> str:
    """The first document that cannot be used."""
    return next(iter(inventory.problems), "")


def _calls(store: "Objects") -> dict[str, int]:
    return {name.lower(): store.calls[name] for name in ("A", "B", "C")}


def _billed(calls: dict[str, int]) -> list[str]:
    """The number of billed calls, if the store bills calls."""
    return [f"billed calls: {calls['b']} of class B, {calls['c']} of class C"] if any(calls.values()) else []


def _document(save: "Stored", inventory: "Inventory", now: float) -> dict[str, Any]:
    """``now``: by the store's clock."""
    return {
        "step": save.step,
        "save_id": save.save_id,
        "named": _is_named(save, inventory),
        "problem": save.problem,
        "total_bytes": save.total_bytes,
        "file_count": save.files,
        "age_seconds": round(max(0.0, now - save.wall)),
        "lineage": save.lineage,
        "layout": save.manifest.layout if save.manifest is not None else "",
        "pinned": save.pinned,
        "optional": save.exports,
    }
