"""What one endpoint does for one bucket, found out by trying it: S3 servers differ, and many accept what they ignore.

A checksum counts as checked only where a deliberately wrong one was refused and the right one accepted; an echoed
header proves nothing. Conditions count only where both outcomes were seen (docs/s3.md).
"""

import base64
import hashlib
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Protocol

from podwatch.domain.errors import RemoteError
from podwatch.domain.manifest import WRITER_TAG
from podwatch.stores.http_transfer import Answer
from podwatch.stores.s3_errors import Kind, Refused
from podwatch.stores.s3_session import Call, S3Session, base64_of
from podwatch.stores.s3_xml import complete_document, parse, versions

META = f"x-amz-meta-{WRITER_TAG}"
_DATA = b"podwatch finds out what this store does\n"
_WRONG = b"podwatch did not send this\n"
CHECKS = ("sha1", "sha256", "md5")
"""Checksums that a request can carry: x-amz-checksum-sha1, the signed payload, Content-MD5."""


class _Put(Protocol):
    """Sends the probe's data with more headers, and a payload hash."""

    def __call__(self, headers: Mapping[str, str], payload: str, /) -> Answer: ...


@dataclass(frozen=True, slots=True)
class Features:
    """``object_checks`` and ``part_checks``: which of CHECKS are refused when wrong. ``etag_md5``: the ETag of a whole
    object or part is the MD5 of its bytes. ``composite``: HEAD shows the SHA-1 over the parts' SHA-1s, as computed
    here. ``create``, ``replace``: conditional writes work. ``versioned``: versions are
    kept and can be listed. ``deletes``: the credentials may delete."""

    object_checks: tuple[str, ...] = ()
    part_checks: tuple[str, ...] = ()
    etag_md5: bool = False
    composite: bool = False
    create: bool = False
    replace: bool = False
    versioned: bool = False
    deletes: bool = False

    def object_proof(self) -> str:
        """How a whole object is proved: ``sha1``, ``sha256``, ``md5`` (a header), ``etag`` (the answer), or nothing."""
        return next((c for c in CHECKS if c in self.object_checks), "etag" if self.etag_md5 else "")

    def part_proof(self) -> str:
        """The same for a part: there the ETag comes before Content-MD5, because the part is then read only once."""
        found: list[str] = [c for c in ("sha1", "sha256") if c in self.part_checks]
        found += ["etag"] if self.etag_md5 else []
        return next(iter([*found, *(c for c in ("md5",) if c in self.part_checks)]), "")

    def as_json(self) -> dict[str, object]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, document: Mapping[str, object]) -> "Features | None":
        """None for what is not a whole record of this version."""
        try:
            values = {f.name: document[f.name] for f in fields(cls)}
        except KeyError:
            return None
        return cls(**{k: tuple(v) if isinstance(v, (list, tuple)) else bool(v) for k, v in values.items()})  # type: ignore[arg-type]


def hash_headers(check: str, digest: str) -> tuple[dict[str, str], str]:
    """Headers and the payload hash that carry ``digest`` (hex) of this check."""
    if check == "sha1":
        return {"x-amz-checksum-sha1": base64_of(digest)}, ""
    if check == "md5":
        return {"Content-MD5": base64_of(digest)}, ""
    return {}, digest if check == "sha256" else ""


