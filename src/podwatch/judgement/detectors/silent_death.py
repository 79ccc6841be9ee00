"""Silent death of the inference engine: its GPU is empty and nobody says a word (DESIGN section 3, promise 3).

vLLM's API server ends with code 0 when its engine dies, and the launcher ignores a 0 (facts/prime-rl.md section 4):
device memory is what tells. Memory alone never kills; one other signal has to agree, and a signal that cannot be
observed agrees with nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity, Verdict
from podwatch.domain.policy import DetectionPolicy
from podwatch.domain.process import ProcessRole, ProcessSample
from podwatch.domain.snapshot import GpuSample, GpuState, Health, InferenceSample, Snapshot, TrainerSample
from podwatch.judgement.detectors.window import NO_RHYTHM, NOT_HELD, Held, Rhythm
from podwatch.judgement.learned import Learned
from podwatch.judgement.progress import Progress

BASELINE_POLLS = 5
"""Observations at or above ``baseline_min_bytes`` before a baseline stands (10 s at the default poll)."""
BASELINE_WINDOW = 15
"""The baseline is the highest median over this many observations: a spike shorter than half of it (15 s) leaves no
trace.
"""
SHARED_DROP_RATIO = 0.4
"""On a GPU that a trainer shares, a death is a drop by this part of the baseline. The inference share itself is not
learned yet; vLLM is given 0.4 to 0.9 of the memory in every colocated example, and a trainer's allocator gives back
less than this between steps."""
MIN_SAMPLES_BELOW = 3
"""However short ``hold`` is, two observations could be one blink."""
GAP_SHARE_OF_HOLD = 0.75
"""Three polls of 2 s against a hold of 8 s: a hole longer than this is no observation of the window."""
NEAR_SECONDS = 60.0
"""An engine process that ended longer than this before the memory fell was another matter: it was replaced since, or
was never one (a fork bears its parent's title until it execs)."""
ENGINE_LOOKS_KEPT = 32
_ENGINE_ROLES = frozenset({ProcessRole.ENGINE, ProcessRole.INFERENCE})


@dataclass(frozen=True, slots=True)
class GpuWatch:
    index: int
    recent: tuple[int, ...] = ()
    healthy_polls: int = 0
    baseline_bytes: int = 0
    below: Held = NOT_HELD
    value: int = 0
    fell_at: float | None = None


@dataclass(frozen=True, slots=True)
class SilentDeathState:
    gpus: tuple[GpuWatch, ...] = ()
    rhythm: Rhythm = NO_RHYTHM
    engines: tuple[tuple[float, int], ...] = ()
    """(when, how many) engine processes were seen at two looks running; of the last NEAR_SECONDS, or those before the
    memory fell."""
    engines_now: int = 0
    looked_at: float = float("-inf")
    tokens: float | None = None
    tokens_grew_at: float | None = None


def advance(
    state: SilentDeathState,
    snapshot: Snapshot,
    progress: Progress,
    learned: Learned,
    policy: DetectionPolicy,
    *,
    ending: bool,
) -> tuple[SilentDeathState, Learned, tuple[Finding, ...]]:
    """One turn. ``ending``: the run is finishing or was told to stop, so its engine may go."""
    trainer = snapshot.trainer.value if snapshot.trainer.ok else None
    alive = trainer is not None and trainer.alive
    if alive and trainer is not None:
        state = _follow_engines(state, trainer, snapshot.trainer.at)
        learned = learned.saw(*_holders_seen(trainer.descendants, policy), *(["engine"] if state.engines_now else []))
    servers = snapshot.inference.value if snapshot.inference.ok else None
    if servers and any(s.health is Health.OK for s in servers):
        learned = learned.saw("health")
    state = _follow_tokens(state, servers, snapshot.inference.at)
    if progress.newest_at is not None:
        learned = learned.saw("progress")
    state, learned = _follow_memory(state, snapshot, learned, policy)
    findings: list[Finding] = []
    if alive and trainer is not None and not ending:
        for watch in state.gpus:
            if _dead(watch, policy) and f"gpu{watch.index}" in learned.seen:
                findings.append(_judge(watch, state, snapshot, trainer, progress, learned, policy))
    return state, learned, tuple(findings)


def _follow_engines(state: SilentDeathState, trainer: TrainerSample, at: float) -> SilentDeathState:
    if at <= state.looked_at:
        return state
    now = sum(1 for p in trainer.descendants if p.role is ProcessRole.ENGINE)
    falls = [w.fell_at for w in state.gpus if w.fell_at is not None]
    kept = tuple(seen for seen in state.engines if seen[0] >= min((at, *falls)) - NEAR_SECONDS)
    both = (at, min(state.engines_now, now))
    # The same count again: only its time moves on.
    kept = (*kept[:-1], both) if kept and kept[-1][1] == both[1] else (*kept, both)
    return replace(state, engines=kept[-ENGINE_LOOKS_KEPT:], engines_now=now, looked_at=at)


def _follow_memory(
    state: SilentDeathState, snapshot: Snapshot, learned: Learned, policy: DetectionPolicy
) -> tuple[SilentDeathState, Learned]:
    reading = snapshot.gpus
    samples = {g.index: g for g in reading.value or ()} if reading.ok else {}
    watches = {w.index: w for w in state.gpus}
    rhythm = state.rhythm.update(reading.at) if reading.ok else state.rhythm
    fresh = reading.ok and (state.rhythm.last_at is None or reading.at > state.rhythm.last_at)
    max_gap = rhythm.max_gap(GAP_SHARE_OF_HOLD * policy.hold_seconds)
    for index in policy.inference_gpus:
        watch = watches.get(index, GpuWatch(index))
        memory = _memory(samples.get(index))
        if memory is None:
            # Blind, pending, lost or missing: no evidence, and the window has a hole.
            watches[index] = replace(watch, below=Held(None, 0, reading.at), fell_at=None)
            continue
        if fresh:
            watch = _observe(
                watch, memory, reading.at, max_gap, policy, armed=f"gpu{index}" in learned.seen, learned=learned
            )
            watches[index] = watch
            if watch.healthy_polls >= BASELINE_POLLS and watch.baseline_bytes:
                learned = learned.with_baseline(index, watch.baseline_bytes)
                # Memory may be full long before the engine works: armed only once something else was healthy too.
                if {"progress", "health"} & set(learned.seen):
                    learned = learned.saw(f"gpu{index}")
    return replace(state, gpus=tuple(watches[i] for i in sorted(watches)), rhythm=rhythm), learned


def _memory(sample: GpuSample | None) -> int | None:
    if sample is None or sample.state is not GpuState.OK:
        return None
    return sample.memory_used_bytes


def _observe(
    watch: GpuWatch,
    memory: int,
    at: float,
    max_gap: float,
    policy: DetectionPolicy,
    *,
    armed: bool,
    learned: Learned,
) -> GpuWatch:
    baseline = watch.baseline_bytes or (learned.baseline(watch.index) or 0 if armed else 0)
    if watch.index in policy.shared_gpus:
        below = baseline > 0 and memory <= baseline * (1 - SHARED_DROP_RATIO)
    else:
        below = memory < policy.memory_floor_bytes
    held = watch.below.update(below, at, max_gap)
    healthy = memory >= policy.baseline_min_bytes and not below
    recent = (*watch.recent, memory)[-BASELINE_WINDOW:] if healthy else watch.recent
    polls = watch.healthy_polls + 1 if healthy else (0 if watch.healthy_polls < BASELINE_POLLS else watch.healthy_polls)
    if healthy and polls >= BASELINE_POLLS:
        baseline = max(watch.baseline_bytes, int(median(recent)))
    return GpuWatch(watch.index, recent, polls, baseline, held, memory, held.since)


def _dead(watch: GpuWatch, policy: DetectionPolicy) -> bool:
    return watch.below.samples >= MIN_SAMPLES_BELOW and watch.below.seconds >= policy.hold_seconds


def _judge(
    watch: GpuWatch,
    state: SilentDeathState,
    snapshot: Snapshot,
    trainer: TrainerSample,
    progress: Progress,
    learned: Learned,
    policy: DetectionPolicy,
) -> Finding:
    gib = 1 << 30
    baseline = watch.baseline_bytes or learned.baseline(watch.index) or 0
    memory = Evidence(
        f"gpu{watch.index} memory",
        f"{watch.value / gib:.2f} GiB, was {baseline / gib:.2f} GiB",
        Agreement.AGREES,
        watch.below.seconds,
    )
    since = watch.fell_at if watch.fell_at is not None else snapshot.at
    second = (
        cuda_evidence(watch.index, trainer.descendants, learned, shared=watch.index in policy.shared_gpus),
        engine_evidence(trainer, max((n for _, n in state.engines), default=0), learned, since),
        health_evidence(snapshot, learned),
        _no_step_evidence(snapshot, progress, state, since, learned, policy),
    )
    confirmed = any(e.agreement is Agreement.AGREES for e in second)
    if confirmed:
        agreeing = ", ".join(e.signal for e in second if e.agreement is Agreement.AGREES)
        return Finding(
            FindingKind.SILENT_DEATH,
            Severity.CRITICAL,
            f"the inference engine on GPU {watch.index} died silently: its memory is gone ({agreeing} agrees)",
            since,
            verdict=Verdict.RESTART,
            confirmed=True,
            evidence=(memory, *second),
            subject=f"gpu{watch.index}",
        )
    return Finding(
        FindingKind.SILENT_DEATH,
        Severity.WARNING,
        f"memory of GPU {watch.index} is gone, but no second signal agrees: not restarting",
        since,
        suggestion="look at the inference log; set the inference URL so that its health can be asked",
        evidence=(memory, *second),
        subject=f"gpu{watch.index}",
    )


def cuda_evidence(index: int, processes: Iterable[ProcessSample], learned: Learned, *, shared: bool) -> Evidence:
    """Does a process of the tree hold a CUDA context on this GPU? On a shared GPU only the engine's are asked."""
    name = f"CUDA context on gpu{index}"
    asked = [p for p in processes if not shared or p.role in _ENGINE_ROLES]
    if any(p.cuda and index in p.gpus for p in asked):
        return Evidence(name, "held", Agreement.DISAGREES)
    if f"cuda{index}" not in learned.seen:
        return Evidence(name, "never seen on this pod", Agreement.UNAVAILABLE)
    unreadable = sum(1 for p in asked if p.cuda is None)
    if unreadable:
        return Evidence(name, f"{unreadable} processes cannot be read", Agreement.UNAVAILABLE)
    return Evidence(name, "none any more", Agreement.AGREES)


def engine_evidence(trainer: TrainerSample, most_engines: int, learned: Learned, since: float) -> Evidence:
    """Are all engine processes there that were there when the memory fell at ``since``? An inference server that ended
    counts as well."""
    living = {p.role for p in trainer.descendants}
    for gone in trainer.required_exits:
        if gone.role in _ENGINE_ROLES and (gone.role not in living or gone.seen_gone_at >= since - NEAR_SECONDS):
            return Evidence("engine process", f"{gone.name} ended ({gone.status.describe()})", Agreement.AGREES)
    now = sum(1 for p in trainer.descendants if p.role is ProcessRole.ENGINE)
    before = max(most_engines, 1 if "engine" in learned.seen else 0)
    if not before:
        return Evidence("engine process", "none recognised on this pod", Agreement.UNAVAILABLE)
    if now < before:
        return Evidence("engine process", f"{now} of {before} left", Agreement.AGREES)
    return Evidence("engine process", f"{now} alive", Agreement.DISAGREES)


def health_evidence(snapshot: Snapshot, learned: Learned) -> Evidence:
    """Is ``/health`` refused or 5xx, having been 200 before? A timeout says nothing about a death."""
    if not snapshot.inference.ok or not snapshot.inference.value:
        return Evidence("health", snapshot.inference.detail or "not observed", Agreement.UNAVAILABLE)
    if "health" not in learned.seen:
        return Evidence("health", "never was healthy during this start", Agreement.UNAVAILABLE)
    for server in snapshot.inference.value:
        if server.health in (Health.REFUSED, Health.UNHEALTHY):
            status = f" ({server.http_status})" if server.http_status else ""
            return Evidence("health", f"{server.health}{status} at {server.url}", Agreement.AGREES)
    if all(s.health is Health.OK for s in snapshot.inference.value):
        return Evidence("health", "ok", Agreement.DISAGREES)
    return Evidence("health", "timeout", Agreement.UNAVAILABLE)


def no_step_limit(learned: Learned, policy: DetectionPolicy) -> float:
    """Seconds without a step that agree with a death. ``gap`` and not ``step``: where only checkpoints tell, signs
    are rare.
    """
    return max(policy.no_step_confirm_floor_seconds, policy.no_step_confirm_k * (learned.median_gap_seconds or 0.0))


def _no_step_evidence(
    snapshot: Snapshot,
    progress: Progress,
    state: SilentDeathState,
    since: float,
    learned: Learned,
    policy: DetectionPolicy,
) -> Evidence:
    if not snapshot.progress.ok or progress.active_at is None:
        return Evidence("steps", "not observed", Agreement.UNAVAILABLE)
    quiet = snapshot.at - progress.active_at
    if state.tokens_grew_at is not None and state.tokens_grew_at > since:
        return Evidence("steps", "tokens were generated since", Agreement.DISAGREES)
    if progress.active_at > since + policy.hold_seconds:
        return Evidence("steps", "a step or a save since", Agreement.DISAGREES)
    limit = no_step_limit(learned, policy)
    if quiet > limit:
        return Evidence("steps", f"none for {quiet:.0f} s (limit {limit:.0f} s)", Agreement.AGREES, quiet)
    return Evidence("steps", f"none for {quiet:.0f} s, too early to tell", Agreement.UNAVAILABLE, quiet)


def _follow_tokens(state: SilentDeathState, servers: tuple[InferenceSample, ...] | None, at: float) -> SilentDeathState:
    counts = [s.generation_tokens_total for s in servers or () if s.generation_tokens_total is not None]
    if not counts:
        return state
    total = sum(counts)
    if state.tokens is not None and total > state.tokens:
        return replace(state, tokens=total, tokens_grew_at=at)
    return replace(state, tokens=total)


def _holders_seen(processes: Iterable[ProcessSample], policy: DetectionPolicy) -> list[str]:
    seen: set[str] = set()
    for process in processes:
        if process.cuda:
            for index in process.gpus.intersection(policy.inference_gpus):
                if index not in policy.shared_gpus or process.role in _ENGINE_ROLES:
                    seen.add(f"cuda{index}")
    return sorted(seen)
