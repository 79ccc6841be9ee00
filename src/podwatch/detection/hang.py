"""Hang: all processes run, and training makes no progress; and finished runs whose processes do not exit
(docs/detection.md).

Long evaluations, saves and steps five times slower than the median are not hangs: the limit is max(floor, k x
median), a save in flight restarts the count, and a silent step source alone never leads to a restart.
"""

from collections.abc import Iterator

from podwatch.config.settings import HangSettings, Policies
from podwatch.detection import confirming
from podwatch.detection.learned import Learned
from podwatch.detection.observe import ROLES, Turn
from podwatch.detection.verdict import agreeing, judged, names
from podwatch.detection.window import Signal, Window, failing
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity, Verdict
from podwatch.domain.process import ProcessRole
from podwatch.domain.snapshot import TrainerSample
from podwatch.domain.times import span

HEALTH_SHARE = 0.5
"""``/health`` has to fail for this share of the agreement window. An engine in a long weight update can miss several
requests, but not for five minutes."""
PROGRESS_FRESH_SECONDS = 120.0
"""The step source must have been read this recently; otherwise the silence may be podwatch's own."""
STARTUP_FACTOR = 3.0
"""Patience as a multiple of the longest start-up seen: a cold cache takes two to three times as long as a warm one
(vllm #52682: 3.2 min warm, 5.8-7.5 min cold)."""
STARTUP_MOST_SECONDS = 2 * 3600.0
"""Upper bound of the patience beyond the longest start-up. A cold cache adds minutes, a slow volume an hour; without
this bound, one start of five hours during which an operator fixed something would allow fifteen."""
STANDSTILL_SECONDS = 2 * 3600.0
"""After this time without progress the finding is critical even without a corroborating signal (GPUs that spin in a
collective look busy). torch's own watchdog ends a collective after 10 minutes, or an hour with prime-rl's setting."""
LINGER_SECONDS = 15 * 60.0
BUSY_LINGER_FACTOR = 4.0
"""If the target is reached, no finish line was seen and the GPUs still work (a last evaluation, an export, or a
spinning collective), podwatch waits this many times the linger time."""
EXPORT_GRACE_SECONDS = 300.0


def limit_seconds(learned: Learned, policy: HangSettings) -> float:
    """Seconds without progress that make a hang possible."""
    return max(policy.floor, policy.k * (learned.median_gap_seconds or 0.0))


def patience_seconds(learned: Learned, policy: Policies) -> float:
    """Seconds allowed from a start to its first step: the configured patience, or several times the longest start-up
    seen, but at most ``STARTUP_MOST_SECONDS`` more than that."""
    longest = max(learned.startups, default=0.0)
    return max(policy.startup_patience, min(STARTUP_FACTOR * longest, longest + STARTUP_MOST_SECONDS))


def hang(turn: Turn) -> Iterator[Finding]:
    """No progress for too long, and a second signal agrees; or a finished run whose processes do not end."""
    trainer, progress, policies = turn.trainer, turn.start.progress, turn.policies
    if not turn.wanted or trainer is None or not trainer.alive:
        return
    beyond = policies.max_steps is not None and progress.step is not None and progress.step >= policies.max_steps
    if trainer.finish_line or beyond:
        # Only at the target itself: one below it, a trainer that counts from 1 still has its last step to make.
        yield from _lingering(turn, trainer)
    elif not (turn.snapshot.saving and progress.saving_at == turn.at) and _is_fresh(turn):
        active = progress.active_at
        yield from _startup(turn, trainer) if active is None else _stalled(turn, trainer, active)


def _is_fresh(turn: Turn) -> bool:
    reading = turn.snapshot.progress
    return reading.ok and turn.at - reading.at <= PROGRESS_FRESH_SECONDS


def _second(turn: Turn) -> tuple[Signal, ...]:
    policy = turn.policies.hang
    seconds = confirming.agree_seconds(policy)
    return (
        confirming.idle(turn),
        confirming.tokens(turn, seconds),
        confirming.sick(turn, confirming.quiet_seconds(policy) * HEALTH_SHARE),
        confirming.liveness(turn, seconds),
    )


