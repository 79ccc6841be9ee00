"""``podwatch bootstrap``: from a bare pod to training, with what the run's last pod stored of its start."""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from podwatch.cli.common import Where, clean, common, find_daemon
from podwatch.cli.offline import checked_run_id
from podwatch.domain.errors import ConfigurationError, ExitCode, IntegrityError, RemoteError, UsageError
from podwatch.domain.times import size, span

if TYPE_CHECKING:
    from podwatch.cli.bootstrap_files import BarePod, PlannedFile
    from podwatch.config.settings import Settings
    from podwatch.store.objects.access import Access
    from podwatch.store.runs.start import StartTexts

ETC = Path("/etc/podwatch")
PATIENCE_SECONDS, RETRY_SECONDS = 600.0, 10.0
"""How long an unattended call waits for a store that does not answer, as `podwatch restore` does."""
KNOWN_PATIENCE_SECONDS = 30.0
"""The same where this pod has the files from an earlier call."""
KEY_FILE = "podwatch.env"
"""Beside podwatch.toml: NAME=value lines, mode 0600."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the command. ``digest``: the one passed by hand."""

    store: str
    run_id: str
    directory: Path
    trust: bool = False
    digest: str = ""
    detach: bool = False
    no_start: bool = False
    default_directory: bool = True
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def placed(self) -> Path:
        """The record of what an earlier call wrote here."""
        return self.directory / f"bootstrap-{self.run_id}.json"

    @property
    def unattended(self) -> bool:
        return self.trust or bool(self.digest)

    def allows(self, digest: str) -> bool:
        return self.trust or (bool(self.digest) and self.digest == digest)

    def again(self, *trust: str) -> str:
        """This call as a line to copy."""
        words = ["podwatch", "bootstrap", self.store, self.run_id, *trust]
        words += [] if self.default_directory else ["--dir", str(self.directory)]
        words += ["--detach"] if self.detach else []
        words += ["--no-start"] if self.no_start else []
        return shlex.join(words)


@click.command("bootstrap", short_help="From a bare pod to training, with what the store holds of the run.")
@common
@click.argument("store")
@click.argument("run_id", metavar="RUN")
@click.option("--trust", is_flag=True, help="Run what the store holds, whatever it is.")
@click.option("--digest", default="", help="Run it only if it has this digest, which a call without --trust shows.")
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for podwatch.toml. Default: /etc/podwatch as root, else the current directory.",
)
@click.option("--detach", is_flag=True, help="Run podwatch in the background.")
@click.option("--no-start", is_flag=True, help="Only write the files; then `podwatch install` or `podwatch run`.")
def command(
    where: Where,
    store: str,
    run_id: str,
    trust: bool,
    digest: str,
    directory: Path | None,
    detach: bool,
    no_start: bool,
) -> None:
    """Fetch podwatch.toml and the files of the training command from the store, show them with their digest, and, with
    --trust or that digest, write them to their places and continue as `podwatch run`. Who can write to the bucket
    decides what runs here: read docs/pods.md. The store's key comes from B2_APPLICATION_KEY_ID and
    B2_APPLICATION_KEY. A second call on this pod continues with the files that are here.

    Exit: 77 not trusted, or a key that can only read; 78 something must be filled in or decided first; 69 the store
    does not answer; else as `podwatch run`."""
    from podwatch.config.command_directory import absolute, current_directory

    if digest and (trust or len(digest) != 64):
        raise UsageError(
            "not a usable digest", where=f"--digest {digest}", fix="pass the 64 digits shown, without --trust"
        )
    here = directory or (ETC if os.geteuid() == 0 else current_directory())
    call = Call(
        store, checked_run_id(run_id), Path(os.path.normpath(absolute(here))), trust, digest.lower(),
        detach, no_start, directory is None, dict(os.environ),
    )  # fmt: skip
    if find_daemon(Where("", call.run_id)) is not None:
        click.echo(f"podwatch guards run {call.run_id} on this pod already: nothing to do")
        return
    _bootstrap(call)


