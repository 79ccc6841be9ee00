"""One bucket as one key sees it: authorizes at the first request, and retries each request while that can help."""

import json
import threading
from collections.abc import Callable
from typing import TypeVar

from b2sdk.v3 import exception as b2error

from podwatch.domain.errors import RemoteError
from podwatch.stores.b2_errors import B2Place, UploadTokenUsedConcurrently, is_damaged, translate
from podwatch.stores.b2_http import Clocks, Retry, open_session
from podwatch.stores.credentials import Credentials

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
            return ("the key cannot delete: old checkpoints stay in the store until you remove them",)
        return ()

    def close(self) -> None:
        self.session.raw_api.b2_http.session.close()
        self.session.raw_api.b2_http.wire.close()
