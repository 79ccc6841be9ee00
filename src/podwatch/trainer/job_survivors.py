"""Processes that an earlier attempt of the same job left behind.

A keeper in job mode ends with its owner, podwatch's init. One that is still there is just ending, or is stuck, or the
engine has started the job twice. It is ended only if its record says job mode, the same job and the same run, and if
its owner is dead (docs/jobs.md). Everything here blocks.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from podwatch.domain.engine_and_attempt import Instance
from podwatch.domain.errors import Busy
from podwatch.domain.process import ProcessIdentity
from podwatch.system import procfs
from podwatch.system.files import read_small
from podwatch.trainer.keeper_client import JobRecord, job_record, read_record, retire_record, was_stopped

POLL: Final = 0.05
KILL_SECONDS: Final = 10.0
"""Seconds that a killed process gets to end: one that is stuck in the kernel is left to the start, which refuses."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A keeper in job mode of this run, as its record or a lock file names it; it can have ended."""

    keeper: ProcessIdentity
    job: JobRecord
    directory: Path
    start_id: str


def kept_by_jobs(run_id: str, directory: Path, output_dir: Path) -> tuple[Kept, ...]:
    """The keepers in job mode that the record in ``directory`` and the lock files of ``output_dir`` name."""
    found: dict[ProcessIdentity, Kept] = {}
    with contextlib.suppress(OSError):
        record = read_record(directory)
        if record is not None and record.job is not None and record.run_id == run_id:
            found[record.keeper] = Kept(record.keeper, record.job, directory, record.start_id)
    for kept in _in_lock_files(run_id, output_dir):
        found.setdefault(kept.keeper, kept)
    return tuple(kept for kept in found.values() if procfs.from_here(kept.keeper))


def _in_lock_files(run_id: str, output_dir: Path) -> Iterator[Kept]:
    from podwatch.trainer import keeper  # in job mode only: the daemon saves its memory

    real = os.path.realpath(output_dir)
    names = [name for name in (keeper.path_lock_name(real), keeper.inode_lock_name(real)) if name]
    for parent in keeper.LOCK_PARENTS:
        place = Path(parent.format(uid=os.geteuid()), f"podwatch-locks-{os.geteuid()}")
        for name in names:
            try:
                if place.lstat().st_uid != os.geteuid() or (place / name).lstat().st_uid != os.geteuid():
                    continue
                said = json.loads(read_small(place / name) or b"{}")
            except (OSError, ValueError):
                continue
            if isinstance(said, dict) and (kept := _of_lock(said, run_id)) is not None:
                yield kept


def _of_lock(said: dict[str, object], run_id: str) -> Kept | None:
    try:
        boot, namespace = str(said["boot_id"]), int(str(said["pid_namespace"]))
        keeper = ProcessIdentity(int(str(said["keeper"])), int(str(said["keeper_ticks"])), boot, namespace)
        job = job_record(said["job"], boot, namespace)
    except (KeyError, ValueError):
        return None
    if job is None or said.get("run_id") != run_id:
        return None
    return Kept(keeper, job, Path(str(said.get("directory", ""))), str(said.get("start_id", "")))


def clear(kept: tuple[Kept, ...], own: ProcessIdentity, instance: Instance, grace: float) -> tuple[str, ...]:
    """End what an earlier attempt of this job left, and retire its record; returns what was ended, as text.

    ``own``: this podwatch's init, whose keeper is left alone: a restarted daemon adopts it. ``grace``: seconds from
    SIGTERM to SIGKILL. Raises Busy while another podwatch's job, or the rest of another engine job, is alive here.
    """
    ended: list[str] = []
    for one in kept:
        if one.job.owner == own:
            continue
        alive = procfs.is_alive(one.keeper)
        if procfs.is_alive(one.job.owner):
            raise Busy(
                f"another podwatch job of this run is alive on this machine (process {one.job.owner.pid})",
                fix="wait until it has ended",
            )
        if alive and (one.job.provider, one.job.id) != (instance.provider, instance.id):
            raise Busy(
                f"training of another job of this run is still ending here (keeper {one.keeper.pid}, job"
                f" {one.job.id or 'without an id'})",
                fix="wait until it has ended",
            )
        if alive:
            _end(one.keeper, grace)
            ended.append(f"keeper {one.keeper.pid} of an earlier attempt")
        _retire(one)
    return tuple(ended)


def _end(keeper: ProcessIdentity, grace: float) -> None:
    """The keeper passes SIGTERM on, and SIGKILL after its own grace; one that does not is killed with its tree."""
    procfs.send_signal(keeper, signal.SIGTERM)
    procfs.send_signal(keeper, signal.SIGCONT)
    if _gone([keeper], grace):
        return
    tree = [one for pid in procfs.descendants(keeper.pid) if (one := procfs.identify(pid)) is not None]
    for one in (*tree, keeper):
        procfs.send_signal(one, signal.SIGKILL)
    _gone([*tree, keeper], KILL_SECONDS)


def _gone(processes: list[ProcessIdentity], within: float) -> bool:
    until = time.monotonic() + within
    while any(procfs.is_alive(one) for one in processes):
        if time.monotonic() >= until:
            return False
        time.sleep(POLL)
    return True


def _retire(one: Kept) -> None:
    """Of a start that was told to end, nothing is left to judge: its exit is no failure of training."""
    with contextlib.suppress(OSError):
        record = read_record(one.directory)
        if record is not None and record.keeper == one.keeper and was_stopped(one.directory, one.start_id):
            retire_record(one.directory)
