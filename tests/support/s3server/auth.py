"""Signature Version 4 as a server checks it: from the request as it came, not from podwatch's own signer."""

import hashlib
import hmac
import re
from collections.abc import Mapping
from datetime import UTC, datetime

from tests.support.s3server.state import Key
from tests.support.store_server import ApiError

_HEADER = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<id>[^/]+)/(?P<day>\d{8})/(?P<region>[^/]+)/s3/aws4_request,"
    r" ?SignedHeaders=(?P<names>[^,]+), ?Signature=(?P<signature>[0-9a-f]{64})"
)
MOST_SKEW = 900.0


def check(
    method: str, path: str, query: str, headers: Mapping[str, str], keys: Mapping[str, Key], region: str, now: float
) -> tuple[Key, str]:
    """The key, and the announced payload hash. ``path`` and ``query`` as they stood in the request line."""
    match = _HEADER.fullmatch(headers.get("Authorization") or "")
    if match is None:
        raise ApiError(403, "AccessDenied", "no signature of version 4")
    key = keys.get(match["id"])
    if key is None:
        raise ApiError(403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records.")
    if key.token and (headers.get("x-amz-security-token") or "") != key.token:
        raise ApiError(400, "InvalidToken", "The provided token is malformed or otherwise invalid.")
    stamp = headers.get("x-amz-date") or ""
    try:
        at = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise ApiError(403, "AccessDenied", "no date") from None
    names = match["names"].split(";")
    must = {n.lower() for n in headers if n.lower().startswith("x-amz-") or n.lower() in ("host", "content-md5")}
    if names != sorted(names) or not must <= set(names):
        raise ApiError(403, "AccessDenied", f"not signed: {sorted(must - set(names))}")
    payload = headers.get("x-amz-content-sha256") or ""
    pairs = sorted(tuple([*p.split("=", 1), ""][:2]) for p in query.split("&") if p)
    canonical = [method, path, "&".join(f"{n}={v}" for n, v in pairs)]
    canonical += [f"{name}:{' '.join((headers.get(name) or '').split())}" for name in names]
    canonical += ["", ";".join(names), payload]
    scope = f"{match['day']}/{match['region']}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n" + hashlib.sha256("\n".join(canonical).encode()).hexdigest()
    secret = f"AWS4{key.secret}".encode()
    for piece in scope.split("/"):
        secret = hmac.new(secret, piece.encode(), hashlib.sha256).digest()
    if not hmac.compare_digest(hmac.new(secret, text.encode(), hashlib.sha256).hexdigest(), match["signature"]):
        raise ApiError(403, "SignatureDoesNotMatch", "The request signature we calculated does not match.")
    if abs(at - now) > MOST_SKEW:
        raise ApiError(403, "RequestTimeTooSkewed", "The difference between the request time and ours is too large.")
    if match["region"] != region:
        raise ApiError(
            400,
            "AuthorizationHeaderMalformed",
            f"the region '{match['region']}' is wrong; expecting '{region}'",
            {"x-amz-bucket-region": region},
            f"<Region>{region}</Region>",
        )
    if key.expired:
        raise ApiError(400, "ExpiredToken", "The provided token has expired.")
    return key, payload
