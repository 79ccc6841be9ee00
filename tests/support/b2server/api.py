"""B2's native API, as podwatch, b2sdk, the b2 tool (v4, v3) and rclone (v1) use it: one function per call, on plain
dictionaries. What differs between the versions is in ``authorize`` and ``as_version``."""

import hashlib
import uuid
from collections.abc import Callable
from typing import Any

from tests.support.b2server.state import MINIMUM_PART, Key, State, Version
from tests.support.store_server import ApiError

Json = dict[str, Any]
_NO_LOCK: Json = {"mode": None, "period": None}


def describe(state: State, v: Version) -> Json:
    return {
        "accountId": "acct",
        "action": v.action,
        "bucketId": state.bucket_id,
        "contentLength": v.size,
        "contentMd5": None,
        "contentSha1": v.sha1 if v.action == "upload" else None,
        "contentType": v.content_type,
        "fileId": v.file_id,
        "fileInfo": v.info,
        "fileName": v.name,
        "fileRetention": {"isClientAuthorizedToRead": True, "value": {"mode": None, "retainUntilTimestamp": None}},
        "legalHold": {"isClientAuthorizedToRead": True, "value": None},
        "serverSideEncryption": {"algorithm": None, "mode": None},
        "uploadTimestamp": v.timestamp_ms,
    }


def need(state: State, key: Key, capability: str, name: str | None = None) -> None:
    """The key must have the capability, for this bucket and this name (or list prefix)."""
    if capability not in key.capabilities:
        raise ApiError(401, "unauthorized", f"key lacks capability {capability}")
    if key.bucket and key.bucket != state.bucket:
        raise ApiError(401, "unauthorized", "key is for another bucket")
    if name is not None and not name.startswith(key.prefix):
        raise ApiError(401, "unauthorized", "name is outside the key's prefix")


def authorize(state: State, key: Key, base: str, version: str) -> Json:
    """v4 knows several buckets, v3 one; v2 and v1 are flat, and v1 has the old name of the part size besides."""
    token = f"acct_{uuid.uuid4().hex}"
    with state.lock:
        state.tokens[token] = key
    bucket_id = state.bucket_id if key.bucket == state.bucket else "bktgone"
    urls = {"apiUrl": base, "downloadUrl": base, "s3ApiUrl": base}
    sizes = {"absoluteMinimumPartSize": MINIMUM_PART, "recommendedPartSize": state.recommended_part}
    allowed: Json = {"capabilities": list(key.capabilities), "namePrefix": key.prefix or None}
    common: Json = {"accountId": "acct", "authorizationToken": token}
    one = {"bucketId": bucket_id if key.bucket else None, "bucketName": key.bucket or None}
    if version == "v3":
        storage = {**urls, **sizes, **allowed, **one, "infoType": "storageApi"}
        return {**common, "applicationKeyExpirationTimestamp": None, "apiInfo": {"storageApi": storage}}
    if version in ("v1", "v2"):
        allowed |= one
        if version == "v1":
            sizes["minimumPartSize"] = 100_000_000
        return {**common, **urls, **sizes, "allowed": allowed}
    allowed["buckets"] = [{"id": bucket_id, "name": key.bucket}] if key.bucket else None
    storage = {**urls, **sizes, "infoType": "storageApi", "allowed": allowed}
    return {**common, "applicationKeyExpirationTimestamp": None, "apiInfo": {"storageApi": storage}}


def as_version(answer: Json, version: str) -> Json:
    """v1 listings say ``size`` where later ones say ``contentLength``: without it rclone sees empty files."""
    if version == "v1":
        for file in answer.get("files") or ():
            file["size"] = file.pop("contentLength")
    return answer


