"""``podwatch install``: the systemd unit for this configuration (systemd/README.md explains the unit).

The shipped unit file is the same everywhere. The values of this machine (executable, paths, configuration file) are in
the unit's ExecStart line and in one drop-in. Installing is idempotent.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podwatch.cli.common import Where, clean, common
from podwatch.domain.errors import ConfigurationError, HostError, InternalError, PermissionDenied, UsageError

if TYPE_CHECKING:
    from podwatch.config.settings import Settings

ETC = Path("/etc/podwatch")
UNITS = Path("/etc/systemd/system")
BOOTED = Path("/run/systemd/system")
"""Exists if and only if systemd is the running init (sd_booted(3))."""


RESTART_STEPS_SINCE = 254
"""The first systemd with RestartSteps= and RestartMaxDelaySec=."""


BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, slots=True)
class Plan:
    """The changes of an installation. ``files``: (path, text); ``make``: podwatch's own directories to create."""

    service: str
    files: tuple[tuple[Path, str], ...]
    make: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


@click.command("install", short_help="Install podwatch as a systemd service.")
@common
@click.option("--dry-run", is_flag=True, help="Only show the files that would be written.")
def command(where: Where, dry_run: bool) -> None:
    """Run podwatch as a systemd service: write the unit and a drop-in for this configuration. Needs root."""
    if not dry_run:
        _require_systemd()
    settings, config = _load(where)
    plan = plan_install(settings, config, executable(), name=where.run, systemd=systemd_version())
    if dry_run:
        _show(plan)
        return
    changed = _write(plan)
    _systemctl("daemon-reload")
    for note in plan.notes:
        click.echo(f"note: {clean(note)}")
    _next_steps(plan.service, changed=changed)


# -- plan of an installation -----------------------------------------------------------------------------------------


def plan_install(settings: "Settings", config: Path, command: list[str], *, name: str = "", systemd: int = 0) -> Plan:
    """The plan for a configuration. With ``name`` an instance, podwatch@NAME. ``systemd``: its version, 0 if unknown.

    ConfigurationError or HostError if the service would fail at its first start.
    """
    from podwatch.domain.manifest import valid_run_id

    if name and not valid_run_id(name):
        raise UsageError("not a valid service name", where=f"--run {name}", fix="use letters, digits, . _ -")
    if config.stat().st_uid != 0:
        raise ConfigurationError(
            "the service runs as root and only reads a configuration that belongs to root",
            where=str(config),
            fix=f"chown root {config}",
        )
    service, unit = (f"podwatch@{name}", "podwatch@.service") if name else ("podwatch", "podwatch.service")
    usual = config == ETC / (f"{name}.toml" if name else "podwatch.toml")
    writable, make = writable_paths(settings)
    run = [*command, *(["--run", "%i"] if name else []), "run"]
    dropin = [
        "# Written by `podwatch install` from the configuration; run it again after a path there changes.",
        "[Unit]",
        f"RequiresMountsFor={' '.join(quote(p) for p in (*writable, config))}",
        "",
        "[Service]",
        f"ReadWritePaths={' '.join(quote(p) for p in writable)}",
    ]
    if systemd >= RESTART_STEPS_SINCE:  # an older systemd warns about an unknown setting at every reload
        dropin += ["RestartSteps=6", "RestartMaxDelaySec=1min"]
    if not usual:
        dropin += ["ExecStart=", f"ExecStart={exec_line([*command, '--config', str(config), 'run'])}"]
    files = (
        (UNITS / unit, _with_exec(_shipped(unit), exec_line(run))),
        (UNITS / f"{service}.service.d" / "10-paths.conf", "\n".join(dropin) + "\n"),
    )
    return Plan(service, files, make, tuple(_notes(settings, command, name)))


