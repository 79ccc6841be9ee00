"""Months of a run whose pods die, simulated: podwatch's controllers and the pods' lease run as they are, against a
simulated store and providers that lie, fail, time out after they acted, create twice, and bring machines back.

Every call of a controller takes time, in which everything else goes on: pods, and the other controllers' whole looks;
2 % of its requests to the store are slow (5 to 60 s), and 0.5 % fail, before or after they took effect, as the pods'.
Time jumps from event to event. One month is a seed. ``Month(seed).play()`` returns what happened.
"""

import heapq
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.drivers.controller import (
    AGAIN_SECONDS,
    Action,
    Listing,
    Look,
    OutcomeUnknown,
    ProviderError,
    Rented,
    RentedState,
    controller_over,
    spending_in_books,
)
from tests.drivers.lease import RUN, Heartbeat, HolderState, Instance, ListAll, RemoteError, StoredObject
from tests.support.controller_money import Bill, Span, highest, overspent
from tests.support.two_pods import SimPod, World

RULES: Mapping[str, Any] = {
    "providers": ["one", "two"],
    "max_price_per_hour": 2.0,
    "max_spend_per_day": 60.0,
    "max_spend_total": 400.0,
    "max_replacements_per_day": 12,
    "max_boot_failures": 6,
    "boot_seconds": 1200,
}
BOUND = 1200 + 900 + 1500
"""boot_seconds (the longer of the two), final_checkpoint_seconds, and some failed destructions with their pauses."""
LOOKS = (30.0, 60.0, 300.0)
"""Seconds between two looks: a loop, and schedules."""
DAY = 86_400.0
KEPT = 900 + 900
"""Seconds of cost that the controller keeps below a cap: for the final checkpoint, and for late looks
(policy/replacement.py). Once it can look and act again, a machine above a cap is gone within them."""
LATE = 400.0
"""Without a complete look for longer, the controllers count as blind: the longest pause, and slow requests."""
TROUBLED = 8000.0
"""What disturbed a pod may explain its end for so long."""


class Killed(BaseException):
    """The controller's process is gone."""


@dataclass
class Kinds:
    """How often what goes wrong; a benchmark sets most of it to nothing."""

    faults: float = 1.0
    lifetime: float = 5 * 3600.0
    boots: tuple[float, float] = (40.0, 400.0)
    deaths: tuple[str, ...] = ("gone", "gone", "hangs", "preempted", "stopped", "frozen", "cut off")
    controllers: int = 2
    every: float | None = None
    trouble: float = 1.0


@dataclass
class Machine:
    id: str
    label: str
    price: float
    created: float
    pod: "MonthPod"
    state: RentedState = RentedState.RUNNING
    hidden: list[Span] = field(default_factory=list)
    """When no list shows it."""
    ended: float | None = None
    seen: float = 0.0
    """When a controller last saw it in a list and completed its look."""
    useless: float = 0.0
    """Seconds since it last did anything for its money, in which it was seen."""


class MonthPod(SimPod):
    """A pod on a rented machine."""

    done = False
    stored = True
    booted_after: float | None = None
    """The provider's own time, from the request to podwatch's start; None: nobody requested this pod."""

    def began(self) -> None:
        assert isinstance(self.world, Month)
        if self.booted_after is not None:
            self.world.replaced(self.booted_after)
            self.booted_after = None

    def _beat(self) -> None:
        said = Heartbeat(desired="finished" if self.done else "running", unstored_step=None if self.stored else 7)
        state = HolderState.RELEASED if self.done else HolderState.RUNNING
        if self.done:
            self.training = False
        self._drive(self.claims.beat(state, said, versioned=False), lambda _: None, lambda _: None)

    def preempt(self) -> None:
        if self.guarded and not self.frozen and self.claims.holding:
            said = Heartbeat(desired="running")
            self._drive(self.claims.beat(HolderState.PREEMPTED, said, versioned=False), lambda _: None, lambda _: None)
        self._soon(3.0, self.die, None)
        self.training = False


