"""Sets the tracker files of a trainer (its own "latest") to the step of a start, and tells which are wrong."""

import errno
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.shapes import Tracker
from podwatch.domain.errors import HostError
from podwatch.system.pinned_directories import PinnedTree

TRACKER_LIMIT = 4096


def repair_trackers(trackers: Iterable[Tracker], tree: PinnedTree, *, only_missing: bool = False) -> tuple[Path, ...]:
    """Write the content that a start needs into the trackers, each by one atomic rename; correct ones stay unchanged.
    Returns the written paths. ``only_missing``: a tracker that names a step stays unchanged. Raises HostError: outside
    the trainer's directories, or behind a link; OSError.

    Never call it while a trainer runs: it can be writing the same file.
    """
    written = []
    for tracker in trackers:
        path = tracker.path
        if not tree.contains(path):
            raise HostError("podwatch does not write a tracker outside the run's directories", where=str(path))
        try:
            now = _now(tree, path)
        except FileNotFoundError:
            continue  # no directory yet: the trainer creates it
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            raise HostError(
                "podwatch does not write a tracker outside the run's directories: its path contains a symbolic link",
                where=str(path),
                fix="replace the link by a directory",
            ) from error
        if now.says(tracker) or (only_missing and now.names_something):
            continue
        _write(tree, tracker, now.status)
        written.append(path)
    return tuple(written)


@dataclass(frozen=True, slots=True)
class _Now:
    """The present state of a tracker: a link with its target, a file with its text, or neither."""

    status: os.stat_result | None
    target: str | None = None
    text: str = ""

    def says(self, tracker: Tracker) -> bool:
        if tracker.target is not None:
            return self.target == tracker.target
        return self.target is None and self.text == (tracker.content or b"").strip().decode()

    @property
    def names_something(self) -> bool:
        return self.target is not None or self.text != ""


def _now(tree: PinnedTree, path: Path) -> _Now:
    with tree.parent(path) as (directory, name):
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                return _Now(status, os.readlink(name, dir_fd=directory))
            if not stat.S_ISREG(status.st_mode):
                return _Now(status)
        except FileNotFoundError:
            return _Now(None)
    try:
        return _Now(status, text=tree.read(path, TRACKER_LIMIT).strip().decode())
    except (OSError, UnicodeDecodeError):
        return _Now(status)  # too large, gone, or not text: no content


def _write(tree: PinnedTree, tracker: Tracker, old: os.stat_result | None) -> None:
    """Write it with the mode of the old one."""
    if tracker.target is not None:
        tree.write_link(tracker.path, tracker.target)
        return
    mode = stat.S_IMODE(old.st_mode) if old is not None and stat.S_ISREG(old.st_mode) else 0o644
    tree.write(tracker.path, tracker.content or b"", mode & 0o777)


def wrong_trackers(trackers: Iterable[Tracker], tree: PinnedTree) -> tuple[Path, ...]:
    """The trackers that ``repair_trackers`` would write, or refuse to. Changes nothing. Blocks."""
    return tuple(t.path for t in trackers if _is_wrong(t, tree))


def _is_wrong(tracker: Tracker, tree: PinnedTree) -> bool:
    try:
        return not _now(tree, tracker.path).says(tracker)
    except FileNotFoundError:
        return False  # no directory yet
    except (OSError, HostError):
        return True
