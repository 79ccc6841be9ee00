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
from podwatch.detection.window import Signal, Window, failing, healthy, unavailable
from podwatch.domain.finding import Agreement, Evidence, counted
from podwatch.domain.process import ProcessRole, ProcessSample
from podwatch.domain.snapshot import Health, ServerKind, TrainerSample
from podwatch.policy.overall_status import STEP_LATE_K

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
    name, window = f"CUDA context on gpu{index}", turn.start.of(f"cuda{index}")
    if turn.trainer is None:
        return unavailable(name, turn.snapshot.trainer.detail or "not observed")
    if not window.armed:
        return unavailable(name, "never seen on this pod")
    if window.since is not None:
        return failing(name, "gone", window)
    asked = [p for p in turn.trainer.descendants if index not in turn.policies.gpu.shared or p.role in ENGINE_ROLES]
    unreadable = sum(1 for p in asked if p.cuda is None)
    if unreadable:
        return unavailable(name, f"cannot read {counted(unreadable, 'process', 'processes')}")
    return healthy(name, "held")


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


def health(turn: Turn) -> Signal:
    """Agrees if ``/health`` of any server is refused or 5xx after a 200 during this start. A timeout is no evidence of
    a death, and the answer of a router is no evidence about the engines behind it."""
    reading = turn.snapshot.inference
    if not reading.ok or not reading.value:
        return unavailable("health", reading.detail or "not observed")
    armed = [s for s in reading.value if turn.start.of(f"health:{s.url}").armed]
    if not armed:
        return unavailable("health", "never healthy during this start")
    for sample in armed:
        window = turn.start.of(f"health:{sample.url}")
        if window.since is not None:
            status = f" ({sample.http_status})" if sample.http_status else ""
            return failing("health", f"{sample.health}{status} at {sample.url}", window)
    engines = [s for s in armed if s.kind is ServerKind.ENGINE]
    if not engines:
        return unavailable("health", "only a router answers, which does not check its engines")
    if all(s.health is Health.OK for s in engines):
        return healthy("health", "ok")
    return unavailable("health", "timeout")


def _longest(turn: Turn, prefix: str) -> tuple[str, Window] | None:
    """The server whose window is the longest, with its address: one hanging server of several is enough."""
    found = [(url, turn.start.of(f"{prefix}:{url}")) for url in turn.start.servers]
    return max(
        (f for f in found if f[1].armed), key=lambda f: (f[1].since is not None, f[1].seconds), default=None
    )  # fmt: skip


def liveness(turn: Turn, seconds: float = LIVENESS_SECONDS) -> Signal:
    """Agrees if an engine that passed prime-rl's ``/liveness`` before has failed it for ``seconds``."""
    found = _longest(turn, "liveness") if turn.snapshot.inference.ok else None
    if found is None:
        return unavailable("liveness", "not observed, or this server has no such route")
    url, window = found
    if window.since is None:
        return healthy("liveness", "ok")
    return failing("liveness", f"failing at {url}", window, seconds)


def tokens(turn: Turn, seconds: float) -> Signal:
    """Agrees if a server has had running requests and no new token for ``seconds``."""
    found = _longest(turn, "tokens") if turn.snapshot.inference.ok else None
    if found is None:
        return unavailable("generation tokens", "not reported")
    url, window = found
    if window.since is not None:
        return failing("generation tokens", f"flat while requests run at {url}", window, seconds)
    if not any(s.work for s in turn.start.servers.values()):
        return unavailable("generation tokens", "no request is running")
    return healthy("generation tokens", "increasing")


def sick(turn: Turn, seconds: float) -> Signal:
    """Agrees if ``/health`` of a server has not been 200 for ``seconds``, timeouts included."""
    found = _longest(turn, "sick") if turn.snapshot.inference.ok else None
    if found is None:
        return unavailable("health", turn.snapshot.inference.detail or "never healthy during this start")
    url, window = found
    return healthy("health", "ok") if window.since is None else failing("health", f"failing at {url}", window, seconds)


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
    policy, gpus, name = turn.policies, turn.snapshot.gpus, "gpu memory"
    own = [i for i in policy.gpu.inference if i not in policy.gpu.shared]
    known = {g.index for g in gpus.value or ()} if gpus.ok else set()
    if not own or not known.issuperset(own) or turn.start.mig & set(own):
        return unavailable(name, gpus.detail or "not observed")
    empty = [i for i in own if turn.start.of(f"gpu{i}").since is not None]
    if not empty:
        values = [turn.start.levels[i].value for i in own if i in turn.start.levels]
        return healthy(name, f"{min(values) / GIB:.2f} GiB held") if values else unavailable(name, "not observed")
    if memory_may_fall(turn):
        return unavailable(name, "empty, possibly by sleep mode")
    longest = max(empty, key=lambda i: (turn.start.of(f"gpu{i}").armed, turn.start.of(f"gpu{i}").seconds))
    window, value = turn.start.of(f"gpu{longest}"), f"{turn.start.levels[longest].value / GIB:.2f} GiB"
    early = f"{value}, not long enough" if window.armed else "never full during this start"
    return failing(name, value, window, policy.gpu.hold, LEAST_EMPTY, early=early)


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
    name, start = "trainer's gpu memory", turn.start
    window = start.of("trainer-gpus")
    if not start.own_gpus:
        return unavailable(name, "the trainer has no GPU of its own, or podwatch does not know it")
    if not turn.snapshot.gpus.ok:
        return unavailable(name, turn.snapshot.gpus.detail or "not observed")
    if not window.armed:
        return unavailable(name, "never full during this start")
    if window.since is None:
        return healthy(name, "held")
    which = ", ".join(f"GPU {index}" for index in sorted(start.own_gpus))
    later = started_since(turn, trainer, ended)
    if later is None:
        return unavailable(name, f"{which} empty; process start times are unknown")
    if later:
        return unavailable(name, f"{which} empty, but {later} was started since", window.seconds)
    return failing(name, f"{which} empty", window, turn.policies.gpu.hold, LEAST_EMPTY)


def quiet_seconds(policy: HangSettings) -> float:
    """The base of the times for which a signal that healthy steps interrupt too must fail."""
    return min(QUIET_SECONDS, QUIET_SHARE * policy.floor)


def agree_seconds(policy: HangSettings) -> float:
    """Seconds that a server must show no activity to agree with a hang."""
    return min(UPDATE_SECONDS, policy.floor)


def idle(turn: Turn) -> Signal:
    """Agrees if all GPUs of this run have been idle, and no token was made, for long enough."""
    name, window, policies = "gpu utilisation", turn.start.of("idle"), turn.policies
    if not turn.snapshot.gpus.ok or turn.start.idle_unknown:
        return unavailable(name, turn.start.idle_unknown or turn.snapshot.gpus.detail or "not observed")
    if window.since is None:
        return healthy(name, "busy")
    if not window.armed:
        return unavailable(name, "idle, and never seen busy", window.seconds)
    # Token counts are read less often than GPUs: the last tokens show up after the GPUs became idle.
    made = turn.start.tokens_at
    quiet = window if made is None else replace(window, since=max(window.since, made))
    if quiet.seconds < min(LEAST_IDLE_SECONDS, window.seconds):
        return healthy(name, "idle, but tokens are generated", quiet.seconds)
    limit = idle_seconds(turn, policies)
    return failing(name, "all idle", quiet, limit, early=f"all idle, not long enough ({limit:.0f} s)")


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
