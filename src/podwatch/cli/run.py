"""``podwatch run``: the daemon."""

from pathlib import Path

import click

from podwatch.cli.common import Where, common
from podwatch.domain.errors import UsageError


@click.command("run", short_help="Guard the run: adopt, attach to or start training.")
@common
@click.option("--detach", is_flag=True, help="Run in the background, under a small parent that restarts podwatch.")
@click.option("--adopt-existing", is_flag=True, help="Accept checkpoints without a run record as this run's.")
@click.option("--fresh", is_flag=True, help="Start training from the beginning, also if the store does not answer.")
@click.option("--take-over", is_flag=True, help="Take the run over from the pod that holds it in the store.")
@click.option(
    "--set", "settings", metavar="KEY=VALUE", multiple=True, help="Override a setting: --set disk.prune_to=70%."
)
def command(
    where: Where, detach: bool, adopt_existing: bool, fresh: bool, take_over: bool, settings: tuple[str, ...]
) -> None:
    """Guard the run: adopt or attach to running training, or start it; then watch it, upload its checkpoints, free disk
    space, and restart it after a failure."""
    from podwatch.daemon.entry import run_daemon

    code = run_daemon(
        Path(where.config) if where.config else None,
        where.run,
        overrides(settings),
        adopt_existing=adopt_existing,
        detach=detach,
        take_over=take_over,
        fresh=fresh,
    )
    raise click.exceptions.Exit(code)


def overrides(settings: tuple[str, ...]) -> dict[str, object]:
    """Key -> text of each ``disk.prune_to=70%``; the loader converts the text."""
    made: dict[str, object] = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator or not key.strip():
            raise UsageError("not a valid setting", where=f"--set {setting}", fix="write --set section.key=value")
        made[key.strip()] = value
    return made
