"""What podwatch has on this machine for one run: its directories, with sizes. All of this blocks, and only reads."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podwatch.cli.offline import run_file
from podwatch.cli.systemd_service import Service
from podwatch.daemon.paths_and_run_lock import runtime_roots, workspace_of
from podwatch.domain.checkpoint import Completeness
from podwatch.domain.errors import PodwatchError
from podwatch.recovery import quarantine
from podwatch.system.files import DIRECTORY_FLAGS
from podwatch.system.open_by_descriptor import KEPT, USER, measure
from podwatch.system.own_directories import Workspace
from podwatch.system.rename_places import corners_of

if TYPE_CHECKING:
    from podwatch.config.settings import Settings


@dataclass(frozen=True, slots=True)
class Item:
    """``complete_steps``: the complete checkpoints in quarantine there. ``ours``: it is known to be this run's."""

    kind: str
    path: Path
    bytes: int | None
    note: str = ""
    complete_steps: tuple[int, ...] = ()
    ours: bool = True

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "path": str(self.path),
            "bytes": self.bytes,
            "note": self.note,
            "complete_steps": list(self.complete_steps),
        }


def local_data(settings: "Settings", service: Service, environ: Mapping[str, str]) -> list[Item]:
    run = settings.run_id
    return [
        *_beside(settings, workspace_of(settings)),
        *_directory("state", settings.state_dir / run, "database, logs, incidents"),
        *(item for root in runtime_roots(settings.state_dir, environ) for item in _directory("runtime", root / run)),
        *_file("configuration", service.configuration),
        *_file("key-file", service.key_file),
    ]


def _beside(settings: "Settings", workspace: Workspace) -> Iterator[Item]:
    """podwatch's directories beside the trainer's: record, quarantine, trash, staging."""
    problem = _of_another(settings, workspace)
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
        note = ", ".join(f"step {step} ({state})" for step, state in states)
        note = problem or (f"quarantine: {note}" if note else "")
        whole = tuple(sorted(step for step, state in states if state == Completeness.COMPLETE))
        yield Item("run-directory", home, workspace.tree.measure(home)[0], note, whole, not problem)


def _of_another(settings: "Settings", workspace: Workspace) -> str:
    """Why the directory beside output_dir is not known to be this run's; empty if it is."""
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
        yield Item(kind, path, seen[0], note)


def _file(kind: str, path: Path) -> Iterator[Item]:
    if path.is_file():
        yield Item(kind, path, path.stat().st_size)
