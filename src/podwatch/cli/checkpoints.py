"""``podwatch checkpoints``: list, verify and pin the checkpoints on this pod and in the store. Also the commands that
move them: ``sync`` (upload one now), ``prune`` (delete old ones) and ``quarantine`` (what restarts moved away)."""

import contextlib
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import (
    SuggestingGroup,
    Where,
    ask,
    ask_if_it_runs,
    clean,
    common,
    json_option,
    say,
)
from podwatch.cli.progress import Progress
from podwatch.domain.errors import ConfigurationError, HostError, PodwatchError, UsageError
from podwatch.domain.finding import counted
from podwatch.domain.times import ago, from_rfc3339, size

if TYPE_CHECKING:
    from podwatch.checkpoints.known_checkpoints import Catalogue
    from podwatch.checkpoints.layout import Layout
    from podwatch.config.settings import Settings
    from podwatch.domain.checkpoint import CheckpointSet
    from podwatch.recovery.quarantine import Entry
    from podwatch.recovery.run_file import RunFile
    from podwatch.store.inventory import Inventory, Stored


BLIND = (
    "note: a structure check cannot find flipped bits or lost pages in tensor data; --deep compares every byte with "
    "the hashes from the upload"
)


@click.group("checkpoints", cls=SuggestingGroup, invoke_without_command=True)
@common
@json_option
def command(where: Where, as_json: bool) -> None:
    """List the checkpoints on this pod and in the store. Works without a daemon."""
    if click.get_current_context().invoked_subcommand is None:
        found = fetch(where)
        lines = table(
            found["sets"],
            time.time(),
            width=shutil.get_terminal_size((100, 24)).columns,
            remote=found.get("remote"),
            places=found.get("searched") or (),
            layout=str(found.get("layout") or ""),
        )
        lines += [f"problem: {clean(problem)}" for problem in found.get("problems") or ()]
        say({"schema_version": 1, **found}, lines, as_json=as_json)


@command.command("verify")
@common
@click.option("--step", type=click.IntRange(min=0), help="Only this step.")
@click.option("--deep", is_flag=True, help="Read every byte and compare it with the hashes from the upload.")
@json_option
def verify(where: Where, step: int | None, deep: bool, as_json: bool) -> None:
    """Check the structure of every file of every complete checkpoint. Exit 1 if one is broken."""
    results = verified(where, step, deep=deep, quiet=as_json or not sys.stderr.isatty())
    footer = "" if deep else f"\n{textwrap.fill(BLIND, 100)}"
    lines = [line for result in results for line in _verdict(result)]
    lines.append(footer if results else "no complete checkpoint to check")
    say({"schema_version": 1, "deep": deep, "steps": results}, lines, as_json=as_json)
    if not all(r["sound"] for r in results):
        raise click.exceptions.Exit(1)


@command.command("pin")
@common
@click.argument("step", type=click.IntRange(min=0))
@click.option("--reason", default="", help="Reason, shown wherever the step is listed.")
@json_option
def pin(where: Where, step: int, reason: str, as_json: bool) -> None:
    """Protect a checkpoint: podwatch never deletes it, here or in the store. Works without a daemon."""
    answer = ask_if_it_runs(where, "pin", {"step": step, "reason": reason})
    if answer is None:
        with _state(where) as file:
            file.edit_now(lambda run: run.pinned(step, (reason or "by hand")[:200]))
        answer = {"message": f"step {step} is pinned: podwatch never deletes it, here or in the store", "step": step}
    say(answer, as_json=as_json)


@command.command("unpin")
@common
@click.argument("step", type=click.IntRange(min=0))
@json_option
def unpin(where: Where, step: int, as_json: bool) -> None:
    """Remove the protection of a pinned checkpoint. Works without a daemon."""
    answer = ask_if_it_runs(where, "unpin", {"step": step})
    if answer is None:
        with _state(where) as file:
            if step not in file.current.pins:
                raise UsageError(f"step {step} is not pinned", fix="`podwatch checkpoints` shows what protects it")
            file.edit_now(lambda run: run.unpinned(step))
        answer = {"message": f"step {step} is no longer pinned", "step": step}
    say(answer, as_json=as_json)


@contextmanager
def _state(where: Where) -> "Iterator[RunFile]":
    """The run's run.json for writing, under the daemon's lock. Busy if a daemon holds it."""
    from podwatch.app.paths_and_run_lock import run_paths
    from podwatch.cli.offline import load, run_file
    from podwatch.system.files import FileLock

    settings = load(where)
    paths = run_paths(settings.state_dir, settings.run_id, os.environ)
    with FileLock(paths.lock):
        file = run_file(settings)
        file.load()
        try:
            yield file
        finally:
            file.close()


