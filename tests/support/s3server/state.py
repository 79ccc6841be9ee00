"""What the S3 server knows: keys, objects with their versions, unfinished uploads, traits, faults, the log of events.

Metadata and bodies are on disk, so that a server stopped and started again on the same directory is the same account.
"""

import json
import threading
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support.pointer_check import Found, PointerCheck, pointers

ALL_PERMISSIONS = ("put", "get", "list", "versions", "delete")
MINIMUM_PART = 5 << 20


@dataclass
class Key:
    access_key: str
    secret: str
    prefix: str = ""
    permissions: tuple[str, ...] = ALL_PERMISSIONS
    token: str = ""
    expired: bool = False


@dataclass
class Traits:
    """How this server differs from others. The defaults are those of AWS without versioning."""

    versions: bool = False
    verify: tuple[str, ...] = ("sha1", "md5", "sha256")
    """The checksums that are checked; the others are only echoed (sha1) or ignored."""
    conditions: str = "yes"  # yes | ignore | 501
    etag: str = "md5"  # md5 | opaque
    composite: bool = True
    """Multipart objects show the composite SHA-1, and ListParts those of the parts."""
    missing: int = 404  # 403: as AWS answers without permission to list
    region: str = "us-east-1"
    styles: tuple[str, ...] = ("path", "virtual")
    equal_parts: bool = False
    copies: str = "yes"  # yes | empty (as rclone) | 501
    range_status: int = 206  # 200: as rclone
    lists_uploads: bool = True
    lists_etags: bool = True
    checksum_mode: bool = True
    """Without it x-amz-checksum-mode is refused (B2 answers "Unsupported header")."""
    lock: bool = False
    """Object Lock with a retention of the bucket: each write needs a checksum, and no version can be deleted."""
    minimum_part: int = MINIMUM_PART
    discard: bool = False
    """Bodies are hashed but not kept: for benchmarks."""


@dataclass
class Version:
    """One version of one key. ``version_id`` is "null" in a bucket without versions."""

    key: str
    version_id: str
    number: int
    wall: float
    size: int = 0
    etag: str = ""
    sha1: str = ""
    """Base64, with ``-N`` for a composite one; empty where none came."""
    sha256: str = ""
    """Base64; empty where none came."""
    meta: dict[str, str] = field(default_factory=dict)
    marker: bool = False


@dataclass
class Part:
    number: int
    size: int
    etag: str
    md5: str
    sha1: str


@dataclass
class Upload:
    upload_id: str
    key: str
    wall: float
    meta: dict[str, str] = field(default_factory=dict)
    algorithm: str = ""
    parts: dict[int, Part] = field(default_factory=dict)


@dataclass
class Fault:
    """Applied to the next ``count`` requests of operation ``ep`` (``*``: any) after ``skip`` of them, of keys that end
    with ``suffix``."""

    ep: str
    action: str  # status | reset | hang | slow | stall | lost | late | torn | flip | page | error200
    count: int = 1
    skip: int = 0
    status: int = 503
    code: str = "SlowDown"
    retry_after: str = ""
    seconds: float = 0.0
    after_bytes: int = 0
    suffix: str = ""


