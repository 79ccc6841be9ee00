"""What is true of a pod at the moment, and what the sensors last saw of it.

Each sensor looks in its own rhythm, as in the daemon: a turn of the sensing loop gets readings that are up to one poll
old, and a death shows in each of them at another moment. Unchanged values are handed out as the same objects again.
"""

import random
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Any

from tests.drivers.detection import (
    ATTACHED_ID,
    TICKS_PER_SECOND,
    CheckpointMark,
    Desired,
    DiskSample,
    ExitStatus,
    GpuSample,
    GpuState,
    Health,
    HostSample,
    InferenceSample,
    Liveness,
    LogMatch,
    ProcessEnd,
    ProcessRole,
    ProcessSample,
    ProgressSample,
    ProgressSource,
    Reading,
    SensorState,
    Snapshot,
    Supervision,
    TrainerSample,
)
from tests.support.pods.tree import process

GIB = 1 << 30
BEGIN = 5_000.0
"""The monotonic clock when podwatch starts: the machine has been up for a while."""
EPOCH = 1_760_000_000.0
POLL, INFERENCE_POLL, DISK_POLL = 2.0, 5.0, 10.0
"""Seconds between looks, as in the default settings."""
CONFIRM_POLL = 0.5
"""As the sensing loop's: between turns while evidence of a death is incomplete."""
NOTICED = 0.2
"""Seconds from the end of an engine to the turn that it brings about, where the kernel tells of it."""
VARIANTS = 4
SETTLING_LOOKS = 8
"""Looks at a changed tree until nothing more comes of the change: a replacement has 5 s to appear."""

Piece = Generator[float, None, None]
"""Changes the world, and yields the seconds until it is to go on."""


@dataclass(slots=True)
class Server:
    """One inference server. ``rate``: tokens per second it makes while it works."""

    url: str
    router: bool = False
    health: Health = Health.REFUSED
    running: float = 0.0
    tokens: float = 0.0
    rate: float = 0.0
    liveness: Liveness | None = None
    asleep: bool | None = None
    counters: bool = True
    at: float = 0.0
    """When the tokens were last counted."""

    def count(self, now: float) -> None:
        self.tokens += self.rate * (now - self.at)
        self.at = now

    def work(self, now: float, rate: float, running: float) -> None:
        self.count(now)
        self.rate, self.running = rate, running

    def sample(self, now: float) -> InferenceSample:
        self.count(now)
        if self.health in (Health.REFUSED, Health.TIMEOUT):
            return InferenceSample(self.url, self.health, liveness=self.liveness)
        status = 200 if self.health is Health.OK else 503
        if not self.counters:
            return InferenceSample(self.url, self.health, status, liveness=self.liveness)
        return InferenceSample(
            self.url, self.health, status, self.running, float(int(self.tokens)), 0.0, self.liveness, self.asleep,
        )  # fmt: skip


@dataclass(slots=True)
class Card:
    """One GPU. ``noise``: bytes that its memory moves about at random."""

    memory: int = 0
    use: float | None = 0.0
    noise: int = 0
    total: int = 80 * GIB
    state: GpuState = GpuState.OK


@dataclass(slots=True)
class Blind:
    """Sensors that do not answer: name -> why. ``stuck``: those that go on saying what they said last."""

    why: dict[str, tuple[SensorState, str]] = field(default_factory=dict)
    stuck: set[str] = field(default_factory=set)