def writable_paths(settings: "Settings") -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The paths that the service must be able to write, without nested ones; and the directories to create first.

    The *parent* of the output directory: two sibling entries would be two mounts, and a rename between them fails with
    EXDEV. For a directory directly below /, only the directory itself and podwatch's directory beside it, because /
    would undo ProtectSystem. systemd fails the start for an entry that does not exist (status 226).
    """
    from podwatch.stores.open import parse_store_url

    wanted: list[Path] = []
    make: list[Path] = []
    trainer = settings.trainer
    for directory in filter(None, (trainer.output_dir, trainer.checkpoint_dir)):
        for path in dict.fromkeys((directory, Path(os.path.realpath(directory)))):
            if path.parent == Path("/"):
                make += [path, path.parent / ".podwatch"]
                wanted += make[-2:]
            else:
                _must_be_there(path.parent, "the directory that holds the trainer's output")
                wanted.append(path.parent)
    own = [settings.state_dir] if settings.state_dir != Path("/var/lib/podwatch") else []  # StateDirectory= creates it
    store = parse_store_url(settings.sync.store).path if settings.sync.store else None
    if store is not None:
        own.append(store)
    for path in own:
        if not path.exists():
            _must_be_there(path.parent, "a directory that podwatch writes to")
        make.append(path)
        wanted.append(path)
    kept = [p for p in dict.fromkeys(wanted) if not any(other in p.parents for other in wanted)]
    return tuple(kept), tuple(dict.fromkeys(make))


def exec_line(argv: list[str]) -> str:
    """An argv quoted for ``ExecStart=``, except for the specifier %i."""
    return " ".join(word if word == "%i" else quote(word.replace("$", "$$")) for word in argv)


def quote(word: str | Path) -> str:
    """A word quoted for a unit file (systemd.syntax(7)): specifiers and quotes have no effect."""
    text = str(word)
    if any(not c.isprintable() for c in text):
        raise ConfigurationError(
            f"a systemd unit cannot contain a path with control characters: {text!r}", fix="rename it"
        )
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text}"' if any(c in " '\"\\;" for c in text) or not text else text


def systemd_version() -> int:
    """The version of this machine's systemd; 0 if unknown."""
    try:
        done = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, check=False)
        return int(done.stdout.split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def executable() -> list[str]:
    """The command of this podwatch: its script if there is one, so that the service survives an upgrade in place."""
    script = Path(sys.prefix, "bin", "podwatch")
    return [str(script)] if os.access(script, os.X_OK) else [sys.executable, "-P", "-m", "podwatch"]


def _must_be_there(path: Path, what: str) -> None:
    if not path.is_dir():
        raise HostError(f"{what} does not exist", where=str(path), fix=f"create it (mkdir -p {path}), or mount it")


def _shipped(unit: str) -> str:
    """The unit's text, from the package or from a source checkout."""
    package = Path(__file__).parents[1]
    for directory in (package / "_systemd", package.parents[1] / "systemd"):
        if (directory / unit).is_file():
            return (directory / unit).read_text()
    raise InternalError("the unit is missing from this installation", where=unit, fix="install podwatch again")


def _with_exec(text: str, line: str) -> str:
    lines = [f"ExecStart={line}" if old.startswith("ExecStart=") else old for old in text.splitlines()]
    return "\n".join(lines) + "\n"


def _notes(settings: "Settings", command: list[str], name: str) -> list[str]:
    notes = []
    environment = ETC / f"{name or 'podwatch'}.env"
    if settings.sync.store.startswith("b2://") and settings.trainer.env_file is None and not environment.exists():
        notes.append(
            f"the store needs a key: put B2_APPLICATION_KEY_ID and B2_APPLICATION_KEY into {environment}, mode 0600"
        )
    try:
        owner = os.stat(command[0]).st_uid  # noqa: PTH116
    except OSError:
        owner = 0
    if owner:
        notes.append(f"{command[0]} belongs to uid {owner}, who can change it and so run commands as root")
    return notes


# -- installation ----------------------------------------------------------------------------------------------------


def _load(where: Where) -> tuple["Settings", Path]:
    """The settings as the service will load them: with its environment file, without this shell's variables."""
    from podwatch.config.loading import load_settings
    from podwatch.trainer.environment import read_env_file

    environ: dict[str, str] = {}
    file = ETC / f"{where.run or 'podwatch'}.env"
    if os.geteuid() == 0 and file.exists():
        environ |= {k: v for k, v in read_env_file(file).items() if k.startswith("PODWATCH_")}
    environ |= _named_config(os.environ)
    loaded = load_settings(Path(where.config) if where.config else None, environ=environ, run=where.run)
    if loaded.path is None:
        raise ConfigurationError(
            "the service needs a configuration file", where=str(ETC), fix="write one with `podwatch config init`"
        )
    return loaded.settings, loaded.path


def _named_config(environ: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environ.items() if k == "PODWATCH_CONFIG"}


def _require_systemd() -> None:
    if not BOOTED.is_dir() or shutil.which("systemctl") is None:
        raise HostError("systemd does not run here", fix="use `podwatch run --detach`, or podwatch as PID 1")
    if os.geteuid() != 0:
        raise PermissionDenied("Permission denied: only root can install a service", where=str(UNITS), fix="use sudo")
    if any(line.split()[4] == BOOT_ID for line in Path("/proc/self/mountinfo").read_text().splitlines()):
        # systemd-nspawn mounts over it. A sandboxed service has its own /proc with the real boot id, so podwatch and
        # its keeper would compare different boot ids.
        raise HostError(
            "a mount in this container hides the boot id, but not from sandboxed services: podwatch and its keeper"
            " would read different boot ids",
            where=BOOT_ID,
            fix=f"umount {BOOT_ID} at each boot of the container, or use `podwatch run --detach`",
        )


def _write(plan: Plan) -> bool:
    """True when anything changed."""
    from podwatch.system.files import atomic_write

    changed = False
    try:
        for directory in plan.make:
            if not directory.exists():
                directory.mkdir(mode=0o755 if directory.parent == Path("/") else 0o700)
                click.echo(f"created   {directory}")
        for path, text in plan.files:
            if path.is_file() and path.read_text() == text:
                click.echo(f"unchanged {path}")
                continue
            path.parent.mkdir(mode=0o755, exist_ok=True)
            atomic_write(path, text, 0o644)
            changed = True
            click.echo(f"wrote     {path}")
    except OSError as error:
        raise HostError(
            f"cannot write: {error.strerror}", where=str(error.filename), fix="check whether it is read-only"
        ) from error
    return changed


def _show(plan: Plan) -> None:
    for directory in plan.make:
        if not directory.exists():
            click.echo(f"would create {directory}")
    for path, text in plan.files:
        same = path.is_file() and os.access(path, os.R_OK) and path.read_text() == text
        click.echo(f"{'unchanged' if same else 'would write'} {path}")
        if not same:
            click.echo("".join(f"    {line}\n" for line in text.splitlines()), nl=False)
    for note in plan.notes:
        click.echo(f"note: {clean(note)}")


def _systemctl(*arguments: str) -> None:
    done = subprocess.run(["systemctl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HostError(f"systemctl {arguments[0]} failed: {done.stderr.strip()}", fix="read `journalctl -xe`")


def _next_steps(service: str, *, changed: bool) -> None:
    active = subprocess.run(["systemctl", "is-active", "--quiet", service], check=False).returncode == 0
    if active and not changed:
        click.echo(f"{service} is running with these files: nothing to do")
        return
    start = f"systemctl restart {service}" if active else f"systemctl enable --now {service}"
    name = f" --run {service.partition('@')[2]}" if "@" in service else ""
    click.echo(f"next:  podwatch{name} check\n       {start}" + ("  (training continues)" if active else ""))
    click.echo(f"       podwatch status\n       journalctl -u {service} -f")
