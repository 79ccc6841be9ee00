"""Corroborating signals: further evidence that training is dead. A signal that cannot be observed is unavailable and
agrees with nothing; its failure counts only if it was healthy during this start.
"""

from collections.abc import Iterable
from dataclasses import replace

from podwatch.config.settings import HangSettings, Policies
from podwatch.detection.learned import Learned
from podwatch.detection.observe import DEAD, Turn, boottime_of, lasting_seconds
from podwatch.detection.start import ENGINE_ROLES, Life
from podwatch.detection.verdict import agreeing
from podwatch.detection.window import Signal, Window, failing, healthy, signal, unavailable
from podwatch.domain.finding import Agreement, Evidence, counted
from podwatch.domain.process import ProcessRole, ProcessSample
from podwatch.domain.snapshot import Health, TrainerSample

NEAR_SECONDS = 60.0
"""An engine process that ended longer than this before the memory fell is unrelated: it was replaced since, or was only
a fork, which has its parent's name until it calls exec."""
BORN_MARGIN_SECONDS = 2.0
"""A replacement can start this long before a reading notices the end of the old process: one poll."""
REPLACED_SECONDS = 5.0
"""A replacement of a server can take this long to appear: its parent may have ended it in order to start it again."""
LIVENESS_SECONDS = 150.0
"""prime-rl's ``/liveness`` times out after 30 s and is requested every 30 s: at least three failures in a row. It can
queue behind a weight update; three failures in a row mean that the update hangs."""
STEP_LATE_K = 3.0
"""Median steps without a step until the first line of the status shows it: the factor that detectors use as a
corroborating signal (detection/confirming.py). It is no proof: an evaluation or a save takes as long."""
NO_STEP_SECONDS = 600.0
UPDATE_SECONDS = 2 * 720.0
"""prime-rl allows 720 s for one weight update. During it requests stall, no token is generated, ``/liveness`` is
blocked, and training can continue afterwards. Signals that an update stalls agree only after this time, or after
``floor`` if that is shorter: an operator who sets it knows the run's updates.
"""
QUIET_SECONDS = 600.0
"""Above the waits inside one healthy step. Less only for an operator who allows less time without a step:
``QUIET_SHARE`` of it, which is the same at the default ``floor``."""
QUIET_SHARE = 0.4
NO_WORK_FACTOR = 3.0
"""If no request is known to be in flight, idle GPUs agree only after this many times the base: rollouts that wait
for tools leave every GPU idle for minutes, and only time distinguishes them from a stuck orchestrator."""
LEAST_IDLE_SECONDS = 60.0
STARTED_LATER_SECONDS = 1.0
"""Tolerance: start times are exact to 0.01 s, the time of an end only to the interval between two readings."""
LEAST_EMPTY = 3
"""Readings of empty memory, however short ``hold`` is: two could be a transient."""
LOG_FRESH_SECONDS = 900.0
GIB = 1 << 30
STEPS = "steps"


# -- processes ---------------------------------------------------------------------------------------------------------


def cuda(turn: Turn, index: int) -> Signal:
    """Agrees if no process of the tree holds a CUDA context on this GPU. On a shared GPU only the engine's count."""
    window, unseen = turn.start.of(f"cuda{index}"), ""
    if turn.trainer is None:
        unseen = turn.snapshot.trainer.detail or "not observed"
    elif window.armed and window.since is None:
        shared = index in turn.policies.gpu.shared
        asked = [p for p in turn.trainer.descendants if not shared or p.role in ENGINE_ROLES]
        unreadable = sum(p.cuda is None for p in asked)
        unseen = f"cannot read {counted(unreadable, 'process', 'processes')}" if unreadable else ""
    name = f"CUDA context on gpu{index}"
    return signal(name, window, "gone", unseen=unseen, sound="held", never="never seen on this pod")


