"""Moves podwatch's directory and record when ``trainer.output_dir`` becomes prime-rl's run directory.

An installation from before 2026-08 has prime-rl's output_dir as ``trainer.output_dir``, and podwatch's directory
(record, quarantine, trash) beside it. Once the configuration names the run directory inside it, podwatch's directory is
moved there, which keeps the lineage, the desired state and the quarantine. The run lock is in the state directory and
does not change; the locks named after output_dir are taken by the keeper of each start.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

from podwatch.domain.errors import HostError, PodwatchError
from podwatch.journal.run_record_file import load_run_record, save_run_record
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import PinnedTree, RootReplaced

_MOVED = ".moved"
"""Suffix of a record that was copied to another file system."""


def take_along(run_id: str, layout: str, output_dir: Path, report: Callable[[str], None]) -> None:
    """Move this run's directory from beside the parent of ``output_dir``. Does nothing if a record exists already, if
    the old record is of another run, if one of the directories was replaced (RootWatch reports that), and for other
    layouts. Blocks. Call it before the workspace is probed. Raises HostError if the move fails."""
    if layout != "prime-rl":
        return
    new, old = Workspace(output_dir), Workspace(output_dir.parent)
    with contextlib.closing(PinnedTree((output_dir, output_dir.parent))) as tree:
        try:
            if _exists(tree, new.record) or not tree.is_directory(old.outside):
                return
            record = load_run_record(old)
        except (OSError, PodwatchError):
            return  # no record of this run found; errors of the directories are reported elsewhere
        if record is None or record.run_id != run_id:
            return
        try:
            tree.make(new.outside.parent, 0o755)
            _drop_empty(tree, new.outside)
            try:
                tree.rename(old.outside, new.outside)
                tree.sync(new.outside.parent)
                tree.sync(old.outside.parent)
            except OSError:  # another file system, or the target is not empty: copy the record only
                save_run_record(new, record)
                tree.rename(old.record, old.record.with_name(old.record.name + _MOVED))
                report(
                    f"the record of this run was copied from {old.outside} to {new.outside}, because trainer.output_dir"
                    f" is now the run directory; quarantined checkpoints are still in {old.outside}"
                )
                return
        except RootReplaced:
            return
        except (OSError, PodwatchError) as error:
            raise HostError(
                f"the record of this run is in {old.outside} and cannot be moved: {error}",
                where=str(new.outside),
                fix=f"make both directories writable for podwatch, or move {old.outside} to {new.outside} by hand",
            ) from error
    report(f"podwatch moved its directory of this run from {old.outside} to {new.outside}, as trainer.output_dir moved")


def _exists(tree: PinnedTree, path: Path) -> bool:
    return tree.lstat(path) is not None


def _drop_empty(tree: PinnedTree, directory: Path) -> None:
    """Remove the directory and its empty folders, which an earlier start can have created."""
    with contextlib.suppress(OSError):
        for name in tree.names(directory):
            tree.rmdir(directory / name)
        tree.rmdir(directory)
