"""One bucket over HTTP: signs each request, retries it while that can help, and translates the last error.

What an answer corrects is corrected once and kept: the store's clock, the bucket's region, expired credentials.
"""

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TypeVar
from urllib.parse import urlsplit

from podwatch.domain.errors import IntegrityError, PodwatchError, RemoteError
from podwatch.stores.base import TOTAL
from podwatch.stores.http_transfer import Answer, Body, Bytes, Outgoing, Retry, Wire, WireBroken, WireTimeout
from podwatch.stores.part_reader import PartStream
from podwatch.stores.s3_credentials import S3Credentials
from podwatch.stores.s3_errors import Kind, Refused, S3Place, explain, kind_of
from podwatch.stores.s3_sign import EMPTY_SHA256, UNSIGNED, quoted_path, quoted_query, signed
from podwatch.stores.s3_xml import problem

CONNECT_SECONDS, ANSWER_SECONDS = 30.0, 60.0
"""As for B2: a block that is not accepted, or an answer that does not come, ends the try."""
SEND_DAMAGED = 4
"""How often a body that arrives damaged is sent; what still fails has its cause on this machine."""
SIGNABLE_SKEW = 840.0
"""Seconds of clock difference from which a refusal is taken for a refused time (S3 allows 15 minutes)."""
CORRECTED = 30.0
"""A smaller difference is not corrected: the answer's date has whole seconds, and the answer was under way."""
DEFAULT_REGION = "us-east-1"
_ONCE = frozenset({Kind.SKEWED, Kind.REGION, Kind.EXPIRED})

R = TypeVar("R", Answer, Body)


@dataclass(frozen=True, slots=True)
class Call:
    """``price``: the class that it is counted in (base.Calls); ``action``: the permission that it needs."""

    method: str
    action: str
    key: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    price: str = "C"
    resend: bool = True
    """Whether a body that arrives damaged is sent again at once."""


