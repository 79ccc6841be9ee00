"""A pod with checkpoints on its disk, a real catalogue, journal and lease, and a backup in a store of any kind."""

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from podwatch.app.backup.backup import Backup
from podwatch.app.backup.connection import StoreConnection
from podwatch.app.backup.outbox import Outbox
from podwatch.app.backup.run_side import RunSide
from podwatch.checkpoints.held_back import HeldBack
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.records import CheckpointRecords
from podwatch.checkpoints.trainers import make_layout
from podwatch.config.settings import Settings
from podwatch.domain.event import Event
from podwatch.domain.lease import Pod
from podwatch.domain.run_state import RunState
from podwatch.journal.async_journal import AsyncJournal
from podwatch.journal.journal import Journal
from podwatch.store.inventory import Inventory, take_inventory
from podwatch.store.lease import Lease
from podwatch.store.lease_rules import LeaseTiming
from podwatch.store.objects.access import access_for
from podwatch.store.objects.base import Objects
from podwatch.store.objects.open import open_objects
from podwatch.system.clock import SystemClock
from podwatch.system.own_directories import Workspace
from podwatch.system.procfs import boot_id
from tests.support.starts import guarded

MB = 1_000_000
TIMING = LeaseTiming(patience=0.6, claim_wait=0.1, poll=0.05)


class QuickClock(SystemClock):
    """Nobody waits longer than a moment. ``later``: seconds by which its time of day is ahead."""

    later = 0.0

    def wall(self) -> float:
        return super().wall() + self.later

    def boottime(self) -> float:
        return super().boottime() + self.later

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.05))

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        await super().wait(event, min(seconds, 0.05))


@dataclass
class StandInRun:
    """What ``RunSide`` asks of the run."""

    layout: Any
    clock: QuickClock
    settings: Settings
    current: RunState
    mode: str = "act"
    blocked: str = ""
    trainer: object | None = None
    named: dict[int, str] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    exits: list[Any] = field(default_factory=list)

    def edit_now(self, change: Callable[[RunState], RunState]) -> None:
        self.current = change(self.current)

    async def edit(self, change: Callable[[RunState], RunState]) -> None:
        self.edit_now(change)

    def side(self, pod: Pod) -> RunSide:
        run = SimpleNamespace(
            layout=self.layout, clock=self.clock, emit=self.events.append, file=self,
            config=SimpleNamespace(settings=SimpleNamespace()), guard=self,
        )  # fmt: skip
        run.config = SimpleNamespace(settings=self)
        parts: tuple[Any, ...] = (self, self, SimpleNamespace(now=dict), self)
        return RunSide(self.settings, cast(Any, run), *parts, pod=pod)

    def blocked_reason(self, mutation: object) -> str:
        return self.blocked

    @property
    def handle(self) -> object | None:
        return self.trainer

    def leave(self, code: Any) -> None:
        self.exits.append(code)