def _folder(state: State, name: str) -> Json:
    return {
        "accountId": "acct", "action": "folder", "bucketId": state.bucket_id, "contentLength": 0, "contentSha1": None,
        "contentMd5": None, "contentType": None, "fileId": None, "fileInfo": {}, "fileName": name, "uploadTimestamp": 0,
        "fileRetention": {"isClientAuthorizedToRead": True, "value": None}, "serverSideEncryption": {"algorithm": None},
        "legalHold": {"isClientAuthorizedToRead": True, "value": None},
    }  # fmt: skip


def _grouped(state: State, found: list[Version], prefix: str, delimiter: str) -> list[tuple[str, Version | None, Json]]:
    """(name, version, entry): with a delimiter, what lies below a folder is one entry."""
    entries: list[tuple[str, Version | None, Json]] = []
    for version in found:
        head, mark, _ = version.name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
        folder = f"{prefix}{head}{mark}"
        if not mark:
            entries.append((version.name, version, describe(state, version)))
        elif not entries or entries[-1][0] != folder:
            entries.append((folder, None, _folder(state, folder)))
    return entries


def list_buckets(state: State, key: Key, body: Json, base: str) -> Json:
    need(state, key, "listBuckets")
    wanted = body.get("bucketName") or state.bucket
    found: list[Json] = [
        {"accountId": "acct", "bucketId": state.bucket_id, "bucketName": state.bucket, "bucketType": "allPrivate"}
    ]
    open_lock = {"isClientAuthorizedToRead": True, "value": {"defaultRetention": _NO_LOCK, "isFileLockEnabled": False}}
    encryption = {"isClientAuthorizedToRead": True, "value": {"algorithm": None, "mode": None}}
    for bucket in found:
        bucket |= {"fileLockConfiguration": open_lock, "defaultServerSideEncryption": encryption}
        bucket |= {"bucketInfo": {}, "corsRules": [], "lifecycleRules": [], "options": [], "revision": 1}
    return {"buckets": found if wanted == state.bucket else []}


def create_bucket(state: State, key: Key, body: Json, base: str) -> Json:
    """There is one bucket. rclone asks for it before it copies, and takes this answer for a yes."""
    if body.get("bucketName") == state.bucket:
        raise ApiError(400, "duplicate_bucket_name", "Bucket name is already in use.")
    raise ApiError(400, "too_many_buckets", "this server has one bucket")


def _check_bucket(state: State, body: Json) -> None:
    if body.get("bucketId") != state.bucket_id:
        raise ApiError(400, "bad_bucket_id", f"Bucket {body.get('bucketId')} does not exist")


def get_upload_url(state: State, key: Key, body: Json, base: str) -> Json:
    _check_bucket(state, body)
    need(state, key, "writeFiles")
    token = f"up_{uuid.uuid4().hex}"
    state.upload_tokens[token] = (key, "")
    url = f"{base}/b2api/v4/b2_upload_file/{token}"
    return {"bucketId": state.bucket_id, "uploadUrl": url, "authorizationToken": token}


def get_upload_part_url(state: State, key: Key, body: Json, base: str) -> Json:
    need(state, key, "writeFiles")
    version = _unfinished(state, body["fileId"])
    token = f"pt_{uuid.uuid4().hex}"
    state.upload_tokens[token] = (key, version.file_id)
    url = f"{base}/b2api/v4/b2_upload_part/{token}"
    return {"fileId": version.file_id, "uploadUrl": url, "authorizationToken": token}


def _unfinished(state: State, file_id: str) -> Version:
    version = state.versions.get(file_id)
    if version is None or version.action != "start":
        raise ApiError(400, "bad_request", f"No active upload for: {file_id}")
    return version


def start_large_file(state: State, key: Key, body: Json, base: str) -> Json:
    _check_bucket(state, body)
    need(state, key, "writeFiles", body["fileName"])
    version = state.add(body["fileName"], "start", body.get("fileInfo") or {}, body["contentType"])
    state.save(version)
    return describe(state, version)


