"""``podwatch hooks``: the configured hooks, one run by hand, their output (docs/hooks.md). Works without a daemon."""

import asyncio
import os
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import Where, clean, common, json_option, print_json

if TYPE_CHECKING:
    from podwatch.config.settings import HookSettings, Settings


@click.group("hooks", short_help="Commands that run after an event: list, run, logs.")
def command() -> None:
    """The commands of [[hooks]], which podwatch runs after an event such as a complete checkpoint."""


@command.command("list")
@common
@json_option
def list_(where: Where, as_json: bool) -> None:
    """Show each hook, its events, and the result of its last run."""
    from podwatch.cli.offline import load

    settings = load(where)
    known = _known(settings)
    hooks = [_document(hook, known.get(hook.name, {})) for hook in settings.hooks]
    if as_json:
        print_json({"schema_version": 1, "hooks": hooks})
        return
    if not hooks:
        click.echo("no hooks are configured: see docs/hooks.md")
    for shown in hooks:
        click.echo(clean(f"{shown['name']}  on {', '.join(shown['on'])}: {' '.join(shown['command'])}"))
        click.echo(clean(f"    {_last(shown['last'])}"))


def _document(hook: "HookSettings", kept: dict[str, Any]) -> dict[str, Any]:
    from podwatch.client.times_and_sizes import rfc3339
    from podwatch.domain.secrets import scrub_all, scrub_argv

    last = kept.get("last") or None
    if last is not None:
        last = {**last, "at": rfc3339(last.pop("wall", None))}
    return {
        "name": hook.name,
        "on": list(hook.on),
        "command": list(scrub_argv(hook.command)),
        "timeout_seconds": hook.timeout,
        "coalesce": hook.coalesce,
        "retries": hook.retries,
        "failures": int(kept.get("failures") or 0),
        "last": scrub_all(last),
    }


def _last(last: dict[str, Any] | None) -> str:
    if not last:
        return "has not run yet"
    step = "" if last.get("step") is None else f", step {last['step']}"
    result = "succeeded" if last.get("ok") else f"failed: {last.get('why')}"
    return f"last run {last.get('at')} ({last.get('on')}{step}, {last.get('seconds')} s): {result}"


def _known(settings: "Settings") -> dict[str, dict[str, Any]]:
    """The state of each hook as the daemon recorded it; empty where no journal can be read."""
    from podwatch.cli.offline import journal_path
    from podwatch.domain.errors import HostError
    from podwatch.hooks.hook_runner import key_of
    from podwatch.journal.journal import Journal

    try:
        journal = Journal.open(journal_path(settings), read_only=True)
    except HostError:
        return {}
    try:
        found = {hook.name: journal.learned(key_of(hook.name)) for hook in settings.hooks}
    finally:
        journal.close()
    return {name: kept for name, kept in found.items() if isinstance(kept, dict)}


def _named(settings: "Settings", name: str) -> "HookSettings":
    from podwatch.domain.errors import UsageError

    found = next((hook for hook in settings.hooks if hook.name == name), None)
    if found is None:
        names = ", ".join(hook.name for hook in settings.hooks) or "none is configured"
        raise UsageError(f"hook {name!r} not found", where=names, fix="`podwatch hooks list` shows the hooks")
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
    from podwatch.policy.hooks import Occasion

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
    from podwatch.checkpoints.layouts import make_layout
    from podwatch.cli.offline import look
    from podwatch.daemon.hooks import facts_of
    from podwatch.domain.checkpoint import newest_complete
    from podwatch.domain.errors import UsageError

    sets = look(settings).sets
    found = newest_complete(sets) if step is None else next((s for s in sets if s.step == step and s.complete), None)
    if found is None and step is not None:
        raise UsageError(f"no complete checkpoint of step {step}", fix="`podwatch checkpoints` lists the checkpoints")
    return (None, {}) if found is None else (found.step, facts_of(make_layout(settings), found))


@command.command("logs")
@click.argument("name", required=False)
@common
@click.option("-n", "--lines", type=click.IntRange(min=1), default=200, show_default=True, help="Lines of each log.")
def logs(where: Where, name: str | None, lines: int) -> None:
    """Show the output of the last runs of one hook, or of all, without secrets."""
    from podwatch.cli.offline import load
    from podwatch.hooks.hook_runner import directory

    settings = load(where)
    hooks = [_named(settings, name)] if name else list(settings.hooks)
    for hook in hooks:
        if len(hooks) > 1:
            click.echo(f"--- {hook.name}")
        show_log(settings, directory(settings.state_dir / settings.run_id) / f"{hook.name}.log", hook.env_file, lines)


def show_log(settings: "Settings", path: Path, env_file: Path | None, lines: int) -> None:
    """Print the end of a log of commands, without secrets."""
    from podwatch.daemon.settings_in_force import learn_secrets
    from podwatch.domain.secrets import scrub

    learn_secrets(settings)
    if env_file is not None:
        _learn(env_file)
    kept: deque[str] = deque(maxlen=lines)
    for file in (path.with_name(f"{path.name}.1"), path):
        try:
            kept.extend(file.read_text(errors="replace").splitlines())
        except FileNotFoundError:
            continue
    for line in kept or [f"{path.stem} has not run yet: {path} does not exist"]:
        click.echo(clean(scrub(line)))


def _learn(env_file: Path) -> None:
    from podwatch.domain.errors import PodwatchError
    from podwatch.trainer.environment import read_env_file

    try:
        read_env_file(env_file)
    except PodwatchError as error:
        click.echo(f"warning: {error}", err=True)