class S3Session:
    """Thread-safe. ``url`` is the store as the operator wrote it."""

    def __init__(
        self, bucket: str, credentials: S3Credentials, connections: int, retry: Retry, sleep: Callable[[float], None]
    ) -> None:
        self.bucket, self.url = bucket, f"s3://{bucket}"
        self._credentials, self._retry, self._sleep = credentials, retry, sleep
        self._region = credentials.region or DEFAULT_REGION
        self._wire = Wire(connections, ca=credentials.ca, proxies=True)
        self._renewing = threading.Lock()
        self.skew: float | None = None
        """Seconds that this machine is ahead of the store; None before the first answer with a date."""

    # -- where ------------------------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """The address without the bucket."""
        if self._credentials.endpoint:
            return self._credentials.endpoint
        return f"https://s3.{self._region}.amazonaws.com{'.cn' if self._region.startswith('cn-') else ''}"

    @property
    def region(self) -> str:
        return self._region

    def recall(self, endpoint: str, region: str) -> None:
        """The region that the store named to an earlier process at this endpoint: saves a redirect."""
        if not self._credentials.region and self._credentials.endpoint in ("", endpoint):
            self._learn_region(region)

    @property
    def secure(self) -> bool:
        return self.endpoint.startswith("https://")

    def _place(self) -> S3Place:
        return S3Place(self.url, self.bucket, self.endpoint)

    def _virtual(self, host: str) -> bool:
        """Whether the bucket is part of the host name: AWS wants that; every other service with a name of its own
        understands the path, unless its documentation says otherwise ([sync] s3_addressing)."""
        if self._credentials.addressing in ("path", "virtual"):
            return self._credentials.addressing == "virtual"
        aws = host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
        return aws and not (self.secure and "." in self.bucket)  # a dot does not match the certificate's wildcard

    def store_wall(self) -> float:
        """The store's clock, as far as its last answer showed it."""
        return time.time() - (self.skew or 0.0)

    # -- requests ---------------------------------------------------------------------------------------------------

    def send(self, call: Call, body: bytes | PartStream | None = None, *, payload: str = "") -> Answer:
        """One request with its whole answer. ``payload``: SHA-256 of the body in hex, where the caller knows it.

        Raises Refused with the meaning of the answer, RemoteError where there is none, and exceptions of reading the
        body unchanged. Refused has ``repeated`` set if an earlier try ended without an answer.
        """

        def perform() -> Answer:
            if isinstance(body, PartStream):
                body.seek(0)
                outgoing: Outgoing | None = body
                digest = payload or UNSIGNED
            else:
                outgoing = None if body is None else Bytes(body)
                digest = payload or (hashlib.sha256(body).hexdigest() if body else EMPTY_SHA256)
            url, headers = self._signed(call, digest)
            headers["Content-Length"] = str(len(outgoing)) if outgoing is not None else "0"
            if outgoing is None and call.method in ("GET", "HEAD", "DELETE"):
                del headers["Content-Length"]
            try:
                return self._wire.send(call.method, url, headers, outgoing, (CONNECT_SECONDS, ANSWER_SECONDS))
            except WireBroken:
                if outgoing is not None and outgoing.failure is not None:
                    raise outgoing.failure from None
                raise

        return self._until_done(call, perform)

    def open(self, call: Call) -> Body:
        """A GET whose body the caller reads and closes. Raises as ``send``."""

        def perform() -> Body:
            url, headers = self._signed(call, EMPTY_SHA256)
            return self._wire.get(url, headers, (CONNECT_SECONDS, ANSWER_SECONDS / 2))

        return self._until_done(call, perform)

    def _signed(self, call: Call, digest: str) -> tuple[str, dict[str, str]]:
        credentials = self._current()
        base = urlsplit(self.endpoint)
        virtual = self._virtual(base.hostname or "")
        path = quoted_path("" if virtual else self.bucket, call.key)
        host = f"{self.bucket}.{base.netloc}" if virtual else base.netloc
        query = quoted_query(call.query.items())
        corrected = self.skew is not None and abs(self.skew) > CORRECTED
        headers = signed(
            call.method,
            path,
            query,
            {"Host": host, **call.headers},
            payload=digest,
            access_key=credentials.access_key,
            secret=credentials.secret,
            token=credentials.token,
            region=self._region,
            wall=self.store_wall() if corrected else time.time(),
        )
        del headers["Host"]  # the wire sends it
        headers["User-Agent"] = "podwatch"
        return f"{base.scheme}://{host}{path}{'?' + query if query else ''}", headers

    def _until_done(self, call: Call, perform: Callable[[], R]) -> R:
        attempt, damaged, unclear = 0, 0, False
        corrected: set[Kind] = set()
        while True:
            TOTAL.add({call.price: 1})
            wait = 0.0
            try:
                answer = perform()
                self._note(answer)
                failure = self._failure(call, answer)
                if failure is None:
                    return answer
                wait = failure.wait_seconds
                unclear = unclear or answer.status_code >= 500
            except WireBroken as error:
                failure, unclear = self.broken(error), True
            except json.JSONDecodeError as error:  # a metadata service that answers something else
                raise RemoteError("credentials cannot be read", where=self.endpoint) from error
            failure.repeated = unclear
            if failure.kind in _ONCE and failure.kind not in corrected and self._correct(failure.kind):
                corrected.add(failure.kind)
                continue
            if failure.kind is Kind.DAMAGED:
                damaged += 1
                if call.resend and damaged < SEND_DAMAGED:
                    continue  # a bit flipped in transit: read and send again at once
                raise failure
            attempt += 1
            if failure.kind is not Kind.AGAIN or attempt >= self._retry.attempts:
                raise failure
            self._sleep(self._retry.pause(attempt, wait or None))

    def _note(self, answer: Answer | Body) -> None:
        with suppress(KeyError, TypeError, ValueError):  # a proxy's answer may carry no date, or no valid one
            self.skew = time.time() - parsedate_to_datetime(answer.headers["Date"]).timestamp()

    def _failure(self, call: Call, answer: Answer | Body) -> Refused | None:
        """None for success. Also an error that comes with status 200, which completing and copying can have."""
        status = answer.status_code
        if status in (200, 206) and _foreign(call, answer):
            answer.close()
            return self._in_its_place(Kind.AGAIN)
        if status in (200, 206) and isinstance(answer, Body):
            return None
        found = problem(answer.content)
        if 200 <= status < 300 and found is None:
            return None
        if status in (302, 303, 308, 404) and found is None and not _named(answer):
            if status != 404 or call.method == "GET":
                return self._in_its_place(Kind.AGAIN)
            if call.method == "HEAD":
                return self._in_its_place(Kind.UNSUPPORTED)  # it has no text: a GET shows who answers
        if 200 <= status < 300:
            status = 400  # where the code says no more than that
        skewed = self.skew is not None and abs(self.skew) > SIGNABLE_SKEW
        kind = kind_of(status, found, skewed=skewed)
        failure = explain(kind, status, found, self._place(), key=call.key, action=call.action)
        region = answer.headers.get("x-amz-bucket-region") or (found.region if found is not None else "")
        if kind is Kind.REGION:
            failure.region = str(region)
            self._learn_region(failure.region)
        with suppress(TypeError, ValueError):
            failure.wait_seconds = float(answer.headers.get("Retry-After") or "")
        return failure

    def _in_its_place(self, kind: Kind) -> Refused:
        what = "something between this machine and the store answers in its place"
        fix = "check proxies and the network; podwatch tries again"
        return Refused(kind, what, where=self.endpoint, fix=fix, transient=kind is Kind.AGAIN)

    def broken(self, error: WireBroken) -> Refused:
        if isinstance(error, WireTimeout):
            what, fix = "the store does not answer in time", "podwatch tries again"
        elif "resolve" in str(error):
            what, fix = "the store's host name cannot be resolved", "check DNS and the network; podwatch tries again"
        elif "certificate" in str(error).lower():
            what, fix = f"the store's certificate is refused: {error}", "set AWS_CA_BUNDLE where it has its own"
        else:
            what, fix = "store cannot be reached", "check the network; podwatch retries"
        return Refused(Kind.AGAIN, what, where=self.endpoint, fix=fix, transient=True)

    # -- corrections ------------------------------------------------------------------------------------------------

    def _correct(self, kind: Kind) -> bool:
        """Whether another try has a chance."""
        if kind is Kind.EXPIRED:
            with suppress(PodwatchError):  # another program can be writing the file at this moment
                return self._renew(self._credentials)
            return False
        return True  # the clock and the region have been noted with the answer

    def _learn_region(self, region: str) -> None:
        if region and region != self._region:
            self._region = region

    def _current(self) -> S3Credentials:
        found = self._credentials
        if found.stale(self.store_wall()):
            with suppress(PodwatchError):  # the present ones hold for some minutes yet
                self._renew(found)
        return self._credentials

    def _renew(self, old: S3Credentials) -> bool:
        with self._renewing:
            if self._credentials is not old:
                return True  # another thread has done it
            if not old.renew:
                return False
            self._credentials = old.renewed()
            return True

    def close(self) -> None:
        self._wire.close()


