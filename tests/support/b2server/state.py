"""What the small B2 server knows: keys, versions, unfinished large files, faults, and the log of what happened.

Metadata and bodies lie on disk, so that a server stopped and started again on the same directory is the same account.
"""

import hashlib
import json
import threading
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support.pointer_check import Found, PointerCheck, pointers
from tests.support.store_server import ApiError

ALL_CAPABILITIES = ("listBuckets", "listFiles", "readFiles", "writeFiles", "deleteFiles")
MINIMUM_PART = 5_000_000


@dataclass
class Key:
    key_id: str
    key: str
    bucket: str = ""
    prefix: str = ""
    capabilities: tuple[str, ...] = ALL_CAPABILITIES


@dataclass
class Version:
    """One version of one name. ``action`` is ``start`` (unfinished), ``upload`` or ``hide``."""

    file_id: str
    name: str
    action: str
    number: int
    timestamp_ms: int
    size: int = 0
    sha1: str = "none"
    info: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/octet-stream"


@dataclass
class Fault:
    """Applied to the next ``count`` requests of endpoint ``ep`` after ``skip`` of them; of ``b2_upload_file`` only to
    those of a name with this ``suffix``."""

    ep: str
    action: str  # status | reset | hang | slow | stall | lost | late | torn | flip | page
    count: int = 1
    skip: int = 0
    status: int = 503
    code: str = "service_unavailable"
    retry_after: str = ""
    seconds: float = 0.0
    after_bytes: int = 0
    suffix: str = ""


class State:
    def __init__(self, directory: Path, bucket: str) -> None:
        self.lock = threading.RLock()
        self.directory, self.bucket = directory, bucket
        self.bucket_id = "bkt" + hashlib.sha1(bucket.encode()).hexdigest()[:21]
        for name in ("meta", "body", "part"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        self.keys: dict[str, Key] = {}
        self.tokens: dict[str, Key] = {}
        self.upload_tokens: dict[str, tuple[Key, str]] = {}
        self.busy: set[str] = set()
        self.faults: list[Fault] = []
        self.events: list[dict[str, Any]] = []
        self.calls: Counter[str] = Counter()
        self.classes: Counter[str] = Counter()
        self.latency, self.rate = 0.0, 0.0
        self.clock_ahead = 0.0
        """Seconds that the service's clock is ahead of this machine's."""
        self.sent = 0
        """Bytes of bodies handed out."""
        self.recommended_part = 100_000_000
        self.violations: list[str] = []
        self._pointers = PointerCheck(_Visible(self))
        self.versions: dict[str, Version] = {}
        for path in (directory / "meta").glob("*.json"):
            version = Version(**json.loads(path.read_text()))
            self.versions[version.file_id] = version
        self.number = max((v.number for v in self.versions.values()), default=0)

    # -- versions ---------------------------------------------------------------------------------------------------

    def add(self, name: str, action: str, info: dict[str, str], content_type: str) -> Version:
        with self.lock:
            self.number += 1
            file_id = f"4_z{self.bucket_id}_f{uuid.uuid4().hex[:16]}_n{self.number}"
            now_ms = int((time.time() + self.clock_ahead) * 1000)
            version = Version(file_id, name, action, self.number, now_ms, info=info)
            version.content_type = content_type
            return version

    def save(self, version: Version) -> None:
        with self.lock:
            target = self.directory / "meta" / f"{version.file_id}.json"
            scratch = target.with_suffix(".tmp")
            scratch.write_text(json.dumps(asdict(version)))
            scratch.replace(target)
            self.versions[version.file_id] = version

    def drop(self, version: Version) -> None:
        with self.lock:
            del self.versions[version.file_id]
            (self.directory / "meta" / f"{version.file_id}.json").unlink()
            self.body(version).unlink(missing_ok=True)
            for part in self.parts(version.file_id).values():
                part.unlink()

    def body(self, version: Version) -> Path:
        return self.directory / "body" / version.file_id

    def part(self, file_id: str, number: int) -> Path:
        return self.directory / "part" / f"{file_id}.{number}"

    def parts(self, file_id: str) -> dict[int, Path]:
        found = (self.directory / "part").glob(f"{file_id}.*")
        return {int(p.suffix[1:]): p for p in found if p.suffix[1:].isdigit()}

    def newest(self, name: str) -> Version | None:
        """The visible version: newest finished one, unless that is a hide marker."""
        with self.lock:
            found = [v for v in self.versions.values() if v.name == name and v.action != "start"]
        last = max(found, key=lambda v: v.number, default=None)
        return last if last and last.action == "upload" else None

    def finish(self, version: Version, hashes: list[str]) -> None:
        parts = self.parts(version.file_id)
        if not hashes or sorted(parts) != list(range(1, len(hashes) + 1)):
            raise ApiError(400, "missing_part", "parts are missing")
        size = 0
        scratch = self.directory / "body" / f"{version.file_id}.tmp"
        with scratch.open("wb") as out:
            for number, expected in enumerate(hashes, 1):
                data = parts[number].read_bytes()
                if hashlib.sha1(data).hexdigest() != expected:
                    raise ApiError(400, "part_sha1_mismatch")
                if number < len(hashes) and len(data) < MINIMUM_PART:
                    raise ApiError(400, "bad_request", f"Part number {number} is smaller than {MINIMUM_PART} bytes")
                out.write(data)
                size += len(data)
        scratch.replace(self.body(version))
        version.size, version.action = size, "upload"
        self.save(version)
        for path in parts.values():
            path.unlink()

    # -- faults and events ------------------------------------------------------------------------------------------

    def fault(self, ep: str, name: str) -> Fault | None:
        with self.lock:
            for rule in self.faults:
                if rule.ep not in (ep, "*") or not name.endswith(rule.suffix):
                    continue
                if rule.skip:
                    rule.skip -= 1
                    return None
                rule.count -= 1
                if rule.count <= 0:
                    self.faults.remove(rule)
                return rule
        return None

    def count(self, ep: str, billed: str) -> None:
        with self.lock:
            self.calls[ep] += 1
            self.classes[billed] += 1

    def happened(self, ep: str, name: str = "", **details: Any) -> None:
        """Log an event and check the promise at this very moment."""
        with self.lock:
            self.events.append({"n": len(self.events), "ep": ep, "name": name, **details})
            named = name.endswith(("podwatch/latest.json", "/exports.json")) or "podwatch/pointers/" in name
            if named or ep in ("b2_delete_file_version", "b2_hide_file"):
                self.violations += [f"after event {len(self.events) - 1} ({ep} {name}): {v}" for v in self.invariant()]

    def shown(self) -> list[dict[str, Any]]:
        return [asdict(v) for v in sorted(self.versions.values(), key=lambda v: v.number)]

    def invariant(self) -> list[str]:
        """Whatever the newest pointers say now, every object behind them is complete and matches."""
        names = {v.name for v in self.versions.values() if v.action == "upload"}
        return [problem for key in pointers(names) if (problem := self._pointers.problem(key))]


class _Visible:
    """The state as the pointer check wants it."""

    def __init__(self, state: State) -> None:
        self._state = state

    def newest(self, key: str) -> Found | None:
        version = self._state.newest(key)
        return None if version is None else Found(key, version.size, version.file_id, self._state.body(version))
