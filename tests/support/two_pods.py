"""Pods, a store and their clocks, all simulated, for the two-pod protocol: each pod's side of it runs as it is,
every request to the store is an event that may be slow, lost, late, or cut in two by a freeze of its pod.

One schedule is a seed. ``run(seed)`` plays it and returns what happened; ``Fault`` says what may go wrong in it.
"""

import heapq
import itertools
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.drivers.lease import (
    RUN,
    Contender,
    Create,
    Delete,
    Get,
    Heartbeat,
    HolderState,
    Instance,
    LeaseAction,
    ListAll,
    Memory,
    NotHolding,
    Pod,
    Pointer,
    Put,
    RemoteError,
    Request,
    Skew,
    StoredObject,
    Superseded,
    TooLate,
    order_of,
)

HEARTBEAT = 60.0
STOP_SECONDS = 10.0
"""From "stop" to the end of a trainer."""
CLIENT_TIMEOUT = 60.0
LATEST_APPLY = 85.0
"""A request that its client gave up may still be carried out by the store: for less than 30 s more."""


@dataclass
class Version:
    data: bytes
    stored: StoredObject


class Store:
    """Versions by key. ``exclusive`` as a local directory is."""

    def __init__(self, exclusive: bool) -> None:
        self.exclusive = exclusive
        self.objects: dict[str, list[Version]] = {}
        self._names: list[str] = []
        """Keys of ``objects`` in order: a list of one prefix costs what it returns."""
        self._ids = itertools.count()
        self.written: list[Callable[[str, bytes, str], None]] = []

    def apply(self, request: Request, now: float, writer: str) -> Any:
        match request:
            case Skew():
                return None if self.exclusive else 0.0
            case Get(key):
                versions = self.objects.get(key)
                return versions[-1].data if versions else None
            case ListAll(prefix):
                start, end = bisect_left(self._names, prefix), bisect_left(self._names, prefix + "\U0010ffff")
                return [v[-1].stored for name in self._names[start:end] if (v := self.objects[name])]
            case Create(key, data):
                return None if self.objects.get(key) else self._put(key, data, now, writer)
            case Put(key, data, _):
                return self._put(key, data, now, writer)
            case Delete(item):
                versions = self.objects.get(item.key, [])
                versions[:] = [v for v in versions if v.stored.file_id != item.file_id]
                return None

    def _put(self, key: str, data: bytes, now: float, writer: str) -> StoredObject:
        file_id = f"id{next(self._ids):09d}"
        # The service's clock has milliseconds: two claims may well have the same.
        stored = StoredObject(key, len(data), file_id, ours=True, writer_id=writer, uploaded_wall=round(now, 1))
        if key not in self.objects:
            self.objects[key] = []
            insort(self._names, key)
        versions = self.objects[key]
        versions.append(Version(data, stored))
        if self.exclusive:
            del versions[:-1]
        for tell in self.written:
            tell(key, data, writer)
        return stored


@dataclass
class Outcome:
    """Seconds of simulated time. ``twice`` are spans in which two pods trained, each with what kept one of them from
    knowing at some time in it; ``knowing`` are those in which nothing did: both podwatches ran, and reached it."""

    seed: int
    twice: list[tuple[float, str]] = field(default_factory=list)
    knowing: list[float] = field(default_factory=list)
    set_back: list[tuple[str, float]] = field(default_factory=list)
    """(why, seconds until it was repaired, of those in which an owner could do that)."""
    problems: list[str] = field(default_factory=list)
    takeovers: int = 0
    waited: list[float] = field(default_factory=list)
    """From a pod's first look to its training, where the holder had vanished."""
    refused: int = 0
    superseded: int = 0
    lists: int = 0
    reads: int = 0
    hours: float = 0.0
    published: int = 0


