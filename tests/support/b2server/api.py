"""B2's native API v4, as far as podwatch and the b2 tool use it: one function per call, on plain dictionaries."""

import uuid
from collections.abc import Callable
from typing import Any

from tests.support.b2server.state import MINIMUM_PART, ApiError, Key, State, Version

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


def authorize(state: State, key: Key, base: str) -> Json:
    token = f"acct_{uuid.uuid4().hex}"
    with state.lock:
        state.tokens[token] = key
    buckets = [{"id": state.bucket_id if key.bucket == state.bucket else "bktgone", "name": key.bucket}]
    return {
        "accountId": "acct",
        "authorizationToken": token,
        "applicationKeyExpirationTimestamp": None,
        "apiInfo": {
            "storageApi": {
                "apiUrl": base,
                "downloadUrl": base,
                "s3ApiUrl": base,
                "absoluteMinimumPartSize": MINIMUM_PART,
                "recommendedPartSize": 100_000_000,
                "infoType": "storageApi",
                "allowed": {
                    "buckets": buckets if key.bucket else None,
                    "capabilities": list(key.capabilities),
                    "namePrefix": key.prefix or None,
                },
            }
        },
    }


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
    more = found[limit].name if len(found) > limit else None
    return {"files": [describe(state, v) for v in found[:limit]], "nextFileName": more}


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
    more = found[limit] if len(found) > limit else None
    return {
        "files": [describe(state, v) for v in found[:limit]],
        "nextFileName": more and more.name,
        "nextFileId": more and more.file_id,
    }


def list_unfinished_large_files(state: State, key: Key, body: Json, base: str) -> Json:
    _check_bucket(state, body)
    need(state, key, "listFiles", body.get("namePrefix") or "")
    prefix = body.get("namePrefix") or ""
    with state.lock:
        found = [v for v in state.versions.values() if v.action == "start" and v.name.startswith(prefix)]
    return {"files": [describe(state, v) for v in sorted(found, key=lambda v: v.number)], "nextFileId": None}


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
    "b2_list_unfinished_large_files": list_unfinished_large_files,
    "b2_delete_file_version": delete_file_version,
}