class State:
    def __init__(self, directory: Path, bucket: str) -> None:
        self.lock = threading.RLock()
        self.directory, self.bucket = directory, bucket
        for name in ("meta", "body", "upload", "part"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        self.keys: dict[str, Key] = {}
        self.traits = Traits()
        self.faults: list[Fault] = []
        self.events: list[dict[str, Any]] = []
        self.calls: Counter[str] = Counter()
        self.latency, self.rate = 0.0, 0.0
        self.clock_ahead = 0.0
        self.sent = 0
        self.violations: list[str] = []
        self._pointers = PointerCheck(self)
        self.objects: dict[str, list[Version]] = {}
        """Key -> its versions, oldest first."""
        found = [Version(**json.loads(p.read_text())) for p in (directory / "meta").glob("*.json")]
        for version in sorted(found, key=lambda v: v.number):
            self.objects.setdefault(version.key, []).append(version)
        self.number = max((v.number for v in found), default=0)
        self.uploads: dict[str, Upload] = {}
        for path in (directory / "upload").glob("*.json"):
            doc = json.loads(path.read_text())
            parts = {int(n): Part(**p) for n, p in doc.pop("parts").items()}
            upload = Upload(**doc, parts=parts)
            self.uploads[upload.upload_id] = upload

    # -- objects ----------------------------------------------------------------------------------------------------

    def now(self) -> float:
        return time.time() + self.clock_ahead

    def scratch(self) -> Path:
        return self.directory / "body" / f"{uuid.uuid4().hex}.tmp"

    def current(self, key: str) -> Version | None:
        """None for what is absent or hidden by a delete marker."""
        with self.lock:
            versions = self.objects.get(key)
            return versions[-1] if versions and not versions[-1].marker else None

    def find(self, key: str, version_id: str) -> Version | None:
        with self.lock:
            return next((v for v in self.objects.get(key, ()) if v.version_id == version_id), None)

    def add(self, key: str, body: Path | None, **fields: Any) -> Version:
        """Make a version current. Without versions the one before is replaced."""
        with self.lock:
            self.number += 1
            version_id = uuid.uuid4().hex if self.traits.versions else "null"
            version = Version(key, version_id, self.number, fields.pop("wall", 0.0) or self.now(), **fields)
            if not self.traits.versions and (old := self.find(key, "null")) is not None:
                self.drop(old)
            if body is not None:
                body.replace(self.body(version))
            target = self.directory / "meta" / f"{version.number}.json"
            scratch = target.with_suffix(".tmp")
            scratch.write_text(json.dumps(asdict(version)))
            scratch.replace(target)
            self.objects.setdefault(key, []).append(version)
            return version

    def drop(self, version: Version) -> None:
        with self.lock:
            self.objects[version.key].remove(version)
            if not self.objects[version.key]:
                del self.objects[version.key]
            (self.directory / "meta" / f"{version.number}.json").unlink(missing_ok=True)
            self.body(version).unlink(missing_ok=True)

    def body(self, version: Version) -> Path:
        return self.directory / "body" / str(version.number)

    # -- uploads ----------------------------------------------------------------------------------------------------

    def part_file(self, upload: Upload, number: int) -> Path:
        return self.directory / "part" / f"{upload.upload_id}.{number}"

    def save_upload(self, upload: Upload) -> None:
        with self.lock:
            self.uploads[upload.upload_id] = upload
            target = self.directory / "upload" / f"{upload.upload_id}.json"
            scratch = target.with_suffix(".tmp")
            scratch.write_text(json.dumps(asdict(upload)))
            scratch.replace(target)

    def drop_upload(self, upload: Upload) -> None:
        with self.lock:
            self.uploads.pop(upload.upload_id, None)
            (self.directory / "upload" / f"{upload.upload_id}.json").unlink(missing_ok=True)
            for number in upload.parts:
                self.part_file(upload, number).unlink(missing_ok=True)

    # -- faults and events ------------------------------------------------------------------------------------------

    def fault(self, ep: str, key: str) -> Fault | None:
        with self.lock:
            for rule in self.faults:
                if rule.ep not in (ep, "*") or not key.endswith(rule.suffix):
                    continue
                if rule.skip:
                    rule.skip -= 1
                    return None
                rule.count -= 1
                if rule.count <= 0:
                    self.faults.remove(rule)
                return rule
        return None

    def happened(self, ep: str, key: str = "", **details: Any) -> None:
        """Log an event and check the promise at this very moment."""
        with self.lock:
            self.events.append({"n": len(self.events), "ep": ep, "name": key, **details})
            named = key.endswith(("podwatch/latest.json", "/exports.json")) or "podwatch/pointers/" in key
            if named or ep == "DeleteObject":
                self.violations += [f"after event {len(self.events) - 1} ({ep} {key}): {v}" for v in self.invariant()]

    def invariant(self) -> list[str]:
        return [problem for key in pointers(self.objects) if (problem := self._pointers.problem(key))]

    def newest(self, key: str) -> Found | None:
        version = self.current(key)
        return None if version is None else self._stored(version)

    def _stored(self, version: Version) -> Found:
        return Found(version.key, version.size, str(version.number), self.body(version))
