"""Translates b2sdk's errors for the operator: what is wrong, where, the fix, and whether waiting helps."""

from dataclasses import dataclass

# Two classes are not in the public namespace; FileNotPresent is a ResourceNotFound.
from b2sdk._internal.exception import ResourceNotFound, UploadTokenUsedConcurrently
from b2sdk.v3 import exception as b2error

from podwatch.domain.errors import RemoteError

__all__ = ["B2Place", "UploadTokenUsedConcurrently", "translate"]


@dataclass(frozen=True, slots=True)
class B2Place:
    url: str
    bucket: str
    endpoint: str

    @property
    def service(self) -> str:
        return self.endpoint or "https://api.backblazeb2.com"

    def no_bucket(self) -> RemoteError:
        return RemoteError(
            f"bucket {self.bucket!r} not found, or the key has no access to it",
            where=self.url,
            fix="create it, or correct [sync] store",
            transient=False,
        )

    def no_json(self) -> RemoteError:
        return RemoteError(
            "a program that is not the store answered (a proxy, a login portal)",
            where=self.service,
            fix="check the network between this machine and the store; podwatch tries again",
        )


def is_damaged(error: b2error.B2Error) -> bool:
    """Did the store refuse an upload because its checksum does not match? The service answers "Checksum did not match
    data received"; its documentation and older answers have "Sha1 did not match ..."."""
    return isinstance(error, b2error.BadRequest) and "did not match data received" in str(error).lower()


def translate(error: b2error.B2Error, place: B2Place, *, key: str, capability: str) -> RemoteError:
    """``capability``: the one that the failed call needed; empty for the authorization itself. Never holds a secret."""
    where = f"{place.url}/{key}" if key else place.url
    if isinstance(error, b2error.InvalidAuthToken):
        return RemoteError("the store's token has expired and was not renewed", where=where, fix="podwatch tries again")
    if isinstance(error, b2error.Unauthorized):
        if not capability:
            return RemoteError(
                "the store refuses the key",
                where=place.service,
                fix="check B2_APPLICATION_KEY_ID and B2_APPLICATION_KEY (deleted, expired, or mistyped)",
                transient=False,
            )
        return RemoteError(
            f"the key lacks the capability {capability} for this bucket and prefix",
            where=where,
            fix="create a key with listFiles, readFiles, writeFiles (and deleteFiles for retention) for this prefix",
            transient=False,
        )
    if isinstance(error, b2error.AccessDenied):
        return RemoteError("the store denies access", where=where, fix="check the key and the bucket", transient=False)
    if isinstance(error, b2error.CapExceeded):
        return RemoteError(
            "the account's cap is used up (storage or transactions)",
            where=place.url,
            fix="raise the cap in the Backblaze account; daily caps reset at 00:00 GMT",
            transient=False,
        )
    if isinstance(error, (b2error.BucketIdNotFound, b2error.NonExistentBucket)):
        return place.no_bucket()
    if isinstance(error, ResourceNotFound) and not isinstance(error, b2error.FileNotPresent):
        return place.no_json()  # B2 itself says not_found: a page of a proxy makes nothing absent
    if isinstance(error, b2error.FileNotPresent):
        return RemoteError("object not found", where=where, transient=False)
    if is_damaged(error):
        return RemoteError(
            "the bytes arrived damaged in the store, several times in a row",
            where=where,
            fix="podwatch sends them again; if this continues, check this machine's memory and network card",
        )
    text = str(error)
    if isinstance(error, b2error.UnknownHost) or "resolve" in text.lower() or "Name or service not known" in text:
        return RemoteError(
            "the store's host name cannot be resolved",
            where=place.service,
            fix="check DNS and the network; podwatch tries again",
        )
    if isinstance(error, (b2error.B2ConnectionError, b2error.BrokenPipe, b2error.ConnectionReset)):
        return RemoteError("store cannot be reached", where=place.service, fix="check the network; podwatch retries")
    if isinstance(error, b2error.B2RequestTimeout):
        return RemoteError("the store does not answer in time", where=place.service, fix="podwatch tries again")
    if isinstance(error, (b2error.TooManyRequests, b2error.ServiceError, b2error.RequestTimeout)):
        return RemoteError(f"the store is busy or broken: {text[:200]}", where=where, fix="podwatch tries again")
    transient = bool(error.should_retry_http() or error.should_retry_upload())
    return RemoteError(
        f"the store refused a request: {type(error).__name__}: {text[:200]}",
        where=where,
        fix="podwatch tries again" if transient else "correct what the store's answer names, or report it",
        transient=transient,
    )
