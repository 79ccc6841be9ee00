"""``podwatch uninstall``: stop and remove the service, and list what stays.

Training is never part of the service, so it continues unless its end is asked for.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podwatch.cli.common import Where, ask, common, find_daemon, json_option
from podwatch.cli.systemd_service import Origin, Service, active, origin, service_of, systemctl
from podwatch.cli.uninstall_report import show_report
from podwatch.domain.errors import ConfigurationError, HostError, PermissionDenied

if TYPE_CHECKING:
    from podwatch.config.settings import Settings

STOP_SECONDS = 60.0
"""Beyond the graces of the configuration: the end of a process tree, and of its GPU memory."""


@click.command("uninstall", short_help="Remove the service; list what podwatch has on this machine.")
@common
@click.option("--dry-run", is_flag=True, help="Only show what would be stopped and removed, and what stays.")
@click.option("--stop-training", is_flag=True, help="Stop training first. Without it, training continues.")
@json_option
def command(where: Where, dry_run: bool, stop_training: bool, as_json: bool) -> None:
    """Stop and remove the service that `podwatch install` made. Training continues, unguarded.

    Everything else stays and is listed with its path and size, and with the `rm -r` for podwatch's directories: state,
    runtime, the one beside output_dir with record and quarantine. Configuration, key file and the objects in the store
    stay as well.
    """
    service = service_of(where.run)
    settings, config, problem = _load(where, service)
    removed: list[str] = []
    if not dry_run:
        if stop_training and settings is not None:
            _stop_training(settings, where, config, say=not as_json)
        removed = _remove_service(service, say=not as_json)
    show_report(service, settings, config, problem, as_json=as_json, planned=dry_run, removed=removed)


# -- what there is ---------------------------------------------------------------------------------------------------


def _load(where: Where, service: Service) -> "tuple[Settings | None, Path | None, str]":
    """The settings of the installed service, else those that ``podwatch run`` would use; their file; the problem."""
    from podwatch.cli.install_plan import variables_of
    from podwatch.config.last_good import load_or_last_good
    from podwatch.config.loading import find_file

    installed = service.installed_for()[1]
    named = where.config or os.environ.get("PODWATCH_CONFIG") or installed
    try:
        environ = variables_of(service.key_file) if installed else dict(os.environ)
        path = find_file(Path(named) if named else None, environ=environ, run=where.run)
        return load_or_last_good(path, environ=environ, run=where.run).settings, path, ""
    except ConfigurationError as error:
        return None, Path(named) if named else None, str(error)


# -- acting ----------------------------------------------------------------------------------------------------------


def _stop_training(settings: "Settings", where: Where, config: Path | None, *, say: bool) -> None:
    """End training and wait for its end. Raises HostError where it does not end."""
    from podwatch.system.procfs import is_alive
    from podwatch.trainer.supervisor_files import read_record

    record = read_record(settings.state_dir / settings.run_id / "supervisor")
    here = Where(str(config) if config else where.config, "")
    if find_daemon(here) is None:
        unit = f"podwatch-train-{settings.run_id}.service"
        if active(unit):
            systemctl("stop", unit)
        elif record is not None and is_alive(record.launcher):
            raise HostError(
                "podwatch does not run, so it cannot stop training in order",
                where=f"pid {record.launcher.pid}",
                fix="start podwatch and repeat this command, or end the process yourself",
            )
        return
    ask(here, "stop_training", {"after_save": False}, purpose="stop training")
    end = time.monotonic() + settings.trainer.stop_grace + settings.trainer.save_grace + STOP_SECONDS
    while record is not None and (is_alive(record.launcher) or is_alive(record.supervisor)):
        if time.monotonic() > end:
            raise HostError("training did not end", where=f"pid {record.launcher.pid}", fix="see `podwatch status`")
        time.sleep(0.2)
    if say:
        click.echo("stopped   training (it stays stopped until `podwatch start`)")


def _remove_service(service: Service, *, say: bool) -> list[str]:
    """Stop and disable the service and remove its files; the paths that are gone. A unit that podwatch did not write
    is not touched. Raises PermissionDenied without root."""
    files = {path: origin(path) for path in (service.dropin, service.unit_file)}
    if files[service.unit_file] is Origin.FOREIGN:
        raise HostError(
            "podwatch did not write this unit, and leaves it alone",
            where=str(service.unit_file),
            fix=f"systemctl disable --now {service.unit}, then remove it yourself",
        )
    if all(by is Origin.ABSENT for by in files.values()):
        return []
    if os.geteuid() != 0:
        raise PermissionDenied(
            "Permission denied: only root can remove a service", where=str(service.unit_file), fix="use sudo"
        )
    systemctl("disable", "--now", service.unit)
    if say:
        click.echo(f"stopped   {service.unit}, and disabled it")
    removed = []
    for path, by in files.items():
        shared = path == service.unit_file and service.name and _instances(service)
        if by is Origin.ABSENT or shared:
            continue
        if by is Origin.OURS:
            path.unlink()
        else:
            path.replace(path.with_name(f"{path.name}.old"))
        removed.append(str(path))
        if say:
            kept = "" if by is Origin.OURS else f" (podwatch did not write it: kept as {path.name}.old)"
            click.echo(f"removed   {path}{kept}")
    with contextlib.suppress(OSError):
        service.dropin.parent.rmdir()  # another's drop-ins stay
    systemctl("daemon-reload")
    with contextlib.suppress(HostError):
        systemctl("reset-failed", service.unit)  # "not loaded" is what we want
    return removed


def _instances(service: Service) -> bool:
    """Whether another instance uses the same unit file."""
    here = service.unit_file.parent
    return any(path != service.dropin for path in here.glob("podwatch@*.service.d/10-paths.conf"))