def fetch(where: Where) -> dict[str, Any]:
    """The documents of all checkpoints here (newest last) and in the store. Without a daemon they come from disk and
    store; ``remote`` is None where it does not answer."""
    answer = ask_if_it_runs(where, "checkpoints", timeout=150.0)
    if answer is not None:
        return answer
    from podwatch.checkpoints.trainers import make_layout
    from podwatch.cli.offline import load, look, recorded
    from podwatch.domain.checkpoint import newest_complete
    from podwatch.report.json_documents import checkpoint_document

    settings = load(where)
    problems: list[str] = []
    catalogue = look(settings, problems)
    sets, newest = catalogue.sets, newest_complete(catalogue.sets)
    inventory = _inventory_if_any(settings, problems)
    same = {} if inventory is None else _stored_here(catalogue, inventory)
    pins: Mapping[int, str] = {}
    with contextlib.suppress(PodwatchError):  # ``look`` has named it
        pins = run.pins if (run := recorded(settings)) is not None else {}
    stored = None if inventory is None else frozenset(same)
    return {
        "sets": [
            checkpoint_document(s, stored=stored, pins=pins, held=("newest complete",) if s is newest else ()).to_json()
            for s in sets
        ],
        "remote": None if inventory is None else _stored_documents(catalogue, inventory, same),
        "store_url": settings.sync.store,
        "problems": problems,
        **searched(make_layout(settings)),
    }


def _inventory_if_any(settings: "Settings", problems: list[str]) -> "Inventory | None":
    """What the store has of this run; None where none is configured, or where it did not answer, which is a problem."""
    from podwatch.cli.offline import inventory_of

    if not settings.sync.store:
        return None
    try:
        with inventory_of(settings) as (_, _, found):
            pass
    except PodwatchError as error:
        problems.append(f"the store did not answer: {error}")
        return None
    problems += [f"in the store: {text}" for text in found.problems]
    return found


def _stored_here(catalogue: "Catalogue", inventory: "Inventory") -> dict[tuple[int, str], tuple[int, str]]:
    """Of the checkpoints on this pod that are stored: (step, save id here) -> (step, save id in the store)."""
    found = {}
    for one in catalogue.sets:
        if one.complete and (save := _find_stored(catalogue, inventory, one.step)) is not None:
            found[one.step, one.save_id] = save.key
    return found


def _find_stored(catalogue: "Catalogue", inventory: "Inventory", step: int) -> "Stored | None":
    """The whole save in the store that has the files of this checkpoint."""
    try:
        return inventory.find_save(step, catalogue.contents(step).files)
    except (HostError, OSError):
        return None  # removed meanwhile


def _stored_documents(
    catalogue: "Catalogue", inventory: "Inventory", same: Mapping[tuple[int, str], tuple[int, str]]
) -> list[dict[str, Any]]:
    """Oldest first. ``same``: as ``_stored_here`` returns it."""
    from podwatch.domain.status_document import StoredDocument

    here = {stored: own for own, stored in same.items()}
    return [
        StoredDocument(
            save.step, save.save_id, save.key in here, save.total_bytes, save.wall,
            save.lineage, save.generation, save.pinned,
            here.get(save.key) in catalogue.records.restored,
        ).to_json()
        for save in inventory.saves
    ]  # fmt: skip


def searched(layout: "Layout") -> dict[str, Any]:
    return {"layout": layout.name, "searched": [str(root) for root in layout.watch_roots()]}


def table(
    sets: list[dict[str, Any]],
    now: float,
    *,
    width: int = 100,
    remote: list[dict[str, Any]] | None = None,
    places: Sequence[str] = (),
    layout: str = "",
) -> list[str]:
    """Lines with a header; newest last. Notes that do not fit into the width go to lines of their own."""
    lines = []
    if sets:
        lines.append(f"{'step':>8}  {'state':<10} {'size':>8}  {'stored':<9} written")
    else:
        looked = f" (layout {clean(layout)}; searched {', '.join(map(clean, places))})" if places else ""
        lines += textwrap.wrap(f"no checkpoints on this pod{looked}", max(20, width), break_on_hyphens=False)
    for found in sets:
        stored = "?" if found.get("stored") is None else "yes" if found["stored"] else "no"
        if found.get("uploading"):
            stored = "uploading"
        row = (
            f"{found['step']:>8}  {found['completeness']:<10} {size(found['size_bytes']):>8}  {stored:<9} "
            f"{_age(found.get('changed_at'), now)}"
        )
        lines += _with_notes(row, _notes(found), width)
    elsewhere = [r for r in remote or [] if not r.get("here")]
    if elsewhere:
        lines += ["", "only in the store:"]
    for save in elsewhere:
        age = _age(save["stored_at"], now) if save.get("stored_at") else "?"
        lines.append(f"{save['step']:>8}  {'':<10} {size(save['size_bytes']):>8}  {age}")
    return lines


