"""S3 and what speaks its protocol. One request per call through ``S3Session``, with podwatch's own retries.

How the bytes are proved depends on what the endpoint was seen to check (``Features``). Objects are written and removed
here; ``S3Reader`` (s3_read.py) looks at them and reads them.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from typing import BinaryIO

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.domain.manifest import Proof
from podwatch.domain.safe_names import check_relative_path
from podwatch.stores import s3_xml
from podwatch.stores.base import (
    CannotDelete,
    Progress,
    StoredObject,
    StoredPart,
    Take,
    Unfinished,
    Upload,
    not_ours,
)
from podwatch.stores.http_transfer import Answer, Retry
from podwatch.stores.part_reader import PartStream, Source, StreamSource, part_hashes
from podwatch.stores.s3_credentials import S3Credentials
from podwatch.stores.s3_errors import Kind, Refused
from podwatch.stores.s3_features import META, FoundFeatures, hash_headers, same_composite
from podwatch.stores.s3_read import AT_ONCE, ETAG, S3Reader, date_of, etag_of, info_of
from podwatch.stores.s3_session import Call, S3Session, base64_of, hex_of, not_intact

_CONTENT_TYPE = "application/octet-stream"
_SPARE = 2
"""Kept connections beside those that send."""


class S3Store:
    """One bucket. Thread-safe. ``prefix``: where the store's own probes go. ``features``: as an earlier process found
    them (``S3Store.features``); else they are found at the first use."""

    def __init__(
        self,
        bucket: str,
        credentials: S3Credentials,
        *,
        writer_id: str,
        prefix: str = "",
        connections: int = 4,
        features: Mapping[str, object] | None = None,
        retry: Retry | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        most = max(connections + _SPARE, AT_ONCE)
        self._session = S3Session(bucket, credentials, most, retry or Retry(), sleep)
        self._prefix, self._writer_id = prefix, writer_id
        self.url = self._session.url
        self._features = FoundFeatures(self._session, prefix, writer_id, features or {})
        self._reader = S3Reader(self._session, self._features)

    @property
    def service(self) -> str:
        """Within which the bucket's name is that of one bucket: the endpoint without its scheme; empty at AWS, whose
        regions share their names."""
        endpoint = self._session.endpoint.partition("://")[2].rstrip("/").lower()
        return "" if endpoint.endswith(".amazonaws.com") else endpoint

    # -- what it is -------------------------------------------------------------------------------------------------

    @property
    def features(self) -> Mapping[str, object]:
        return self._features.as_json()

    @property
    def versioned(self) -> bool:
        return self._features.versioned

    @property
    def exclusive(self) -> bool:
        return self._features.for_writing().create

    @property
    def conditional(self) -> bool:
        return self._features.for_writing().replace

    @property
    def clock_skew(self) -> float | None:
        return self._session.skew

    # -- writing ----------------------------------------------------------------------------------------------------

    def create(self, key: str, data: bytes) -> StoredObject | None:
        return self._conditionally(key, StreamSource(BytesIO(data)), len(data), {"If-None-Match": "*"})

    def replace(self, key: str, source: Source, size: int, expected: StoredObject | None) -> StoredObject | None:
        condition = {"If-None-Match": "*"} if expected is None else {"If-Match": f'"{expected.info["etag"]}"'}
        return self._conditionally(key, source, size, condition)

    def _conditionally(self, key: str, source: Source, size: int, condition: Mapping[str, str]) -> StoredObject | None:
        known = self._features.known()
        if not (known.create if "If-None-Match" in condition else known.replace):
            raise RemoteError("this store has no conditional writes", where=f"{self.url}/{key}", transient=False)
        try:
            return self._put(key, source, size, None, condition)
        except Refused as refusal:
            if refusal.kind not in (Kind.CHANGED, Kind.ABSENT):
                raise
            # After an unclear answer, the object that stops us can be our own.
            return self._own(key, source, size) if refusal.repeated else None

    def _own(self, key: str, source: Source, size: int) -> StoredObject | None:
        found = self.read(key)
        if found is None or found[0].writer_id != self._writer_id or found[0].size != size:
            return None
        sha1 = hashlib.sha1(found[1], usedforsecurity=False).hexdigest()
        if part_hashes(source, 0, size, ("sha1",)) != (sha1,):
            return None
        return replace(found[0], parts_sha1=(sha1,) if size else (), proof=Proof.READ_BACK)

    def put_bytes(self, key: str, data: bytes) -> StoredObject:
        return self.put_small(key, StreamSource(BytesIO(data)), len(data))

    def put_small(self, key: str, source: Source, size: int, progress: Progress | None = None) -> StoredObject:
        return self._put(key, source, size, progress, {})

    def _put(
        self, key: str, source: Source, size: int, progress: Progress | None, condition: Mapping[str, str]
    ) -> StoredObject:
        check_relative_path(key)
        proof = self._features.known().object_proof()
        headers = {META: self._writer_id, "Content-Type": _CONTENT_TYPE, **condition}
        call = Call("PUT", "s3:PutObject", key, headers=headers)
        answer, sha1 = self._send_proved(call, proof, source, 0, size, progress)
        return StoredObject(
            key=key,
            size=size,
            file_id=self._reader.file_id_of(answer.headers),
            parts_sha1=(sha1,) if size else (),
            ours=True,
            writer_id=self._writer_id,
            uploaded_wall=date_of(answer.headers.get("Date")) or self._session.store_wall(),
            info=info_of(answer.headers),
            proof=Proof.STORE_CHECKED if proof else Proof.NONE,
        )

    def _send_proved(
        self, call: Call, proof: str, source: Source, offset: int, length: int, progress: Progress | None
    ) -> tuple[Answer, str]:
        """Send a body so that the store checks it, or its answer shows it; returns the answer and the SHA-1 in hex.

        A hash that goes into a header is computed first: the second read comes from the page cache, and a file that
        changed in between is refused by the store. It is read again then."""
        for attempt in range(3):
            headers, payload, sha1 = dict(call.headers), "", ""
            names: tuple[str, ...] = ("sha1", "md5") if proof == "etag" else ("sha1",)
            if proof not in ("", "etag"):
                wanted = tuple(dict.fromkeys(("sha1", proof)))
                digests = dict(zip(wanted, part_hashes(source, offset, length, wanted), strict=True))
                more, payload = hash_headers(proof, digests[proof])
                headers, sha1, names = headers | more, digests["sha1"], ()
            stream = PartStream(source, offset, length, progress, tail=False, hashes=names)
            try:
                answer = self._session.send(replace(call, headers=headers), stream, payload=payload)
            except Refused as refusal:
                changed = refusal.kind is Kind.DAMAGED and proof in ("sha1", "sha256", "md5")
                if changed and attempt < 2 and part_hashes(source, offset, length, ("sha1",)) != (sha1,):
                    continue  # the file changed between hashing and sending; the caller finds out whether it may
                raise
            if proof == "etag" and etag_of(answer.headers) != stream.hash("md5"):
                continue  # it arrived damaged, and replaces itself
            return answer, sha1 or stream.sha1
        raise not_intact(f"{self.url}/{call.key}")

    # -- uploads in parts -------------------------------------------------------------------------------------------

    def begin_large(self, key: str, size: int) -> Upload:
        check_relative_path(key)
        headers = {META: self._writer_id, "Content-Type": _CONTENT_TYPE}
        if self._features.known().part_proof() == "sha1":
            headers["x-amz-checksum-algorithm"] = "SHA1"
        answer = self._session.send(Call("POST", "s3:PutObject", key, {"uploads": ""}, headers), b"")
        upload = s3_xml.parse(answer.content, where=f"{self.url}/{key}").text("UploadId")
        if not upload or "\n" in upload:
            raise RemoteError("the store started no upload", where=f"{self.url}/{key}", transient=False)
        return Upload(key, upload)

    def put_part(
        self, upload: Upload, number: int, source: Source, offset: int, length: int, progress: Progress | None = None
    ) -> StoredPart:
        query = {"partNumber": str(number), "uploadId": upload.id}
        call = Call("PUT", "s3:PutObject", upload.key, query)
        answer, sha1 = self._send_proved(call, self._features.known().part_proof(), source, offset, length, progress)
        return StoredPart(length, sha1, etag_of(answer.headers))

    def parts_there(self, upload: Upload) -> Mapping[int, StoredPart] | None:
        found: dict[int, StoredPart] = {}
        query = {"uploadId": upload.id, "max-parts": "1000"}
        while True:
            try:
                answer = self._session.send(Call("GET", "s3:ListMultipartUploadParts", upload.key, query))
            except Refused as refusal:
                if refusal.kind in (Kind.NO_UPLOAD, Kind.ABSENT):
                    return None
                raise
            parts, marker = s3_xml.parts(answer.content, where=f"{self.url}/{upload.key}")
            for part in parts:
                found[part.number] = StoredPart(part.size, hex_of(part.sha1), part.etag)
            if not marker or marker == query.get("part-number-marker"):
                return found
            query["part-number-marker"] = marker

    def finish_large(self, upload: Upload, parts: Sequence[StoredPart], size: int) -> StoredObject:
        where = f"{self.url}/{upload.key}"
        proof = self._features.known().part_proof()
        if not all(part.etag for part in parts):
            there = self.parts_there(upload)
            if there is None:
                return self._finished_before(upload, parts, size)
            parts = [replace(p, etag=there[n].etag) if n in there else p for n, p in enumerate(parts, 1)]
        sha1 = [base64_of(part.sha1) for part in parts] if proof == "sha1" else []
        document = s3_xml.complete_document([part.etag for part in parts], sha1)
        call = Call("POST", "s3:PutObject", upload.key, {"uploadId": upload.id})
        try:
            answer = self._session.send(call, document)
        except Refused as refusal:
            if refusal.kind in (Kind.NO_UPLOAD, Kind.ABSENT):
                return self._finished_before(upload, parts, size)
            if refusal.kind is Kind.REFUSED:
                raise IntegrityError(
                    f"the store did not put the parts together: {refusal.what}", where=where
                ) from refusal
            raise
        version = str(answer.headers.get("x-amz-version-id") or "")
        stored = self.stat(upload.key, "" if version == "null" else version)
        if stored is None or not stored.ours or stored.size != size:
            raise IntegrityError("the store holds a different size than podwatch sent", where=where)
        return self._proved(stored, parts)

    def _finished_before(self, upload: Upload, parts: Sequence[StoredPart], size: int) -> StoredObject:
        """An upload that is gone when it is to be finished: its answer got lost. Where neither checksum nor ETag shows
        that the object is this upload's (rclone's ETags), its bytes do."""
        found = self.finished(upload, parts, size)
        if found is None and (seen := self.stat(upload.key)) is not None and seen.ours and seen.size == size:
            found = self._proved(seen, parts) if self._holds(seen, parts) else None
        if found is None:
            raise RemoteError("no such unfinished upload", where=f"{self.url}/{upload.key}", transient=False)
        return found

    def _holds(self, stored: StoredObject, parts: Sequence[StoredPart]) -> bool:
        at = 0
        for part in parts:
            digest = hashlib.sha1(usedforsecurity=False)
            self.get_range(stored.key, at, part.size, digest.update, file_id=stored.file_id)
            if digest.hexdigest() != part.sha1:
                return False
            at += part.size
        return True

    def _proved(self, stored: StoredObject, parts: Sequence[StoredPart]) -> StoredObject:
        hashes = tuple(part.sha1 for part in parts)
        if self._features.known().composite and same_composite(stored.info.get("sha1", ""), hashes) is False:
            raise not_intact(f"{self.url}/{stored.key}")
        proof = Proof.STORE_CHECKED if self._features.known().part_proof() else Proof.NONE
        return replace(stored, parts_sha1=hashes, proof=proof)

    def finished(self, upload: Upload, parts: Sequence[StoredPart], size: int) -> StoredObject | None:
        stored = self.stat(upload.key)
        if stored is None or not stored.ours or stored.size != size or not parts:
            return None
        composite = (
            same_composite(stored.info.get("sha1", ""), [p.sha1 for p in parts])
            if self._features.known().composite
            else None
        )
        if composite or (composite is None and _multipart_etag(parts) == stored.info.get("etag")):
            return self._proved(stored, parts)
        return None

    def cancel_large(self, upload: Upload) -> None:
        call = Call("DELETE", "s3:AbortMultipartUpload", upload.key, {"uploadId": upload.id}, price="A")
        try:
            self._session.send(call)
        except Refused as refusal:
            if refusal.kind not in (Kind.NO_UPLOAD, Kind.ABSENT):
                raise

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        found: list[Unfinished] = []
        try:
            for entry in self._reader.pages(
                {"uploads": "", "prefix": prefix}, "s3:ListBucketMultipartUploads", s3_xml.uploads
            ):
                found.append(Unfinished(Upload(entry.key, entry.identifier), entry.wall, None))
        except Refused as refusal:
            if refusal.kind not in (Kind.UNSUPPORTED, Kind.DENIED):
                raise  # else our journal is the only list, and the bucket's lifecycle rule removes the rest
        yield from sorted(found, key=lambda u: u.started_wall)

    # -- looking and reading: S3Reader ------------------------------------------------------------------------------

    def stat(self, key: str, file_id: str = "") -> StoredObject | None:
        return self._reader.stat(key, file_id)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return self._reader.list(prefix)

    def versions(self, prefix: str) -> Iterator[StoredObject]:
        return self._reader.versions(prefix)

    def identify(self, objects: Iterable[StoredObject]) -> Iterator[StoredObject]:
        return self._reader.identify(objects)

    def prove(self, obj: StoredObject, parts_sha1: Sequence[str], part_size: int) -> Proof:
        return self._reader.prove(obj, parts_sha1, part_size)

    def read(self, key: str, *, limit: int = 64 << 20) -> tuple[StoredObject, bytes] | None:
        return self._reader.read(key, limit=limit)

    def get_bytes(self, key: str, file_id: str = "", *, limit: int = 64 << 20) -> bytes | None:
        return self._reader.get_bytes(key, file_id, limit=limit)

    def get_file(
        self, key: str, target: BinaryIO, *, file_id: str = "", offset: int = 0, progress: Progress | None = None
    ) -> None:
        self._reader.get_file(key, target, file_id=file_id, offset=offset, progress=progress)

    def get_range(self, key: str, offset: int, length: int, take: Take, *, file_id: str = "") -> int:
        return self._reader.get_range(key, offset, length, take, file_id=file_id)

    # -- removing, checking -----------------------------------------------------------------------------------------

    def delete(self, obj: StoredObject) -> None:
        current = self.stat(obj.key, obj.file_id)
        if current is None:
            return
        if not current.ours:
            raise not_ours(self.url, obj.key)
        version = obj.file_id if obj.file_id and not obj.file_id.startswith(ETAG) else current.file_id
        query = {} if version.startswith(ETAG) else {"versionId": version}
        self._session.send(Call("DELETE", "s3:DeleteObject", obj.key, query, price="A"))

    def check(self) -> tuple[str, ...]:
        known = self._features.probe_again()
        query = {"list-type": "2", "prefix": f"{self._prefix}/" if self._prefix else "", "max-keys": "1"}
        self._session.send(Call("GET", "s3:ListBucket", query=query))
        warnings: list[str] = []
        if not known.deletes:
            warnings.append(
                CannotDelete("the credentials cannot delete: old checkpoints stay in the store until you remove them")
            )
        if not known.part_proof():
            warnings.append(
                "the store checks no checksum that podwatch knows: podwatch reads every object back, as much traffic as"
                " the upload"
            )
        return tuple(warnings)

    def close(self) -> None:
        self._session.close()


def _multipart_etag(parts: Sequence[StoredPart]) -> str:
    """As S3 computes it from the MD5s of the parts; empty where their ETags are none."""
    try:
        joined = b"".join(bytes.fromhex(part.etag) for part in parts)
    except ValueError:
        return ""
    return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(parts)}"
