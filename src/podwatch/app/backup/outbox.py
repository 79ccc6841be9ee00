"""Keeps what is being sent: hard links of its files, the record of it, and the list of pieces that were sent.

A trainer can delete a checkpoint sooner than its upload ends. So its files get names of podwatch's own, beside the
trainer's directories on the same file system, which is found out by linking; where that fails the originals are sent.
Links cost no space until the trainer removes its own names; from then on they take space that training counts on, so a
checkpoint is linked only while the next save still fits, and given up as soon as it does not.

The record is written before the links, so that whatever a crash leaves is found and finished, or removed. It lies with
the list of sent pieces in the state directory, where nobody else can write. Everything here blocks.
"""

import contextlib
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from podwatch.checkpoints.known_checkpoints import SetContents
from podwatch.domain.checkpoint import FileEntry, SymlinkEntry
from podwatch.domain.document import (
    Document,
    Flag,
    Label,
    Many,
    Positive,
    Real,
    RunId,
    SaveId,
    Text,
    Texts,
    Whole,
)
from podwatch.domain.errors import HostError, IntegrityError
from podwatch.domain.safe_links import restorable
from podwatch.store.documents import SaveIntent
from podwatch.store.transfer.job import SentPiece, read_sent
from podwatch.store.transfer.send import SourceForeign, identity_of, why_foreign
from podwatch.system.files import atomic_write, open_dir_below, read_small
from podwatch.system.own_directories import Workspace, own_directory
from podwatch.system.rename_places import corners, corners_of, drop_empty

WHAT = "uploading"
"""podwatch's directory that contains the links."""


@dataclass(frozen=True, slots=True)
class OutgoingSave(Document):
    """``step`` and ``save_id`` as this pod names the checkpoint, ``stored_as`` its id in the store. ``roots``: the
    directory of each part; with ``linked`` they are podwatch's own and have every file by a hard link, whose owner was
    judged. ``start_id`` and ``from_step``: the start of training that wrote it."""

    KIND = "podwatch-outgoing"
    FILE = "record of an upload"
    LARGEST = 64 << 20

    run_id: RunId
    step: Whole
    save_id: SaveId
    stored_as: SaveId
    layout: Label
    piece_size: Positive
    files: Many[FileEntry]
    roots: Texts
    symlinks: Many[SymlinkEntry] = ()
    lineage: Label = ""
    start_id: Text = ""
    from_step: Whole | None = None
    world_size: Positive | None = None
    began_wall: Real = 0.0
    boot_id: Text = ""
    """Of the boot in which it was inspected: what a power cut may have taken is not sent."""
    linked: Flag = False

    @property
    def key(self) -> tuple[int, str]:
        return (self.step, self.save_id)

    @property
    def stored_key(self) -> tuple[int, str]:
        return (self.step, self.stored_as)

    @property
    def name(self) -> str:
        return f"{self.step}.{self.save_id}"

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def intent(self, writer_id: str, generation: int, wall: float) -> SaveIntent:
        """Raises ValueError, IntegrityError for names that no store can hold."""
        return SaveIntent(
            self.run_id, self.step, self.stored_as, writer_id, generation, wall, self.layout, self.piece_size,
            tuple(replace(file, inode=0, device=0) for file in self.files), self.symlinks,
        )  # fmt: skip


def outgoing_files(files: Iterable[FileEntry]) -> tuple[FileEntry, ...]:
    return tuple(sorted(files, key=lambda file: (file.part, file.path)))


def outgoing_links(contents: SetContents) -> tuple[SymlinkEntry, ...]:
    """Those that a restore can make again."""
    return restorable([file.name for file in contents.files], sorted(contents.symlinks, key=lambda link: link.name))


def used_parts(files: Iterable[FileEntry]) -> Iterator[str]:
    yield from dict.fromkeys(file.part for file in files)


