"""The objects in the store: key layout, manifest and pointer, with their JSON forms (docs/sync.md).

Data from a store is never trusted: ``from_bytes`` checks every field and every path, and raises ``IntegrityError``.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from podwatch.domain.errors import IntegrityError
from podwatch.domain.safe_names import check_relative_path, valid_run_id

SCHEMA_VERSION = 1
DEFAULT_PART_SIZE = 100_000_000
"""Bytes. B2's recommended part size; 47 GB are 470 parts, and a kill loses at most (connections x part)."""
WRITER_TAG = "podwatch-writer"
"""File-info key that marks every object of podwatch; it never changes or deletes an object without it."""

_SAVE_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z")


def valid_save_id(save_id: str) -> bool:
    """Whether it is a plain name, which cannot lead out of its checkpoint's place in the store."""
    return bool(_SAVE_ID.match(save_id))


_SHA1 = re.compile(r"^[0-9a-f]{40}\Z")
_MOST_VALUES = 2_000_000
"""Values in one document: more than 100,000 files. A parsed value takes up to 30 times its bytes in memory."""
_LARGEST = 2**63 - 1
"""The largest number that the journal and a file system can hold."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Object names of one run. ``prefix`` is empty or a path without leading and trailing slash."""

    run_id: str
    prefix: str = ""

    @property
    def root(self) -> str:
        base = f"{self.prefix}/{self.run_id}" if self.prefix else self.run_id
        return f"{base}/podwatch"

    @property
    def latest(self) -> str:
        return f"{self.root}/latest.json"

    @property
    def heartbeat(self) -> str:
        return f"{self.root}/heartbeat.json"

    @property
    def control(self) -> str:
        return f"{self.root}/control.json"

    @property
    def claims(self) -> str:
        return f"{self.root}/claims/"

    @property
    def verdict(self) -> str:
        """How the attempts of the run ended, for its next one (domain/earlier_attempts.py)."""
        return f"{self.root}/verdict.json"

    @property
    def controller_rules(self) -> str:
        """What people allow `podwatch controller`; podwatch only reads it."""
        return f"{self.root}/controller.json"

    @property
    def probes(self) -> str:
        """Beginning of the names of the objects with which a store is tried out (stores/s3_features.py)."""
        return f"{self.outside}podwatch-probe-"

    @property
    def outside(self) -> str:
        """The store's prefix with its slash, for what belongs to no run; empty without one."""
        return f"{self.prefix}/" if self.prefix else ""

    @property
    def measurements(self) -> str:
        """Beginning of the names of the objects with which `podwatch check --throughput` measures."""
        return f"{self.root}/check/"

    @property
    def controller(self) -> str:
        """The controller's own records (controller/run_store.py)."""
        return f"{self.root}/controller/"

    @property
    def archive(self) -> str:
        """The record of an archived run and of the deletions in progress."""
        return f"{self.root}/archive.json"

    def artefacts(self, kind: str) -> str:
        """``logs``, ``incidents`` or ``config``."""
        return f"{self.root}/{kind}/"

    def step(self, step: int) -> str:
        return f"{self.root}/step_{step}/"

    def save(self, step: int, save_id: str) -> str:
        return f"{self.root}/step_{step}/{save_id}/"

    def manifest(self, step: int, save_id: str) -> str:
        return self.save(step, save_id) + "manifest.json"

    def optional(self, step: int, save_id: str) -> str:
        """The manifest of the optional parts of a save, which no resume needs and no pointer names."""
        return self.save(step, save_id) + "optional.json"

    def data(self, step: int, save_id: str, path: str) -> str:
        return self.save(step, save_id) + check_relative_path(path)

    def copied(self, key: str, name: str) -> bool:
        """Whether ``key`` is ``name`` (of this run) below another prefix: the store was copied from there."""
        return key != name and f"/{key}".endswith(f"/{name.removeprefix(self.outside)}")


