"""``podwatch sync``: send the newest complete checkpoint now."""

import click

from podwatch.cli.common import Where, ask, common, json_option, say


@click.command("sync")
@common
@click.option("--step", type=click.IntRange(min=0), help="This step instead of the newest complete one.")
@click.option("--wait", is_flag=True, help="Return only when it is published, or failed.")
@json_option
def command(where: Where, step: int | None, wait: bool, as_json: bool) -> None:
    """Upload and publish now, instead of at the next sweep."""
    params = {"step": step, "wait": wait}
    answer = ask(where, "sync", params, purpose="upload", timeout=None if wait else 30.0)
    say(answer, as_json=as_json)