@dataclass(slots=True)
class Outbox:
    """``directory``: in the state directory. ``margin``: that of the space for the next save."""

    directory: Path
    workspace: Workspace
    margin: float

    # -- what is there

    def found(self) -> tuple[OutgoingSave, ...]:
        """What an earlier podwatch left, by step. Links and lists without a readable record are removed."""
        own_directory(self.directory, 0o700)
        saves = []
        for path in sorted(self.directory.glob("*.json")):
            with contextlib.suppress(OSError, IntegrityError):
                saves.append(OutgoingSave.from_bytes(read_small(path, OutgoingSave.LARGEST), where=str(path)))
        names = {save.name for save in saves}
        for path in self.directory.iterdir():
            if path.is_file() and path.name.removesuffix(".sent").removesuffix(".json") not in names:
                path.unlink(missing_ok=True)
        self._remove_links(keep=names)
        return tuple(sorted(saves, key=lambda save: save.step))

    def sent(self, save: OutgoingSave) -> dict[str, SentPiece]:
        """By name."""
        return read_sent(self.sent_path(save))

    def sent_path(self, save: OutgoingSave) -> Path:
        return self.directory / f"{save.name}.sent"

    def left_bytes(self, save: OutgoingSave) -> int:
        """What is not sent yet, by the list alone."""
        return max(0, save.total_bytes - sum(line.size for line in self.sent(save).values()))

    # -- taking, releasing

    def take(self, save: OutgoingSave, contents: SetContents) -> OutgoingSave:
        """Record ``save``, and link its files where that is possible. Raises SourceForeign for a file that belongs to
        another user, HostError or OSError where it cannot be recorded."""
        own_directory(self.directory, 0o700)
        self.sent_path(save).unlink(missing_ok=True)
        self._write(save)
        try:
            linked = self._link(save, contents)
        except (OSError, HostError):
            self._remove_links(name=save.name)
            return save
        except BaseException:
            self.release(save)
            raise
        if linked is None:
            return save
        self._write(linked)
        return linked

    def rename(self, save: OutgoingSave) -> None:
        """It has another name in the store now: what was sent under the old one does not count."""
        self.sent_path(save).unlink(missing_ok=True)
        self._write(save)

    def send_again(self, save: OutgoingSave, names: Collection[str]) -> None:
        """These pieces count as sent no more."""
        left = [line for name, line in self.sent(save).items() if name not in names]
        atomic_write(self.sent_path(save), b"".join(line.to_line() for line in left))

    def release(self, save: OutgoingSave) -> None:
        """Forget it, and remove its links. ``found`` removes what cannot be removed now."""
        self._remove_links(name=save.name)
        for path in (self.directory / f"{save.name}.json", self.sent_path(save)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def roots(self, save: OutgoingSave) -> Iterator[Mapping[str, int]]:
        """A descriptor of each part's directory. Raises OSError, HostError (RootReplaced)."""
        opened = dict[str, int]()
        try:
            for part in used_parts(save.files):
                with self.workspace.tree.directory(Path(save.roots[part])) as descriptor:
                    opened[part] = os.dup(descriptor)
            yield opened
        finally:
            for descriptor in opened.values():
                os.close(descriptor)

    def is_unchanged(self, save: OutgoingSave) -> bool:
        """Whether every file is as it was when it was found complete. Raises HostError where podwatch cannot look."""
        try:
            with self.roots(save) as roots, self._rights():
                return all(_is_there(roots[file.part], file) for file in save.files)
        except OSError:
            return False

    def is_cramped(self, save: OutgoingSave) -> bool:
        """Whether only our links keep the checkpoint, and the next save needs its bytes."""
        if not save.linked:
            return False
        try:
            with self.roots(save) as roots, self._rights():
                return any(self._lacks_room(fd, save) for fd in roots.values()) and _only_ours(roots, save.files)
        except (OSError, HostError):
            return False  # sending it finds out why

    # -- links

    def _rights(self) -> contextlib.AbstractContextManager[None]:
        rights = self.workspace.tree.rights
        return contextlib.nullcontext() if rights is None else rights.applied()

    def _write(self, save: OutgoingSave) -> None:
        atomic_write(self.directory / f"{save.name}.json", save.to_bytes())

    def _lacks_room(self, directory: int, save: OutgoingSave) -> bool:
        room = os.fstatvfs(directory)
        return room.f_bavail * room.f_frsize < save.total_bytes * self.margin

    def _link(self, save: OutgoingSave, contents: SetContents) -> OutgoingSave | None:
        """With the directories of the links; None where they are impossible."""
        wanted = set(used_parts(save.files))
        places = {p.part.name: p.part.path for p in contents.parts if p.part.name in wanted}
        homes = {part: self._home(path) for part, path in places.items()}
        roots = {part: home / save.name / part for part, home in homes.items() if home is not None}
        if len(roots) != len(wanted):
            return None
        for home in {home for home in homes.values() if home is not None}:
            with self.workspace.tree.directory(home) as descriptor:
                if self._lacks_room(descriptor, save):
                    return None
        for part, root in roots.items():
            self._link_part(places[part], root, [file for file in save.files if file.part == part])
        return replace(save, roots={part: str(root) for part, root in roots.items()}, linked=True)

    def _link_part(self, source: Path, target: Path, files: Sequence[FileEntry]) -> None:
        """Exactly the files that were found complete: each link is compared once it exists."""
        tree, own = self.workspace.tree, self.workspace.tree.rights
        owners = {own.uid} if own is not None else {os.geteuid()}
        tree.make(target)
        with tree.directory(source) as source_root, tree.directory(target) as target_root:
            for file in files:
                _link_file(source_root, target_root, file, owners)

    def _home(self, path: Path) -> Path | None:
        """The first of our directories that takes a link of a file below ``path``; never inside the checkpoint."""
        tree = self.workspace.tree
        for candidate in corners(path, self.workspace, WHAT):
            if path.parent in candidate.parents:
                continue
            try:
                tree.make(candidate)
                self._try(path, candidate)
            except OSError:
                drop_empty(tree, candidate)
                continue
            except HostError:
                return None
            return candidate
        return None

    def _try(self, path: Path, home: Path) -> None:
        """Link the first regular file below ``path``; OSError where that is refused."""
        with self.workspace.tree.directory(path) as source, self.workspace.tree.directory(home) as target:
            for _, _, names, fd in os.fwalk(dir_fd=source):
                for name in names:
                    if stat.S_ISREG(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                        probe = f".probe.{os.getpid()}"
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(probe, dir_fd=target)
                        os.link(name, probe, src_dir_fd=fd, dst_dir_fd=target, follow_symlinks=False)
                        os.unlink(probe, dir_fd=target)
                        return

    def _remove_links(self, *, name: str = "", keep: Collection[str] = ()) -> None:
        """Those of one save, or of all but ``keep``."""
        tree = self.workspace.tree
        for home in corners_of(self.workspace, WHAT):
            with contextlib.suppress(OSError, HostError):
                for one in tree.names(home):
                    if one == name or (not name and one not in keep):
                        tree.remove_tree(home / one)
                drop_empty(tree, home)


def _link_file(source_root: int, target_root: int, file: FileEntry, owners: Collection[int]) -> None:
    parent, _, name = file.path.rpartition("/")
    old = open_dir_below(source_root, parent)
    try:
        new = open_dir_below(target_root, parent, create=True, mode=0o700)
        try:
            found = os.stat(name, dir_fd=old, follow_symlinks=False)
            if reason := why_foreign(found, os.fstat(old), owners):
                raise SourceForeign(reason, where=file.name)
            os.link(name, name, src_dir_fd=old, dst_dir_fd=new, follow_symlinks=False)
            if not _is_same(os.stat(name, dir_fd=new, follow_symlinks=False), file):
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
        return _is_same(os.stat(name, dir_fd=directory, follow_symlinks=False), file)
    finally:
        os.close(directory)


def _only_ours(roots: Mapping[str, int], files: Sequence[FileEntry]) -> bool:
    """Whether a file has no name but ours."""
    for file in files:
        parent, _, name = file.path.rpartition("/")
        directory = open_dir_below(roots[file.part], parent)
        try:
            if os.stat(name, dir_fd=directory, follow_symlinks=False).st_nlink < 2:
                return True
        finally:
            os.close(directory)
    return False


def _is_same(found: os.stat_result, file: FileEntry) -> bool:
    return stat.S_ISREG(found.st_mode) and identity_of(found) == file.identity
