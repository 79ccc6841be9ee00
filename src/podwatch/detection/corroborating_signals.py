"""Corroborating signals: further evidence that training is dead. A signal that cannot be observed is UNAVAILABLE and
agrees with nothing; its failure counts only if it was healthy during this start.
"""

from collections.abc import Iterable

from podwatch.config.settings import HangSettings
from podwatch.detection.base import Look
from podwatch.detection.learned import Learned
from podwatch.detection.operator_ends import perhaps_intended
from podwatch.detection.signals import (
    BORN_MARGIN_SECONDS,
    ENGINE_ROLES,
    NEAR_SECONDS,
    Server,
    boottime_of,
    devices,
    lasting_seconds,
    needs,
    passing,
    successor,
)
from podwatch.detection.windows import Held
from podwatch.domain.finding import Agreement, Evidence, counted
from podwatch.domain.process import ProcessRole
from podwatch.domain.snapshot import GpuState, Health, ServerKind
from podwatch.policy.overall_status import STEP_LATE_K

LOG = "log: "
"""Prefix of evidence from a log rule: shown with a verdict, never a reason for one."""
LOG_FRESH_SECONDS = 900.0
PROVEN_SECONDS = 2.5
"""Least time from the look that missed the engine to the verdict. prime-rl's launcher stops its children one after
another: the inference server, right after it the orchestrator, which SIGTERM ends at once (asyncio has no handler for
it), then the trainer. So a run that is being stopped loses its orchestrator within a second of the server, and a look
notices that a second later. With a look every 0.5 s this makes five looks, and with a GPU poll of 2 s the verdict still
comes within 5 s."""
REFUSED_SECONDS = 4.5
"""The same if no server answered 503: a server that an operator or a supervisor stopped in order to restart it looks
the same. A replacement has this long to appear, nearly as long as in ``required-child-exited``."""
ENGINE_DEAD = "engine-dead"
"""The shipped log rule that matches vLLM's ``EngineDeadError``."""
SEEN_TO_END = "engine seen to end"
LIVENESS_WINDOW_SECONDS = 150.0
"""prime-rl's ``/liveness`` times out after 30 s and is requested every 30 s: at least three failures in a row. It can
queue behind a weight update; three failures in a row mean that the update hangs."""
NO_STEP_SECONDS = 600.0
GIB = 1 << 30


def agreeing(evidence: Iterable[Evidence]) -> list[str]:
    """The names of the signals that agree, without log rules."""
    return [e.signal for e in evidence if e.agreement is Agreement.AGREES and not e.signal.startswith(LOG)]


def cuda(look: Look, index: int) -> Evidence:
    """Agrees if no process of the tree holds a CUDA context on this GPU. On a shared GPU only the engine's count."""
    name = f"CUDA context on gpu{index}"
    trainer = look.trainer
    if trainer is None:
        return Evidence(name, look.snapshot.trainer.detail or "not observed", Agreement.UNAVAILABLE)
    shared = index in look.policies.gpu.shared
    asked = [p for p in trainer.descendants if not shared or p.role in ENGINE_ROLES]
    if any(p.cuda and index in devices(p, look.signals.minors) for p in asked):
        return Evidence(name, "held", Agreement.DISAGREES)
    if f"cuda{index}" not in look.learned.seen:
        return Evidence(name, "never seen on this pod", Agreement.UNAVAILABLE)
    unreadable = sum(1 for p in asked if p.cuda is None)
    if unreadable:
        return Evidence(name, f"cannot read {counted(unreadable, 'process', 'processes')}", Agreement.UNAVAILABLE)
    return Evidence(name, "gone", Agreement.AGREES)


def replaced(look: Look, since: float) -> str:
    """Name and pid of a living engine or server process that was started after ``since``; empty if there is none. Empty
    memory and a refused ``/health`` are normal while it loads its model."""
    trainer, at = look.trainer, look.snapshot.trainer.at
    if trainer is None:
        return ""
    margin = min(BORN_MARGIN_SECONDS, look.policies.gpu.hold / 4)  # one poll, where polls are quicker
    found = successor(trainer, since, at, boottime_of(look.snapshot, at), margin)
    return f"{found.name} (process {found.identity.pid})" if found is not None else ""


