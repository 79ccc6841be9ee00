"""Signals that several detectors ask about: the processes of the tree, and the inference servers.

Followed once per turn, before the detectors; wiped at a restart boundary. ``seen`` of what was learned gets the names
of those that were healthy, because only a signal that was healthy before can agree with a death (promise 3):
``engine``, ``cuda0``, ``health``, ``health:URL``, ``tokens:URL``, ``liveness:URL``, ``progress``, ``sleep``. And once
a step was made before our eyes ``settled``, with ``needs:engine`` and ``needs:inference`` where such a process was
there: a server that a run starts later, for one evaluation, may end.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from podwatch.domain.policy import DetectionPolicy
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
from podwatch.judgement.detectors.window import NO_RHYTHM, NOT_HELD, Held, Rhythm
from podwatch.judgement.endings import NO_ENDINGS, Endings
from podwatch.judgement.endings import follow as follow_endings
from podwatch.judgement.learned import Learned
from podwatch.judgement.progress import Progress

NEAR_SECONDS = 60.0
"""An engine process that ended longer than this before the memory fell was another matter: it was replaced since, or
was never one (a fork bears its parent's title until it execs)."""
ENGINE_LOOKS_KEPT = 64
LASTING_HOLDS = 4.0
"""A process that lived for less than so many times ``hold`` (32 s) is no engine and no server whose end means
anything: loading a model takes longer, and a fork bears its parent's title until it execs or ends."""
WINDOW_GAP_SECONDS = 30.0
"""Observations further apart than this (or three intervals of the sensor) do not make one window."""
SETTLE_SECONDS = 60.0
"""A step this long after the first look shows what training needs: by then servers and processes were found."""
ENGINE_ROLES = frozenset({ProcessRole.ENGINE, ProcessRole.INFERENCE})
ENDS_KEPT = 32
LASTING_SECONDS = 32.0
"""The same where nothing waits for ``hold``, however long that is."""
DEAD = frozenset("ZXx")
"""States of /proc/PID/stat of a process that has ended."""
BORN_MARGIN_SECONDS = 2.0
"""A process that replaces another may begin a little before a look misses the old one: one poll."""


@dataclass(frozen=True, slots=True)
class Tree:
    """What one look at the processes says. ``holders`` are ``cuda0`` for each inference GPU on which a process that
    counts holds a CUDA context."""

    engines: int = 0
    youngest: ProcessIdentity | None = None
    """The engine process that was started last."""
    holders: tuple[str, ...] = ()
    trainer_gpus: frozenset[int] = frozenset()
    """GPUs that others than the engine hold."""
    engine_gpus: frozenset[int] = frozenset()
    blind: bool = False
    """Of some process nobody can tell whether it holds a context."""
    sleep_mode: bool = False
    """The engine was started with ``--enable-sleep-mode``, at any time of this start."""
    memory_share: float | None = None
    """``--gpu-memory-utilization`` of the engine, where it is on the command line."""


NO_TREE = Tree()


@dataclass(frozen=True, slots=True)
class Server:
    """One inference server through time. ``work`` says whether requests run or wait; None where it does not tell."""

    url: str
    kind: ServerKind = ServerKind.ENGINE
    health: Health = Health.TIMEOUT
    tokens: float | None = None
    grew_at: float | None = None
    work: bool | None = None
    awake: bool = True
    flat: Held = NOT_HELD
    """Requests run and no token comes."""
    sick: Held = NOT_HELD
    """``/health`` was fine during this start, and is not."""
    down: Held = NOT_HELD
    """The same, and it is refused or 5xx."""
    stuck: Held = NOT_HELD
    """``/liveness`` was fine during this start, and is not."""
    declared_at: float | None = None
    """When it last answered 5xx, having been fine during this start: vLLM says so of its own engine. A server that is
    asked to end closes its socket and answers nothing."""


@dataclass(frozen=True, slots=True)
class Missed:
    """A process of the engine's roles that a look at ``at`` (monotonic) no longer showed alive, and the one before it
    did. It had lived for ``LASTING_SECONDS``."""

    identity: ProcessIdentity
    role: ProcessRole
    at: float


class Seen(NamedTuple):
    """``number`` engine processes at every look from ``first`` to ``last`` (monotonic seconds). ``before`` is how many
    seconds the youngest of them had lived until then: podwatch may have come later than they."""

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
    """(N of /dev/nvidiaN, NVML index) of each GPU; empty while NVML has not told all: then they are taken for equal."""
    engines: tuple[Seen, ...] = ()
    """Engine processes that were there at two looks running (or, at the first look, had lived long), newest last; a
    hole in which nobody looked divides them."""
    servers: tuple[Server, ...] = ()
    inference_at: float = float("-inf")
    rhythm: Rhythm = NO_RHYTHM
    endings: Endings = NO_ENDINGS
    missed: tuple[Missed, ...] = ()
    """Engine and server processes that were seen to end, newest last."""

    def most_engines(self, since: float, least: float) -> int:
        """How many engine processes there were around ``since``, when the memory fell, or after it; only those count
        that were there for ``least`` seconds."""
        begin = since - NEAR_SECONDS
        lasting = _lasting(self.engines, least)
        counts = [n for _, last, n in lasting if last >= begin]
        if not any(seen.first <= since and seen.last >= begin for seen in self.engines):
            # Nobody could look just then.
            newest = max((last for _, last, _ in lasting if last < since), default=None)
            counts += [n for _, last, n in lasting if last == newest]
        return max(counts, default=0)

    @property
    def tokens_at(self) -> float | None:
        """When tokens were last seen to be made."""
        return max((s.grew_at for s in self.servers if s.grew_at is not None), default=None)


NO_SIGNALS = Signals()
NOBODY_SEEN = Seen(float("inf"), float("inf"), 0)


def lasting_seconds(policy: DetectionPolicy) -> float:
    """Seconds for which a process must have been seen to be an engine or a server that can be missed."""
    return LASTING_HOLDS * policy.hold_seconds


def _lasting(engines: tuple[Seen, ...], least: float) -> list[tuple[float, float, int]]:
    """(from, until, n): the times with never fewer than n engine processes that had lived for ``least`` seconds at
    their end. One that comes and goes beside others does not shorten theirs."""
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
    signals: Signals, snapshot: Snapshot, progress: Progress, learned: Learned, policy: DetectionPolicy
) -> tuple[Signals, Learned]:
    """One turn."""
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
    elif trainer is not None and trainer.exit is not None:  # its launcher has ended; the rest may end after it
        ended = follow_endings(signals.endings, trainer.descendants, reading.at)
        signals = signals if ended is signals.endings else replace(signals, endings=ended)
    inference = snapshot.inference
    if inference.ok and inference.value:
        if inference.at > signals.inference_at:
            signals, learned = _ask_servers(signals, inference.value, inference.at, learned)
    elif signals.rhythm is not NO_RHYTHM:
        # Nobody could look: every window begins anew (promise 3).
        kept = tuple(Server(s.url, s.kind, tokens=s.tokens, grew_at=s.grew_at) for s in signals.servers)
        signals = replace(signals, servers=kept, rhythm=NO_RHYTHM)
    if (progress.numbered_at is not None or progress.ping_at is not None) and "progress" not in learned.seen:
        learned = learned.saw("progress")
    return signals, learned


