"""``podwatch prune``: what would go and why; only the daemon carries it out."""

from typing import Any

import click

from podwatch.cli.common import Where, ask, clean, common, json_option, print_json


@click.command("prune")
@common
@click.option("--dry-run", is_flag=True, help="Explain each set: kept or removed, and why.")
@json_option
def command(where: Where, dry_run: bool, as_json: bool) -> None:
    """Make room on the pod's disk, in the order that costs least."""
    if dry_run:
        answer = ask(where, "prune_plan", purpose="plan a removal", timeout=60.0)
    else:
        answer = ask(where, "prune", purpose="remove checkpoints", timeout=600.0)
    if as_json:
        print_json(answer)
    else:
        click.echo("\n".join(describe(answer)))


def describe(plan: dict[str, Any]) -> list[str]:
    """One line per set or path, then the message."""
    from podwatch.client.times import size

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
