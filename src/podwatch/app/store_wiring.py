"""What the daemon gives the store and takes from it: the backup of this run, and restores for recovery."""

import os
from typing import TYPE_CHECKING

from podwatch.app.backup.backup import Backup
from podwatch.app.backup.connection import StoreConnection
from podwatch.app.backup.outbox import Outbox
from podwatch.app.backup.run_side import TAKE_OVER, RunSide, WandbIds, this_pod
from podwatch.app.state_check import Exits
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.config.settings import Settings
from podwatch.disk.next_save import median_gap
from podwatch.sensors.processes import ProcessSensor
from podwatch.store.lease import Lease
from podwatch.store.lease_rules import LeaseTiming
from podwatch.store.objects.directory import is_on_file_system_of

if TYPE_CHECKING:
    from podwatch.app.checkpoint_loop import Rescans
    from podwatch.app.components import Choices, Run
    from podwatch.store.restore.thread import RestoreThread


def no_backup(settings: Settings, same_disk_store: bool) -> str:
    """Why the store is refused, else empty: a directory on the checkpoints' own filesystem is no backup."""
    url, output = settings.sync.store, settings.trainer.output_dir
    if not url.startswith("file:") or same_disk_store or not is_on_file_system_of(url, output):
        return ""
    return f"{url} is on the same filesystem as {output}: it must be on another volume, or a bucket"


def make_backup(
    settings: Settings, run: "Run", catalogue: Catalogue, processes: ProcessSensor, exits: Exits, wandb: WandbIds,
    rescans: "Rescans", choices: "Choices",
) -> Backup:  # fmt: skip
    """The backup of this run; asks the store nothing yet. Blocks on the disk."""
    record, clock = run.file.current, run.clock
    take_over = choices.take_over if record.executed.get(TAKE_OVER) != choices.take_over else ""
    me = this_pod(record.writer_id, settings.trainer.output_dir, os.environ)
    side = RunSide(settings, run, processes, exits, wandb, rescans, pod=me, take_over=take_over)
    connection = StoreConnection(settings, clock, run.emit)
    lease = Lease(
        me, connection.keys, clock, side, timing_of(settings), take_over=bool(take_over),
        stands_by=choices.job is not None,
    )  # fmt: skip
    outbox = Outbox(run.paths.state / "sent", run.workspace, settings.disk.margin)
    return Backup(
        settings, side, catalogue, run.journal, clock, connection, lease, outbox,
        save_gap=lambda: median_gap(catalogue.records.all),
    )  # fmt: skip


def timing_of(settings: Settings) -> LeaseTiming:
    sync = settings.sync
    return LeaseTiming(sync.holder_patience, sync.claim_wait, heartbeat=sync.heartbeat, refusal=sync.refusal_wait)


# -- restores --------------------------------------------------------------------------------------------------------


def make_restore(settings: Settings, run: "Run", backup: Backup, name: str) -> "RestoreThread":
    """A thread for restores of this run, which reads the key at each use. What it fetches stays in the store."""
    from podwatch.store.keys import RunKeys
    from podwatch.store.objects.access import access_for
    from podwatch.store.objects.open import parse_url
    from podwatch.store.restore.restore import Restorer, StoreOfRun
    from podwatch.store.restore.thread import RestoreThread

    url = settings.sync.store
    keys = RunKeys(settings.run_id, parse_url(url).prefix)
    store = StoreOfRun(url, keys, lambda: access_for(run.config.settings), settings.sync.connections)
    restore = RestoreThread(Restorer(store, run.layout, run.workspace, run.record_files), name)
    backup.restores.append(restore)
    return restore
