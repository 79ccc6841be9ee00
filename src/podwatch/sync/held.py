"""A set held by hard links of our own while it is sent, where the trainer removes sets faster than they can be uploaded
(DESIGN section 5).

The links lie in podwatch's corner beside the trainer's directories, on the same filesystem, which is found out by
linking. They cost no space until the trainer removes its own names; from then on the set takes room that training
counts on, so that a set is held only where the next save fits all the same, and let go as soon as it does not.
Everything here blocks.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from podwatch.checkpoints.catalogue import SetContents
from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.errors import HostError
from podwatch.domain.intent import IntentKind, IntentState
from podwatch.journal.journal import Journal
from podwatch.system.aside import corners, corners_of, drop_empty
from podwatch.system.files import open_below, open_dir_below, open_root, remove_tree
from podwatch.system.workspace import Workspace

WHAT = "uploading"
"""The directory of ours that holds them."""


@dataclass(frozen=True, slots=True)
class Held:
    """``contents`` is the set as it was found complete, with its parts' directories replaced by ours."""

    contents: SetContents
    places: tuple[Path, ...]
    intent: int


class Holder:
    """At most one set at a time. ``margin`` is that of the room for the next save."""

    def __init__(self, workspace: Workspace, roots: Sequence[Path], journal: Journal, margin: float) -> None:
        self._workspace, self._roots, self._journal, self._margin = workspace, tuple(roots), journal, margin

    def hold(self, contents: SetContents) -> Held | None:
        """Link every file that travels. None where that cannot be: no room, other filesystems, not allowed, or the set
        is changing already; whatever was linked is gone then. Raises HostError when it cannot be journaled."""
        chosen = contents.set
        sent = {f.part for f in contents.files}
        homes = {p.part.name: self._home(p.part.path) for p in contents.parts if p.part.name in sent}
        used = {home for home in homes.values() if home is not None}
        if not used or None in homes.values() or any(self._cramped(home, contents) for home in used):
            return None
        name = f"{chosen.step}.{chosen.save_id}"
        places = tuple(sorted(home / name for home in used))
        data = {"step": chosen.step, "save_id": chosen.save_id, "places": [str(place) for place in places]}
        intent = self._journal.open_intent(IntentKind.HOLD, data).id
        parts = tuple(
            replace(p, part=replace(p.part, path=home / name / p.part.name))
            if (home := homes.get(p.part.name)) is not None
            else p
            for p in contents.parts
        )
        held = Held(replace(contents, parts=parts), places, intent)
        try:
            for part, copy in zip(contents.parts, parts, strict=True):
                if part is not copy:
                    files = [f for f in contents.files if f.part == part.part.name]
                    _link(part.part.path, copy.part.path, files)
        except OSError:
            self.release(held)
            return None
        return held

    def unchanged(self, held: Held) -> bool:
        """Is every file still what was found complete? One that the trainer wrote into is not."""
        try:
            for part in held.contents.parts:
                if any(f.part == part.part.name for f in held.contents.files):
                    root = open_root(part.part.path)
                    try:
                        for file in held.contents.files:
                            if file.part == part.part.name:
                                descriptor = open_below(root, file.path, os.O_RDONLY | os.O_NONBLOCK)
                                try:
                                    if not _same(os.fstat(descriptor), file):
                                        return False
                                finally:
                                    os.close(descriptor)
                    finally:
                        os.close(root)
        except OSError:
            return False
        return True

    def cramped(self, held: Held) -> bool:
        """Nobody but us has the set any more, and its bytes are needed for the next save."""
        return any(self._cramped(place.parent, held.contents) for place in held.places) and not _elsewhere(held)

    def release(self, held: Held) -> None:
        """Let go of it. What cannot be removed now is found by ``tidy``."""
        for place in held.places:
            self._remove(place)
        with contextlib.suppress(HostError):
            self._journal.settle(held.intent, IntentState.DONE, "let go")

    def tidy(self) -> None:
        """Remove everything that is held, as at the start of a podwatch: what an earlier one held."""
        for home in corners_of(self._workspace, self._roots, WHAT):
            with contextlib.suppress(OSError):
                for entry in list(os.scandir(home)):
                    self._remove(Path(entry.path))
                drop_empty(home)
        with contextlib.suppress(HostError):
            for intent in self._journal.open_intents(IntentKind.HOLD):
                self._journal.settle(intent.id, IntentState.UNDONE, "let go after a restart")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _home(self, path: Path) -> Path | None:
        """The first place of ours that takes a link of a file below ``path``. Never inside the set's own directory."""
        for candidate in corners(path, self._workspace, self._roots, WHAT):
            if path.parent in candidate.parents:
                continue
            try:
                candidate.mkdir(parents=True, exist_ok=True, mode=0o700)
                _try(path, candidate)
            except OSError:
                drop_empty(candidate)
                continue
            return candidate
        return None

    def _cramped(self, home: Path, contents: SetContents) -> bool:
        size = sum(f.size for f in contents.files)
        return shutil.disk_usage(home).free < size * self._margin

    @staticmethod
    def _remove(place: Path) -> None:
        with contextlib.suppress(OSError, ValueError):
            remove_tree(place.parent, place.name)
            drop_empty(place.parent)


def _try(path: Path, home: Path) -> None:
    """One link of the first regular file below ``path``; OSError where it is refused."""
    for directory, _, names in os.walk(path):
        for name in names:
            source = Path(directory) / name
            if stat.S_ISREG(os.lstat(source).st_mode):
                probe = home / f".probe.{os.getpid()}"
                with contextlib.suppress(FileNotFoundError):
                    probe.unlink()
                os.link(source, probe, follow_symlinks=False)
                probe.unlink()
                return


def _link(source: Path, target: Path, files: Sequence[FileEntry]) -> None:
    target.mkdir(parents=True, mode=0o700)
    source_root, target_root = open_root(source), open_root(target)
    try:
        for file in files:
            parent, _, name = file.path.rpartition("/")
            old = open_dir_below(source_root, parent)
            try:
                new = open_dir_below(target_root, parent, create=True, mode=0o700)
                try:
                    os.link(name, name, src_dir_fd=old, dst_dir_fd=new, follow_symlinks=False)
                    if not _same(os.stat(name, dir_fd=new, follow_symlinks=False), file):
                        raise FileNotFoundError(file.path)
                finally:
                    os.close(new)
            finally:
                os.close(old)
    finally:
        os.close(source_root)
        os.close(target_root)


def _same(found: os.stat_result, file: FileEntry) -> bool:
    regular = stat.S_ISREG(found.st_mode)
    is_ = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    return regular and is_ == (file.device, file.inode, file.size, file.mtime_ns)


def _elsewhere(held: Held) -> bool:
    """Does every file still have a name that is not ours?"""
    with contextlib.suppress(OSError):
        for place in held.places:
            for directory, _, names in os.walk(place):
                if any(os.lstat(Path(directory) / name).st_nlink < 2 for name in names):
                    return False
        return True
    return False
