"""``podwatch start``: start training, or guard a trainer that an operator started."""

import sys
from typing import Any

import click

from podwatch.cli.common import Where, ask, clean, common, json_option, print_json, say
from podwatch.domain.errors import ExitCode

COMMAND_SHOWN = 60


@click.command("start", short_help="Start training and keep it running.")
@common
@click.option("--step", type=click.IntRange(min=0), help="Resume from this step instead of the newest complete one.")
@click.option("--fresh", is_flag=True, help="Start from the beginning, in a new lineage.")
@click.option("--attach", metavar="PID", type=click.IntRange(min=1), help="Guard this trainer, which you started.")
@click.option(
    "--beside",
    metavar="PID",
    type=click.IntRange(min=1),
    help="This process is not the run's training: start training although it runs.",
)
@json_option
def command(where: Where, step: int | None, fresh: bool, attach: int | None, beside: int | None, as_json: bool) -> None:
    """Start training and keep it running, also after a restart of podwatch.

    If you already started a trainer yourself, podwatch guards it and starts no second one. If several processes could
    be this run's trainer, podwatch lists them and asks. If a process could become this run's training, podwatch starts
    nothing: decide with --attach or --beside.
    """
    if fresh and step is not None:
        raise click.UsageError("--step and --fresh cannot be used together")
    if attach is not None and (fresh or step is not None):
        raise click.UsageError("--attach cannot be used with --step or --fresh: the trainer already runs")
    if attach is not None and beside is not None:
        raise click.UsageError("--attach and --beside cannot be used together")
    params: dict[str, Any] = {"step": step, "fresh": fresh, "attach": attach, "beside": beside}
    answer = ask(where, "start", params, purpose="start training")
    if answer.get("needs_choice"):
        if as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
            if as_json:
                print_json(answer)
            else:
                click.echo("\n".join(choices(answer)), err=True)
                click.echo("choose one: podwatch start --attach PID", err=True)
            raise click.exceptions.Exit(int(ExitCode.USAGE))
        click.echo("\n".join(choices(answer)))
        known = click.Choice([str(found["pid"]) for found in answer["candidates"]])
        params["attach"] = int(click.prompt("pid of the trainer to guard", type=known, show_choices=False))
        answer = ask(where, "start", params, purpose="start training")
    say(answer, as_json=as_json)


def choices(answer: dict[str, Any]) -> list[str]:
    """The candidates, two lines each."""
    lines = ["several trainers that podwatch did not start could be this run's:"]
    for found in answer.get("candidates") or []:
        lines.append(f"{found['pid']:>9}  {clean(found['command'])[:COMMAND_SHOWN]}")
        lines.append(f"{'':>9}  {clean(found['reason'])}")
    return lines
