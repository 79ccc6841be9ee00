"""The report of ``podwatch uninstall``: what was removed, what stays and where, as text or JSON. Blocks; only reads."""

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podwatch.cli.common import clean, print_json
from podwatch.cli.systemd_service import Origin, Service, active, ends_training, guard_elsewhere, origin
from podwatch.domain.times import size

if TYPE_CHECKING:
    from podwatch.config.settings import Settings


@dataclass(frozen=True, slots=True)
class Item:
    """Something of podwatch that stays. ``bytes``: None where its size says nothing. ``complete_steps``: the complete
    checkpoints in quarantine there. ``removable``: a directory of podwatch alone, and known to be this run's."""

    kind: str
    path: Path
    bytes: int | None = None
    note: str = ""
    complete_steps: tuple[int, ...] = ()
    removable: bool = False


def show_report(
    service: Service,
    settings: "Settings | None",
    config: Path | None,
    problem: str,
    *,
    as_json: bool,
    planned: bool = False,
    removed: Sequence[str] = (),
) -> None:
    """Print it. ``problem``: why the settings are not known; ``planned``: nothing was removed, it would be."""
    items = [] if settings is None else list(_items(settings, service))
    others = list(_others(settings, config, problem, {item.path for item in items}))
    removable = [path for path in (service.dropin, service.unit_file) if origin(path) is not Origin.ABSENT]
    if as_json:
        print_json(
            {
                "schema_version": 1,
                "service": service.unit,
                "dry_run": planned,
                "removed": list(removed),
                "would_remove": [str(path) for path in removable] if planned else [],
                "items": [_document(item) for item in items],
                "others": [{"kind": kind, "text": text} for kind, text in others],
                "training": _running(settings) or None,
            }
        )
        return
    lines = []
    if planned and removable:
        lines += [f"would stop and disable {service.unit}", *(f"would remove {path}" for path in removable)]
    if not planned and not removed:
        lines.append(f"podwatch is not installed as a service here ({service.unit_file})")
    lines += _training(service, settings)
    lines.append("stays on this machine:")
    for item in items:
        much = "" if item.bytes is None else size(item.bytes)
        note = f"  ({clean(item.note)})" if item.note else ""
        lines.append(f"  {item.kind:<14}{much:>9}  {clean(item.path)}{note}")
    lines += [f"  {kind:<14}{'':>9}  {clean(text)}" for kind, text in others]
    click.echo("\n".join([*lines, *_how_to_remove([item for item in items if item.removable])]))


def _document(item: Item) -> dict[str, object]:
    found = asdict(item) | {"path": str(item.path), "complete_steps": list(item.complete_steps)}
    del found["removable"]
    return found


def _how_to_remove(items: Sequence[Item]) -> list[str]:
    if not items:
        return []
    lines = ["after the end of training, this removes podwatch's own directories of this run:"]
    lines.append(f"  rm -r {' '.join(shlex.quote(str(item.path)) for item in items)}")
    if steps := sorted({step for item in items for step in item.complete_steps}):
        lines.append(
            f"  their quarantine has complete checkpoints (step {', '.join(map(str, steps))}): see first whether"
            " `podwatch store ls` has them, or bring them back with `podwatch quarantine return`"
        )
    return lines


# -- training --------------------------------------------------------------------------------------------------------


def _training(service: Service, settings: "Settings | None") -> list[str]:
    """What goes on without the service, and how to end it."""
    if settings is None:
        return []
    guard = guard_elsewhere(settings.run_id, settings.state_dir, service.unit)
    if guard:
        what = "it and training" if ends_training(guard) else "it, and training continues"
        return [f"podwatch guards the run without a service: kill {guard} ends {what}"]
    text, unit = _running(settings), f"podwatch-train-{settings.run_id}"
    if not text or active(service.unit):
        return []
    how = f"systemctl stop {unit}" if active(f"{unit}.service") else "kill that pid"
    return [f"{text}; it continues, without podwatch. To end it: {how}"]


def _running(settings: "Settings | None") -> str:
    from podwatch.cli.offline import training_here

    return "" if settings is None else training_here(settings).possible


