"""``podwatch stop-training``: stop training until ``podwatch start``."""

import click

from podwatch.cli.common import Where, ask, common, json_option, say


@click.command("stop-training", short_help="Stop training and keep it stopped.")
@common
@click.option("--after-save", is_flag=True, help="Wait for the next complete checkpoint first.")
@json_option
def command(where: Where, after_save: bool, as_json: bool) -> None:
    """Stop training until `podwatch start`, also after a restart of podwatch. podwatch keeps guarding the checkpoints.

    With --after-save, training continues until its next checkpoint is complete; if it dies or hangs before, podwatch
    stops it then. `podwatch stop-training` stops it immediately; `podwatch start` cancels the request.
    """
    say(ask(where, "stop_training", {"after_save": after_save}, purpose="stop training"), as_json=as_json)
