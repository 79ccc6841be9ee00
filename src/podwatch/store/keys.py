"""Names of the objects of one run in the store, and what a name says. Pure.

A name decides whose an object is: podwatch deletes and replaces only the fixed documents below ``<run>/podwatch/`` and
what the ``intent.json``, ``manifest.json`` or ``exports.json`` of a save lists.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.errors import IntegrityError
from podwatch.domain.lease import parse_claim_name

INTENT, MANIFEST, PINNED, EXPORTS = "intent.json", "manifest.json", "pinned", "exports.json"
SAVE_DOCUMENTS = (INTENT, MANIFEST, PINNED, EXPORTS)
HIGHEST = 10**12 - 1
"""Of generation and seq, which have twelve digits in the name of a pointer, so that names sort as numbers do."""

_SAVE = re.compile(r"step_(0|[1-9][0-9]{0,17})/([A-Za-z0-9][A-Za-z0-9_-]{0,63})/(.+)", re.DOTALL)
_POINTER = re.compile(r"pointers/([0-9]{12})-([0-9]{12})-([A-Za-z0-9]{1,64})\.json")


class Kind(StrEnum):
    SAVE = "save"
    POINTER = "pointer"
    CLAIM = "claim"
    LATEST = "latest"
    DOCUMENT = "document"
    """The heartbeat, control.json, the verdict."""
    EVIDENCE = "evidence"
    TMP = "tmp"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class ObjectName:
    """What a name says. ``rest``: below a save, the part and path, or a document; else the name below its kind."""

    kind: Kind
    rest: str
    step: int = 0
    save_id: str = ""
    generation: int = 0
    seq: int = 0
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class RunKeys:
    """Object names of one run. ``prefix`` is empty or a path without leading and trailing slash."""

    run_id: str
    prefix: str = ""

    @property
    def root(self) -> str:
        """With its slash."""
        return f"{self.prefix}/{self.run_id}/podwatch/" if self.prefix else f"{self.run_id}/podwatch/"

    @property
    def latest(self) -> str:
        return f"{self.root}latest.json"

    @property
    def heartbeat(self) -> str:
        return f"{self.root}heartbeat.json"

    @property
    def control(self) -> str:
        return f"{self.root}control.json"

    @property
    def verdict(self) -> str:
        return f"{self.root}verdict.json"

    @property
    def claims(self) -> str:
        return f"{self.root}claims/"

    @property
    def pointers(self) -> str:
        return f"{self.root}pointers/"

    @property
    def tmp(self) -> str:
        return f"{self.root}tmp/"

    def evidence(self, kind: str) -> str:
        """``logs``, ``incidents`` or ``config``."""
        return f"{self.root}{kind}/"

    def claim(self, generation: int, nonce: str) -> str:
        return f"{self.claims}{generation}-{nonce}"

    def pointer(self, generation: int, seq: int, nonce: str) -> str:
        """Raises IntegrityError where the numbers are used up, which no run of podwatch's own can do."""
        if max(generation, seq) > HIGHEST:
            what = "generation or number of the next pointer is too high: another program wrote a claim or a pointer"
            raise IntegrityError(what, where=self.pointers, fix="delete what podwatch did not write there")
        return f"{self.pointers}{generation:012}-{seq:012}-{nonce}.json"

    def save(self, step: int, save_id: str) -> str:
        """With its slash."""
        return f"{self.root}step_{step}/{save_id}/"

    def parse(self, key: str) -> ObjectName:
        """What ``key`` is, by its name alone. It may be anything that a store can list."""
        if not key.startswith(self.root):
            return ObjectName(Kind.FOREIGN, key)
        name = key.removeprefix(self.root)
        if save := _SAVE.fullmatch(name):
            return ObjectName(Kind.SAVE, save[3], step=int(save[1]), save_id=save[2])
        if pointer := _POINTER.fullmatch(name):
            return ObjectName(Kind.POINTER, name, 0, "", int(pointer[1]), int(pointer[2]), pointer[3])
        folder, _, rest = name.partition("/")
        if folder == "claims" and (claim := parse_claim_name(rest)):
            return ObjectName(Kind.CLAIM, rest, generation=claim[0], nonce=claim[1])
        if name == "latest.json":
            return ObjectName(Kind.LATEST, name)
        if name in ("heartbeat.json", "control.json", "verdict.json"):
            return ObjectName(Kind.DOCUMENT, name)
        if folder in ("logs", "incidents", "config", "tmp") and rest and "/" not in rest:
            return ObjectName(Kind.TMP if folder == "tmp" else Kind.EVIDENCE, name)
        return ObjectName(Kind.FOREIGN, name)


def contradicts(shown: str, recorded: str) -> bool:
    """Whether a listing's hash (empty: it has none) proves other bytes than the recorded one."""
    kind, _, _ = shown.partition(":")
    return bool(kind) and recorded.startswith(f"{kind}:") and shown != recorded


@dataclass(frozen=True, slots=True)
class Piece:
    """One object of a save. ``file``: the number of its file; ``name``: below the save; ``offset``: in the file.
    ``hash``: as ``FileEntry`` has it, empty where it is not known."""

    file: int
    name: str
    offset: int
    size: int
    hash: str = ""


def pieces(files: Iterable[FileEntry], piece_size: int) -> Iterator[Piece]:
    """The objects of these files: a file itself, or pieces in order where it is larger than one. Raises ValueError for
    a wrong number of hashes."""
    for number, file in enumerate(files):
        count = max(1, -(-file.size // piece_size))
        if file.hashes and len(file.hashes) != count:
            raise ValueError(f"hashes: {file.name} has {count} objects")
        for nth, offset in enumerate(range(0, max(1, file.size), piece_size)):
            name = file.name if count == 1 else f"{file.name}.piece-{nth:05}"
            digest = file.hashes[nth] if file.hashes else ""
            yield Piece(number, name, offset, min(piece_size, file.size - offset), digest)
