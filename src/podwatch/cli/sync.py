"""``podwatch sync``: upload the newest complete checkpoint now."""

import click

from podwatch.cli.common import Where, ask, common, json_option, say


@click.command("sync")
@common
@click.option("--step", type=click.IntRange(min=0), help="Upload this step instead of the newest complete one.")
@click.option("--wait", is_flag=True, help="Wait until the upload is published or has failed.")
@json_option
def command(where: Where, step: int | None, wait: bool, as_json: bool) -> None:
    """Upload and publish a checkpoint now."""
    params = {"step": step, "wait": wait}
    answer = ask(where, "sync", params, purpose="upload a checkpoint", timeout=None if wait else 30.0)
    say(answer, as_json=as_json)
