"""What detection remembers: of one start of the trainer (``Start``), and of the machine (``Machine``)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from statistics import median, median_high
from typing import Self

from podwatch.detection.progress import Progress
from podwatch.detection.window import FOR_GOOD, GAP_SECONDS, Window
from podwatch.domain.process import ProcessIdentity, ProcessRole
from podwatch.domain.snapshot import InferenceSample, TrainingMetrics

ENGINE_ROLES = frozenset({ProcessRole.ENGINE, ProcessRole.INFERENCE})
CONTEXTS = "the trainer's CUDA contexts"
"""The name of a trainer that shows no name of its own."""
ROLE, LIMIT, THROTTLED = "role:", "limit:", "throttled:"
BRIDGES = {
    ROLE: FOR_GOOD, "launcher": FOR_GOOD,
    "sick:": GAP_SECONDS, "liveness:": GAP_SECONDS, "tokens:": GAP_SECONDS, "idle": GAP_SECONDS,
    LIMIT: 60.0,  # how long a warning stays after the last reading above its limit
    THROTTLED: 90.0,  # three readings of clocks that are not throttled
}  # fmt: skip
"""``Window.bridges`` by the beginning of the name: windows of more than a minute, facts, and warnings."""
PACE_READINGS = 10
LEVEL_POLLS = 5
"""Readings in use before a level of memory is valid (10 s at the default poll)."""
LEVEL_READINGS = 15
"""The level is the median of so many readings: a spike shorter than half of them (15 s) is ignored."""


@dataclass(frozen=True, slots=True)
class Life:
    """A process with a role. ``born``: when it was started, else first seen. ``ended_at``: the first reading without
    it. All monotonic seconds."""

    identity: ProcessIdentity
    role: ProcessRole
    name: str
    born: float
    last: float
    ended_at: float | None = None

    @property
    def seconds(self) -> float:
        """How long it had lived when it was last seen."""
        return self.last - self.born

    @property
    def seen_to_end(self) -> bool:
        """It was alive at one reading and not at the next."""
        return self.ended_at is not None and self.ended_at - self.last <= GAP_SECONDS


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one inference GPU. ``recent``: the newest values while in use, ``used_at``: the newest of them;
    ``highest``: the highest level."""

    recent: tuple[int, ...] = ()
    highest: int = 0
    value: int = -1
    used_at: float | None = None

    @property
    def level(self) -> int:
        """The recent level; 0 before there are enough readings."""
        return median_high(self.recent) if len(self.recent) >= LEVEL_POLLS else 0


@dataclass(frozen=True, slots=True)
class Server:
    """An inference server. ``counts``: it has reported its tokens, so it is an engine's own server; a router, which
    answers for the engines behind it, has none. ``grew_at``: when it last made a token. ``declared_at``: when it last
    answered 5xx after it was healthy: vLLM reports its own engine as dead, while a server that is being stopped closes
    its socket."""

    newest: InferenceSample
    counts: bool = False
    grew_at: float | None = None
    declared_at: float | None = None

    @property
    def works(self) -> bool:
        """Whether requests run or wait."""
        running = self.newest.requests_running
        return running is not None and (running > 0 or (self.newest.requests_waiting or 0.0) > 0)


@dataclass(frozen=True, slots=True)
class Tree:
    """The newest reading of the processes. ``trainer_gpus``: held by processes other than the engine's. ``blind``: for
    a process it cannot be read which GPUs it holds."""

    trainer_gpus: frozenset[int] = frozenset()
    engine_gpus: frozenset[int] = frozenset()
    blind: bool = False


