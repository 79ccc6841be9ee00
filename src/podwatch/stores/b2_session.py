"""B2 through b2sdk: its HTTP with one try per call, short timeouts, large blocks and kept connections; and one bucket
with podwatch's own retries.
"""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import requests
from b2sdk._internal.b2http import HttpCallback, NotDecompressingHTTPAdapter, ResponseContextManager
from b2sdk.v3 import B2Http, B2HttpApiConfig, B2Session, InMemoryAccountInfo
from b2sdk.v3 import exception as b2error
from requests.exceptions import ChunkedEncodingError, ContentDecodingError
from requests.utils import select_proxy, should_bypass_proxies

from podwatch.domain.errors import RemoteError
from podwatch.stores.b2_errors import B2Place, UploadTokenUsedConcurrently, is_damaged, translate
from podwatch.stores.base import TOTAL, CannotDelete
from podwatch.stores.credentials import Credentials
from podwatch.stores.http_transfer import BLOCK, Retry, Wire, WireBroken, WireTimeout
from podwatch.stores.part_reader import PartStream

# Not public: the SDK replaces adapters otherwise, and the hook is what its own configuration would install.


# Backblaze's price classes: A is free; B and C are free up to 2,500 a day each, then $0.004 per 10,000 of B and per
# 1,000 of C.
_FREE = frozenset(
    {
        "b2_upload_file", "b2_upload_part", "b2_get_upload_url", "b2_get_upload_part_url", "b2_start_large_file",
        "b2_finish_large_file", "b2_cancel_large_file", "b2_hide_file", "b2_delete_file_version",
    }
)  # fmt: skip
_READ = frozenset({"b2_download_file_by_id", "b2_download_file_by_name", "b2_get_file_info"})


def class_of(url: str) -> str:
    """A, B or C. An unknown call counts as the most expensive class."""
    path = url.partition("://")[2].partition("/")[2].partition("?")[0].split("/")
    if path[0] == "file":
        return "B"
    name = next((p for p in path if p.startswith("b2_")), "")
    return "A" if name in _FREE else "B" if name in _READ else "C"


POOL_SPARE = 2
"""Kept connections beside those that send: calls without a body."""


def reached_directly(url: str) -> bool:
    """By the rules of the library for HTTPS_PROXY, HTTP_PROXY and NO_PROXY."""
    return bool(should_bypass_proxies(url, None) or not select_proxy(url, getproxies()))


class _Adapter(NotDecompressingHTTPAdapter):  # type: ignore[misc]
    """Sends in blocks of 1 MiB: the library's 16 KiB halve the speed through hand-offs of the interpreter's lock."""

    def init_poolmanager(self, *positional: Any, **options: Any) -> None:
        super().init_poolmanager(*positional, **options, blocksize=BLOCK)


