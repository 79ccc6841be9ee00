"""Backblaze B2 through b2sdk's session: one request per call, our own retries around it (facts/b2.md section 1).

The SDK's ready-made uploads read a file three times and can record a wrong checksum, so parts are sent one by one with
the hash computed from the very bytes that leave. Everything large is addressed by file id, never by name.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, BinaryIO, TypeVar

from b2sdk.v3 import B2Http, B2HttpApiConfig, B2Session, InMemoryAccountInfo
from b2sdk.v3 import exception as b2error

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.domain.remote import WRITER_TAG, check_relative_path
from podwatch.stores.b2_errors import B2Place, ResourceNotFound, UploadTokenUsedConcurrently, translate
from podwatch.stores.base import Progress, StoredObject
from podwatch.stores.credentials import Credentials
from podwatch.stores.parts import HEX_DIGITS, PartStream, part_spans

T = TypeVar("T")
_CONTENT_TYPE = "application/octet-stream"
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Retry:
    """Full jitter: before try n wait a random time in [0, min(cap, base x 2^n)] seconds, or what the server asked."""

    attempts: int = 7
    base: float = 0.5
    cap: float = 30.0

    def pause(self, attempt: int, asked: float | None) -> float:
        if asked is not None:
            return min(asked, 120.0) + random.uniform(0, self.base)
        return random.uniform(0, min(self.cap, self.base * 2**attempt))


class _Http(B2Http):  # type: ignore[misc]
    """One try per call, and timeouts a guard can live with: the SDK's own is 1200 s for JSON calls."""

    CONNECTION_TIMEOUT = 10
    TIMEOUT = 60
    TIMEOUT_FOR_UPLOAD = 60
    TIMEOUT_FOR_COPY = 60

    def request(self, method: Any, url: str, headers: Any, data: Any = None, *_: Any, **options: Any) -> Any:
        params = options.get("params") or (_[1] if len(_) > 1 else None)
        return super().request(
            method,
            url,
            headers,
            data,
            1,
            params,
            stream=options.get("stream", False),
            _timeout=options.get("_timeout"),
        )


class _Session(B2Session):  # type: ignore[misc]
    B2HTTP_CLASS = _Http


