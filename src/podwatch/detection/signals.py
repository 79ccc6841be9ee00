"""Signals that several detectors use: the processes of the tree, and the inference servers.

Updated once per turn, before the detectors; reset when training restarts. ``Learned.seen`` collects the names of the
healthy signals, because only a signal that was healthy before can agree with a death: ``engine``, ``cuda0``,
``health``, ``health:URL``, ``tokens:URL``, ``liveness:URL``, ``progress``, ``sleep``. Once podwatch has seen a step,
``settled`` is added, with ``needs:engine`` and ``needs:inference`` if such a process existed: the end of a server that
the run starts later, for one evaluation, is normal.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from podwatch.config.settings import GpuSettings
from podwatch.detection.learned import Learned
from podwatch.detection.operator_ends import NO_ENDINGS, Endings
from podwatch.detection.operator_ends import follow as follow_endings
from podwatch.detection.progress import Progress
from podwatch.detection.windows import NO_RHYTHM, NOT_HELD, Held, Rhythm
from podwatch.domain.process import ProcessIdentity, ProcessRole, ProcessSample
from podwatch.domain.snapshot import (
    GpuSample,
    Health,
    InferenceSample,
    Liveness,
    RequiredExit,
    ServerKind,
    Snapshot,
    TrainerSample,
)

NEAR_SECONDS = 60.0
"""An engine process that ended longer than this before the memory fell is unrelated: it was replaced since, or was only
a fork, which has its parent's name until it calls exec."""
ENGINE_LOOKS_KEPT = 64
LASTING_HOLDS = 4.0
"""The end of a process that lived for less than this many times ``hold`` (32 s) is no evidence: loading a model takes
longer, and a fork has its parent's name until it calls exec or ends."""
WINDOW_GAP_SECONDS = 30.0
"""Observations further apart than this (or three intervals of the sensor) do not form one window."""
SETTLE_SECONDS = 60.0
"""A step this long after the first look shows which processes training needs: by then all were found."""
ENGINE_ROLES = frozenset({ProcessRole.ENGINE, ProcessRole.INFERENCE})
ENDS_KEPT = 32
LASTING_SECONDS = 32.0
"""The same as an absolute limit, for verdicts that do not wait for ``hold``."""
DEAD = frozenset("ZXx")
"""States in /proc/PID/stat of a process that has ended."""
BORN_MARGIN_SECONDS = 2.0
"""A replacement can start this long before a look notices the end of the old process: one poll."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The result of one look at the processes. ``engines``: number of engine processes. ``holders``: a name such as
    ``cuda0`` for each inference GPU on which a relevant process holds a CUDA context."""

    engines: int = 0
    youngest: ProcessIdentity | None = None
    """The engine process that was started last."""
    holders: tuple[str, ...] = ()
    trainer_gpus: frozenset[int] = frozenset()
    """GPUs held by processes other than the engine's."""
    engine_gpus: frozenset[int] = frozenset()
    blind: bool = False
    """For at least one process podwatch cannot read whether it holds a CUDA context."""
    sleep_mode: bool = False
    """The engine was started with ``--enable-sleep-mode``, at any time of this start."""


NO_TREE = Tree()


@dataclass(frozen=True, slots=True)
class Server:
    """One inference server over time. ``work``: whether requests run or wait; None if it does not report that."""

    url: str
    kind: ServerKind = ServerKind.ENGINE
    health: Health = Health.TIMEOUT
    tokens: float | None = None
    grew_at: float | None = None
    work: bool | None = None
    awake: bool = True
    flat: Held = NOT_HELD
    """Requests run and no token is generated."""
    sick: Held = NOT_HELD
    """``/health`` was ok during this start and is not now."""
    down: Held = NOT_HELD
    """The same, and it is refused or 5xx."""
    stuck: Held = NOT_HELD
    """``/liveness`` was ok during this start and fails now."""
    declared_at: float | None = None
    """When it last answered 5xx after it was ok during this start: vLLM reports its own engine as dead. A server that
    is being stopped closes its socket instead."""


@dataclass(frozen=True, slots=True)
class Missed:
    """An engine or server process that lived for ``LASTING_SECONDS``, was alive at one look and gone at the next, at
    ``at`` (monotonic)."""

    identity: ProcessIdentity
    role: ProcessRole
    at: float


class Seen(NamedTuple):
    """``number`` engine processes at every look from ``first`` to ``last`` (monotonic seconds). ``before``: seconds
    that the youngest had lived before ``first``, because podwatch may have started later."""

    first: float
    last: float
    number: int
    before: float = 0.0