class World:
    """One pod. ``other`` makes a second one on the same store."""

    def __init__(self, directory: Path, url: str, *, name: str = "writer-1", **sync: Any) -> None:
        self.directory, self.url, self.name = directory, url, name
        self.output = directory / "out"
        self.output.mkdir(parents=True, exist_ok=True)
        self.settings = Settings.model_validate(
            {
                "run_id": "run",
                "state_dir": str(directory / "state"),
                "trainer": {"layout": "custom", "output_dir": str(self.output)},
                "checkpoints": {
                    "custom": {"parts": "checkpoints/step_{step}", "require": ["model.bin"], "last": "DONE"},
                    "settle_weak": 0,
                },
                "sync": {
                    "store": url, "part_size": "5MB", "connections": 2, "keep_last": 3, "keep_every": 0, **sync,
                },
            }
        )  # fmt: skip
        (directory / "state").mkdir(exist_ok=True)
        if url.startswith("file://"):
            Path(url.removeprefix("file://")).mkdir(parents=True, exist_ok=True)
        self.clock, self.held = QuickClock(), HeldBack()
        self.held.follow(RunState("run", starts=guarded("line-1")))
        layout = make_layout(self.settings)
        self.workspace = Workspace(self.output).probe()
        self.run = StandInRun(
            layout, self.clock, self.settings, RunState("run", starts=guarded("line-1"), writer_id=name)
        )
        self.catalogue = self._catalogue()
        self.journal_path = directory / "state" / "journal.sqlite"
        self.backups: list[Backup] = []
        self.timing, self.stands_by = TIMING, True

    def _catalogue(self) -> Catalogue:
        records = CheckpointRecords(boot_id=boot_id())
        return Catalogue(
            self.run.layout, SystemClock(), settle=0.0, settle_weak=0.0, records=records, held_back=self.held
        )

    def other(self, name: str) -> "World":
        return World(self.directory.parent / name, self.url, name=name)

    # -- the disk

    def save(self, step: int, size: int = 1000) -> Path:
        root = self.output / "checkpoints" / f"step_{step}"
        root.mkdir(parents=True, exist_ok=True)
        (root / "model.bin").write_bytes(os.urandom(size))
        (root / "sub").mkdir(exist_ok=True)
        (root / "sub" / "optim.bin").write_bytes(os.urandom(100))
        (root / "DONE").write_text("1")
        return root

    def remove(self, step: int) -> None:
        shutil.rmtree(self.output / "checkpoints" / f"step_{step}")

    def scan(self) -> None:
        self.catalogue.rescan()
        self.catalogue.rescan()
        for backup in self.backups:
            backup.notify()

    def links(self) -> list[str]:
        """Names of ours for the trainer's files."""
        found = (f"{folder}/{name}" for folder, _, names in os.walk(self.directory) for name in names)
        return sorted(name.partition("/uploading/")[2] for name in found if "/uploading/" in name)

    def lists(self) -> list[str]:
        """What is recorded of uploads."""
        return sorted(path.name for path in (self.directory / "state" / "sent").glob("*"))

    # -- the backup

    def backup(self) -> Backup:
        connection = StoreConnection(self.settings, self.clock, self.run.events.append)
        pod = Pod(self.name, f"machine-{self.name}", "boot", "place", f"host-{self.name}")
        side = self.run.side(pod)
        lease = Lease(pod, connection.keys, self.clock, side, self.timing, stands_by=self.stands_by)
        outbox = Outbox(self.directory / "state" / "sent", self.workspace, 1.1)
        journal = AsyncJournal(Journal.open(self.journal_path))
        made = Backup(self.settings, side, self.catalogue, journal, self.clock, connection, lease, outbox)
        self.retention = made._stored
        self.backups.append(made)
        return made

    async def start(self) -> Backup:
        made = self.backup()
        await made.start()
        return made

    async def stop(self) -> None:
        for made in self.backups:
            await asyncio.wait_for(made.stop(), 60)
        self.backups.clear()

    # -- the store

    def store(self) -> Objects:
        return open_objects(self.url, access_for(self.settings))

    def inventory(self) -> Inventory:
        store = self.store()
        try:
            return take_inventory(store, self.backup_keys)
        finally:
            store.close()

    @property
    def backup_keys(self) -> Any:
        return StoreConnection(self.settings, self.clock, self.run.events.append).keys

    def stored(self) -> set[int]:
        """The steps of whole saves."""
        return {save.step for save in self.inventory().saves if not save.problem}

    def newest(self) -> int | None:
        found = self.inventory().newest
        return None if found is None else found.step

    def objects(self) -> dict[str, Path]:
        """Of a directory, by name below the run."""
        root = Path(self.url.removeprefix("file://")) / "run" / "podwatch"
        return {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}

    def age(self, seconds: float) -> None:
        """Everything that a directory has now becomes older."""
        for path in self.objects().values():
            info = path.stat()
            os.utime(path, (info.st_atime - seconds, info.st_mtime - seconds))

    def pass_days(self, days: float) -> None:
        """For the store and this pod's clocks."""
        self.age(days * 86400.0)
        self.clock.later += days * 86400.0

    # -- what was reported

    def names(self) -> list[str]:
        return [str(event.name) for event in self.run.events]

    def events(self, name: str) -> Iterator[Event]:
        return (event for event in self.run.events if event.name == name)

    def edit(self, **changes: Any) -> None:
        self.run.edit_now(lambda run: replace(run, **changes))
        self.held.follow(self.run.current)


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "waited in vain"
        await asyncio.sleep(0.02)
