"""AWS Signature Version 4 for S3, in the Authorization header (docs.aws.amazon.com, "Signature Calculations for the
Authorization Header").

By hand: botocore takes eight times as long for one signature, 150 ms and 30 MB to load (benchmarks/transfers.md), and a
checkpoint of small files takes thousands of signatures. The tests compare it with botocore's own signer.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from urllib.parse import quote

UNSIGNED = "UNSIGNED-PAYLOAD"
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


def quoted_path(bucket: str, key: str) -> str:
    """The path of a request, each segment percent-encoded as RFC 3986 has it. S3 signs it as it is sent."""
    whole = f"{bucket}/{key}" if bucket and key else bucket or key
    return "/" + quote(whole, safe="/-_.~")


def quoted_query(query: Iterable[tuple[str, str]]) -> str:
    """In the order in which it is signed."""
    pairs = sorted((quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in query)
    return "&".join(f"{name}={value}" for name, value in pairs)


@lru_cache(8)
def _signing_key(secret: str, day: str, region: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for piece in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, piece.encode(), "sha256")
    return key


def signed(
    method: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    *,
    payload: str,
    access_key: str,
    secret: str,
    token: str = "",
    region: str,
    wall: float,
) -> dict[str, str]:
    """``headers`` with x-amz-date, x-amz-content-sha256, the session token and Authorization added.

    ``path`` and ``query`` as ``quoted_path`` and ``quoted_query`` return them; ``headers`` must contain Host, and all
    are signed; ``payload``: SHA-256 of the body in hex, or UNSIGNED. ``wall``: epoch seconds by the store's clock.
    """
    at = datetime.fromtimestamp(wall, UTC)
    day, stamp = at.strftime("%Y%m%d"), at.strftime("%Y%m%dT%H%M%SZ")
    sent = {**headers, "x-amz-content-sha256": payload, "x-amz-date": stamp}
    if token:
        sent["x-amz-security-token"] = token
    lines = sorted((name.lower(), " ".join(value.split())) for name, value in sent.items())
    names = ";".join(name for name, _ in lines)
    canonical = "\n".join([method, path, query, *(f"{name}:{value}" for name, value in lines), "", names, payload])
    scope = f"{day}/{region}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    signature = hmac.new(_signing_key(secret, day, region), text.encode(), "sha256").hexdigest()
    sent["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return sent