def replacement(turn: Turn, since: float) -> ProcessSample | None:
    """A living engine or server process that was started after ``since``. Empty memory and a refused ``/health`` are
    normal while it loads its model. None also if ages are unknown."""
    trainer, at = turn.trainer, turn.snapshot.trainer.at
    boottime = boottime_of(turn.snapshot, at)
    if trainer is None or boottime is None:
        return None
    young = at - since + min(BORN_MARGIN_SECONDS, turn.policies.gpu.hold / 4)  # one poll, where polls are quicker
    found = (p for p in trainer.descendants if p.role in ENGINE_ROLES and p.state not in DEAD)
    return next((p for p in found if p.identity.age(boottime) < young), None)


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
    name, trainer, at = "engine process", turn.trainer, turn.snapshot.trainer.at
    if trainer is None:
        return unavailable(name, turn.snapshot.trainer.detail or "not observed")
    if new := replacement(turn, since):
        return unavailable(name, f"{named(new)} was started since")
    alive = sum(1 for p in trainer.descendants if p.role is ProcessRole.ENGINE and p.state not in DEAD)
    for life in reversed(ended_engines(turn, since)):
        if replacement(turn, life.last) is None and life.ended_at is not None:
            left = f"; {alive} alive" if life.role is ProcessRole.ENGINE and alive else ""
            window = Window(armed=True, since=life.ended_at, last=at, samples=1)
            return failing(name, f"{life.name} ended{left}", window)
    if "engine" not in turn.learned.seen:
        return unavailable(name, "none recognised on this pod")
    if not alive and turn.needs(ProcessRole.ENGINE) and turn.start.first_reading is not None:
        # It ended while podwatch did not watch.
        return failing(name, "none is left", Window(armed=True, since=turn.start.first_reading, last=at, samples=1))
    return healthy(name, f"{alive} alive")


def started_since(turn: Turn, trainer: TrainerSample, ended: float) -> str | None:
    """The name of a process that the launcher, or a script below it, started after this end; empty if there is none,
    None if unknown. Workers started by the other roles do not count."""
    boottime = boottime_of(turn.snapshot, turn.snapshot.trainer.at)
    if boottime is None:
        return None
    missing = turn.snapshot.trainer.at - ended
    others = {p.identity.pid for p in trainer.descendants if p.role not in (ProcessRole.LAUNCHER, ProcessRole.OTHER)}
    for process in trainer.descendants:
        if process.parent_pid not in others and process.identity.age(boottime) < missing - STARTED_LATER_SECONDS:
            return process.name
    return ""


# -- inference servers -------------------------------------------------------------------------------------------------


def _server(
    turn: Turn, name: str, prefix: str, value: str, *, unseen: str = "", sound: str = "ok", never: str, seconds: float
) -> Signal:
    """The signal of the server whose window has failed the longest: one of several is enough."""
    reading, none = turn.snapshot.inference, Window()
    windows = {url: turn.start.of(f"{prefix}:{url}") for url in turn.start.servers}
    armed = [url for url, window in windows.items() if window.armed]
    url = max(armed, key=lambda url: (windows[url].since is not None, windows[url].seconds), default="")
    worst = windows.get(url, none)
    unseen = (reading.detail or never) if not reading.ok else unseen if worst.since is None and armed else ""
    return signal(name, worst, f"{value} at {url}", unseen=unseen, sound=sound, never=never, seconds=seconds)


def health(turn: Turn) -> Signal:
    """Agrees if ``/health`` of any server is refused or 5xx after a 200 during this start. A timeout is no evidence of
    a death, and the answer of a router is no evidence about the engines behind it."""
    start = turn.start
    armed = [s for s in start.servers.values() if start.of(f"health:{s.url}").armed]
    engines = [s for s in armed if s.counts]
    unseen = "" if engines else "only a server without counters answers: a router does not check its engines"
    if engines and any(s.health is not Health.OK for s in engines):
        unseen = "timeout"
    down = sorted({str(s.health) for s in armed if start.of(f"health:{s.url}").since is not None})
    never = "never healthy during this start"
    return _server(turn, "health", "health", " or ".join(down), unseen=unseen, never=never, seconds=0.0)


def liveness(turn: Turn, seconds: float = LIVENESS_SECONDS) -> Signal:
    """Agrees if an engine that passed prime-rl's ``/liveness`` before has failed it for ``seconds``."""
    never = "not observed, or this server has no such route"
    return _server(turn, "liveness", "liveness", "failing", never=never, seconds=seconds)


