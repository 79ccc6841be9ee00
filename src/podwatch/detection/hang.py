"""Hang: all processes run, and training makes no progress; and finished runs whose processes do not exit
(docs/detection.md).

Long evaluations, saves and steps five times slower than the median are not hangs: the limit is max(floor, k x
median), a save in flight restarts the count, and a silent step source alone never leads to a restart.
"""

from dataclasses import dataclass, replace

from podwatch.config.settings import HangSettings, Policies
from podwatch.detection import corroborating_signals as also
from podwatch.detection.base import DetectorResult, Look
from podwatch.detection.finished_but_running import lingering
from podwatch.detection.learned import Learned
from podwatch.detection.signals import WINDOW_GAP_SECONDS
from podwatch.detection.windows import NO_RHYTHM, NOT_HELD, Held, Rhythm
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity, Verdict
from podwatch.domain.snapshot import GpuState

HEALTH_WINDOW_SHARE = 0.5
"""``/health`` has to fail for this share of the agreement window. An engine in a long weight update can miss several
requests, but not for five minutes."""
UPDATE_SECONDS = 2 * 720.0
"""prime-rl allows 720 s for one weight update. During it requests stall, no token is generated, ``/liveness`` is
blocked, and training can continue afterwards. Signals that an update stalls agree only after this time, or after
``floor`` if that is shorter: an operator who sets it knows the run's updates.
"""
PROGRESS_FRESH_SECONDS = 120.0
"""The step source must have been read this recently; otherwise the silence may be podwatch's own."""
NO_WORK_FACTOR = 3.0
"""If no request is known to be in flight, idle GPUs agree only after this many agreement windows: rollouts that wait
for tools leave every GPU idle for minutes, and only time distinguishes them from a stuck orchestrator."""
LEAST_IDLE_SECONDS = 60.0
IDLE_PERCENT = 5.0
STARTUP_FACTOR = 3.0
"""Patience as a multiple of the longest start-up seen: a cold cache takes two to three times as long as a warm one
(vllm #52682: 3.2 min warm, 5.8-7.5 min cold)."""
STARTUP_MOST_SECONDS = 2 * 3600.0
"""Upper bound of the patience beyond the longest start-up. A cold cache adds minutes, a slow volume an hour; without
this bound, one start of five hours during which an operator fixed something would allow fifteen."""
STANDSTILL_SECONDS = 2 * 3600.0
"""After this time without progress the finding is critical even without a corroborating signal (GPUs that spin in a
collective look busy). torch's own watchdog ends a collective after 10 minutes, or an hour with prime-rl's setting."""


@dataclass(frozen=True, slots=True)
class HangState:
    idle: Held = NOT_HELD
    """All GPUs of this run below ``IDLE_PERCENT``."""
    rhythm: Rhythm = NO_RHYTHM
    blind: str = "not observed"
    """Why utilisation cannot be judged; empty when it can."""


class HangDetector:
    name = "hang"
    kinds = (FindingKind.HANG, FindingKind.FINISHED)
    needs = ("trainer", "progress")
    second = ("gpu utilisation", "generation tokens", "health", "liveness")
    survives_restart = False

    def initial(self) -> HangState:
        return HangState()

    def armed(self, state: HangState, learned: Learned) -> tuple[str, ...]:
        return ("hang",) if "progress" in learned.seen else ()

    def advance(self, state: HangState, look: Look) -> DetectorResult[HangState]:
        state, learned = _observe(state, look)
        trainer, snapshot, progress = look.trainer, look.snapshot, look.progress
        if not look.wanted or trainer is None or not trainer.alive:
            return DetectorResult(state, learned)
        policy = look.policies
        beyond = policy.max_steps is not None and progress.step is not None and progress.step >= policy.max_steps
        if trainer.finish_line or beyond:
            # Only at the target itself: one below it, a trainer that counts from 1 still has its last step to make.
            found = lingering(look, trainer.finish_line, idle=state.idle.seconds, blind=state.blind)
            return DetectorResult(state, learned, (found,) if found is not None else ())
        if snapshot.saving and progress.saving_at == snapshot.at:
            return DetectorResult(state, learned)
        active = progress.active_at
        if active is None:
            finding = _startup(state, look)
        elif snapshot.at - active <= policy.hang.floor:
            return DetectorResult(state, learned)
        else:
            finding = _stalled(state, look, active)
        return DetectorResult(state, learned, (finding,) if finding is not None else ())