def seen_to_end(look: Look, below: Held) -> Evidence | None:
    """Complete evidence of an engine's death, which does not need the ``hold`` window; None while any of it is missing.

    Required: the engine's end was seen in the tree or in its own log; at a later look its memory is gone (``below``)
    and its server refuses or answers 5xx; ``PROVEN_SECONDS`` later launcher, orchestrator and trainer live, and nothing
    shows a signal such as SIGINT. A refusing server proves less than a 503, because a server that is being stopped
    closes its socket first: without a 503 the server's process must be gone too, and ``REFUSED_SECONDS`` count from its
    end.
    """
    snapshot, trainer, signals = look.snapshot, look.trainer, look.signals
    fell = below.since
    if trainer is None or not trainer.alive or fell is None or below.samples < 2 or not snapshot.inference.ok:
        return None
    ended = [m for m in signals.missed if m.at >= fell - NEAR_SECONDS]
    engines = [m for m in ended if m.role is ProcessRole.ENGINE]
    if not needs(ProcessRole.ENGINE, look.learned) or not (engines or dead_in_log(look, fell)):
        return None
    first, since = min([fell, *(m.at for m in engines)]), max([fell, *(m.at for m in engines)])
    least = PROVEN_SECONDS
    own = [s.declared_at for s in signals.servers if s.kind is ServerKind.ENGINE and s.declared_at is not None]
    if not any(at >= first - NEAR_SECONDS for at in own):
        servers = [m.at for m in ended if m.role is ProcessRole.INFERENCE]
        if not servers:
            return None
        since, least = max(since, *servers), REFUSED_SECONDS
    at = snapshot.trainer.at
    looked = min(at, snapshot.gpus.at, snapshot.inference.at)
    if at - since < least or looked <= since or health(look).agreement is not Agreement.AGREES:
        return None
    if replaced(look, first) or perhaps_intended(signals.endings, snapshot, trainer, since):
        return None
    how = f"process {engines[-1].identity.pid} ended" if engines else "reported in vLLM's log"
    return Evidence(SEEN_TO_END, f"{how}; launcher and trainer still run", Agreement.AGREES, at - since)


def dead_in_log(look: Look, since: float) -> bool:
    """Whether the inference server's own log reports the death of its engine around ``since`` or later."""
    reading = look.snapshot.logs
    return reading.ok and any(
        match.rule == ENGINE_DEAD and match.role == ProcessRole.INFERENCE and match.last_at >= since - NEAR_SECONDS
        for match in reading.value or ()
    )


def engine(look: Look, since: float) -> Evidence:
    """Agrees if an engine process (or inference server) that lived around ``since`` has ended. Unavailable while a
    newer server is loading: it may not have an engine process yet."""
    name = "engine process"
    trainer, policy = look.trainer, look.policies
    if trainer is None:
        return Evidence(name, look.snapshot.trainer.detail or "not observed", Agreement.UNAVAILABLE)
    if new := replaced(look, since):
        return Evidence(name, f"{new} was started since", Agreement.UNAVAILABLE)
    if trainer.required_exits:
        living = {p.role for p in trainer.descendants}
        for gone in trainer.required_exits:
            if gone.role not in ENGINE_ROLES or not needs(gone.role, look.learned) or passing(gone, living, policy.gpu):
                continue
            if replaced(look, gone.seen_gone_at):
                continue
            if gone.role not in living or gone.seen_gone_at >= since - NEAR_SECONDS:
                ago = max(0.0, look.snapshot.at - gone.seen_gone_at)
                return Evidence(name, f"{gone.name} ended ({gone.status.describe()})", Agreement.AGREES, ago)
    before = max(
        look.signals.most_engines(since, lasting_seconds(policy.gpu)), 1 if "engine" in look.learned.seen else 0
    )
    if not before:
        return Evidence(name, "none recognised on this pod", Agreement.UNAVAILABLE)
    now = sum(1 for p in trainer.descendants if p.role is ProcessRole.ENGINE)
    if now < before:
        return Evidence(name, f"{now} of {before} left", Agreement.AGREES)
    return Evidence(name, f"{now} alive", Agreement.DISAGREES)


