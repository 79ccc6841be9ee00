"""What is moved, as data: the job that the child reads as one JSON line, and the local list of pieces sent."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from podwatch.domain.checkpoint import FileEntry, Identity, SymlinkEntry
from podwatch.domain.safe_names import check_relative_path
from podwatch.store.keys import Piece, contradicts, pieces

if TYPE_CHECKING:  # each brings its library: the child loads the one that it needs
    from podwatch.store.objects.b2 import B2Access
    from podwatch.store.objects.base import ObjectInfo
    from podwatch.store.objects.s3 import S3Access


@dataclass(frozen=True, slots=True)
class TransferJob:
    """``folder``: of the save, with its slash; below it each file is one object, or several of ``piece_size`` bytes.
    ``roots``: a directory descriptor for each part, which the child inherits; it touches nothing outside. ``links``:
    made by a fetch. ``done``: names of objects that are not sent again. ``sent``: the file that gets a line for each
    stored piece. ``alone``: a directory, empty for that of ``sent``: of the uploads that name it one runs at a time.
    ``rate``: bytes per second, 0 for no limit. ``user``: whose rights open the files, -1 for our own. ``owners``: users
    whose files may have several names; None: judged already."""

    direction: Literal["send", "fetch"]
    store: str
    folder: str
    files: tuple[FileEntry, ...]
    piece_size: int
    roots: Mapping[str, int]
    links: tuple[SymlinkEntry, ...] = ()
    done: tuple[str, ...] = ()
    sent: str = ""
    alone: str = ""
    checksum: str = "sha256"
    connections: int = 8
    rate: float = 0.0
    nice: int = 0
    user: int = -1
    owners: tuple[int, ...] | None = None

    def objects(self) -> tuple[Piece, ...]:
        """What is moved."""
        done = frozenset(self.done)
        return tuple(piece for piece in pieces(self.files, self.piece_size) if piece.name not in done)

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
            "files": tuple(FileEntry(**{**file, "hashes": tuple(file["hashes"])}) for file in document["files"]),
            "links": tuple(SymlinkEntry(**link) for link in document["links"]),
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
    """``name`` and ``hash`` as in ``Piece``; ``identity``: of the source when the piece was read from it."""

    name: str
    hash: str
    size: int
    identity: Identity

    def to_line(self) -> bytes:
        return json.dumps([self.name, self.hash, self.size, self.identity]).encode() + b"\n"


def read_sent(path: Path) -> dict[str, SentPiece]:
    """By name; a later line of a name replaces an earlier one. A line that a kill tore is left out, so that its piece
    is sent again."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return {}
    return {sent.name: sent for line in lines for sent in _parsed(line)}


def _parsed(line: bytes) -> Iterator[SentPiece]:
    try:
        name, hash_, size, (device, inode, length, mtime_ns) = json.loads(line)
        yield SentPiece(str(name), str(hash_), int(size), (int(device), int(inode), int(length), int(mtime_ns)))
    except (ValueError, TypeError):
        return


def stored_pieces(
    files: Sequence[FileEntry], piece_size: int, sent: Mapping[str, SentPiece], listing: "Mapping[str, ObjectInfo]"
) -> tuple[str, ...]:
    """The names of the pieces that count as stored: a line says that they were sent, from this very file, and the
    listing shows them with that size and no other hash. All others are sent (again)."""
    found = []
    for piece in pieces(files, piece_size):
        line, entry = sent.get(piece.name), listing.get(piece.name)
        if line is None or entry is None or contradicts(entry.hash, line.hash):
            continue
        if (line.size, entry.size, line.identity) == (piece.size, piece.size, files[piece.file].identity):
            found.append(piece.name)
    return tuple(found)