def _bootstrap(call: Call) -> None:
    environ = dict(call.environ)
    placed, directory = _placed(call)
    key = _access(call)
    if key is not None:  # `podwatch run` reads no podwatch.env of its own
        from podwatch.store.objects.access import variables_of

        environ |= variables_of(key)
    fetched, readonly = _fetched(call, placed, key)
    if fetched is None:
        return _run(call, environ | {"PODWATCH_DIRECTORY": directory})
    digest, continuing = fetched.record.digest, bool(placed)
    files, settings, pod = _planned(call, fetched, continuing=continuing)
    _show(call, fetched, files, settings)
    if continuing and placed != digest:
        click.echo("the store holds a newer start of this run; this pod continues with the files that are here")
        click.echo(f"  (to take the stored ones: move the files and {clean(call.placed)} away, then repeat this)")
    missing = [file for file in files if file.state == "new"] if call.allows(digest) else []
    todo = _open(call, missing) if continuing else _problems(call, fetched, files, settings)
    if readonly:
        text = f"this key can only read, and a pod must write to the store to train this run: {readonly}"
        todo += [] if continuing else [text]
        click.echo(clean(text), err=True)
    if not (call.allows(digest) or (continuing and call.allows(placed))):
        _refuse(call, digest, todo)
    if todo:
        _stop(todo, code=ExitCode.PERMISSION if readonly else ExitCode.CONFIGURATION)
    if call.allows(digest):
        _write(call, fetched, files, pod, continuing=continuing)
    return _run(call, environ | {"PODWATCH_DIRECTORY": directory if continuing else fetched.record.directory})


# -- the store -------------------------------------------------------------------------------------------------------


def _fetched(call: Call, placed: str, key: "Access") -> "tuple[StartTexts | None, str]":
    """What the store holds, and why the key can only read. None: the store does not help, and this pod has the files of
    an earlier call that this call allows."""
    from podwatch.store.keys import RunKeys
    from podwatch.store.objects.open import open_objects, parse_url
    from podwatch.store.runs.start import fetch_start, why_not_writable

    keys = RunKeys(call.run_id, parse_url(call.store).prefix)
    local = bool(placed) and call.allows(placed)
    patience = KNOWN_PATIENCE_SECONDS if local else PATIENCE_SECONDS if call.unattended else 0.0
    store = open_objects(call.store, key, connections=1)
    end = time.monotonic() + patience
    try:
        while True:
            try:
                return fetch_start(store, keys), why_not_writable(store, keys)
            except RemoteError as error:
                if error.transient and time.monotonic() < end:
                    click.echo(f"{clean(error)}; podwatch retries in {span(RETRY_SECONDS)}", err=True)
                    time.sleep(min(RETRY_SECONDS, max(0.1, end - time.monotonic())))
                    continue
                if not local:
                    raise
                click.echo(f"{clean(error)}\npodwatch continues with the files that are on this pod")
                return None, ""
    finally:
        store.close()


def _access(call: Call) -> "Access":
    """From DIR/podwatch.env (as `podwatch install` writes it), or the environment."""
    from podwatch.store.objects.access import access_from

    return access_from(call.store, call.environ, call.directory / KEY_FILE)


# -- plan ------------------------------------------------------------------------------------------------------------


def _placed(call: Call) -> tuple[str, str]:
    """The digest whose files an earlier call wrote here, and the directory that relative paths are resolved against;
    empty if none did, or podwatch.toml is gone."""
    from podwatch.config.trusted_files import read_trusted
    from podwatch.store.runs.start_record import CONFIG_NAME, Placed

    with suppress(OSError, ConfigurationError, IntegrityError):
        if (call.directory / CONFIG_NAME).is_file():
            found = Placed.from_bytes(read_trusted(call.placed).encode())
            return found.digest, found.directory
    return "", ""


