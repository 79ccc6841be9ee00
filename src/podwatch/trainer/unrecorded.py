"""The trainer of a keeper whose records cannot be read: found by the keeper's own command line.

Its state directory may be unreadable (its disk failed, its owner changed) while the trainer runs. podwatch then
attaches to it, as to a trainer that it did not start, until the records can be read again.
"""

import os
import time
from pathlib import Path

from podwatch.domain.process import ProcessIdentity
from podwatch.system import procfs
from podwatch.system.procfs import boot_id, pid_namespace
from podwatch.trainer.base import Candidate

_PROGRAMS = frozenset({"keeper.py", "keeper.pyc"})


def kept_by(directory: Path) -> Candidate | None:
    """Return the trainer that the keeper of this directory started, if it lives and the keeper runs as our user.
    Blocks: reads all of /proc once."""
    parents: dict[int, list[int]] = {}
    keepers = []
    for pid in procfs.all_pids():
        status = procfs.read_stat(pid)
        if status is None or status.state in "ZXx":
            continue
        parents.setdefault(status.parent_pid, []).append(pid)
        if _is_keeper(procfs.command(pid), directory) and _owner(pid) == os.geteuid():
            keepers.append(pid)
    for launcher in sorted(child for keeper in keepers for child in parents.get(keeper, [])):
        status = procfs.read_stat(launcher)
        if status is None:
            continue
        identity = ProcessIdentity(launcher, status.start_ticks, boot_id(), pid_namespace())
        command = " ".join(procfs.command(launcher)) or status.name
        age = identity.age(time.clock_gettime(time.CLOCK_BOOTTIME))
        return Candidate(identity, command, f"the keeper in {directory} started it", of_run=True, age=age)
    return None


def _is_keeper(argv: tuple[str, ...], directory: Path) -> bool:
    return str(directory) in argv and any(os.path.basename(word) in _PROGRAMS for word in argv)  # noqa: PTH119


def _owner(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None
