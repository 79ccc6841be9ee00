"""The documents of the store: a save's intent and manifest, its exports, and the pointers. Pure.

The documents of the lease (claim, heartbeat, control.json) are in ``domain/lease.py``.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Self

from podwatch.domain.document import (
    At,
    Document,
    FileMode,
    Flag,
    Form,
    Integer,
    Label,
    Many,
    Positive,
    RelativePath,
    RunId,
    SaveId,
    Text,
    Texts,
    Whole,
)
from podwatch.domain.errors import IntegrityError
from podwatch.domain.safe_links import PlacedLink, check_links
from podwatch.store.keys import SAVE_DOCUMENTS, Piece, pieces

Digest = Annotated[str, Form(r"(?:sha1:[0-9a-f]{40}|sha256:[0-9a-f]{64})")]
"""The hash of an object, as ``sha1:<hex>``: what its store verifies."""
PartName = Annotated[str, Form(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")]
MOST_OBJECTS = 200_000
"""Of one save."""
EXPORT_BYTES = 5 * 10**9
"""Largest file that every store takes in one request: an export is downloaded by people, and is not cut in pieces."""


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One regular file of a save. ``path`` is POSIX, below its part."""

    part: PartName
    path: RelativePath
    size: Whole
    mtime_ns: Integer
    mode: FileMode = 0o644

    @property
    def name(self) -> str:
        return f"{self.part}/{self.path}"


@dataclass(frozen=True, slots=True)
class SavedLink:
    part: PartName
    path: RelativePath
    target: Text

    @property
    def name(self) -> str:
        return f"{self.part}/{self.path}"


@dataclass(frozen=True, slots=True)
class SaveIntent(Document):
    """``intent.json``: which objects podwatch is going to store as this save. Written first, never changed."""

    KIND = "podwatch-intent"
    FILE = "intent.json"
    LARGEST = 64 << 20

    run_id: RunId
    step: Whole
    save_id: SaveId
    writer_id: Label
    generation: Whole
    created_at: At
    layout: Label
    piece_size: Positive
    files: Many[SavedFile]
    symlinks: Many[SavedLink] = ()

    def __post_init__(self) -> None:
        _check_count(self.files, self.piece_size)
        _check_names([piece.name for piece in self.objects()], self.symlinks)
        _check_targets(self.files, self.symlinks)

    def objects(self) -> Iterator[Piece]:
        """Each object that the save consists of, beside its documents."""
        for file in self.files:
            yield from pieces(file.name, file.size, self.piece_size)

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def same_files(self, files: Iterable[SavedFile], identity: Collection[str] = ()) -> bool:
        """Whether it is the save that consists of ``files``. ``identity``: the parts that make a save, where a resume
        writes others again."""
        return _file_keys(self.files, identity) == _file_keys(files, identity) != set()


@dataclass(frozen=True, slots=True)
class StoredFile(SavedFile):
    """``hashes``: of each of its objects, in their order."""

    hashes: Many[Digest] = ()


@dataclass(frozen=True, slots=True)
class SaveManifest(Document):
    """``manifest.json``: every object of a save that is in the store as a whole. Never changed. ``generation`` and
    ``seq`` order the saves of a run; a save that was stored without becoming the newest has seq 0. ``start_id`` and
    ``from_step``: the start of training that wrote it."""

    KIND = "podwatch-manifest"
    FILE = "manifest.json"
    LARGEST = 64 << 20

    run_id: RunId
    step: Whole
    save_id: SaveId
    writer_id: Label
    generation: Whole
    seq: Whole
    created_at: At
    layout: Label
    piece_size: Positive
    total_bytes: Whole
    files: Many[StoredFile]
    symlinks: Many[SavedLink] = ()
    lineage: Label = ""
    start_id: Text = ""
    from_step: Whole | None = None
    world_size: Positive | None = None
    config_digest: Text = ""
    train_command: Many[Text] = ()
    wandb: Texts = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_count(self.files, self.piece_size)
        _check_names([piece.name for piece, _ in self.objects()], self.symlinks)
        _check_targets(self.files, self.symlinks)
        if sum(file.size for file in self.files) != self.total_bytes:
            raise ValueError("total_bytes is not the sum of the files")

    def objects(self) -> Iterator[tuple[Piece, str]]:
        """Each object that the save consists of, with its hash. Raises ValueError for a wrong number of hashes."""
        for file in self.files:
            yield from zip(pieces(file.name, file.size, self.piece_size), file.hashes, strict=True)

    @property
    def order(self) -> tuple[int, int]:
        return (self.generation, self.seq)

    def same_files(self, files: Iterable[SavedFile], identity: Collection[str] = ()) -> bool:
        """As ``SaveIntent.same_files``."""
        return _file_keys(self.files, identity) == _file_keys(files, identity) != set()


