"""``podwatch install``: configuration, key file and systemd unit of this machine (systemd/README.md explains the unit).

The shipped unit file is the same everywhere. The values of this machine (executable, paths, configuration file) are in
the unit's ExecStart line and in one drop-in. Installing again changes nothing, or brings an upgrade into effect: the
supervisor of the running trainer is not part of the service, so training continues.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podwatch.cli.common import Where, clean, common
from podwatch.cli.install_plan import Plan, executable, key_for_service, plan_install
from podwatch.cli.systemd_service import (
    ETC,
    Origin,
    Service,
    active,
    ends_training,
    guard_elsewhere,
    origin,
    require_systemd,
    running_version,
    service_of,
    show,
    start,
    systemctl,
    variables_of,
)
from podwatch.domain.errors import Busy, ConfigurationError, HostError

if TYPE_CHECKING:
    from podwatch.config.settings import Settings


@click.command("install", short_help="Install podwatch as a systemd service, and start it.")
@common
@click.option("--dry-run", is_flag=True, help="Only show what would be written and started.")
@click.option("--no-start", is_flag=True, help="Write and enable everything, but start or restart nothing.")
def command(where: Where, dry_run: bool, no_start: bool) -> None:
    """Run podwatch as a systemd service: write the unit and a drop-in for this configuration, enable and start it.

    The store's key is taken from the environment if no file has it, and written to a file with mode 0600. Run it again
    after an upgrade: training continues. Needs root. `podwatch uninstall` removes the service.
    """
    service = service_of(where.run)
    if not dry_run:
        _require_service(where)
        _keep_private(service.key_file)
    settings, config = _load(where, service)
    plan = plan_install(settings, config, executable(), name=where.run)
    key = key_for_service(settings, service, os.environ)
    if dry_run:
        _write(plan, key, dry_run=True)
        click.echo("\n".join(f"note: {clean(note)}" for note in plan.notes), nl=bool(plan.notes))
        click.echo(f"would enable and {'restart' if active(service.unit) else 'start'} {service.unit}")
        return
    _refuse(plan, settings)
    changed = _write(plan, key, dry_run=False)
    if changed:
        systemctl("daemon-reload")
    for note in plan.notes:
        click.echo(f"note: {clean(note)}")
    if key is not None and not key:
        click.echo(
            f"note: NOT BACKED UP: no key of the store found. Put it into {service.key_file} (mode 0600), then"
            f" `systemctl restart {service.unit}`"
        )
    _bring_up(service, settings, changed=changed, no_start=no_start)


def _require_service(where: Where) -> None:
    """Raises HostError where no service can be installed."""
    from podwatch.config.command_directory import absolute

    command = [*executable(), *(["-c", str(absolute(Path(where.config)))] if where.config else [])]
    command += ["--run", where.run] if where.run else []
    require_systemd([*command, "install"])


def _load(where: Where, service: Service) -> tuple["Settings", Path]:
    """The settings as the service will load them: with its environment file, without this shell's variables."""
    from podwatch.config.loading import find_file, load_settings

    environ = {name: value for name, value in os.environ.items() if name == "PODWATCH_CONFIG"}
    named = where.config or ("" if environ else service.installed_for()[1])
    if not where.config and named and not Path(named).is_file():
        named = ""
    path = find_file(Path(named) if named else None, environ=environ, run=where.run)
    if path is None:
        raise ConfigurationError(
            "no configuration found",
            where=str(service.configuration),
            fix=f"write it with `podwatch config init -o {service.configuration}`",
        )
    environ |= {k: v for k, v in variables_of(service.key_file).items() if k.startswith("PODWATCH_")}
    return load_settings(path, environ=environ, run=where.run).settings, path


def _keep_private(file: Path) -> None:
    """Take a key file's permissions for other users away."""
    with contextlib.suppress(OSError):
        found = file.lstat()
        if file.is_file() and not file.is_symlink() and found.st_uid == os.geteuid() and found.st_mode & 0o077:
            file.chmod(0o600)
            click.echo(f"chmod 600 {file}")