class Provider:
    """One account. Ground truth in ``machines``."""

    def __init__(self, month: "Month", name: str) -> None:
        self.month, self.name, self._numbers = month, name, itertools.count(1)
        self.machines: dict[str, Machine] = {}
        self.outages: list[tuple[float, float]] = []
        self.created = 0

    def at(self, controller: "Process") -> "_Calls":
        return _Calls(self, controller)

    def away(self) -> bool:
        return any(a <= self.month.now < b for a, b in self.outages)

    def visible(self) -> list[Machine]:
        return [
            m
            for m in self.machines.values()
            if m.ended is None and not any(a <= self.month.now < b for a, b in m.hidden)
        ]

    def rent(self, label: str, price: float) -> Machine:
        month, rng = self.month, self.month.random
        number = len(month.pods) + 1
        machine_id = f"{self.name}{next(self._numbers)}"
        pod = MonthPod(month, number)
        pod.me = replace(pod.me, instance=Instance("", machine_id, label=label))
        machine = Machine(machine_id, label, price, month.now, pod)
        if month.chance(0.3):
            machine.hidden.append((month.now, month.now + rng.uniform(1, 120)))
        self.machines[machine_id] = machine
        self.created += 1
        month.booted(self, machine)
        return machine

    def end(self, machine: Machine) -> None:
        if machine.ended is None:
            machine.ended = self.month.now
            machine.pod.die()


class _Calls:
    """A provider as one controller sees it."""

    def __init__(self, provider: Provider, process: "Process") -> None:
        self._provider, self._process = provider, process

    def list(self, run_id: str) -> Listing:
        month, provider = self._provider.month, self._provider
        self._process.pass_time(0.5, 3.0)
        if provider.away() or month.chance(0.02):
            raise ProviderError("no answer", where=provider.name)
        found = provider.visible()
        if found and month.chance(0.005):
            found = found[1:]  # it lies
        rented = [Rented(m.id, m.label, m.state, m.price, m.created + month.random.uniform(-300, 300)) for m in found]
        strangers = [
            Rented("s1", "podwatch:run-2:1", RentedState.RUNNING, 1.0),
            Rented("s2", "x", RentedState.RUNNING, 1.0),
        ]
        self._process.listed.update({m.id: m for m in found})
        return Listing(provider.name, (*rented, *strangers))

    def create(
        self, run_id: str, generation: int, label: str, max_price: float, env: Mapping[str, str]
    ) -> tuple[str, float]:
        month, provider, rng = self._provider.month, self._provider, self._provider.month.random
        assert env == {"PODWATCH_LABEL": label}
        if month.chance(0.05):
            raise ProviderError("no offer", where=provider.name, no_offer=True)
        if provider.away() or month.chance(0.03):
            raise ProviderError("not now", where=provider.name)
        if month.chance(0.04):
            raise OutcomeUnknown("answer lost, nothing done", where=provider.name)
        price = rng.uniform(0.5, max_price)
        if month.chance(0.03):  # its own queue: the machine comes after the answer got lost
            month.at(month.now + rng.uniform(1, 120), lambda: provider.rent(label, price) and None)
            self._process.pass_time(100, 130)
            raise OutcomeUnknown("time limit", where=provider.name)
        month.requested(label)
        machine = provider.rent(label, price)
        if month.chance(0.02):
            provider.rent(label, price)
        self._process.pass_time(2, 20)
        if month.chance(0.04):
            raise OutcomeUnknown("unreadable answer", where=provider.name)
        return machine.id, machine.price

    def destroy(self, machine: str, label: str) -> None:
        month, provider = self._provider.month, self._provider
        self._process.pass_time(1, 5)
        found = provider.machines.get(machine)
        if found is None or found.label != label or not label.startswith("podwatch:run:"):
            month.problems.append(f"{label} {machine} was destroyed, but is not ours")
            return
        if provider.away() or month.chance(0.05):
            raise ProviderError("destroy failed", where=provider.name)
        if found.pod.trains and found.pod.claims.holding and not month.stopping and not month.allowed(found):
            month.problems.append(f"{machine} trained and was destroyed at {month.now:.0f}")
        if month.chance(0.05):  # said, not done: a zombie comes back
            found.hidden.append((month.now, month.now + month.random.uniform(60, 7200)))
            return
        provider.end(found)
        if month.chance(0.05):
            raise OutcomeUnknown("answer lost", where=provider.name)


