"""What the rules of this room need of an object store, of the lease, and of this pod."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from podwatch.domain.document import Document
from podwatch.domain.lease import Claim
from podwatch.store.objects.base import ObjectInfo, Objects
from podwatch.store.objects.errors import ObjectMissing, StoreOutage
from podwatch.store.objects.transport import boottime

LISTING_SECONDS = 300.0
"""Of one whole listing: a million names take less."""


@dataclass(frozen=True, slots=True)
class Permit:
    """The generation with which this pod holds the run, and the boottime until which writes that rest on it may be
    sent."""

    generation: int
    until: float


class Ownership(Protocol):
    def confirm(self, store: Objects) -> Permit:
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


def list_bounded(store: Objects, prefix: str, seconds: float = LISTING_SECONDS) -> Iterator[ObjectInfo]:
    """As ``store.list``. Raises StoreOutage after ``seconds``: a store can send page after page without an end."""
    ends = boottime() + seconds
    for item in store.list(prefix):
        if boottime() > ends:
            what = f"the store's listing did not end within {seconds:.0f} s"
            raise StoreOutage(what, where=f"{store.url}: {prefix}", fix="name a run, or a smaller prefix")
        yield item


def list_save(store: Objects, folder: str) -> dict[str, ObjectInfo]:
    """What is below a save's ``folder`` (``RunKeys.save``), by name."""
    return {item.key.removeprefix(folder): item for item in store.list(folder)}


def read_or_none(store: Objects, key: str, document: type[Document]) -> bytes | None:
    """The bytes of a document; None if it is absent."""
    try:
        return store.read(key, document.LARGEST)
    except ObjectMissing:
        return None