def _with_minors(signals: Signals, gpus: tuple[GpuSample, ...], policy: DetectionPolicy) -> Signals:
    found = tuple([(g.minor, g.index) for g in gpus if g.minor is not None])
    if len(found) < len(gpus):
        return signals
    return replace(signals, minors=found, tree=summarise(signals.looked or (), policy, found))


def devices(process: ProcessSample, minors: tuple[tuple[int, int], ...]) -> frozenset[int]:
    """NVML indices of the GPUs that it holds open."""
    if not minors or not process.gpus:
        return process.gpus
    return frozenset([index for minor, index in minors if minor in process.gpus])


def _settled(signals: Signals, progress: Progress) -> bool:
    first = signals.first_looked_at
    return first is not None and progress.numbered_at is not None and progress.numbered_at >= first + SETTLE_SECONDS


def needs(role: ProcessRole, learned: Learned) -> bool:
    """False: an engine or a server of which training made steps before there was one."""
    return role not in ENGINE_ROLES or "settled" not in learned.seen or f"needs:{role}" in learned.seen


def passing(gone: RequiredExit, living: Container[ProcessRole], policy: DetectionPolicy) -> bool:
    """It was there for a moment only, beside one that still is."""
    return gone.role in living and gone.seen_for is not None and gone.seen_for < lasting_seconds(policy)