class _Http(B2Http):  # type: ignore[misc]
    """One try per call, and timeouts short enough for a watchdog: the SDK's own is 1200 s for JSON calls. They also
    find a stalled connection: the first limits a block that is not accepted, the others an answer that does not come.
    """

    CONNECTION_TIMEOUT = 30
    TIMEOUT = 60
    TIMEOUT_FOR_UPLOAD = 60
    TIMEOUT_FOR_COPY = 60
    TIMEOUT_FOR_DOWNLOAD = 30
    """Seconds without any byte: a store that reads from its disks answers within a few seconds."""

    wire: Wire
    direct: dict[str, bool]

    @classmethod
    def _translate_errors(cls, fcn: Callable[[], Any], post_params: Any = None) -> Any:
        """An answer that ends in the middle is a broken connection; the SDK would not notice, and not retry."""

        def call() -> Any:
            try:
                answer = fcn()
                if answer.status_code not in (200, 206):
                    _ = answer.content  # read the error text here, where a break is handled, not in the SDK
            except WireTimeout as error:
                raise requests.Timeout(str(error)) from error
            except WireBroken as error:
                raise requests.ConnectionError(str(error)) from error
            except (ChunkedEncodingError, ContentDecodingError) as error:
                raise requests.ConnectionError(f"the answer was cut off: {error}") from error
            return answer

        return super()._translate_errors(call, post_params)

    def get_content(self, url: str, headers: Any, try_count: int = 1) -> Any:
        asked = {**headers, "User-Agent": self.user_agent}
        if self._direct(url):
            TOTAL.add({class_of(url): 1})
            return ResponseContextManager(self._translate_errors(lambda: self._get(url, asked)))
        return ResponseContextManager(
            self.request("GET", url, headers, stream=True, _timeout=self.TIMEOUT_FOR_DOWNLOAD)
        )

    def _direct(self, url: str) -> bool:
        """Whether ``url`` is reached without a proxy from the environment; through one, the library sends."""
        parts = urlsplit(url)
        if parts.netloc not in self.direct:
            self.direct[parts.netloc] = reached_directly(url)
        return self.direct[parts.netloc]

    def _get(self, url: str, headers: dict[str, str]) -> Any:
        self._run_pre_request_hooks("GET", url, headers)
        answer = self.wire.get(url, headers, (self.CONNECTION_TIMEOUT, self.TIMEOUT_FOR_DOWNLOAD))
        self._run_post_request_hooks("GET", url, headers, answer)
        return answer

    def request(self, method: Any, url: str, headers: Any, data: Any = None, *_: Any, **options: Any) -> Any:
        TOTAL.add({class_of(url): 1})
        if isinstance(data, PartStream) and self._direct(url):
            return self._translate_errors(lambda: self._send(url, {**headers, "User-Agent": self.user_agent}, data))
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

    def _send(self, url: str, headers: dict[str, str], body: PartStream) -> Any:
        body.seek(0)
        self._run_pre_request_hooks("POST", url, headers)
        answer = self.wire.post(url, headers, body, (self.CONNECTION_TIMEOUT, self.TIMEOUT_FOR_UPLOAD))
        self._run_post_request_hooks("POST", url, headers, answer)
        return answer


class Clocks(HttpCallback):  # type: ignore[misc]
    """This machine's clock offset from the store's, by the last answer. The SDK's own check refuses every request when
    they differ by ten minutes; B2's native API needs no clock, and a container cannot set one."""

    def __init__(self) -> None:
        self.skew: float | None = None
        """Seconds that this machine is ahead (negative: behind); None before the first answer with a date."""

    def post_request(self, method: str, url: str, headers: Any, response: Any) -> None:
        with suppress(KeyError, TypeError, ValueError):  # a proxy's answer may carry no date, or no valid one
            self.skew = (datetime.now(UTC) - parsedate_to_datetime(response.headers["Date"])).total_seconds()


class _Session(B2Session):  # type: ignore[misc]
    B2HTTP_CLASS = _Http


def open_session(connections: int, clocks: Clocks | None = None) -> B2Session:
    """Not authorized yet. Its account info is in memory: the SDK's default is a database in the home directory, with
    the key in it. Connections beyond the kept number would each be opened again."""
    config = B2HttpApiConfig(user_agent_append="podwatch", install_clock_skew_hook=False)
    session = _Session(InMemoryAccountInfo(), api_config=config)
    http = session.raw_api.b2_http
    http.add_callback(clocks or Clocks())
    http.wire = Wire(connections + POOL_SPARE)
    http.direct = {}
    http.session.adapters.clear()
    http.session.mount("", _Adapter(pool_maxsize=connections + POOL_SPARE))
    return session


# -- bucket ----------------------------------------------------------------------------------------------------------
# As one key sees it: authorizes at the first request, and retries each request while that can help.

T = TypeVar("T")
SEND_DAMAGED = 4
"""How often a body that arrives damaged is sent: b2sdk uses a new upload URL, thus another machine of the store, after
each refusal. What still fails has its cause on this machine, and the caller's longer pause is right."""