class World:
    """Time, the store, outages, and what is true of all pods together."""

    def __init__(self, seed: int, *, exclusive: bool, hours: float) -> None:
        self.random = random.Random(seed)
        self.trouble = 1.0
        """How often requests are slow and lost, and processes delayed, as a factor."""
        self.now, self.end = 0.0, hours * 3600
        self.store = Store(exclusive)
        self.store.written.append(self._written)
        self.out = Outcome(seed, hours=hours)
        self.pods: list[SimPod] = []
        self.living: list[SimPod] = []
        self.outages: list[tuple[float, float]] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._twice_since: float | None = None
        self._twice_why = ""
        self._knowing_since: float | None = None
        self._best = (0, 0)
        self._back: str | None = None
        self._back_seconds = self._looked = 0.0
        """For how long there was an owner who could have repaired it."""
        self.writing = ""
        self.won: dict[int, str] = {}
        self.refused_beside_a_living_one = 0

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), call))

    def play(self) -> Outcome:
        while self._heap and self._heap[0][0] <= self.end:
            self.now, _, call = heapq.heappop(self._heap)
            call()
            self.look()
        self.now = self.end
        self.look(final=True)
        return self.out

    def away(self) -> bool:
        return any(a <= self.now < b for a, b in self.outages)

    # -- what must hold -----------------------------------------------------------------------------------------------

    def look(self, final: bool = False) -> None:
        """Spans in which two trained: all of it, and what of it both could have known."""
        passed, self._looked = self.now - self._looked, self.now
        if self._back is not None and any(p.could_repair(max(self.won, default=0)) for p in self.living):
            self._back_seconds += passed
        training = [p for p in self.living if p.trains]
        two = len(training) > 1 and not final
        why = max((p.excuse() for p in training), default="") if two else ""
        if two and self._twice_since is None:
            self._twice_since = self.now
        if not two and self._twice_since is not None:
            self.out.twice.append((self.now - self._twice_since, self._twice_why))
            self._twice_since, self._twice_why = None, ""
        self._twice_why = max(self._twice_why, why)
        if two and not why:
            self._knowing_since = self.now if self._knowing_since is None else self._knowing_since
        elif self._knowing_since is not None:
            self.out.knowing.append(self.now - self._knowing_since)
            self._knowing_since = None

    def holds(self, pod: "SimPod", generation: int) -> None:
        me = pod.me.process or pod.me.writer_id
        other = self.won.setdefault(generation, me)
        if other != me:
            self.out.problems.append(f"{pod.me.host} and {other} both hold generation {generation}")

    def _written(self, key: str, data: bytes, writer: str) -> None:
        if key != RUN.latest:
            return
        order = order_of(data)
        if order < self._best:
            if self._back is None:
                self._back, self._back_seconds = self.writing, 0.0
            return
        self._best = order
        if self._back is not None:
            if any(p.me.writer_id == writer for p in self.living):
                self.out.set_back.append((self._back, self._back_seconds))
            self._back = None


