"""Small files in the parent by which a trainer finds its newest checkpoint.

Most trainers write them by a plain open and write, so an empty or garbled tracker is being written: it never means step
0.
"""

import errno
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.layouts.base import Tracker
from podwatch.checkpoints.layouts.inside import Fault, Inside, StepView
from podwatch.checkpoints.structure import dcp
from podwatch.domain.errors import HostError
from podwatch.system.pinned import PinnedTree
from podwatch.system.reading import read_file

_LIMIT = 4096
_NUMBER = re.compile(r"(?:0|[1-9]\d{0,17})")


def text(path: Path) -> str:
    """The content; empty if the file is absent, empty, too large or not text (being written). OSError: it cannot be
    read."""
    try:
        return read_file(path, _LIMIT).decode().strip()
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return ""
    except OSError as error:
        if error.errno in (errno.EFBIG, errno.EINVAL, errno.ELOOP):
            return ""
        raise


def number(path: Path, pattern: re.Pattern[str] = _NUMBER) -> int | None:
    """The step that the tracker names; None if it names none."""
    match = pattern.fullmatch(text(path))
    if match is None:
        return None
    return int(match.group(match.lastindex or 0))


def has_later(view: StepView, pattern: re.Pattern[str]) -> bool:
    """Whether a later step exists. ``pattern`` is that of the step directories."""
    found = (pattern.fullmatch(p.name) for p in view.siblings())
    return any(int(m.group(1)) > view.step for m in found if m is not None)


def reached(
    tracker: Path,
    step: int,
    part: Inside,
    pattern: re.Pattern[str] = _NUMBER,
    data: str | re.Pattern[str] = r"(?!)",
    *,
    later: bool = False,
) -> None:
    """Require that the tracker shows ``step`` as done; ``Fault`` while it does not. Files that ``data`` matches must
    not be newer than a tracker that names this step: an old tracker remains while the step is written again.

    A tracker that names a lower step but was written after this checkpoint (by a repair, or by a run that went back) is
    no evidence about it: then only the checkpoint's own files count.

    ``later``: a later step exists, so this save ended long before the tracker was opened again. If that left it empty,
    garbled or missing (a kill at the wrong moment), the later step is in doubt, not this one.
    """
    try:
        status = tracker.stat()
    except (FileNotFoundError, NotADirectoryError):
        if later:
            return
        raise Fault(f"{tracker.name} is missing: it is written last", part=part.part) from None
    said = number(tracker, pattern)
    if said is None:
        if later:
            return
        raise Fault(f"{tracker.name} is empty or garbled: it is being written", part=part.part)
    newest = max((f.mtime_ns for n, f in part.files.items() if said < step or re.fullmatch(data, n)), default=0)
    if said >= step:
        if said == step and newest > status.st_mtime_ns + dcp.MTIME_TOLERANCE_NS:
            raise Fault(
                f"files are newer than {tracker.name}: being overwritten, or an overwrite was interrupted",
                part=part.part,
            )
        return
    if status.st_mtime_ns <= newest + dcp.MTIME_TOLERANCE_NS:
        raise Fault(f"{tracker.name} names step {said}: the save of step {step} has not finished", part=part.part)


def as_number(path: Path, step: int | None) -> tuple[Tracker, ...]:
    """The tracker for a start from ``step``: its number as text, as all trainers write it."""
    return () if step is None else (Tracker(path, content=str(step).encode()),)


def pinned(path: Path, pattern: re.Pattern[str] = _NUMBER) -> Mapping[int, str]:
    """The step a tracker names, with its name as the reason."""
    try:
        step = number(path, pattern)
    except OSError:
        return {}
    return {} if step is None else {step: f"named by {path.name}"}


def link_target(path: Path) -> str:
    """The last segment of a symlink's target; empty if it is no symlink. Only a hint: replacing a link leaves a gap."""
    try:
        return os.path.basename(os.readlink(path))  # noqa: PTH115, PTH119 - the text, not a resolved path
    except OSError:
        return ""


def repair(trackers: Iterable[Tracker], tree: PinnedTree, *, only_missing: bool = False) -> tuple[Path, ...]:
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
            with tree.directory(path.parent) as fd:
                status = os.fstat(fd)
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
        _write(tree, tracker, now.status, status)
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
        return self.target is None and self.text == (tracker.content or b"").decode().strip()

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
        return _Now(status, text=tree.read(path, _LIMIT).decode().strip())
    except (OSError, UnicodeDecodeError):
        return _Now(status)  # too large, gone, or not text: no content


def _write(tree: PinnedTree, tracker: Tracker, old: os.stat_result | None, directory: os.stat_result) -> None:
    """Write it with the mode and owner of the old one, or the directory's owner: the trainer must be able to overwrite
    it."""
    like = directory if old is None else old
    if tracker.target is not None:
        tree.write_link(tracker.path, tracker.target, directory.st_uid if os.geteuid() == 0 else None)
        return
    mode = stat.S_IMODE(old.st_mode) if old is not None and stat.S_ISREG(old.st_mode) else 0o644
    owner = (like.st_uid, like.st_gid) if os.geteuid() == 0 else None
    tree.write_as(tracker.path, tracker.content or b"", mode & 0o777, owner)


def wrong(trackers: Iterable[Tracker]) -> tuple[Path, ...]:
    """The trackers that ``repair`` would write. Changes nothing."""
    return tuple(t.path for t in trackers if _wrong(t))


def _wrong(tracker: Tracker) -> bool:
    return tracker.path.parent.is_dir() and not _says(tracker)


def _says(tracker: Tracker) -> bool:
    if tracker.target is not None:
        try:
            return os.readlink(tracker.path) == tracker.target  # noqa: PTH115 - the text, not the resolved target
        except OSError:
            return False
    return not tracker.path.is_symlink() and text(tracker.path) == (tracker.content or b"").decode().strip()