class Bucket:
    """``session`` is b2sdk's: one request per call, no retries of its own. Thread-safe."""

    def __init__(
        self,
        name: str,
        credentials: Credentials,
        connections: int,
        retry: Retry,
        sleep: Callable[[float], None],
    ) -> None:
        self.name, self.url = name, f"b2://{name}"
        self.clocks = Clocks()
        self.session = open_session(connections, self.clocks)
        self._place = B2Place(self.url, name, credentials.endpoint)
        self._credentials = credentials
        self._retry, self._sleep = retry, sleep
        self._id = ""
        self._opening = threading.Lock()

    def id(self, key: str = "") -> str:
        """Authorize once and find the bucket's id; a key for one bucket needs no list_buckets for that."""
        if self._id:
            return self._id
        with self._opening:
            return self._id or self._open(key)

    def _open(self, key: str) -> str:
        def authorize() -> None:
            self.session.authorize_account(
                self._credentials.endpoint or "production", self._credentials.key_id, self._credentials.key
            )

        self.call(key, "", authorize)
        allowed = self.session.account_info.get_allowed()
        for bucket in allowed.get("buckets") or ():
            if bucket.get("name") == self.name:
                self._id = str(bucket["id"])
                return self._id
        if allowed.get("buckets"):
            names = ", ".join(str(b.get("name")) for b in allowed["buckets"])
            raise RemoteError(
                "the key is for another bucket",
                where=self.url,
                fix=f"use a key for this bucket (now: {names})",
                transient=False,
            )
        account = self.session.account_info.get_account_id()
        answer = self.call(key, "listBuckets", lambda: self.session.list_buckets(account, bucket_name=self.name))
        if not answer["buckets"]:
            raise self._place.no_bucket()
        self._id = str(answer["buckets"][0]["bucketId"])
        return self._id

    def call(self, key: str, capability: str, call: Callable[[], T], *, upload: bool = False) -> T:
        """Perform one request, retry while that can help, and translate the final error into a RemoteError."""
        attempt = 0
        damaged = 0
        while True:
            try:
                return call()
            except b2error.B2Error as error:
                problem = translate(error, self._place, key=key, capability=capability)
                asked = getattr(error, "retry_after_seconds", None)
                again = problem.transient
                if upload and is_damaged(error):
                    damaged += 1
                    if damaged < SEND_DAMAGED:
                        continue  # a bit flipped in transit: read and send again at once, on a new upload URL
                    again = False
                if upload and isinstance(error, (b2error.InvalidAuthToken, UploadTokenUsedConcurrently)):
                    again = True  # the next try takes a new upload URL
                cause: Exception = error
            except json.JSONDecodeError as error:
                problem, again, asked, cause = self._place.no_json(), True, None, error
            attempt += 1
            if not again or attempt >= self._retry.attempts:
                raise problem from cause
            self._sleep(self._retry.pause(attempt, float(asked) if asked else None))

    def check(self) -> tuple[str, ...]:
        """Check the key's capabilities; returns warnings. Raises RemoteError for a missing one that is needed."""
        self.id()
        allowed = self.session.account_info.get_allowed()
        capabilities = set(allowed["capabilities"])
        for name, purpose in (("writeFiles", "upload"), ("readFiles", "verify and restore"), ("listFiles", "list")):
            if name not in capabilities:
                raise RemoteError(
                    f"the key lacks the capability {name}, needed to {purpose}",
                    where=self.url,
                    fix=f"create a key for this bucket with listFiles, readFiles, writeFiles (now: "
                    f"{', '.join(sorted(capabilities))})",
                    transient=False,
                )
        prefix = allowed.get("namePrefix") or ""
        self.call(prefix, "listFiles", lambda: self.session.list_file_names(self._id, None, 1, prefix))
        if "deleteFiles" not in capabilities:
            return (CannotDelete("the key cannot delete: old checkpoints stay in the store until you remove them"),)
        return ()

    def close(self) -> None:
        self.session.raw_api.b2_http.session.close()
        self.session.raw_api.b2_http.wire.close()