@dataclass(frozen=True, slots=True)
class RunPointer(Document):
    """``pointers/<generation>-<seq>-<nonce>.json`` and ``latest.json``: the newest save as of one moment. ``step`` is
    None after a deliberate fresh start."""

    KIND = "podwatch-pointer"
    FILE = "pointer"

    run_id: RunId
    generation: Whole
    seq: Whole
    step: Whole | None
    writer_id: Label
    created_at: At
    save_id: Annotated[str, Form(r"(?:[A-Za-z0-9][A-Za-z0-9_-]{0,63})?")] = ""
    manifest_hash: Annotated[str, Form(r"(?:sha1:[0-9a-f]{40}|sha256:[0-9a-f]{64})?")] = ""
    manifest_size: Whole = 0
    total_bytes: Whole = 0
    lineage: Label = ""
    layout: Label = ""
    host: Label = ""
    wandb: Texts = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.step is None) != (not self.save_id) or bool(self.save_id) != bool(self.manifest_hash):
            raise ValueError("step, save_id and manifest_hash are there together or not at all")

    @property
    def order(self) -> tuple[int, int]:
        return (self.generation, self.seq)

    @property
    def save(self) -> tuple[int, str] | None:
        return None if self.step is None else (self.step, self.save_id)


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """``hash`` is empty until the file is stored."""

    part: PartName
    path: RelativePath
    size: Whole
    hash: Annotated[str, Form(r"(?:sha1:[0-9a-f]{40}|sha256:[0-9a-f]{64})?")] = ""

    @property
    def name(self) -> str:
        return f"{self.part}/{self.path}"


@dataclass(frozen=True, slots=True)
class SaveExports(Document):
    """``exports.json``: exported weights, stored beside a save. Written before the files, and again once all of them
    are there (``complete``)."""

    KIND = "podwatch-exports"
    FILE = "exports.json"
    LARGEST = 16 << 20

    run_id: RunId
    step: Whole
    save_id: SaveId
    created_at: At
    files: Many[ExportedFile]
    complete: Flag = False

    def __post_init__(self) -> None:
        _check_names([file.name for file in self.files], ())
        if any(file.size > EXPORT_BYTES or (self.complete and not file.hash) for file in self.files):
            raise ValueError("files: one is too large, or has no hash")


@dataclass(frozen=True, slots=True)
class SentSave:
    """A save whose objects are all sent: the intent, and by name the hash of each."""

    intent: SaveIntent
    hashes: dict[str, str] = field(default_factory=dict)

    def files(self) -> tuple[StoredFile, ...]:
        """As the manifest has them. Raises KeyError for an object that was not sent."""
        return tuple(
            StoredFile(
                file.part, file.path, file.size, file.mtime_ns, file.mode,
                tuple(self.hashes[p.name] for p in pieces(file.name, file.size, self.intent.piece_size)),
            )
            for file in self.intent.files
        )  # fmt: skip

    @classmethod
    def of(cls, manifest: SaveManifest, intent: SaveIntent) -> Self:
        return cls(intent, {piece.name: digest for piece, digest in manifest.objects()})


def _file_keys(files: Iterable[SavedFile], identity: Collection[str]) -> set[tuple[str, str, int, int]]:
    return {(f.part, f.path, f.size, f.mtime_ns) for f in files if not identity or f.part in identity}


def _check_count(files: Sequence[SavedFile], piece_size: int) -> None:
    """Before anything is counted out: two numbers in a document can stand for any number of objects."""
    if sum(max(1, -(-file.size // piece_size)) for file in files) > MOST_OBJECTS:
        raise ValueError(f"files: more than {MOST_OBJECTS} objects")


def _check_names(objects: Sequence[str], links: Iterable[SavedLink]) -> None:
    """Raise ValueError unless each name is one object, and a directory can hold all of them beside the documents."""
    names = [*objects, *(link.name for link in links), *SAVE_DOCUMENTS]
    taken = set(names)
    if len(taken) != len(names):
        raise ValueError("files: two objects have one name")
    folders = {name[:end] for name in names for end, c in enumerate(name) if c == "/"}
    if not taken.isdisjoint(folders):
        raise ValueError("files: one name is a file and a directory")


def _check_targets(files: Iterable[SavedFile], links: Sequence[SavedLink]) -> None:
    """Raises ValueError unless every link stays in its part."""
    if not links:
        return
    try:
        check_links([f.name for f in files], [PlacedLink(link.name, link.part, link.target) for link in links])
    except IntegrityError as error:
        raise ValueError(f"symlinks: {error}") from None


def manifest_hash(data: bytes) -> str:
    """As a pointer names a manifest."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