class Probe:
    """Tries a bucket out with a few small objects below ``prefix``, and deletes them where it may. Raises RemoteError
    for store trouble, and where the credentials cannot write."""

    def __init__(self, session: S3Session, prefix: str, writer_id: str) -> None:
        self._session = session
        name = f"podwatch-probe-{secrets.token_hex(8)}"
        self._key = f"{prefix}/{name}" if prefix else name
        self._tag = {META: writer_id}
        self._made: list[tuple[str, str]] = []
        self._always: dict[str, str] = {}
        """What every write needs: in a bucket with Object Lock a checksum."""

    def run(self) -> Features:
        whole, parts = self._key, f"{self._key}-parts"
        try:
            first = self._first(whole)  # an error here is the operator's: no permission, no bucket
            etag = first.headers.get("ETag", "").strip('"')
            versioned = first.headers.get("x-amz-version-id", "null") != "null" and self._lists_versions()
            md5 = etag == hashlib.md5(_DATA, usedforsecurity=False).hexdigest()
            objects = tuple(c for c in CHECKS if self._checks(c, lambda h, p: self._put(whole, h, p)))
            create, replace = self._creates(whole), self._replaces(whole)
            part_checks, composite, part_md5 = self._parts(parts)
        finally:
            deletes = self._clean()
        etag_md5 = md5 and part_md5 and not self._always  # only a header is a checksum there
        return Features(objects, part_checks, etag_md5, composite, create, replace, versioned, deletes)

    def _first(self, key: str) -> Answer:
        try:
            return self._put(key)
        except Refused as refusal:
            if refusal.kind is not Kind.REFUSED:
                raise
            self._always = hash_headers("md5", _hash("md5", _DATA))[0]
            with suppress(Refused):
                return self._put(key)
            raise

    def _added(self, headers: Mapping[str, str], payload: str) -> dict[str, str]:
        """What a write without a checksum of its own gets beside its headers."""
        own = payload or "Content-MD5" in headers or "x-amz-checksum-sha1" in headers
        return {} if own else self._always

    def _put(self, key: str, headers: Mapping[str, str] | None = None, payload: str = "") -> Answer:
        more = {**self._added(headers or {}, payload), **(headers or {})}
        sent = {**self._tag, **more, "Content-Type": "application/octet-stream"}
        answer = self._session.send(
            Call("PUT", "s3:PutObject", key, headers=sent, resend=False), _DATA, payload=payload
        )
        self._made.append((key, str(answer.headers.get("x-amz-version-id") or "")))
        return answer

    def _lists_versions(self) -> bool:
        """Versions that cannot be listed are of no use: retention would never delete them."""
        try:
            self._session.send(
                Call("GET", "s3:ListBucketVersions", query={"versions": "", "prefix": self._key, "max-keys": "1"})
            )
        except Refused as refusal:
            if refusal.transient:
                raise
            return False
        return True

    def _checks(self, check: str, put: _Put) -> bool:
        """Whether the wrong hash is refused, and the right one is not."""
        wrong = hash_headers(check, _hash(check, _WRONG))
        try:
            put(*wrong)
        except Refused as refusal:
            if refusal.transient and refusal.kind is not Kind.DAMAGED:
                raise
            with suppress(Refused):
                put(*hash_headers(check, _hash(check, _DATA)))
                return True
        return False

    def _refused(self, key: str, headers: Mapping[str, str]) -> bool:
        """Whether a condition that does not hold stops the write."""
        try:
            self._put(key, headers)
        except Refused as refusal:
            if refusal.kind is Kind.CHANGED:
                return True
            if refusal.transient:
                raise
        return False

    def _creates(self, key: str) -> bool:
        fresh = f"{self._key}-new"
        if not self._refused(key, {"If-None-Match": "*"}):
            return False
        with suppress(Refused):
            self._put(fresh, {"If-None-Match": "*"})
            return self._refused(fresh, {"If-None-Match": "*"})
        return False

    def _replaces(self, key: str) -> bool:
        if not self._refused(key, {"If-Match": '"00000000000000000000000000000000"'}):
            return False
        with suppress(Refused):
            now = self._put(key).headers.get("ETag", "")
            self._put(key, {"If-Match": now})
            return True
        return False

    def _parts(self, key: str) -> tuple[tuple[str, ...], bool, bool]:
        """Which checks hold for parts; whether HEAD shows the composite hash; whether a part's ETag is its MD5."""
        found = self._attempt(key, "SHA1")
        if found is None or "sha1" not in found[0]:
            found = self._attempt(key, "") or ((), False, False)
        return found

    def _attempt(self, key: str, algorithm: str) -> tuple[tuple[str, ...], bool, bool] | None:
        """None where an upload with this algorithm does not work."""
        headers = {**self._tag, **({"x-amz-checksum-algorithm": algorithm} if algorithm else {})}
        upload = ""
        try:
            answer = self._session.send(Call("POST", "s3:PutObject", key, {"uploads": ""}, headers), b"")
            upload = parse(answer.content, where=key).text("UploadId")
            query = {"partNumber": "1", "uploadId": upload}

            def put(more: Mapping[str, str], payload: str) -> Answer:
                sent = {**more, **(right if algorithm and "x-amz-checksum-sha1" not in more else {})}
                sent |= self._added(sent, payload)
                call = Call("PUT", "s3:PutObject", key, query, sent, resend=False)
                return self._session.send(call, _DATA, payload=payload)

            right, _ = hash_headers("sha1", _hash("sha1", _DATA))
            checks = tuple(c for c in CHECKS if (c != "sha1" or algorithm) and self._checks(c, put))
            part = put({}, "")
            etag = part.headers.get("ETag", "").strip('"')
            sha1 = [right["x-amz-checksum-sha1"]] if algorithm else []
            document = complete_document([etag], sha1)
            call = Call("POST", "s3:PutObject", key, {"uploadId": upload})
            done = self._session.send(call, document)
            self._made.append((key, str(done.headers.get("x-amz-version-id") or "")))
            upload = ""
        except Refused as refusal:
            if refusal.transient:
                raise
            return None
        finally:
            if upload:
                with suppress(RemoteError):
                    self._session.send(Call("DELETE", "s3:AbortMultipartUpload", key, {"uploadId": upload}, price="A"))
        return checks, bool(sha1) and self._composite(key), etag == _hash("md5", _DATA)

    def _composite(self, key: str) -> bool:
        with suppress(Refused):
            answer = self._session.send(Call("HEAD", "s3:GetObject", key, headers=CHECKSUM_MODE, price="B"))
            return same_composite(answer.headers.get("x-amz-checksum-sha1", ""), [_hash("sha1", _DATA)]) is True
        return False

    def _clean(self) -> bool:
        """Whether everything could be deleted."""
        deletes = True
        for key, version in dict.fromkeys(self._made):
            query = {"versionId": version} if version and version != "null" else {}
            try:
                self._session.send(Call("DELETE", "s3:DeleteObject", key, query, price="A"))
            except RemoteError:
                deletes = False
        return deletes