def finish_large_file(state: State, key: Key, body: Json, base: str) -> Json:
    need(state, key, "writeFiles")
    version = _unfinished(state, body["fileId"])
    state.finish(version, body["partSha1Array"])
    return describe(state, version)


def cancel_large_file(state: State, key: Key, body: Json, base: str) -> Json:
    need(state, key, "writeFiles")
    version = _unfinished(state, body["fileId"])
    state.drop(version)
    return {"accountId": "acct", "bucketId": state.bucket_id, "fileId": version.file_id, "fileName": version.name}


def get_file_info(state: State, key: Key, body: Json, base: str) -> Json:
    need(state, key, "readFiles")
    version = state.versions.get(body["fileId"])
    if version is None:
        raise ApiError(404, "not_found", "file_state_none")
    need(state, key, "readFiles", version.name)
    return describe(state, version)


def list_file_names(state: State, key: Key, body: Json, base: str) -> Json:
    _check_bucket(state, body)
    prefix = body.get("prefix") or ""
    need(state, key, "listFiles", prefix)
    start, limit = body.get("startFileName") or "", body.get("maxFileCount") or 100
    with state.lock:
        names = sorted({v.name for v in state.versions.values() if v.name.startswith(prefix) and v.name >= start})
        found = [v for v in (state.newest(n) for n in names) if v is not None]
    entries = _grouped(state, found, prefix, body.get("delimiter") or "")
    more = entries[limit][0] if len(entries) > limit else None
    return {"files": [entry for _, _, entry in entries[:limit]], "nextFileName": more}


def list_file_versions(state: State, key: Key, body: Json, base: str) -> Json:
    _check_bucket(state, body)
    prefix = body.get("prefix") or ""
    need(state, key, "listFiles", prefix)
    limit = body.get("maxFileCount") or 100
    start = (
        body.get("startFileName") or "",
        -state.versions[i].number if (i := body.get("startFileId")) else -(1 << 60),
    )
    with state.lock:
        ordered = sorted(state.versions.values(), key=lambda v: (v.name, -v.number))
    found = [v for v in ordered if v.name.startswith(prefix) and (v.name, -v.number) >= start]
    entries = _grouped(state, found, prefix, body.get("delimiter") or "")
    name, version, _ = entries[limit] if len(entries) > limit else (None, None, {})
    return {
        "files": [entry for _, _, entry in entries[:limit]],
        "nextFileName": name,
        "nextFileId": version.file_id if version else None,
    }


def list_parts(state: State, key: Key, body: Json, base: str) -> Json:
    need(state, key, "writeFiles")
    version = _unfinished(state, body["fileId"])
    start, limit = body.get("startPartNumber") or 1, body.get("maxPartCount") or 100
    parts = sorted((n, p) for n, p in state.parts(version.file_id).items() if n >= start)
    found = [
        {
            "fileId": version.file_id,
            "partNumber": number,
            "contentLength": path.stat().st_size,
            "contentSha1": hashlib.sha1(path.read_bytes()).hexdigest(),
            "contentMd5": None,
            "serverSideEncryption": {"algorithm": None, "mode": None},
            "uploadTimestamp": version.timestamp_ms,
        }
        for number, path in parts[:limit]
    ]
    return {"parts": found, "nextPartNumber": parts[limit][0] if len(parts) > limit else None}


def list_unfinished_large_files(state: State, key: Key, body: Json, base: str) -> Json:
    _check_bucket(state, body)
    need(state, key, "listFiles", body.get("namePrefix") or "")
    prefix = body.get("namePrefix") or ""
    with state.lock:
        found = [v for v in state.versions.values() if v.action == "start" and v.name.startswith(prefix)]
    found.sort(key=lambda v: v.number)
    ids = [v.file_id for v in found]
    if (start := body.get("startFileId")) in ids:
        found = found[ids.index(start) :]
    limit = body.get("maxFileCount") or 100
    more = found[limit].file_id if len(found) > limit else None
    return {"files": [describe(state, v) for v in found[:limit]], "nextFileId": more}


