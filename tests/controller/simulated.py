"""A run, its pods, its provider and its store over simulated time, with a controller that looks at them.

The rules that are checked at every moment: no machine is requested beside a living one of this run, nothing is spent
above a cap, no machine of another label is destroyed, and a request is in the records before it is sent.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from podwatch.controller.configuration import ControllerConfiguration, ProviderConfiguration
from podwatch.controller.decide import Decision
from podwatch.controller.loop import Controller
from podwatch.controller.machines import Listing, Rented, RentedState, label_of
from podwatch.controller.provider import OutcomeUnknown, ProviderError
from podwatch.controller.records import RecordFile, spent
from podwatch.controller.run_view import RunView
from podwatch.domain.engine_and_attempt import Instance
from podwatch.domain.lease import Heartbeat
from podwatch.store.keys import RunKeys
from podwatch.store.objects.errors import StoreOutage, StoreRefused
from tests.support.memory_objects import MemoryObjects

TAG = "sabcdefg"
KEYS = RunKeys("run")
START = 1.8e9


@dataclass
class Store(MemoryObjects):
    skew: float | None = 0.0
    away: bool = False
    refused: bool = False

    def __post_init__(self) -> None:
        self.before = self._ask

    def _ask(self, _operation: str, key: str) -> None:
        if self.away:
            raise StoreOutage("away", where=key)
        if self.refused:
            raise StoreRefused("key", "the store refuses the key", where=key, fix="correct it")


@dataclass
class Machine:
    id: str
    label: str
    since: float
    price: float
    until: float | None = None
    boots: bool = True
    silent: bool = False
    listed: bool = True
    shown_at: float = 0.0
    """From then on lists show it, if they do at all."""
    step: int = 0


@dataclass
class World:
    """``sick``: chances of the provider's faults, by name: refuse, unknown, lost, twice, liar, late, hides, unlisted,
    no_boot."""

    path: Path
    seed: int = 0
    caps: Mapping[str, object] = field(default_factory=dict)
    sick: Mapping[str, float] = field(default_factory=dict)
    now: float = 0.0
    store: Store = field(default_factory=Store)
    machines: list[Machine] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    looks: list[Decision] = field(default_factory=list)
    requests: int = 0
    destroyed: list[str] = field(default_factory=list)
    finished: bool = False
    _next_look: float = 0.0

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.path.mkdir(exist_ok=True)
        values = {
            "max_price_per_hour": 2.0, "max_spend_per_day": 100.0, "max_spend_total": 1000.0,
            "max_machines_per_day": 50, **self.caps,
        }  # fmt: skip
        provider = ProviderConfiguration(command=("x",))
        self.configuration = ControllerConfiguration(
            run_id="run", store="b2://bucket", provider=provider, records=self.path / "records.json",
            **values,  # type: ignore[arg-type]
        )  # fmt: skip
        self.controller = self.started()
        self.beat("user-pod", state="preempted")

    # -- what the controller is given ---------------------------------------------------------------------------------

    def boottime(self) -> float:
        return self.now

    def wall(self) -> float:
        return START + self.now

    def started(self) -> Controller:
        """A new process of the controller."""
        file = RecordFile(self.configuration.records_path, "run", TAG)
        records = file.load()
        view = RunView(self.store, KEYS, self, records.controller)
        return Controller(self.configuration, view, file, records, self, self)

    def list(self, run_id: str) -> Listing:
        if self.chance("unknown"):
            raise ProviderError("list failed")
        if self.chance("liar"):
            return Listing("me")
        shown = [m for m in self.living() if m.listed and self.now >= m.shown_at]
        return Listing("me", tuple(Rented(m.id, m.label, RentedState.RUNNING, m.price, None, "") for m in shown))

    def create(
        self, run_id: str, generation: int, label: str, max_price: float, env: Mapping[str, str]
    ) -> tuple[str, float]:
        if self.chance("refuse"):
            raise ProviderError("no offer")
        self.requests += 1
        recorded = [m.number for m in self.file().load().machines]
        if generation not in recorded:
            self.problems.append(f"machine {generation} was requested before it was recorded")
        if others := [m.id for m in self.living() if m.label.startswith("podwatch:run:") and m.label.endswith(TAG)]:
            self.problems.append(f"{self.now:.0f}: machine {generation} was requested beside {others}")
        if self.chance("lost"):
            raise OutcomeUnknown("nothing was created, and nobody knows")
        made = [self.rent(label, max_price * self.dice.uniform(0.3, 1.0)) for _ in range(1 + self.chance("twice"))]
        late = self.now + self.dice.uniform(0, 240) if self.chance("late") else 0.0
        for machine in made:
            machine.shown_at = late
        if self.chance("unknown"):
            raise OutcomeUnknown("no answer")
        made[0].listed = not self.chance("unlisted")  # only of the one that the answer names: no list has to show it
        return made[0].id, made[0].price

    def destroy(self, machine: str, label: str) -> None:
        if self.chance("unknown"):
            raise ProviderError("no")
        found = next(m for m in self.machines if m.id == machine)
        if found.label != label or not label.endswith(TAG) or not label.startswith("podwatch:run:"):
            self.problems.append(f"{machine} with the label {found.label} was destroyed")
        self.destroyed.append(machine)
        found.until = self.now

    # -- what happens -------------------------------------------------------------------------------------------------

    def file(self) -> RecordFile:
        return RecordFile(self.configuration.records_path, "run", TAG)

    def chance(self, name: str) -> bool:
        return self.dice.random() < self.sick.get(name, 0.0)

    def living(self) -> "Sequence[Machine]":
        return [m for m in self.machines if m.until is None]

    def rent(self, label: str = "", price: float = 1.0) -> Machine:
        name = f"m{len(self.machines)}"
        made = Machine(name, label or label_of("run", 1, TAG), self.now, price, boots=not self.chance("no_boot"))
        self.machines.append(made)
        return made

    def beat(self, host: str, machine: Machine | None = None, **fields: object) -> None:
        instance = Instance("", "", "", "", machine.label if machine is not None else "")
        said = Heartbeat(
            writer_id=host, host=host, generation=1, state="running", phase="running", desired="running",
            overall="ok", instance=instance, written_wall=self.wall(),
        )  # fmt: skip
        self.store.wall = self.wall()
        self.store.data[KEYS.heartbeat] = (replace(said, **fields).to_bytes(), self.wall())  # type: ignore[arg-type]

    def advance(self, seconds: float, looks: bool = True) -> None:
        """Half a minute at a time: pods beat, the controller looks when it wants to."""
        end = self.now + seconds
        while self.now < end:
            self.now += 30.0
            self.store.wall = self.wall()
            for machine in self.living():
                self._lives(machine)
            if looks and self.now >= self._next_look:
                self.look()
            self._check_money()

    def _lives(self, machine: Machine) -> None:
        if self.chance("dies"):
            machine.silent = True
        if self.chance("vanishes"):
            machine.until = self.now
        if self.chance("hides"):
            machine.listed = False
        ordered = b'"stopped"' in self.store.data.get(KEYS.control, (b"", 0.0))[0]
        if machine.silent or not machine.boots or self.now - machine.since < 300 or self.store.away:
            return
        machine.step += 1
        if self.finished:
            self.beat(machine.id, machine, desired="finished", outcome="finished", state="released", step=machine.step)
        elif ordered:
            self.beat(machine.id, machine, state="released", step=machine.step)
        else:
            self.beat(machine.id, machine, step=machine.step)

    def look(self) -> Decision:
        look = self.controller.turn()
        self.looks.append(look)
        self._next_look = self.now + (look.next_turn if look.soon else 30.0)
        return look

    def _check_money(self) -> None:
        for name, window in (("max_spend_total", None), ("max_spend_per_day", 86400.0)):
            if (cost := self.cost(window)) > getattr(self.configuration, name) + 1e-6:
                self.problems.append(f"{self.now:.0f}: {name}: {cost:.2f}")

    def cost(self, window: float | None = None) -> float:
        start = 0.0 if window is None else self.now - window
        return sum(
            m.price * max(0.0, (self.now if m.until is None else m.until) - max(m.since, start)) / 3600
            for m in self.machines
        )

    def spent_in_records(self) -> float:
        return spent(self.file().load().machines, self.wall())


def seeds(count: int) -> range:
    """The same ones each time, or those of today with PODWATCH_CONTROLLER_SEED=today."""
    import os

    first = os.environ.get("PODWATCH_CONTROLLER_SEED", "0")
    start = int(time.time()) // 86400 if first == "today" else int(first)
    return range(start, start + int(os.environ.get("PODWATCH_CONTROLLER_MONTHS") or count))
