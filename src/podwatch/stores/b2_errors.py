"""What b2sdk's errors mean for a person: what is wrong, where, what to do, and whether waiting helps."""

from dataclasses import dataclass

# Two classes are not in the public namespace; FileNotPresent is a ResourceNotFound.
from b2sdk._internal.exception import ResourceNotFound, UploadTokenUsedConcurrently
from b2sdk.v3 import exception as b2error

from podwatch.domain.errors import RemoteError

__all__ = ["B2Place", "ResourceNotFound", "UploadTokenUsedConcurrently", "translate"]


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
            f"bucket {self.bucket!r} does not exist, or the key may not see it",
            where=self.url,
            fix="create it, or correct [sync] store",
            transient=False,
        )

    def no_json(self) -> RemoteError:
        return RemoteError(
            "something that is not the store answered (a proxy, a portal)",
            where=self.service,
            fix="check what lies between this machine and the store; it is tried again",
        )


def is_damaged(error: b2error.B2Error) -> bool:
    """Did the store refuse an upload because its checksum does not match? The service says "Checksum did not match data
    received"; its documentation and older answers say "Sha1 did not match ..."."""
    return isinstance(error, b2error.BadRequest) and "did not match data received" in str(error).lower()


def translate(error: b2error.B2Error, place: B2Place, *, key: str, capability: str) -> RemoteError:
    """``capability`` is what the failed call needed; empty for the authorization itself. Never holds a secret."""
    where = f"{place.url}/{key}" if key else place.url
    if isinstance(error, b2error.InvalidAuthToken):
        return RemoteError("store's token has expired and was not renewed", where=where, fix="it is tried again")
    if isinstance(error, b2error.Unauthorized):
        if not capability:
            return RemoteError(
                "store refuses the key",
                where=place.service,
                fix="check B2_APPLICATION_KEY_ID and B2_APPLICATION_KEY (deleted, expired, or mistyped)",
                transient=False,
            )
        return RemoteError(
            f"key may not do this: it needs the capability {capability} for this bucket and prefix",
            where=where,
            fix="create a key with listFiles, readFiles, writeFiles (and deleteFiles for retention) for this prefix",
            transient=False,
        )
    if isinstance(error, b2error.AccessDenied):
        return RemoteError("store denies access", where=where, fix="check the key and the bucket", transient=False)
    if isinstance(error, b2error.CapExceeded):
        return RemoteError(
            "the account's cap is used up (storage or transactions)",
            where=place.url,
            fix="raise the cap in the Backblaze account; daily caps reset at 00:00 GMT",
            transient=False,
        )
    if isinstance(error, (b2error.BucketIdNotFound, b2error.NonExistentBucket)):
        return place.no_bucket()
    if isinstance(error, ResourceNotFound):
        return RemoteError("object is not in the store", where=where, transient=False)
    if is_damaged(error):
        return RemoteError(
            "the bytes arrived damaged at the store, several times in a row",
            where=where,
            fix="they are sent again; if this goes on, check the machine's memory and its network card",
        )
    text = str(error)
    if isinstance(error, b2error.UnknownHost) or "resolve" in text.lower() or "Name or service not known" in text:
        return RemoteError(
            "store's name cannot be resolved", where=place.service, fix="check DNS and the network; it is tried again"
        )
    if isinstance(error, (b2error.B2ConnectionError, b2error.BrokenPipe, b2error.ConnectionReset)):
        return RemoteError("store cannot be reached", where=place.service, fix="check the network; it is tried again")
    if isinstance(error, b2error.B2RequestTimeout):
        return RemoteError("store does not answer in time", where=place.service, fix="it is tried again")
    if isinstance(error, (b2error.TooManyRequests, b2error.ServiceError, b2error.RequestTimeout)):
        return RemoteError(f"store is busy or broken: {text[:200]}", where=where, fix="it is tried again")
    transient = bool(error.should_retry_http() or error.should_retry_upload())
    return RemoteError(
        f"store refused a request: {type(error).__name__}: {text[:200]}",
        where=where,
        fix="it is tried again" if transient else "see the message; report it if it makes no sense",
        transient=transient,
    )