def _planned(
    call: Call, fetched: "StartTexts", *, continuing: bool
) -> "tuple[list[PlannedFile], Settings | None, BarePod]":
    """The plan, and the settings that the configuration gives; None while it has placeholders and does not load."""
    from dataclasses import replace

    from podwatch.cli.bootstrap_files import BarePod, plan
    from podwatch.store.runs.start_record import USUAL_ROOTS

    roots = dict.fromkeys([str(call.directory), *USUAL_ROOTS])
    with suppress(RuntimeError):  # a user without a home
        if Path.home() != Path("/"):
            roots[str(Path.home())] = None
    pod = BarePod(call.directory, tuple(roots))
    files = plan(fetched, pod, call.environ)
    settings = _settings(call, fetched, files[0], continuing=continuing)
    if settings is not None:
        trainer = settings.trainer
        own = (trainer.output_dir, trainer.checkpoint_dir, settings.state_dir)
        pod = replace(pod, foreign=tuple(str(path) for path in own if path is not None))
        files = plan(fetched, pod, call.environ)
    return files, settings, pod


def _settings(call: Call, fetched: "StartTexts", config: "PlannedFile", *, continuing: bool) -> "Settings | None":
    from podwatch.config.loading import load_text

    if config.state == "refused":
        return None
    environ = {**call.environ, "PODWATCH_DIRECTORY": fetched.record.directory}
    text = config.target.read_text() if continuing and config.state == "differs" else config.text
    try:
        return load_text(text, config.target, environ=environ).settings
    except ConfigurationError:
        if config.open or continuing:  # `podwatch run` uses the last good copy
            return None
        raise


def _problems(call: Call, fetched: "StartTexts", files: "list[PlannedFile]", settings: "Settings | None") -> list[str]:
    """What the operator must do before anything starts, a line each."""
    from podwatch.store.objects.open import parse_url

    found = []
    for file in files:
        if file.state == "refused":
            found.append(f"{file.target} is not written, because {file.reason}: copy it there yourself")
        elif file.state == "differs":
            found.append(f"{file.target} exists with another content, which podwatch does not replace: move it away")
    found += _open(call, files)
    for path, reason in ((one.path, one.reason) for one in fetched.record.left_out):
        if not Path(path).exists():
            found.append(f"{path} is named by the command and not stored ({clean(reason)}): copy it to this pod")
    if settings is None:
        return found
    if settings.run_id != call.run_id:
        found.append(f"podwatch.toml is of run {settings.run_id}: pass the right name")
    if not settings.sync.store or parse_url(settings.sync.store) != parse_url(call.store):
        own = settings.sync.store or "no store"
        found.append(f"podwatch.toml names {own}: bootstrap from that")
    return found + _missing(settings)


def _open(call: Call, files: "list[PlannedFile]") -> list[str]:
    """The placeholders that nothing fills, a line each."""
    found = []
    for file in files:
        for hole, reason in file.open if file.state == "new" else ():
            name = f" ({hole.key})" if hole.key else ""
            found.append(f"{file.target}:{hole.line}{name} was removed as a secret: {reason}")
    if found:
        shown = shlex.join(["podwatch", "runs", "show", call.run_id, "--store", call.store, "--files"])
        found.append(f"a file that you write to its place yourself is used as it is; as stored: {shown}")
    return found


def _missing(settings: "Settings") -> list[str]:
    """Parts of the trainer that this pod lacks: its image, not the store, has to bring them."""
    trainer = settings.trainer
    if not trainer.command:
        return ["podwatch.toml has no [trainer] command: podwatch can only attach to training that you start"]
    cwd, program = trainer.cwd or trainer.output_dir.parent, trainer.command[0]
    if trainer.cwd is not None and not cwd.is_dir():
        return [f"{cwd}, the command's directory, is not on this pod: rent it with the trainer's image"]
    path = trainer.env.get("PATH") or os.environ.get("PATH")
    if not (
        os.access(cwd / program, os.X_OK) if "/" in program else trainer.env_file or shutil.which(program, path=path)
    ):
        return [f"{program}, the command's program, is not on this pod: rent it with the trainer's image"]
    return []


# -- what the operator sees ------------------------------------------------------------------------------------------


