"""``podwatch start``: training is wanted; start it if it does not run."""

import click

from podwatch.cli.common import Where, ask, common, json_option, say


@click.command("start", short_help="Training is wanted: start it, keep it running.")
@common
@click.option("--step", type=click.IntRange(min=0), help="From this step instead of the newest complete one.")
@click.option("--fresh", is_flag=True, help="From the beginning, on a new lineage.")
@json_option
def command(where: Where, step: int | None, fresh: bool, as_json: bool) -> None:
    """Start training (durably: podwatch keeps it running from now on)."""
    if fresh and step is not None:
        raise click.UsageError("--step and --fresh exclude each other")
    say(ask(where, "start", {"step": step, "fresh": fresh}, purpose="start training"), as_json=as_json)
