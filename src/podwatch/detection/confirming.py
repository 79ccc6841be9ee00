"""Corroborating signals: further evidence that training is dead. A signal that cannot be observed is unavailable and
agrees with nothing; its failure counts only if it was healthy during this start.
"""

from collections.abc import Iterable
from dataclasses import replace

from podwatch.config.settings import HangSettings
from podwatch.detection.learned import Learned
from podwatch.detection.observe import DEAD, Turn, lasting_seconds
from podwatch.detection.start import ENGINE_ROLES, Life
from podwatch.detection.window import Signal, Window, agreeing, fact, healthy, signal
from podwatch.domain.finding import Agreement, Evidence, counted
from podwatch.domain.process import ProcessRole, ProcessSample
from podwatch.domain.snapshot import Health

NEAR_SECONDS = 60.0
"""An engine process that ended longer than this before the memory fell is unrelated: it was replaced since, or was only
a fork, which has its parent's name until it calls exec."""
REPLACED_SECONDS = 5.0
"""A replacement of a server can take this long to appear: its parent may have ended it in order to start it again."""
LIVENESS_SECONDS = 150.0
"""prime-rl's ``/liveness`` times out after 30 s and is requested every 30 s: at least three failures in a row. It can
queue behind a weight update; three failures in a row mean that the update hangs."""
STEP_LATE_K = 3.0
"""Median steps without a step until the first line of the status shows it, and until missing steps agree with a death.
It is no proof: an evaluation or a save takes as long."""
LEAST_EMPTY = 3
"""Readings of empty memory, however short ``hold`` is: two could be a transient."""
LOG_FRESH_SECONDS = 900.0
GIB = 1 << 30
STEPS = "steps"


def quiet_seconds(policy: HangSettings) -> float:
    """The base of the times for which a signal that healthy steps interrupt too must fail: above the waits inside one
    healthy step. Less only for an operator who allows less time without a step."""
    return min(600.0, 0.4 * policy.floor)


def agree_seconds(policy: HangSettings) -> float:
    """Seconds that a server must show no activity to agree with a hang. prime-rl allows 720 s for one weight update.
    During it requests stall, no token is generated, ``/liveness`` is blocked, and training can continue afterwards. An
    operator who sets ``floor`` lower knows the run's updates."""
    return min(2 * 720.0, policy.floor)


def no_step_limit(learned: Learned, policy: HangSettings) -> float:
    """Seconds without a step that agree with a death. Uses the gap between progress samples, not the step time: if only
    checkpoints show progress, samples are rare. Before the first gap is known it is at least the hang floor."""
    gap = learned.median_gap_seconds
    return max(600.0, policy.floor if gap is None else STEP_LATE_K * gap)


# -- processes ---------------------------------------------------------------------------------------------------------


def cuda(turn: Turn, index: int) -> Signal:
    """Agrees if no process of the tree holds a CUDA context on this GPU. On a shared GPU only the engine's count."""
    window, reading, unseen = turn.start.of(f"cuda{index}"), turn.snapshot.trainer, ""
    if not reading.ok:
        unseen = reading.detail or "not observed"
    elif window.armed and window.since is None:
        shared = index in turn.policies.gpu.shared
        asked = [p for p in turn.trainer.descendants if not shared or p.role in ENGINE_ROLES]
        unreadable = sum(p.cuda is None for p in asked)
        unseen = f"cannot read {counted(unreadable, 'process', 'processes')}" if unreadable else ""
    name = f"CUDA context on gpu{index}"
    return signal(name, window, "gone", unseen=unseen, sound="held", never="never seen on this pod")


def replacement(turn: Turn, since: float) -> ProcessSample | None:
    """A living engine or server process that was started after ``since``, or one poll before: a reading notices the end
    of the old one later. Empty memory and a refused ``/health`` are normal while it loads its model. None also if ages
    are unknown."""
    young = turn.snapshot.trainer.at - since + min(2.0, turn.policies.gpu.hold / 4)
    found = (p for p in turn.trainer.descendants if p.role in ENGINE_ROLES and p.state not in DEAD)
    return next((p for p in found if (age := turn.age(p)) is not None and age < young), None)


