"""``podwatch uninstall``: stop and remove the service, list what stays; with ``--purge``, remove the run's local data.

Training is never part of the service, so it continues unless its end is asked for. A purge first says what it would
destroy for good: a checkpoint in quarantine counts as stored only if the store has it file by file.
"""

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podwatch.cli.common import Where, ask, common, find_daemon, json_option
from podwatch.cli.systemd_service import (
    Origin,
    Service,
    active,
    ends_training,
    guard_elsewhere,
    origin,
    service_of,
    systemctl,
)
from podwatch.cli.uninstall_report import Report, line
from podwatch.domain.errors import (
    Busy,
    ConfigurationError,
    ExitCode,
    HostError,
    PermissionDenied,
    PodwatchError,
    UsageError,
)

if TYPE_CHECKING:
    from podwatch.cli.purge_local_data import Item, LocalData
    from podwatch.config.settings import Settings
    from podwatch.policy.lost_by_purge import KeptFile

STOP_SECONDS = 60.0
"""Beyond the graces of the configuration: the end of a process tree, and of its GPU memory."""


@click.command("uninstall", short_help="Remove the service; list, or remove, what podwatch has on this machine.")
@common
@click.option("--dry-run", is_flag=True, help="Only show what would be stopped and removed, and what stays.")
@click.option("--stop-training", is_flag=True, help="Stop training first. Without it, training continues.")
@click.option("--purge", is_flag=True, help="Also remove podwatch's local data of this run: state, quarantine, record.")
@click.option("--discard-unstored", is_flag=True, help="With --purge: also checkpoints that exist nowhere else.")
@click.option("--yes", is_flag=True, help="Do not ask before --purge.")
@json_option
def command(
    where: Where, dry_run: bool, stop_training: bool, purge: bool, discard_unstored: bool, yes: bool, as_json: bool
) -> None:
    """Stop and remove the service that `podwatch install` made. Training continues, unguarded.

    Everything else stays and is listed with its path and size: state, quarantine, record, configuration, key file, the
    objects in the store. --purge removes what is local and podwatch's own, but never output_dir and nothing in the
    store. It refuses while training or another podwatch runs, and asks again before it deletes a quarantined checkpoint
    that the store does not have.
    """
    service = service_of(where.run)
    settings, config, problem = _load(where, service)
    if purge and settings is None:
        raise ConfigurationError(f"cannot find the run's data without its configuration: {problem}", fix="use -c FILE")
    data, items = _look(settings, service, purge=purge)
    report = Report(service, settings, config, problem, items)
    if dry_run:
        report.show(as_json=as_json, planned=True, purge=purge)
        refusal = _refusal(settings, service, stop_training=stop_training) if purge and settings else ""
        if refusal and not as_json:
            click.echo(f"not possible now: {refusal}")
        raise click.exceptions.Exit(int(ExitCode.TRY_AGAIN if refusal else ExitCode.OK))
    if purge and settings is not None:
        if refusal := _refusal(settings, service, stop_training=stop_training):
            raise Busy(f"podwatch removes no data now: {refusal}")
        _confirm(items, discard_unstored=discard_unstored, yes=yes)
    if stop_training and settings is not None:
        _stop_training(settings, where, config, say=not as_json)
    removed = _remove_service(service, say=not as_json)
    if purge and settings is not None and data is not None:
        removed += _purge(settings, data, items, report)
    report.show(as_json=as_json, removed=removed, purge=purge)
    if report.problems:
        raise click.exceptions.Exit(int(ExitCode.FAILED))


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


def _look(settings: "Settings | None", service: Service, *, purge: bool) -> "tuple[LocalData | None, list[Item]]":
    from podwatch.cli.purge_local_data import LocalData

    if settings is None:
        return None, []
    data = LocalData(settings, service, os.environ)
    items = data.items()
    return data, _compared(settings, data, items) if purge else items


def _compared(settings: "Settings", data: "LocalData", items: "Sequence[Item]") -> "list[Item]":
    """The items, each with the complete checkpoints in it that the store does not have. Without an answer of the store
    that is all of them."""
    if not any(item.steps and not item.keep for item in items):
        return list(items)
    try:
        stored = _StoredSaves(settings)
    except PodwatchError as error:
        why = f"not compared with the store: {error}"
        return [replace(i, unstored=i.steps, note=f"{i.note}; {why}") if i.steps else i for i in items]
    try:
        return [replace(i, unstored=stored.lacks(data, i)) if i.steps and not i.keep else i for i in items]
    finally:
        stored.close()


