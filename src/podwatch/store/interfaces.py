"""What the rules of this room need of an object store, of the lease, and of this pod."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from podwatch.domain.document import Document
from podwatch.domain.lease import Claim
from podwatch.store.objects.errors import ObjectMissing, StoreOutage
from podwatch.store.objects.transport import boottime

LISTING_SECONDS = 300.0
"""Of one whole listing: a million names take less."""


class Listed(Protocol):
    """An entry of a listing. ``wall``: when it was stored, by the store's clock, in epoch seconds. ``hash``: as
    ``documents.Digest`` has it; empty where the listing does not show it."""

    @property
    def key(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def wall(self) -> float: ...
    @property
    def hash(self) -> str: ...


class RunObjects(Protocol):
    """Small requests. Each (of a listing each page, of a deletion each object) ends within
    ``lease_rules.REQUEST_SECONDS``, its repetitions included. Raises RemoteError; ``read`` raises ObjectMissing, and
    ObjectTooLarge above ``limit``. ``until``: the boottime after which no byte is sent any more, also by a process that
    was frozen in the middle of the call; LeaseUnsettled then."""

    url: str

    def put(self, key: str, source: bytes, *, until: float = math.inf) -> None: ...
    def read(self, key: str, limit: int) -> bytes: ...
    def list(self, prefix: str) -> Iterator[Listed]: ...
    def delete(self, keys: Sequence[str], *, older: bool = False, until: float = math.inf) -> None:
        """Every version of these objects, in this order; ``older``: those that a newer one has replaced. Absent is
        success."""
        ...


class StoreClock(Protocol):
    """``boottime`` continues during suspend; ``wall`` is for people: no decision here rests on it."""

    def boottime(self) -> float: ...
    def wall(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Permit:
    """The generation with which this pod holds the run, and the boottime until which writes that rest on it may be
    sent."""

    generation: int
    until: float


class Ownership(Protocol):
    def confirm(self, store: RunObjects) -> Permit:
        """One listing, unless one was made just now. Raises LeaseLost, LeaseUnsettled or what the store raises."""
        ...


class OwnSide(Protocol):
    """This pod, as the lease must know it."""

    def trainer_alive(self) -> bool: ...
    def last_claim(self) -> Claim | None:
        """The newest claim that an earlier life of this pod won or trained on, as ``run.json`` has it."""
        ...

    def claimed(self, claim: Claim) -> None:
        """Record it durably, before training relies on it."""
        ...

    def job_ended(self, process: str) -> bool:
        """Whether this process of another attempt of the job has provably ended, and nothing of it trains."""
        ...


@dataclass(frozen=True, slots=True)
class Author:
    """Who publishes, and what training wrote the save."""

    run_id: str
    writer_id: str
    host: str = ""
    lineage: str = ""
    layout: str = ""
    start_id: str = ""
    from_step: int | None = None
    world_size: int | None = None
    config_digest: str = ""
    train_command: tuple[str, ...] = ()
    wandb: dict[str, str] = field(default_factory=dict)


def list_bounded(store: RunObjects, prefix: str, seconds: float = LISTING_SECONDS) -> Iterator[Listed]:
    """As ``store.list``. Raises StoreOutage after ``seconds``: a store can send page after page without an end."""
    ends = boottime() + seconds
    for item in store.list(prefix):
        if boottime() > ends:
            what = f"the store's listing did not end within {seconds:.0f} s"
            raise StoreOutage(what, where=f"{store.url}: {prefix}", fix="name a run, or a smaller prefix")
        yield item


def list_save(store: RunObjects, folder: str) -> dict[str, Listed]:
    """What is below a save's ``folder`` (``RunKeys.save``), by name."""
    return {item.key.removeprefix(folder): item for item in store.list(folder)}


def read_or_none(store: RunObjects, key: str, document: type[Document]) -> bytes | None:
    """The bytes of a document; None if it is absent."""
    try:
        return store.read(key, document.LARGEST)
    except ObjectMissing:
        return None
