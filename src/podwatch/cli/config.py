"""``podwatch config show | validate | init | adopt``."""

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import Where, common, json_option
from podwatch.cli.config_adopt import adopt

if TYPE_CHECKING:
    from podwatch.config.loading import LoadedSettings


@click.group()
def config() -> None:
    """Show, check or write the configuration."""


@config.command(short_help="Print the effective settings and their sources.")
@common
@json_option
def show(where: Where, as_json: bool) -> None:
    """Print the effective settings with meaning and source. Secrets are masked."""
    from podwatch.config.explain import render_toml, to_json

    loaded = _load(where)
    if as_json:
        click.echo(json.dumps(to_json(loaded.settings, loaded.sources, loaded.path), indent=2))
    else:
        click.echo(f"# from {loaded.path or 'environment and flags only'}; commented lines show defaults\n")
        click.echo(render_toml(loaded.settings, loaded.sources), nl=False)


@config.command()
@common
@json_option
def validate(where: Where, as_json: bool) -> None:
    """Check the configuration and list all problems. Exit 78 if podwatch cannot use it."""
    from podwatch.config.problems import ConfigurationProblems
    from podwatch.domain.errors import ConfigurationError

    try:
        loaded = _load(where)
    except ConfigurationError as error:
        if not as_json:
            raise
        several = isinstance(error, ConfigurationProblems)
        problems = [str(problem) for problem in error.problems] if several else [str(error)]  # type: ignore[attr-defined]
        click.echo(json.dumps({"schema_version": 1, "ok": False, "problems": problems}, indent=2))
        raise SystemExit(int(error.exit_code)) from error
    warnings = [*loaded.warnings, *_look_around(loaded)]
    if as_json:
        report = {"schema_version": 1, "ok": True, "path": str(loaded.path) if loaded.path else None}
        click.echo(json.dumps({**report, "run_id": loaded.settings.run_id, "warnings": warnings}, indent=2))
        return
    click.echo(f"ok: {loaded.path or 'environment'} (run {loaded.settings.run_id})")
    for warning in warnings:
        click.echo(f"warning: {warning}")


@config.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("podwatch.toml"), help="File to write.")
@click.option("--force", is_flag=True, help="Overwrite existing files.")
@click.option("--pid", type=int, help="Copy command, directory and environment of this process.")
@click.option("--full", is_flag=True, help="Write every setting with its default and its meaning.")
def init(output: Path, force: bool, pid: int | None, full: bool) -> None:
    """Write a configuration for this machine.

    It has the command, working directory and relevant environment of a running trainer. Secrets go into a separate
    file with mode 0600. On a terminal, podwatch asks for the run's name and the store.
    """
    from podwatch.cli import detect
    from podwatch.config.explain import render_brief, render_toml
    from podwatch.config.loading import load_settings, load_text
    from podwatch.domain.errors import UsageError

    output = output.absolute()
    env_file = output.with_suffix(".env")
    for file in (output, env_file):
        if os.path.lexists(file) and not force:
            raise UsageError("the file already exists", where=str(file), fix="choose another with -o, or use --force")
    found = detect.find_trainers() if pid is None else ((pid, ""),)
    if len(found) > 1:
        listing = "; ".join(f"{number}: {command[:80]}" for number, command in found)
        raise UsageError("several trainers are running", where=listing, fix="choose one with --pid")
    gpus, no_gpu = detect.find_gpus()
    trainer = detect.read_trainer(found[0][0]) if found else None
    if trainer is not None:
        gpus, hidden = detect.visible_gpus(gpus, trainer.env)
        no_gpu = no_gpu or hidden
    overrides, notes = _proposal(trainer, gpus, no_gpu)
    secrets = _secrets(env_file, {} if trainer is None else trainer.secrets)
    overrides["trainer.env_file"] = str(env_file)
    notes["trainer.env_file"] = f"names inside: {', '.join(secrets)}" if secrets else "mode 0600, for keys and tokens"
    if sys.stdin.isatty() and sys.stdout.isatty():
        _ask(overrides)
    proposal = load_text("", output, environ={}, overrides=overrides).settings
    if full:
        header = "Commented lines show the defaults; docs/configuration.md has the reasons."
        body = "\n" + render_toml(proposal, mask=False, notes=notes)
    else:
        header = "All settings: `podwatch config init --full`; reasons: docs/configuration.md."
        body = render_brief(proposal, notes=notes, hints=_STILL_TO_SAY)
    text = f"# Written by `podwatch config init`. {header}\n{body}"
    load_text(text, output, environ={})
    _write(env_file, _env_lines(secrets), 0o600)
    click.echo(f"wrote {env_file} (mode 0600; secrets: {len(secrets)})")
    _write(output, text, 0o644)
    settings = load_settings(output, environ={}).settings
    click.echo(f"wrote {output} (run {settings.run_id}, layout {settings.trainer.layout})")
    if trainer is None:
        click.echo("no running trainer found: fill in [trainer] command, or give its pid with --pid and --force")
    elif trainer.removed:
        click.echo(f"removed from the command: {' '.join(trainer.removed)} (podwatch adds its own resume arguments)")
    if no_gpu:
        click.echo(no_gpu)
    if settings.sync.store.startswith("b2:") and not {"B2_APPLICATION_KEY_ID", "B2_APPLICATION_KEY"} <= secrets.keys():
        click.echo(f"put the B2 key into {env_file}")
    store = "" if settings.sync.store else "set [sync] store, "
    click.echo(f"next: read the file, {store}then run `podwatch config validate -c {output}`")


