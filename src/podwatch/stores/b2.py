"""Backblaze B2 through b2sdk's session: one request per call, with podwatch's own retries around it.

The SDK's ready-made uploads read a file three times and can record a wrong checksum, so parts are sent one by one with
the hash computed from the very bytes that are sent. Everything large is addressed by file id, never by name.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from types import MappingProxyType
from typing import Any, BinaryIO
from urllib.parse import unquote

from b2sdk.v3 import exception as b2error

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.domain.manifest import WRITER_TAG, Proof
from podwatch.domain.safe_names import check_relative_path
from podwatch.stores.b2_session import Bucket
from podwatch.stores.base import Progress, StoredObject, StoredPart, Take, Unfinished, Upload, not_ours
from podwatch.stores.credentials import Credentials
from podwatch.stores.http_transfer import BLOCK, Retry, WireBroken
from podwatch.stores.part_reader import HEX_DIGITS, PartStream, Source, StreamSource
from podwatch.stores.receive_download import receive

_CONTENT_TYPE = "application/octet-stream"
_SHA1 = re.compile(r"[0-9a-f]{40}")
_INFO = "x-bz-info-"
_REPORTED = "b2.sha1"
"""``StoredObject.info`` key of the hash that B2 reports of an object that was sent whole."""


class B2Store:
    """One bucket. Thread-safe: b2sdk keeps one upload URL per connection in use."""

    versioned = True
    exclusive = conditional = False
    features: Mapping[str, object] = MappingProxyType({})

    def __init__(
        self,
        bucket: str,
        credentials: Credentials,
        *,
        writer_id: str,
        connections: int = 4,
        retry: Retry | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bucket = Bucket(bucket, credentials, connections, retry or Retry(), sleep)
        self._session = self._bucket.session
        self.url = self._bucket.url
        self._writer_id = writer_id

    @property
    def clock_skew(self) -> float | None:
        return self._bucket.clocks.skew

    # -- writing ----------------------------------------------------------------------------------------------------

    def create(self, key: str, data: bytes) -> StoredObject | None:
        raise RemoteError("B2 cannot create a name exclusively", where=f"{self.url}/{key}", transient=False)

    def replace(self, key: str, source: Source, size: int, expected: StoredObject | None) -> StoredObject | None:
        raise RemoteError("B2 cannot replace conditionally", where=f"{self.url}/{key}", transient=False)

    def put_bytes(self, key: str, data: bytes) -> StoredObject:
        return self.put_small(key, StreamSource(BytesIO(data)), len(data))

    def begin_large(self, key: str, size: int) -> Upload:
        check_relative_path(key)
        bucket = self._bucket.id(key)
        info = {WRITER_TAG: self._writer_id}
        answer = self._bucket.call(
            key, "writeFiles", lambda: self._session.start_large_file(bucket, key, _CONTENT_TYPE, info)
        )
        return Upload(key, str(answer["fileId"]))

    def put_part(
        self, upload: Upload, number: int, source: Source, offset: int, length: int, progress: Progress | None = None
    ) -> StoredPart:
        self._bucket.id()
        stream = PartStream(source, offset, length, progress)

        def send() -> Any:
            return self._session.upload_part(upload.id, number, length + HEX_DIGITS, "hex_digits_at_end", stream)

        answer = self._upload(f"part {number}", stream, send)
        if answer["contentSha1"] != stream.sha1:
            raise IntegrityError("the store holds different bytes than were sent", where=f"{self.url} part {number}")
        return StoredPart(length, stream.sha1)

    def parts_there(self, upload: Upload) -> Mapping[int, StoredPart] | None:
        self._bucket.id()
        found: dict[int, StoredPart] = {}
        start: int | None = None
        while True:
            try:
                answer = self._bucket.call(
                    "",
                    "writeFiles",
                    lambda start=start: self._session.list_parts(upload.id, start, 1000),  # type: ignore[misc]
                )
            except RemoteError as error:
                if _is_unknown_upload(error.__cause__):
                    return None
                raise
            for part in answer["parts"]:
                found[int(part["partNumber"])] = StoredPart(int(part["contentLength"]), str(part["contentSha1"]))
            start = answer.get("nextPartNumber")
            if not start:
                return found

    def finish_large(self, upload: Upload, parts: Sequence[StoredPart], size: int) -> StoredObject:
        key, hashes = upload.key, tuple(part.sha1 for part in parts)
        self._bucket.id(key)

        def finish() -> Any:
            try:
                return self._session.finish_large_file(upload.id, [*hashes])
            except b2error.BadRequest:
                done = self._info(upload.id)  # the answer may have been lost: finishing is not idempotent
                if done is None or done["action"] != "upload":
                    raise
                return done

        stored = self._object(self._bucket.call(key, "writeFiles", finish), hashes, Proof.STORE_CHECKED)
        self._session.account_info.clear_large_file_upload_urls(upload.id)
        if stored.size != size or stored.key != key:
            raise IntegrityError("the store holds a different size than podwatch sent", where=f"{self.url}/{key}")
        return stored

    def finished(self, upload: Upload, parts: Sequence[StoredPart], size: int) -> StoredObject | None:
        found = self.stat(upload.key, upload.id)  # B2 keeps the id: the object is this upload's
        if found is None or not found.ours or found.size != size:
            return None
        return replace(found, parts_sha1=tuple(part.sha1 for part in parts), proof=Proof.STORE_CHECKED)

    def cancel_large(self, upload: Upload) -> None:
        self._bucket.id()
        try:
            self._bucket.call("", "writeFiles", lambda: self._session.cancel_large_file(upload.id))
        except RemoteError as error:
            if not _is_unknown_upload(error.__cause__):
                raise
        finally:
            self._session.account_info.clear_large_file_upload_urls(upload.id)

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        bucket, start = self._bucket.id(prefix), None
        while True:
            answer = self._bucket.call(
                prefix,
                "listFiles",
                lambda start=start: self._session.list_unfinished_large_files(bucket, start, 100, prefix),  # type: ignore[misc]
            )
            for item in answer["files"]:
                found = self._object(item)
                yield Unfinished(Upload(found.key, found.file_id), found.uploaded_wall, found.ours, found.writer_id)
            start = answer.get("nextFileId")
            if not start:
                return

    def put_small(self, key: str, source: Source, size: int, progress: Progress | None = None) -> StoredObject:
        check_relative_path(key)
        bucket = self._bucket.id(key)
        stream = PartStream(source, 0, size, progress)

        def send() -> Any:
            info = {WRITER_TAG: self._writer_id}
            return self._session.upload_file(
                bucket, key, size + HEX_DIGITS, _CONTENT_TYPE, "hex_digits_at_end", info, stream
            )

        answer = self._upload(key, stream, send)
        if answer["contentSha1"] not in (stream.sha1, f"unverified:{stream.sha1}") or answer["contentLength"] != size:
            raise IntegrityError("the store holds different bytes than were sent", where=f"{self.url}/{key}")
        return self._object(answer, (stream.sha1,) if size else (), Proof.STORE_CHECKED)

    def _upload(self, key: str, stream: PartStream, send: Callable[[], Any]) -> Any:
        def once() -> Any:
            stream.seek(0)
            try:
                return send()
            except b2error.B2Error:
                if stream.failure is not None:
                    raise stream.failure from None
                raise

        return self._bucket.call(key, "writeFiles", once, upload=True)

    # -- reading ----------------------------------------------------------------------------------------------------

    def stat(self, key: str, file_id: str = "") -> StoredObject | None:
        if not file_id:
            return next((o for o in self._names(key, limit=1) if o.key == key), None)
        self._bucket.id(key)
        answer = self._bucket.call(key, "readFiles", lambda: self._info(file_id))
        if answer is None or answer["action"] != "upload" or answer["fileName"] != key:
            return None
        return self._object(answer)

    def _info(self, file_id: str) -> Mapping[str, Any] | None:
        try:
            answer: Mapping[str, Any] = self._session.get_file_info_by_id(file_id)
        except b2error.FileNotPresent:
            return None
        except b2error.BadRequest as error:
            if "fileId" in str(error):
                return None  # an id that this service never issued
            raise
        return answer

    def identify(self, objects: Iterable[StoredObject]) -> Iterator[StoredObject]:
        yield from objects  # every listing carries the file info

    def prove(self, obj: StoredObject, parts_sha1: Sequence[str], part_size: int) -> Proof:
        if not obj.file_id or not obj.ours:
            return Proof.NONE
        # The hashes of our objects were checked as they arrived, and a version never changes. B2 reports the hash of
        # what was sent whole.
        reported = obj.info.get(_REPORTED, "")
        if reported and len(parts_sha1) == 1 and reported != parts_sha1[0]:
            raise IntegrityError("the store holds different bytes than recorded", where=f"{self.url}/{obj.key}")
        return Proof.STORE_CHECKED

    def read(self, key: str, *, limit: int = 64 << 20) -> tuple[StoredObject, bytes] | None:
        found = self._read(key, "", limit)
        return None if found is None else (self._downloaded(key, found[0]), found[1])

    def get_bytes(self, key: str, file_id: str = "", *, limit: int = 64 << 20) -> bytes | None:
        found = self._read(key, file_id, limit)
        return None if found is None else found[1]

    def _read(self, key: str, file_id: str, limit: int) -> tuple[Mapping[str, str], bytes] | None:
        def read() -> tuple[Mapping[str, str], bytes] | None:
            buffer = BytesIO()
            try:
                headers = self._download(key, file_id, 0, buffer, None, limit)
            except b2error.FileNotPresent:
                return None
            return headers, buffer.getvalue()

        self._bucket.id(key)
        return self._bucket.call(key, "readFiles", read)

    def get_file(
        self, key: str, target: BinaryIO, *, file_id: str = "", offset: int = 0, progress: Progress | None = None
    ) -> None:
        done = offset

        def read() -> None:
            nonlocal done

            def received(count: int) -> None:
                nonlocal done
                done += count
                if progress is not None:
                    progress(count)

            try:
                self._download(key, file_id, done, target, received, None)
            except b2error.FileNotPresent:
                raise RemoteError("object not found", where=f"{self.url}/{key}", transient=False) from None
            except b2error.UnsatisfiableRange:
                return  # nothing is left after ``done``

        self._bucket.id(key)
        self._bucket.call(key, "readFiles", read)

    def get_range(self, key: str, offset: int, length: int, take: Take, *, file_id: str = "") -> int:
        done = 0

        def taken(data: memoryview) -> None:
            nonlocal done
            take(data)
            done += len(data)

        def read() -> int:
            at, left = offset + done, length - done
            try:
                with self._session.download_file_from_url(
                    self._url(key, file_id), range_=(at, at + left - 1)
                ) as answer:
                    return receive(answer, at, left, taken, mark="X-Bz-File-Id", where=f"{self.url}/{key}")
            except WireBroken as error:
                raise b2error.B2ConnectionError(str(error)) from error
            except b2error.FileNotPresent:
                raise RemoteError("object not found", where=f"{self.url}/{key}", transient=False) from None
            except b2error.UnsatisfiableRange:
                raise IntegrityError("the object is shorter than recorded", where=f"{self.url}/{key}") from None

        self._bucket.id(key)
        while True:
            before = done
            try:
                return self._bucket.call(key, "readFiles", read)
            except RemoteError as error:
                if not error.transient or done == before:
                    raise  # continue while bytes arrive, however often the line breaks

    def _url(self, key: str, file_id: str) -> str:
        session = self._session
        by_id = file_id and session.get_download_url_by_id(file_id)
        return str(by_id or session.get_download_url_by_name(self._bucket.name, key))

    def _download(
        self, key: str, file_id: str, offset: int, target: BinaryIO, progress: Progress | None, limit: int | None
    ) -> Mapping[str, str]:
        """Returns the answer's headers."""
        session = self._session
        url = self._url(key, file_id)
        span = (offset, 1 << 50) if offset else None
        with session.download_file_from_url(url, range_=span) as response:
            expected = int(response.headers["Content-Length"])
            got = 0
            try:
                for block in response.iter_content(BLOCK):
                    if limit is not None and got + len(block) > limit:
                        raise IntegrityError("the object is larger than any valid one", where=f"{self.url}/{key}")
                    target.write(block)
                    got += len(block)
                    if progress is not None:
                        progress(len(block))
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
                    raise  # an error of the target disk, not of the network
                raise b2error.B2ConnectionError(f"the download was cut off: {type(error).__name__}") from error
            if got < expected:
                raise b2error.B2ConnectionError("the download was cut off")
            headers: Mapping[str, str] = response.headers
            return headers

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return self._names(prefix, limit=1000)

    def _names(self, prefix: str, *, limit: int) -> Iterator[StoredObject]:
        bucket, start = self._bucket.id(prefix), None
        while True:
            answer = self._bucket.call(
                prefix,
                "listFiles",
                lambda start=start: self._session.list_file_names(bucket, start, limit, prefix),  # type: ignore[misc]
            )
            for item in answer["files"]:
                if item["action"] == "upload":
                    yield self._object(item)
            start = answer.get("nextFileName")
            if not start or limit == 1:
                return

    def versions(self, prefix: str) -> Iterator[StoredObject]:
        bucket = self._bucket.id(prefix)
        name, number = None, None
        while True:
            answer = self._bucket.call(
                prefix,
                "listFiles",
                lambda at=(name, number): self._session.list_file_versions(bucket, *at, 1000, prefix),  # type: ignore[misc]
            )
            for item in answer["files"]:
                if item["action"] == "upload":
                    yield self._object(item)
            name, number = answer.get("nextFileName"), answer.get("nextFileId")
            if not name:
                return

    def delete(self, obj: StoredObject) -> None:
        file_id = obj.file_id
        current = self.stat(obj.key, file_id)
        if current is None:
            return
        if not current.ours:
            raise not_ours(self.url, obj.key)

        def remove() -> None:
            try:
                self._session.delete_file_version(current.file_id, current.key)
            except b2error.FileNotPresent:
                return

        self._bucket.call(obj.key, "deleteFiles", remove)

    def check(self) -> tuple[str, ...]:
        return self._bucket.check()

    def close(self) -> None:
        self._bucket.close()

    # -- below ------------------------------------------------------------------------------------------------------

    def _downloaded(self, key: str, headers: Mapping[str, str]) -> StoredObject:
        """The object that a download's headers describe."""
        said = {name.lower(): value for name, value in headers.items()}
        info = {n.removeprefix(_INFO): unquote(value) for n, value in said.items() if n.startswith(_INFO)}
        return self._object(
            {
                "fileName": key,
                "contentLength": said["content-length"],
                "fileId": said.get("x-bz-file-id", ""),
                "contentSha1": said.get("x-bz-content-sha1", ""),
                "uploadTimestamp": said.get("x-bz-upload-timestamp", 0),
                "fileInfo": info,
            }
        )

    def _object(
        self, answer: Mapping[str, Any], hashes: tuple[str, ...] = (), proof: Proof = Proof.NONE
    ) -> StoredObject:
        info = {str(k).lower(): str(v) for k, v in (answer.get("fileInfo") or {}).items()}
        if _SHA1.fullmatch(reported := str(answer.get("contentSha1") or "")):
            info[_REPORTED] = reported
        return StoredObject(
            key=str(answer["fileName"]),
            size=int(answer.get("contentLength") or 0),
            file_id=str(answer["fileId"]),
            parts_sha1=hashes,
            ours=WRITER_TAG in info,
            writer_id=info.get(WRITER_TAG, ""),
            uploaded_wall=int(answer.get("uploadTimestamp") or 0) / 1000,
            info=info,
            proof=proof,
        )


def _is_unknown_upload(error: BaseException | None) -> bool:
    """The store has no such unfinished upload: finished, cancelled, or never started."""
    return isinstance(error, b2error.FileNotPresent) or (
        isinstance(error, b2error.BadRequest) and ("No active upload" in str(error) or "fileId" in str(error))
    )