@dataclass(frozen=True, slots=True)
class Signals:
    tree: Tree = NO_TREE
    looked: tuple[ProcessSample, ...] | None = None
    looked_at: float = float("-inf")
    first_looked_at: float | None = None
    minors: tuple[tuple[int, int], ...] = ()
    """(N of /dev/nvidiaN, NVML index) of each GPU. Empty until NVML has reported all; then both numbers count as equal.
    """
    engines: tuple[Seen, ...] = ()
    """Engine processes seen at two consecutive looks (or, at the first look, that had lived long), newest last. A gap
    in the observation starts a new entry."""
    servers: tuple[Server, ...] = ()
    inference_at: float = float("-inf")
    rhythm: Rhythm = NO_RHYTHM
    endings: Endings = NO_ENDINGS
    missed: tuple[Missed, ...] = ()
    """Engine and server processes that were seen to end, newest last."""

    def most_engines(self, since: float, least: float) -> int:
        """The number of engine processes around ``since``, when the memory fell, or later; only those that existed for
        ``least`` seconds count."""
        begin = since - NEAR_SECONDS
        lasting = _lasting(self.engines, least)
        counts = [n for _, last, n in lasting if last >= begin]
        if not any(seen.first <= since and seen.last >= begin for seen in self.engines):
            # The tree could not be read at that time.
            newest = max((last for _, last, _ in lasting if last < since), default=None)
            counts += [n for _, last, n in lasting if last == newest]
        return max(counts, default=0)

    @property
    def tokens_at(self) -> float | None:
        """When a server was last seen to generate tokens (monotonic)."""
        return max((s.grew_at for s in self.servers if s.grew_at is not None), default=None)


NO_SIGNALS = Signals()
NOBODY_SEEN = Seen(float("inf"), float("inf"), 0)


def lasting_seconds(policy: GpuSettings) -> float:
    """Seconds that an engine or server process must have lived for its end to be evidence."""
    return LASTING_HOLDS * policy.hold


def _lasting(engines: tuple[Seen, ...], least: float) -> list[tuple[float, float, int]]:
    """(from, until, n): the periods with at least n engine processes that had lived for ``least`` seconds at the end. A
    short-lived one beside others does not shorten theirs."""
    found: list[tuple[float, float, int]] = []
    for n in {seen.number for seen in engines if seen.number}:
        begin: Seen | None = None
        end = 0.0
        for seen in (*engines, NOBODY_SEEN):
            if begin is None or seen.number < n or seen.first - end > WINDOW_GAP_SECONDS:
                if begin is not None and end - begin.first + begin.before >= least:
                    found.append((begin.first, end, n))
                begin = seen if seen.number >= n else None
            end = seen.last
    return found


def follow(
    signals: Signals, snapshot: Snapshot, progress: Progress, learned: Learned, policy: GpuSettings
) -> tuple[Signals, Learned]:
    """Update the signals for one turn."""
    reading = snapshot.trainer
    trainer = reading.value if reading.ok else None
    if not signals.minors and snapshot.gpus.ok and snapshot.gpus.value:
        signals = _with_minors(signals, snapshot.gpus.value, policy)
    if trainer is not None and trainer.alive and reading.at > signals.looked_at:
        signals = _look_at_tree(signals, trainer.descendants, reading.at, policy, boottime_of(snapshot, reading.at))
        names = signals.tree.holders
        if "engine" not in learned.seen and signals.most_engines(reading.at, lasting_seconds(policy)):
            names = (*names, "engine")
        if any(name not in learned.seen for name in names):
            learned = learned.saw(*names)
        if "settled" not in learned.seen and _settled(signals, progress):
            there = {p.role for p in trainer.descendants} | {gone.role for gone in trainer.required_exits}
            learned = learned.saw("settled", *(f"needs:{role}" for role in there & ENGINE_ROLES))
    elif trainer is not None and trainer.exit is not None:  # its launcher has ended; other processes can end later
        ended = follow_endings(signals.endings, trainer.descendants, reading.at)
        signals = signals if ended is signals.endings else replace(signals, endings=ended)
    inference = snapshot.inference
    if inference.ok and inference.value:
        if inference.at > signals.inference_at:
            signals, learned = _ask_servers(signals, inference.value, inference.at, learned)
    elif signals.rhythm is not NO_RHYTHM:
        # Not observed: every window restarts.
        kept = tuple(Server(s.url, s.kind, tokens=s.tokens, grew_at=s.grew_at) for s in signals.servers)
        signals = replace(signals, servers=kept, rhythm=NO_RHYTHM)
    if progress.newest_at is not None and "progress" not in learned.seen:
        learned = learned.saw("progress")
    return signals, learned