config.add_command(adopt)


def _proposal(trainer: Any, gpus: Any, no_gpu: str) -> tuple[dict[str, object], dict[str, str]]:
    from podwatch.cli import detect

    argv: tuple[str, ...] = trainer.argv if trainer else ()
    cwd: Path = trainer.cwd if trainer else Path.cwd()
    env: Mapping[str, str] = trainer.env if trainer else {}
    output_dir, how = detect.output_dir_of(argv, cwd)
    inference, training, sure = detect.gpu_split(gpus, detect.trainer_config(argv, cwd))
    overrides: dict[str, object] = {
        "run_id": detect.run_id_of(argv, cwd, env, output_dir),
        "trainer.layout": trainer.layout if trainer else "auto",
        "trainer.output_dir": str(output_dir),
        "trainer.cwd": str(cwd),
    }
    notes = {"trainer.output_dir": how}
    if trainer:
        overrides |= {"trainer.command": list(argv), "trainer.env": dict(env)}
        notes["trainer.command"] = f"copied from pid {trainer.pid}"
        if trainer.layout == "prime-rl":
            _own_directory(trainer, overrides, notes)
    if gpus:
        overrides |= {"gpu.inference": list(inference), "gpu.trainer": list(training)}
        notes["gpu.inference"] = sure
        notes["gpu.trainer"] = "; ".join(f"GPU {gpu.index}: {gpu.name}" for gpu in gpus)
    else:
        notes["gpu.inference"] = no_gpu
    notes["sync.store"] = "without a store, checkpoints exist on this pod only"
    return overrides, notes


_STILL_TO_SAY = {
    "trainer.command": '["uv", "run", "rl", "@", "config.toml"]',
    "gpu.inference": "[0]",
    "gpu.trainer": "[1]",
    "sync.store": '"b2://my-bucket"',
}
"""Settings that a run needs although they have a default, with an example."""


def _ask(overrides: dict[str, object]) -> None:
    """Ask for the run's name and the store, which cannot be detected. Enter keeps the proposed name, or no store."""
    from podwatch.config import plugins
    from podwatch.domain.manifest import valid_run_id

    def run_name(text: str) -> str:
        if not valid_run_id(text):
            raise click.UsageError("use letters, digits, '.', '_' or '-', starting with a letter or digit")
        return text

    def store(text: str) -> str:
        text = text.strip()
        added = text.partition("://")[0] in plugins.names(plugins.STORES)
        if text and not text.startswith(("b2://", "file:///")) and not added:
            raise click.UsageError("start with b2:// or file:///, for example b2://my-bucket")
        return text

    proposed = str(overrides["run_id"])
    overrides["run_id"] = click.prompt("name of the run", default=proposed, value_proc=run_name)
    question = "store, such as b2://my-bucket (Enter for none: checkpoints exist on this pod only)"
    answer = click.prompt(question, default="", show_default=False, value_proc=store)
    if answer:
        overrides["sync.store"] = answer