class _StoredSaves:
    """The run's checkpoints in the store. Raises PodwatchError if they cannot be read."""

    def __init__(self, settings: "Settings") -> None:
        from podwatch.cli.offline import open_configured_store
        from podwatch.sync.inventory import inventory
        from podwatch.sync.upload.child_job import keys_for

        self._store = open_configured_store(settings)
        try:
            self._saves, _ = inventory(self._store, keys_for(settings.sync.store, settings.run_id))
        except BaseException:
            self._store.close()
            raise

    def close(self) -> None:
        self._store.close()

    def lacks(self, data: "LocalData", item: "Item") -> tuple[int, ...]:
        """The complete steps of an item that are not, whole, in the store."""

        try:
            kept = data.files_of(item) if item.number is not None else []
            return tuple(step for step in item.steps if not self._has(step, item, kept))
        except (OSError, PodwatchError):
            return item.steps

    def _has(self, step: int, item: "Item", kept: "Sequence[KeptFile]") -> bool:
        from podwatch.policy.lost_by_purge import StoredFile, is_stored
        from podwatch.sync.verify_stored import verify_save

        for save in self._saves:
            if save.step != step or save.manifest is None:
                continue
            files = [StoredFile(f.path.partition("/")[2], f.size, f.mtime_ns) for f in save.manifest.files]
            same = (save.step, save.save_id) == item.save or is_stored(kept, files)
            if same and not verify_save(self._store, save):
                return True
        return False


# -- refusing and asking ---------------------------------------------------------------------------------------------


def _refusal(settings: "Settings", service: Service, *, stop_training: bool) -> str:
    """Why the local data must stay now; empty if it can go."""
    from podwatch.cli.clean import running_training
    from podwatch.system.procfs import is_alive
    from podwatch.trainer.keeper_client import read_record

    pid = guard_elsewhere(settings.run_id, settings.state_dir, service.unit)
    if pid:
        what = "it and training" if ends_training(pid) else "it, and training continues"
        return f"a podwatch guards the run (pid {pid}): kill {pid} ends {what}"
    if stop_training:
        return ""
    record = read_record(settings.state_dir / settings.run_id / "keeper")
    kept = record is not None and is_alive(record.keeper)
    running = running_training(settings) or (f"its keeper runs (pid {record.keeper.pid})" if kept and record else "")
    return f"{running}; add --stop-training, or run `podwatch stop-training` first" if running else ""


def _confirm(items: "Sequence[Item]", *, discard_unstored: bool, yes: bool) -> None:
    """Ask before anything is removed: once for all, once more for checkpoints that exist nowhere else."""
    wanted = [item for item in items if not item.keep]
    unstored = [item for item in wanted if item.unstored]
    asks = sys.stdin.isatty()
    lost = "; ".join(f"step {', '.join(map(str, i.unstored))} in {i.path}" for i in unstored)
    if not yes:
        if not asks:
            raise UsageError("--purge asks for confirmation, but there is no terminal", fix="--dry-run, then --yes")
        click.echo("\n".join(["podwatch removes for good:", *map(line, wanted)]), err=True)
        if not click.confirm("Remove all of this?", err=True):
            raise click.exceptions.Exit(int(ExitCode.FAILED))
    if unstored and not discard_unstored:
        what = f"the store does not have these complete checkpoints: {lost}"
        fix = "`podwatch quarantine return N` brings one back, and podwatch uploads it; --discard-unstored deletes them"
        if not asks or yes:
            raise UsageError(f"nothing was removed: {what}", fix=fix)
        click.echo(f"{what[0].upper()}{what[1:]}. {fix}.", err=True)
        if click.prompt('Type "delete" to delete them for good', err=True, default="", show_default=False) != "delete":
            raise click.exceptions.Exit(int(ExitCode.FAILED))


# -- acting ----------------------------------------------------------------------------------------------------------


def _stop_training(settings: "Settings", where: Where, config: Path | None, *, say: bool) -> None:
    """End training and wait for its end. Raises HostError where it does not end."""
    from podwatch.system.procfs import is_alive
    from podwatch.trainer.keeper_client import read_record

    record = read_record(settings.state_dir / settings.run_id / "keeper")
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
    while record is not None and (is_alive(record.launcher) or is_alive(record.keeper)):
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
            kept = "" if by is Origin.OURS else f" (it was changed by hand: kept as {path.name}.old)"
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


def _purge(settings: "Settings", data: "LocalData", items: "Sequence[Item]", report: Report) -> list[str]:
    """Remove the data under the run's lock, after another look at what runs; the paths that are gone."""
    from podwatch.cli.clean import running_training
    from podwatch.system.files import FileLock

    state = next((item for item in items if item.kind == "state" and not item.keep), None)
    with contextlib.ExitStack() as stack:
        if state is not None:
            stack.enter_context(FileLock(state.path / "lock"))
        if refusal := running_training(settings):
            raise Busy(f"podwatch removes no data now: {refusal}")
        done = data.purge(items)
    report.problems = done.problems
    report.items = data.items()  # what is left now
    return done.removed