def named(process: ProcessSample) -> str:
    return f"{process.name} (process {process.identity.pid})"


def ended_engines(turn: Turn, since: float) -> list[Life]:
    """Engine and server processes that had lived long and ended around ``since`` or later, or of whose role none is
    left; without those that training does not need, or that were replaced. The newest end is last."""
    least, at = lasting_seconds(turn.policies.gpu), turn.snapshot.trainer.at
    found = [
        life
        for life in turn.start.lives.values()
        if life.role in ENGINE_ROLES
        and life.ended_at is not None
        and life.seconds >= least
        and turn.needs(life.role)
        and (life.role not in turn.start.present or life.ended_at >= since - NEAR_SECONDS)
        and (life.role is ProcessRole.ENGINE or at - life.ended_at >= REPLACED_SECONDS)
    ]
    return sorted(found, key=lambda life: life.ended_at or 0.0)


def engine(turn: Turn, since: float) -> Signal:
    """Agrees if an engine process (or inference server) that lived around ``since`` has ended. Unavailable while a
    newer one is loading: it may not have an engine process yet."""
    name, reading, seen = "engine process", turn.snapshot.trainer, "engine" in turn.learned.seen
    if not reading.ok:
        return Signal(name, reading.detail or "not observed")
    if new := replacement(turn, since):
        return Signal(name, f"{named(new)} was started since")
    alive = sum(p.role is ProcessRole.ENGINE and p.state not in DEAD for p in turn.trainer.descendants)
    for life in reversed(ended_engines(turn, since)):
        if replacement(turn, life.last) is None and life.ended_at is not None:
            left = f"; {alive} alive" if life.role is ProcessRole.ENGINE and alive else ""
            return signal(name, fact(life.ended_at, reading.at), f"{life.name} ended{left}")
    first = turn.start.first_reading
    if seen and not alive and turn.needs(ProcessRole.ENGINE) and first is not None:
        return signal(name, fact(first, reading.at), "none is left")  # it ended while podwatch did not watch
    return healthy(name, f"{alive} alive") if seen else Signal(name, "none recognised on this pod")


def started_since(turn: Turn, ended: float) -> str | None:
    """The name of a process that the launcher, or a script below it, started after this end; empty if there is none,
    None if unknown. Workers started by the other roles do not count."""
    if turn.snapshot.boot_at is None:
        return None
    missing = turn.snapshot.trainer.at - ended - 1.0  # the time of an end is exact only to the next reading
    processes = turn.trainer.descendants
    others = {p.identity.pid for p in processes if p.role not in (ProcessRole.LAUNCHER, ProcessRole.OTHER)}
    young = (p for p in processes if p.parent_pid not in others and (turn.age(p) or 0.0) < missing)
    return next((p.name for p in young), "")


# -- inference servers -------------------------------------------------------------------------------------------------


def _server(
    turn: Turn, name: str, prefix: str, value: str, *, unseen: str = "", sound: str = "ok",
    never: str = "never healthy during this start", seconds: float = 0.0,
) -> Signal:  # fmt: skip
    """The signal of the server whose window has failed the longest: one of several is enough."""
    reading = turn.snapshot.inference
    armed = {url: w for url in turn.start.servers if (w := turn.start.of(f"{prefix}:{url}")).armed}
    url = max(armed, key=lambda url: (armed[url].since is not None, armed[url].seconds), default="")
    worst = armed.get(url, Window())
    unseen = (reading.detail or never) if not reading.ok else unseen if worst.since is None and armed else ""
    return signal(name, worst, f"{value} at {url}", unseen=unseen, sound=sound, never=never, seconds=seconds)


