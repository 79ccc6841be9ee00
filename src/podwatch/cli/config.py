"""``podwatch config show | validate | init``."""

import contextlib
import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podwatch.cli.common import SuggestingGroup, Where, common, json_option, print_json, say

if TYPE_CHECKING:
    from podwatch.cli.detect_machine import Trainer
    from podwatch.config.loading import LoadedSettings


@click.group(cls=SuggestingGroup)
def config() -> None:
    """Show, check or write the configuration."""


@config.command(short_help="Print the effective settings and their sources.")
@common
@json_option
def show(where: Where, as_json: bool) -> None:
    """Print the effective settings with meaning and source. Secrets are masked."""
    from podwatch.config.explain import render_toml, to_json

    loaded = _load(where)
    head = f"# from {loaded.path or 'environment and flags only'}; commented lines show defaults\n"
    lines = [head, render_toml(loaded.settings, loaded.sources).removesuffix("\n")]
    say(to_json(loaded.settings, loaded.sources, loaded.path), lines, as_json=as_json)


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
        print_json({"schema_version": 1, "ok": False, "problems": problems})
        raise SystemExit(int(error.exit_code)) from error
    warnings = [*loaded.warnings, *_look_around(loaded)]
    run_id, path = loaded.settings.run_id, str(loaded.path) if loaded.path else None
    document = {"schema_version": 1, "ok": True, "path": path, "run_id": run_id, "warnings": warnings}
    lines = [f"ok: {path or 'environment'} (run {run_id})", *(f"warning: {warning}" for warning in warnings)]
    say(document, lines, as_json=as_json)