class SimPod:
    """A machine with a podwatch and a trainer on it. ``beside``: this is the next attempt of that pod's job, with its
    state directory if ``memory`` is that pod's; on its machine, unless ``elsewhere``."""

    def __init__(
        self, world: World, number: int, memory: Memory | None = None, *,
        job: str = "", beside: "SimPod | None" = None, elsewhere: bool = False,
    ) -> None:  # fmt: skip
        self.world = world
        self.me = Pod(f"writer-{number}", f"machine-{number}", f"boot-{number}", "place", f"pod-{number}")
        if beside is not None and not elsewhere:
            self.me = replace(self.me, machine_id=beside.me.machine_id, boot_id=beside.me.boot_id)
        if beside is not None and memory is beside.memory:
            self.me = replace(self.me, writer_id=beside.me.writer_id)
        if job:
            self.me = replace(
                self.me, instance=Instance("slurm", job, str(number)), process=f"{self.me.boot_id}:1:{number}:1"
            )
        self.memory = memory if memory is not None else Memory()
        self.offset = world.random.uniform(0, 1e6)
        self.alive = False
        self.guarded = False
        self.training = False
        self.trained = False
        self.frozen_until = -1.0
        self.frozen_at = -1.0
        self.cut_off: tuple[float, float] = (-1.0, -1.0)
        self.claims: Contender
        self.life = 0
        self._busy = False
        self._queue: list[Callable[[], None]] = []
        self._stopping = False
        self._first_look = 0.0
        self._saw_vanished = False
        self._spoke = False
        self.cut_at_put = 0.0
        """Seconds to freeze for in the middle of the next pointer write but one; 0: not."""
        self._seq = 0
        self._last: Pointer | None = None
        world.pods.append(self)

    # -- life ---------------------------------------------------------------------------------------------------------

    def boot(self, take_over: bool = False) -> None:
        if not self.alive:
            self.world.living.append(self)
        self.alive = True
        self.start(take_over)

    def start(self, take_over: bool = False) -> None:
        """podwatch starts (again)."""
        if not self.alive or self.guarded:
            return
        world = self.world
        self.guarded, self.life = True, self.life + 1
        self._busy, self._queue, self._spoke = False, [], False
        self._first_look = world.now
        self.claims = Contender(
            self.me, self.memory, self, self, exclusive=world.store.exclusive, take_over=take_over, ended=self._ended,
            nonce=lambda: f"{world.random.getrandbits(64):016x}",
        )  # fmt: skip
        self._round(self.life)
        self._soon(world.random.uniform(0, HEARTBEAT), lambda: self._beats(life), life := self.life)
        self._soon(world.random.uniform(60, 900), lambda: self._saves(life), life)
        self._soon(5.5, self._gate, life)

    def leave(self) -> None:
        """podwatch ends, training goes on. Of a job training ends, too."""
        self.guarded = False
        if self.me.process:
            self.die()

    def die(self) -> None:
        if self.alive:
            self.world.living.remove(self)
        self.alive = self.guarded = self.training = False

    def preempt(self) -> None:
        """Says so, if it gets through, and is gone."""
        if self.guarded and not self.frozen and self.claims.holding:
            self._drive(
                self.claims.beat(HolderState.PREEMPTED, Heartbeat(), versioned=False), lambda _: None, lambda e: None
            )
        self._soon(3.0, self.die, None)
        self.training = False

    def freeze(self, seconds: float) -> None:
        if not self.frozen:
            self.frozen_at = self.world.now
        self.frozen_until = max(self.frozen_until, self.world.now + seconds)

    def boottime(self) -> float:
        return self.world.now + self.offset

    def wall(self) -> float:
        return self.world.now

    def trainer_alive(self) -> bool:
        return self.training

    def ever_started(self) -> bool:
        # Attempts with one state directory have one output directory, too, with its run record.
        return self.trained or any(p.trained for p in self.world.pods if p.memory is self.memory)

    def _ended(self, process: str) -> bool:
        """As /proc shows it: of this boot only."""
        found = next((p for p in self.world.pods if p.me.process == process), None)
        return found is not None and found.me.boot_id == self.me.boot_id and not found.alive

    @property
    def frozen(self) -> bool:
        return self.world.now < self.frozen_until

    @property
    def trains(self) -> bool:
        return self.alive and self.training and not self.frozen

    def excuse(self) -> str:
        """What keeps this one from knowing better at this moment."""
        if not self.guarded and not self.me.process:
            return "its podwatch was not running"
        if self._unreachable() or self.claims.decision.act is LeaseAction.ASK:
            return "a pod could not reach the store"
        return ""

    def could_repair(self, generation: int) -> bool:
        if not (self.alive and self.guarded) or self.frozen or self._unreachable():
            return False
        return self.claims.holding and self.claims.generation == generation

    def _unreachable(self) -> bool:
        return self.world.away() or self.cut_off[0] <= self.world.now < self.cut_off[1]

    def _soon(self, seconds: float, call: Callable[[], None], life: int | None) -> None:
        def due() -> None:
            if not self.alive or (life is not None and (life != self.life or not self.guarded)):
                return
            if self.frozen:
                self.world.at(self.frozen_until, due)
                return
            call()

        self.world.at(self.world.now + seconds, due)

    # -- podwatch -----------------------------------------------------------------------------------------------------

    def _round(self, life: int) -> None:
        claims = self.claims

        def done(_: Any) -> None:
            self._after(life)

        def failed(error: Exception) -> None:
            claims.unanswered()
            self._after(life)

        self._drive(claims.look(), done, failed)

    def _after(self, life: int) -> None:
        decision = self.claims.decision
        if decision.act is LeaseAction.REFUSE:
            self.world.out.refused += 1
            self.guarded = False
            if self.training:
                self.world.out.problems.append("refused while training")
            if self.me.process:
                self.world.refused_beside_a_living_one += any(
                    p.trains and p.me.same_job(self.me) for p in self.world.pods if p is not self
                )
                self.die()  # the attempt is used up
                return
            self._soon(self.world.random.uniform(60, 900), self.start, None)  # its init tries again
            return
        if decision.act is LeaseAction.WATCH:
            self._saw_vanished = True
        if decision.act not in (LeaseAction.HOLD, LeaseAction.SUPERSEDED):
            self._soon(max(decision.wait, 0.5), lambda: self._round(life), life)

    def _gate(self) -> None:
        """The trainer follows what is decided, as recovery does, which looks every now and then."""
        decision, world = self.claims.decision, self.world
        if self.claims.holding:
            world.holds(self, self.claims.generation)
        if decision.stop and self.training and not self._stopping:
            self._stopping = True
            world.out.superseded += decision.act is LeaseAction.SUPERSEDED
            self._soon(STOP_SECONDS, self._stopped, None)
        elif decision.why_not or self.training or self._stopping or decision.act is LeaseAction.SUPERSEDED:
            return
        elif decision.act is not LeaseAction.ASK or world.now - self._first_look > 5:
            self.training = self.trained = True
            self.began()
            if self._saw_vanished:
                world.out.takeovers += 1
                world.out.waited.append(world.now - self._first_look)
                self._saw_vanished = False

    def began(self) -> None:
        """Its trainer has started."""

    def _stopped(self) -> None:
        self.training = self._stopping = False
        self._gate()

    def _beats(self, life: int) -> None:
        self._beat()
        self._soon(HEARTBEAT + self.world.random.uniform(0, 3), lambda: self._beats(life), life)

    def _beat(self) -> None:
        def done(pointer: bytes | None) -> None:
            last = self._last
            if pointer and last is not None and self.claims.holding and order_of(pointer) < last.order:
                self._drive(self._publish(repair=True), lambda _: None, lambda e: None)

        self._drive(self.claims.beat(HolderState.RUNNING, Heartbeat(), versioned=False), done, lambda e: None)

    def _saves(self, life: int) -> None:
        if self.training:
            self._drive(self._publish(), lambda _: None, lambda e: None)
        self._soon(self.world.random.uniform(200, 1200), lambda: self._saves(life), life)

    def _publish(self, repair: bool = False) -> Generator[Request, Any, None]:
        made = yield from self.claims.publish(self._seq)
        self._seq, self._last = max(self._seq, made.seq), made
        self.world.out.published += not repair

    # -- requests -----------------------------------------------------------------------------------------------------

    def _drive(
        self,
        steps: Generator[Request, Any, Any],
        done: Callable[[Any], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """One generator after the other, as under the lock of a real pod."""
        if self._busy:
            self._queue.append(lambda: self._drive(steps, done, failed))
            return
        self._busy = True
        self._step(steps, None, None, done, failed, self.life)

    def _step(
        self,
        steps: Generator[Request, Any, Any],
        answer: Any,
        error: Exception | None,
        done: Callable[[Any], None],
        failed: Callable[[Exception], None],
        life: int,
    ) -> None:
        try:
            request = steps.throw(error) if error is not None else steps.send(answer)
        except StopIteration as end:
            result = end.value
            self._finish(lambda: done(result))
            return
        except (RemoteError, Superseded, NotHolding) as problem:
            self._finish(lambda e=problem: failed(e))  # type: ignore[misc]
            return
        self._request(request, lambda a, e: self._step(steps, a, e, done, failed, life), life)

    def _finish(self, then: Callable[[], None]) -> None:
        self._busy = False
        then()
        if self.claims.speaks and not self._spoke:
            self._spoke = True
            self._beat()
        self._soon(self.world.random.uniform(0, 2), self._gate, self.life)
        if self._queue and not self._busy:
            self._queue.pop(0)()

    def _request(self, request: Request, answer: Callable[[Any, Exception | None], None], life: int) -> None:
        world, rng = self.world, self.world.random
        world.out.lists += isinstance(request, ListAll)
        world.out.reads += isinstance(request, Get)
        think = rng.uniform(0.0, 0.3)  # from the decision to the first byte; a freeze may fall into it
        slow = rng.random() < 0.02 * world.trouble
        travel = rng.uniform(5, CLIENT_TIMEOUT + 20) if slow else rng.expovariate(1 / 0.15)
        back = rng.uniform(0.01, 20) if slow else rng.uniform(0.01, 0.3)
        lost = rng.random() < 0.005 * world.trouble

        def leave() -> None:
            if isinstance(request, Put) and world.now + self.offset > request.until:
                self._soon(0.0, lambda: answer(None, TooLate("late")), life)
                return
            if self._unreachable():
                self._soon(rng.uniform(0.1, 30), lambda: answer(None, RemoteError("away")), life)
                return
            left = world.now
            if isinstance(request, Put) and request.key == RUN.latest and self.cut_at_put and self._last is not None:
                self.freeze(self.cut_at_put)
                self.cut_at_put = 0.0
            # Frozen with bytes on the way: they may lie in a socket for as long as the freeze lasts.
            world.at(left + min(travel, LATEST_APPLY), lambda: arrive(left))

        def arrive(left: float) -> None:
            held = isinstance(request, Put) and self.frozen and self.frozen_at <= left + travel and rng.random() < 0.7
            if held:
                world.at(self.frozen_until + rng.uniform(0.1, 2), lambda: arrive(left))
                return
            late = world.now - left
            world.writing = "frozen in the middle of a request" if late > LATEST_APPLY else "not frozen"
            result = world.store.apply(request, world.now, self.me.writer_id)
            total = world.now - left + back
            if lost or total > CLIENT_TIMEOUT:
                wait = max(0.0, CLIENT_TIMEOUT - (world.now - left))
                self._soon(wait, lambda: answer(None, RemoteError("no answer")), life)
            else:
                self._soon(back, lambda: answer(result, None), life)

        if rng.random() < 0.01 * world.trouble:  # the kernel had other plans, right between decision and act
            think = rng.uniform(1, 45)
        self._soon(think, leave, life)


def run(seed: int, *, exclusive: bool = False, hours: float = 2.0) -> Outcome:
    """One random schedule: a holder, its troubles, replacements, duplicates, outages."""
    world = World(seed, exclusive=exclusive, hours=hours)
    rng = world.random
    first = SimPod(world, 1)
    world.at(0.0, first.boot)
    pods = [first]

    def another(when: float, take_over: bool = False) -> SimPod:
        pod = SimPod(world, len(pods) + 1)
        pods.append(pod)
        world.at(when, lambda: pod.boot(take_over))
        return pod

    for _ in range(rng.choice((0, 0, 1, 2))):
        start = rng.uniform(0, world.end)
        world.outages.append((start, start + rng.choice((20, 120, 600, 1800)) * rng.uniform(0.5, 1.5)))
    if rng.random() < 0.2:
        another(rng.uniform(0, 3))  # both at once
    for _ in range(rng.randint(1, 4)):
        victim, when = rng.choice(pods), rng.uniform(120, world.end * 0.8)
        what = rng.choice(
            ("freeze", "freeze", "freeze at a write", "die", "preempt", "leave", "cut off", "duplicate", "take over")
        )
        if what == "freeze":
            length = rng.choice((30, 150, 400, 900, 3000)) * rng.uniform(0.7, 1.3)
            world.at(when, lambda v=victim, s=length: v.freeze(s))  # type: ignore[misc]
            if rng.random() < 0.8:
                another(when + rng.uniform(5, 600))
        elif what == "freeze at a write":
            victim.cut_at_put = rng.choice((150, 900, 3000)) * rng.uniform(0.7, 1.3)
            another(when + rng.uniform(5, 600))
        elif what == "die":
            world.at(when, victim.die)
            another(when + rng.uniform(5, 600))
        elif what == "preempt":
            world.at(when, victim.preempt)
            another(when + rng.uniform(0, 600))
        elif what == "leave":
            world.at(when, victim.leave)
            world.at(when + rng.uniform(5, 1200), victim.start)
            if rng.random() < 0.5:
                another(when + rng.uniform(5, 300))
        elif what == "cut off":
            victim.cut_off = (when, when + rng.uniform(60, 1500))
            if rng.random() < 0.7:
                another(when + rng.uniform(5, 300))
        elif what == "duplicate":
            another(when)
        else:
            another(when, take_over=True)
    return world.play()


def run_requeues(
    seed: int, *, exclusive: bool = False, hours: float = 2.0, reachable: bool = True
) -> tuple[Outcome, World]:
    """One random schedule of an engine's job that is requeued: beside its own old tree, which lives on for a while or
    for good, or has ended; on the same machine or another; with the same state directory or none. Not ``reachable``:
    the old tree can be frozen or cut off from the store, too."""
    world = World(seed, exclusive=exclusive, hours=hours)
    rng = world.random
    job = SimPod(world, 1, job="77")
    attempts = [job]
    world.at(0.0, job.boot)
    when = 0.0
    for number in range(2, 2 + rng.randint(1, 4)):
        before, when = attempts[-1], when + rng.uniform(200, world.end / 4)
        memory = before.memory if rng.random() < 0.5 else None
        again = SimPod(world, number, memory, job="77", beside=before, elsewhere=rng.random() < 0.5)
        attempts.append(again)
        cases = ("beside", "beside", "late", "died", "killed", "preempted")
        what = rng.choice(cases if reachable else (*cases, "frozen", "cut off"))
        late = rng.uniform(1, 120)
        if what == "late":
            world.at(when + late, before.die)
        elif what in ("died", "killed"):
            world.at(when - rng.uniform(0, 60), before.die if what == "died" else before.leave)
        elif what == "frozen":
            world.at(when - 5, lambda b=before, s=late * 10: b.freeze(s))  # type: ignore[misc]
        elif what == "cut off":
            before.cut_off = (when - 10, when + 10 * late)
        elif what == "preempted":
            world.at(when - rng.uniform(3, 60), before.preempt)
        world.at(when, again.boot)
    return world.play(), world