def hide_file(state: State, key: Key, body: Json, base: str) -> Json:
    _check_bucket(state, body)
    need(state, key, "writeFiles", body["fileName"])
    if state.newest(body["fileName"]) is None:
        raise ApiError(400, "no_such_file", f"File not present: {body['fileName']}")
    version = state.add(body["fileName"], "hide", {}, "application/x-bz-hide-marker")
    state.save(version)
    return describe(state, version)


def _source(state: State, key: Key, body: Json) -> tuple[Version, bytes]:
    """The version that is copied from, and the bytes of the range."""
    version = state.versions.get(body["sourceFileId"])
    if version is None or version.action != "upload":
        raise ApiError(404, "not_found", f"no such file: {body['sourceFileId']}")
    need(state, key, "readFiles", version.name)
    data = state.body(version).read_bytes()
    if wanted := body.get("range"):
        first, last = wanted.removeprefix("bytes=").split("-")
        data = data[int(first) : int(last) + 1]
    return version, data


def copy_file(state: State, key: Key, body: Json, base: str) -> Json:
    need(state, key, "writeFiles", body["fileName"])
    source, data = _source(state, key, body)
    replace = body.get("metadataDirective") == "REPLACE"
    info = (body.get("fileInfo") or {}) if replace else dict(source.info)
    kind = body.get("contentType") if replace else source.content_type
    version = state.add(body["fileName"], "upload", info, kind or source.content_type)
    version.size, version.sha1 = len(data), hashlib.sha1(data).hexdigest()
    state.body(version).write_bytes(data)
    state.save(version)
    return {**describe(state, version), "action": "copy"}


def copy_part(state: State, key: Key, body: Json, base: str) -> Json:
    need(state, key, "writeFiles")
    version = _unfinished(state, body["largeFileId"])
    _, data = _source(state, key, body)
    state.part(version.file_id, body["partNumber"]).write_bytes(data)
    return {
        "fileId": version.file_id, "partNumber": body["partNumber"], "contentLength": len(data), "contentMd5": None,
        "contentSha1": hashlib.sha1(data).hexdigest(), "uploadTimestamp": version.timestamp_ms,
    }  # fmt: skip


def delete_file_version(state: State, key: Key, body: Json, base: str) -> Json:
    need(state, key, "deleteFiles", body["fileName"])
    version = state.versions.get(body["fileId"])
    if version is None or version.name != body["fileName"]:
        raise ApiError(400, "file_not_present", f"file version not present: {body['fileName']} {body['fileId']}")
    state.drop(version)
    return {"fileId": version.file_id, "fileName": version.name}


CALLS: dict[str, Callable[[State, Key, Json, str], Json]] = {
    "b2_list_buckets": list_buckets,
    "b2_get_upload_url": get_upload_url,
    "b2_get_upload_part_url": get_upload_part_url,
    "b2_start_large_file": start_large_file,
    "b2_finish_large_file": finish_large_file,
    "b2_cancel_large_file": cancel_large_file,
    "b2_get_file_info": get_file_info,
    "b2_list_file_names": list_file_names,
    "b2_list_file_versions": list_file_versions,
    "b2_list_parts": list_parts,
    "b2_list_unfinished_large_files": list_unfinished_large_files,
    "b2_delete_file_version": delete_file_version,
    "b2_create_bucket": create_bucket,
    "b2_hide_file": hide_file,
    "b2_copy_file": copy_file,
    "b2_copy_part": copy_part,
}
CLASSES = {
    **dict.fromkeys(("b2_download", "b2_get_file_info"), "B"),
    **dict.fromkeys(("b2_authorize_account", "b2_copy_file", "b2_copy_part"), "C"),
    **{call: "C" for call in CALLS if call.startswith("b2_list_")},
}
"""How a call is billed: what is not here is of class A, free (facts/b2.md section 5.4)."""
