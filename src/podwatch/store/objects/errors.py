"""What a store can answer instead of doing what was asked. Each error says what happened, where, and what to do."""

from podwatch.domain.errors import IntegrityError, RemoteError

NETWORK = "check the network; podwatch tries again"
AGAIN = "podwatch tries again"


class StoreOutage(RemoteError):  # noqa: N818
    """The store cannot be reached, is busy, or something else answers in its place: a later attempt can succeed.
    ``wait``: seconds that the store asks for; ``damaged``: the bytes did not arrive as they were sent."""

    def __init__(self, what: str, *, where: str, fix: str = AGAIN, wait: float = 0.0, damaged: bool = False) -> None:
        super().__init__(what, where=where, fix=fix, transient=True)
        self.wait, self.damaged = wait, damaged


class StoreRefused(RemoteError):  # noqa: N818
    """Nothing helps until somebody changes something. ``kind``: key, permission, bucket, cap, clock, region,
    unsupported or request."""

    def __init__(self, kind: str, what: str, *, where: str, fix: str) -> None:
        super().__init__(what, where=where, fix=fix, transient=False)
        self.kind = kind


class LeaseUnsettled(RemoteError):  # noqa: N818
    """It is not decided yet whether this pod holds the run, or what was known of it is too old: waiting can help."""


class ObjectMissing(IntegrityError):  # noqa: N818
    """The store says that there is no such object."""

    def __init__(self, where: str) -> None:
        super().__init__("object not found", where=where)


class ObjectTooLarge(IntegrityError):  # noqa: N818
    """More bytes than this object can have."""

    def __init__(self, where: str) -> None:
        super().__init__("the object is larger than any valid one", where=where)


def too_late(where: str) -> LeaseUnsettled:
    return LeaseUnsettled("ownership was confirmed too long ago: it is confirmed again", where=where, fix=AGAIN)


def damaged_in_transit(where: str) -> StoreOutage:
    fix = "podwatch sends them again; if this continues, check this machine's memory and network card"
    return StoreOutage("the bytes arrived damaged in the store", where=where, fix=fix, damaged=True)


def not_the_store(where: str) -> StoreOutage:
    """A page of a proxy or a login portal: it makes nothing absent, and is no empty listing."""
    fix = "check the network between this machine and the store; podwatch tries again"
    return StoreOutage("a program that is not the store answered (a proxy, a login portal)", where=where, fix=fix)


def became_shorter() -> IntegrityError:
    return IntegrityError("a file became shorter while podwatch read it")