class World:
    """The pod. Pieces change its attributes through the methods below; ``snapshots`` lets time pass."""

    def __init__(self, seed: int, cards: int, *, poll: float = POLL) -> None:
        self.rng = random.Random(seed)
        self.now = BEGIN
        self.poll = poll
        self.late = 0.05
        """Seconds by which a turn may come later than its poll."""
        self.cards = [Card() for _ in range(cards)]
        self.servers: list[Server] = []
        self.blind = Blind()
        self.processes: tuple[ProcessSample, ...] = ()
        self.alive = False
        self.start_id = ""
        self.started_at = BEGIN
        self.supervision = Supervision.SUPERVISED
        self.exit: ExitStatus | None = None
        self.finish_line = False
        self.desired = Desired.RUNNING
        self.progress: tuple[ProgressSample, ...] = ()
        self.progress_skew = 0.0
        """Seconds by which a jump of the wall clock moved the newest file times."""
        self.saving = False
        self.mark = CheckpointMark()
        self.step = 0
        self.logs: tuple[LogMatch, ...] | None = None
        self.host = HostSample(512 * GIB, 300 * GIB, shm_total_bytes=256 * GIB, shm_used_bytes=8 * GIB, oom_kills=0)
        self.wall_offset = EPOCH - BEGIN
        self.boot_offset = 0.0
        self.stall = 0.0
        """Seconds that the sensing loop loses before its next turn."""
        self.reborn = False
        """podwatch was restarted before this turn: it knows only what it had learned."""
        self.struck_at: float | None = None
        """When a fault struck."""
        self.label = ""
        self.confirming = False
        """The detectors want the next turn soon, and all sensors to look before it."""
        self.pidfds = True
        """The kernel tells of the end of an engine at once."""
        self.told: tuple[ProcessEnd, ...] = ()
        """Ends of which the exit status is known."""
        self._alarm = False
        self._agenda: list[tuple[float, int, str, Piece]] = []
        self._count = 0
        self._palettes: dict[tuple[object, ...], tuple[tuple[GpuSample, ...], ...]] = {}
        self._palette: tuple[tuple[GpuSample, ...], ...] | None = None
        self._turn = 0
        self._settling = SETTLING_LOOKS
        self._trainer: TrainerSample | None = None
        self._readings: dict[str, Reading[Any]] = {}
        self._see = {
            "gpus": self._see_gpus, "trainer": self._see_trainer, "progress": self._see_progress,
            "inference": self._see_inference, "disk": self._see_disk, "host": self._see_host,
        }  # fmt: skip
        # Those with one rhythm look at once: an agenda of half the length, and no figure changes by it.
        for names, every in (
            (("gpus", "trainer", "progress"), POLL), (("inference",), INFERENCE_POLL), (("disk", "host"), DISK_POLL),
        ):  # fmt: skip
            self.add(self._sensors(names, every), "sensor", int(self.rng.random() * every * 1.6) / 8)

    # -- time

    def add(self, piece: Piece, name: str = "", after: float = 0.0) -> None:
        self._count += 1
        heappush(self._agenda, (self.now + after, self._count, name, piece))

    def drop(self, name: str) -> None:
        """What is called so does not go on."""
        self._agenda = [entry for entry in self._agenda if entry[2] != name]
        self._agenda.sort()

    def pass_until(self, at: float) -> None:
        while self._agenda and self._agenda[0][0] <= at:
            due, order, name, piece = heappop(self._agenda)
            self.now = due
            pause = next(piece, None)
            if pause is not None:
                heappush(self._agenda, (due + pause, order, name, piece))
            if self._alarm:
                return
        self.now = at

    def snapshots(self, hours: float) -> Iterator[Snapshot]:
        at, end, random_ = self.now, self.now + hours * 3600.0, self.rng.random
        sooner = False
        while at < end:
            self._alarm = False
            self.pass_until(at)
            if self._alarm:  # the engine ended meanwhile
                at = min(at, self.now + NOTICED)
                self._alarm = False
                self.pass_until(at)
                sooner = True
            if sooner:
                self._look(("gpus", "trainer", "inference"))
            self.confirming = False
            yield self._snapshot(at)
            self.reborn = False
            sooner = self.confirming and not self.stall
            at += CONFIRM_POLL if sooner else self.poll + self.late * random_() + self.stall
            self.stall = 0.0
            self._turn += 1

    def _snapshot(self, at: float) -> Snapshot:
        get = self._readings.get
        return Snapshot(
            at,
            at + self.wall_offset,
            get("gpus", _PENDING),
            get("trainer", _PENDING),
            get("disk", _PENDING),
            get("inference", _NO_URL) if self.servers else _NO_URL,
            get("progress", _PENDING),
            self.saving,
            self.desired,
            get("host", _PENDING),
            _NO_LOG if self.logs is None else Reading(SensorState.OK, at, self.logs),
            _NO_FIGURES,
            self.mark,
            boot_at=at + self.boot_offset,
        )

    # -- sensors

    def _sensors(self, names: tuple[str, ...], every: float) -> Piece:
        while True:
            self._look(names)
            yield every

    def _look(self, names: tuple[str, ...]) -> None:
        why, stuck, readings = self.blind.why, self.blind.stuck, self._readings
        for name in names:
            if why and name in why:
                readings[name] = Reading(why[name][0], self.now, None, why[name][1])
            elif not stuck or name not in stuck:
                readings[name] = Reading(SensorState.OK, self.now, self._see[name]())

    def forget_readings(self) -> None:
        """podwatch was restarted: nothing has been observed yet."""
        self._readings.clear()

    def _see_gpus(self) -> tuple[GpuSample, ...]:
        palette = self._palette
        if palette is None:
            key = tuple((c.memory, c.use, c.noise, c.state) for c in self.cards)
            palette = self._palettes.get(key)
            if palette is None:
                if len(self._palettes) > 256:
                    self._palettes.clear()
                palette = self._palettes[key] = tuple(
                    tuple(self._sample(i, card) for i, card in enumerate(self.cards)) for _ in range(VARIANTS)
                )
            self._palette = palette
        return palette[self._turn % VARIANTS]

    def _sample(self, index: int, card: Card) -> GpuSample:
        if card.state is not GpuState.OK:
            return GpuSample(index, f"GPU-{index}", "H100", card.state, detail="fell off the bus")
        noise = int(card.noise * (self.rng.random() - 0.5)) if card.memory > GIB else 0
        memory = max(0, card.memory + noise)
        use = card.use if not card.use else max(6.0, min(100.0, card.use + self.rng.uniform(-8, 8)))
        return GpuSample(
            index,
            f"GPU-{index}",
            "H100",
            GpuState.OK,
            memory,
            card.total,
            None if use is None else float(int(use)),
            55.0,
        )

    def _see_trainer(self) -> TrainerSample:
        if self._settling and self.alive:
            self._settling -= 1
            self._trainer = TrainerSample(
                self.start_id,
                self.supervision,
                True,
                self.started_at,
                self.processes[0].identity if self.processes else None,
                None,
                self.processes,
                self.finish_line,
                ends=self.told,
            )
        elif self._trainer is None or not self.alive:
            self._trainer = TrainerSample(
                self.start_id, self.supervision, False, self.started_at, None, self.exit, self.processes,
                finish_line=self.finish_line,
            )  # fmt: skip
        return self._trainer

    def _see_progress(self) -> tuple[ProgressSample, ...]:
        return self.progress

    def _see_inference(self) -> tuple[InferenceSample, ...]:
        now = self.now
        return tuple([s.sample(now) for s in self.servers])

    def _see_disk(self) -> DiskSample:
        return _DISK

    def _see_host(self) -> HostSample:
        return self.host

    # -- changes

    def memory(self, index: int, amount: float) -> None:
        self.cards[index].memory = int(amount)
        self._palette = None

    def use(self, indices: Iterable[int], percent: float) -> None:
        for index in indices:
            if self.cards[index].use is not None:
                self.cards[index].use = percent
        self._palette = None

    def card(self, index: int, state: GpuState) -> None:
        self.cards[index].state = state
        self._palette = None

    def look_again(self) -> None:
        """Something about the trainer's tree changed."""
        self._settling = SETTLING_LOOKS
        self._trainer = None

    def spawn(self, *processes: ProcessSample) -> None:
        self.processes = (*self.processes, *self._born(processes))
        self.look_again()

    def _born(self, processes: Iterable[ProcessSample]) -> tuple[ProcessSample, ...]:
        """The same, begun now: a fork is young, whatever title it bears."""
        ticks = int((self.now + self.boot_offset) * TICKS_PER_SECOND)
        return tuple(replace(p, identity=replace(p.identity, start_ticks=ticks)) for p in processes)

    def end(self, *roles: ProcessRole, pids: tuple[int, ...] = ()) -> None:
        """Processes of these roles, or with these numbers, are gone."""
        left = tuple(p for p in self.processes if p.role not in roles and p.identity.pid not in pids)
        if self.pidfds and any(p.role is ProcessRole.ENGINE for p in self.processes if p not in left):
            self._alarm = True
        self.processes = left
        self.look_again()

    def start(self, start_id: str, *processes: ProcessSample) -> None:
        by_hand = ATTACHED_ID if self.supervision is Supervision.ATTACH else ""
        self.start_id, self.started_at, self.alive, self.exit = by_hand + start_id, self.now, True, None
        self.processes, self.finish_line, self.progress, self.saving = self._born(processes), False, (), False
        self.told = ()
        self.logs = None if self.logs is None else ()
        self._readings.pop("trainer", None)  # podwatch looks at another tree: of the last one nothing counts
        self.look_again()

    def stop(self, status: ExitStatus, *, leaving: tuple[ProcessRole, ...] = ()) -> None:
        """The launcher has ended; processes of the roles ``leaving`` behind live on."""
        self.alive, self.exit = False, status
        self.processes = tuple(p for p in self.processes if p.role in leaving)
        self.look_again()

    def sign(self, source: ProgressSource, role: str, step: int | None) -> None:
        sample = ProgressSample(source, role, self.now + self.progress_skew, step)
        self.progress = (*(s for s in self.progress if (s.source, s.role) != (source, role)), sample)

    def fork(self, role: ProcessRole, pid: int) -> None:
        self.spawn(process(pid, role, cuda=False))

    def grow(self, **changes: object) -> None:
        """The host's figures."""
        self.host = replace(self.host, **changes)  # type: ignore[arg-type]


_PENDING: Reading[Any] = Reading(SensorState.PENDING, 0.0, None, "not observed yet")
_NO_URL: Reading[Any] = Reading(SensorState.ABSENT, 0.0, None, "no inference URL configured")
_NO_LOG: Reading[Any] = Reading(SensorState.ABSENT, 0.0, None, "no log is followed")
_NO_FIGURES: Reading[Any] = Reading(SensorState.ABSENT, 0.0, None, "no source of training figures")
_DISK = DiskSample("/app", 1000 * GIB, 500 * GIB, 500 * GIB, 10_000_000, 9_000_000)