def _refuse(plan: Plan, settings: "Settings") -> None:
    """Raises before anything is written: for a file that podwatch did not write as it is, for a service that guards
    another run, for a podwatch that guards this run without the service."""
    service = plan.service
    run, config = service.installed_for()
    if run and run != settings.run_id:
        raise HostError(
            f"the service {service.unit} guards the run {run}; installing {settings.run_id} would end its guard",
            where=config,
            fix=f"put the second run into {ETC}/NAME.toml and use `podwatch --run NAME install`; to replace the"
            " first one, `podwatch uninstall` it before",
        )
    for path, text in plan.files:
        if _origin(path, text) is Origin.FOREIGN:
            raise HostError(
                f"{path} was not written by podwatch, which does not overwrite it",
                where="`podwatch install --dry-run` shows what it would write",
                fix=f"put your changes into {service.dropin.parent}/50-local.conf, and move the file away",
            )
    pid = guard_elsewhere(settings.run_id, settings.state_dir, service.unit)
    if pid:
        training = "ends with it" if ends_training(pid) else "continues"
        raise Busy(
            f"a podwatch that is not this service guards the run {settings.run_id} (pid {pid})",
            fix=f"kill {pid} (training {training}), then run `podwatch install` again",
        )


def _origin(path: Path, text: str) -> Origin | None:
    """Who wrote the file; None if it already has this text. Raises HostError."""
    try:
        by = origin(path)
        return None if by is Origin.OURS and path.read_text() == text else by
    except OSError as error:
        raise HostError(f"cannot read the file: {error.strerror}", where=str(path)) from error


def _write(plan: Plan, key: Mapping[str, str] | None, *, dry_run: bool) -> bool:
    """Write what is missing or differs, or only say what would be written. True when anything changed."""
    from podwatch.config.env_files import env_lines
    from podwatch.system.files import atomic_write
    from podwatch.system.own_directories import own_directory

    did = "would write" if dry_run else "wrote    "
    changed = False
    try:
        for directory in plan.make:
            if not directory.exists():
                click.echo(f"{'would create' if dry_run else 'created  '} {directory}")
                if not dry_run:
                    directory.mkdir(mode=0o755 if directory.parent == Path("/") else 0o700)
        if key:
            click.echo(f"{did} {plan.service.key_file} (mode 0600): {', '.join(key)} from this shell")
            if not dry_run:
                own_directory(ETC, 0o755)
                atomic_write(plan.service.key_file, env_lines(key, "podwatch install"), 0o600)
        for path, text in plan.files:
            by = _origin(path, text)
            if by is None:
                click.echo(f"unchanged {path}")
                continue
            changed = True
            if dry_run:
                differs = ", which podwatch did not write: move it away first" if by is Origin.FOREIGN else ""
                click.echo("\n".join([f"{did} {path}{differs}", *(f"    {line}" for line in text.splitlines())]))
                continue
            path.parent.mkdir(mode=0o755, exist_ok=True)
            if by is Origin.OURS:  # an operator may have added to it
                path.replace(path.with_name(f"{path.name}.old"))
                click.echo(f"kept      {path}.old")
            atomic_write(path, text, 0o644)
            click.echo(f"{did} {path}")
    except OSError as error:
        raise HostError(
            f"cannot write: {error.strerror}", where=str(error.filename), fix="check whether it is read-only"
        ) from error
    return changed


def _bring_up(service: Service, settings: "Settings", *, changed: bool, no_start: bool) -> None:
    """Enable the service, start it, or restart it where its files or podwatch's version changed."""
    from podwatch import __version__

    unit = service.unit
    if show(unit, "UnitFileState") != "enabled":
        systemctl("enable", unit)
        click.echo(f"enabled   {unit}: it starts with the machine")
    running = active(unit)
    verb = "restart" if running else "start"
    version = running_version(settings.run_id, settings.state_dir) if running else ""
    if running and not changed and version in ("", __version__):
        click.echo(f"{unit} is running with these files: nothing to do")
        return
    if no_start:
        click.echo(f"not started: systemctl {verb} {unit}" + ("  (training continues)" if running else ""))
        return
    start(unit, verb)
    since = f" (was {version})" if version not in ("", __version__) else ""
    click.echo(
        f"{'restarted' if running else 'started'} {unit}: podwatch {__version__}{since} guards the run"
        f" {settings.run_id}" + ("; training continued meanwhile" if running else "")
    )
    name = f" --run {service.name}" if service.name else ""
    click.echo(f"next:  podwatch{name} status\n       podwatch{name} check\n       journalctl -u {unit} -f")
