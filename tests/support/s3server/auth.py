"""Signature Version 4 as a server checks it: from the request as it came, not from podwatch's own signer."""

import hashlib
import hmac
import re
import urllib.parse
from collections.abc import Mapping
from datetime import UTC, datetime

from tests.support.s3server.state import Key
from tests.support.store_server import ApiError

_HEADER = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<id>[^/]+)/(?P<day>\d{8})/(?P<region>[^/]+)/s3/aws4_request,"
    r" ?SignedHeaders=(?P<names>[^,]+), ?Signature=(?P<signature>[0-9a-f]{64})"
)
_QUERY = ("Algorithm", "Credential", "SignedHeaders", "Signature")
_PRESIGNED = re.compile(
    r"AWS4-HMAC-SHA256&(?P<id>[^/]+)/(?P<day>\d{8})/(?P<region>[^/]+)/s3/aws4_request"
    r"&(?P<names>[^&]+)&(?P<signature>[0-9a-f]{64})"
)
MOST_SKEW = 900.0


def check(
    method: str, path: str, query: str, headers: Mapping[str, str], keys: Mapping[str, Key], region: str, now: float
) -> tuple[Key, str]:
    """The key, and the announced payload hash. ``path`` and ``query`` as they stood in the request line."""
    asked = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    presigned = "X-Amz-Signature" in asked
    if presigned:
        match = _PRESIGNED.fullmatch("&".join(asked.get(f"X-Amz-{n}", "") for n in _QUERY))
        query = "&".join(pair for pair in query.split("&") if not pair.startswith("X-Amz-Signature="))
    else:
        match = _HEADER.fullmatch(headers.get("Authorization") or "")
    if match is None:
        raise ApiError(403, "AccessDenied", "no signature of version 4")
    key = keys.get(match["id"])
    if key is None:
        raise ApiError(403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records.")
    if key.token and (headers.get("x-amz-security-token") or asked.get("X-Amz-Security-Token") or "") != key.token:
        raise ApiError(400, "InvalidToken", "The provided token is malformed or otherwise invalid.")
    stamp = asked.get("X-Amz-Date", "") if presigned else headers.get("x-amz-date") or ""
    try:
        at = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise ApiError(403, "AccessDenied", "no date") from None
    names = match["names"].split(";")
    must = {n.lower() for n in headers if n.lower().startswith("x-amz-") or n.lower() in ("host", "content-md5")}
    if names != sorted(names) or not must <= set(names):
        raise ApiError(403, "AccessDenied", f"not signed: {sorted(must - set(names))}")
    payload = "UNSIGNED-PAYLOAD" if presigned else headers.get("x-amz-content-sha256") or ""
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
    if presigned and at < now < at + float(asked["X-Amz-Expires"]):
        pass  # a clock that is behind: the URL is old, and not yet too old
    elif abs(at - now) > MOST_SKEW:
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