def extra(sample: InferenceSample, seen: tuple[str, ...]) -> bool:
    """A server that was found after training had made steps without it: that it makes tokens is a sign of life, that it
    is gone says nothing."""
    return sample.discovered and "settled" in seen and f"health:{sample.url}" not in seen


def boottime_of(snapshot: Snapshot, at: float) -> float | None:
    """The same moment on CLOCK_BOOTTIME."""
    return snapshot.boot_at - (snapshot.at - at) if snapshot.boot_at is not None else None


def _look_at_tree(
    signals: Signals,
    descendants: tuple[ProcessSample, ...],
    at: float,
    policy: DetectionPolicy,
    boottime: float | None,
) -> Signals:
    looked = signals.looked
    same = looked is not None and (
        looked is descendants
        or (len(looked) == len(descendants) and all(old is new for old, new in zip(looked, descendants, strict=True)))
    )
    tree = signals.tree if same else summarise(descendants, policy, signals.minors)
    if signals.tree.sleep_mode and not tree.sleep_mode:
        tree = replace(tree, sleep_mode=True)  # an engine that has ended was asleep perhaps
    lived = tree.youngest.age(boottime) if tree.youngest is not None and boottime is not None else 0.0
    if looked is not None:
        both = min(signals.tree.engines, tree.engines)
    else:
        both = tree.engines if lived >= lasting_seconds(policy) else 0
    kept = signals.engines
    if kept and kept[-1].number == both and at - kept[-1].last <= WINDOW_GAP_SECONDS:
        newest = kept[-1]  # the same count again: only its end moves on
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
    signals: Signals, descendants: tuple[ProcessSample, ...], at: float, policy: DetectionPolicy, boottime: float | None
) -> tuple[Missed, ...]:
    """After a hole nobody saw the end, and without the clock of the start times nobody knows how long it had lived."""
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
    """A living engine or server process that began after ``since``: the engine is being loaded again. ``at`` is the
    monotonic second of the look, ``boottime`` the same moment on the clock of the start times; without it nothing is
    known of anybody's age. It may have begun ``margin`` seconds before."""
    if boottime is None:
        return None
    young = at - since + margin
    for process in trainer.descendants:
        if process.role in ENGINE_ROLES and process.state not in DEAD and process.identity.age(boottime) < young:
            return process
    return None


def summarise(
    descendants: Iterable[ProcessSample], policy: DetectionPolicy, minors: tuple[tuple[int, int], ...] = ()
) -> Tree:
    """One pass over the processes."""
    engines, holders, blind = 0, set(), False
    youngest: ProcessIdentity | None = None
    ours: set[int] = set()
    theirs: set[int] = set()
    sleep_mode, share = False, None
    for process in descendants:
        role = process.role
        if role is ProcessRole.ENGINE:
            engines += 1
            if youngest is None or process.identity.start_ticks > youngest.start_ticks:
                youngest = process.identity
        if role in ENGINE_ROLES and "--" in process.command:
            sleep_mode = sleep_mode or _flag(process.command, "--enable-sleep-mode")
            share = share if share is not None else _ratio(process.command, "--gpu-memory-utilization")
        if process.cuda is None:
            blind = True
        elif process.cuda:
            held = devices(process, minors)
            if role in ENGINE_ROLES:
                ours |= held
            else:
                theirs |= held
            for index in held:
                if index in policy.inference_gpus and (index not in policy.shared_gpus or role in ENGINE_ROLES):
                    holders.add(f"cuda{index}")
    return Tree(engines, youngest, tuple(sorted(holders)), frozenset(theirs), frozenset(ours), blind, sleep_mode, share)


def _words(command: str, flag: str) -> Iterable[tuple[str, str]]:
    """(value after ``=``, next word) of each place where the flag stands; vLLM takes ``_`` for ``-`` too."""
    words = command.split()
    for n, word in enumerate(words):
        name, _, value = word.partition("=")
        if name.replace("_", "-") == flag:
            yield value, words[n + 1] if n + 1 < len(words) else ""


def _flag(command: str, flag: str) -> bool:
    return any((value or "true").lower() not in ("false", "0", "no") for value, _ in _words(command, flag))


def _ratio(command: str, flag: str) -> float | None:
    for value, following in _words(command, flag):
        try:
            ratio = float(value or following)
        except ValueError:
            continue
        if 0.0 < ratio <= 1.0:
            return ratio
    return None


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