def _with_minors(signals: Signals, gpus: tuple[GpuSample, ...], policy: GpuSettings) -> Signals:
    found = tuple([(g.minor, g.index) for g in gpus if g.minor is not None])
    if len(found) < len(gpus):
        return signals
    return replace(signals, minors=found, tree=summarise(signals.looked or (), policy, found))


def devices(process: ProcessSample, minors: tuple[tuple[int, int], ...]) -> frozenset[int]:
    """NVML indices of the GPUs that ``process`` has open."""
    if not minors or not process.gpus:
        return process.gpus
    return frozenset([index for minor, index in minors if minor in process.gpus])


def _settled(signals: Signals, progress: Progress) -> bool:
    first = signals.first_looked_at
    return first is not None and progress.numbered_at is not None and progress.numbered_at >= first + SETTLE_SECONDS


def needs(role: ProcessRole, learned: Learned) -> bool:
    """Whether training needs this role; False for an engine or server if training made steps before it existed."""
    return role not in ENGINE_ROLES or "settled" not in learned.seen or f"needs:{role}" in learned.seen


def passing(gone: RequiredExit, living: Container[ProcessRole], policy: GpuSettings) -> bool:
    """Whether it lived only briefly, beside another process of its role that still lives."""
    return gone.role in living and gone.seen_for is not None and gone.seen_for < lasting_seconds(policy)


def extra(sample: InferenceSample, seen: tuple[str, ...]) -> bool:
    """Whether training made steps before this server was found: its tokens are evidence of work, its end is none."""
    return sample.discovered and "settled" in seen and f"health:{sample.url}" not in seen


def boottime_of(snapshot: Snapshot, at: float) -> float | None:
    """The monotonic time ``at`` on CLOCK_BOOTTIME; None if unknown."""
    return snapshot.boot_at - (snapshot.at - at) if snapshot.boot_at is not None else None


def _look_at_tree(
    signals: Signals,
    descendants: tuple[ProcessSample, ...],
    at: float,
    policy: GpuSettings,
    boottime: float | None,
) -> Signals:
    looked = signals.looked
    same = looked is not None and (
        looked is descendants
        or (len(looked) == len(descendants) and all(old is new for old, new in zip(looked, descendants, strict=True)))
    )
    tree = signals.tree if same else summarise(descendants, policy, signals.minors)
    if signals.tree.sleep_mode and not tree.sleep_mode:
        tree = replace(tree, sleep_mode=True)  # an engine that has ended may have been asleep
    lived = tree.youngest.age(boottime) if tree.youngest is not None and boottime is not None else 0.0
    if looked is not None:
        both = min(signals.tree.engines, tree.engines)
    else:
        both = tree.engines if lived >= lasting_seconds(policy) else 0
    kept = signals.engines
    if kept and kept[-1].number == both and at - kept[-1].last <= WINDOW_GAP_SECONDS:
        newest = kept[-1]  # the same count again: extend the entry
        kept = (*kept[:-1], Seen(newest.first, at, both, newest.before))
    else:
        kept = (*kept, Seen(at, at, both, lived))[-ENGINE_LOOKS_KEPT:]
    first = at if signals.first_looked_at is None else signals.first_looked_at
    return Signals(
        tree, descendants, at, first, signals.minors, kept, signals.servers, signals.inference_at, signals.rhythm,
        signals.endings if same else follow_endings(signals.endings, descendants, at),
        signals.missed if same else _missed(signals, descendants, at, policy, boottime),
    )  # fmt: skip


def _missed(
    signals: Signals, descendants: tuple[ProcessSample, ...], at: float, policy: GpuSettings, boottime: float | None
) -> tuple[Missed, ...]:
    """Add the engine and server processes that ended since the last look. Unchanged after a gap in the observation
    (the end was not seen) or without CLOCK_BOOTTIME (their age is unknown)."""
    if boottime is None or signals.looked is None or at - signals.looked_at > WINDOW_GAP_SECONDS:
        return signals.missed
    living = {p.identity for p in descendants if p.state not in DEAD}
    least = min(lasting_seconds(policy), LASTING_SECONDS)
    ended = [
        Missed(p.identity, p.role, at)
        for p in signals.looked
        if p.role in ENGINE_ROLES
        and p.state not in DEAD
        and p.identity not in living
        and p.identity.age(boottime) >= least
    ]
    return (*signals.missed, *ended)[-ENDS_KEPT:] if ended else signals.missed


