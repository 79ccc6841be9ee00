"""Backblaze B2: b2sdk speaks the protocol (tokens, upload URLs, names), our transport carries it, one try per call.

B2 keeps every version: a PUT that is repeated after a lost answer leaves a hidden one, and deleting removes them all.
It has no conditional writes, and compares the SHA-1 of every upload.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from typing import Any, TypeVar

from b2sdk.v3 import B2HttpApiConfig, B2Session, InMemoryAccountInfo
from b2sdk.v3 import exception as b2error

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.store.objects.base import HttpObjects, ObjectInfo, Retry, Source
from podwatch.store.objects.errors import (
    ObjectMissing,
    StoreOutage,
    StoreRefused,
    damaged_in_transit,
    not_the_store,
)
from podwatch.store.objects.transport import Reply, Transport, retry_after

PAGE = 1000
"""Names in a listing's page: a call is billed once for each thousand."""
NEEDED = {"writeFiles": "upload", "readFiles": "restore", "listFiles": "list"}
_KEY_FIX = "check B2_APPLICATION_KEY_ID and B2_APPLICATION_KEY (deleted, expired, or mistyped)"
_PERMISSION_FIX = "create a key for this bucket and prefix with listFiles, readFiles, writeFiles (and deleteFiles)"
_FREE = {"b2_upload_file", "b2_get_upload_url", "b2_delete_file_version", "b2_hide_file"}
_SHA1 = re.compile(r"[0-9a-f]{40}")
_EXPIRED = ("expired_auth_token", "bad_auth_token")


@dataclass(frozen=True, slots=True)
class B2Access:
    """``endpoint``: empty for Backblaze itself, else the URL of another service that speaks its protocol."""

    key_id: str
    key: str = field(repr=False)
    endpoint: str = ""


class _Problem(b2error.B2Error):  # type: ignore[misc]
    """Carries our error through the SDK, which repeats nothing then."""

    def __init__(self, problem: RemoteError) -> None:
        super().__init__()
        self.problem = problem

    def should_retry_http(self) -> bool:
        return False

    should_retry_upload = should_retry_http


class _Session:
    """What the SDK takes for its HTTP session. Token renewal is the SDK's; every other refusal is translated here."""

    def __init__(self, transport: Transport, url: str) -> None:
        self._transport, self._url = transport, url

    def request(self, method: str, url: str, headers: Mapping[str, str], data: Any = None, **options: Any) -> Reply:
        name = url.partition("://")[2].split("/")
        call = next((part for part in name[1:] if part.startswith("b2_")), "download")
        self._transport.calls["A" if call in _FREE else "B" if call == "download" else "C"] += 1
        try:
            reply = self._transport.send(method, url, headers, data)
            if reply.status_code in (200, 206) and options.get("stream"):
                return reply
            if reply.status_code in (200, 206):
                if not isinstance(json.loads(reply.document()), dict):
                    raise not_the_store(self._url)
                return reply
            code, message = _answered(reply)
            if reply.status_code == 401 and code in _EXPIRED and call != "b2_upload_file":
                return reply
            opening = call == "b2_authorize_account"
            raise self._translate(reply.status_code, code, message, retry_after(reply.headers), opening=opening)
        except ValueError:
            raise _Problem(not_the_store(self._url)) from None
        except RemoteError as problem:
            raise _Problem(problem) from None

    def _translate(self, status: int, code: str, message: str, wait: float, *, opening: bool) -> RemoteError:
        """B2's ``code`` decides before the HTTP status; a page of a proxy has none. ``message`` is cut short."""
        text, url = f"{code}: {message[:200]}", self._url
        if not code and status not in (429, 500, 502, 503, 504):
            return not_the_store(url)
        if code.endswith("cap_exceeded"):
            fix = "raise the cap in the Backblaze account; daily caps reset at 00:00 GMT"
            return StoreRefused("cap", "the account's cap is used up (storage or transactions)", where=url, fix=fix)
        if status == 401 and code in (*_EXPIRED, "service_unavailable"):
            return StoreOutage("the store's token has expired", where=url)
        if code == "bad_request" and "did not match data received" in message.lower():
            return damaged_in_transit(url)
        if code == "auth_token_limit" or status in (408, 429) or status >= 500:
            return StoreOutage(f"the store is busy or broken ({text})", where=url, wait=wait)
        if opening and status in (401, 403):
            return StoreRefused("key", f"the store refuses the key ({text})", where=url, fix=_KEY_FIX)
        if status in (401, 403):
            return StoreRefused("permission", f"the key may not do this ({text})", where=url, fix=_PERMISSION_FIX)
        if status == 404 or code in ("not_found", "file_not_present", "no_such_file"):
            return ObjectMissing(url)
        if code == "bad_bucket_id":
            return _no_bucket(url)
        return StoreRefused("request", f"the store refused a request ({text})", where=url, fix="report this")

    def close(self) -> None:
        self._transport.close()


def _answered(reply: Reply) -> tuple[str, str]:
    """B2's own code and message; empty for what is not B2's."""
    try:
        error = json.loads(reply.document(1 << 20))
        return str(error.get("code") or ""), str(error.get("message") or "")
    except (ValueError, AttributeError):
        return "", ""


def _no_bucket(url: str) -> StoreRefused:
    what = "the bucket does not exist, or the key has no access to it"
    return StoreRefused("bucket", what, where=url, fix="create it, or correct [sync] store")


T = TypeVar("T")