# -- what stays ------------------------------------------------------------------------------------------------------


def _items(settings: "Settings", service: Service) -> Iterator[Item]:
    from podwatch.daemon.paths_and_run_lock import runtime_roots

    yield from _beside(settings)
    yield from _directory("state", settings.state_dir / settings.run_id, "database, logs, incidents")
    for root in runtime_roots(settings.state_dir, os.environ):
        yield from _directory("runtime", root / settings.run_id)
    for kind, path in (("configuration", service.configuration), ("key-file", service.key_file)):
        if path.is_file():
            yield Item(kind, path, path.stat().st_size)


def _others(
    settings: "Settings | None", config: Path | None, problem: str, known: set[Path]
) -> Iterator[tuple[str, str]]:
    """What is not podwatch's alone: (kind, text)."""
    if config is not None and config not in known:
        yield "configuration", str(config)
    if problem:
        yield "state", f"not known: {problem}"
    if settings is not None:
        env_file = settings.trainer.env_file
        if env_file is not None and env_file not in known:
            yield "key-file", f"{env_file}  (training's own; it can hold secrets)"
        yield "checkpoints", f"{settings.trainer.output_dir}  (training's own)"
        if settings.sync.store:
            yield "store", f"{settings.sync.store}  (objects of the run {settings.run_id})"
    yield "program", f"{sys.prefix}  (remove it as it was installed: uv tool, pipx or pip)"


def _beside(settings: "Settings") -> Iterator[Item]:
    """podwatch's directories beside the trainer's: record, quarantine, trash, staging."""
    from podwatch.daemon.paths_and_run_lock import workspace_of
    from podwatch.domain.checkpoint import Completeness
    from podwatch.domain.errors import PodwatchError
    from podwatch.recovery import quarantine
    from podwatch.system.open_by_descriptor import KEPT, USER
    from podwatch.system.rename_places import corners_of

    workspace = workspace_of(settings)
    problem = _of_another(settings)
    try:
        entries = quarantine.listing(workspace)
    except PodwatchError as error:
        entries, problem = [], problem or str(error)
    users = [home.parent for what in KEPT for home in corners_of(workspace, what)]
    homes = [home.parent if home.name == USER else home for home in users]
    for home in dict.fromkeys([*(h for h in (workspace.outside,) if workspace.tree.lstat(h)), *homes]):
        states = [
            (step, state)
            for entry in entries
            if entry.index is not None and any(home in path.parents for path in entry.paths)
            for step, state in entry.index.steps.items()
        ]
        inside = ", ".join(f"step {step} ({state})" for step, state in states)
        note = problem or (f"quarantine: {inside}" if inside else "")
        whole = tuple(sorted(step for step, state in states if state == Completeness.COMPLETE))
        yield Item("run-directory", home, workspace.tree.measure(home)[0], note, whole, not problem)


def _of_another(settings: "Settings") -> str:
    """Why the directory beside output_dir is not known to be this run's; empty if it is."""
    from podwatch.cli.offline import run_file
    from podwatch.daemon.paths_and_run_lock import workspace_of
    from podwatch.domain.errors import PodwatchError

    workspace = workspace_of(settings)
    try:
        workspace.check()
        file = run_file(settings)
        found = file.load(looking=True)
    except PodwatchError as error:
        return str(error)
    if file.other_run:
        return f"it belongs to the run {file.other_run}"
    return "" if found else f"no readable run.json ({workspace.run_copy}) says that it belongs to the run {file.run_id}"


def _directory(kind: str, path: Path, note: str = "") -> Iterator[Item]:
    from podwatch.system.files import DIRECTORY_FLAGS
    from podwatch.system.open_by_descriptor import measure

    try:
        above = os.open(path.parent, DIRECTORY_FLAGS)
    except OSError:
        return
    try:
        seen = [0, 0]
        measure(above, path.name, seen, 1 << 20, 64)
    finally:
        os.close(above)
    if seen[1]:
        yield Item(kind, path, seen[0], note, removable=True)
