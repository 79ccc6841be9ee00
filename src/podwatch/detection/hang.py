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
from podwatch.detection.window import Signal, agreeing, fact, judged, names, signal
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity, Verdict
from podwatch.domain.process import ProcessRole
from podwatch.domain.times import span

PROGRESS_FRESH_SECONDS = 120.0
"""The step source must have been read this recently; otherwise the silence may be podwatch's own."""
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
    """Seconds allowed from a start to its first step: the configured patience, or three times the longest start-up seen
    (vllm #52682: 3.2 min with a warm cache, 5.8-7.5 min with a cold one), but at most 2 h more than that: one start of
    five hours during which an operator fixed something must not allow fifteen."""
    longest = max(learned.startups, default=0.0)
    return max(policy.startup_patience, min(3.0 * longest, longest + 2 * 3600.0))


def hang(turn: Turn) -> Iterator[Finding]:
    """No progress for too long, and a second signal agrees; or a finished run whose processes do not end."""
    progress, target, reading = turn.start.progress, turn.policies.max_steps, turn.snapshot.progress
    beyond = target is not None and progress.step is not None and progress.step >= target
    if turn.trainer.finish_line or beyond:
        # Only at the target itself: one below it, a trainer that counts from 1 still has its last step to make.
        yield from _lingering(turn)
    elif turn.snapshot.saving and progress.saving_at == turn.at:
        return
    elif reading.ok and turn.at - reading.at <= PROGRESS_FRESH_SECONDS:
        active = progress.active_at
        yield from _startup(turn) if active is None else _stalled(turn, active)


def _stalled(turn: Turn, active: float) -> Iterator[Finding]:
    quiet, limit = turn.at - active, limit_seconds(turn.learned, turn.policies.hang)
    second, made, step = _second(turn), turn.start.tokens_at, turn.start.progress.step
    evaluates = made is not None and turn.at - made < limit / 4  # or rollouts are long: the engine works
    if quiet <= limit or (quiet <= 2 * limit and not agreeing(second) and evaluates):
        return  # reported only if it lasts
    first = signal("progress", fact(active, turn.at), f"none for {quiet:.0f} s (limit {limit:.0f} s)")
    what = f"no progress for {span(quiet)} (limit {span(limit)}){'' if step is None else f' since step {step}'}"
    yield _finding(turn, what, active, first, second, worse=quiet > max(STANDSTILL_SECONDS, 2.0 * limit))


def _startup(turn: Turn) -> Iterator[Finding]:
    since, patience = turn.start.progress.awaited_since, patience_seconds(turn.learned, turn.policies)
    if since is None or turn.at - since <= patience:
        return
    # Where no step was ever seen in this run, podwatch may be unable to see them: never a reason to kill.
    waited, window = turn.at - since, fact(since, turn.at, armed=bool(turn.learned.gap_seconds))
    value = f"none {waited:.0f} s after the start"
    first = signal("first step", window, value, never=value)
    what = f"no first step {waited / 60:.0f} min after the start (patience {patience / 60:.0f} min)"
    yield _finding(turn, what, since, first, _second(turn), "start-up")


def _second(turn: Turn) -> tuple[Signal, ...]:
    policy = turn.policies.hang
    seconds = confirming.agree_seconds(policy)
    # An engine in a long weight update can miss several requests for /health, but not for five minutes.
    sick = confirming.sick(turn, 0.5 * confirming.quiet_seconds(policy))
    return (confirming.idle(turn), confirming.tokens(turn, seconds), sick, confirming.liveness(turn, seconds))


def _finding(
    turn: Turn, what: str, since: float, first: Signal, second: tuple[Signal, ...], subject: str = "", *,
    worse: bool = False,
) -> Finding:  # fmt: skip
    dead = agreeing((first,)) and agreeing(second)
    summary = f"{what}; confirmed by {names(second)}" if dead else f"{what}; no corroborating signal"
    return judged(
        FindingKind.HANG, summary + _stopped(turn), since, first, second, subject=subject,
        alone="podwatch does not restart training; if the trainer's log shows no activity, run `podwatch restart`",
        more=confirming.logs(turn, "hang"), worse=worse,
    )  # fmt: skip


def _stopped(turn: Turn) -> str:
    """Names the processes that were stopped (SIGSTOP, a debugger): state T."""
    known = (*ROLES, ProcessRole.LAUNCHER)
    found = [p for p in turn.trainer.descendants if p.state in "Tt" and p.role in known]
    who = ", ".join(confirming.named(p) for p in found[:3])
    return f"; {who} is stopped (state T); to continue it: `kill -CONT {found[0].identity.pid}`" if found else ""


def _lingering(turn: Turn) -> Iterator[Finding]:
    """A finished run whose processes still exist after ``LINGER_SECONDS``: they keep the pod, and its bill, alive
    (prime-rl #2229)."""
    progress, line, start = turn.start.progress, turn.trainer.finish_line, turn.start
    since = progress.active_at if progress.active_at is not None else progress.started_at
    if since is None or not (line or turn.snapshot.progress.ok):
        return
    quiet, idle = turn.at - since, start.of("idle").seconds
    busy = not start.idle_unknown and idle < EXPORT_GRACE_SECONDS
    if quiet < LINGER_SECONDS * (BUSY_LINGER_FACTOR if busy and not line else 1.0):
        return
    agreement = Agreement.DISAGREES if busy else Agreement.UNAVAILABLE if start.idle_unknown else Agreement.AGREES
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
            Evidence("gpu utilisation", "busy" if busy else start.idle_unknown or "all idle", agreement, idle),
        ),
        subject="lingering",
    )
