"""A run whose saves lie in a store, and pods that restore them."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.records import CheckpointRecords, RecordFiles
from podwatch.checkpoints.trainers import make_layout
from podwatch.config.settings import Settings
from podwatch.domain.errors import RemoteError
from podwatch.store.keys import RunKeys
from podwatch.store.restore.restore import OutagePatience, Restorer, StoreOfRun
from podwatch.system.clock import SystemClock
from podwatch.system.own_directories import Workspace
from podwatch.system.procfs import boot_id
from tests.support.stored_save import Shelf, write_checkpoint

CUSTOM = {"parts": "checkpoints/step_{step}", "require": ["model.bin"], "last": "DONE"}


@dataclass
class RestorePod:
    """One pod without a state of the run."""

    home: Path
    store: StoreOfRun
    trainer: dict[str, object] = field(default_factory=lambda: {"layout": "custom"})
    custom: dict[str, object] = field(default_factory=lambda: dict(CUSTOM))
    patience: float = 0.0
    waited: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.output = self.home / "out"
        self.output.mkdir(parents=True, exist_ok=True)
        given: dict[str, object] = {
            "run_id": "run",
            "state_dir": str(self.home / "state"),
            "trainer": {"output_dir": str(self.output), **self.trainer},
        }
        if self.trainer["layout"] == "custom":
            given["checkpoints"] = {"custom": self.custom}
        self.layout = make_layout(Settings.model_validate(given))
        self.workspace = Workspace(self.output)
        self.records = RecordFiles(self.home / "state" / "records", self.workspace.records_copy, self.workspace.tree)

    def restorer(self) -> Restorer:
        def waiting(error: RemoteError, _pause: float) -> None:
            self.waited.append(error.what)

        return Restorer(self.store, self.layout, self.workspace, self.records, OutagePatience(self.patience, waiting))

    def step(self, number: int) -> Path:
        return self.output / "checkpoints" / f"step_{number}"

    def catalogue(self) -> Catalogue:
        """After two looks, with the records on disk."""
        records = CheckpointRecords(self.records, boot_id=boot_id())
        found = Catalogue(self.layout, SystemClock(), settle=0.0, settle_weak=0.0, records=records)
        found.rescan()
        found.rescan()
        return found

    def left_in_staging(self) -> list[str]:
        return sorted(p.name for p in self.home.rglob("restore-*"))


@dataclass
class RestoreWorld:
    home: Path
    store: StoreOfRun
    pods: int = 0

    def __post_init__(self) -> None:
        self.shelf = Shelf(self.store.open, self.store.keys)

    def save(self, *steps: int, **more: object) -> None:
        for step in steps:
            self.shelf.save(step, {"checkpoint": write_checkpoint(self.source(step))}, **more)

    def source(self, step: int) -> Path:
        return self.home / "source" / f"step_{step}"

    def pod(self, **more: object) -> RestorePod:
        self.pods += 1
        return RestorePod(self.home / f"pod{self.pods}", self.store, **more)  # type: ignore[arg-type]


def in_directory(home: Path) -> RestoreWorld:
    (home / "store").mkdir(parents=True)
    store = StoreOfRun(f"file://{home}/store", RunKeys("run"), lambda: None, connections=3)
    return RestoreWorld(home, store)


def swap(path: Path, body: bytes) -> None:
    """Other bytes with the same size and time."""
    status = path.stat()
    path.write_bytes(body)
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
