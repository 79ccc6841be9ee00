"""The objects in the store: key layout, manifest and pointer (docs/sync.md)."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from podwatch.domain.document import (
    Document,
    FileMode,
    Integer,
    Label,
    Many,
    Positive,
    RelativePath,
    RunId,
    SaveId,
    Sha1,
    Text,
    Texts,
    Whole,
)
from podwatch.domain.safe_names import check_relative_path

DEFAULT_PART_SIZE = 100_000_000
"""Bytes. B2's recommended part size; 47 GB are 470 parts, and a kill loses at most (connections x part)."""
WRITER_TAG = "podwatch-writer"
"""File-info key that marks every object of podwatch; it never changes or deletes an object without it."""

_SHA1 = re.compile("[0-9a-f]{40}")
_SAVE_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z")


def valid_save_id(save_id: str) -> bool:
    """Whether it is a plain name, which cannot lead out of its checkpoint's place in the store."""
    return bool(_SAVE_ID.match(save_id))


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
    def _missing_(cls, value: object) -> "Proof":
        """NONE for a value that this podwatch does not know."""
        return cls.NONE


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One regular file. ``path`` is ``<part>/<path inside the part's directory>``; ``parts_sha1`` has one hash per
    ``part_size`` bytes (one for a smaller file, none for an empty one). ``file_id`` names the exact version if the
    store has versions; otherwise it is empty."""

    path: RelativePath
    part: Text
    size: Whole
    mtime_ns: Integer
    mode: FileMode
    key: Text
    file_id: Text
    parts_sha1: Many[Sha1]


@dataclass(frozen=True, slots=True)
class ManifestSymlink:
    path: RelativePath
    part: Text
    target: Text


@dataclass(frozen=True, slots=True)
class Manifest(Document):
    """The content of one uploaded save. Never changed once written."""

    KIND = "podwatch-manifest"
    FILE = "manifest.json"
    LARGEST = 64 << 20

    run_id: RunId
    lineage: Text
    step: Whole
    save_id: SaveId
    layout: Text
    created_at: Text
    writer_id: Text
    part_size: Positive
    total_bytes: Whole
    files: Many[ManifestFile]
    symlinks: Many[ManifestSymlink] = ()
    world_size: Positive | None = None
    config_digest: Text = ""
    producer: Text = ""
    train_command: Many[Text] = ()
    wandb: Texts = field(default_factory=dict)
    proof: Proof = Proof.NONE
    """How it was known, when this was written, that the store holds these bytes."""

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("files: there is none")
        _check_places([entry.path for entries in (self.files, self.symlinks) for entry in entries])
        if any(len(file.parts_sha1) != -(-file.size // self.part_size) for file in self.files):
            raise ValueError("files: a file has another number of hashes than parts")
        if sum(file.size for file in self.files) != self.total_bytes:
            raise ValueError("total_bytes is not the sum of the files")


def _check_places(paths: list[str]) -> None:
    """Raise ValueError unless a directory can hold all of them at once."""
    taken = set(paths)
    if len(taken) != len(paths):
        raise ValueError("files: a path is there twice")
    if not taken.isdisjoint(_folders(paths)):
        raise ValueError("files: one name is a file and a directory")


def _folders(paths: Iterable[str]) -> set[str]:
    """Every directory above one of them."""
    found = {path.rpartition("/")[0] for path in paths}
    return found | _folders(found) if found - {""} else found


@dataclass(frozen=True, slots=True)
class ManifestRef:
    """A manifest as stored. ``file_id`` is empty where the store names no versions."""

    key: str
    file_id: str
    sha1: str
    size: int


@dataclass(frozen=True, slots=True)
class Pointer(Document):
    """``latest.json``. ``step`` is None after a deliberate fresh start, until the first save.

    Readers use the highest (generation, seq) whose save is whole.
    """

    KIND = "podwatch-latest"
    FILE = "latest.json"

    generation: Whole
    seq: Whole
    run_id: Text
    lineage: Text
    step: Whole | None
    writer_id: Text
    created_at: Text
    save_id: Text = ""
    manifest_key: Text = ""
    manifest_file_id: Text = ""
    manifest_sha1: Text = ""
    manifest_size: Whole = 0
    total_bytes: Whole = 0
    layout: Text = ""
    host: Label = ""
    wandb: Texts = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.step is not None and not _SHA1.fullmatch(self.manifest_sha1):
            raise ValueError("manifest_sha1 is missing")

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


def sha1_hex(data: bytes) -> str:
    """SHA-1 as B2 uses it: it detects damage, not an attacker (docs/security.md)."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
