"""podwatch's directory and record follow prime-rl's run directory.

An installation from before 2026-08 has prime-rl's output_dir as ``trainer.output_dir``, and podwatch's directory
(record, quarantine, trash) beside it. Once the configuration names the run directory below, that directory is moved
there: the lineage, the intended state and what was quarantined stay known. The run lock is in the state directory and
does not change; the locks named after output_dir are taken by the keeper of each start.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path

from podwatch.domain.errors import HostError, PodwatchError
from podwatch.journal.run_record import load_run_record, save_run_record
from podwatch.system.files import fsync_dir
from podwatch.system.workspace import Workspace

_MOVED = ".moved"
"""Suffix of a record that was copied to another file system."""


def take_along(run_id: str, layout: str, output_dir: Path, report: Callable[[str], None]) -> None:
    """Move what this run has beside the parent of ``output_dir``. Does nothing where there is a record already, where
    the old one is another run's, and for other layouts. Blocks. Call it before the workspace is probed."""
    new, old = Workspace(output_dir), Workspace(output_dir.parent)
    if layout != "prime-rl" or os.path.lexists(new.record) or not _plain(old.outside) or not _plain(old.output_dir):
        return
    try:
        record = load_run_record(old.record)
        if record is None or record.run_id != run_id:
            return
        new.outside.parent.mkdir(parents=True, exist_ok=True)
        _drop_empty(new.outside)
        try:
            os.rename(old.outside, new.outside)  # noqa: PTH104
            fsync_dir(new.outside.parent)
            fsync_dir(old.outside.parent)
        except OSError:  # another file system, or something of ours is there already: the record is what counts
            save_run_record(new.record, record)
            old.record.rename(old.record.with_name(old.record.name + _MOVED))
            report(
                f"the record of this run was copied from {old.outside} to {new.outside}, because trainer.output_dir is"
                f" now the run directory; what was quarantined is still in {old.outside}"
            )
            return
    except (OSError, PodwatchError) as error:
        raise HostError(
            f"the record of this run is in {old.outside} and cannot be moved: {error}",
            where=str(new.outside),
            fix=f"make both directories writable for podwatch, or move {old.outside} to {new.outside} by hand",
        ) from error
    report(f"podwatch's directory of this run was moved from {old.outside} to {new.outside}, with trainer.output_dir")


def _plain(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _drop_empty(directory: Path) -> None:
    """An earlier start may have made the directory and its empty folders."""
    try:
        with os.scandir(directory) as entries:
            names = [entry.path for entry in entries]
        for name in names:
            os.rmdir(name)  # noqa: PTH106
        directory.rmdir()
    except OSError:
        return