def _show(call: Call, fetched: "StartTexts", files: "list[PlannedFile]", settings: "Settings | None") -> None:
    from podwatch.config.loading import commands
    from podwatch.domain.secrets import scrub, scrub_argv

    record = fetched.record
    click.echo(f"run {call.run_id} in {clean(call.store)}, stored by {clean(record.producer)}")
    if settings is not None:
        click.echo(f"  command    {clean(shlex.join(scrub_argv(settings.trainer.command)))}")
        for key, command in commands(settings):
            if key != "trainer.command":
                click.echo(f"  also runs  {clean(shlex.join(scrub_argv(command)))}   ({clean(key)})")
        click.echo(f"  as         {clean(_users(settings))}")
        for name, value in settings.trainer.env.items():
            click.echo(f"  with       {clean(name)}={clean(scrub(value))}")
        click.echo(f"  in         {clean(settings.trainer.cwd or settings.trainer.output_dir.parent)}")
        click.echo(f"  output_dir {clean(settings.trainer.output_dir)}")
    else:
        click.echo("  command    not known yet: podwatch.toml cannot be used as it is stored. Read the copy of it")
    states = {"new": "", "here": "  (on this pod already)", "differs": "  (another content is on this pod)",
              "refused": "  (refused)"}  # fmt: skip
    for file in files:
        digest = f"{size(file.source.size)}, sha256 {file.source.sha256[:16]}"
        click.echo(f"  file       {clean(file.target)}  {digest}{states[file.state]}")
    for key, value in record.settings.items():
        click.echo(f"  the last pod also had {clean(key)} = {clean(value)} (environment or --set; not used here)")
    click.echo(f"  digest     {record.digest}")


def _users(settings: "Settings") -> str:
    """The users that the commands run as."""
    sections = (settings.evaluation, settings.notify, *((settings.wandb,) if settings.wandb.enabled else ()))
    own = [settings.trainer.user, *map(settings.user_of, sections)]
    users = {*own, *map(settings.user_of, settings.hooks)}
    return ", ".join(sorted(user or "the user of podwatch" for user in users))


def _refuse(call: Call, digest: str, todo: list[str]) -> NoReturn:
    line = call.again("--digest", digest)
    if call.digest:
        click.echo(f"podwatch: the store holds another start than the digest that you passed ({call.digest})", err=True)
    click.echo("No file was written, and training was not started. Read the files before you trust them.")
    click.echo(f"  to write them and start:  {line}")
    if todo:
        _stop(todo, code=ExitCode.PERMISSION)
    raise click.exceptions.Exit(int(ExitCode.PERMISSION))


def _stop(todo: list[str], *, code: ExitCode) -> NoReturn:
    click.echo("podwatch: before training can start here, this must be done:", err=True)
    for line in todo:
        click.echo(f"  - {clean(line)}", err=True)
    raise click.exceptions.Exit(int(code))


# -- writing, and on to `podwatch run` --------------------------------------------------------------------------------


def _write(call: Call, fetched: "StartTexts", files: "list[PlannedFile]", pod: "BarePod", *, continuing: bool) -> None:
    from podwatch.cli.bootstrap_files import write
    from podwatch.store.runs.start_record import Placed
    from podwatch.system.files import atomic_write

    for file in reversed(files):  # podwatch.toml last: with it the pod counts as bootstrapped
        if file.state == "new":
            write(file, pod.roots)
            click.echo(f"wrote {clean(file.target)}")
    if not continuing:
        placed = Placed(fetched.record.digest, fetched.record.directory)
        atomic_write(call.placed, placed.to_bytes(), 0o600)


def _run(call: Call, environ: dict[str, str]) -> None:
    """Become ``podwatch run``; with --no-start only show it."""
    from podwatch.store.runs.start_record import CONFIG_NAME

    arguments = ["--config", str(call.directory / CONFIG_NAME), "run"]
    arguments += ["--detach"] if call.detach else []
    if call.no_start:
        click.echo(f"not started; to start: {shlex.join(['podwatch', *arguments])}   (or: podwatch install)")
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-P", "-m", "podwatch", *arguments], environ)  # noqa: S606 - argv
