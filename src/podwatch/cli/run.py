"""``podwatch run``: the daemon, or with ``--job`` the one process of an engine's job."""

import os

import click

from podwatch.cli.common import Where, common
from podwatch.cli.job_assumptions import assume, given_options
from podwatch.domain.errors import UsageError


@click.command("run", short_help="Guard the run: adopt, attach to or start training.")
@common
@click.option("--detach", is_flag=True, help="Run in the background, under a small parent that restarts podwatch.")
@click.option("--job", is_flag=True, help="Be an engine's job: train until the run ends, and return its exit code.")
@click.option("--retry", is_flag=True, help="Run again although an operator or an earlier verdict stopped this run.")
@click.option("--adopt-existing", is_flag=True, help="Accept checkpoints without a run record as this run's.")
@click.option("--fresh", is_flag=True, help="Start training from the beginning, also if the store does not answer.")
@click.option("--take-over", is_flag=True, help="Take the run over from the pod that holds it in the store.")
@given_options
def command(
    where: Where,
    overrides: dict[str, object],
    detach: bool,
    job: bool,
    retry: bool,
    adopt_existing: bool,
    fresh: bool,
    take_over: bool,
) -> None:
    """Guard the run: adopt or attach to running training, or start it; then watch it, upload its checkpoints, free disk
    space, and restart it after a failure.

    With --job podwatch ends when the run ends, together with training (docs/jobs.md). With a command after --, settings
    that are not given are detected, and the first lines show them. Exit codes: 0 finished and stored; 65 do not run
    again; 69 finished, but not everything could be stored; 86 run again, preferably on another machine; 64, 77, 78 as
    for every command.
    """
    from podwatch.app.entry import run_daemon
    from podwatch.app.variables_of_own_processes import UNDER_INIT

    if job and detach:
        raise UsageError("--job and --detach exclude each other", fix="an engine waits for its job: leave out --detach")
    assumed = assume(where, overrides)
    if UNDER_INIT not in os.environ:
        for line in assumed.lines:
            click.echo(f"podwatch: {line}", err=True)
    code = run_daemon(
        where.path,
        where.run,
        assumed.overrides,
        adopt_existing=adopt_existing,
        detach=detach,
        take_over=take_over,
        fresh=fresh,
        job=job,
        retry=retry,
    )
    raise click.exceptions.Exit(code)