def health(turn: Turn) -> Signal:
    """Agrees if ``/health`` of any server is refused or 5xx after a 200 during this start. A timeout is no evidence of
    a death, and the answer of a router is no evidence about the engines behind it."""
    start = turn.start
    armed = [s for s in start.servers.values() if start.of(f"health:{s.newest.url}").armed]
    engines = [s for s in armed if s.counts]
    unseen = "" if engines else "only a server without counters answers: a router does not check its engines"
    if any(s.newest.health is not Health.OK for s in engines):
        unseen = "timeout"
    down = {str(s.newest.health) for s in armed if start.of(f"health:{s.newest.url}").since is not None}
    return _server(turn, "health", "health", " or ".join(sorted(down)), unseen=unseen)


def sick(turn: Turn, seconds: float) -> Signal:
    """Agrees if ``/health`` of a server has not been 200 for ``seconds``, timeouts included."""
    return _server(turn, "health", "sick", "failing", seconds=seconds)


def liveness(turn: Turn, seconds: float = LIVENESS_SECONDS) -> Signal:
    """Agrees if an engine that passed prime-rl's ``/liveness`` before has failed it for ``seconds``."""
    never = "not observed, or this server has no such route"
    return _server(turn, "liveness", "liveness", "failing", never=never, seconds=seconds)


def tokens(turn: Turn, seconds: float) -> Signal:
    """Agrees if a server has had running requests and no new token for ``seconds``."""
    unseen = "" if any(s.works for s in turn.start.servers.values()) else "no request is running"
    return _server(
        turn, "generation tokens", "tokens", "flat while requests run", unseen=unseen, sound="increasing",
        never="not reported", seconds=seconds,
    )  # fmt: skip


# -- steps -------------------------------------------------------------------------------------------------------------


def steps(turn: Turn, since: float, *, needed: bool = False) -> Signal:
    """Agrees if no step was made for longer than ``no_step_limit`` after ``since``.

    Time before ``since`` does not count: a long step may have been in flight. A step in flight can complete after the
    engine died, so a single step only makes the signal unavailable. Disagrees if tokens were generated within the
    limit, or if steps were made after every step in flight had completed: training continues without the missing
    process, unless that process is ``needed``."""
    progress, reading, at = turn.start.progress, turn.snapshot.progress, turn.at
    active, newest, made = progress.active_at, progress.newest_at, turn.start.tokens_at
    if not reading.ok or active is None or newest is None:
        return Signal(STEPS, reading.detail or "not observed")
    limit = no_step_limit(turn.learned, turn.policies.hang)
    if made is not None and made > max(since, at - limit):
        return healthy(STEPS, "tokens were generated since", at - made)
    if not needed and newest > since + limit:
        return healthy(STEPS, "training made steps long after", newest - since)
    quiet = fact(max(active, since), at)
    if quiet.seconds > limit:
        return signal(STEPS, quiet, f"none for {quiet.seconds:.0f} s (limit {limit:.0f} s)")
    if active > since + turn.policies.gpu.hold:
        return healthy(STEPS, f"a step or a save {at - active:.0f} s ago", at - active)
    return Signal(STEPS, f"none for {at - active:.0f} s, too early to judge", seconds=at - active)


def steps_agree(signals: Iterable[Signal]) -> bool:
    return any(s.name == STEPS for s in agreeing(signals))


# -- GPUs --------------------------------------------------------------------------------------------------------------


def memory(turn: Turn) -> Signal:
    """Agrees if a dedicated inference GPU that was full during this start has been empty for ``hold``."""
    start, policy, gpus = turn.start, turn.policies.gpu, turn.snapshot.gpus
    own = {i: start.of(f"gpu{i}") for i in policy.inference if i not in policy.shared}
    known = {g.index for g in gpus.value or ()} if gpus.ok else set()
    index = max(own, key=lambda i: (own[i].since is not None, own[i].armed, own[i].seconds), default=-1)
    window, unseen = own.get(index, Window()), ""
    if not known.issuperset(own) or start.mig & own.keys() or index not in start.memory:
        unseen = gpus.detail or "not observed"
    elif window.since is not None and memory_may_fall(turn):
        unseen = "empty, possibly by sleep mode"
    value = f"{start.memory[index].value / GIB:.2f} GiB" if index in start.memory else ""
    return signal(
        "gpu memory", window, value, unseen=unseen, sound=f"{value} held", never="never full during this start",
        seconds=policy.hold, samples=LEAST_EMPTY,
    )  # fmt: skip