DETECTOR = HangDetector()


def limit_seconds(learned: Learned, policy: HangSettings) -> float:
    """Seconds without progress that make a hang possible."""
    return max(policy.floor, policy.k * (learned.median_gap_seconds or 0.0))


def patience_seconds(learned: Learned, policy: Policies) -> float:
    """Seconds allowed from a start to its first step: the configured patience, or several times the longest start-up
    seen, but at most ``STARTUP_MOST_SECONDS`` more than that."""
    longest = max(learned.startups, default=0.0)
    return max(policy.startup_patience, min(STARTUP_FACTOR * longest, longest + STARTUP_MOST_SECONDS))


def run_gpus(look: Look) -> frozenset[int]:
    """NVML indices of this run's GPUs; empty if unknown, and then all GPUs of the pod count.

    If only the inference GPUs are configured, the trainer's are read from the process tree, but only if the tree also
    shows the engine's GPUs correctly: in a container the device numbers in /proc can be the host's.
    """
    policy, tree = look.policies, look.signals.tree
    inference = frozenset(policy.gpu.inference)
    if policy.gpu.trainer:
        return inference | frozenset(policy.gpu.trainer)
    if tree.trainer_gpus and inference <= (tree.engine_gpus | tree.trainer_gpus) and not tree.blind:
        return inference | tree.trainer_gpus | tree.engine_gpus
    return frozenset()


def _observe(state: HangState, look: Look) -> tuple[HangState, Learned]:
    reading, learned = look.snapshot.gpus, look.learned
    if not reading.ok or reading.value is None:
        return (state if state.blind else HangState(blind=reading.detail or "not observed")), learned
    if state.rhythm.last_at is not None and reading.at <= state.rhythm.last_at:
        return state, learned
    ours = run_gpus(look)
    highest, blind, counted = 0.0, "", 0
    for gpu in reading.value:
        if ours and gpu.index not in ours:
            continue
        use = gpu.utilization_percent
        if gpu.state is not GpuState.OK or use is None or gpu.mig:
            blind = f"not reported by GPU {gpu.index}"
            break
        counted += 1
        highest = max(highest, use)
    if not blind and (not counted or counted < len(ours)):
        blind = "NVML does not list every GPU of this run"
    if blind:
        return HangState(NOT_HELD, Rhythm(reading.at, state.rhythm.gaps), blind), learned
    if highest >= IDLE_PERCENT:
        if not learned.utilization_works:
            learned = replace(learned, utilization_works=True)
        if state.idle is NOT_HELD and not state.blind:
            return state, learned
        return HangState(NOT_HELD, Rhythm(reading.at, state.rhythm.gaps), ""), learned
    # The sensor's interval is learned only while the GPUs are idle.
    rhythm = state.rhythm.update(reading.at) if state.idle is not NOT_HELD else Rhythm(reading.at, state.rhythm.gaps)
    return HangState(state.idle.update(True, reading.at, rhythm.max_gap(WINDOW_GAP_SECONDS)), rhythm, ""), learned


def agree_window(policy: HangSettings) -> float:
    """Seconds that a server must show no activity to agree with a hang."""
    return max(policy.agree, min(UPDATE_SECONDS, policy.floor))


def idle_window(look: Look) -> float:
    """Seconds that all GPUs must be idle to agree with a hang."""
    policy = look.policies
    in_flight = look.snapshot.inference.ok and any(s.work and s.awake for s in look.signals.servers)
    return agree_window(policy.hang) if in_flight else NO_WORK_FACTOR * policy.hang.agree


