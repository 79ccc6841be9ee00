"""Two pods on one run, driven from outside: who holds it, who publishes, what a woken pod may not do.

``Contender`` is one pod's side of the protocol. Each of its steps is a generator of store requests (``Get``, ``Put``,
...), which a simulation answers as it likes (tests/support/two_pods.py) and ``perform`` answers from a real store.
``Writer`` is a contender on a real store that also publishes.
"""

import json
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from podwatch.sync.lease.protocol import (
    Create,
    Delete,
    Get,
    LeaseProtocol,
    LeaseTerms,
    ListAll,
    NotHolding,
    Put,
    Request,
    Skew,
    Superseded,
    perform,
)

from podwatch.config.settings import SyncSettings
from podwatch.daemon.backup.run_side import attempt_ended, this_pod
from podwatch.domain.account_document import AccountTotals
from podwatch.domain.engine_and_attempt import Instance
from podwatch.domain.errors import RemoteError
from podwatch.domain.event import EventName
from podwatch.domain.intents import PublishIntent
from podwatch.domain.lease import MOST_PINS, Decision, Heartbeat, HolderState, LeaseAction, Pod, pins_of, read_beat
from podwatch.domain.manifest import Keys, Manifest, ManifestFile, Pointer, sha1_hex
from podwatch.domain.run import IntentKind
from podwatch.domain.run_state import WonClaim
from podwatch.policy.who_holds_the_run import Timing, next_pointer
from podwatch.stores.base import ObjectStore, StoredObject
from podwatch.stores.fenced_writes import TooLate, put_before
from podwatch.sync.publish_and_pointer import Publisher, named_by_others, newest_pointer, read_pointer
from podwatch.sync.store_removal import RemoteRetention
from podwatch.system.clock import SystemClock
from podwatch.system.procfs import identify

if TYPE_CHECKING:
    from tests.sync.conftest import World

__all__ = [
    "MOST_PINS", "RUN", "Clock", "Contender", "Create", "Delete", "Get", "Heartbeat", "HolderState", "Instance", "Keys",
    "LeaseAction", "ListAll", "Memory", "NotHolding", "Pod", "Pointer", "Put", "RemoteError", "Request", "Skew",
    "StoredObject", "Superseded", "TooLate", "Training", "Writer", "attempt_ended", "identify", "named_by_others",
    "newest_pointer", "order_of", "perform", "pins_of", "put_before", "read_beat", "read_pointer", "this_pod",
]  # fmt: skip

RUN = Keys("run")
"""The names of the run's objects in the store: ``latest``, ``heartbeat``, ``claims``, ..."""


class Memory(dict[str, Any]):
    """What a journal keeps, as JSON."""

    def learn(self, key: str, value: object) -> None:
        self[key] = json.loads(json.dumps(value))

    def learned(self, key: str, default: Any = None) -> Any:
        return self.get(key, default)


class PodClock(Protocol):
    """A pod's clocks, in seconds: since boot, and since the epoch."""

    def boottime(self) -> float: ...

    def wall(self) -> float: ...


class Training(Protocol):
    """What the protocol asks about this pod's trainer."""

    def trainer_alive(self) -> bool: ...

    def ever_started(self) -> bool: ...


class Journal(Protocol):
    def learn(self, key: str, value: object) -> None: ...

    def learned(self, key: str, default: Any = None) -> Any: ...


def order_of(pointer: bytes) -> tuple[int, int]:
    """(generation, number) of a pointer: a later one is greater."""
    return Pointer.from_bytes(pointer).order


class Side:
    """What the protocol asks about this pod: its trainer, and the claim that it won last."""

    def __init__(self, training: Training, memory: Journal) -> None:
        self.trainer_alive, self.ever_started = training.trainer_alive, training.ever_started
        self._memory = memory

    def claim(self) -> WonClaim | None:
        kept = self._memory.learned("claim")
        return None if kept is None else WonClaim(**{**kept, "job": tuple(kept["job"])})

    def won(self, claim: WonClaim) -> None:
        self._memory.learn("claim", asdict(claim))


