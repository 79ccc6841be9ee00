"""``podwatch demo``: podwatch's main job on a simulated pod, without a GPU."""

import click

SCENARIOS = ("silent-death", "hang")


@click.command("demo", short_help="Break a simulated pod and watch podwatch recover it.")
@click.option(
    "--scenario", type=click.Choice(SCENARIOS), default="silent-death", show_default=True, help="What breaks."
)
def command(scenario: str) -> None:
    """Break a simulated pod and watch podwatch recover it, in under a minute.

    Real processes, real checkpoint files, a small disk, a local store; only the GPUs are simulated. Needs no account
    and no root. Exit code 0 only if everything in the summary really happened.
    """
    from podwatch.simulation.demo import run

    raise click.exceptions.Exit(run(scenario))