@config.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write. Default: podwatch.toml.")
@click.option("--force", is_flag=True, help="Overwrite existing files.")
@click.option("--pid", type=int, help="Copy command, directory and environment of this process; print, without -o.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def init(output: Path | None, force: bool, pid: int | None, command: tuple[str, ...]) -> None:
    """Write a configuration for this machine.

    It has the command, working directory and relevant environment of a running trainer, or COMMAND with those of this
    shell. Secrets go into a separate file with mode 0600. On a terminal, podwatch asks for the run's name and the
    store.

    --pid without -o prints the configuration of that process and writes nothing: copy from it what has changed.
    """
    from podwatch.cli.detect_machine import propose
    from podwatch.config.env_files import env_lines
    from podwatch.config.loading import load_settings
    from podwatch.config.store_kinds import kind_of

    if command and pid is not None:
        raise click.UsageError("--pid and a command cannot be used together")
    if pid is not None and output is None:
        _print(pid)
        return
    output, env_file = _files(output or Path("podwatch.toml"), force=force)
    trainer = _trainer(command, pid)
    proposal = propose(trainer)
    overrides, notes = proposal.settings, proposal.notes | _NOT_BACKED_UP
    secrets, unwritable = _secrets(env_file, {} if trainer is None else trainer.secrets)
    overrides["trainer.env_file"] = str(env_file)
    notes["trainer.env_file"] = f"names inside: {', '.join(secrets)}" if secrets else "mode 0600, for keys and tokens"
    if sys.stdin.isatty() and sys.stdout.isatty():
        _ask(overrides)
    text = _text(output, overrides, notes)
    _write(env_file, env_lines(secrets), 0o600)
    click.echo(f"wrote {env_file} (mode 0600; secrets: {len(secrets)})")
    if unwritable:
        names = ", ".join(unwritable)
        click.echo(f"not written: {names}: not one line of UTF-8 text. If training needs it, give it another way")
    _write(output, text, 0o644)
    settings = load_settings(output, environ={}).settings
    click.echo(f"wrote {output} (run {settings.run_id}, layout {settings.trainer.layout})")
    if trainer is None:
        click.echo(
            "no running trainer of yours found: fill in [trainer] command, or repeat with its command, such as"
            " `podwatch config init --force -- uv run rl @ config.toml`, or with --pid PID for another user's process"
        )
    else:
        for line in _about_resume(trainer.argv, trainer.removed):
            click.echo(line)
    if proposal.no_gpu:
        click.echo(proposal.no_gpu)
    kind = kind_of(settings.sync.store)
    if kind is not None and not set(kind.key) <= secrets.keys():
        click.echo(f"put the store's key into {env_file}: {' and '.join(kind.key)}")
    store = "" if settings.sync.store else "set [sync] store, "
    click.echo(f"next: read the file, {store}then run `podwatch check -c {output}`")


def _text(output: Path, overrides: Mapping[str, object], notes: Mapping[str, str]) -> str:
    """The configuration, which loads."""
    from podwatch.config.explain import render_brief
    from podwatch.config.loading import load_text

    proposal = load_text("", output, environ={}, overrides=overrides).settings
    header = "All settings: `podwatch config show`; reasons: docs/configuration.md."
    body = render_brief(proposal, notes=notes, hints=_STILL_TO_SAY)
    text = f"# Written by `podwatch config init`. {header}\n{body}"
    load_text(text, output, environ={})
    return text


def _print(pid: int) -> None:
    """The configuration of a running trainer on stdout; on stderr what is not in it."""
    from podwatch.cli.detect_machine import propose

    trainer = _trainer((), pid)
    assert trainer is not None
    proposal = propose(trainer)
    text = _text(Path("podwatch.toml"), proposal.settings, proposal.notes | _NOT_BACKED_UP)
    click.echo(text, nl=False)
    more = [*_about_resume(trainer.argv, trainer.removed), *([proposal.no_gpu] if proposal.no_gpu else [])]
    if trainer.secrets:
        names = ", ".join(sorted(trainer.secrets))
        more.append(f"not printed, because they look like secrets: {names}: put them into [trainer] env_file")
    for line in more:
        click.echo(line, err=True)


def _files(output: Path, *, force: bool) -> tuple[Path, Path]:
    """The configuration and the env file to write, absolute. UsageError where that would damage something."""
    from podwatch.config.command_directory import absolute
    from podwatch.config.trusted_files import check_trusted
    from podwatch.domain.errors import UsageError

    output = absolute(output)
    with contextlib.suppress(OSError):  # writing says what is wrong
        check_trusted(output.parent, "the directory of the configuration")
    if _kind(output) == stat.S_IFDIR:
        raise UsageError(
            "it is a directory", where=str(output), fix=f"name a file in it: -o {output / 'podwatch.toml'}"
        )
    env_file = output.with_suffix(".env")
    if env_file == output:
        raise UsageError(
            "podwatch.env beside it would be the same file", where=str(output), fix="end the name in .toml"
        )
    for file in (output, env_file):
        if _kind(file) not in (stat.S_IFREG, None):
            raise UsageError("it is not a regular file", where=str(file), fix="choose another with -o")
        if os.path.lexists(file) and not force:
            raise UsageError("the file already exists", where=str(file), fix="choose another with -o, or use --force")
    return output, env_file


def _kind(file: Path) -> int | None:
    """The type of the file, as ``stat.S_IFMT`` gives it; None where there is none, or where it cannot be seen."""
    try:
        return stat.S_IFMT(file.stat().st_mode)
    except OSError:
        return None


def _about_resume(argv: Sequence[str], removed: Sequence[str]) -> list[str]:
    """What happened to the resume flags: those that were removed, and one that podwatch does not understand."""
    from podwatch.cli.detect_machine import unclear_resume
    from podwatch.domain.secrets import scrub

    lines = []
    if removed:
        lines.append(f"removed from the command: {scrub(' '.join(removed))} (podwatch adds its own resume arguments)")
    if unclear := unclear_resume(argv):
        lines.append(
            f"left in the command: {scrub(' '.join(unclear))} (podwatch cannot tell whether {scrub(unclear[1])} is the"
            f" value of {unclear[0]}): remove from [trainer] command what makes a fresh start resume"
        )
    return lines


def _trainer(command: Sequence[str], pid: int | None) -> "Trainer | None":
    """The trainer to configure: the given command, the given process, or the only one that runs. Raises UsageError, and
    ConfigurationError for a secret in its arguments."""
    from podwatch.cli import detect_machine
    from podwatch.config.env_files import is_text
    from podwatch.domain.errors import UsageError

    trainer = detect_machine.planned_trainer(command, os.environ) if command else None
    if trainer is None:
        found = detect_machine.find_trainers() if pid is None else ((pid, ""),)
        if len(found) > 1:
            listing = "; ".join(f"{number}: {words[:80]}" for number, words in found)
            raise UsageError("several trainers are running", where=listing, fix="choose one with --pid PID -o FILE")
        trainer = _running(found[0][0]) if found else None
    if trainer is not None:
        _refuse_secrets(trainer.argv)
        if odd := next((word for word in trainer.argv if not is_text(word)), ""):
            raise UsageError("an argument is no UTF-8", where=ascii(odd), fix="give the file or directory another name")
    return trainer


_OF_THE_START = frozenset({"WANDB_RUN_ID", "WANDB_RESUME"})
_ID_FLAG = re.compile(r"--[\w.-]*wandb[._-](?:id|resume)")
"""podwatch sets the W&B run at each start."""


def _running(pid: int) -> "Trainer":
    """A trainer that runs. What podwatch added to a start of its own is left out. HostError for a process that has
    replaced its arguments by a title."""
    from podwatch.checkpoints.command import without_settings
    from podwatch.cli.detect_machine import read_trainer
    from podwatch.domain.errors import HostError
    from podwatch.recovery.command_changed import renamed
    from podwatch.system import procfs

    found = read_trainer(pid)
    if renamed(found.argv):
        raise HostError(
            "cannot read the arguments: the process replaced its command line by a title",
            where=f"pid {pid}: {found.argv[0]}",
            fix="give the process that started it with --pid",
        )
    if procfs.environment_value(pid, "PODWATCH_START_ID") is None:
        return found
    flags = (word.partition("=")[0] for word in found.argv)
    argv, gone = without_settings(found.argv, sorted({flag for flag in flags if _ID_FLAG.fullmatch(flag)}))
    env = {name: value for name, value in found.env.items() if name not in _OF_THE_START}
    return replace(found, argv=argv, removed=(*found.removed, *gone), env=env)


_NOT_BACKED_UP = {"sync.store": "without a store, checkpoints exist on this pod only"}
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
    from podwatch.config.store_kinds import KINDS, kind_of
    from podwatch.domain.safe_names import valid_run_id

    def run_name(text: str) -> str:
        if not valid_run_id(text):
            raise click.UsageError("use letters, digits, '.', '_' or '-', starting with a letter or digit")
        return text

    def store(text: str) -> str:
        text = text.strip()
        added = text.partition("://")[0] in plugins.names(plugins.STORES)
        if text and kind_of(text) is None and not added:
            schemes = " or ".join(f"{scheme}://" for scheme in KINDS)
            raise click.UsageError(f"start with {schemes}, for example b2://my-bucket")
        return text

    proposed = str(overrides["run_id"])
    overrides["run_id"] = click.prompt("name of the run", default=proposed, value_proc=run_name)
    question = "store, such as b2://my-bucket (Enter for none: checkpoints exist on this pod only)"
    answer = click.prompt(question, default="", show_default=False, value_proc=store)
    if answer:
        overrides["sync.store"] = answer


def _secrets(env_file: Path, found: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """``found`` and the other variables of an existing file, so that ``--force`` keeps a key that was filled in; and
    the names in ``found`` that the file cannot hold."""
    from podwatch.config.env_files import fits_a_line, read_env_file

    kept = read_env_file(env_file) if os.access(env_file, os.F_OK) else {}
    fit = {name: value for name, value in found.items() if fits_a_line(value)}
    return {**kept, **fit}, tuple(sorted(found.keys() - fit.keys()))


def _load(where: Where) -> "LoadedSettings":
    from podwatch.config.loading import load_settings

    return load_settings(where.path, environ=os.environ, run=where.run)


def _look_around(loaded: "LoadedSettings") -> list[str]:
    """Warnings about what a reader of the file cannot see: readable secrets, and concerns of the layout."""
    from podwatch.checkpoints.trainers import concerns
    from podwatch.domain.errors import ConfigurationError
    from podwatch.system.blocking_calls import in_time

    trainer = loaded.settings.trainer
    found: list[str] = []
    with contextlib.suppress(ConfigurationError, OSError, TimeoutError):  # `podwatch check` reports those
        found += [f"{concern.what}: {concern.fix}" for concern in in_time(lambda: concerns(loaded.settings))]
    if trainer.env_file is not None:
        try:
            if trainer.env_file.stat().st_mode & 0o077:
                found.append(
                    f"[trainer] env_file {trainer.env_file} can be read by other users: chmod 600 {trainer.env_file}"
                )
        except OSError as error:
            found.append(f"[trainer] env_file {trainer.env_file}: {error.strerror}")
    return found


def _write(path: Path, text: str, mode: int) -> None:
    from podwatch.domain.errors import HostError
    from podwatch.system.files import atomic_write

    try:
        atomic_write(path, text, mode)
    except OSError as error:
        raise HostError(
            f"cannot write the file: {error.strerror}", where=str(path), fix="choose another path with -o"
        ) from error


def _refuse_secrets(argv: Sequence[str]) -> None:
    from podwatch.config.setting_names import looks_secret
    from podwatch.domain.errors import ConfigurationError
    from podwatch.domain.secrets import scrub
    from podwatch.recovery.command_diff import grouped

    for group in grouped(argv):
        flag, _, value = group.replace(" ", "=", 1).partition("=")
        if scrub(group) != group or (value and flag.startswith("-") and looks_secret(flag, value)):
            raise ConfigurationError(
                f"an argument of the command looks like a secret: {scrub(flag)}",
                where="nothing was written: a configuration is shown, copied and committed",
                fix="put the value into the file of [trainer] env_file (mode 0600) under the name that the trainer"
                " reads (WANDB_API_KEY, HF_TOKEN, ...), and start training without the argument",
            )