class Proof(StrEnum):
    """How it is known that the store holds exactly the bytes that were hashed. Recorded in the manifest (``proof``)."""

    STORE_CHECKED = "store-checked"
    """The store compared the bytes with podwatch's own hash and would have refused others. An echoed header is no
    proof: only a store that was seen to refuse a wrong hash checks."""
    READ_BACK = "read-back"
    """podwatch read the stored bytes back and compared their hashes."""
    FLUSHED = "flushed"
    """Hashed while written to a directory, and flushed. Reading back would show this machine's memory, not the disk."""
    NONE = ""
    """Not proved (yet): whoever relies on it must read back."""

    @classmethod
    def parsed(cls, value: object) -> "Proof":
        """NONE for a value that this podwatch does not know."""
        return next((proof for proof in cls if proof == value), cls.NONE)


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One regular file. ``path`` is ``<part>/<path inside the part's directory>``; ``parts_sha1`` has one hash per
    ``part_size`` bytes (one for a smaller file, none for an empty one). ``file_id`` names the exact version if the
    store has versions; otherwise it is empty."""

    path: str
    part: str
    size: int
    mtime_ns: int
    mode: int
    key: str
    file_id: str
    parts_sha1: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ManifestSymlink:
    path: str
    part: str
    target: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of one uploaded save. Never changed once written."""

    run_id: str
    lineage: str
    step: int
    save_id: str
    layout: str
    created_at: str
    writer_id: str
    part_size: int
    total_bytes: int
    files: tuple[ManifestFile, ...]
    symlinks: tuple[ManifestSymlink, ...] = ()
    world_size: int | None = None
    config_digest: str = ""
    producer: str = ""
    train_command: tuple[str, ...] = ()
    wandb: Mapping[str, str] = field(default_factory=dict)
    proof: Proof = Proof.NONE
    """How it was known, when this was written, that the store holds these bytes."""
    schema_version: int = SCHEMA_VERSION

    def to_bytes(self) -> bytes:
        """Canonical JSON with sorted keys, so that the same manifest always has the same SHA-1."""
        document: dict[str, Any] = {
            "schema_version": self.schema_version,
            "kind": "podwatch-manifest",
            "run_id": self.run_id,
            "lineage": self.lineage,
            "step": self.step,
            "save_id": self.save_id,
            "layout": self.layout,
            "world_size": self.world_size,
            "config_digest": self.config_digest,
            "created_at": self.created_at,
            "producer": self.producer,
            "writer_id": self.writer_id,
            "part_size": self.part_size,
            "total_bytes": self.total_bytes,
            "train_command": list(self.train_command),
            "wandb": dict(self.wandb),
            "proof": str(self.proof),
            "files": [
                {
                    "path": f.path,
                    "part": f.part,
                    "size": f.size,
                    "mtime_ns": f.mtime_ns,
                    "mode": f.mode,
                    "key": f.key,
                    "file_id": f.file_id,
                    "parts_sha1": list(f.parts_sha1),
                }
                for f in self.files
            ],
            "symlinks": [{"path": s.path, "part": s.part, "target": s.target} for s in self.symlinks],
        }
        return _canonical(document)

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = "manifest.json") -> "Manifest":
        """Parse and check. Raises IntegrityError for anything a correct writer would not have written."""
        doc = _document(data, where, kind="podwatch-manifest")
        try:
            part_size = _integer(doc["part_size"], minimum=1)
            files = tuple(_file(f, part_size) for f in doc["files"])
            symlinks = tuple(
                ManifestSymlink(check_relative_path(_text(s["path"])), _text(s["part"]), _text(s["target"]))
                for s in doc.get("symlinks", [])
            )
            manifest = cls(
                run_id=_text(doc["run_id"]),
                lineage=_text(doc["lineage"]),
                step=_integer(doc["step"], minimum=0),
                save_id=_text(doc["save_id"]),
                layout=_text(doc["layout"]),
                created_at=_text(doc["created_at"]),
                writer_id=_text(doc["writer_id"]),
                part_size=part_size,
                total_bytes=_integer(doc["total_bytes"], minimum=0),
                files=files,
                symlinks=symlinks,
                world_size=None if doc.get("world_size") is None else _integer(doc["world_size"], minimum=1),
                config_digest=_text(doc.get("config_digest", "")),
                producer=_text(doc.get("producer", "")),
                train_command=tuple(_text(a) for a in doc.get("train_command", [])),
                wandb={_text(k): _text(v) for k, v in dict(doc.get("wandb", {})).items()},
                proof=Proof.parsed(doc.get("proof")),
                schema_version=_integer(doc["schema_version"], minimum=1),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"manifest is malformed: {str(error)[:200]}", where=where) from error
        if not valid_run_id(manifest.run_id) or not _SAVE_ID.match(manifest.save_id):
            raise IntegrityError("manifest has an invalid run_id or save_id", where=where)
        paths = [f.path for f in files] + [s.path for s in symlinks]
        if len(set(paths)) != len(paths):
            raise IntegrityError("manifest names a path twice", where=where)
        taken = set(paths)
        for path in paths:
            segments = path.split("/")
            if any("/".join(segments[:n]) in taken for n in range(1, len(segments))):
                raise IntegrityError("manifest uses one name as file and as directory", where=where)
        if sum(f.size for f in files) != manifest.total_bytes:
            raise IntegrityError("manifest's total does not equal the sum of its files", where=where)
        return manifest


@dataclass(frozen=True, slots=True)
class ManifestRef:
    """A manifest as stored. ``file_id`` is empty where the store names no versions."""

    key: str
    file_id: str
    sha1: str
    size: int


