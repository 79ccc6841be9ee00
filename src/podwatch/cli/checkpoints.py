"""``podwatch checkpoints``: list, verify and pin the checkpoints on this pod and in the store."""

import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import Where, ask, clean, common, find_daemon, json_option, print_json, say
from podwatch.client.api import NotRunning, call
from podwatch.client.format import ago, from_rfc3339, size

if TYPE_CHECKING:
    from podwatch.checkpoints.layouts import Layout
    from podwatch.journal.journal import Journal

BLIND = (
    "note: a structure check cannot find flipped bits or lost pages in tensor data; --deep compares every byte with "
    "the hashes from the upload"
)


@click.group("checkpoints", invoke_without_command=True)
@common
@json_option
def command(where: Where, as_json: bool) -> None:
    """List the checkpoints on this pod and in the store. Works without a daemon."""
    if click.get_current_context().invoked_subcommand is None:
        found = fetch(where)
        if as_json:
            print_json({"schema_version": 1, **found})
        else:
            width = shutil.get_terminal_size((100, 24)).columns
            lines = table(
                found["sets"],
                time.time(),
                width=width,
                remote=found.get("remote"),
                places=found.get("searched") or (),
                layout=str(found.get("layout") or ""),
            )
            click.echo("\n".join([*lines, *(f"problem: {clean(p)}" for p in found.get("problems") or ())]))


@command.command("verify")
@common
@click.option("--step", type=click.IntRange(min=0), help="Only this step.")
@click.option("--deep", is_flag=True, help="Read every byte and compare it with the hashes from the upload.")
@json_option
def verify(where: Where, step: int | None, deep: bool, as_json: bool) -> None:
    """Check the structure of every file of every complete checkpoint. Exit 1 if one is broken."""
    if deep:
        from podwatch.cli.deep_verify import check_deep

        results = check_deep(where, step, quiet=as_json or not sys.stderr.isatty())
    else:
        results = check(where, step)
    if as_json:
        print_json({"schema_version": 1, "deep": deep, "steps": results})
    else:
        for result in results:
            click.echo("\n".join(_verdict(result)))
        footer = "" if deep else f"\n{textwrap.fill(BLIND, 100)}"
        click.echo(footer if results else "no complete checkpoint to check")
    if not all(r["sound"] for r in results):
        raise click.exceptions.Exit(1)


@command.command("pin")
@common
@click.argument("step", type=click.IntRange(min=0))
@click.option("--reason", default="", help="Reason, shown wherever the step is listed.")
@json_option
def pin(where: Where, step: int, reason: str, as_json: bool) -> None:
    """Protect a checkpoint: podwatch never deletes it, here or in the store. Works without a daemon."""
    if find_daemon(where) is not None:
        say(ask(where, "pin", {"step": step, "reason": reason}, purpose="pin a checkpoint"), as_json=as_json)
        return
    with _state(where) as journal:
        journal.pin(step, (reason or "by hand")[:200])
    say(
        {"message": f"step {step} is pinned: podwatch never deletes it, here or in the store", "step": step},
        as_json=as_json,
    )


@command.command("unpin")
@common
@click.argument("step", type=click.IntRange(min=0))
@json_option
def unpin(where: Where, step: int, as_json: bool) -> None:
    """Remove the protection of a pinned checkpoint. Works without a daemon."""
    if find_daemon(where) is not None:
        say(ask(where, "unpin", {"step": step}, purpose="unpin a checkpoint"), as_json=as_json)
        return
    from podwatch.domain.errors import UsageError

    with _state(where) as journal:
        if step not in journal.pins():
            raise UsageError(f"step {step} is not pinned", fix="`podwatch checkpoints` shows what protects it")
        journal.unpin(step)
    say({"message": f"step {step} is no longer pinned", "step": step}, as_json=as_json)


@contextmanager
def _state(where: Where) -> "Iterator[Journal]":
    """The run's journal for writing, under the daemon's lock. Busy if a daemon holds it."""
    import os

    from podwatch.cli.offline import load
    from podwatch.daemon.paths import run_paths
    from podwatch.journal.journal import Journal
    from podwatch.system.files import FileLock

    settings = load(where)
    paths = run_paths(settings.state_dir, settings.run_id, os.environ)
    with FileLock(paths.lock):
        journal = Journal.open(paths.journal)
        try:
            yield journal
        finally:
            journal.close()


def fetch(where: Where) -> dict[str, Any]:
    """The documents of all checkpoints here (newest last) and in the store. Without a daemon they come from disk and
    journal; ``remote`` is None without a readable journal."""
    daemon = find_daemon(where)
    if daemon is not None:
        try:
            return dict(call(daemon.control_path, "checkpoints", timeout=150.0))
        except NotRunning:
            pass
    from podwatch.checkpoints.layouts import make_layout
    from podwatch.cli.offline import load, look, noted
    from podwatch.domain.checkpoint import newest_complete
    from podwatch.reporting.documents import checkpoint_document, remote_document

    settings = load(where)
    kept = noted(settings)
    problems: list[str] = []
    sets = look(settings, problems).sets
    newest = newest_complete(sets)
    published, pins = kept if kept is not None else ([], {})
    stored = frozenset((p.step, p.save_id) for p in published) if kept is not None else None
    here = {(s.step, s.save_id) for s in sets}
    return {
        "sets": [
            checkpoint_document(s, stored=stored, pins=pins, held=("newest complete",) if s is newest else ())
            for s in sets
        ],
        "remote": [remote_document(p, here) for p in published] if kept is not None else None,
        "store_url": settings.sync.store,
        "problems": problems,
        **searched(make_layout(settings)),
    }


def searched(layout: "Layout") -> dict[str, Any]:
    return {"layout": layout.name, "searched": [str(root) for root in layout.watch_roots()]}


def check(where: Where, step: int | None) -> list[dict[str, Any]]:
    daemon = find_daemon(where)
    if daemon is not None:
        try:
            return list(call(daemon.control_path, "verify", {"step": step}, timeout=None)["steps"])
        except NotRunning:
            pass
    from podwatch.cli.offline import load, look
    from podwatch.domain.errors import UsageError
    from podwatch.reporting.documents import inspection_document

    catalogue = look(load(where))
    if step is not None and all(s.step != step for s in catalogue.sets):
        raise UsageError(f"checkpoint of step {step} not found", fix="`podwatch checkpoints` lists them")
    results = []
    for found in catalogue.sets:
        if found.step == step or (found.complete and step is None):
            looked = catalogue.inspect(found.step)
            results.append(inspection_document(found.step, looked.problems, looked.notes, looked.files))
    return results


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
        lines.append(f"{save['step']:>8}  {'':<10} {size(save['size_bytes']):>8}  {_age(save.get('stored_at'), now)}")
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