CHECKSUM_MODE = {"x-amz-checksum-mode": "ENABLED"}


class FoundFeatures:
    """The features of one bucket: as an earlier process found them, else probed once, at the first use. Thread-safe.
    ``now``: None until they are known."""

    def __init__(self, session: S3Session, prefix: str, writer_id: str, remembered: Mapping[str, object]) -> None:
        self._session, self._prefix, self._writer_id = session, prefix, writer_id
        self._probing = threading.Lock()
        self._seen_version: bool | None = None
        if remembered.get("bucket") == session.bucket:
            session.recall(str(remembered.get("endpoint") or ""), str(remembered.get("region") or ""))
        same = (remembered.get("endpoint"), remembered.get("bucket")) == (session.endpoint, session.bucket)
        self.now = Features.from_json(remembered) if same else None

    def as_json(self) -> dict[str, object]:
        if self.now is None:
            return {}
        session = self._session
        found = {"endpoint": session.endpoint, "bucket": session.bucket, "region": session.region}
        return {**found, **self.now.as_json()}

    def known(self) -> Features:
        """Probes once. Raises RemoteError."""
        with self._probing:
            if self.now is None:
                self.now = self._probed()
            return self.now

    def probe_again(self) -> Features:
        with self._probing:
            self.now = self._probed()
            return self.now

    def _probed(self) -> Features:
        return Probe(self._session, self._prefix, self._writer_id).run()

    def for_writing(self) -> Features:
        """Nothing is known, and nothing promised, where these credentials cannot write."""
        try:
            return self.known()
        except Refused as refusal:
            if refusal.kind is Kind.DENIED:
                return Features()
            raise

    @property
    def versioned(self) -> bool:
        if self.now is not None:
            return self.now.versioned
        if self._seen_version is None:
            self._seen_version = self._lists_versions()
        return self._seen_version

    def saw(self, headers: Mapping[str, str]) -> None:
        """An answer about an object: it can show that the bucket keeps versions."""
        self._seen_version = self._seen_version or headers.get("x-amz-version-id", "null") != "null"

    def _lists_versions(self) -> bool:
        query = {"versions": "", "prefix": f"{self._prefix}/" if self._prefix else ""}
        try:
            answer = self._session.send(Call("GET", "s3:ListBucketVersions", query=query))
        except Refused as refusal:
            if refusal.transient:
                raise
            return False
        return any(e.identifier not in ("", "null") for e in versions(answer.content, where=self._session.url).entries)


def same_composite(shown: str, parts_sha1: "list[str] | tuple[str, ...]") -> bool | None:
    """Whether the checksum that HEAD shows is that of these parts (hex): of one whole object, or of an upload in parts.
    None where it shows none, or one of another kind."""
    value, _, count = shown.partition("-")
    if not value or (count and not count.isdigit()):
        return None
    if count and int(count) != len(parts_sha1):
        return None  # the same bytes in other parts have another one
    joined = hashlib.sha1(b"".join(bytes.fromhex(h) for h in parts_sha1), usedforsecurity=False).digest()
    composite = base64.b64encode(joined).decode()
    if count:
        return value == composite
    whole = base64_of(parts_sha1[0]) if len(parts_sha1) == 1 else ""
    return value in (composite, whole) if len(parts_sha1) == 1 else (value == composite or None)


def _hash(name: str, data: bytes) -> str:
    return hashlib.new(name, data, usedforsecurity=False).hexdigest()