class Contender:
    """One pod's side. ``take_over``: an operator has ordered it to take the run over. ``stands_by``: it waits while
    another pod lives. ``ended``: whether the process of another attempt of its job has provably ended."""

    def __init__(
        self,
        me: Pod,
        memory: Journal,
        clock: PodClock,
        training: Training,
        *,
        exclusive: bool,
        keys: Keys = RUN,
        take_over: bool = False,
        stands_by: bool = False,
        ended: Callable[[str], bool] = lambda _process: False,
        nonce: Callable[[], str] | None = None,
    ) -> None:
        terms = LeaseTerms(me, Timing(), take_over, ended, stands_by)
        more: dict[str, Any] = {} if nonce is None else {"nonce": nonce}
        self._keys, self._writer_id = keys, me.writer_id
        self.protocol = LeaseProtocol(terms, keys, clock, Side(training, memory), exclusive=exclusive, **more)
        """The inside, for parts of the product that need it."""

    # -- steps: generators of store requests

    def look(self) -> Generator[Request, Any, Any]:
        """Look at the store, decide, and claim the run if that is decided. Then ``decision`` says what to do."""
        return self.protocol.look()

    def confirm(self, *, fresh: bool = False) -> Generator[Request, Any, tuple[int, float]]:
        """(generation, second since boot until which a write may be sent). Raises Superseded or NotHolding."""
        return self.protocol.confirm(fresh=fresh)

    def beat(self, state: HolderState, said: Heartbeat, *, versioned: bool) -> Generator[Request, Any, bytes | None]:
        """Write this heartbeat. Returns the pointer if it was read."""
        return self.protocol.beat(state, said, versioned=versioned)

    def publish(self, own_number: int) -> Generator[Request, Any, Pointer]:
        """Write a pointer above all others. ``own_number``: the highest that this pod has written. Raises Superseded
        or NotHolding."""
        generation, until = yield from self.confirm()
        data = yield Get(self._keys.latest)
        current = Pointer.from_bytes(data) if data is not None else None
        numbers = next_pointer(current, writer_id=self._writer_id, generation=generation, own_seq=own_number)
        if not numbers.ok:
            raise Superseded(numbers.reason)
        made = Pointer(numbers.generation, numbers.seq, "run", "line", None, self._writer_id, "")
        yield Put(self._keys.latest, made.to_bytes(), until)
        return made

    def unanswered(self) -> Decision:
        """The store did not answer the last step."""
        return self.protocol.unanswered()

    # -- what it knows

    @property
    def decision(self) -> Decision:
        """``act`` (what it does), ``wait`` (seconds until the next look), ``why_not`` (why training does not begin, or
        empty), ``stop`` (a living trainer must end), ``holder``."""
        return self.protocol.decision

    @property
    def holding(self) -> bool:
        return self.protocol.holding

    @property
    def speaks(self) -> bool:
        """Whether it writes heartbeats."""
        return self.protocol.speaks

    @property
    def generation(self) -> int:
        """Of the claim that it has won; 0: none."""
        return self.protocol.generation

    @property
    def digest_wall(self) -> float | None:
        """When any pod sent the run's last digest (epoch seconds)."""
        return self.protocol.digest_wall

    @property
    def foreign_pins(self) -> Mapping[int, str]:
        """Pinned checkpoints (step: reason) that another pod's heartbeat named, until they are taken over."""
        return self.protocol.foreign_pins

    def take_over_pins(self) -> None:
        self.protocol.foreign_pins = {}

    @property
    def foreign_account(self) -> AccountTotals | None:
        """What the run costs by another pod's heartbeat, until it is taken over."""
        return self.protocol.foreign_account

    @property
    def claimed(self) -> int:
        """Generation of its claim, won or not."""
        return self.protocol.claimed

    def take_over_account(self) -> None:
        self.protocol.foreign_account = None

    def note_digest(self, wall: float) -> None:
        self.protocol.note_digest(wall)

    @property
    def heartbeat_age(self) -> float | None:
        """How old the other pod's heartbeat was at the first look, by the store's clock; None: unknown."""
        return self.protocol._known.watch.age

    def use_clock(self, clock: PodClock) -> None:
        """From now on it has this clock."""
        self.protocol._clock = clock

    @property
    def told_held_elsewhere(self) -> list[str]:
        """What it has told the operator about another pod that holds the run."""
        return [n.text for n in self.protocol.news if n.event is EventName.RUN_HELD_ELSEWHERE]


