"""``podwatch hooks run``: a hook, run by hand (docs/hooks.md). Works without a daemon."""

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import SuggestingGroup, Where, clean, common, json_option, print_json

if TYPE_CHECKING:
    from podwatch.config.settings import HookSettings, Settings


@click.group("hooks", cls=SuggestingGroup, short_help="Commands that run after an event: run one now.")
def command() -> None:
    """The commands of [[hooks]], which podwatch runs after an event such as a complete checkpoint."""


def _named(settings: "Settings", name: str) -> "HookSettings":
    from podwatch.domain.errors import UsageError

    found = next((hook for hook in settings.hooks if hook.name == name), None)
    if found is None:
        names = ", ".join(hook.name for hook in settings.hooks)
        fix = f"choose one of {names}" if names else "no hook is configured: see docs/hooks.md"
        raise UsageError(f"hook {name!r} not found", where="[[hooks]]", fix=fix)
    return found


@command.command("run")
@click.argument("name")
@common
@click.option(
    "--step", type=click.IntRange(min=0), help="Run it for this checkpoint; default: the newest complete one."
)
@json_option
def run(where: Where, name: str, step: int | None, as_json: bool) -> None:
    """Run a hook now, as after a checkpoint, and show its output. Exit: 0 if it succeeded, 1 if it failed.

    Its event is "manual". The daemon need not run, and records nothing of it.
    """
    from podwatch.cli.offline import load
    from podwatch.config.command_directory import absolute
    from podwatch.domain.secrets import scrub
    from podwatch.hooks import start_child
    from podwatch.hooks.hook_runner import directory, document_of, variables_of
    from podwatch.hooks.occasions import Occasion

    settings = load(where)
    hook = _named(settings, name)
    found, about = _checkpoint(settings, step)
    wall = time.time()
    one = Occasion("manual", f"manual:{round(wall * 1000)}", wall, step=found, message="run by hand")
    document = document_of(one, hook.name, 1, settings, about)
    state = directory(settings.state_dir / settings.run_id)
    config = str(absolute(Path(where.config))) if where.config else os.environ.get("PODWATCH_CONFIG", "")
    order = start_child.order_for(
        hook,
        settings,
        os.environ,
        own=variables_of(document, config),
        document=document,
        title=one.id,
        state=state if state.is_dir() and os.access(state, os.W_OK) else None,
    )
    result = asyncio.run(start_child.run(order))
    why = result.why(hook.timeout)
    if as_json:
        output = {"output": scrub(result.tail), "dropped_bytes": result.dropped, "document": document}
        told = {"exit_code": result.code, "seconds": result.seconds, "timed_out": result.timed_out, "why": why}
        print_json({"schema_version": 1, "ok": result.ok, **told, **output})
    else:
        click.echo(clean(scrub(result.tail)), nl=False)
        click.echo(f"hook {hook.name} succeeded after {result.seconds:.1f} s" if result.ok else f"hook failed: {why}")
    raise click.exceptions.Exit(0 if result.ok else 1)


def _checkpoint(settings: "Settings", step: int | None) -> tuple[int | None, dict[str, Any]]:
    """The step and what a hook gets about its checkpoint. UsageError if it is not on this pod."""
    from podwatch.app.hooks import facts_of
    from podwatch.checkpoints.trainers import make_layout
    from podwatch.cli.offline import look
    from podwatch.domain.checkpoint import newest_complete
    from podwatch.domain.errors import UsageError

    sets = look(settings).sets
    found = newest_complete(sets) if step is None else next((s for s in sets if s.step == step and s.complete), None)
    if found is None and step is not None:
        raise UsageError(f"no complete checkpoint of step {step}", fix="`podwatch checkpoints` lists the checkpoints")
    return (None, {}) if found is None else (found.step, facts_of(make_layout(settings), found))