def memory_may_fall(turn: Turn) -> str:
    """Why empty device memory is no evidence in this run; empty if it is evidence."""
    sleep = turn.policies.inference.sleep
    if sleep == "yes":
        return 'configured with [inference] sleep = "yes"'
    if sleep == "auto" and turn.start.sleeps:
        return "the engine was started with --enable-sleep-mode"
    asleep = sleep == "auto" and "sleep" in turn.learned.seen
    return "the engine has been asleep (/is_sleeping)" if asleep else ""


def trainers_memory(turn: Turn, ended: float) -> Signal:
    """Agrees if the trainer's own GPUs are empty and no process was started since its end: a script that trains in
    phases starts the next phase, a launcher that only waits starts nothing."""
    start, gpus, unseen = turn.start, turn.snapshot.gpus, ""
    window = start.of("trainer-gpus")
    empty = ", ".join(f"GPU {index}" for index in sorted(start.own_gpus)) + " empty"
    if not start.own_gpus:
        unseen = "the trainer has no GPU of its own, or podwatch does not know it"
    elif not gpus.ok:
        unseen = gpus.detail or "not observed"
    elif window.since is not None and (later := started_since(turn, ended)) != "":
        unseen = f"{empty}, but {later} was started since" if later else f"{empty}; process start times are unknown"
    return signal(
        "trainer's gpu memory", window, empty, unseen=unseen, sound="held", never="never full during this start",
        seconds=turn.policies.gpu.hold, samples=LEAST_EMPTY,
    )  # fmt: skip


def idle(turn: Turn) -> Signal:
    """Agrees if all GPUs of this run have been idle, and no token was made, for long enough: longer if no request is
    known to be in flight. Rollouts that wait for tools leave every GPU idle for minutes, and only time distinguishes
    them from a stuck orchestrator."""
    name, gpus, policy = "gpu utilisation", turn.snapshot.gpus, turn.policies.hang
    window, made, servers = turn.start.of("idle"), turn.start.tokens_at, turn.start.servers.values()
    unseen = turn.start.idle_unknown or ("" if gpus.ok else gpus.detail or "not observed")
    if window.since is not None and made is not None:
        # Token counts are read less often than GPUs: the last tokens show up after the GPUs became idle.
        quiet = replace(window, since=max(window.since, made))
        if not unseen and window.armed and quiet.seconds < min(60.0, window.seconds):
            return healthy(name, "idle, but tokens are generated", quiet.seconds)
        window = quiet
    in_flight = turn.snapshot.inference.ok and any(s.works and not s.newest.asleep for s in servers)
    limit = agree_seconds(policy) if in_flight else 3.0 * quiet_seconds(policy)
    return signal(
        name, window, "all idle", unseen=unseen, sound="busy", never="never seen busy", seconds=limit,
        early=f"all idle, not long enough ({limit:.0f} s)",
    )  # fmt: skip


# -- logs --------------------------------------------------------------------------------------------------------------


def logs(turn: Turn, rule: str) -> tuple[Evidence, ...]:
    """Matches of log rules that support this verdict: shown with it, never a reason for it."""
    needed = {r.name: r.count for r in turn.policies.log_rules if rule in r.supports}
    return tuple(
        Evidence(
            f"log: {match.rule}", f"{match.count} x in the {match.role or 'trainer'}'s log: {match.line[:160]}",
            Agreement.AGREES, max(0.0, turn.at - match.first_at),
        )
        for match in turn.snapshot.logs.value or ()
        if match.rule in needed
        and match.count >= needed[match.rule]
        and turn.at - match.last_at <= LOG_FRESH_SECONDS
    )  # fmt: skip