class B2Objects(HttpObjects):
    mark = "X-Bz-File-Id"

    def __init__(self, bucket: str, access: B2Access, *, connections: int = 8, retry: Retry | None = None,
                 transport: Transport | None = None) -> None:  # fmt: skip
        super().__init__(transport or Transport(connections), retry or Retry())
        self.url, self._name, self._access = f"b2://{bucket}", bucket, access
        self._http = _Session(self._transport, self.url)
        # With ``decode_content`` the SDK uses the session as it is; nothing is decoded, since nothing is asked for
        # compressed. Its default account info is a database in the home directory, with the key in it.
        config = B2HttpApiConfig(
            http_session_factory=lambda: self._http, install_clock_skew_hook=False, decode_content=True
        )
        self._session = B2Session(InMemoryAccountInfo(), api_config=config)
        self._id = ""
        self._opening = threading.Lock()

    @property
    def hashes(self) -> tuple[str, ...]:
        return ("sha1",)

    def _call(self, call: Callable[[], T]) -> T:
        """One request, and before the first one those that find the bucket. An answer that lacks what B2 documents is
        not B2's."""
        try:
            if not self._id:
                with self._opening:
                    self._id = self._id or self._bucket_id()
            return call()
        except _Problem as error:
            raise error.problem from None
        except b2error.B2Error as error:
            raise StoreOutage(f"the store's answer is unclear ({type(error).__name__})", where=self.url) from None
        except (KeyError, TypeError, AttributeError, ValueError):
            raise not_the_store(self.url) from None

    def _bucket_id(self) -> str:
        """A key for one bucket needs no second call."""
        access = self._access
        self._session.authorize_account(access.endpoint or "production", access.key_id, access.key)
        allowed = self._session.account_info.get_allowed()
        buckets = {str(bucket.get("name")): str(bucket["id"]) for bucket in allowed.get("buckets") or ()}
        if self._name in buckets:
            return buckets[self._name]
        if buckets:
            names = ", ".join(sorted(buckets))
            fix = f"use a key for this bucket (now: {names})"
            raise StoreRefused("bucket", "the key is for another bucket", where=self.url, fix=fix)
        account = self._session.account_info.get_account_id()
        found = self._session.list_buckets(account, bucket_name=self._name)["buckets"]
        if not found:
            raise _no_bucket(self.url)
        return str(found[0]["bucketId"])

    def _put(self, key: str, source: Source, hashes: Mapping[str, str]) -> None:
        body, sha1 = BytesIO(source) if isinstance(source, bytes) else source, hashes["sha1"]

        def send() -> Any:
            body.seek(0)
            return self._session.upload_file(self._id, key, len(source), "application/octet-stream", sha1, {}, body)

        answer = self._call(send)
        stored = str(answer.get("contentSha1")).removeprefix("unverified:"), answer.get("contentLength")
        if stored != (sha1, len(source)):
            raise IntegrityError("the store holds different bytes than were sent", where=self.where(key))

    def _open(self, key: str, span: tuple[int, int] | None) -> Reply:
        def ask() -> Reply:
            url = self._session.get_download_url_by_name(self._name, key)
            with self._session.download_file_from_url(url, range_=span) as reply:
                return reply  # type: ignore[no-any-return]

        return self._call(ask)

    def _pages(self, prefix: str, *, versions: bool) -> Iterator[ObjectInfo]:
        name = number = None
        while True:

            def ask(name: Any = name, number: Any = number) -> tuple[list[ObjectInfo], Any, Any]:
                if versions:
                    page = self._session.list_file_versions(self._id, name, number, PAGE, prefix)
                else:
                    page = self._session.list_file_names(self._id, name, PAGE, prefix)
                found = [_entry(item) for item in page["files"] if versions or item["action"] == "upload"]
                return found, page["nextFileName"], page.get("nextFileId")

            found, following, number = self._persist(partial(self._call, ask))
            yield from found
            if not following:
                return
            if name is not None and (str(following) < str(name) or (not versions and following == name)):
                raise IntegrityError("the store's listing does not end", where=self.where(prefix))
            name = following

    def _delete(self, key: str, version: str) -> None:
        try:
            self._call(lambda: self._session.delete_file_version(version, key))
        except ObjectMissing:
            return

    def _check_key(self, prefix: str) -> None:
        self._persist(lambda: self._call(lambda: None))
        allowed = self._session.account_info.get_allowed()
        has = set(allowed["capabilities"])
        missing = [f"{name} ({purpose})" for name, purpose in NEEDED.items() if name not in has]
        if missing:
            raise StoreRefused("permission", f"the key lacks {', '.join(missing)}", where=self.url, fix=_PERMISSION_FIX)
        only = allowed.get("namePrefix") or ""
        if not prefix.startswith(only):
            fix = "create a key for this prefix, or correct [sync] store"
            raise StoreRefused("permission", f"the key is for names below {only!r}", where=self.where(prefix), fix=fix)

    def _find_hash(self, key: str, body: bytes) -> str:
        return "sha1" if self._refuses(key, body, "sha1") else ""


def _entry(item: Mapping[str, Any]) -> ObjectInfo:
    wall = int(item.get("uploadTimestamp") or 0) / 1000
    sha1 = str(item.get("contentSha1") or "")  # "none" of a large file, "unverified:..." of what B2 did not compare
    shown = f"sha1:{sha1}" if _SHA1.fullmatch(sha1) else ""
    return ObjectInfo(str(item["fileName"]), int(item.get("contentLength") or 0), wall, str(item["fileId"]), shown)