def _notes(found: dict[str, Any]) -> list[str]:
    held = [clean(h) for h in found.get("held_by") or [] if h != "uploading"]
    if not held and found.get("pinned"):
        held = [f"pinned: {clean(found['pinned'])}"]
    doubt = f"held back: {clean(found['held_back'])}" if found.get("held_back") else ""
    return [*([clean(found["reason"])] if found.get("reason") else []), *([doubt] if doubt else []), *held]


def _with_notes(row: str, notes: list[str], width: int) -> list[str]:
    text = "; ".join(notes)
    if not text:
        return [row]
    if len(row) + len(text) + 4 <= width:
        return [f"{row}  ({text})"]
    return [row, *textwrap.wrap(text, max(20, width), initial_indent=" " * 10, subsequent_indent=" " * 10)]


def _age(at: Any, now: float) -> str:
    changed = from_rfc3339(at)
    return ago(None if changed is None else now - changed)


def _verdict(result: dict[str, Any]) -> list[str]:
    count = result.get("files_checked")
    sound = "sound" + (f", {count} files" if count else "")
    if result.get("compared") is False:
        sound = "structure sound, bytes not compared"
    head = sound if result["sound"] else "BROKEN: " + "; ".join(map(clean, result["reasons"]))
    return [f"step {result['step']}: {head}", *(f"  note: {clean(n)}" for n in result.get("notes") or [])]


# -- verify ----------------------------------------------------------------------------------------------------------


LOWEST_PRIORITY = 19
"""So that training keeps the cores while bytes are compared."""


def verified(where: Where, step: int | None, *, deep: bool, quiet: bool) -> list[dict[str, Any]]:
    """One document per checkpoint: the structure, and with ``deep`` then the bytes. ``compared`` is false if the store
    has no hashes of it; the notes give the reason."""
    from podwatch.cli.offline import inventory_of, load, look
    from podwatch.report.json_documents import inspection_document

    settings = load(where)
    if deep and not settings.sync.store:
        raise ConfigurationError(
            "no hashes to compare with: no store is configured",
            where="[sync] store",
            fix="run `podwatch checkpoints verify` without --deep to check the structure",
        )
    catalogue = look(settings)
    wanted = [s for s in catalogue.sets if s.step == step or (s.complete and step is None)]
    if step is not None and not wanted:
        raise UsageError(f"checkpoint of step {step} not found", fix="`podwatch checkpoints` lists them")
    documents = {}
    for found in wanted:
        with contextlib.suppress(HostError):  # removed meanwhile
            looked = catalogue.inspect(found.step)
            documents[found.step] = inspection_document(found.step, looked.reasons, looked.notes, looked.checked)
    if deep:
        with inventory_of(settings) as (_, _, inventory):
            pass
        os.nice(LOWEST_PRIORITY)
        for found in reversed(wanted):
            with contextlib.suppress(HostError):
                roots = {p.part.name: Path(p.part.path) for p in catalogue.contents(found.step).parts}
                _add_bytes(documents[found.step], roots, _comparable(catalogue, inventory, found), quiet=quiet)
    return list(documents.values())


def _comparable(catalogue: "Catalogue", inventory: "Inventory", found: "CheckpointSet") -> "Stored | None":
    """The save in the store to compare with: the same files by name, size and time, or the only one of the step where
    they differ from it, which is then shown."""
    same = _find_stored(catalogue, inventory, found.step)
    whole = [s for s in inventory.saves if s.step == found.step and not s.problem]
    return same or (whole[0] if len(whole) == 1 and not found.complete else None)


def _add_bytes(document: dict[str, Any], roots: Mapping[str, Path], save: "Stored | None", *, quiet: bool) -> None:
    """Add to ``document`` what the comparison with the store says."""
    from podwatch.store.restore.compare import compare
    from podwatch.system.clock import SystemClock
    from podwatch.system.files import open_file

    document["compared"] = save is not None
    if save is None or save.manifest is None:
        document["notes"].append("bytes not compared: the store has no save with these files")
    else:
        manifest = save.manifest
        with Progress(SystemClock(), quiet=quiet, what=f"step {document['step']}: ") as progress:
            add = progress.counting(manifest.total_bytes)
            compared = compare(manifest, lambda f: open_file(roots[f.part] / f.path), add)
        document["reasons"] += compared.problems
        document["bytes_compared"] = compared.size_bytes
    document["sound"] = not document["reasons"]


