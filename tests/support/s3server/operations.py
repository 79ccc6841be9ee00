"""What each request of S3 does. ``http`` is the handler of the request."""

import base64
import hashlib
import re
import urllib.parse
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import formatdate
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tests.support.s3server.state import Key, Part, Upload, Version
from tests.support.store_server import ApiError


def operation(method: str, key: str, query: Mapping[str, str], headers: Mapping[str, str]) -> str:
    copies = "x-amz-copy-source" in {n.lower() for n in headers}
    if not key:
        names = {"versions": "ListObjectVersions", "uploads": "ListMultipartUploads", "location": "GetBucketLocation"}
        if method == "HEAD":
            return "HeadBucket"
        if method == "GET":
            return next((names[n] for n in names if n in query), "ListObjectsV2")
    elif method == "PUT":
        if "partNumber" in query:
            return "UploadPartCopy" if copies else "UploadPart"
        return "CopyObject" if copies else "PutObject"
    elif method == "POST":
        return "CreateMultipartUpload" if "uploads" in query else "CompleteMultipartUpload"
    elif method == "DELETE":
        return "AbortMultipartUpload" if "uploadId" in query else "DeleteObject"
    elif method == "GET":
        return "ListParts" if "uploadId" in query else "GetObject"
    elif method == "HEAD":
        return "HeadObject"
    raise ApiError(501, "NotImplemented", f"{method} {query}")


# -- objects ---------------------------------------------------------------------------------------------------------


def put_object(http: Any, signer: Key, key: str, query: Mapping[str, str]) -> None:
    state = http.state
    received = http.receive()
    http.need(signer, "put", key)
    with state.lock:
        try:
            _conditions(http, key)
        except ApiError:
            received.file.unlink()
            raise
        version = state.add(
            key,
            received.file,
            size=received.size,
            etag=_etag(state, received.md5),
            sha1=_kept_sha1(http, received.sha1),
            sha256=http.headers.get("x-amz-checksum-sha256") or "",  # compared already, unless it is only echoed
            meta=_meta(http.headers),
        )
        state.happened("PutObject", key, version=version.version_id)
    http.answer(200, b"", _described(http, version))


def _kept_sha1(http: Any, real: str) -> str:
    announced = http.headers.get("x-amz-checksum-sha1") or ""
    return real if announced and "sha1" in http.state.traits.verify else announced  # an echo proves nothing


def _etag(state: Any, md5: str) -> str:
    return md5 if state.traits.etag == "md5" else uuid.uuid4().hex


def _meta(headers: Any) -> dict[str, str]:
    return {n[11:].lower(): v for n, v in headers.items() if n.lower().startswith("x-amz-meta-")}