def health(look: Look) -> Evidence:
    """Agrees if ``/health`` of any server is refused or 5xx after a 200 during this start. A timeout is no evidence of
    a death, and the answer of a router is no evidence about the engines behind it."""
    reading = look.snapshot.inference
    if not reading.ok or not reading.value:
        return Evidence("health", reading.detail or "not observed", Agreement.UNAVAILABLE)
    armed = [s for s in reading.value if f"health:{s.url}" in look.learned.seen]
    if not armed:
        return Evidence("health", "never healthy during this start", Agreement.UNAVAILABLE)
    for sample in armed:
        if sample.health in (Health.REFUSED, Health.UNHEALTHY):
            status = f" ({sample.http_status})" if sample.http_status else ""
            window = next((s.down.seconds for s in look.signals.servers if s.url == sample.url), 0.0)
            return Evidence("health", f"{sample.health}{status} at {sample.url}", Agreement.AGREES, window)
    engines = [s for s in armed if s.kind is ServerKind.ENGINE]
    if not engines:
        return Evidence("health", "only a router answers, which does not check its engines", Agreement.UNAVAILABLE)
    if all(s.health is Health.OK for s in engines):
        return Evidence("health", "ok", Agreement.DISAGREES)
    return Evidence("health", "timeout", Agreement.UNAVAILABLE)


def liveness(look: Look, window: float = LIVENESS_WINDOW_SECONDS) -> Evidence:
    """Agrees if an engine that passed prime-rl's ``/liveness`` before has failed it for ``window`` seconds."""
    stuck = _longest(look.signals.servers, "stuck")
    if not look.snapshot.inference.ok or stuck is None:
        return Evidence("liveness", "not observed", Agreement.UNAVAILABLE)
    server, held = stuck
    if held.since is not None:
        if held.seconds >= window:
            return Evidence("liveness", f"failing at {server.url}", Agreement.AGREES, held.seconds)
        return Evidence("liveness", "failing, not long enough", Agreement.UNAVAILABLE, held.seconds)
    if any(name.startswith("liveness:") for name in look.learned.seen):
        return Evidence("liveness", "ok", Agreement.DISAGREES)
    return Evidence("liveness", "this server has no such route", Agreement.UNAVAILABLE)


def tokens(look: Look, window: float) -> Evidence:
    """Agrees if a server has had running requests and no new token for ``window`` seconds."""
    flat = _longest(look.signals.servers, "flat")
    if not look.snapshot.inference.ok or flat is None or not any(s.tokens is not None for s in look.signals.servers):
        return Evidence("generation tokens", "not reported", Agreement.UNAVAILABLE)
    server, held = flat
    if held.since is None and not any(s.work for s in look.signals.servers):
        return Evidence("generation tokens", "no request is running", Agreement.UNAVAILABLE)
    return _window("generation tokens", f"flat while requests run at {server.url}", "increasing", held, window)


def sick(look: Look, window: float) -> Evidence:
    """Agrees if ``/health`` of a server has not been 200 for ``window`` seconds, timeouts included."""
    found = _longest(look.signals.servers, "sick")
    if not look.snapshot.inference.ok or found is None:
        return Evidence("health", look.snapshot.inference.detail or "not observed", Agreement.UNAVAILABLE)
    if not any(f"health:{s.url}" in look.learned.seen for s in look.signals.servers):
        return Evidence("health", "never healthy during this start", Agreement.UNAVAILABLE)
    server, held = found
    return _window("health", f"failing at {server.url}", "ok", held, window)


def steps(look: Look, since: float, *, needed: bool = False) -> Evidence:
    """Agrees if no step was made for longer than ``no_step_limit`` after ``since``.

    Time before ``since`` does not count: a long step may have been in flight. A step in flight can complete after the
    engine died, so a single step only makes the signal unavailable. Disagrees if tokens were generated within the
    limit, or if steps were made after every step in flight had completed: training continues without the missing
    process, unless that process is ``needed``."""
    progress, snapshot = look.progress, look.snapshot
    active = progress.active_at
    if not snapshot.progress.ok or active is None:
        return Evidence("steps", snapshot.progress.detail or "not observed", Agreement.UNAVAILABLE)
    limit = no_step_limit(look.learned, look.policies.hang)
    quiet = snapshot.at - max(active, since)
    made = look.signals.tokens_at
    if made is not None and made > max(since, snapshot.at - limit):
        return Evidence("steps", "tokens were generated since", Agreement.DISAGREES, snapshot.at - made)
    if not needed and progress.newest_at is not None and progress.newest_at > since + limit:
        return Evidence("steps", "training made steps long after", Agreement.DISAGREES, progress.newest_at - since)
    if quiet > limit:
        return Evidence("steps", f"none for {quiet:.0f} s (limit {limit:.0f} s)", Agreement.AGREES, quiet)
    quiet = snapshot.at - active
    if active > since + look.policies.gpu.hold:
        return Evidence("steps", f"a step or a save {quiet:.0f} s ago", Agreement.DISAGREES, quiet)
    return Evidence("steps", f"none for {quiet:.0f} s, too early to judge", Agreement.UNAVAILABLE, quiet)


