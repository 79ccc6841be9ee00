"""``podwatch start``: training is wanted; start it, or guard the one that a person started."""

import sys
from typing import Any

import click

from podwatch.cli.common import Where, ask, clean, common, json_option, print_json, say
from podwatch.domain.errors import ExitCode

COMMAND_SHOWN = 60


@click.command("start", short_help="Training is wanted: start it, keep it running.")
@common
@click.option("--step", type=click.IntRange(min=0), help="From this step instead of the newest complete one.")
@click.option("--fresh", is_flag=True, help="From the beginning, on a new lineage.")
@click.option("--attach", metavar="PID", type=click.IntRange(min=1), help="Guard this running trainer of yours.")
@click.option(
    "--beside",
    metavar="PID",
    type=click.IntRange(min=1),
    help="This process is not the run's training: start although it runs.",
)
@json_option
def command(where: Where, step: int | None, fresh: bool, attach: int | None, beside: int | None, as_json: bool) -> None:
    """Start training (durably: podwatch keeps it running from now on).

    A trainer that you started yourself is not joined by a second one: podwatch guards it from now on and says which it
    is. Where several could be meant they are listed, and you are asked. While a process only may become this run's
    training, podwatch starts nothing beside it: --attach or --beside decides.
    """
    if fresh and step is not None:
        raise click.UsageError("--step and --fresh exclude each other")
    if attach is not None and (fresh or step is not None):
        raise click.UsageError("--attach takes a running trainer as it is: without --step and --fresh")
    if attach is not None and beside is not None:
        raise click.UsageError("--attach and --beside exclude each other")
    params: dict[str, Any] = {"step": step, "fresh": fresh, "attach": attach, "beside": beside}
    answer = ask(where, "start", params, purpose="start training")
    if answer.get("needs_choice"):
        if as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
            if as_json:
                print_json(answer)
            else:
                click.echo("\n".join(choices(answer)), err=True)
                click.echo("say which: podwatch start --attach PID", err=True)
            raise click.exceptions.Exit(int(ExitCode.USAGE))
        click.echo("\n".join(choices(answer)))
        known = click.Choice([str(found["pid"]) for found in answer["candidates"]])
        params["attach"] = int(click.prompt("Guard which (its pid)", type=known, show_choices=False))
        answer = ask(where, "start", params, purpose="start training")
    say(answer, as_json=as_json)


def choices(answer: dict[str, Any]) -> list[str]:
    """The candidates, two lines each."""
    lines = ["several trainers that podwatch did not start could be this run's:"]
    for found in answer.get("candidates") or []:
        lines.append(f"{found['pid']:>9}  {clean(found['command'])[:COMMAND_SHOWN]}")
        lines.append(f"{'':>9}  {clean(found['reason'])}")
    return lines