def _conditions(http: Any, key: str) -> None:
    match, none = http.headers.get("If-Match"), http.headers.get("If-None-Match")
    if not (match or none) or http.state.traits.conditions == "ignore":
        return
    if http.state.traits.conditions == "501":
        raise ApiError(501, "NotImplemented", "A header you provided implies functionality that is not implemented")
    current = http.state.current(key)
    if none and current is not None:
        raise ApiError(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold")
    if match:
        if current is None:
            raise ApiError(404, "NoSuchKey", "The specified key does not exist.")
        if match.strip('"') != current.etag:
            raise ApiError(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold")


def _described(http: Any, version: Version) -> dict[str, str]:
    headers = {"ETag": f'"{version.etag}"'}
    if version.version_id != "null":
        headers["x-amz-version-id"] = version.version_id
    if version.sha1 and http.command == "PUT":
        headers["x-amz-checksum-sha1"] = version.sha1
    return headers


def _wanted(http: Any, signer: Key, key: str, query: Mapping[str, str]) -> Version:
    http.need(signer, "get", key)
    state = http.state
    asked = query.get("versionId", "")
    version = state.find(key, asked) if asked else state.current(key)
    if version is None:
        if "list" not in signer.permissions or state.traits.missing == 403:
            raise ApiError(403, "AccessDenied", "Access Denied")
        raise ApiError(404, "NoSuchVersion" if asked else "NoSuchKey", "The specified key does not exist.")
    if version.marker:
        raise ApiError(405, "MethodNotAllowed", "a delete marker", {"x-amz-delete-marker": "true"})
    match = http.headers.get("If-Match")
    if match and state.traits.conditions == "yes" and match.strip('"') != version.etag:
        raise ApiError(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold")
    return version


def get_object(http: Any, signer: Key, key: str, query: Mapping[str, str]) -> None:
    state = http.state
    version = _wanted(http, signer, key, query)
    headers = _described(http, version)
    headers["Last-Modified"] = formatdate(version.wall, usegmt=True)
    headers |= {f"x-amz-meta-{name}": value for name, value in version.meta.items()}
    mode = http.headers.get("x-amz-checksum-mode")
    if mode and not state.traits.checksum_mode:
        raise ApiError(400, "InvalidArgument", "Unsupported header 'x-amz-checksum-mode' received for this API call.")
    if mode == "ENABLED" and version.sha256:
        headers["x-amz-checksum-sha256"] = version.sha256
        headers["x-amz-checksum-type"] = "FULL_OBJECT"
    elif mode == "ENABLED" and version.sha1:
        headers["x-amz-checksum-sha1"] = version.sha1
        headers["x-amz-checksum-type"] = "COMPOSITE" if "-" in version.sha1 else "FULL_OBJECT"
    span = None
    if http.command == "GET" and (match := re.fullmatch(r"bytes=(\d+)-(\d*)", http.headers.get("Range") or "")):
        span = int(match[1]), min(version.size, int(match[2] or version.size) + 1)
        if span[0] >= version.size:
            raise ApiError(416, "InvalidRange", "The requested range is not satisfiable")
    state.happened("GetObject" if http.command == "GET" else "HeadObject", key)
    http.send_object(state.body(version), version.size, headers, span)


def delete_object(http: Any, signer: Key, key: str, query: Mapping[str, str]) -> None:
    http.need(signer, "delete", key)
    state = http.state
    headers = {}
    with state.lock:
        if "versionId" in query or not state.traits.versions:
            version = state.find(key, query.get("versionId", "null"))
            if version is not None and state.traits.lock and not version.marker:
                raise ApiError(403, "AccessDenied", "Access Denied because object protected by object lock.")
            if version is not None:
                state.drop(version)
        else:
            headers = {"x-amz-delete-marker": "true"}
            state.add(key, None, marker=True)
        state.happened("DeleteObject", key, version=query.get("versionId", ""))
    http.answer(204, b"", headers)


def copy_object(http: Any, signer: Key, key: str, query: Mapping[str, str]) -> None:
    state = http.state
    if state.traits.copies == "501":
        raise ApiError(501, "NotImplemented")
    http.need(signer, "put", key)
    with state.lock:
        source = _source(http, signer)
        file = state.scratch()
        file.write_bytes(state.body(source).read_bytes())
        replaced = (http.headers.get("x-amz-metadata-directive") or "").upper() == "REPLACE"
        meta = _meta(http.headers) if replaced else source.meta
        made = state.add(key, file, size=source.size, etag=source.etag.partition("-")[0], meta=meta)
        state.happened("CopyObject", key)
    http.answer_xml(
        "CopyObjectResult",
        f'<ETag>"{made.etag}"</ETag><LastModified>{_time(made.wall)}</LastModified>',
        _described(http, made),
    )


def _source(http: Any, signer: Key) -> Version:
    path, _, query = (http.headers.get("x-amz-copy-source") or "").partition("?")
    bucket, _, key = urllib.parse.unquote(path).lstrip("/").partition("/")
    wanted = dict(urllib.parse.parse_qsl(query)).get("versionId", "")
    http.need(signer, "get", key)
    version = http.state.find(key, wanted) if wanted else http.state.current(key)
    if bucket != http.state.bucket or version is None or version.marker:
        raise ApiError(404, "NoSuchKey", "The specified key does not exist.")
    found: Version = version
    return found


# -- listings --------------------------------------------------------------------------------------------------------


def _time(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _name(key: str, query: Mapping[str, str]) -> str:
    return urllib.parse.quote_plus(key, safe="/") if query.get("encoding-type") == "url" else escape(key)


def list_objects(http: Any, signer: Key, key: str, query: Mapping[str, str]) -> None:
    prefix, most = query.get("prefix", ""), int(query.get("max-keys", 1000))
    http.need(signer, "list", prefix)
    after = base64.b64decode(query.get("continuation-token", "")).decode() or query.get("start-after", "")
    with http.state.lock:
        found = sorted(k for k in http.state.objects if k.startswith(prefix) and k > after)
        entries = [v for k in found if (v := http.state.current(k)) is not None]
    delimiter, common, rows = query.get("delimiter", ""), dict[str, None](), []
    page, last = [], ""
    for version in entries:
        rest = version.key[len(prefix) :]
        if delimiter and delimiter in rest:
            common[prefix + rest.partition(delimiter)[0] + delimiter] = None
        else:
            if len(page) >= most:
                break
            page.append(version)
        last = version.key
    truncated = bool(entries) and last != entries[-1].key
    for version in page:
        etag = f"<ETag>&quot;{version.etag}&quot;</ETag>" if http.state.traits.lists_etags else ""
        rows.append(
            f"<Contents><Key>{_name(version.key, query)}</Key><LastModified>{_time(version.wall)}</LastModified>"
            f"{etag}<Size>{version.size}</Size></Contents>"
        )
    rows += [f"<CommonPrefixes><Prefix>{_name(p, query)}</Prefix></CommonPrefixes>" for p in common]
    token = base64.b64encode(last.encode()).decode()
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if truncated else ""
    http.state.happened("ListObjectsV2", prefix)
    encoding = "<EncodingType>url</EncodingType>" if query.get("encoding-type") == "url" else ""
    http.answer_xml(
        "ListBucketResult",
        f"<Name>{http.state.bucket}</Name><Prefix>{_name(prefix, query)}</Prefix>{encoding}"
        f"<KeyCount>{len(page)}</KeyCount>"
        f"<IsTruncated>{'true' if truncated else 'false'}</IsTruncated>{more}{''.join(rows)}",
    )


def list_versions(http: Any, signer: Key, key: str, query: Mapping[str, str]) -> None:
    prefix, most = query.get("prefix", ""), int(query.get("max-keys", 1000))
    http.need(signer, "versions", prefix)
    at = (query.get("key-marker", ""), query.get("version-id-marker", ""))
    with http.state.lock:
        flat = [v for k in sorted(http.state.objects) if k.startswith(prefix) for v in reversed(http.state.objects[k])]
    if at[0]:
        past = [n for n, v in enumerate(flat) if v.key < at[0] or (v.key == at[0] and (not at[1]))]
        exact = [n for n, v in enumerate(flat) if (v.key, v.version_id) == at]
        flat = flat[(exact or past or [-1])[-1] + 1 :]
    page, rest = flat[:most], flat[most:]
    rows = []
    for version in page:
        kind = "DeleteMarker" if version.marker else "Version"
        more = "" if version.marker else f"<ETag>&quot;{version.etag}&quot;</ETag><Size>{version.size}</Size>"
        rows.append(
            f"<{kind}><Key>{_name(version.key, query)}</Key><VersionId>{version.version_id}</VersionId>"
            f"<IsLatest>{'true' if http.state.objects[version.key][-1] is version else 'false'}</IsLatest>"
            f"<LastModified>{_time(version.wall)}</LastModified>{more}</{kind}>"
        )
    following = ""
    if rest:
        following = f"<NextKeyMarker>{_name(page[-1].key, query)}</NextKeyMarker>"
        following += f"<NextVersionIdMarker>{page[-1].version_id}</NextVersionIdMarker>"
    encoding = "<EncodingType>url</EncodingType>" if query.get("encoding-type") == "url" else ""
    http.state.happened("ListObjectVersions", prefix)
    inside = f"{encoding}<IsTruncated>{'true' if rest else 'false'}</IsTruncated>{following}{''.join(rows)}"
    http.answer_xml("ListVersionsResult", inside)


def list_uploads(http: Any, signer: Key, key: str, query: Mapping[str, str]) -> None:
    prefix = query.get("prefix", "")
    http.need(signer, "list", prefix)
    with http.state.lock:
        found = [u for u in http.state.uploads.values() if u.key.startswith(prefix)]
    if not http.state.traits.lists_uploads:
        found = [u for u in found if u.key == prefix]
    rows = [
        f"<Upload><Key>{_name(u.key, query)}</Key><UploadId>{u.upload_id}</UploadId>"
        f"<Initiated>{_time(u.wall)}</Initiated></Upload>"
        for u in sorted(found, key=lambda u: (u.key, u.wall))
    ]
    encoding = "<EncodingType>url</EncodingType>" if query.get("encoding-type") == "url" else ""
    http.answer_xml("ListMultipartUploadsResult", f"{encoding}<IsTruncated>false</IsTruncated>{''.join(rows)}")


def bucket_location(http: Any, signer: Key, key: str, query: Mapping[str, str]) -> None:
    http.answer_xml("LocationConstraint", http.state.traits.region)


def head_bucket(http: Any, signer: Key, key: str, query: Mapping[str, str]) -> None:
    http.answer(200, b"", {"x-amz-bucket-region": http.state.traits.region})


# -- multi-part uploads ----------------------------------------------------------------------------------------------


def create_upload(http: Any, signer: Key, key: str, query: Mapping[str, str]) -> None:
    http.need(signer, "put", key)
    http.body()
    state = http.state
    algorithm = http.headers.get("x-amz-checksum-algorithm") or ""
    upload = Upload(uuid.uuid4().hex, key, state.now(), _meta(http.headers), algorithm)
    state.save_upload(upload)
    state.happened("CreateMultipartUpload", key)
    inside = f"<Bucket>{state.bucket}</Bucket><Key>{escape(key)}</Key><UploadId>{upload.upload_id}</UploadId>"
    http.answer_xml("InitiateMultipartUploadResult", inside)


def _upload(http: Any, key: str, query: Mapping[str, str]) -> Upload:
    upload = http.state.uploads.get(query.get("uploadId", ""))
    if upload is None or upload.key != key:
        raise ApiError(404, "NoSuchUpload", "The specified multipart upload does not exist.")
    found: Upload = upload
    return found


def _save_part(http: Any, upload: Upload, number: int, received: Any) -> Part:
    state = http.state
    with state.lock:
        if upload.upload_id not in state.uploads:  # aborted while the part arrived
            received.file.unlink()
            raise ApiError(404, "NoSuchUpload", "The specified multipart upload does not exist.")
        received.file.replace(state.part_file(upload, number))
        part = Part(number, received.size, _etag(state, received.md5), received.md5, received.sha1)
        upload.parts[number] = part
        state.save_upload(upload)
        state.happened("UploadPart", upload.key, part=number)
    return part


def upload_part(http: Any, signer: Key, key: str, query: Mapping[str, str]) -> None:
    upload = _upload(http, key, query)
    received = http.receive()
    http.need(signer, "put", key)
    part = _save_part(http, upload, int(query["partNumber"]), received)
    headers = {"ETag": f'"{part.etag}"'}
    if announced := http.headers.get("x-amz-checksum-sha1"):
        headers["x-amz-checksum-sha1"] = announced
    http.answer(200, b"", headers)


def upload_part_copy(http: Any, signer: Key, key: str, query: Mapping[str, str]) -> None:
    state = http.state
    http.body()
    if state.traits.copies == "501":
        raise ApiError(501, "NotImplemented")
    upload = _upload(http, key, query)
    source = _source(http, signer)
    first, last = (int(n) for n in http.headers["x-amz-copy-source-range"].removeprefix("bytes=").split("-"))
    data = b"" if state.traits.copies == "empty" else state.body(source).read_bytes()[first : last + 1]
    file = state.scratch()
    file.write_bytes(data)
    from tests.support.s3server.server import Received

    md5, sha1 = hashlib.md5(data).hexdigest(), base64.b64encode(hashlib.sha1(data).digest()).decode()
    part = _save_part(http, upload, int(query["partNumber"]), Received(file, len(data), md5, sha1))
    check = (
        f"<ChecksumSHA1>{sha1}</ChecksumSHA1>" if upload.algorithm == "SHA1" and "sha1" in state.traits.verify else ""
    )
    http.answer_xml("CopyPartResult", f'<ETag>"{part.etag}"</ETag>{check}')


def list_parts(http: Any, signer: Key, key: str, query: Mapping[str, str]) -> None:
    upload = _upload(http, key, query)
    after, most = int(query.get("part-number-marker", 0)), int(query.get("max-parts", 1000))
    shows = upload.algorithm == "SHA1" and http.state.traits.composite and "sha1" in http.state.traits.verify
    with http.state.lock:
        found = [upload.parts[n] for n in sorted(upload.parts) if n > after]
    rows = [
        f"<Part><PartNumber>{p.number}</PartNumber><ETag>&quot;{p.etag}&quot;</ETag><Size>{p.size}</Size>"
        + (f"<ChecksumSHA1>{p.sha1}</ChecksumSHA1>" if shows else "")
        + "</Part>"
        for p in found[:most]
    ]
    more = len(found) > most
    marker = f"<NextPartNumberMarker>{found[most - 1].number}</NextPartNumberMarker>" if more else ""
    http.answer_xml(
        "ListPartsResult", f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>{marker}{''.join(rows)}"
    )


def complete_upload(http: Any, signer: Key, key: str, query: Mapping[str, str]) -> None:
    state = http.state
    root = ElementTree.fromstring(http.body())
    upload = _upload(http, key, query)
    http.need(signer, "put", key)
    wanted = []
    for item in root:
        fields = {child.tag.rpartition("}")[2]: (child.text or "").strip() for child in item}
        wanted.append((int(fields["PartNumber"]), fields["ETag"].strip('"'), fields.get("ChecksumSHA1", "")))
    with state.lock:
        version = _completed(http, upload, wanted)
        state.happened("CompleteMultipartUpload", key, version=version.version_id)
    headers = {"x-amz-version-id": version.version_id} if version.version_id != "null" else {}
    http.answer_xml("CompleteMultipartUploadResult", f'<Key>{escape(key)}</Key><ETag>"{version.etag}"</ETag>', headers)


def _completed(http: Any, upload: Upload, wanted: list[tuple[int, str, str]]) -> Version:
    state, parts = http.state, []
    if not wanted or [w[0] for w in wanted] != sorted({w[0] for w in wanted}):
        raise ApiError(400, "InvalidPartOrder", "The list of parts was not in ascending order.")
    for number, etag, sha1 in wanted:
        part = upload.parts.get(number)
        checked = upload.algorithm == "SHA1" and "sha1" in state.traits.verify
        if part is None or part.etag != etag or (checked and sha1 != part.sha1):
            raise ApiError(400, "InvalidPart", f"part {number} could not be found, or its tag did not match")
        parts.append(part)
    if any(p.size < state.traits.minimum_part for p in parts[:-1]):
        raise ApiError(400, "EntityTooSmall", "Your proposed upload is smaller than the minimum allowed size")
    if state.traits.equal_parts and len({p.size for p in parts[:-1]}) > 1:
        raise ApiError(400, "InvalidPart", "All non-trailing parts must have the same length.")
    _conditions(http, upload.key)
    file, size = state.scratch(), 0
    with file.open("wb") as out:
        for part in parts:
            size += part.size
            out.write(state.part_file(upload, part.number).read_bytes())
    etag = hashlib.md5(b"".join(bytes.fromhex(p.md5) for p in parts)).hexdigest() + f"-{len(parts)}"
    sha1 = ""
    if upload.algorithm == "SHA1" and state.traits.composite:
        digest = hashlib.sha1(b"".join(base64.b64decode(p.sha1) for p in parts)).digest()
        sha1 = f"{base64.b64encode(digest).decode()}-{len(parts)}"
    etag = etag if state.traits.etag == "md5" else uuid.uuid4().hex
    # As AWS: the time of a multi-part object is that of its start.
    version: Version = state.add(upload.key, file, size=size, etag=etag, sha1=sha1, meta=upload.meta, wall=upload.wall)
    state.drop_upload(upload)
    return version


def abort_upload(http: Any, signer: Key, key: str, query: Mapping[str, str]) -> None:
    upload = _upload(http, key, query)
    http.need(signer, "put", key)
    http.state.drop_upload(upload)
    http.state.happened("AbortMultipartUpload", key)
    http.answer(204)


CALLS: dict[str, Callable[[Any, Key, str, Mapping[str, str]], None]] = {
    "PutObject": put_object,
    "GetObject": get_object,
    "HeadObject": get_object,
    "DeleteObject": delete_object,
    "CopyObject": copy_object,
    "ListObjectsV2": list_objects,
    "ListObjectVersions": list_versions,
    "ListMultipartUploads": list_uploads,
    "GetBucketLocation": bucket_location,
    "HeadBucket": head_bucket,
    "CreateMultipartUpload": create_upload,
    "UploadPart": upload_part,
    "UploadPartCopy": upload_part_copy,
    "ListParts": list_parts,
    "CompleteMultipartUpload": complete_upload,
    "AbortMultipartUpload": abort_upload,
}