@click.command("prune")
@common
@click.option("--dry-run", is_flag=True, help="Only show each checkpoint, whether it is kept or removed, and why.")
@json_option
def prune(where: Where, dry_run: bool, as_json: bool) -> None:
    """Free disk space on this pod.

    podwatch deletes checkpoints and leftovers that it no longer needs, the least valuable first."""
    if dry_run:
        answer = ask(where, "prune_plan", purpose="plan which checkpoints to delete", timeout=60.0)
    else:
        answer = ask(where, "prune", purpose="delete checkpoints", timeout=600.0)
    say(answer, describe_plan(answer), as_json=as_json)


def describe_plan(plan: dict[str, Any]) -> list[str]:
    """One line per checkpoint or path, then the message."""
    lines = []
    for entry in plan.get("entries") or []:
        what = f"step {entry['step']}" if entry.get("step") is not None else clean(entry.get("path") or "?")
        if entry.get("part"):
            what += f" {clean(entry['part'])}"
        much = "" if entry.get("size_bytes") is None else size(entry["size_bytes"])
        lines.append(f"{clean(entry.get('action', '?')):<8} {what:<16} {much:>8}  {clean(entry.get('reason', ''))}")
    if plan.get("message"):
        lines.append(clean(plan["message"]))
    return lines or ["nothing to do"]


@click.group("quarantine", cls=SuggestingGroup)
def quarantine() -> None:
    """List or move back quarantined files.

    A restart moves the files ahead of its checkpoint to quarantine; it deletes none."""


@quarantine.command("list")
@common
@json_option
def list_quarantine(where: Where, as_json: bool) -> None:
    """List everything in quarantine, oldest first."""
    from podwatch.app.paths_and_run_lock import workspace_of
    from podwatch.cli.offline import load
    from podwatch.recovery.quarantine import listing

    entries = listing(workspace_of(load(where)))
    lines = [quarantine_line(entry, time.time()) for entry in entries] or ["the quarantine is empty"]
    say({"schema_version": 1, "quarantines": [entry.to_json() for entry in entries]}, lines, as_json=as_json)


@quarantine.command("return")
@common
@click.argument("number", type=click.IntRange(min=1))
@json_option
def return_quarantine(where: Where, number: int, as_json: bool) -> None:
    """Move quarantine NUMBER back to its place. podwatch refuses while training runs, which could read the files."""
    answer = ask_if_it_runs(where, "quarantine_return", {"id": number}, timeout=120.0)
    if answer is None:
        from podwatch.app.paths_and_run_lock import workspace_of
        from podwatch.cli.offline import load
        from podwatch.recovery.quarantine import give_back

        back = give_back(workspace_of(load(where)).probe(), number)
        message = f"moved {counted(len(back), 'entry', 'entries')} back from quarantine"
        answer = {"message": message, "paths": [str(p) for p in back]}
    say(answer, as_json=as_json)


def quarantine_line(entry: "Entry", now: float) -> str:
    """One quarantine as a line: number, age, content."""
    index = entry.index
    if index is None:
        return f"{entry.id:>4}  {clean(entry.problem)}; podwatch ignores it: check {clean(str(entry.paths[0]))}"
    steps = ", ".join(f"step {n} ({clean(state)})" for n, state in index.steps.items())
    start = "a fresh start" if index.step is None else f"a start from step {index.step}"
    what = steps or counted(len(index.moves), "entry", "entries")
    return f"{entry.id:>4}  {ago(now - index.wall):<16} {what}; moved before {start}"


@click.command("sync")
@common
@click.option("--step", type=click.IntRange(min=0), help="Upload this step instead of the newest complete one.")
@click.option("--wait", is_flag=True, help="Wait until the upload is published or has failed.")
@json_option
def sync(where: Where, step: int | None, wait: bool, as_json: bool) -> None:
    """Upload and publish a checkpoint now."""
    params = {"step": step, "wait": wait}
    if wait:
        _say_why_it_waits(where)
    answer = ask(where, "sync", params, purpose="upload a checkpoint", timeout=None if wait else 30.0)
    say(answer, as_json=as_json)


def _say_why_it_waits(where: Where) -> None:
    """On standard error: nothing is published while this pod's claim settles."""
    from podwatch.report.rows import settling

    document = ask(where, "status", purpose="upload a checkpoint")
    if why := settling((document.get("sync") or {}).get("settles_in_seconds")):
        click.echo(f"{why[0].upper()}{why[1:]}.", err=True)
