"""Types of what sync needs from other packages, small enough for a test to implement for real."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from podwatch.checkpoints.known_checkpoints import SetContents
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.event import Event
from podwatch.domain.run_state import WonClaim
from podwatch.stores.base import ObjectStore
from podwatch.stores.credentials import Credentials

Emit = Callable[[Event], None]
Tell = Callable[..., None]
"""``tell(EventName, message, severity, **fields)``: makes an event of it."""


def rfc3339(wall: float) -> str:
    """As manifests, pointers and heartbeats have it: whole seconds."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Memory(Protocol):
    """The part of the journal that remembers values."""

    def learn(self, key: str, value: object) -> None: ...
    def learned(self, key: str, default: Any = None) -> Any: ...


FEATURES = "store.features"
"""Journal key: the store's URL, and what was found out about it."""


def features_of(memory: Memory, url: str) -> Mapping[str, object]:
    """What an earlier connection found out about this store (``ObjectStore.features``); empty if nothing is known."""
    kept = memory.learned(FEATURES)
    return dict(kept["features"]) if isinstance(kept, dict) and kept.get("url") == url else {}


def keep_features(memory: Memory, url: str, store: ObjectStore) -> None:
    """So that the next connection, also that of a child, need not try it out again."""
    if store.features and dict(store.features) != features_of(memory, url):
        memory.learn(FEATURES, {"url": url, "features": dict(store.features)})


class SetSource(Protocol):
    """The part of the catalogue that uploading needs."""

    @property
    def sets(self) -> tuple[CheckpointSet, ...]: ...

    def contents(self, step: int) -> SetContents:
        """Blocking. Raises PodwatchError or OSError when the step is gone."""
        ...


class OwnSets:
    """The checkpoints of this run only: checkpoints of another run here are not this run's backup."""

    def __init__(self, source: SetSource, owns: Callable[[CheckpointSet], bool]) -> None:
        self._source, self._owns = source, owns

    @property
    def sets(self) -> tuple[CheckpointSet, ...]:
        return tuple(s for s in self._source.sets if self._owns(s))

    def contents(self, step: int) -> SetContents:
        return self._source.contents(step)


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """This podwatch's identity at this moment, for every manifest and pointer.

    ``writer_id`` is this podwatch's own, kept with the run's state.
    """

    run_id: str
    lineage: str
    writer_id: str
    host: str
    train_command: tuple[str, ...] = ()
    wandb: Mapping[str, str] = field(default_factory=dict)
    layout: str = ""
    config_digest: str = ""
    parent_step: int | None = None
    """Where the lineage was opened; None: at the start of training."""
    has_parent: bool = False


class RunSource(Protocol):
    """Who publishes, and with which key: both may change while podwatch runs, so each use asks again."""

    def identity(self) -> RunIdentity: ...
    def credentials(self) -> Credentials | None:
        """Raises PodwatchError where they cannot be read."""
        ...


class TrainingFacts(Protocol):
    """What the lease must know of this pod's training."""

    def trainer_alive(self) -> bool: ...
    def ever_started(self) -> bool:
        """Has this pod ever started a trainer of this run?"""
        ...

    def claim(self) -> WonClaim | None:
        """The lease that this pod won last, so that a restarted podwatch continues with it."""
        ...

    def won(self, claim: WonClaim) -> None:
        """Record it. Blocks."""
        ...


class PodSide(TrainingFacts, Protocol):
    """This pod, which trains only where the lease allows it."""

    def must_not_train(self, why: str) -> None:
        """Called when this pod must not train at all."""
        ...


class GuardedRun(RunSource, PodSide, Protocol):
    """The run as the syncer sees it."""

    def training_finished(self) -> bool:
        """Has training reached its end?"""
        ...

    def withheld(self) -> str:
        """Why nothing may be uploaded, published or deleted in the store now; empty where it may."""
        ...

    def pins(self) -> Mapping[int, str]:
        """The steps that an operator pinned, with the reasons."""
        ...

    def named(self) -> Mapping[int, str]:
        """The steps that a file of the trainer names, with that file."""
        ...

    def observes(self) -> bool:
        """Mode observe, in which podwatch deletes nothing? A reload can change it."""
        ...


@dataclass(frozen=True, slots=True)
class Unstored:
    """What of this run is not in the store, in words. ``pending``: podwatch stores it; ``refused``: it cannot be
    stored, with the reason."""

    pending: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


class Lease(Protocol):
    """What each write that readers see rests on."""

    def confirm(self, store: ObjectStore) -> tuple[int, float]:
        """Confirm that this pod still holds the lease: (generation, boottime until which a write may be sent). Raises
        Superseded, NotHolding or what the store raises."""
        ...
