"""S3 and what speaks its protocol: boto3 finds credentials, endpoint and region and signs; our transport sends.

Each request is a presigned URL: against ``put_object`` of the library that is twice as fast at two thirds of the CPU
(benchmarks/s3_put.py), and answers are bounded. They are parsed by botocore's own parser.
"""

import base64
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote_plus, urlsplit

import boto3
from botocore import exceptions as boto_errors
from botocore.config import Config
from botocore.parsers import ResponseParserError, create_parser

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.store.objects.base import HttpObjects, ObjectInfo, Retry, Source, persist
from podwatch.store.objects.errors import (
    ObjectMissing,
    StoreOutage,
    StoreRefused,
    damaged_in_transit,
    not_the_store,
)
from podwatch.store.objects.transport import Reply, Transport, retry_after

EXPIRES = 6 * 3600
"""Seconds that a signature holds: of a clock that is behind by less the store takes it."""
SIGNABLE_SKEW = 840.0
"""Seconds of clock difference from which a refusal is taken for a refused time (S3 allows 15 minutes)."""
_CREDENTIALS_FIX = "check the credentials, and the endpoint that they belong to ([sync] s3_endpoint)"
_HEADERS = {"sha256": ("ChecksumSHA256", "x-amz-checksum-sha256"), "md5": ("ContentMD5", "Content-MD5")}
_ROOTS = {"list_objects_v2": b"<ListBucketResult", "list_object_versions": b"<ListVersionsResult"}
_PERMISSIONS = {
    "put_object": "s3:PutObject", "get_object": "s3:GetObject", "list_objects_v2": "s3:ListBucket",
    "list_object_versions": "s3:ListBucketVersions", "delete_object": "s3:DeleteObject(Version)",
}  # fmt: skip
_AGAIN = frozenset(
    ("SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "IncompleteBody", "TooManyRequests",
     "OperationAborted", "RequestLimitExceeded", "Throttling", "ThrottlingException", "Busy", "ServerBusy")
)  # fmt: skip
_DAMAGED = frozenset(("BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "InvalidDigest"))
_EXPIRED = frozenset(("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"))
_REGION = frozenset(("PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "IllegalLocation"))
_KEY = frozenset(("InvalidAccessKeyId", "InvalidAccessKey", "InvalidClientTokenId", "InvalidToken", "Unauthorized"))


@dataclass(frozen=True, slots=True)
class S3Access:
    """``access_key`` empty: boto3 looks for credentials as AWS's tools do (variables, the profile, SSO, web identity,
    the container, the machine), and renews temporary ones. ``ca``: a file of certificates, empty for the usual ones."""

    access_key: str = ""
    secret: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    endpoint: str = ""
    region: str = ""
    profile: str = ""
    addressing: str = "auto"
    ca: str = ""


class S3Objects(HttpObjects):
    mark = "ETag"

    def __init__(self, bucket: str, access: S3Access, *, connections: int = 8, checksum: str = "sha256",
                 retry: Retry | None = None, transport: Transport | None = None) -> None:  # fmt: skip
        """``checksum``: the hash that this store was seen to compare (``Checked.verifies``)."""
        super().__init__(transport or Transport(connections, ca=access.ca), retry or Retry())
        self.url, self._bucket, self._access = f"s3://{bucket}", bucket, access
        self._checksum = checksum
        self._parser = create_parser("rest-xml")
        self._making = threading.Lock()
        self._client: Any = None
        self._corrected = False

    @property
    def hashes(self) -> tuple[str, ...]:
        return ("sha256", "md5") if self._checksum == "md5" else ("sha256",)

    # -- requests ---------------------------------------------------------------------------------------------------

    def _made(self) -> Any:
        """The client, made at the first use: it may ask the machine or an SSO service for credentials."""
        with self._making:
            if self._client is None:
                access = self._access
                session = boto3.Session(
                    access.access_key or None, access.secret or None, access.token or None,
                    region_name=access.region or None, profile_name=access.profile or None,
                )  # fmt: skip
                style = {} if access.addressing == "auto" else {"addressing_style": access.addressing}
                if access.addressing == "auto" and access.endpoint:
                    style = {"addressing_style": "path"}  # every service with an address of its own understands it
                config = Config(
                    signature_version="s3v4", s3=style, request_checksum_calculation="when_required",
                    response_checksum_validation="when_required", connect_timeout=10, read_timeout=30,
                    retries={"total_max_attempts": 2},
                )  # fmt: skip
                region = access.region or session.region_name or "us-east-1"
                self._client = session.client(
                    "s3", endpoint_url=access.endpoint or None, region_name=region, config=config
                )
            return self._client

    def _send(
        self,
        operation: str,
        price: str,
        parameters: Mapping[str, str],
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:  # fmt: skip
        """One request. Where the answer names the bucket's region, once more with that."""
        try:
            client = self._made()
            url = client.generate_presigned_url(
                operation, Params={"Bucket": self._bucket, **parameters}, ExpiresIn=EXPIRES,
            )  # fmt: skip
        except (boto_errors.NoCredentialsError, boto_errors.PartialCredentialsError, boto_errors.ProfileNotFound,
                boto_errors.TokenRetrievalError, boto_errors.SSOError) as error:  # fmt: skip
            what = f"the store has no usable credentials ({error})"
            raise StoreRefused("key", what, where=self.url, fix=_CREDENTIALS_FIX) from None
        except boto_errors.CredentialRetrievalError as error:
            raise StoreOutage(f"the credentials cannot be read ({error})", where=self.url) from None
        except (boto_errors.BotoCoreError, ValueError) as error:
            fix = "correct the [sync] s3_ settings"
            raise StoreRefused("request", f"no request can be made: {error}", where=self.url, fix=fix) from None
        method = {"put": "PUT", "delete": "DELETE"}.get(operation.partition("_")[0], "GET")
        self.calls[price] += 1
        reply = self._transport.send(method, url, headers or {}, body)
        if reply.status_code in (200, 204, 206):
            return reply
        problem, region = self._explain(reply, operation)
        if region and not self._corrected and not self._access.region:
            with self._making:
                self._access, self._client, self._corrected = replace(self._access, region=region), None, True
            if hasattr(body, "seek"):
                body.seek(0)
            return self._send(operation, price, parameters, body, headers)
        raise problem

    def _explain(self, reply: Reply, operation: str) -> tuple[RemoteError, str]:
        """What a refusal means, and the region that it names. The XML code decides before the status, because servers
        agree on codes more than on statuses; what is no S3 makes nothing absent."""
        status, url = reply.status_code, self.url
        body = reply.document(1 << 20)
        error: dict[str, str] = {}
        if b"<Error" in body[:4096]:
            error = self._parsed(operation, reply.status_code, reply.headers, body).get("Error") or {}
        code, message = str(error.get("Code") or ""), str(error.get("Message") or "")
        text = f"{code or status}: {message[:200]}" if message else code or f"HTTP {status}"
        region = reply.headers.get("x-amz-bucket-region") or (error.get("Region") if code in _REGION else "") or ""
        wait = retry_after(reply.headers)

        def refused(kind: str, what: str, fix: str) -> tuple[RemoteError, str]:
            return StoreRefused(kind, what, where=url, fix=fix), ""

        if code in _DAMAGED:
            return damaged_in_transit(url), ""
        if code in _AGAIN or status in (408, 409, 429) or (status >= 500 and status not in (501, 507)):
            return StoreOutage(f"the store is busy or broken ({text})", where=url, wait=wait), ""
        if code in _EXPIRED:
            return StoreOutage("the temporary credentials have expired", where=url, fix="renew them"), ""
        if code in _REGION or (status in (301, 307) and region):
            return StoreRefused("region", f"the bucket is in another region ({text})", where=url,
                                fix="set [sync] s3_region"), str(region)  # fmt: skip
        if code in ("NoSuchKey", "NoSuchVersion"):
            return ObjectMissing(url), ""
        if code == "NoSuchBucket":
            return refused("bucket", "the bucket does not exist", "create it, or correct [sync] store")
        if status == 507 or any(word in code for word in ("Quota", "CapExceeded", "StorageFull", "TransactionCap")):
            return refused("cap", f"the account's space or quota is used up ({text})", "raise it, or remove old runs")
        if code == "RequestTimeTooSkewed" or (status in (400, 403) and abs(self.skew or 0.0) > SIGNABLE_SKEW):
            ahead = f"{abs(self.skew or 0.0):.0f} s {'ahead' if (self.skew or 0.0) > 0 else 'behind'}"
            return refused("clock", f"this machine's clock is wrong ({ahead}), which the store refuses",
                           "set the clock (chronyd, ntpdate)")  # fmt: skip
        if code in _KEY:
            return refused("key", f"the store does not know the access key ({text})", _CREDENTIALS_FIX)
        if code == "SignatureDoesNotMatch":
            return refused("key", "the store refuses the signature: the secret key is wrong",
                           "check AWS_SECRET_ACCESS_KEY, and [sync] s3_region where the store has its own")  # fmt: skip
        if code == "InvalidObjectState":
            return refused("request", "the object is in the store's archive (Glacier) and cannot be read",
                           "restore it there, and exclude podwatch's prefix from the rule that archives")  # fmt: skip
        if code in ("NotImplemented", "MethodNotAllowed") or status in (405, 501):
            return refused("unsupported", f"the store does not support this request ({text})", "report it")
        if code == "AccessDenied":
            return refused("permission", f"the credentials lack {_PERMISSIONS[operation]} here ({text})",
                           "extend the policy (docs/s3.md has one)")  # fmt: skip
        if not code:
            return not_the_store(url), ""
        return refused("request", f"the store refused a request ({text})", "correct what the store's answer names")

    def _parsed(self, operation: str, status: int, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
        """Raises StoreOutage for what is no answer of S3, among it what declares entities: those can expand."""
        if b"<!DOCTYPE" in body or b"<!ENTITY" in body:
            raise not_the_store(self.url)
        name = self._made().meta.method_to_api_mapping[operation]
        shape = self._made().meta.service_model.operation_model(name).output_shape
        try:
            parsed: dict[str, Any] = self._parser.parse(
                {"status_code": status, "headers": headers, "body": body, "context": {}}, shape
            )
        except (ResponseParserError, ValueError, KeyError, TypeError):
            raise not_the_store(self.url) from None
        return parsed

    # -- one request of every kind ----------------------------------------------------------------------------------

    def _put(self, key: str, source: Source, hashes: Mapping[str, str]) -> None:
        headers, parameters = {"Content-Length": str(len(source))}, {}
        if self._checksum in hashes:
            parameter, header = _HEADERS[self._checksum]
            value = base64.b64encode(bytes.fromhex(hashes[self._checksum])).decode()
            headers[header] = parameters[parameter] = value
        body: Any = source if len(source) else b""
        if not isinstance(body, bytes):
            body.seek(0)
        reply = self._send("put_object", "A", {"Key": key, **parameters}, body, headers)
        if b"<Error" in reply.document() or "ETag" not in reply.headers:
            raise not_the_store(self.url)

    def _open(self, key: str, span: tuple[int, int | None] | None) -> Reply:
        headers = {}
        if span is not None:
            headers["Range"] = f"bytes={span[0]}-{'' if span[1] is None else span[0] + span[1] - 1}"
        return self._send("get_object", "B", {"Key": key}, None, headers)

    def _pages(self, prefix: str, *, versions: bool) -> Iterator[ObjectInfo]:
        operation = "list_object_versions" if versions else "list_objects_v2"
        more: dict[str, str] = {}
        while True:

            def ask(more: Mapping[str, str] = more) -> tuple[list[ObjectInfo], dict[str, str]]:
                reply = self._send(operation, "C", {"Prefix": prefix, "EncodingType": "url", **more})
                return self._page(operation, reply, prefix)

            found, following = persist(ask, self._retry)
            yield from found
            if not following:
                return
            if following == more:
                raise IntegrityError("the store's listing does not end", where=self.where(prefix))
            more = following

    def _page(self, operation: str, reply: Reply, prefix: str) -> tuple[list[ObjectInfo], dict[str, str]]:
        body = reply.document()
        if _ROOTS[operation] not in body[:1024]:
            if operation == "list_object_versions" and _ROOTS["list_objects_v2"] in body[:1024]:
                raise StoreRefused("unsupported", "the store lists no versions", where=self.url, fix="")
            raise not_the_store(self.url)
        page = self._parsed(operation, 200, reply.headers, body)
        encoded = page.get("EncodingType") == "url"

        def plain(text: str) -> str:
            return unquote_plus(text) if encoded else text

        rows = page.get("Contents") or [*(page.get("Versions") or ()), *(page.get("DeleteMarkers") or ())]
        try:
            found = [
                ObjectInfo(plain(row["Key"]), int(row.get("Size") or 0), row["LastModified"].timestamp(),
                           str(row.get("VersionId") or row.get("ETag") or "").strip('"'))
                for row in rows
            ]  # fmt: skip
        except (KeyError, AttributeError, ValueError):
            raise not_the_store(self.url) from None
        found.sort(key=lambda item: (item.key, -item.wall))  # delete markers are listed apart
        if not page.get("IsTruncated"):
            return found, {}
        names = (
            {"NextContinuationToken": "ContinuationToken"} if operation == "list_objects_v2"
            else {"NextKeyMarker": "KeyMarker", "NextVersionIdMarker": "VersionIdMarker"}
        )  # fmt: skip
        following = {to: str(page[name]) for name, to in names.items() if page.get(name)}
        if "KeyMarker" in following:
            following["KeyMarker"] = plain(following["KeyMarker"])
        if not following:
            raise IntegrityError("the store's listing breaks off: it names no next page", where=self.where(prefix))
        return found, following

    def _delete(self, key: str, version: str) -> None:
        more = {"VersionId": version} if version else {}
        try:
            self._send("delete_object", "A", {"Key": key, **more}).document()
        except ObjectMissing:
            return

    def _find_hash(self, key: str, body: bytes) -> str:
        """An echoed checksum proves nothing: only one whose wrong value is refused counts. Some servers refuse the
        header itself."""
        for name in _HEADERS:
            self._checksum = name
            try:
                self.put(key, body)
                if self._refuses(key, body, name):
                    return name
            except StoreRefused as error:
                if error.kind not in ("request", "unsupported"):
                    raise
        self._checksum = ""
        return ""

    @property
    def endpoint(self) -> str:
        """The host that requests go to, for messages."""
        return urlsplit(str(self._made().meta.endpoint_url)).netloc
