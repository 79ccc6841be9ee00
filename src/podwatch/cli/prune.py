"""``podwatch prune``: delete old checkpoints on the pod, or explain the plan. The daemon does it."""

from typing import Any

import click

from podwatch.cli.common import Where, ask, clean, common, json_option, print_json


@click.command("prune")
@common
@click.option("--dry-run", is_flag=True, help="Only show each checkpoint, whether it is kept or removed, and why.")
@json_option
def command(where: Where, dry_run: bool, as_json: bool) -> None:
    """Free disk space on this pod.

    podwatch deletes checkpoints and leftovers that it no longer needs, the least valuable first."""
    if dry_run:
        answer = ask(where, "prune_plan", purpose="plan which checkpoints to delete", timeout=60.0)
    else:
        answer = ask(where, "prune", purpose="delete checkpoints", timeout=600.0)
    if as_json:
        print_json(answer)
    else:
        click.echo("\n".join(describe(answer)))


def describe(plan: dict[str, Any]) -> list[str]:
    """One line per checkpoint or path, then the message."""
    from podwatch.client.format import size

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