@dataclass(frozen=True, slots=True)
class Pointer:
    """``latest.json``. ``step`` is None after a deliberate fresh start, until the first save.

    Readers use the highest (generation, seq) whose save is whole.
    """

    generation: int
    seq: int
    run_id: str
    lineage: str
    step: int | None
    writer_id: str
    created_at: str
    save_id: str = ""
    manifest_key: str = ""
    manifest_file_id: str = ""
    manifest_sha1: str = ""
    manifest_size: int = 0
    total_bytes: int = 0
    layout: str = ""
    host: str = ""
    wandb: Mapping[str, str] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    @property
    def order(self) -> tuple[int, int]:
        return (self.generation, self.seq)

    @property
    def ref(self) -> ManifestRef:
        return ManifestRef(self.manifest_key, self.manifest_file_id, self.manifest_sha1, self.manifest_size)

    def names(self, key: str, file_id: str) -> bool:
        """Whether it names this version of a manifest. Without a file id (a directory; a store that was copied) a name
        has one version; the caller compares the hash."""
        known = file_id and self.manifest_file_id
        return key == self.manifest_key and (not known or file_id == self.manifest_file_id)

    def to_bytes(self) -> bytes:
        return _canonical(
            {
                "schema_version": self.schema_version,
                "kind": "podwatch-latest",
                "generation": self.generation,
                "seq": self.seq,
                "run_id": self.run_id,
                "lineage": self.lineage,
                "step": self.step,
                "save_id": self.save_id,
                "manifest_key": self.manifest_key,
                "manifest_file_id": self.manifest_file_id,
                "manifest_sha1": self.manifest_sha1,
                "manifest_size": self.manifest_size,
                "total_bytes": self.total_bytes,
                "layout": self.layout,
                "host": self.host,
                "writer_id": self.writer_id,
                "created_at": self.created_at,
                "wandb": dict(self.wandb),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str = "latest.json") -> "Pointer":
        doc = _document(data, where, kind="podwatch-latest")
        try:
            step = None if doc["step"] is None else _integer(doc["step"], minimum=0)
            pointer = cls(
                generation=_integer(doc["generation"], minimum=0),
                seq=_integer(doc["seq"], minimum=0),
                run_id=_text(doc["run_id"]),
                lineage=_text(doc["lineage"]),
                step=step,
                writer_id=_text(doc["writer_id"]),
                created_at=_text(doc["created_at"]),
                save_id=_text(doc.get("save_id", "")),
                manifest_key=_text(doc.get("manifest_key", "")),
                manifest_file_id=_text(doc.get("manifest_file_id", "")),
                manifest_sha1=_text(doc.get("manifest_sha1", "")),
                manifest_size=_integer(doc.get("manifest_size", 0), minimum=0),
                total_bytes=_integer(doc.get("total_bytes", 0), minimum=0),
                layout=_text(doc.get("layout", "")),
                host=_text(doc.get("host", "")),
                wandb={_text(k): _text(v) for k, v in dict(doc.get("wandb", {})).items()},
                schema_version=_integer(doc["schema_version"], minimum=1),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"pointer is malformed: {str(error)[:200]}", where=where) from error
        if pointer.step is not None and not _SHA1.match(pointer.manifest_sha1):
            raise IntegrityError("pointer names a step but no manifest hash", where=where)
        return pointer


def sha1_hex(data: bytes) -> str:
    """SHA-1 as B2 uses it: it detects damage, not an attacker (docs/security.md)."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def _file(doc: Mapping[str, Any], part_size: int) -> ManifestFile:
    size = _integer(doc["size"], minimum=0)
    hashes = tuple(_text(h) for h in doc["parts_sha1"])
    if len(hashes) != -(-size // part_size) or not all(_SHA1.match(h) for h in hashes):
        raise ValueError(f"wrong part hashes for {doc['path']!r}")
    return ManifestFile(
        path=check_relative_path(_text(doc["path"])),
        part=_text(doc["part"]),
        size=size,
        mtime_ns=_integer(doc["mtime_ns"]),
        mode=_integer(doc["mode"], minimum=0) & 0o777,
        key=_text(doc["key"]),
        file_id=_text(doc.get("file_id", "")),
        parts_sha1=hashes,
    )


def _canonical(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode()


def _document(data: bytes, where: str, *, kind: str) -> dict[str, Any]:
    if data.count(b",") > _MOST_VALUES:
        raise IntegrityError(f"the document has more than {_MOST_VALUES} values", where=where)
    try:
        doc = json.loads(data, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise IntegrityError("not valid JSON", where=where) from error
    if not isinstance(doc, dict) or doc.get("kind") != kind:
        raise IntegrityError(f"not a {kind} document", where=where)
    version = doc.get("schema_version")
    if version != SCHEMA_VERSION:
        raise IntegrityError(
            f"this podwatch does not support schema_version {version!r:.40}",
            where=where,
            fix="use the version of podwatch that wrote it, or a newer one",
        )
    return doc


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of ``pairs``. Raises IntegrityError for a duplicate key, because JSON readers differ in which they use."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise IntegrityError("the document has a duplicate key", fix="podwatch ignores the document")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {type(value).__name__}")
    return value


def _integer(value: Any, *, minimum: int | None = None) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected an integer, got {type(value).__name__}")
    if abs(value) > _LARGEST:
        raise ValueError("a number is larger than it can be")
    if minimum is not None and value < minimum:
        raise ValueError(f"{value} is below {minimum}")
    return value
