"""What is moved, as data: the job that the child reads as one JSON line, and the local list of pieces sent."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from podwatch.domain.safe_names import check_relative_path
from podwatch.store.keys import contradicts

if TYPE_CHECKING:  # each brings its library: the child loads the one that it needs
    from podwatch.store.objects.b2 import B2Access
    from podwatch.store.objects.base import ObjectInfo
    from podwatch.store.objects.s3 import S3Access

Identity = tuple[int, int, int, int]
"""Device, inode, size and mtime in nanoseconds of a source: another one is another file, or a changed one."""


@dataclass(frozen=True, slots=True)
class MovedFile:
    """A regular file of a part, ``path`` inside it. When sending, ``inode`` and ``device`` say which file was found
    complete; when fetching, mode and mtime are what it gets."""

    part: str
    path: str
    size: int
    mtime_ns: int
    mode: int = 0o644
    inode: int = 0
    device: int = 0

    @property
    def identity(self) -> Identity:
        return (self.device, self.inode, self.size, self.mtime_ns)


@dataclass(frozen=True, slots=True)
class Piece:
    """``size`` bytes from ``offset`` of the job's file with this number, stored whole under ``key``. ``hash``: as
    recorded, ``sha1:...`` or ``sha256:...``; empty where it is not known yet."""

    file: int
    key: str
    offset: int
    size: int
    hash: str = ""


@dataclass(frozen=True, slots=True)
class TransferJob:
    """``roots``: a directory descriptor for each part, which the child inherits; it touches nothing outside.
    ``rate``: bytes per second, 0 for no limit. ``user``: whose rights open the files, -1 for our own. ``owners``: users
    whose files may have several names; None: judged already. ``links``: (part, path, target), made by a fetch.
    ``sent``: the file that gets a line for each stored piece. ``alone``: a directory, empty for that of ``sent``: of
    the uploads that name it one runs at a time."""

    direction: Literal["send", "fetch"]
    store: str
    files: tuple[MovedFile, ...]
    pieces: tuple[Piece, ...]
    roots: Mapping[str, int]
    links: tuple[tuple[str, str, str], ...] = ()
    sent: str = ""
    alone: str = ""
    checksum: str = "sha256"
    connections: int = 8
    rate: float = 0.0
    nice: int = 0
    user: int = -1
    owners: tuple[int, ...] | None = None

    def to_line(self, access: "B2Access | S3Access | None") -> bytes:
        """Contains the secret: for a pipe only, never for argv, the environment or a log."""
        secret = None if access is None else asdict(access)
        return json.dumps({**asdict(self), "access": secret}).encode() + b"\n"


def from_line(line: bytes) -> "tuple[TransferJob, B2Access | S3Access | None]":
    document: dict[str, Any] = json.loads(line)
    secret, owners = document.pop("access"), document.pop("owners")
    job = TransferJob(
        **{
            **document,
            "files": tuple(MovedFile(**file) for file in document["files"]),
            "pieces": tuple(Piece(**piece) for piece in document["pieces"]),
            "links": tuple((str(p), str(path), str(target)) for p, path, target in document["links"]),
            "owners": None if owners is None else tuple(owners),
        }
    )
    for file in job.files:
        check_relative_path(file.path)
    return job, None if secret is None else _access(job.store, secret)


def _access(store: str, values: dict[str, str]) -> "B2Access | S3Access":
    if store.startswith("b2:"):
        from podwatch.store.objects import b2

        return b2.B2Access(**values)
    from podwatch.store.objects import s3

    return s3.S3Access(**values)


# -- what was sent ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SentPiece:
    """``identity``: of the source when the piece was read from it."""

    key: str
    hash: str
    size: int
    identity: Identity

    def to_line(self) -> bytes:
        return json.dumps([self.key, self.hash, self.size, self.identity]).encode() + b"\n"


def read_sent(path: Path) -> dict[str, SentPiece]:
    """By key; a later line of a key replaces an earlier one. A line that a kill tore is left out, so that its piece is
    sent again."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return {}
    return {sent.key: sent for line in lines for sent in _parsed(line)}


def _parsed(line: bytes) -> Iterator[SentPiece]:
    try:
        key, hash_, size, (device, inode, length, mtime_ns) = json.loads(line)
        yield SentPiece(str(key), str(hash_), int(size), (int(device), int(inode), int(length), int(mtime_ns)))
    except (ValueError, TypeError):
        return


def stored_pieces(
    pieces: Iterable[Piece],
    files: tuple[MovedFile, ...],
    sent: Mapping[str, SentPiece],
    listing: "Mapping[str, ObjectInfo]",
) -> dict[str, SentPiece]:
    """The pieces that count as stored, by key: a line says that they were sent, from this very file, and the listing
    shows them with that size and no other hash. All others are sent (again)."""
    found = {}
    for piece in pieces:
        line, entry = sent.get(piece.key), listing.get(piece.key)
        if line is None or entry is None or contradicts(entry.hash, line.hash):
            continue
        if (line.size, entry.size, line.identity) == (piece.size, piece.size, files[piece.file].identity):
            found[piece.key] = line
    return found


def append_sent(descriptor: int, sent: SentPiece) -> None:
    """One write. A line that a crash of the machine loses costs one piece."""
    os.write(descriptor, sent.to_line())
