"""A save on its way to the store, as this pod keeps it on its own disk: which files, from where, under which name."""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from podwatch.checkpoints.known_checkpoints import SetContents
from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.document import (
    Document,
    Flag,
    Integer,
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
from podwatch.domain.safe_links import PlacedLink, restorable
from podwatch.store.documents import SavedFile, SavedLink, SaveIntent
from podwatch.store.keys import RunKeys
from podwatch.store.transfer.job import MovedFile, Piece


@dataclass(frozen=True, slots=True)
class OutgoingFile(SavedFile):
    """As it was found complete."""

    inode: Integer = 0
    device: Integer = 0

    def moved(self) -> MovedFile:
        return MovedFile(self.part, self.path, self.size, self.mtime_ns, self.mode, self.inode, self.device)

    def saved(self) -> SavedFile:
        return SavedFile(self.part, self.path, self.size, self.mtime_ns, self.mode)


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
    files: Many[OutgoingFile]
    roots: Texts
    symlinks: Many[SavedLink] = ()
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

    def saved_files(self) -> tuple[SavedFile, ...]:
        return tuple(file.saved() for file in self.files)

    def intent(self, writer_id: str, generation: int, wall: float) -> SaveIntent:
        """Raises ValueError, IntegrityError for names that no store can hold."""
        return SaveIntent(
            self.run_id, self.step, self.stored_as, writer_id, generation, wall, self.layout, self.piece_size,
            self.saved_files(), self.symlinks,
        )  # fmt: skip

    def pieces(self, keys: RunKeys, intent: SaveIntent) -> tuple[Piece, ...]:
        """Every object of the save, in the order in which they are sent."""
        folder, number = keys.save(*self.stored_key), {file.name: n for n, file in enumerate(self.files)}
        return tuple(
            Piece(number[_file_of(piece.name, number)], folder + piece.name, piece.offset, piece.size)
            for piece in intent.objects()
        )


def _file_of(piece: str, files: Container[str]) -> str:
    return piece if piece in files else piece.rpartition(".piece-")[0]


def outgoing_files(files: Iterable[FileEntry]) -> tuple[OutgoingFile, ...]:
    return tuple(
        OutgoingFile(f.part, f.path, f.size, f.mtime_ns, f.mode, f.inode, f.device)
        for f in sorted(files, key=lambda f: (f.part, f.path))
    )


def outgoing_links(contents: SetContents) -> tuple[SavedLink, ...]:
    """Those that a restore can make again."""
    files = [f"{f.part}/{f.path}" for f in contents.files]
    links = sorted(contents.symlinks, key=lambda link: (link.part, link.path))
    wanted = [PlacedLink(f"{link.part}/{link.path}", link.part, link.target) for link in links]
    return tuple(
        SavedLink(link.part, link.path.removeprefix(f"{link.part}/"), link.target) for link in restorable(files, wanted)
    )


def used_parts(files: Iterable[SavedFile]) -> Iterator[str]:
    yield from dict.fromkeys(file.part for file in files)