def tokens(turn: Turn, seconds: float) -> Signal:
    """Agrees if a server has had running requests and no new token for ``seconds``."""
    unseen = "" if any(s.work for s in turn.start.servers.values()) else "no request is running"
    return _server(
        turn, "generation tokens", "tokens", "flat while requests run", unseen=unseen, sound="increasing",
        never="not reported", seconds=seconds,
    )  # fmt: skip


def sick(turn: Turn, seconds: float) -> Signal:
    """Agrees if ``/health`` of a server has not been 200 for ``seconds``, timeouts included."""
    return _server(turn, "health", "sick", "failing", never="never healthy during this start", seconds=seconds)


# -- steps -------------------------------------------------------------------------------------------------------------


def steps(turn: Turn, since: float, *, needed: bool = False) -> Signal:
    """Agrees if no step was made for longer than ``no_step_limit`` after ``since``.

    Time before ``since`` does not count: a long step may have been in flight. A step in flight can complete after the
    engine died, so a single step only makes the signal unavailable. Disagrees if tokens were generated within the
    limit, or if steps were made after every step in flight had completed: training continues without the missing
    process, unless that process is ``needed``."""
    progress, reading, at = turn.start.progress, turn.snapshot.progress, turn.at
    active = progress.active_at
    if not reading.ok or active is None:
        return unavailable(STEPS, reading.detail or "not observed")
    limit = no_step_limit(turn.learned, turn.policies.hang)
    made = turn.start.tokens_at
    if made is not None and made > max(since, at - limit):
        return healthy(STEPS, "tokens were generated since", at - made)
    if not needed and progress.newest_at is not None and progress.newest_at > since + limit:
        return healthy(STEPS, "training made steps long after", progress.newest_at - since)
    quiet = Window(armed=True, since=max(active, since), last=at, samples=1)
    if quiet.seconds > limit:
        return failing(STEPS, f"none for {quiet.seconds:.0f} s (limit {limit:.0f} s)", quiet)
    if active > since + turn.policies.gpu.hold:
        return healthy(STEPS, f"a step or a save {at - active:.0f} s ago", at - active)
    return unavailable(STEPS, f"none for {at - active:.0f} s, too early to judge", at - active)


def no_step_limit(learned: Learned, policy: HangSettings) -> float:
    """Seconds without a step that agree with a death. Uses the gap between progress samples, not the step time: if only
    checkpoints show progress, samples are rare. Before the first gap is known it is at least the hang floor."""
    gap = learned.median_gap_seconds
    if gap is None:
        return max(NO_STEP_SECONDS, policy.floor)
    return max(NO_STEP_SECONDS, STEP_LATE_K * gap)


# -- GPUs --------------------------------------------------------------------------------------------------------------


def memory(turn: Turn) -> Signal:
    """Agrees if a dedicated inference GPU that was full during this start has been empty for ``hold``."""
    start, policy, gpus = turn.start, turn.policies.gpu, turn.snapshot.gpus
    own = {i: start.of(f"gpu{i}") for i in policy.inference if i not in policy.shared}
    known = {g.index for g in gpus.value or ()} if gpus.ok else set()
    index = max(own, key=lambda i: (own[i].since is not None, own[i].armed, own[i].seconds), default=-1)
    window, unseen = own.get(index, Window()), ""
    if not own or not known.issuperset(own) or start.mig & own.keys() or index not in start.levels:
        unseen = gpus.detail or "not observed"
    elif window.since is not None and memory_may_fall(turn):
        unseen = "empty, possibly by sleep mode"
    value = "" if index not in start.levels else f"{start.levels[index].value / GIB:.2f} GiB"
    return signal(
        "gpu memory", window, value, unseen=unseen, sound=f"{value} held", never="never full during this start",
        seconds=policy.hold, samples=LEAST_EMPTY,
    )  # fmt: skip