def _foreign(call: Call, answer: Answer | Body) -> bool:
    """Whether a success is not the store's but a proxy's page: S3 names the object's ETag, lists in XML, and deletes
    without a word. What POST is answered is judged where it is parsed."""
    if call.method == "POST":
        return False
    if isinstance(answer, Answer) and call.method == "GET":
        return b"List" not in answer.content[:4096] and b"<Error" not in answer.content[:4096]
    if call.method == "DELETE" and isinstance(answer, Answer):
        return bool(answer.content) and not _named(answer) and b"<Error" not in answer.content[:4096]
    return not _named(answer) and "x-amz-copy-source" not in call.headers


def _named(answer: Answer | Body) -> bool:
    """Whether an answer shows that it is the store's."""
    return "ETag" in answer.headers or any(name.lower().startswith("x-amz-") for name in answer.headers)


def base64_of(hexadecimal: str) -> str:
    """As S3's headers have hashes."""
    return base64.b64encode(bytes.fromhex(hexadecimal)).decode()


def hex_of(text: str) -> str:
    """The reverse; empty for what is not base64."""
    try:
        return base64.b64decode(text, validate=True).hex()
    except ValueError:
        return ""


def not_intact(where: str) -> IntegrityError:
    return IntegrityError("the store holds different bytes than were sent", where=where)