def _idle(state: HangState, look: Look) -> Evidence:
    name = "gpu utilisation"
    if not look.snapshot.gpus.ok or state.blind:
        return Evidence(name, state.blind or look.snapshot.gpus.detail or "not observed", Agreement.UNAVAILABLE)
    if state.idle.since is None:
        return Evidence(name, "busy", Agreement.DISAGREES)
    if not look.learned.utilization_works:
        return Evidence(name, "idle, and never seen busy", Agreement.UNAVAILABLE, state.idle.seconds)
    # Token counts are read less often than GPUs: the last tokens show up after the GPUs became idle.
    made = look.signals.tokens_at
    idle = state.idle.seconds if made is None else min(state.idle.seconds, look.snapshot.at - made)
    if idle < min(LEAST_IDLE_SECONDS, state.idle.seconds):
        return Evidence(name, "idle, but tokens are generated", Agreement.DISAGREES, idle)
    window = idle_window(look)
    if idle >= window:
        return Evidence(name, "all idle", Agreement.AGREES, idle)
    return Evidence(name, f"all idle, not long enough ({window:.0f} s)", Agreement.UNAVAILABLE, idle)


def _second(state: HangState, look: Look) -> tuple[Evidence, ...]:
    policy = look.policies
    window = agree_window(policy.hang)
    return (
        _idle(state, look),
        also.tokens(look, window),
        also.sick(look, policy.hang.agree * HEALTH_WINDOW_SHARE),
        also.liveness(look, window),
    )


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _stalled(state: HangState, look: Look, active: float) -> Finding | None:
    snapshot, progress = look.snapshot, look.progress
    quiet = snapshot.at - active
    limit = limit_seconds(look.learned, look.policies.hang)
    if quiet <= limit or not _fresh(look):
        return None
    second = _second(state, look)
    made = look.signals.tokens_at
    if quiet <= 2 * limit and not also.agreeing(second) and made is not None and snapshot.at - made < limit / 4:
        return None  # an evaluation or long rollouts: the engine works; reported only if it lasts
    first = Evidence("progress", f"none for {quiet:.0f} s (limit {limit:.0f} s)", Agreement.AGREES, quiet)
    what = f"no progress for {_span(quiet)} (limit {_span(limit)})"
    if progress.step is not None:
        what += f" since step {progress.step}"
    worse = quiet > max(STANDSTILL_SECONDS, 2.0 * limit)
    return _finding(what, active, first, second, look, "", worse=worse)


def _startup(state: HangState, look: Look) -> Finding | None:
    progress, at = look.progress, look.snapshot.at
    since = progress.awaited_since
    if since is None:
        return None
    waited, patience = at - since, patience_seconds(look.learned, look.policies)
    if waited <= patience or not _fresh(look):
        return None
    first = Evidence("first step", f"none {waited:.0f} s after the start", Agreement.AGREES, waited)
    what = f"no first step {waited / 60:.0f} min after the start (patience {patience / 60:.0f} min)"
    second = _second(state, look)
    if not look.learned.gap_seconds:
        # No step was ever seen in this run: podwatch may be unable to see them. Never a reason to kill.
        second = tuple(
            Evidence(e.signal, e.value, Agreement.UNAVAILABLE, e.window_seconds)
            if e.agreement is Agreement.AGREES
            else e
            for e in second
        )
    return _finding(what, since, first, second, look, "start-up")


def _fresh(look: Look) -> bool:
    reading = look.snapshot.progress
    return reading.ok and look.snapshot.at - reading.at <= PROGRESS_FRESH_SECONDS


def _finding(
    what: str,
    since: float,
    first: Evidence,
    second: tuple[Evidence, ...],
    look: Look,
    subject: str,
    *,
    worse: bool = False,
) -> Finding:
    agreeing = also.agreeing(second)
    confirmed = bool(agreeing)
    return Finding(
        FindingKind.HANG,
        Severity.CRITICAL if confirmed or worse else Severity.WARNING,
        f"{what}; confirmed by {', '.join(agreeing)}" if confirmed else f"{what}; no corroborating signal",
        since,
        suggestion=""
        if confirmed
        else "podwatch does not restart training; if the trainer's log shows no activity, run `podwatch restart`",
        verdict=Verdict.RESTART if confirmed else Verdict.NONE,
        confirmed=confirmed,
        evidence=(first, *second, *also.logs(look, "hang")),
        subject=subject,
    )
