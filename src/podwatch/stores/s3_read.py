"""Looking at objects of an S3 bucket and reading them: for ``S3Store``, which writes and removes (s3.py).

Everything large is addressed by version id, or by ETag where the bucket keeps no versions (``etag:...``).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import BinaryIO, TypeVar

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.domain.manifest import WRITER_TAG, Proof
from podwatch.stores import s3_xml
from podwatch.stores.base import Progress, StoredObject, Take
from podwatch.stores.http_transfer import BLOCK, Answer, Body, WireBroken
from podwatch.stores.receive_download import receive
from podwatch.stores.s3_errors import Kind, Refused
from podwatch.stores.s3_features import CHECKSUM_MODE, META, FoundFeatures, same_composite
from podwatch.stores.s3_session import Call, S3Session, not_intact

AT_ONCE = 16
"""Objects that are identified at a time: one HEAD each, and a HEAD takes a round trip."""
ETAG = "etag:"
_BROKEN = 3
"""How often a body may break off without a byte more; each time the request has succeeded."""

T = TypeVar("T")


class S3Reader:
    """The half of ``ObjectStore`` that changes nothing. Thread-safe."""

    def __init__(self, session: S3Session, features: FoundFeatures) -> None:
        self._session, self._features = session, features

    # -- looking ----------------------------------------------------------------------------------------------------

    def stat(self, key: str, file_id: str = "") -> StoredObject | None:
        query, headers = _pinned(file_id)
        known = self._features.now
        mode = CHECKSUM_MODE if known is not None and known.composite else {}  # some servers refuse it
        call = Call("HEAD", "s3:GetObject", key, query, {**headers, **mode}, price="B")
        try:
            answer: Answer | Body = self._session.send(call)
        except Refused as refusal:
            if refusal.kind in (Kind.ABSENT, Kind.CHANGED):
                return None
            if refusal.transient:
                raise
            ranged = replace(call, method="GET", headers={**headers, "Range": "bytes=0-0"})
            found = self._opened(ranged)  # an error of HEAD has no text: ask for one
            if found is None:
                return None
            found.close()
            answer = found
        size = answer.headers.get("Content-Range", "").rpartition("/")[2] or answer.headers.get("Content-Length") or 0
        stored = self.described(key, answer.headers, int(size))
        if file_id.startswith(ETAG):  # also in a bucket that has been given versions since
            return stored if stored.info["etag"] == file_id[len(ETAG) :] else None
        return stored

    def described(self, key: str, headers: Mapping[str, str], size: int) -> StoredObject:
        writer = headers.get(META, "")
        self._features.saw(headers)
        return StoredObject(
            key=key,
            size=size,
            file_id=self.file_id_of(headers),
            ours=META in headers,
            writer_id=writer,
            uploaded_wall=date_of(headers.get("Last-Modified")),
            info={**info_of(headers), **({WRITER_TAG: writer} if META in headers else {})},
        )

    def file_id_of(self, headers: Mapping[str, str]) -> str:
        """As a listing has it: no version id where versions cannot be listed."""
        version = str(headers.get("x-amz-version-id") or "null")
        known = self._features.now
        useful = known is None or known.versioned
        return version if useful and version != "null" else f"{ETAG}{etag_of(headers)}"

    def list(self, prefix: str) -> Iterator[StoredObject]:
        if self._features.versioned:  # a plain listing has no version ids
            yield from (self._listed(e, e.identifier) for e in self._all(prefix) if e.latest)
            return
        for entry in self.pages({"list-type": "2", "prefix": prefix}, "s3:ListBucket", s3_xml.objects):
            yield self._listed(entry, f"{ETAG}{entry.etag}" if entry.etag else "")

    def versions(self, prefix: str) -> Iterator[StoredObject]:
        if not self._features.versioned:
            yield from self.list(prefix)
            return
        yield from (self._listed(e, e.identifier) for e in self._all(prefix))

    def _all(self, prefix: str) -> Iterator[s3_xml.Listed]:
        """Every version, without the markers of deletions."""
        query = {"versions": "", "prefix": prefix}
        return (e for e in self.pages(query, "s3:ListBucketVersions", s3_xml.versions) if not e.marker)

    @staticmethod
    def _listed(entry: s3_xml.Listed, file_id: str) -> StoredObject:
        info = {"etag": entry.etag}
        return StoredObject(entry.key, entry.size, file_id, ours=None, uploaded_wall=entry.wall, info=info)

    def pages(
        self, query: Mapping[str, str], action: str, parsed: Callable[..., s3_xml.Page]
    ) -> Iterator[s3_xml.Listed]:
        following: tuple[tuple[str, str], ...] = ()
        while True:
            asked = {**query, "encoding-type": "url", **dict(following)}
            answer = self._session.send(Call("GET", action, query=asked))
            page = parsed(answer.content, where=f"{self._session.url}/{query['prefix']}")
            yield from page.entries
            if not page.following:
                return
            if page.following == following:
                raise IntegrityError("the store lists the same page again and again", where=self._session.url)
            following = page.following

    def identify(self, objects: Iterable[StoredObject]) -> Iterator[StoredObject]:
        rest = iter(objects)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            while batch := list(islice(rest, 4 * AT_ONCE)):
                yield from (found for found in pool.map(self._identified, batch) if found is not None)

    def _identified(self, item: StoredObject) -> StoredObject | None:
        if item.ours is not None:
            return item
        found = self.stat(item.key, item.file_id)
        if found is None:
            return None
        return replace(
            item, file_id=item.file_id or found.file_id, ours=found.ours, writer_id=found.writer_id, info=found.info
        )

    def prove(self, obj: StoredObject, parts_sha1: Sequence[str], part_size: int) -> Proof:
        known = self._features.now
        if known is None or not known.composite or not parts_sha1:
            return Proof.NONE  # what is shown may be an echo
        same = same_composite(obj.info.get("sha1", ""), tuple(parts_sha1))
        if same is False:
            raise not_intact(f"{self._session.url}/{obj.key}")
        return Proof.STORE_CHECKED if same else Proof.NONE

    # -- reading ----------------------------------------------------------------------------------------------------

    def _opened(self, call: Call, file_id: str = "") -> Body | None:
        """None if the object (that version) is not there."""
        try:
            found = self._session.open(call)
        except Refused as refusal:
            if refusal.kind in (Kind.ABSENT, Kind.CHANGED) or (file_id and refusal.kind is Kind.UNSUPPORTED):
                return None
            raise
        if file_id.startswith(ETAG) and etag_of(found.headers) != file_id[len(ETAG) :]:
            found.close()  # a server that ignores If-Match
            return None
        return found

    def _get(self, key: str, file_id: str, span: str = "") -> Body | None:
        query, headers = _pinned(file_id)
        return self._opened(
            Call("GET", "s3:GetObject", key, query, {**headers, **({"Range": span} if span else {})}, "B"), file_id
        )

    def read(self, key: str, *, limit: int = 64 << 20) -> tuple[StoredObject, bytes] | None:
        return self._whole(key, "", limit)

    def get_bytes(self, key: str, file_id: str = "", *, limit: int = 64 << 20) -> bytes | None:
        found = self._whole(key, file_id, limit)
        return None if found is None else found[1]

    def _whole(self, key: str, file_id: str, limit: int) -> tuple[StoredObject, bytes] | None:
        def read() -> tuple[StoredObject, bytes] | None:
            body = self._get(key, file_id)
            if body is None:
                return None
            try:
                if body.left > limit:
                    raise IntegrityError("the object is larger than any valid one", where=f"{self._session.url}/{key}")
                data = b"".join(body.iter_content(BLOCK))
            finally:
                body.close()
            return self.described(key, body.headers, len(data)), data

        return self._whole_line(read)

    def _whole_line(self, read: Callable[[], T]) -> T:
        """Repeat ``read`` while the line breaks in the middle of a body; the session repeats requests only."""
        tries = 0
        while True:
            try:
                return read()
            except WireBroken as error:
                tries += 1
                if tries == _BROKEN:
                    raise self._session.broken(error) from error

    def get_file(
        self, key: str, target: BinaryIO, *, file_id: str = "", offset: int = 0, progress: Progress | None = None
    ) -> None:
        done, failures = offset, 0
        while True:
            try:
                body = self._get(key, file_id, f"bytes={done}-" if done else "")
            except Refused as refusal:
                if refusal.kind is Kind.RANGE:
                    return  # nothing is left after ``done``
                raise
            if body is None:
                raise RemoteError("object not found", where=f"{self._session.url}/{key}", transient=False)
            before, buffer = done, memoryview(bytearray(min(BLOCK, max(1, body.left))))
            try:
                while body.left:
                    count = body.read_into(buffer)
                    target.write(buffer[:count])
                    done += count
                    if progress is not None:
                        progress(count)
                return
            except WireBroken as error:
                failures = failures + 1 if done == before else 0
                if failures >= _BROKEN:
                    raise self._session.broken(error) from error
            finally:
                body.close()

    def get_range(self, key: str, offset: int, length: int, take: Take, *, file_id: str = "") -> int:
        done, failures = 0, 0
        where = f"{self._session.url}/{key}"

        def taken(data: memoryview) -> None:
            nonlocal done
            take(data)
            done += len(data)

        while True:
            before, at, left = done, offset + done, length - done
            try:
                body = self._get(key, file_id, f"bytes={at}-{at + left - 1}")
                if body is None:
                    raise RemoteError("object not found", where=where, transient=False)
                return receive(body, at, left, taken, mark="ETag", where=where)
            except Refused as refusal:
                if refusal.kind is Kind.RANGE:
                    raise IntegrityError("the object is shorter than recorded", where=where) from None
                raise
            except WireBroken as error:
                failures = failures + 1 if done == before else 0
                if failures >= _BROKEN:
                    raise self._session.broken(error) from error


# -- answers -----------------------------------------------------------------------------------------------------------


def etag_of(headers: Mapping[str, str]) -> str:
    return str(headers.get("ETag") or "").strip('"')


def info_of(headers: Mapping[str, str]) -> dict[str, str]:
    sha1 = str(headers.get("x-amz-checksum-sha1") or "")
    return {"etag": etag_of(headers), **({"sha1": sha1} if sha1 else {})}


def _pinned(file_id: str) -> tuple[dict[str, str], dict[str, str]]:
    """Query and headers that name exactly this version."""
    if file_id.startswith(ETAG):
        return {}, {"If-Match": f'"{file_id[len(ETAG) :]}"'}
    return ({"versionId": file_id} if file_id else {}), {}


def date_of(text: str | None) -> float:
    try:
        return parsedate_to_datetime(text or "").timestamp()
    except (TypeError, ValueError):
        return 0.0