class B2Store:
    """One bucket. Thread-safe: b2sdk keeps one upload URL per connection in use."""

    versioned = True

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
        self.url = f"b2://{bucket}"
        self._place = B2Place(self.url, bucket, credentials.endpoint)
        self._bucket = bucket
        self._bucket_id = ""
        self._credentials = credentials
        self._writer_id = writer_id
        self._retry = retry or Retry()
        self._sleep = sleep
        # The account info lives in memory: the SDK's default is a database in the home directory, with the key in it.
        self._session = _Session(InMemoryAccountInfo(), api_config=B2HttpApiConfig(user_agent_append="podwatch"))

    # -- writing ----------------------------------------------------------------------------------------------------

    def put_bytes(self, key: str, data: bytes) -> StoredObject:
        return self._small(key, BytesIO(data), len(data), None)

    def put_file(
        self, key: str, source: BinaryIO, size: int, *, part_size: int, progress: Progress | None = None
    ) -> StoredObject:
        check_relative_path(key)
        if size <= part_size:
            return self._small(key, source, size, progress)
        bucket = self._ready(key)
        answer = self._call(
            key,
            "writeFiles",
            lambda: self._session.start_large_file(bucket, key, _CONTENT_TYPE, {WRITER_TAG: self._writer_id}),
        )
        file_id = str(answer["fileId"])
        try:
            hashes = [
                self._part(key, file_id, number, source, offset, length, progress)
                for number, (offset, length) in enumerate(part_spans(size, part_size), 1)
            ]
            stored = self._finish(key, file_id, hashes)
        except BaseException:
            self._cancel(file_id)
            raise
        finally:
            self._session.account_info.clear_large_file_upload_urls(file_id)
        if stored.size != size:
            raise IntegrityError("store holds another size than was sent", where=f"{self.url}/{key}")
        return stored

    def _small(self, key: str, source: BinaryIO, size: int, progress: Progress | None) -> StoredObject:
        check_relative_path(key)
        bucket = self._ready(key)
        stream = PartStream(source, 0, size, progress)

        def send() -> Any:
            info = {WRITER_TAG: self._writer_id}
            return self._session.upload_file(
                bucket, key, size + HEX_DIGITS, _CONTENT_TYPE, "hex_digits_at_end", info, stream
            )

        answer = self._upload(key, stream, send)
        if answer["contentSha1"] not in (stream.sha1, f"unverified:{stream.sha1}") or answer["contentLength"] != size:
            raise IntegrityError("store holds other bytes than were sent", where=f"{self.url}/{key}")
        return self._object(answer, (stream.sha1,) if size else ())

    def _part(
        self,
        key: str,
        file_id: str,
        number: int,
        source: BinaryIO,
        offset: int,
        length: int,
        progress: Progress | None,
    ) -> str:
        stream = PartStream(source, offset, length, progress)

        def send() -> Any:
            return self._session.upload_part(file_id, number, length + HEX_DIGITS, "hex_digits_at_end", stream)

        answer = self._upload(key, stream, send)
        if answer["contentSha1"] != stream.sha1:
            raise IntegrityError("store holds other bytes than were sent", where=f"{self.url}/{key} part {number}")
        return stream.sha1

    def _upload(self, key: str, stream: PartStream, send: Callable[[], Any]) -> Any:
        def once() -> Any:
            stream.seek(0)
            try:
                return send()
            except b2error.B2Error:
                if stream.failure is not None:
                    raise stream.failure from None
                raise

        return self._call(key, "writeFiles", once, upload=True)

    def _finish(self, key: str, file_id: str, hashes: Sequence[str]) -> StoredObject:
        """Finish, and when the answer was lost ask whether it happened: finishing is not idempotent."""

        def finish() -> Any:
            try:
                return self._session.finish_large_file(file_id, [*hashes])
            except b2error.BadRequest:
                done = self._info(file_id)
                if done is None or done["action"] != "upload":
                    raise
                return done

        return self._object(self._call(key, "writeFiles", finish), tuple(hashes))

    def _cancel(self, file_id: str) -> None:
        try:
            self._session.cancel_large_file(file_id)
        except Exception:
            return  # a sweep finds it later; the error that led here matters more

    # -- reading ----------------------------------------------------------------------------------------------------

    def stat(self, key: str, file_id: str = "") -> StoredObject | None:
        if not file_id:
            return next((o for o in self._names(key, limit=1) if o.key == key), None)
        self._ready(key)
        answer = self._call(key, "readFiles", lambda: self._info(file_id))
        if answer is None or answer["action"] != "upload" or answer["fileName"] != key:
            return None
        return self._object(answer)

    def _info(self, file_id: str) -> Mapping[str, Any] | None:
        try:
            answer: Mapping[str, Any] = self._session.get_file_info_by_id(file_id)
        except ResourceNotFound:
            return None
        except b2error.BadRequest as error:
            if "fileId" in str(error):
                return None  # an id this service never gave out
            raise
        return answer

    def get_bytes(self, key: str, file_id: str = "", *, limit: int = 64 << 20) -> bytes | None:
        def read() -> bytes | None:
            buffer = BytesIO()
            try:
                self._download(key, file_id, 0, buffer, None, limit)
            except ResourceNotFound:
                return None
            return buffer.getvalue()

        self._ready(key)
        return self._call(key, "readFiles", read)

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
            except ResourceNotFound:
                raise RemoteError("object is not in the store", where=f"{self.url}/{key}", transient=False) from None
            except b2error.UnsatisfiableRange:
                return  # nothing is left after ``done``

        self._ready(key)
        self._call(key, "readFiles", read)

    def _download(
        self, key: str, file_id: str, offset: int, target: BinaryIO, progress: Progress | None, limit: int | None
    ) -> None:
        session = self._session
        url = (
            session.get_download_url_by_id(file_id) if file_id else session.get_download_url_by_name(self._bucket, key)
        )
        span = (offset, 1 << 50) if offset else None
        with session.download_file_from_url(url, range_=span) as response:
            expected = int(response.headers["Content-Length"])
            got = 0
            try:
                for block in response.iter_content(_BLOCK):
                    if limit is not None and got + len(block) > limit:
                        raise IntegrityError("object is larger than it can be", where=f"{self.url}/{key}")
                    target.write(block)
                    got += len(block)
                    if progress is not None:
                        progress(len(block))
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
                    raise  # the disk that is written to, not the network
                raise b2error.B2ConnectionError(f"download was cut off: {type(error).__name__}") from error
            if got < expected:
                raise b2error.B2ConnectionError("download was cut off")

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return self._names(prefix, limit=1000)

    def _names(self, prefix: str, *, limit: int) -> Iterator[StoredObject]:
        bucket, start = self._ready(prefix), None
        while True:
            answer = self._call(
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

    def delete(self, obj: StoredObject) -> None:
        file_id = obj.file_id
        current = self.stat(obj.key, file_id)
        if current is None:
            return
        if not current.ours:
            raise RemoteError(
                "object does not carry podwatch's mark and is left alone",
                where=f"{self.url}/{obj.key}",
                fix="delete it yourself if it is not needed",
                transient=False,
            )

        def remove() -> None:
            try:
                self._session.delete_file_version(current.file_id, current.key)
            except ResourceNotFound:
                return

        self._call(obj.key, "deleteFiles", remove)

    def check(self) -> tuple[str, ...]:
        self._ready("")
        allowed = self._session.account_info.get_allowed()
        capabilities = set(allowed["capabilities"])
        for name, purpose in (("writeFiles", "upload"), ("readFiles", "verify and restore"), ("listFiles", "look")):
            if name not in capabilities:
                raise RemoteError(
                    f"key lacks the capability {name}, needed to {purpose}",
                    where=self.url,
                    fix=f"create a key for this bucket with listFiles, readFiles, writeFiles (now: "
                    f"{', '.join(sorted(capabilities))})",
                    transient=False,
                )
        prefix = allowed.get("namePrefix") or ""
        self._call(prefix, "listFiles", lambda: self._session.list_file_names(self._bucket_id, None, 1, prefix))
        if "deleteFiles" not in capabilities:
            return ("the key may not delete: old checkpoints stay in the store until you remove them",)
        return ()

    def close(self) -> None:
        self._session.raw_api.b2_http.session.close()

    # -- below ------------------------------------------------------------------------------------------------------

    def _object(self, answer: Mapping[str, Any], hashes: tuple[str, ...] = ()) -> StoredObject:
        info = {str(k).lower(): str(v) for k, v in (answer.get("fileInfo") or {}).items()}
        return StoredObject(
            key=str(answer["fileName"]),
            size=int(answer["contentLength"]),
            file_id=str(answer["fileId"]),
            parts_sha1=hashes,
            ours=WRITER_TAG in info,
            writer_id=info.get(WRITER_TAG, ""),
            uploaded_wall=int(answer.get("uploadTimestamp") or 0) / 1000,
            info=info,
        )

    def _ready(self, key: str) -> str:
        """Authorize once and find the bucket's id; a key for one bucket needs no list_buckets for that."""
        if self._bucket_id:
            return self._bucket_id

        def authorize() -> None:
            self._session.authorize_account(
                self._credentials.endpoint or "production", self._credentials.key_id, self._credentials.key
            )

        self._call(key, "", authorize)
        allowed = self._session.account_info.get_allowed()
        for bucket in allowed.get("buckets") or ():
            if bucket.get("name") == self._bucket:
                self._bucket_id = str(bucket["id"])
                return self._bucket_id
        if allowed.get("buckets"):
            names = ", ".join(str(b.get("name")) for b in allowed["buckets"])
            raise RemoteError(
                "key is for another bucket",
                where=self.url,
                fix=f"use a key for this bucket (now: {names})",
                transient=False,
            )
        account = self._session.account_info.get_account_id()
        answer = self._call(key, "listBuckets", lambda: self._session.list_buckets(account, bucket_name=self._bucket))
        if not answer["buckets"]:
            raise self._place.no_bucket()
        self._bucket_id = str(answer["buckets"][0]["bucketId"])
        return self._bucket_id

    def _call(self, key: str, capability: str, call: Callable[[], T], *, upload: bool = False) -> T:
        """Run one request, try again while that can help, and translate what remains into a RemoteError."""
        attempt = 0
        damaged = 0
        while True:
            try:
                return call()
            except b2error.B2Error as error:
                problem = translate(error, self._place, key=key, capability=capability)
                asked = getattr(error, "retry_after_seconds", None)
                again = problem.transient
                if upload and isinstance(error, b2error.BadRequest) and "sha1" in str(error).lower():
                    damaged += 1  # a bit flipped on the way: read and send again, once
                    again = damaged == 1
                if upload and isinstance(error, (b2error.InvalidAuthToken, UploadTokenUsedConcurrently)):
                    again = True  # the next try takes a new upload URL
                attempt += 1
                if not again or attempt >= self._retry.attempts:
                    raise problem from error
            self._sleep(self._retry.pause(attempt, float(asked) if asked else None))