# -- real stores -------------------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """A clock that a test moves. ``ahead``: seconds that this machine's clock is ahead of the real one. None: it shows
    1970, before anything was stored."""

    now: float = 1000.0
    ahead: float | None = None

    def boottime(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now if self.ahead is None else time.time() + self.ahead


@dataclass
class _Lease:
    """The lease as publisher and retention ask for it."""

    claims: Contender
    clock: PodClock

    def confirm(self, store: ObjectStore) -> tuple[int, float]:
        found: tuple[int, float] = perform(store, self.claims.confirm(), self.clock)
        return found


class _AtWall(SystemClock):
    """With this time of day."""

    def __init__(self, now: float) -> None:
        self.now = now

    def wall(self) -> float:
        return self.now


@dataclass
class Writer:
    """A pod with its own journal: contends for the run, and publishes small checkpoints without an upload child."""

    world: "World"
    clock: Clock
    take_over: bool = False
    stands_by: bool = False
    store: ObjectStore = field(init=False)
    claims: Contender = field(init=False)
    _publisher: Publisher = field(init=False)

    def __post_init__(self) -> None:
        self.store = self.world.store()
        self.start()

    def start(self, boot: str = "boot") -> None:
        """podwatch starts (again) on this pod."""
        world = self.world
        me = Pod(world.writer_id, f"machine-{world.writer_id}", boot, "place", f"host-{world.writer_id}")
        self.claims = self.contender(me)
        lease = _Lease(self.claims, self.clock)
        self._publisher = Publisher(self.store, world.keys, world.journal, world, self.clock, lease)

    def contender(self, me: Pod, ended: Callable[[str], bool] = lambda _process: False) -> Contender:
        """One with this pod's journal, under another name."""
        return Contender(
            me, self.world.journal, self.clock, self.world, exclusive=self.store.exclusive, keys=self.world.keys,
            take_over=self.take_over, stands_by=self.stands_by, ended=ended,
        )  # fmt: skip

    def perform(self, steps: Generator[Request, Any, Any]) -> Any:
        """The result of these steps on this pod's store. Raises as they do."""
        return perform(self.store, steps, self.clock)

    def look(self) -> LeaseAction:
        self.perform(self.claims.look())
        return self.claims.decision.act

    def hold(self) -> "Writer":
        """Through watch and wait, as time goes by."""
        for _ in range(100):
            if self.look() is LeaseAction.HOLD:
                return self
            self.clock.now += max(self.claims.decision.wait, 1.0)
        raise AssertionError(self.claims.decision)

    def beat(self, state: HolderState = HolderState.RUNNING, said: Heartbeat | None = None) -> bytes | None:
        said = Heartbeat(written_wall=self.clock.now) if said is None else said
        found: bytes | None = self.perform(self.claims.beat(state, said, versioned=self.store.versioned))
        return found

    def manifest(self, step: int) -> Manifest:
        """Of a small checkpoint, which is put into the store."""
        world, data, save_id = self.world, b"x" * step, f"save{step}"
        key = world.keys.data(step, save_id, "checkpoint/model.bin")
        stored = self.store.put_bytes(key, data)
        file = ManifestFile(
            "checkpoint/model.bin", "checkpoint", len(data), 0, 0o644, key, stored.file_id, (sha1_hex(data),)
        )
        return Manifest(
            "run", world.lineage, step, save_id, "custom", "2026-01-01T00:00:00Z", world.writer_id, 5_000_000,
            len(data), (file,),
        )  # fmt: skip

    def publish(self, step: int) -> Pointer:
        self.publish_manifest(self.manifest(step))
        pointer = read_pointer(self.store, self.world.keys)
        assert pointer is not None
        return pointer

    def publish_manifest(self, manifest: Manifest) -> None:
        self._publisher.publish(manifest)

    def publish_through(self, store: object) -> None:
        """From now on it publishes through this store."""
        self._publisher.store = store  # type: ignore[assignment]

    def repair(self, seen: bytes) -> Pointer | None:
        """Write its own pointer again if the one that it saw is an older one."""
        return self._publisher.repair(seen)

    def recover(self) -> None:
        """Complete what a podwatch before it had begun to publish."""
        self._publisher.recover()

    # -- what a podwatch was about to do when it ended

    def had_begun_to_publish(self, pointer: Pointer) -> None:
        self.world.journal.open_intent(IntentKind.PUBLISH, PublishIntent(pointer.step, pointer).to_json())

    def had_begun_to_delete(self, step: int) -> None:
        self.world.journal.open_intent(
            IntentKind.REMOTE_DELETE, {"step": step, "save_id": f"save{step}", "reason": "old"}
        )

    def unfinished(self) -> int:
        """How much of that is still open."""
        return len(self.world.journal.open_intents())

    def delete_from_the_store(self, *, own_generation: int) -> None:
        """What retention would remove, with one checkpoint to keep, a long time from now."""
        RemoteRetention(
            self.store, self.world.keys, self.world.journal, SyncSettings(keep_last=1, keep_every=0), _AtWall(1e9),
            self.world.identity(), _Lease(self.claims, self.clock), {},
        ).carry_out(own_generation=own_generation)  # fmt: skip