@dataclass(frozen=True, slots=True)
class Saves:
    """``step``: the newest complete checkpoint's, ``at``: its time. ``whole``: it appeared in this start, so that the
    interval to the next one can be learned."""

    step: int | None = None
    at: float | None = None
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Streak:
    """Consecutive unhealthy training steps, and the newest value."""

    count: int
    since: float
    value: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The training figures of this start. ``steps``: the newest step of each figure, because those of one step can
    arrive in separate rows. ``flat_steps``: steps without a change of the reward."""

    streaks: Mapping[str, Streak] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    rewards: tuple[float, ...] = ()
    flat_since: float | None = None
    flat_steps: int = 0
    falling_since: float | None = None
    taken: tuple[TrainingMetrics, ...] = ()


@dataclass(slots=True)
class Windows:
    """Windows by name. ``read``: the newest times at which a sensor was read."""

    windows: dict[str, Window] = field(default_factory=dict)
    read: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def copy(self) -> Self:
        """The same, with dictionaries of its own: all other values are never changed in place."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: dict(value) for name, value in found.items() if isinstance(value, dict)})

    def of(self, name: str) -> Window:
        found = self.windows.get(name)
        if found is None:
            found = Window(bridges=next((b for begin, b in BRIDGES.items() if name.startswith(begin)), 0.0))
        return found

    def watch(self, name: str, good: bool | None, at: float, gap: float = GAP_SECONDS, *, arms: bool = True) -> Window:
        """Add a reading to the window of this name and return it."""
        found = self.windows[name] = self.of(name).observe(good, at, gap, arms=arms)
        return found

    def pace(self, sensor: str, at: float) -> float:
        """Note a reading and return the usual seconds between two of them; 0 if unknown."""
        times = self.read.get(sensor, ())
        if not times or at > times[-1]:
            times = self.read[sensor] = (*times, at)[-PACE_READINGS:]
        return median(b - a for a, b in pairwise(times)) if len(times) > 1 else 0.0

    def lost(self, begins: tuple[str, ...], at: float, asked: frozenset[str] = frozenset()) -> None:
        """No reading for the windows whose names begin so, but of the objects ``asked``."""
        for name, window in self.windows.items():
            if name.startswith(begins) and name.partition(":")[2] not in asked:
                self.windows[name] = window.observe(None, at)

    def reset(self) -> None:
        """After nothing was observed."""
        for name, window in self.windows.items():
            self.windows[name] = window.reset()


@dataclass(slots=True)
class Start(Windows):
    """One start of the trainer; the next one begins with an empty one. Names of windows: ``gpu0`` (memory), ``cuda0``
    (contexts), ``role:trainer``, ``health:URL`` (refused or 5xx), ``sick:URL`` (no 200), ``liveness:URL``,
    ``tokens:URL``, ``idle``, ``trainer-gpus``, ``launcher``."""

    id: str | None = None
    progress: Progress = field(default_factory=Progress)
    lives: dict[ProcessIdentity, Life] = field(default_factory=dict)
    present: frozenset[str] = frozenset()
    others: frozenset[ProcessIdentity] = frozenset()
    """Processes that are not known to be the engine's and had lived long. ``other_ended``: when one was first missing:
    what is known of a trainer whose processes bear no known name."""
    other_ended: float | None = None
    tree: Tree = field(default_factory=Tree)
    first_reading: float | None = None
    read_at: float = float("-inf")
    gap_at: float = float("-inf")
    """The last turn before the newest gap in podwatch's observation: what ended until then was not seen to end."""
    sleeps: bool = False
    """The engine was started with sleep mode, at any time of this start."""
    memory_said: float | None = None
    """When memory was first found to be no evidence (sleep mode, MIG)."""
    minors: dict[int, int] = field(default_factory=dict)
    """The NVML index by N of /dev/nvidiaN. Empty until NVML has reported all; then both count as equal."""
    memory: dict[int, Memory] = field(default_factory=dict)
    mig: frozenset[int] = frozenset()
    servers: dict[str, Server] = field(default_factory=dict)
    idle_unknown: str = "not observed"
    """Why nothing is known about the use of the GPUs; empty if it is."""
    own_gpus: frozenset[int] = frozenset()
    """Used by the trainer alone. ``filled``: those of them that were seen full."""
    filled: frozenset[int] = frozenset()
    host_read_at: float | None = None
    """The first reading of the OOM-kill counter: what it counted until then is no kill of this start."""
    saves: Saves = field(default_factory=Saves)
    figures: Figures = field(default_factory=Figures)
    raised: dict[str, float] = field(default_factory=dict)
    """Log rules that matched often enough, and since when."""

    def ended_roles(self) -> dict[str, float]:
        """Each role of which no process is left, and since when."""
        found = ((name.removeprefix(ROLE), w) for name, w in self.windows.items() if name.startswith(ROLE))
        return {name: w.since for name, w in found if w.since is not None and w.armed}

    @property
    def tokens_at(self) -> float | None:
        """When a server was last seen to generate tokens."""
        return max((s.grew_at for s in self.servers.values() if s.grew_at is not None), default=None)


@dataclass(slots=True)
class Machine(Windows):
    """The pod and podwatch itself; survives a new start of the trainer."""

    watching_since: float | None = None
    boot_at: float | None = None
    stall: tuple[float, float] | None = None
    """(the turn after it, its seconds) of the newest pause in podwatch's own observation."""
    troubled: dict[str, float] = field(default_factory=dict)
    """Since when each sensor gives no reading."""
    ooms: int | None = None
    oom_kills: tuple[tuple[float, int], ...] = ()
    """When the OOM-kill counter of the trainer's cgroup grew, and by how much."""
