"""Keeps a checkpoint by podwatch's own hard links while it is sent, where the trainer removes checkpoints faster than
they can be uploaded (docs/sync.md).

The links are in podwatch's directory beside the trainer's directories, on the same filesystem, which is found out by
linking. They cost no space until the trainer removes its own names; from then on the checkpoint takes space that
training counts on. So a checkpoint is kept only while the next save still fits, and released as soon as it does not.
Everything here blocks.

The intent records what was judged, so that a podwatch that starts later can finish the upload.
"""

import contextlib
import json
import os
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from podwatch.checkpoints.known_checkpoints import SetContents
from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.errors import HostError
from podwatch.domain.run import Intent, IntentKind, IntentState
from podwatch.journal.journal import Journal
from podwatch.system.files import open_dir_below
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import PinnedTree
from podwatch.system.rename_places import corners, corners_of, drop_empty

WHAT = "uploading"
"""The directory of podwatch that contains the links."""


@dataclass(frozen=True, slots=True)
class Held:
    """``contents`` is the checkpoint as it was found complete, with its parts' directories replaced by ours."""

    contents: SetContents
    places: tuple[Path, ...]
    intent: int
    lineage: str = ""

    def is_of(self, step: int, save_id: str) -> bool:
        return (self.contents.set.step, self.contents.set.save_id) == (step, save_id)

    def is_wanted(self, lineage: str | None, published: Collection[tuple[int, str]]) -> bool:
        found = self.contents.set
        return self.lineage == lineage and (found.step, found.save_id) not in published