class SimStore:
    """What the controller uses of an ObjectStore, over the simulated one."""

    url = "sim://"
    conditional = False
    versioned = False

    def __init__(self, month: "Month", process: "Process") -> None:
        self._month, self._process = month, process
        self.exclusive = month.store.exclusive

    @property
    def clock_skew(self) -> float:
        return self._process.skew

    def _ask(self) -> None:
        self._travel()
        if self._month.away() or self._month.lost():
            raise RemoteError("the store does not answer")

    def _travel(self) -> None:
        month = self._month
        month.requests += 1
        slow = month.random.random() < 0.02 * month.trouble
        month.slow += slow
        self._process.pass_time(*((5, 60) if slow else (0.02, 0.3)))

    def read(self, key: str, *, limit: int = 0) -> tuple[StoredObject, bytes] | None:
        self._ask()
        versions = self._month.store.objects.get(key)
        return (versions[-1].stored, versions[-1].data) if versions else None

    def get_bytes(self, key: str, file_id: str = "", *, limit: int = 0) -> bytes | None:
        found = self.read(key)
        return found[1] if found is not None else None

    def stat(self, key: str, file_id: str = "") -> StoredObject | None:
        found = self.read(key)
        return found[0] if found is not None else None

    def list(self, prefix: str) -> Iterator[StoredObject]:
        self._ask()
        return iter(self._month.store.apply(ListAll(prefix), self._month.now, ""))

    def identify(self, objects: Iterator[StoredObject]) -> Iterator[StoredObject]:
        return objects

    def put_bytes(self, key: str, data: bytes) -> StoredObject:
        self._ask()
        stored = self._month.store._put(key, data, self._month.now, self._process.name)
        self._process.pass_time(0.02, 0.3)
        if self._month.lost():
            raise RemoteError("the answer is lost")
        return stored

    def put_small(self, key: str, source: Any, size: int, progress: object = None) -> StoredObject:
        return self.put_bytes(key, source.read_at(0, size))

    def create(self, key: str, data: bytes) -> StoredObject | None:
        return None if self.stat(key) is not None else self.put_bytes_at_once(key, data)

    def put_bytes_at_once(self, key: str, data: bytes) -> StoredObject | None:
        if self._month.store.objects.get(key):
            return None
        stored = self._month.store._put(key, data, self._month.now, self._process.name)
        if self._month.lost():
            raise RemoteError("the answer is lost")
        return stored


class Process:
    """A controller's process: killed, frozen, started again, with a clock of its own."""

    def __init__(self, month: "Month", number: int) -> None:
        self.month, self.name = month, f"controller-{number}"
        self.skew = month.random.uniform(-900, 900)
        self.offset = month.random.uniform(0, 1e6)
        self.listed: dict[str, Machine] = {}
        self.busy = self.failed = False
        self.start()

    def wall(self) -> float:
        return self.month.now + self.skew

    def boottime(self) -> float:
        return self.month.now + self.offset

    def start(self) -> None:
        store: Any = SimStore(self.month, self)
        providers = {p.name: p.at(self) for p in self.month.providers}
        self.controller = controller_over(store, providers, self)

    def pass_time(self, least: float, most: float) -> None:
        month, rng = self.month, self.month.random
        seconds = rng.uniform(least, most)
        if month.chance(0.0005):
            seconds += rng.choice((40, 200, 1500))
        if month.chance(0.0003):
            raise Killed
        month.advance(seconds)

    def look(self) -> None:
        """Look, then plan the next look."""
        if self.busy or self.month.ended:
            return
        self.busy, self.listed = True, {}
        pause, look = self.month.every, None
        failed, self.failed = self.failed, True
        try:
            look = self.controller.look()
            self.failed = False
            pause = look.next_look if look.again or self.month.every <= 60 else self.month.every
            pause = min(pause, self.month.every) if not look.again else pause
        except RemoteError:
            pause = pause if failed else min(AGAIN_SECONDS, pause)
        except Killed:
            pause = self.month.random.uniform(10, 600)
            self.start()
        finally:
            self.busy = False
        if look is not None:
            self.month.looked(self, look)
        self.month.at(self.month.now + max(0.5, pause), self.look)