def successor(
    trainer: TrainerSample, since: float, at: float, boottime: float | None, margin: float = BORN_MARGIN_SECONDS
) -> ProcessSample | None:
    """A living engine or server process that started after ``since`` (with a tolerance of ``margin`` seconds): the
    engine is loading again. ``at``: monotonic second of the look; ``boottime``: the same moment on CLOCK_BOOTTIME, the
    clock of process start times. Without it ages are unknown and the result is None."""
    if boottime is None:
        return None
    young = at - since + margin
    for process in trainer.descendants:
        if process.role in ENGINE_ROLES and process.state not in DEAD and process.identity.age(boottime) < young:
            return process
    return None


def summarise(
    descendants: Iterable[ProcessSample], policy: GpuSettings, minors: tuple[tuple[int, int], ...] = ()
) -> Tree:
    """Summarise the processes of one look."""
    engines, holders, blind = 0, set(), False
    youngest: ProcessIdentity | None = None
    ours: set[int] = set()
    theirs: set[int] = set()
    sleep_mode = False
    for process in descendants:
        role = process.role
        if role is ProcessRole.ENGINE:
            engines += 1
            if youngest is None or process.identity.start_ticks > youngest.start_ticks:
                youngest = process.identity
        if role in ENGINE_ROLES and "--" in process.command:
            sleep_mode = sleep_mode or _flag(process.command, "--enable-sleep-mode")
        if process.cuda is None:
            blind = True
        elif process.cuda:
            held = devices(process, minors)
            if role in ENGINE_ROLES:
                ours |= held
            else:
                theirs |= held
            for index in held:
                if index in policy.inference and (index not in policy.shared or role in ENGINE_ROLES):
                    holders.add(f"cuda{index}")
    return Tree(engines, youngest, tuple(sorted(holders)), frozenset(theirs), frozenset(ours), blind, sleep_mode)


def _flag(command: str, flag: str) -> bool:
    """Whether the flag is set; vLLM accepts ``_`` for ``-``."""
    for word in command.split():
        name, _, value = word.partition("=")
        if name.replace("_", "-") == flag and value.lower() not in ("false", "0", "no"):
            return True
    return False


def _ask_servers(
    signals: Signals, samples: tuple[InferenceSample, ...], at: float, learned: Learned
) -> tuple[Signals, Learned]:
    rhythm = signals.rhythm.update(at)
    gap = rhythm.max_gap(WINDOW_GAP_SECONDS)
    before = {s.url: s for s in signals.servers}
    servers = []
    for sample in samples:
        server, names = _ask(before.get(sample.url), sample, at, gap, learned.seen)
        servers.append(server)
        if names:
            learned = learned.saw(*names)
    found = tuple(servers)
    return (
        Signals(
            signals.tree, signals.looked, signals.looked_at, signals.first_looked_at, signals.minors, signals.engines,
            found, at, rhythm, signals.endings, signals.missed,
        ),
        learned,
    )  # fmt: skip


def _ask(
    old: Server | None, sample: InferenceSample, at: float, gap: float, seen: tuple[str, ...]
) -> tuple[Server, list[str]]:
    url, health = sample.url, sample.health
    old = old or Server(url)
    names = []
    if health is Health.OK and f"health:{url}" not in seen:
        names += ["health", f"health:{url}"]
    if sample.liveness is Liveness.OK and f"liveness:{url}" not in seen:
        names.append(f"liveness:{url}")
    if sample.asleep and "sleep" not in seen:
        names.append("sleep")
    tokens, running, waiting = sample.generation_tokens_total, sample.requests_running, sample.requests_waiting
    grew_at, flat = old.grew_at, NOT_HELD
    if tokens is not None and old.tokens is not None:
        if tokens > old.tokens:
            grew_at = at
            if f"tokens:{url}" not in seen:
                names.append(f"tokens:{url}")
        elif tokens == old.tokens and running is not None and not sample.asleep:
            flat = old.flat.update(running > 0 and f"tokens:{url}" in seen, at, gap)
    work = None if running is None else running > 0 or (waiting or 0.0) > 0
    healthy_before = f"health:{url}" in seen
    if names and extra(sample, seen):
        names = []
    return (
        Server(
            url,
            sample.kind,
            health,
            tokens,
            grew_at,
            work,
            not sample.asleep,
            flat,
            NOT_HELD if health is Health.OK else old.sick.update(healthy_before, at, gap),
            old.down.update(healthy_before, at, gap) if health in (Health.REFUSED, Health.UNHEALTHY) else NOT_HELD,
            old.stuck.update(f"liveness:{url}" in seen, at, gap)
            if sample.liveness in (Liveness.UNRESPONSIVE, Liveness.TIMEOUT)
            else NOT_HELD,
            at if health is Health.UNHEALTHY and healthy_before else None if health is Health.OK else old.declared_at,
        ),
        names,
    )