class Holder:
    """Holds at most one checkpoint. ``margin`` is that of the space for the next save."""

    def __init__(self, workspace: Workspace, journal: Journal, margin: float) -> None:
        self._workspace, self._journal, self._margin = workspace, journal, margin
        self._tree = workspace.tree

    def hold(self, contents: SetContents, lineage: str = "") -> Held | None:
        """Link every file that is sent. None where that is impossible: no space, other filesystems, not permitted, or
        the checkpoint is changing already; all links are then removed. Raises HostError when it cannot be journaled."""
        chosen = contents.set
        sent = {f.part for f in contents.files}
        homes = {p.part.name: self._home(p.part.path) for p in contents.parts if p.part.name in sent}
        used = {home for home in homes.values() if home is not None}
        if not used or None in homes.values() or any(self._cramped(home, contents) for home in used):
            return None
        name = f"{chosen.step}.{chosen.save_id}"
        places = tuple(sorted(home / name for home in used))
        parts = tuple(
            replace(p, part=replace(p.part, path=home / name / p.part.name))
            if (home := homes.get(p.part.name)) is not None
            else p
            for p in contents.parts
        )
        copy = replace(contents, parts=parts)
        brief = replace(copy, parts=tuple(replace(p, files=(), symlinks=()) for p in parts))
        data = {
            "step": chosen.step,
            "save_id": chosen.save_id,
            "places": [str(place) for place in places],
            "lineage": lineage,
            "contents": json.loads(json.dumps(asdict(brief), default=str)),
        }
        held = Held(copy, places, self._journal.open_intent(IntentKind.HOLD, data).id, lineage)
        try:
            for part, ours in zip(contents.parts, parts, strict=True):
                if part is not ours:
                    files = [f for f in contents.files if f.part == part.part.name]
                    _link(self._tree, part.part.path, ours.part.path, files)
        except (OSError, HostError):
            self.release(held)
            return None
        return held

    def unchanged(self, held: Held) -> bool:
        """Is every file still as it was when found complete? A file that the trainer wrote to is not."""
        try:
            for part in held.contents.parts:
                files = [f for f in held.contents.files if f.part == part.part.name]
                if not files:
                    continue
                with self._tree.directory(part.part.path) as root:
                    if not all(_is_there(root, file) for file in files):
                        return False
        except (OSError, HostError):
            return False
        return True

    def cramped(self, held: Held) -> bool:
        """True when only our links keep the checkpoint, and the next save needs its bytes."""
        cramped = any(self._cramped(place.parent, held.contents) for place in held.places)
        return cramped and not self._elsewhere(held)

    def release(self, held: Held) -> None:
        """Remove the links. ``tidy`` finds what cannot be removed now."""
        for place in held.places:
            self._remove(place)
        with contextlib.suppress(HostError):
            self._journal.settle(held.intent, IntentState.DONE, "let go")

    def take_over(self, lineage: str | None, published: Collection[tuple[int, str]] = ()) -> Held | None:
        """At the start: return what an earlier podwatch held of this lineage and did not publish, if its links are
        whole and the next save fits beside it. All other held checkpoints are removed; with None all."""
        kept: Held | None = None
        with contextlib.suppress(HostError):
            for intent in reversed(self._journal.open_intents(IntentKind.HOLD)):
                held = _recorded(intent)
                if kept is None and held is not None and self._is_whole(held) and held.is_wanted(lineage, published):
                    kept = held
                else:
                    self._journal.settle(intent.id, IntentState.UNDONE, "let go after a restart")
        places = frozenset() if kept is None else frozenset(kept.places)
        for home in corners_of(self._workspace, WHAT):
            with contextlib.suppress(OSError):
                for name in self._tree.names(home):
                    if home / name not in places:
                        self._remove(home / name)
                drop_empty(self._tree, home)
        return kept

    # -- inside -------------------------------------------------------------------------------------------------------

    def _is_whole(self, held: Held) -> bool:
        """Are the recorded places where we hold checkpoints now, with every file as it was, and do they fit there?"""
        homes = frozenset(corners_of(self._workspace, WHAT))
        try:
            inside = all(place.parent in homes for place in held.places)
            return inside and self.unchanged(held) and not self.cramped(held)
        except (OSError, HostError):
            return False

    def _home(self, path: Path) -> Path | None:
        """The first of our directories that takes a link of a file below ``path``; never inside the checkpoint."""
        for candidate in corners(path, self._workspace, WHAT):
            if path.parent in candidate.parents:
                continue
            try:
                self._tree.make(candidate)
                self._try(path, candidate)
            except OSError:
                drop_empty(self._tree, candidate)
                continue
            except HostError:
                return None
            return candidate
        return None

    def _try(self, path: Path, home: Path) -> None:
        """Link the first regular file below ``path``; OSError where that is refused."""
        with self._tree.directory(path) as source, self._tree.directory(home) as target:
            for _, _, names, fd in os.fwalk(dir_fd=source):
                for name in names:
                    if stat.S_ISREG(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                        probe = f".probe.{os.getpid()}"
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(probe, dir_fd=target)
                        os.link(name, probe, src_dir_fd=fd, dst_dir_fd=target, follow_symlinks=False)
                        os.unlink(probe, dir_fd=target)
                        return

    def _cramped(self, home: Path, contents: SetContents) -> bool:
        size = sum(f.size for f in contents.files)
        with self._tree.directory(home) as fd:
            return free_bytes(fd) < size * self._margin

    def _elsewhere(self, held: Held) -> bool:
        """Does every file still have a name that is not ours?"""
        with contextlib.suppress(OSError, HostError):
            for place in held.places:
                with self._tree.directory(place) as root:
                    for _, _, names, fd in os.fwalk(dir_fd=root):
                        if any(os.stat(n, dir_fd=fd, follow_symlinks=False).st_nlink < 2 for n in names):
                            return False
            return True
        return False

    def _remove(self, place: Path) -> None:
        with contextlib.suppress(OSError, HostError):
            self._tree.remove_tree(place)
            drop_empty(self._tree, place.parent)


def free_bytes(directory: int) -> int:
    """Free bytes of an open directory's filesystem, for a user who is not root."""
    room = os.fstatvfs(directory)
    return room.f_bavail * room.f_frsize


def _recorded(intent: Intent) -> Held | None:
    """The checkpoint that an intent records; None for an intent of a version that did not record it."""
    data: Mapping[str, Any] = intent.data
    try:
        contents = TypeAdapter(SetContents).validate_python(data["contents"])
        places = tuple(Path(place) for place in data["places"])
    except (KeyError, TypeError, ValidationError):
        return None
    roots = [p.part.path for p in contents.parts if any(f.part == p.part.name for f in contents.files)]
    if not places or any(not any(place in root.parents for place in places) for root in roots):
        return None
    return Held(contents, places, intent.id, str(data.get("lineage", "")))


def _link(tree: PinnedTree, source: Path, target: Path, files: Sequence[FileEntry]) -> None:
    """Link exactly the files that were judged: each link is compared once it exists."""
    tree.make(target)
    with tree.directory(source) as source_root, tree.directory(target) as target_root:
        for file in files:
            parent, _, name = file.path.rpartition("/")
            old = open_dir_below(source_root, parent)
            try:
                new = open_dir_below(target_root, parent, create=True, mode=0o700)
                try:
                    os.link(name, name, src_dir_fd=old, dst_dir_fd=new, follow_symlinks=False)
                    if not _same(os.stat(name, dir_fd=new, follow_symlinks=False), file):
                        os.unlink(name, dir_fd=new)
                        raise FileNotFoundError(file.path)
                finally:
                    os.close(new)
            finally:
                os.close(old)


def _is_there(root: int, file: FileEntry) -> bool:
    parent, _, name = file.path.rpartition("/")
    directory = open_dir_below(root, parent)
    try:
        return _same(os.stat(name, dir_fd=directory, follow_symlinks=False), file)
    finally:
        os.close(directory)


def _same(found: os.stat_result, file: FileEntry) -> bool:
    regular = stat.S_ISREG(found.st_mode)
    is_ = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    return regular and is_ == (file.device, file.inode, file.size, file.mtime_ns)
