"""The ``podwatch`` command group. A command's module is imported only for that command (or for ``--help``)."""

import importlib
import importlib.util

import click

from podwatch import __version__
from podwatch.cli.common import Where

COMMANDS = {
    "run": "podwatch.cli.run",
    "start": "podwatch.cli.start",
    "restart": "podwatch.cli.restart",
    "stop-training": "podwatch.cli.stop_training",
    "pause": "podwatch.cli.pause",
    "unpause": "podwatch.cli.unpause",
    "preempt": "podwatch.cli.preempt",
    "status": "podwatch.cli.status",
    "check": "podwatch.cli.check",
    "install": "podwatch.cli.install",
    "checkpoints": "podwatch.cli.checkpoints",
    "sync": "podwatch.cli.sync",
    "restore": "podwatch.cli.restore",
    "store": "podwatch.cli.store",
    "runs": "podwatch.cli.runs",
    "prune": "podwatch.cli.prune",
    "quarantine": "podwatch.cli.quarantine",
    "clean": "podwatch.cli.clean",
    "events": "podwatch.cli.events",
    "incidents": "podwatch.cli.incidents",
    "logs": "podwatch.cli.logs",
    "replay": "podwatch.cli.replay",
    "config": "podwatch.cli.config",
    "demo": "podwatch.cli.demo",
}
"""Name -> module, in the order of the help. The module defines the click command as ``command`` or by its name."""


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, module in COMMANDS.items() if importlib.util.find_spec(module) is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module_name = COMMANDS.get(cmd_name)
        if module_name is None:
            return None
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name == module_name:
                return None
            raise
        found = getattr(module, "command", None) or getattr(module, cmd_name.replace("-", "_"), None)
        return found if isinstance(found, click.Command) else None


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog='Shell completion: add  eval "$(_PODWATCH_COMPLETE=bash_source podwatch)"  to ~/.bashrc'
    " (zsh_source and fish_source for the others).",
)
@click.version_option(__version__, prog_name="podwatch", message="%(prog)s %(version)s")
@click.option("-c", "--config", metavar="FILE", default="", help="Configuration file.")
@click.option("--run", "run_name", metavar="NAME", default="", help="Which run, if podwatch guards several here.")
@click.pass_context
def cli(ctx: click.Context, config: str, run_name: str) -> None:
    """Keep an unattended RL training run alive on a rented GPU pod, and its checkpoints safe."""
    ctx.obj = Where(config, run_name)
