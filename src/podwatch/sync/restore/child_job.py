"""One restore as data: the job that the child reads on its standard input."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from podwatch.domain.manifest import ManifestFile, ManifestSymlink
from podwatch.stores.credentials import Credentials
from podwatch.system.pinned_directories import Pin
from podwatch.system.rights import Rights


@dataclass(frozen=True, slots=True)
class FetchJob:
    """``staging`` maps each part to the directory in which ``<part>/...`` is built, on the filesystem of its target;
    ``targets`` maps each part to its target, whatever is there now. All are below one of ``pins``. ``rights``: of the
    user whose directories they are; None for our own."""

    step: int
    store: str
    writer_id: str
    part_size: int
    files: tuple[ManifestFile, ...]
    symlinks: tuple[ManifestSymlink, ...]
    staging: Mapping[str, str]
    targets: Mapping[str, str]
    rights: Rights | None = None
    connections: int = 8
    pins: tuple[Pin, ...] = ()
    features: Mapping[str, object] = field(default_factory=dict)
    """What is known of the store (``ObjectStore.features``)."""

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(sorted(self.targets))

    def to_line(self, credentials: Credentials | None) -> bytes:
        """One JSON line. Contains the secret: send it only through a pipe, never in argv, environment or a log."""
        secret = None if credentials is None else credentials.to_json()
        doc = {**asdict(self), "staging": dict(self.staging), "targets": dict(self.targets), "credentials": secret}
        return json.dumps(doc).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "tuple[FetchJob, Credentials | None]":
        doc: dict[str, Any] = json.loads(line)
        secret = doc.pop("credentials")
        files = tuple(ManifestFile(**{**f, "parts_sha1": tuple(f["parts_sha1"])}) for f in doc.pop("files"))
        links = tuple(ManifestSymlink(**s) for s in doc.pop("symlinks"))
        pins = tuple(Pin(**p) for p in doc.pop("pins"))
        rights = Rights.from_json(doc.pop("rights"))
        job = cls(**doc, files=files, symlinks=links, rights=rights, pins=pins)
        return job, Credentials.from_json(secret)


@dataclass(frozen=True, slots=True)
class Fetched:
    """``staged`` are the parts now whole in their staging directory; the others were in place already."""

    staged: tuple[str, ...]
    downloaded: int