def _stopped(trainer: TrainerSample) -> str:
    """Names the processes that were stopped (SIGSTOP, a debugger): state T."""
    found = [p for p in trainer.descendants if p.state in "Tt" and (p.role in ROLES or p.role is ProcessRole.LAUNCHER)]
    if not found:
        return ""
    return ", ".join(f"{p.name} (process {p.identity.pid})" for p in found[:3]) + " is stopped (state T); to continue" \
        f" it: `kill -CONT {found[0].identity.pid}`"  # fmt: skip


def _stalled(turn: Turn, trainer: TrainerSample, active: float) -> Iterator[Finding]:
    quiet, limit = turn.at - active, limit_seconds(turn.learned, turn.policies.hang)
    if quiet <= limit:
        return
    second, made = _second(turn), turn.start.tokens_at
    if quiet <= 2 * limit and not agreeing(second) and made is not None and turn.at - made < limit / 4:
        return  # an evaluation or long rollouts: the engine works; reported only if it lasts
    window = Window(armed=True, since=active, last=turn.at, samples=1)
    first = failing("progress", f"none for {quiet:.0f} s (limit {limit:.0f} s)", window)
    what = f"no progress for {span(quiet)} (limit {span(limit)})"
    if turn.start.progress.step is not None:
        what += f" since step {turn.start.progress.step}"
    worse = quiet > max(STANDSTILL_SECONDS, 2.0 * limit)
    yield _finding(turn, trainer, what, active, first, second, "", worse=worse)


def _startup(turn: Turn, trainer: TrainerSample) -> Iterator[Finding]:
    since = turn.start.progress.awaited_since
    if since is None:
        return
    waited, patience = turn.at - since, patience_seconds(turn.learned, turn.policies)
    if waited <= patience:
        return
    # Where no step was ever seen in this run, podwatch may be unable to see them: never a reason to kill.
    window = Window(armed=bool(turn.learned.gap_seconds), since=since, last=turn.at, samples=1)
    value = f"none {waited:.0f} s after the start"
    first = failing("first step", value, window, early=value)
    what = f"no first step {waited / 60:.0f} min after the start (patience {patience / 60:.0f} min)"
    yield _finding(turn, trainer, what, since, first, _second(turn), "start-up")


def _finding(
    turn: Turn, trainer: TrainerSample, what: str, since: float, first: Signal, second: tuple[Signal, ...],
    subject: str, *, worse: bool = False,
) -> Finding:  # fmt: skip
    dead = agreeing((first,)) and agreeing(second)
    stopped = _stopped(trainer)
    summary = f"{what}; confirmed by {names(second)}" if dead else f"{what}; no corroborating signal"
    return judged(
        FindingKind.HANG, f"{summary}; {stopped}" if stopped else summary, since, first, second, subject=subject,
        alone="podwatch does not restart training; if the trainer's log shows no activity, run `podwatch restart`",
        more=confirming.logs(turn, "hang"), worse=worse,
    )  # fmt: skip


def _lingering(turn: Turn, trainer: TrainerSample) -> Iterator[Finding]:
    """A finished run whose processes still exist after ``LINGER_SECONDS``: they keep the pod, and its bill, alive
    (prime-rl #2229)."""
    progress, line, start = turn.start.progress, trainer.finish_line, turn.start
    since = progress.active_at if progress.active_at is not None else progress.started_at
    if since is None or turn.at - since < LINGER_SECONDS or not (line or turn.snapshot.progress.ok):
        return
    quiet, idle = turn.at - since, start.of("idle").seconds
    busy = not start.idle_unknown and idle < EXPORT_GRACE_SECONDS
    if busy and not line and quiet < BUSY_LINGER_FACTOR * LINGER_SECONDS:
        return
    agreement = Agreement.DISAGREES if busy else Agreement.UNAVAILABLE if start.idle_unknown else Agreement.AGREES
    use = "busy" if busy else start.idle_unknown or "all idle"
    done = "the finish line was printed" if line else f"the target step {turn.policies.max_steps} was reached"
    yield Finding(
        FindingKind.FINISHED,
        Severity.WARNING,
        f"training is finished ({done}), but its processes still run after {quiet / 60:.0f} min: podwatch ends them",
        since,
        verdict=Verdict.FINISH,
        confirmed=True,
        evidence=(
            Evidence("completion", done, Agreement.AGREES, quiet),
            Evidence("progress", f"none for {quiet:.0f} s", Agreement.AGREES, quiet),
            Evidence("gpu utilisation", use, agreement, idle),
        ),
        subject="lingering",
    )
