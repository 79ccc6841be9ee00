"""S3 and what speaks its protocol: boto3 finds credentials, endpoint and region and signs; our transport sends.

Each request is a presigned URL: against ``put_object`` of the library that is twice as fast at two thirds of the CPU
(benchmarks/s3_put.py), and answers are bounded. They are parsed by botocore's own parser.
"""

import base64
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import boto3
import botocore.session
from botocore import exceptions as boto_errors
from botocore.config import Config
from botocore.parsers import ResponseParserError, create_parser

from podwatch.config.aws_files import check_aws_files, credential_program
from podwatch.domain.errors import IntegrityError, PermissionDenied, RemoteError
from podwatch.domain.secrets import register, register_temporary
from podwatch.store.objects.base import HttpObjects, ObjectInfo, Retry, Source
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
_CODES = {
    **dict.fromkeys(
        ("SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "IncompleteBody", "TooManyRequests",
         "OperationAborted", "RequestLimitExceeded", "Throttling", "ThrottlingException", "Busy", "ServerBusy"),
        "again",
    ),
    **dict.fromkeys(
        ("BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "InvalidDigest"), "damaged"
    ),
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"), "expired"),
    **dict.fromkeys(("PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed"), "region"),
    **dict.fromkeys(("NoSuchKey", "NoSuchVersion"), "absent"),
    **dict.fromkeys(
        ("InvalidAccessKeyId", "InvalidAccessKey", "InvalidClientTokenId", "InvalidToken", "Unauthorized"), "key"
    ),
    "NoSuchBucket": "bucket", "SignatureDoesNotMatch": "signature", "RequestTimeTooSkewed": "clock",
    "InvalidObjectState": "archived", "NotImplemented": "unsupported", "MethodNotAllowed": "unsupported",
    "AccessDenied": "permission",
}  # fmt: skip
_STATUS = {405: "unsupported", 408: "again", 409: "again", 429: "again", 501: "unsupported", 507: "cap"}
_REFUSALS = {
    "region": ("the bucket is in another region ({text})", "set [sync] s3_region"),
    "key": ("the store does not know the access key ({text})", _CREDENTIALS_FIX),
    "signature": (
        "the store refuses the signature: the secret key is wrong",
        "check AWS_SECRET_ACCESS_KEY, and [sync] s3_region where the store has its own",
    ),
    "bucket": ("the bucket does not exist", "create it, or correct [sync] store"),
    "cap": ("the account's space or quota is used up ({text})", "raise it, or remove old runs"),
    "clock": ("this machine's clock is wrong ({clock}), which the store refuses", "set the clock (chronyd, ntpdate)"),
    "archived": (
        "the object is in the store's archive (Glacier) and cannot be read",
        "restore it there, and exclude podwatch's prefix from the rule that archives",
    ),
    "unsupported": ("the store does not support this request ({text})", "report it, with the endpoint"),
    "permission": ("the credentials lack {action} here ({text})", "extend the policy (docs/s3.md has one)"),
    "request": ("the store refused a request ({text})", "correct what the store's answer names"),
}
"""What happened, and what to do, by what an answer means."""


def meaning(code: str, status: int, *, skewed: bool) -> str:
    """The XML code decides before the status, because servers agree on codes more than on statuses. Without a code it
    is no answer of S3, unless the status asks to wait: ``""``. ``skewed``: this machine's clock differs by more than
    signatures allow, which some servers answer with AccessDenied."""
    found = _CODES.get(code, "")
    if not found and any(word in code for word in ("Quota", "CapExceeded", "StorageFull", "TransactionCap")):
        return "cap"
    found = found or _STATUS.get(status, "again" if status >= 500 else "request" if code else "")
    return "clock" if skewed and found in ("permission", "request", "signature") else found


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


def _session(access: S3Access, transport: Transport) -> Any:
    """boto3's, which finds credentials: in files that nobody else can write, and by no program. Old places that AWS's
    own tools do not know are left out. Raises PermissionDenied."""
    core = botocore.session.Session(profile=access.profile or None)
    check_aws_files([Path(core.get_config_variable(n)).expanduser() for n in ("config_file", "credentials_file")])
    transport.trust(core.get_config_variable("ca_bundle") or "")
    if not access.access_key:
        name = access.profile or core.get_config_variable("profile") or "default"
        if program := credential_program(core.full_config.get("profiles", {}), name):
            what = f"the AWS profile {program!r} has a credential_process, and podwatch starts no program for a key"
            fix = "use SSO or a role, or put keys into it with `aws configure export-credentials`"
            raise PermissionDenied(what, where=core.get_config_variable("config_file"), fix=fix)
        resolver = core.get_component("credential_provider")
        for old in ("ec2-credentials-file", "boto-config"):
            resolver.remove(old)
    return boto3.Session(
        access.access_key or None, access.secret or None, access.token or None,
        region_name=access.region or None, botocore_session=core,
    )  # fmt: skip


def finds_credentials(access: S3Access) -> bool:
    """Whether there are any, in ``access`` or where AWS's tools look. Can ask the machine for some seconds. Raises
    PermissionDenied."""
    transport = Transport(1, ca=access.ca)
    try:
        return _session(access, transport).get_credentials() is not None
    finally:
        transport.close()


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
        self._session: Any = None
        self._hidden = ""
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
                session = self._session = _session(access, self._transport)
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

    def _hide_secrets(self) -> None:
        """What boto3 found, and finds again when temporary credentials end, is never shown either."""
        found = self._session.get_credentials()
        frozen = found.get_frozen_credentials() if found is not None else None
        if frozen is None or frozen.secret_key == self._hidden:
            return
        if frozen.token:
            register_temporary(frozen.secret_key, frozen.token, frozen.access_key)
        else:
            register(frozen.secret_key, frozen.access_key)
        self._hidden = frozen.secret_key

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
            self._hide_secrets()
            url = client.generate_presigned_url(
                operation, Params={"Bucket": self._bucket, **parameters}, ExpiresIn=EXPIRES,
            )  # fmt: skip
        except PermissionDenied as error:
            raise StoreRefused("key", error.what, where=error.where, fix=error.fix) from None
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
        """The error that a refusal means, and the region that it names."""
        body = reply.document(1 << 20)
        error: dict[str, Any] = {}
        if b"<Error" in body[:4096]:
            error = self._parsed(operation, reply.status_code, reply.headers, body).get("Error") or {}
        code, said, skew = str(error.get("Code") or ""), str(error.get("Message") or ""), self.skew or 0.0
        text = f"{code or reply.status_code}: {said[:200]}" if said else code or f"HTTP {reply.status_code}"
        region = str(reply.headers.get("x-amz-bucket-region") or error.get("Region") or "")
        kind = meaning(code, reply.status_code, skewed=abs(skew) > SIGNABLE_SKEW)
        if not kind and region and reply.status_code in (301, 307, 400):
            kind = "region"
        problem: RemoteError
        if kind == "damaged":
            problem = damaged_in_transit(self.url)
        elif kind == "again":
            wait = retry_after(reply.headers)
            problem = StoreOutage(f"the store is busy or broken ({text})", where=self.url, wait=wait)
        elif kind == "expired":
            problem = StoreOutage("the temporary credentials have expired", where=self.url, fix="renew them")
        elif kind == "absent":
            problem = ObjectMissing(self.url)
        elif kind:
            what, fix = _REFUSALS[kind]
            clock = f"{abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}"
            what = what.format(text=text, clock=clock, action=_PERMISSIONS[operation])
            name = {"signature": "key", "archived": "request"}.get(kind, kind)
            problem = StoreRefused(name, what, where=self.url, fix=fix)
        else:
            problem = not_the_store(self.url)
        return problem, region if kind == "region" else ""

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

    def _open(self, key: str, span: tuple[int, int] | None) -> Reply:
        headers = {} if span is None else {"Range": f"bytes={span[0]}-{span[1]}"}
        return self._send("get_object", "B", {"Key": key}, None, headers)

    def _pages(self, prefix: str, *, versions: bool) -> Iterator[ObjectInfo]:
        operation = "list_object_versions" if versions else "list_objects_v2"
        more: dict[str, str] = {}
        while True:

            def ask(more: Mapping[str, str] = more) -> tuple[list[ObjectInfo], dict[str, str]]:
                reply = self._send(operation, "C", {"Prefix": prefix, "EncodingType": "url", **more})
                return self._page(operation, reply, prefix)

            found, following = self._persist(ask)
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
                for row in sorted(rows, key=lambda row: not row.get("IsLatest"))
            ]  # fmt: skip
        except (KeyError, AttributeError, ValueError):
            raise not_the_store(self.url) from None
        found.sort(key=lambda item: (item.key, -item.wall))  # delete markers are listed apart; the latest is first
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
