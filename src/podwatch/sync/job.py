"""One upload as data: what the child is told on its standard input, and what is still missing."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from podwatch.checkpoints.catalogue import SetContents
from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.errors import IntegrityError
from podwatch.domain.remote import Keys, ManifestFile, ManifestSymlink, check_relative_path
from podwatch.journal.records import UploadedObject
from podwatch.stores.credentials import Credentials
from podwatch.stores.open import parse_store_url


@dataclass(frozen=True, slots=True)
class JobFile:
    """``path`` is inside the part's directory; ``remote`` is ``<part>/<path>`` as the manifest has it."""

    part: str
    path: str
    remote: str
    key: str
    size: int
    mtime_ns: int
    mode: int
    inode: int
    device: int


@dataclass(frozen=True, slots=True)
class UploadJob:
    """``roots`` maps each part to its absolute directory. ``files`` are those not in the store yet."""

    step: int
    save_id: str
    store: str
    writer_id: str
    part_size: int
    connections: int
    lock: str
    roots: Mapping[str, str]
    files: tuple[JobFile, ...]

    def to_line(self, credentials: Credentials | None) -> bytes:
        """One JSON line. Holds the secret: goes through a pipe only, never into argv, environment or a log."""
        secret = None if credentials is None else [credentials.key_id, credentials.key, credentials.endpoint]
        return json.dumps({**asdict(self), "roots": dict(self.roots), "credentials": secret}).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "tuple[UploadJob, Credentials | None]":
        doc: dict[str, Any] = json.loads(line)
        secret = doc.pop("credentials")
        files = tuple(JobFile(**f) for f in doc.pop("files"))
        return cls(**doc, files=files), None if secret is None else Credentials(*secret)


def keys_for(store_url: str, run_id: str) -> Keys:
    """The run's object names: a prefix in the store URL goes before them."""
    return Keys(run_id, parse_store_url(store_url).prefix)


def all_files(contents: SetContents, keys: Keys) -> tuple[JobFile, ...]:
    """Every file of the set that travels, in a fixed order. Raises IntegrityError for a name no store could hold."""
    step, save_id = contents.set.step, contents.set.save_id
    return tuple(
        _file(entry, keys.data(step, save_id, f"{entry.part}/{entry.path}"))
        for entry in sorted(contents.files, key=lambda f: (f.part, f.path))
    )


def _file(entry: FileEntry, key: str) -> JobFile:
    try:
        entry.path.encode()
    except UnicodeEncodeError:
        raise IntegrityError(
            "file name is not valid UTF-8", where=repr(entry.path)[:120], fix="rename it; no object store could hold it"
        ) from None
    return JobFile(
        part=entry.part,
        path=check_relative_path(entry.path),
        remote=f"{entry.part}/{entry.path}",
        key=key,
        size=entry.size,
        mtime_ns=entry.mtime_ns,
        mode=entry.mode & 0o777,
        inode=entry.inode,
        device=entry.device,
    )


def matches(file: JobFile, done: UploadedObject | None) -> bool:
    """Is this very file, unchanged, already in the store according to the journal?"""
    return done is not None and (done.key, done.size, done.mtime_ns, done.inode, done.device) == (
        file.key,
        file.size,
        file.mtime_ns,
        file.inode,
        file.device,
    )


def missing(files: tuple[JobFile, ...], done: Mapping[str, UploadedObject]) -> tuple[JobFile, ...]:
    return tuple(f for f in files if not matches(f, done.get(f.remote)))


def roots(contents: SetContents) -> dict[str, str]:
    return {p.part.name: str(p.part.path) for p in contents.parts}


def manifest_files(files: tuple[JobFile, ...], done: Mapping[str, UploadedObject]) -> tuple[ManifestFile, ...]:
    return tuple(
        ManifestFile(
            path=f.remote,
            part=f.part,
            size=f.size,
            mtime_ns=f.mtime_ns,
            mode=f.mode,
            key=f.key,
            file_id=done[f.remote].file_id,
            parts_sha1=done[f.remote].parts_sha1,
        )
        for f in files
    )


def manifest_symlinks(contents: SetContents) -> tuple[ManifestSymlink, ...]:
    links = sorted(contents.symlinks, key=lambda x: (x.part, x.path))
    return tuple(ManifestSymlink(f"{x.part}/{x.path}", x.part, x.target) for x in links)
