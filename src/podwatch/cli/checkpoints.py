"""``podwatch checkpoints``: what is on this pod, whether it is whole, whether it is stored."""

import time
from typing import Any

import click

from podwatch.cli.common import Where, clean, common, find_daemon, json_option, print_json
from podwatch.client.control import NotRunning, call
from podwatch.client.times import ago, from_rfc3339, size


@click.group("checkpoints", invoke_without_command=True)
@common
@json_option
def command(where: Where, as_json: bool) -> None:
    """List the checkpoint sets on this pod. Works without a daemon."""
    if click.get_current_context().invoked_subcommand is None:
        sets = fetch(where)
        if as_json:
            print_json({"schema_version": 1, "sets": sets})
        else:
            click.echo("\n".join(table(sets, time.time())))


@command.command("verify")
@common
@click.option("--step", type=click.IntRange(min=0), help="Only this step.")
@json_option
def verify(where: Where, step: int | None, as_json: bool) -> None:
    """Check the structure of every file of every complete set. Exit 1 when one is broken."""
    results = check(where, step)
    if as_json:
        print_json({"schema_version": 1, "steps": results})
    else:
        for result in results:
            verdict = "sound" if result["sound"] else "BROKEN: " + "; ".join(map(clean, result["reasons"]))
            click.echo(f"step {result['step']}: {verdict}")
        if not results:
            click.echo("no complete set to check")
    if not all(r["sound"] for r in results):
        raise click.exceptions.Exit(1)


def fetch(where: Where) -> list[dict[str, Any]]:
    """Set documents, newest last. From disk when there is no daemon; then ``stored`` comes from the journal."""
    daemon = find_daemon(where)
    if daemon is not None:
        try:
            return list(call(daemon.control_path, "checkpoints")["sets"])
        except NotRunning:
            pass
    from podwatch.cli.offline import load, look, stored_sets
    from podwatch.telling.documents import checkpoint_document

    settings = load(where)
    stored = stored_sets(settings)
    return [checkpoint_document(s, stored=stored) for s in look(settings).sets]


def check(where: Where, step: int | None) -> list[dict[str, Any]]:
    daemon = find_daemon(where)
    if daemon is not None:
        try:
            return list(call(daemon.control_path, "verify", {"step": step}, timeout=None)["steps"])
        except NotRunning:
            pass
    from podwatch.cli.offline import load, look

    catalogue = look(load(where))
    results = []
    for found in catalogue.sets:
        if found.complete and step in (None, found.step):
            reasons = catalogue.verify(found.step)
            results.append({"step": found.step, "sound": not reasons, "reasons": list(reasons)})
    return results


def table(sets: list[dict[str, Any]], now: float) -> list[str]:
    """Lines with a header; newest last."""
    if not sets:
        return ["no checkpoints on this pod"]
    lines = [f"{'step':>8}  {'state':<11} {'size':>8}  {'stored':<7} written"]
    for found in sets:
        stored = "?" if found.get("stored") is None else "yes" if found["stored"] else "no"
        if found.get("uploading"):
            stored = "sending"
        changed = from_rfc3339(found.get("changed_at"))
        note = clean(found.get("reason") or "")
        if found.get("pinned"):
            note = f"pinned: {clean(found['pinned'])}{f'; {note}' if note else ''}"
        written = ago(None if changed is None else now - changed)
        lines.append(
            f"{found['step']:>8}  {found['completeness']:<11} {size(found['size_bytes']):>8}  {stored:<7} {written}"
            + (f"  ({note})" if note else "")
        )
    return lines
