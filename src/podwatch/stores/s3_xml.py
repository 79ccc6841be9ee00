"""S3's XML: what podwatch writes, and as much of the answers as it reads. Sizes are limited, DTDs refused."""

import html
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import unquote_plus

from podwatch.domain.errors import IntegrityError

LARGEST = 16 << 20
"""Bytes: 1,000 keys of 1 KiB, percent-encoded, take three megabytes."""


@dataclass(frozen=True, slots=True)
class Problem:
    """An ``<Error>``. ``region``: where the bucket is, if the answer names it; ``server_time``: epoch seconds, if it
    does."""

    code: str
    message: str = ""
    region: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry of a listing. ``wall`` in epoch seconds; ``identifier`` a version or upload id."""

    key: str
    size: int = 0
    etag: str = ""
    wall: float = 0.0
    identifier: str = ""
    marker: bool = False
    latest: bool = True


@dataclass(frozen=True, slots=True)
class Part:
    number: int
    size: int
    etag: str
    sha1: str = ""
    """Base64, as S3 has it; empty where the server does not list it."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a listing, and the parameters of the next one; empty at the end."""

    entries: tuple[Listed, ...]
    following: tuple[tuple[str, str], ...] = ()


class Element:
    """An element by local names: servers differ in the namespace that they use."""

    def __init__(self, element: ElementTree.Element) -> None:
        self._element = element
        self.name = _local(element.tag)

    def text(self, name: str, default: str = "") -> str:
        for child in self._element:
            if _local(child.tag) == name:
                return (child.text or "").strip()
        return default

    def raw(self, name: str) -> str:
        """With white space: names can have it."""
        for child in self._element:
            if _local(child.tag) == name:
                return child.text or ""
        return ""

    def children(self, *names: str) -> "Iterator[Element]":
        for child in self._element:
            if _local(child.tag) in names:
                yield Element(child)


def parse(data: bytes, *, where: str) -> Element:
    """Raises IntegrityError for what is not XML, is too large, or declares entities."""
    if len(data) > LARGEST or b"<!DOCTYPE" in data[:1024] or b"<!ENTITY" in data:
        raise IntegrityError("the store's answer is not one of S3", where=where)
    try:
        return Element(ElementTree.fromstring(data.strip()))  # noqa: S314 - without entities nothing can expand
    except ElementTree.ParseError as error:
        raise IntegrityError(f"the store's answer is not XML: {error}", where=where) from error


def problem(data: bytes) -> Problem | None:
    """The error in an answer; None if it is not one, also for a proxy's page."""
    if b"<Error" not in data[:4096]:
        return None
    try:
        root = parse(data, where="")
    except IntegrityError:
        return None
    if root.name != "Error":
        return None
    return Problem(root.text("Code"), root.text("Message"), root.text("Region"))


def _listing(data: bytes, where: str) -> Element:
    """A page of a listing. Raises IntegrityError for every other document: a proxy's page is no empty listing."""
    root = parse(data, where=where)
    if not root.name.startswith("List"):
        raise IntegrityError("the store's answer is no listing", where=where)
    return root


def _cut_off(where: str) -> IntegrityError:
    """What is missing would count as absent."""
    return IntegrityError("the store's listing breaks off: it names no next page", where=where)


def objects(data: bytes, *, where: str) -> Page:
    """ListObjectsV2, requested with ``encoding-type=url``."""
    root = _listing(data, where)
    encoded = root.text("EncodingType") == "url"
    found = tuple(
        Listed(
            _key(item.raw("Key"), encoded=encoded),
            int(item.text("Size") or 0),
            item.text("ETag").strip('"'),
            wall_of(item.text("LastModified")),
        )
        for item in root.children("Contents")
    )
    token = root.text("NextContinuationToken")
    more = root.text("IsTruncated") == "true"
    if more and not token:
        raise _cut_off(where)
    return Page(found, (("continuation-token", token),) if more else ())


def versions(data: bytes, *, where: str) -> Page:
    """ListObjectVersions. Delete markers are entries with ``marker``."""
    root = _listing(data, where)
    encoded = root.text("EncodingType") == "url"
    found = tuple(
        Listed(
            _key(item.raw("Key"), encoded=encoded),
            int(item.text("Size") or 0),
            item.text("ETag").strip('"'),
            wall_of(item.text("LastModified")),
            item.text("VersionId"),
            marker=item.name == "DeleteMarker",
            latest=item.text("IsLatest") == "true",
        )
        for item in root.children("Version", "DeleteMarker")
    )
    following = _following(root, encoded, "KeyMarker", "VersionIdMarker", "key-marker", "version-id-marker", where)
    return Page(found, following)


def uploads(data: bytes, *, where: str) -> Page:
    """ListMultipartUploads."""
    root = _listing(data, where)
    encoded = root.text("EncodingType") == "url"
    found = tuple(
        Listed(
            _key(item.raw("Key"), encoded=encoded),
            wall=wall_of(item.text("Initiated")),
            identifier=item.text("UploadId"),
        )
        for item in root.children("Upload")
    )
    following = _following(root, encoded, "KeyMarker", "UploadIdMarker", "key-marker", "upload-id-marker", where)
    return Page(found, following)


def _following(
    root: Element, encoded: bool, key: str, mark: str, key_name: str, mark_name: str, where: str
) -> tuple[tuple[str, str], ...]:
    if root.text("IsTruncated") != "true":
        return ()
    if not root.raw(f"Next{key}"):
        raise _cut_off(where)
    pairs = [(key_name, _key(root.raw(f"Next{key}"), encoded=encoded))]
    if root.text(f"Next{mark}"):
        pairs.append((mark_name, root.text(f"Next{mark}")))
    return tuple(pairs)


def parts(data: bytes, *, where: str) -> tuple[tuple[Part, ...], str]:
    """ListParts: the parts, and the marker of the next page ("" at the end)."""
    root = _listing(data, where)
    found = tuple(
        Part(
            int(item.text("PartNumber") or 0),
            int(item.text("Size") or 0),
            item.text("ETag").strip('"'),
            item.text("ChecksumSHA1"),
        )
        for item in root.children("Part")
    )
    more = root.text("IsTruncated") == "true"
    return found, root.text("NextPartNumberMarker") if more else ""


def complete_document(etags: Sequence[str], sha1: Sequence[str] = ()) -> bytes:
    """CompleteMultipartUpload; ``sha1`` in base64, where the upload was started with that checksum."""
    rows = []
    for number, etag in enumerate(etags, 1):
        check = f"<ChecksumSHA1>{sha1[number - 1]}</ChecksumSHA1>" if sha1 else ""
        plain = html.escape(etag, quote=False)
        rows.append(f"<Part><PartNumber>{number}</PartNumber><ETag>&quot;{plain}&quot;</ETag>{check}</Part>")
    inside = "".join(rows)
    name = "CompleteMultipartUpload"
    return f'<{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inside}</{name}>'.encode()


def wall_of(text: str) -> float:
    """Epoch seconds of S3's time, such as 2026-11-23T08:30:00.000Z; 0 for what is none."""
    match = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?)\d*(?:Z|\+00:00)?", text)
    if match is None:
        return 0.0
    try:
        return datetime.fromisoformat(match[1]).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0


def _key(text: str, *, encoded: bool) -> str:
    return unquote_plus(text) if encoded else text


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]