def no_step_limit(learned: Learned, policy: HangSettings) -> float:
    """Seconds without a step that agree with a death. Uses the gap between progress samples, not the step time: if only
    checkpoints show progress, samples are rare. Before the first gap is known it is at least the hang floor."""
    gap = learned.median_gap_seconds
    if gap is None:
        return max(NO_STEP_SECONDS, policy.floor)
    return max(NO_STEP_SECONDS, STEP_LATE_K * gap)


def memory(look: Look) -> Evidence:
    """Agrees if a dedicated inference GPU that was full during this start is empty now."""
    policy, gpus = look.policies, look.snapshot.gpus
    own = [i for i in policy.gpu.inference if i not in policy.gpu.shared]
    samples = {g.index: g for g in gpus.value or ()} if gpus.ok else {}
    good = [samples[i] for i in own if i in samples and samples[i].state is GpuState.OK and not samples[i].mig]
    values = [g.memory_used_bytes for g in good if g.memory_used_bytes is not None]
    if not own or len(values) < len(own):
        return Evidence("gpu memory", gpus.detail or "not observed", Agreement.UNAVAILABLE)
    low = min(values)
    if low < policy.gpu.floor:
        if not any(f"gpu{g.index}" in look.learned.seen for g in good if g.memory_used_bytes == low):
            return Evidence("gpu memory", "never full during this start", Agreement.UNAVAILABLE)
        if memory_may_fall(look):
            return Evidence("gpu memory", "empty, possibly by sleep mode", Agreement.UNAVAILABLE)
        return Evidence("gpu memory", f"{low / GIB:.2f} GiB", Agreement.AGREES)
    return Evidence("gpu memory", f"{low / GIB:.2f} GiB held", Agreement.DISAGREES)


def memory_may_fall(look: Look) -> str:
    """Why empty device memory is no evidence in this run; empty if it is evidence."""
    policy = look.policies
    if policy.inference.sleep == "yes":
        return 'configured with [inference] sleep = "yes"'
    if policy.inference.sleep != "auto":
        return ""
    if look.signals.tree.sleep_mode:
        return "the engine was started with --enable-sleep-mode"
    return "the engine has been asleep (/is_sleeping)" if "sleep" in look.learned.seen else ""


def logs(look: Look, detector: str) -> tuple[Evidence, ...]:
    """Matches of log rules that support this verdict: shown with it, not counted for it."""
    reading = look.snapshot.logs
    if not reading.ok or not reading.value:
        return ()
    supporting = {rule.name: rule for rule in look.policies.log_rules if detector in rule.supports}
    now = look.snapshot.at
    return tuple(
        Evidence(
            f"{LOG}{match.rule}",
            f"{match.count} x in the {match.role or 'trainer'}'s log: {match.line[:160]}",
            Agreement.AGREES,
            max(0.0, now - match.first_at),
        )
        for match in reading.value
        if match.rule in supporting
        and match.count >= supporting[match.rule].count
        and now - match.last_at <= LOG_FRESH_SECONDS
    )


def _longest(servers: tuple[Server, ...], name: str) -> tuple[Server, Held] | None:
    """The server with the longest window: one hanging server of several is enough."""
    found: tuple[Server, Held] | None = None
    for server in servers:
        held: Held = getattr(server, name)
        if found is None or held.seconds > found[1].seconds or (held.since is not None and found[1].since is None):
            found = (server, held)
    return found


def _window(signal: str, yes: str, no: str, held: Held, window: float) -> Evidence:
    if held.since is None:
        return Evidence(signal, no, Agreement.DISAGREES)
    if held.seconds >= window:
        return Evidence(signal, yes, Agreement.AGREES, held.seconds)
    return Evidence(signal, f"{yes}, not long enough", Agreement.UNAVAILABLE, held.seconds)
