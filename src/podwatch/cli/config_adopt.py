"""``podwatch config adopt``: write the running trainer's command into the configuration file."""

import difflib
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import Where, clean, common, find_daemon, json_option, print_json

if TYPE_CHECKING:
    from podwatch.cli.detect import Trainer
    from podwatch.config.settings import Settings

_OF_THE_START = frozenset({"WANDB_RUN_ID", "WANDB_RESUME"})
"""Not adopted: podwatch sets the W&B run at each start."""
_ID_FLAG = re.compile(r"--[\w.-]*wandb[._-](?:id|resume)")
_PLACEHOLDERS = ("{step}", "{checkpoint}", "{resume_args}", "{output_dir}")


@dataclass(frozen=True, slots=True)
class Change:
    """``values`` by key path, as in the new file; ``notes`` for the operator; ``removed``: flags removed from the
    command."""

    values: Mapping[tuple[str, ...], Any]
    notes: tuple[str, ...] = field(default=())
    removed: tuple[str, ...] = field(default=())


@click.command("adopt", short_help="Write the running trainer's command into the configuration file.")
@common
@click.option("--pid", type=int, help="Use this process instead of the trainer that podwatch watches.")
@click.option("--dry-run", is_flag=True, help="Only show the change.")
@json_option
def adopt(where: Where, pid: int | None, dry_run: bool, as_json: bool) -> None:
    """Write the running trainer's command, directory and relevant environment into the configuration file.

    podwatch keeps comments and all other settings, and removes resume flags, because it adds its own. It never writes
    a secret: it refuses a command with a secret argument, and only lists the names of secret variables.
    """
    from podwatch.cli import detect
    from podwatch.client.trusted import read_trusted
    from podwatch.config.edit import set_values
    from podwatch.config.loading import load_settings, load_text
    from podwatch.domain.errors import ConfigurationError

    loaded = load_settings(Path(where.config) if where.config else None, environ=os.environ, run=where.run)
    if loaded.path is None:
        raise ConfigurationError("configuration file not found", fix="write one with `podwatch config init`")
    path = loaded.path.resolve()
    before = _state(path)
    text = read_trusted(path)
    trainer = detect.read_trainer(pid if pid is not None else _running(where))
    _same_user(trainer.pid, loaded.settings.trainer.user)
    change = proposed(trainer, loaded.settings, ours=_ours(trainer.pid))
    edited = set_values(text, change.values, where=str(path)) if change.values else text
    load_text(edited, path, environ=os.environ)  # never write a file that does not load
    lines = _diff(text, edited, path)
    if edited != text and not dry_run:
        _replace(path, edited, before)
    if as_json:
        print_json(
            {"schema_version": 1, "path": str(path), "pid": trainer.pid, "changed": edited != text, "dry_run": dry_run,
             "diff": lines, "removed_flags": list(change.removed), "notes": list(change.notes)}
        )  # fmt: skip
        return
    for line in (*lines, *change.notes):
        click.echo(clean(line))
    if edited == text:
        click.echo(f"{path} already has the command of pid {trainer.pid}: nothing to change")
    elif dry_run:
        click.echo(f"{path} is unchanged (--dry-run)")
    else:
        click.echo(f"wrote {path}; to apply it to a running podwatch: `systemctl reload podwatch`, or send SIGHUP")


def proposed(trainer: "Trainer", settings: "Settings", *, ours: bool) -> Change:
    """The change to write. Pure except for the layout, which reads files. ``ours``: podwatch started the trainer.
    ConfigurationError for a command that must not be written."""
    from podwatch.domain.errors import ConfigurationError

    argv, removed = _without_resume(trainer, settings, ours=ours)
    if len(argv) == 1 and ("::" in argv[0] or " " in argv[0]):
        raise ConfigurationError(
            "cannot read the arguments: the process replaced its command line by a title",
            where=f"pid {trainer.pid}: {argv[0]}",
            fix="give the process that started it with --pid, or write [trainer] command by hand",
        )
    if ours and any(p in word for word in settings.trainer.command for p in _PLACEHOLDERS):
        raise ConfigurationError(
            "cannot adopt: [trainer] command has placeholders, and the running command has values in their place",
            fix="edit the file by hand; `podwatch restart --dry-run` shows the difference",
        )
    _refuse_secrets(argv)
    now = settings.trainer
    values: dict[tuple[str, ...], Any] = {}
    if argv != now.command:
        values["trainer", "command"] = argv
    if trainer.cwd != now.cwd:
        values["trainer", "cwd"] = str(trainer.cwd)
    env = {k: v for k, v in trainer.env.items() if k not in _OF_THE_START and now.env.get(k) != v}
    if ours:  # podwatch built its environment: only configured variables can differ
        env = {k: v for k, v in env.items() if k in now.env}
    if env:
        values["trainer", "env"] = {**now.env, **env}
    notes = (
        [f"removed from the command: {' '.join(removed)} (podwatch adds its own resume arguments)"] if removed else []
    )
    missing = sorted(name for name in trainer.secrets if name not in _names_in(now.env_file))
    if missing and not ours:
        notes.append(
            f"not written, because they look like secrets: {', '.join(missing)}. Add those that training needs to the"
            f" file of [trainer] env_file ({now.env_file or 'not set'}), mode 0600"
        )
    return Change(values, tuple(notes), removed)


