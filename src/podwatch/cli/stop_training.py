"""``podwatch stop-training``: training ends and stays ended until ``podwatch start``."""

import click

from podwatch.cli.common import Where, ask, common, json_option, say


@click.command("stop-training", short_help="Stop training, and keep it stopped.")
@common
@click.option("--after-save", is_flag=True, help="Wait for the next complete checkpoint first.")
@json_option
def command(where: Where, after_save: bool, as_json: bool) -> None:
    """Stop training (durably). podwatch goes on guarding the checkpoints.

    With --after-save training goes on until its next checkpoint is complete; where none will come any more (it dies,
    hangs or ends before) it is stopped then. `podwatch stop-training` stops it at once, `podwatch start` takes it back.
    """
    say(ask(where, "stop_training", {"after_save": after_save}, purpose="stop training"), as_json=as_json)