def _secrets(env_file: Path, found: Mapping[str, str]) -> dict[str, str]:
    """``found`` and the other variables of an existing file, so that ``--force`` keeps a key that was filled in."""
    from podwatch.trainer.environment import read_env_file

    kept = read_env_file(env_file) if env_file.is_file() else {}
    return {**kept, **found}


def _own_directory(trainer: Any, overrides: dict[str, object], notes: dict[str, str]) -> None:
    """Use the run directory of prime-rl (since 2026-08) as output_dir, and add its name to the command: without a name
    prime-rl generates a new directory at each start."""
    from podwatch.cli import detect
    from podwatch.cli.detect import run_of

    own = run_of(trainer.pid, trainer.argv, trainer.cwd)
    if own is None:
        return
    overrides["trainer.output_dir"] = str(own.path)
    notes["trainer.output_dir"] = own.how
    overrides["run_id"] = detect.run_id_of(trainer.argv, trainer.cwd, trainer.env, own.path)
    if own.added:
        overrides["trainer.command"] = [*trainer.argv, *own.added]
        notes["trainer.command"] = (
            f"copied from pid {trainer.pid}; {' '.join(own.added)} added: else each start would use a new directory"
        )


def _load(where: Where) -> "LoadedSettings":
    from podwatch.config.loading import load_settings

    return load_settings(Path(where.config) if where.config else None, environ=os.environ, run=where.run)


def _look_around(loaded: "LoadedSettings") -> list[str]:
    """Warnings about the machine: missing paths, readable secrets, and concerns of the layout."""
    from podwatch.checkpoints.layouts import concerns
    from podwatch.cli.check.report import in_time
    from podwatch.domain.errors import ConfigurationError

    trainer = loaded.settings.trainer
    found: list[str] = []
    with contextlib.suppress(ConfigurationError, OSError, TimeoutError):  # `podwatch check` reports those
        found += [f"{concern.what}: {concern.fix}" for concern in in_time(lambda: concerns(loaded.settings))]
    cwd = trainer.cwd or trainer.output_dir.parent
    if trainer.command and not cwd.is_dir():
        found.append(f"[trainer] cwd {cwd} does not exist")
    if trainer.env_file is not None:
        try:
            if trainer.env_file.stat().st_mode & 0o077:
                found.append(
                    f"[trainer] env_file {trainer.env_file} can be read by other users: chmod 600 {trainer.env_file}"
                )
        except OSError as error:
            found.append(f"[trainer] env_file {trainer.env_file}: {error.strerror}")
    return found


def _env_lines(secrets: Mapping[str, str]) -> str:
    """NAME=value lines, with commented lines for a missing B2 key. A value with blanks or quotes is double-quoted with
    backslashes, as systemd reads it."""
    lines = ["# Secrets, written by `podwatch config init`. Keep mode 0600. Training never receives the B2 key."]
    for name in ("B2_APPLICATION_KEY_ID", "B2_APPLICATION_KEY"):
        if name not in secrets:
            lines.append(f"# {name}=")
    for name, value in secrets.items():
        if "\n" in value:
            continue
        plain = bool(value) and all(character.isalnum() or character in "_-./:+=,@%" for character in value)
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        lines.append(f"{name}={value}" if plain else f'{name}="{escaped}"')
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str, mode: int) -> None:
    from podwatch.domain.errors import HostError
    from podwatch.system.files import atomic_write

    try:
        atomic_write(path, text, mode)
    except OSError as error:
        raise HostError(
            f"cannot write the file: {error.strerror}", where=str(path), fix="choose another path with -o"
        ) from error
