"""The documents of the store: a save's intent and manifest, its exports, and the pointers. Pure.

The documents of the lease (claim, heartbeat, control.json) are in ``domain/lease.py``.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from podwatch.domain.checkpoint import FileEntry, SymlinkEntry
from podwatch.domain.document import (
    At,
    Document,
    Flag,
    Label,
    Many,
    Positive,
    RunId,
    SaveId,
    Text,
    Texts,
    Whole,
    matching,
)
from podwatch.domain.errors import IntegrityError
from podwatch.domain.safe_links import check_links
from podwatch.store.keys import SAVE_DOCUMENTS, Piece, pieces

MOST_OBJECTS = 200_000
"""Of one save."""
EXPORT_BYTES = 5 * 10**9
"""Largest file that every store takes in one request: an export is downloaded by people, and is not cut in pieces."""


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
    files: Many[FileEntry]
    symlinks: Many[SymlinkEntry] = ()

    def __post_init__(self) -> None:
        if sum(max(1, -(-file.size // self.piece_size)) for file in self.files) > MOST_OBJECTS:
            raise ValueError(f"files: more than {MOST_OBJECTS} objects")  # before anything is counted out
        _check_names([piece.name for piece in self.objects()], self.symlinks)
        try:
            check_links([file.name for file in self.files], self.symlinks)
        except IntegrityError as error:
            raise ValueError(f"symlinks: {error}") from None

    @property
    def key(self) -> tuple[int, str]:
        return (self.step, self.save_id)

    def objects(self) -> Iterator[Piece]:
        """Each object that the save consists of, beside its documents."""
        return pieces(self.files, self.piece_size)

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def same_files(self, files: Iterable[FileEntry]) -> bool:
        """Whether it is the save that consists of ``files``."""
        return _file_keys(self.files) == _file_keys(files) != set()

    def hashed(self, hashes: Mapping[str, str]) -> tuple[FileEntry, ...]:
        """Its files with the hashes of their objects, by name. Raises KeyError for one that is not there."""
        found = defaultdict[int, list[str]](list)
        for piece in self.objects():
            found[piece.file].append(hashes[piece.name])
        return tuple(replace(file, hashes=tuple(found[number])) for number, file in enumerate(self.files))


@dataclass(frozen=True, slots=True)
class SaveManifest(SaveIntent):
    """``manifest.json``: every object of a save that is in the store as a whole. Never changed. ``generation`` and
    ``seq`` order the saves of a run; a save that was stored without becoming the newest has seq 0. ``start_id`` and
    ``from_step``: the start of training that wrote it."""

    KIND = "podwatch-manifest"
    FILE = "manifest.json"

    seq: Whole = 0
    lineage: Label = ""
    start_id: Text = ""
    from_step: Whole | None = None
    world_size: Positive | None = None
    config_digest: Text = ""
    train_command: Many[Text] = ()
    wandb: Texts = field(default_factory=dict)

    def __post_init__(self) -> None:
        SaveIntent.__post_init__(self)
        if not all(file.hashes for file in self.files):
            raise ValueError("files: one has no hash")

    @property
    def order(self) -> tuple[int, int]:
        return (self.generation, self.seq)


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
    save_id: Annotated[str, matching(r"(?:[A-Za-z0-9][A-Za-z0-9_-]{0,63})?")] = ""
    manifest_hash: Annotated[str, matching(r"(?:sha1:[0-9a-f]{40}|sha256:[0-9a-f]{64})?")] = ""
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
class SaveExports(Document):
    """``exports.json``: exported weights, stored beside a save, each file as one object. Written before the files, and
    again once all of them are there (``complete``)."""

    KIND = "podwatch-exports"
    FILE = "exports.json"
    LARGEST = 16 << 20

    run_id: RunId
    step: Whole
    save_id: SaveId
    created_at: At
    files: Many[FileEntry]
    complete: Flag = False

    def __post_init__(self) -> None:
        _check_names([file.name for file in self.files], ())
        for file in self.files:
            if file.size > EXPORT_BYTES or len(file.hashes) > 1 or (self.complete and not file.hashes):
                raise ValueError("files: one is too large, or has not the hash of its one object")


def _file_keys(files: Iterable[FileEntry]) -> set[tuple[str, str, int, int]]:
    return {(f.part, f.path, f.size, f.mtime_ns) for f in files}


def _check_names(objects: Sequence[str], links: Iterable[SymlinkEntry]) -> None:
    """Raise ValueError unless each name is one object, and a directory can hold all of them beside the documents."""
    names = [*objects, *(link.name for link in links), *SAVE_DOCUMENTS]
    taken = set(names)
    if len(taken) != len(names):
        raise ValueError("files: two objects have one name")
    folders = {name[:end] for name in names for end, c in enumerate(name) if c == "/"}
    if not taken.isdisjoint(folders):
        raise ValueError("files: one name is a file and a directory")


def manifest_hash(data: bytes) -> str:
    """As a pointer names a manifest."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
