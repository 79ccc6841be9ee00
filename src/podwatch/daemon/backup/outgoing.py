"""A save on its way to the store, as this pod keeps it on its own disk: which files, from where, under which name."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

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
from podwatch.domain.safe_links import restorable
from podwatch.store.documents import SaveIntent


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