def memory_may_fall(turn: Turn) -> str:
    """Why empty device memory is no evidence in this run; empty if it is evidence."""
    sleep = turn.policies.inference.sleep
    if sleep == "yes":
        return 'configured with [inference] sleep = "yes"'
    if sleep != "auto":
        return ""
    if turn.start.sleeps:
        return "the engine was started with --enable-sleep-mode"
    return "the engine has been asleep (/is_sleeping)" if "sleep" in turn.learned.seen else ""


def trainers_memory(turn: Turn, trainer: TrainerSample, ended: float) -> Signal:
    """Agrees if the trainer's own GPUs are empty and no process was started since its end: a script that trains in
    phases starts the next phase, a launcher that only waits starts nothing."""
    start, unseen = turn.start, ""
    window = start.of("trainer-gpus")
    empty = ", ".join(f"GPU {index}" for index in sorted(start.own_gpus)) + " empty"
    if not start.own_gpus:
        unseen = "the trainer has no GPU of its own, or podwatch does not know it"
    elif not turn.snapshot.gpus.ok:
        unseen = turn.snapshot.gpus.detail or "not observed"
    elif window.since is not None and (later := started_since(turn, trainer, ended)) != "":
        unseen = f"{empty}, but {later} was started since" if later else f"{empty}; process start times are unknown"
    return signal(
        "trainer's gpu memory", window, empty, unseen=unseen, sound="held", never="never full during this start",
        seconds=turn.policies.gpu.hold, samples=LEAST_EMPTY,
    )  # fmt: skip


def quiet_seconds(policy: HangSettings) -> float:
    """The base of the times for which a signal that healthy steps interrupt too must fail."""
    return min(QUIET_SECONDS, QUIET_SHARE * policy.floor)


def agree_seconds(policy: HangSettings) -> float:
    """Seconds that a server must show no activity to agree with a hang."""
    return min(UPDATE_SECONDS, policy.floor)


def idle(turn: Turn) -> Signal:
    """Agrees if all GPUs of this run have been idle, and no token was made, for long enough."""
    name, window, made = "gpu utilisation", turn.start.of("idle"), turn.start.tokens_at
    unseen = turn.start.idle_unknown or ("" if turn.snapshot.gpus.ok else turn.snapshot.gpus.detail or "not observed")
    if window.since is not None and made is not None:
        # Token counts are read less often than GPUs: the last tokens show up after the GPUs became idle.
        quiet = replace(window, since=max(window.since, made))
        if not unseen and window.armed and quiet.seconds < min(LEAST_IDLE_SECONDS, window.seconds):
            return healthy(name, "idle, but tokens are generated", quiet.seconds)
        window = quiet
    limit = idle_seconds(turn, turn.policies)
    return signal(
        name, window, "all idle", unseen=unseen, sound="busy", never="never seen busy", seconds=limit,
        early=f"all idle, not long enough ({limit:.0f} s)",
    )  # fmt: skip


def idle_seconds(turn: Turn, policies: Policies) -> float:
    """Seconds that all GPUs must be idle to agree with a hang."""
    servers = turn.start.servers.values()
    in_flight = turn.snapshot.inference.ok and any(s.work and s.awake for s in servers)
    return agree_seconds(policies.hang) if in_flight else NO_WORK_FACTOR * quiet_seconds(policies.hang)


# -- logs --------------------------------------------------------------------------------------------------------------


def logs(turn: Turn, rule: str) -> tuple[Evidence, ...]:
    """Matches of log rules that support this verdict: shown with it, never a reason for it."""
    reading = turn.snapshot.logs
    if not reading.ok or not reading.value:
        return ()
    supporting = {r.name: r for r in turn.policies.log_rules if rule in r.supports}
    return tuple(
        Evidence(
            f"log: {match.rule}",
            f"{match.count} x in the {match.role or 'trainer'}'s log: {match.line[:160]}",
            Agreement.AGREES,
            max(0.0, turn.at - match.first_at),
        )
        for match in reading.value
        if match.rule in supporting
        and match.count >= supporting[match.rule].count
        and turn.at - match.last_at <= LOG_FRESH_SECONDS
    )


def steps_agree(signals: Iterable[Signal]) -> bool:
    return any(s.name == STEPS for s in agreeing(signals))