class Month(World):
    def __init__(
        self, seed: int, *, exclusive: bool = False, hours: float = 30 * 24.0, kinds: Kinds | None = None,
        rules: Mapping[str, Any] | None = None, finishes: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(seed, exclusive=exclusive, hours=hours)
        self.kinds, self.rules = kinds or Kinds(), {**RULES, **(rules or {})}
        self.trouble = self.kinds.trouble
        self.problems: list[str] = []
        self.providers = [Provider(self, name) for name in self.rules["providers"]]
        self.waits: list[tuple[str, float]] = []
        """(kind of death, seconds until another pod trained, without the provider's time)."""
        self.finishes, self.stopping, self.ended = finishes, False, False
        self.actions: dict[str, int] = {}
        self.requests = self.slow = self.failed = 0
        """Of the controllers, to the store."""
        self.blind: list[Span] = []
        """When no controller could look."""
        self._dead: tuple[str, float] | None = None
        self._looked_well = 0.0
        self._depth = 0
        self._put(RUN.controller_rules, json.dumps(self.rules))
        rng = self.random
        for provider in self.providers:
            for _ in range(int(hours / 100 * self.kinds.faults)):
                start = rng.uniform(0, self.end)
                provider.outages.append((start, start + rng.choice((60, 600, 7200)) * rng.uniform(0.5, 1.5)))
        for _ in range(int(hours / 100 * self.kinds.faults)):
            start = rng.uniform(0, self.end)
            self.outages.append((start, start + rng.choice((20, 120, 1800)) * rng.uniform(0.5, 1.5)))
        first = MonthPod(self, 1)
        self.at(0.0, first.boot)
        self.at(rng.uniform(0.1, 1) * self.kinds.lifetime, lambda: self._dies(None, first))
        self.every = self.kinds.every or rng.choice(LOOKS)
        self.processes = [Process(self, n) for n in range(self.kinds.controllers)]
        for process in self.processes:
            self.at(rng.uniform(100, 200), process.look)
        if finishes:
            self.at(self.end * 0.85, self._finish)

    def _put(self, key: str, text: str) -> None:
        self.store._put(key, text.encode(), self.now, "people")

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability * self.kinds.faults

    def lost(self) -> bool:
        lost = self.random.random() < 0.005 * self.trouble
        self.failed += lost
        return lost

    def advance(self, seconds: float) -> None:
        """Everything else that happens meanwhile."""
        until = self.now + seconds
        if self._depth > 3:
            self.now = until
            return
        self._depth += 1
        while self._heap and self._heap[0][0] <= until:
            self.now = max(self.now, self._heap[0][0])
            _, _, call = heapq.heappop(self._heap)
            call()
            self.look()
        self.now = max(self.now, until)
        self._depth -= 1

    # -- what happens -------------------------------------------------------------------------------------------------

    def booted(self, provider: Provider, machine: Machine) -> None:
        rng = self.random
        if self.chance(0.05):
            return  # never comes up
        delay = rng.uniform(*self.kinds.boots)
        self.at(self.now + delay, lambda: machine.ended is None and machine.pod.boot())
        machine.pod.booted_after = delay
        life = rng.expovariate(1 / self.kinds.lifetime) if self.kinds.faults else self.kinds.lifetime
        self.at(self.now + delay + max(30.0, life), lambda: self._dies(provider, machine.pod, machine))

    def replaced(self, booted_after: float) -> None:
        """A requested pod trains. Measures the time from the last death, without the provider's."""
        if self._dead is not None:
            kind, at = self._dead
            self.waits.append((kind, self.now - at - booted_after))
            self._dead = None

    def requested(self, label: str) -> None:
        """A machine is requested: no pod may be training that could tell the store so."""
        for pod in self.living:
            well = pod.trains and pod.guarded and pod.claims.holding and not self.disturbed(pod, 400.0)
            if well and not getattr(pod, "done", False):
                self.problems.append(f"{label} was requested at {self.now:.0f} although {pod.me.host} trains")

    def disturbed(self, pod: SimPod, seconds: float) -> bool:
        """Whether this pod itself was kept from the store within the last seconds; the store's own outages are none of
        its troubles."""
        return max(pod.frozen_until, pod.cut_off[1]) > self.now - seconds

    def _dies(self, provider: Provider | None, pod: MonthPod, machine: Machine | None = None) -> None:
        if self.ended or not pod.alive or pod.done or (machine is not None and machine.ended is not None):
            return
        rng = self.random
        kind = rng.choice(self.kinds.deaths)
        if pod.trains:
            self._dead = (kind, self.now)
        if kind == "gone":
            pod.die()
        elif kind == "hangs":
            pod.die()
            return  # the provider shows it as running
        elif kind == "preempted":
            pod.preempt()
            self.at(self.now + 3.5, self._unheard)
            self.at(self.now + rng.uniform(5, 60), lambda: machine and provider and provider.end(machine))
            return
        elif kind == "stopped" and machine is not None:
            machine.state = RentedState.STOPPED
            pod.freeze(rng.uniform(600, 20_000))
            self.at(pod.frozen_until, lambda: self._wakes(machine))
            return
        elif kind == "frozen":
            pod.freeze(rng.uniform(100, 4000))
        elif kind == "cut off":
            pod.cut_off = (self.now, self.now + rng.uniform(100, 4000))
        if kind in ("frozen", "cut off"):
            self.at(self.now + rng.expovariate(1 / self.kinds.lifetime), lambda: self._dies(provider, pod, machine))
            return
        if machine is not None and provider is not None:
            provider.end(machine)
        else:
            pod.die()

    def _unheard(self) -> None:
        """A goodbye that did not reach the store is none."""
        versions = self.store.objects.get(RUN.heartbeat)
        if self._dead is not None and versions and b'"preempted"' not in versions[-1].data:
            self._dead = ("gone", self._dead[1])

    def _wakes(self, machine: Machine) -> None:
        if machine.ended is None:
            machine.state = RentedState.RUNNING

    def _finish(self) -> None:
        """The pod that trains finishes the run; until then it is asked again."""
        for pod in self.pods:
            if isinstance(pod, MonthPod) and pod.trains and pod.claims.holding and not self.away():
                pod.done, pod.stored = True, False
                self.stopping = True
                self.at(self.now + self.random.uniform(10, 300), lambda p=pod: setattr(p, "stored", True))  # type: ignore[misc]
                return
        self.at(self.now + 600, self._finish)

    # -- what must hold -----------------------------------------------------------------------------------------------

    def allowed(self, machine: Machine) -> bool:
        """Whether the controller may destroy a machine that trains: it was silent for long, costs too much, is the
        second of its label, or another pod took the run over."""
        others = [
            m for p in self.providers for m in p.machines.values() if m.label == machine.label and m.ended is None
        ]
        if self.disturbed(machine.pod, TROUBLED) or len(others) > 1:
            return True
        # The controller's books: they count a machine from its request until a list shows that it is gone, and an
        # unknown outcome as a machine. ``overspent`` checks what was truly spent.
        names = [key for key in self.store.objects if key.startswith(RUN.controller + "pods/")]
        books = [self.store.objects[key][-1].data for key in names]
        (ever, price), (today, _) = spending_in_books(books, self.now), spending_in_books(books, self.now, DAY)
        kept = price * (KEPT + 900) / 3600
        return ever + kept > float(self.rules["max_spend_total"]) or today + kept > float(
            self.rules["max_spend_per_day"]
        )

    def looked(self, process: Process, look: Look) -> None:
        """After a look that was complete: what did each machine that it saw do for its money since the last one?"""
        self.actions[look.decision.action] = self.actions.get(look.decision.action, 0) + 1
        if self.now - self._looked_well > LATE:
            self.blind.append((self._looked_well, self.now))
        self._looked_well = self.now
        for machine in process.listed.values():
            passed, machine.seen = self.now - max(machine.seen, machine.created), self.now
            useful = machine.pod.alive and machine.pod.guarded and machine.pod.claims.holding and not machine.pod.done
            useful = useful and not machine.pod.frozen and machine.state is RentedState.RUNNING
            useful = useful or machine.ended is not None
            machine.useless = 0.0 if useful else machine.useless + min(passed, LATE)
            if machine.useless > BOUND:
                self.problems.append(f"{machine.id} was billed for {machine.useless:.0f} s beyond its use")
                machine.useless = -1e9
        if look.decision.action is Action.END:
            self.ended = True
            if any(self.rented()) and not any(m.hidden and m.hidden[-1][1] > self.now for m in self.rented()):
                self.problems.append(f"ended although {[m.id for m in self.rented()]} cost money")

    def rented(self) -> list[Machine]:
        return [m for p in self.providers for m in p.machines.values() if m.ended is None]

    def cost(self, since: float = 0.0) -> float:
        return sum(
            m.price * max(0.0, (m.ended if m.ended is not None else self.now) - max(since, m.created)) / 3600
            for p in self.providers
            for m in p.machines.values()
        )

    def bills(self) -> list[Bill]:
        """What each machine cost, and when no controller could see or destroy it."""
        blind = [*self.outages, *self.blind]
        if self.now - self._looked_well > LATE and not self.ended:
            blind.append((self._looked_well, self.now))
        shown = [(end, end) for p in self.providers for m in p.machines.values() for _, end in m.hidden]
        found = []
        for provider in self.providers:
            for m in provider.machines.values():
                end = m.ended if m.ended is not None else self.now
                spans = ((a, b + KEPT) for a, b in (*m.hidden, *provider.outages, *blind, *shown))
                excused = tuple((a, b) for a, b in spans if a < end and b > m.created)
                found.append(Bill(m.created, end, m.price, excused, tuple(m.hidden)))
        return found

    def play(self) -> "Month":  # type: ignore[override]
        super().play()
        self.problems += self.out.problems
        self.problems += [f"pointer set back: {why}" for why, _ in self.out.set_back if why == "not frozen"]
        bills = self.bills()
        for cap, window in (("max_spend_total", None), ("max_spend_per_day", DAY)):
            for start, end, most in overspent(bills, self.rules[cap], window=window):
                self.problems.append(f"{most:.2f} of {cap} {self.rules[cap]:.2f} from {start:.0f} to {end:.0f}")
        return self

    def most_per_day(self) -> float:
        return highest(self.bills(), DAY)

    def summary(self) -> str:
        made = sum(p.created for p in self.providers)
        rates = f"{self.slow / self.requests:.2%} slow, {self.failed / self.requests:.2%} failed"
        return (
            f"{self.now / DAY:.1f} days, {self.requests} requests of the controllers ({rates}), {made} machines,"
            f" {len(self.waits)} replacements, spent {self.cost():.2f} of {self.rules['max_spend_total']:.0f}, at most"
            f" {self.most_per_day():.2f} of {self.rules['max_spend_per_day']:.0f} in 24 h,"
            f" {'ended' if self.ended else 'not ended'}"
        )


def play(seed: int, **options: Any) -> Month:
    return Month(seed, exclusive=seed % 3 == 0, **options).play()
