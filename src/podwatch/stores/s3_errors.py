"""What an S3 answer means: whether waiting helps, and what the operator must do. Pure.

The XML code decides before the HTTP status, because servers agree on codes more than on statuses (docs/s3.md).
"""

from dataclasses import dataclass
from enum import StrEnum

from podwatch.domain.errors import RemoteError
from podwatch.stores.s3_xml import Problem

_KEY_FIX = "check the credentials, and the endpoint that they belong to ([sync] s3_endpoint)"


class Kind(StrEnum):
    """What podwatch does about an answer."""

    AGAIN = "again"
    """The store is busy or broken: repeat after a pause."""
    DAMAGED = "damaged"
    """The bytes did not arrive as they were sent: repeat at once."""
    EXPIRED = "expired"
    """Temporary credentials have expired: read them again, then repeat."""
    SKEWED = "skewed"
    """Signed with a wrong time: repeat with the store's."""
    REGION = "region"
    """Signed for another region: repeat with the one that the answer names."""
    ABSENT = "absent"
    NO_UPLOAD = "no-upload"
    CHANGED = "changed"
    """A condition does not hold: the name holds another object, or none."""
    RANGE = "range"
    UNSUPPORTED = "unsupported"
    DENIED = "denied"
    """The credentials may not do this; also S3's answer for an absent object without permission to list."""
    REFUSED = "refused"
    """Nothing helps until the operator changes something."""


_CODES: dict[str, Kind] = {
    **dict.fromkeys(
        ("SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "IncompleteBody", "TooManyRequests",
         "OperationAborted", "ConditionalRequestConflict", "RequestLimitExceeded", "Throttling", "ThrottlingException",
         "Busy", "ServerBusy", "RequestThrottled"),
        Kind.AGAIN,
    ),
    **dict.fromkeys(
        ("BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "InvalidDigest"), Kind.DAMAGED
    ),
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"), Kind.EXPIRED),
    "RequestTimeTooSkewed": Kind.SKEWED,
    **dict.fromkeys(("PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed"), Kind.REGION),
    **dict.fromkeys(("NoSuchKey", "NoSuchVersion"), Kind.ABSENT),
    "NoSuchUpload": Kind.NO_UPLOAD,
    "PreconditionFailed": Kind.CHANGED,
    "InvalidRange": Kind.RANGE,
    **dict.fromkeys(("NotImplemented", "MethodNotAllowed"), Kind.UNSUPPORTED),
    "AccessDenied": Kind.DENIED,
}  # fmt: skip

_STATUS: dict[int, Kind] = {
    301: Kind.REGION, 307: Kind.REGION, 403: Kind.DENIED, 404: Kind.ABSENT, 405: Kind.UNSUPPORTED, 408: Kind.AGAIN,
    409: Kind.AGAIN, 412: Kind.CHANGED, 416: Kind.RANGE, 429: Kind.AGAIN, 501: Kind.UNSUPPORTED, 507: Kind.REFUSED,
}  # fmt: skip


def kind_of(status: int, problem: Problem | None, *, skewed: bool = False) -> Kind:
    """``problem``: the answer's ``<Error>``, None where it has none (HEAD, a proxy). ``skewed``: this machine's clock
    differs from the store's by more than signatures allow, which some servers answer with AccessDenied."""
    code = problem.code if problem is not None else ""
    kind = _CODES.get(code)
    if kind is None:
        kind = _STATUS.get(status, Kind.AGAIN if status >= 500 else Kind.REFUSED)
        if code and status == 404 and code != "404":
            kind = Kind.REFUSED  # NoSuchBucket, and what a server invents
    if skewed and kind is Kind.DENIED:
        return Kind.SKEWED
    return kind


def is_full(code: str, status: int) -> bool:
    """Whether the store has no space left for this account (codes differ: QuotaExceeded, StorageFull, ...)."""
    return status == 507 or any(word in code for word in ("Quota", "CapExceeded", "StorageFull", "TransactionCap"))


@dataclass(frozen=True, slots=True)
class S3Place:
    """``url`` as the operator wrote it; ``endpoint`` is the address that requests go to."""

    url: str
    bucket: str
    endpoint: str


class Refused(RemoteError):  # noqa: N818
    """A RemoteError with what the answer meant."""

    def __init__(self, kind: Kind, what: str, *, where: str, fix: str, transient: bool) -> None:
        super().__init__(what, where=where, fix=fix, transient=transient)
        self.kind = kind
        self.wait_seconds = 0.0
        """What Retry-After asks for."""
        self.repeated = False
        """An earlier try of the same request ended without a clear answer: it may have been carried out."""
        self.region = ""


def explain(kind: Kind, status: int, problem: Problem | None, place: S3Place, *, key: str, action: str) -> Refused:
    """The error for the operator. ``action``: the permission that the request needs, such as s3:PutObject."""
    code = problem.code if problem is not None else ""
    where = f"{place.url}/{key}" if key else place.url
    said = (
        f"{code or status}: {problem.message[:200]}"
        if problem is not None and problem.message
        else code or f"HTTP {status}"
    )

    def made(what: str, fix: str, *, transient: bool = False, at: str = where) -> Refused:
        return Refused(kind, what, where=at, fix=fix, transient=transient)

    if code in ("InvalidAccessKeyId", "InvalidAccessKey", "InvalidClientTokenId", "InvalidToken"):
        return made(f"the store does not know the access key ({said})", _KEY_FIX, at=place.endpoint)
    if code == "SignatureDoesNotMatch":
        fix = "check AWS_SECRET_ACCESS_KEY, and [sync] s3_region where the store has its own"
        return made("the store refuses the signature: the secret key is wrong", fix, at=place.endpoint)
    if code == "NoSuchBucket":
        return made(f"bucket {place.bucket!r} not found", "create it, or correct [sync] store")
    if code == "InvalidObjectState":
        fix = "restore it there, and exclude podwatch's prefix from the rule that archives"
        return made("the object is in the store's archive (Glacier) and cannot be read", fix)
    if is_full(code, status):
        return made(f"the account's space or quota in the store is used up ({said})", "raise it, or remove old runs")
    simple = {
        Kind.AGAIN: (f"the store is busy or broken ({said})", "podwatch tries again", True),
        Kind.DAMAGED: (
            "the bytes arrived damaged in the store, several times in a row",
            "podwatch sends them again; if this continues, check this machine's memory and network card",
            True,
        ),
        Kind.EXPIRED: (
            "the temporary credentials have expired", "renew them at their source: podwatch reads them again", True,
        ),
        Kind.SKEWED: (
            "the store refuses the time of the request: this machine's clock is wrong",
            "set the clock (chronyd, ntpdate)",
            True,
        ),
        Kind.REGION: (f"the bucket is in another region ({said})", "set [sync] s3_region", False),
        Kind.ABSENT: ("object not found", "", False),
        Kind.NO_UPLOAD: ("no such unfinished upload", "podwatch sends it again", False),
        Kind.CHANGED: ("the name holds another object by now", "podwatch reads it again", True),
        Kind.RANGE: ("the object is shorter than recorded", "", False),
        Kind.UNSUPPORTED: (f"the store does not support this request ({said})", "report it, with the endpoint", False),
        Kind.DENIED: (
            f"access denied: the credentials lack {action} for this bucket and prefix ({said})",
            "extend the policy (docs/s3.md has one)",
            False,
        ),
        Kind.REFUSED: (
            f"the store refused a request ({said})", "correct what the store's answer names, or report it", False,
        ),
    }  # fmt: skip
    what, fix, transient = simple[kind]
    return made(what, fix, transient=transient)
