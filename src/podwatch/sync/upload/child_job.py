"""One upload as data: the job that the child reads on its standard input, and the files that are still missing."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.errors import IntegrityError
from podwatch.domain.manifest import Keys, ManifestFile, ManifestSymlink
from podwatch.domain.safe_names import check_relative_path
from podwatch.stores.credentials import Credentials
from podwatch.stores.open_store import parse_store_url
from podwatch.system.pinned_directories import Pin
from podwatch.system.rights import Rights

if TYPE_CHECKING:  # the child, which only reads a job, starts in half the time and memory without these
    from podwatch.checkpoints.known_checkpoints import SetContents
    from podwatch.journal.upload_records import BegunUpload, UploadedObject


@dataclass(frozen=True, slots=True)
class JobFile:
    """``path`` is inside the part's directory; ``remote`` is ``<part>/<path>`` as the manifest has it.

    ``upload`` is the store's id of a multi-part upload that was started for this very file and is not known to be
    finished; ``parts`` its parts that are known to have been sent, by number (``StoredPart.note``), and ``ctime_ns``
    the file's at that start (0: not known).
    """

    part: str
    path: str
    remote: str
    key: str
    size: int
    mtime_ns: int
    mode: int
    inode: int
    device: int
    upload: str = ""
    parts: Mapping[int, str] = field(default_factory=dict)
    ctime_ns: int = 0


@dataclass(frozen=True, slots=True)
class UploadJob:
    """``roots`` maps each part to its absolute directory, below one of ``pins``. ``files`` are those not in the store
    yet. ``max_rate`` is bytes per second, 0 for no limit.
    ``rights``: of the user whose directories they are; None for our own."""

    step: int
    save_id: str
    store: str
    writer_id: str
    part_size: int
    connections: int
    lock: str
    roots: Mapping[str, str]
    files: tuple[JobFile, ...]
    max_rate: float = 0.0
    pins: tuple[Pin, ...] = ()
    rights: Rights | None = None
    features: Mapping[str, object] = field(default_factory=dict)
    """What is known of the store (``ObjectStore.features``)."""

    def to_line(self, credentials: Credentials | None) -> bytes:
        """One JSON line. Contains the secret: send it only through a pipe, never in argv, environment or a log."""
        secret = None if credentials is None else credentials.to_json()
        job = {name: getattr(self, name) for name in _JOB}
        files = [{name: getattr(file, name) for name in _FILE} for file in self.files]  # ``asdict`` is ten times slower
        more = {"roots": dict(self.roots), "files": files, "pins": [asdict(p) for p in self.pins]}
        return json.dumps({**job, **more, "credentials": secret}).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "tuple[UploadJob, Credentials | None]":
        doc: dict[str, Any] = json.loads(line)
        secret = doc.pop("credentials")
        files = tuple(_from_json(f) for f in doc.pop("files"))
        pins = tuple(Pin(**p) for p in doc.pop("pins"))
        rights = Rights.from_json(doc.pop("rights"))
        job = cls(**doc, files=files, pins=pins, rights=rights)
        return job, Credentials.from_json(secret)


_JOB = tuple(f.name for f in fields(UploadJob))
_FILE = tuple(f.name for f in fields(JobFile))


def _from_json(doc: dict[str, Any]) -> JobFile:
    parts = {int(number): str(sha1) for number, sha1 in doc.pop("parts").items()}
    return JobFile(**doc, parts=parts)


def keys_for(store_url: str, run_id: str) -> Keys:
    """The run's object names, after the prefix in the store URL if there is one."""
    return Keys(run_id, parse_store_url(store_url).prefix)


def all_files(contents: "SetContents", keys: Keys) -> tuple[JobFile, ...]:
    """Every file of the checkpoint that is sent, in a fixed order. Raises IntegrityError for a name no store can
    hold."""
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
            "the file name is not valid UTF-8", where=repr(entry.path)[:120], fix="rename it: no store can hold it"
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


def matches(file: JobFile, done: "UploadedObject | None") -> bool:
    """Does the journal record this very file, unchanged, as stored?"""
    return done is not None and (done.key, done.size, done.mtime_ns, done.inode, done.device) == (
        file.key,
        file.size,
        file.mtime_ns,
        file.inode,
        file.device,
    )


def missing(files: tuple[JobFile, ...], done: "Mapping[str, UploadedObject]") -> tuple[JobFile, ...]:
    return tuple(f for f in files if not matches(f, done.get(f.remote)))


def taken_up(files: tuple[JobFile, ...], begun: "Mapping[str, BegunUpload]", part_size: int) -> tuple[JobFile, ...]:
    """The same files, each with the parts that a killed upload sent, if those fit this very file and part size."""
    return tuple(_taken_up(f, begun.get(f.remote), part_size) for f in files)


def _taken_up(file: JobFile, begun: "BegunUpload | None", part_size: int) -> JobFile:
    if begun is None or begun.part_size != part_size:
        return file
    was = (begun.key, begun.size, begun.mtime_ns, begun.inode, begun.device)
    if was != (file.key, file.size, file.mtime_ns, file.inode, file.device):
        return file
    return replace(file, upload=begun.upload, parts=dict(begun.parts), ctime_ns=begun.ctime_ns)


def left_bytes(
    files: tuple[JobFile, ...],
    done: "Mapping[str, UploadedObject]",
    begun: "Mapping[str, BegunUpload]",
    part_size: int,
) -> int:
    """Bytes still to send, less the parts that the store is known to have."""
    left = 0
    for file in taken_up(missing(files, done), begun, part_size):
        left += file.size - sum(min(part_size, file.size - (number - 1) * part_size) for number in file.parts)
    return left


def roots(contents: "SetContents") -> dict[str, str]:
    return {p.part.name: str(p.part.path) for p in contents.parts}


def manifest_files(files: tuple[JobFile, ...], done: "Mapping[str, UploadedObject]") -> tuple[ManifestFile, ...]:
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


def manifest_symlinks(contents: "SetContents") -> tuple[ManifestSymlink, ...]:
    links = sorted(contents.symlinks, key=lambda x: (x.part, x.path))
    return tuple(ManifestSymlink(f"{x.part}/{x.path}", x.part, x.target) for x in links)
