"""``podwatch demo``: podwatch's main job on a simulated pod, without a GPU."""

import click

SCENARIOS = ("silent-death", "hang", "disk-pressure", "crash-loop")


@click.command("demo", short_help="Break a simulated pod and watch podwatch recover it.")
@click.option("--speed", type=click.FloatRange(0.25, 4.0), default=1.0, show_default=True, help="Speed factor of time.")
@click.option(
    "--scenario", type=click.Choice(SCENARIOS), default="silent-death", show_default=True, help="What breaks."
)
@click.option("--layout", type=click.Choice(["A", "B"]), default="A", help="prime-rl up to v0.8 (A) or later (B).")
@click.option("--keep", is_flag=True, help="Keep the pod's directory.")
def command(speed: float, scenario: str, layout: str, keep: bool) -> None:
    """Break a simulated pod and watch podwatch recover it, in under a minute.

    Real processes, real checkpoint files, a small disk, a local store; only the GPUs are simulated. Needs no account
    and no root. Exit code 0 only if everything in the summary really happened.
    """
    from podwatch.simulation.demo import run

    raise click.exceptions.Exit(run(scenario, speed=speed, keep=keep, layout=layout))
