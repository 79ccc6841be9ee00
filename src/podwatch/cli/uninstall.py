"""``podwatch uninstall``: stop and remove the service, and list what stays.

Training is never part of the service, so it continues; `podwatch stop-training` ends it.
"""

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podwatch.cli.common import Where, clean, common
from podwatch.cli.systemd_service import (
    Origin,
    Service,
    active,
    ends_training,
    guard_elsewhere,
    origin,
    service_of,
    systemctl,
    variables_of,
)
from podwatch.domain.errors import ConfigurationError, HostError, PermissionDenied, PodwatchError

if TYPE_CHECKING:
    from podwatch.config.settings import Settings


@click.command("uninstall", short_help="Remove the service; list what podwatch has on this machine.")
@common
@click.option("--dry-run", is_flag=True, help="Only show what would be stopped and removed, and what stays.")
def command(where: Where, dry_run: bool) -> None:
    """Stop and remove the service that `podwatch install` made. Training continues, unguarded.

    Everything else stays and is listed with its path, and with the `rm -r` for podwatch's directories: state, runtime,
    the one beside output_dir with record and quarantine. Configuration, key file and the objects in the store stay as
    well.
    """
    service = service_of(where.run)
    settings, config, problem = _load(where, service)
    files = [path for path in (service.dropin, service.unit_file) if origin(path) is not Origin.ABSENT]
    if not files:
        click.echo(f"podwatch is not installed as a service here ({service.unit_file})")
    elif dry_run:
        click.echo("\n".join([f"would stop and disable {service.unit}", *(f"would remove {path}" for path in files)]))
    else:
        _remove_service(service)
    lines = [] if settings is None else list(_training(service, settings))
    own = {} if settings is None else _own(settings)
    stays = [*((kind, str(path)) for path, kind in own.items()), *_others(service, settings, config, problem)]
    lines += ["stays on this machine:", *(f"  {kind:<14}{clean(text)}" for kind, text in stays)]
    click.echo("\n".join([*lines, *_how_to_remove(list(own))]))


def _load(where: Where, service: Service) -> "tuple[Settings | None, Path | None, str]":
    """The settings of the installed service, else those that ``podwatch run`` would use; their file; the problem."""
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


def _remove_service(service: Service) -> None:
    """Stop and disable the service and remove its files. A unit that podwatch did not write is not touched, and a
    drop-in that it did not write is kept as FILE.old. Raises PermissionDenied without root."""
    files = {path: by for path in (service.dropin, service.unit_file) if (by := origin(path)) is not Origin.ABSENT}
    if files.get(service.unit_file) is Origin.FOREIGN:
        raise HostError(
            "podwatch did not write this unit, and leaves it alone",
            where=str(service.unit_file),
            fix=f"systemctl disable --now {service.unit}, then remove it yourself",
        )
    if os.geteuid() != 0:
        raise PermissionDenied(
            "Permission denied: only root can remove a service", where=str(service.unit_file), fix="use sudo"
        )
    systemctl("disable", "--now", service.unit)
    click.echo(f"stopped   {service.unit}, and disabled it")
    for path, by in files.items():
        if path == service.unit_file and service.name and _instances(service):
            continue
        if by is Origin.OURS:
            path.unlink()
        else:
            path.replace(path.with_name(f"{path.name}.old"))
        click.echo(f"removed   {path}{'' if by is Origin.OURS else f' (kept as {path.name}.old)'}")
    with contextlib.suppress(OSError):
        service.dropin.parent.rmdir()  # another's drop-ins stay
    systemctl("daemon-reload")
    with contextlib.suppress(HostError):
        systemctl("reset-failed", service.unit)  # "not loaded" is what we want


def _instances(service: Service) -> bool:
    """Whether another instance uses the same unit file."""
    here = service.unit_file.parent
    return any(path != service.dropin for path in here.glob("podwatch@*.service.d/10-paths.conf"))


# -- what continues and what stays -----------------------------------------------------------------------------------


def _training(service: Service, settings: "Settings") -> Iterator[str]:
    """What continues without the service, and how to end it."""
    from podwatch.cli.offline import training_here

    if guard := guard_elsewhere(settings.run_id, settings.state_dir, service.unit):
        what = "it and training" if ends_training(guard) else "it, and training continues"
        yield f"podwatch guards the run without a service: kill {guard} ends {what}"
    elif (text := training_here(settings).possible) and not active(service.unit):
        unit = f"podwatch-train-{settings.run_id}"
        how = f"systemctl stop {unit}" if active(f"{unit}.service") else "kill that pid"
        yield f"{text}; it continues, without podwatch. To end it: {how}"


def _own(settings: "Settings") -> dict[Path, str]:
    """podwatch's own directories of this run, and what each holds. The one beside output_dir only where its record
    says that it is this run's: the list is for `rm -r`."""
    from podwatch.app.paths_and_run_lock import runtime_roots, workspace_of
    from podwatch.cli.offline import run_file
    from podwatch.system.open_by_descriptor import KEPT, USER
    from podwatch.system.rename_places import corners_of

    found: dict[Path, str] = {}
    workspace = workspace_of(settings)
    with contextlib.suppress(PodwatchError):  # not known to be this run's
        workspace.check()
        file = run_file(settings)
        if file.load(looking=True) and not file.other_run:
            users = [home.parent for what in KEPT for home in corners_of(workspace, what)]
            homes = [home.parent if home.name == USER else home for home in users]
            outside = [workspace.outside] if workspace.tree.lstat(workspace.outside) else []
            found |= dict.fromkeys((*outside, *homes), "run-directory")
    found[settings.state_dir / settings.run_id] = "state"
    found |= {root / settings.run_id: "runtime" for root in runtime_roots(settings.state_dir, os.environ)}
    return {path: kind for path, kind in found.items() if os.path.lexists(path)}


def _others(
    service: Service, settings: "Settings | None", config: Path | None, problem: str
) -> Iterator[tuple[str, str]]:
    """What is not podwatch's alone: (kind, text)."""
    for path in dict.fromkeys(filter(None, (service.configuration, config))):
        if path.is_file():
            yield "configuration", str(path)
    if problem:
        yield "state", f"not known: {problem}"
    env_file = None if settings is None else settings.trainer.env_file
    for path in dict.fromkeys(filter(None, (service.key_file, env_file))):
        if path.is_file():
            yield "key-file", str(path)
    if settings is not None:
        yield "checkpoints", f"{settings.trainer.output_dir}  (training's own)"
        if settings.sync.store:
            yield "store", f"{settings.sync.store}  (objects of the run {settings.run_id})"
    yield "program", f"{sys.prefix}  (remove it as it was installed: uv tool, pipx or pip)"


def _how_to_remove(own: list[Path]) -> list[str]:
    if not own:
        return []
    return [
        "after the end of training, this removes podwatch's own directories of this run:",
        f"  rm -r {' '.join(shlex.quote(str(path)) for path in own)}",
        "  checkpoints in quarantine go with them: see first with `podwatch quarantine list` what is there, and with"
        " `podwatch store ls` whether the store has it",
    ]