def _without_resume(trainer: "Trainer", settings: "Settings", *, ours: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The command of a fresh start, and the removed flags: those that ``config init`` removes, and the layout's own."""
    from podwatch.checkpoints.layouts import make_layout
    from podwatch.checkpoints.layouts.command_line import strip_flags

    argv, removed = trainer.argv, list(trainer.removed)
    taken = make_layout(settings).resume_command(argv, None, settings.trainer.resume_args, {}).removed
    flags = tuple(word.partition("=")[0] for word in taken if word.startswith("-"))
    keys = [word for word in taken if not word.startswith("-") and "=" in word]
    argv, gone = strip_flags(argv, flags)
    removed += gone
    removed += [word for word in argv if word in keys]
    argv = tuple(word for word in argv if word not in keys)
    if ours:
        ids = sorted({word.partition("=")[0] for word in argv if _ID_FLAG.fullmatch(word.partition("=")[0])})
        argv, gone = strip_flags(argv, ids)
        removed += gone
    return argv, tuple(removed)


def _refuse_secrets(argv: Sequence[str]) -> None:
    from podwatch.config.keys import looks_secret
    from podwatch.domain.errors import ConfigurationError
    from podwatch.incidents import scrub
    from podwatch.policy.command_diff import grouped

    for group in grouped(argv):
        flag, _, value = group.replace(" ", "=", 1).partition("=")
        if scrub(group) != group or (value and flag.startswith("-") and looks_secret(flag, value)):
            raise ConfigurationError(
                f"an argument of the running command looks like a secret: {scrub(flag)}",
                where="nothing was written: a configuration is shown, copied and committed",
                fix="put the value into the file of [trainer] env_file (mode 0600) under the name that the trainer"
                " reads (WANDB_API_KEY, HF_TOKEN, ...), remove the argument from the command, and restart training",
            )


def _running(where: Where) -> int:
    """The pid of the launcher that podwatch watches; without a daemon, of the only trainer that runs here."""
    from podwatch.cli import detect
    from podwatch.client.api import fetch_status
    from podwatch.domain.errors import HostError, UsageError

    found = find_daemon(where)
    status = fetch_status(found.endpoint.http_url) if found is not None else None
    if status is not None:
        training = status.get("training") or {}
        if not training.get("alive") or not training.get("pid"):
            raise HostError("podwatch watches no running trainer", fix="start it, or give a process with --pid")
        return int(training["pid"])
    trainers = detect.find_trainers()
    if not trainers:
        raise HostError("no running trainer found", fix="give its process with --pid")
    if len(trainers) > 1:
        from podwatch.incidents import scrub

        listing = "; ".join(f"{number}: {scrub(command)[:80]}" for number, command in trainers)
        raise UsageError("several trainers are running", where=listing, fix="choose one with --pid")
    return trainers[0][0]


def _same_user(pid: int, user: str) -> None:
    """Refuse a command of another user: podwatch would start it as its own user, often root."""
    import pwd

    from podwatch.domain.errors import ConfigurationError, HostError

    try:
        runs_as = Path(f"/proc/{pid}").stat().st_uid
        wanted = pwd.getpwnam(user).pw_uid if user else os.geteuid()
    except (OSError, KeyError) as error:
        raise HostError(f"cannot find the user of the process: {error}", where=f"pid {pid}") from error
    if runs_as != wanted:
        raise ConfigurationError(
            f"the process runs as uid {runs_as}, but podwatch would start its command as uid {wanted}",
            where=f"pid {pid}",
            fix="if it is your training, set [trainer] user to that user first",
        )


def _ours(pid: int) -> bool:
    from podwatch.system import procfs

    return procfs.environment_value(pid, "PODWATCH_START_ID") is not None


def _names_in(env_file: Path | None) -> frozenset[str]:
    from podwatch.domain.errors import PodwatchError
    from podwatch.trainer.environment import read_env_file

    try:
        return frozenset(read_env_file(env_file)) if env_file is not None else frozenset()
    except (OSError, PodwatchError):
        return frozenset()


def _diff(old: str, new: str, path: Path) -> list[str]:
    """A unified diff, scrubbed: the file can contain secrets by mistake."""
    from podwatch.incidents import scrub

    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), str(path), f"{path} (adopted)", lineterm="", n=1)
    return [scrub(line) for line in lines]


def _state(path: Path) -> os.stat_result:
    from podwatch.domain.errors import ConfigurationError

    try:
        return path.stat()
    except OSError as error:
        raise ConfigurationError(f"cannot read the configuration: {error.strerror}", where=str(path)) from error


def _replace(path: Path, text: str, before: os.stat_result) -> None:
    """Replace the file atomically with its old mode and owner. Busy if another process changed it meanwhile."""
    from podwatch.domain.errors import Busy, HostError
    from podwatch.system.files import fsync_dir

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text.encode())
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
                file.flush()
                os.fsync(file.fileno())
            now = path.stat()
            if (now.st_ino, now.st_mtime_ns, now.st_size) != (before.st_ino, before.st_mtime_ns, before.st_size):
                raise Busy(
                    "another process changed the configuration meanwhile", where=str(path), fix="run the command again"
                )
            temporary.replace(path)
            fsync_dir(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise HostError(
            f"cannot write the configuration: {error.strerror}", where=str(path), fix="run as its owner or as root"
        ) from error
