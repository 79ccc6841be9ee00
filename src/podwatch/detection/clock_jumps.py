"""Gaps in podwatch's own observation: a stalled sensing loop, a suspended machine, a wall clock that jumps.

Nothing here requests an action. It prevents false verdicts of other detectors: after a gap every window restarts,
because a pod that was frozen for an hour has made no step for an hour and is not hung. Decisions use the monotonic
clock, so a jump of the wall clock is only reported.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from podwatch.detection.base import DetectorResult, Look
from podwatch.detection.learned import Learned
from podwatch.detection.windows import NO_RHYTHM, NOT_HELD, Held, Rhythm
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.snapshot import Snapshot
from podwatch.domain.thresholds import DetectionPolicy

STALL_TURNS = 5.0
"""A pause counts as a stall if it is longer than this many median turns, and longer than the time after which a silent
sensor counts as blind. The windows themselves detect shorter pauses."""
TURNS_LEARNED = 3
SUSPEND_SECONDS = 2.0
"""If CLOCK_BOOTTIME advances by this much more than CLOCK_MONOTONIC between two turns, the machine was suspended."""
JUMP_SECONDS = 5.0
"""NTP slews by at most 0.5 ms per second; a difference this large between two turns means that the clock was set."""
TOLD_SECONDS = 600.0
"""How long the finding stays after such an event, so that an operator sees it."""
KEPT = 16
STALL = FindingKind.LOOP_STALLED

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Moment:
    """A stall, suspend or clock jump between two turns. ``at``: the later turn (monotonic); ``seconds``: its size."""

    kind: FindingKind
    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ClocksState:
    at: float | None = None
    wall: float = 0.0
    boot: float | None = None
    rhythm: Rhythm = NO_RHYTHM
    moments: tuple[Moment, ...] = ()
    """Those of the last ``TOLD_SECONDS``, newest last."""


class ClocksDetector:
    name = "clocks"
    kinds = (FindingKind.LOOP_STALLED, FindingKind.SUSPENDED, FindingKind.CLOCK_JUMP)
    needs: tuple[str, ...] = ()
    second: tuple[str, ...] = ()
    survives_restart = True

    def initial(self) -> ClocksState:
        return ClocksState()

    def armed(self, state: ClocksState, learned: Learned) -> tuple[str, ...]:
        return ()

    def advance(self, state: ClocksState, look: Look) -> DetectorResult[ClocksState]:
        snapshot = look.snapshot
        moments = state.moments
        if new := happened(state, snapshot, look.policies.detection):
            moments = (*moments, *new)[-KEPT:]
        if moments:
            moments = tuple(m for m in moments if snapshot.at - m.at <= TOLD_SECONDS)
        later = state.at is None or snapshot.at > state.at
        # A single stall is not learned. Consecutive stalls are the pace of a slow machine and are learned: otherwise
        # every turn would restart every window, and nothing would ever be detected.
        usual = not new or (_stalled(new) and any(m.at == state.at for m in state.moments if m.kind is STALL))
        rhythm = state.rhythm.update(snapshot.at) if later and usual else Rhythm(snapshot.at, state.rhythm.gaps)
        state = ClocksState(snapshot.at, snapshot.wall, snapshot.boot_at, rhythm, moments)
        return DetectorResult(state, look.learned, tuple(_findings(moments)) if moments else ())


DETECTOR = ClocksDetector()


def happened(state: ClocksState, snapshot: Snapshot, policy: DetectionPolicy) -> tuple[Moment, ...]:
    """The stalls, suspends and clock jumps between the last turn and this one."""
    if state.at is None or snapshot.at <= state.at:
        return ()
    passed = snapshot.at - state.at
    slept = 0.0
    if snapshot.boot_at is not None and state.boot is not None:
        slept = max(0.0, snapshot.boot_at - state.boot - passed)
    if slept <= SUSPEND_SECONDS:
        slept = 0.0
    jumped = snapshot.wall - state.wall - passed - slept
    if not slept and passed <= policy.blind_after_seconds and abs(jumped) <= JUMP_SECONDS:
        return ()
    found = [Moment(FindingKind.SUSPENDED, snapshot.at, slept)] if slept else []
    gaps = state.rhythm.gaps
    if len(gaps) >= TURNS_LEARNED and passed > max(
        policy.blind_after_seconds, STALL_TURNS * sorted(gaps)[len(gaps) // 2]
    ):
        found.append(Moment(FindingKind.LOOP_STALLED, snapshot.at, passed))
    if abs(jumped) > JUMP_SECONDS:
        found.append(Moment(FindingKind.CLOCK_JUMP, snapshot.at, jumped))
    return tuple(found)


def _stalled(moments: tuple[Moment, ...]) -> bool:
    return all(m.kind is STALL for m in moments)


def hole(state: ClocksState, snapshot: Snapshot, policy: DetectionPolicy) -> float | None:
    """Monotonic seconds before this turn in which podwatch observed nothing (0 for a suspend, which the monotonic clock
    does not count); None if there is no gap."""
    found = happened(state, snapshot, policy)
    if not found:
        return None
    lost = [m for m in found if m.kind is not FindingKind.CLOCK_JUMP]
    if not lost:
        return None
    return max((m.seconds for m in lost if m.kind is FindingKind.LOOP_STALLED), default=0.0)


def begin_anew(state: S) -> S:
    """Return ``state`` with every window (``Held``) reset, because nothing was observed during the gap. Everything else
    in the state is kept."""
    if isinstance(state, Held):
        return NOT_HELD  # type: ignore[return-value]
    if isinstance(state, tuple):
        return tuple(begin_anew(item) for item in state)  # type: ignore[return-value]
    if is_dataclass(state) and not isinstance(state, type):
        changed: dict[str, Any] = {}
        for field in fields(state):
            old = getattr(state, field.name)
            if isinstance(old, tuple) or is_dataclass(old):
                new = begin_anew(old)
                if new != old:
                    changed[field.name] = new
        return replace(state, **changed) if changed else state
    return state


def _findings(moments: tuple[Moment, ...]) -> Iterable[Finding]:
    for kind in ClocksDetector.kinds:
        of_kind = [m for m in moments if m.kind is kind]
        if of_kind:
            yield _finding(kind, of_kind)


def _finding(kind: FindingKind, moments: list[Moment]) -> Finding:
    last = moments[-1]
    often = f", {len(moments)} times within {TOLD_SECONDS / 60:.0f} min" if len(moments) > 1 else ""
    if kind is FindingKind.LOOP_STALLED:
        longest = max(m.seconds for m in moments)
        summary = f"podwatch observed nothing for {longest:.0f} s{often}: its process was stalled or the pod was frozen"
        fix = (
            "podwatch measures its waiting times from now on, so the gap does not count as a hang; if this repeats,"
            " check whether the pod is short of CPU or something stops podwatch"
        )
        evidence = Evidence("sensing loop", f"no turn for {last.seconds:.1f} s", Agreement.UNAVAILABLE, last.seconds)
        return Finding(kind, Severity.WARNING, summary, last.at, fix, evidence=(evidence,))
    if kind is FindingKind.SUSPENDED:
        summary = f"the machine was suspended for {sum(m.seconds for m in moments):.0f} s{often}"
        fix = (
            "podwatch measures its waiting times from now on, so the gap does not count as a hang; check whether the"
            " run's network connections survived"
        )
        evidence = Evidence("CLOCK_BOOTTIME", f"{last.seconds:.1f} s ahead", Agreement.UNAVAILABLE, last.seconds)
        return Finding(kind, Severity.WARNING, summary, last.at, fix, evidence=(evidence,))
    way = "forward" if last.seconds > 0 else "back"
    summary = f"the wall clock jumped {way} by {abs(last.seconds):.0f} s{often}"
    fix = "decisions use the monotonic clock and are not affected; log and file times before and after do not match"
    evidence = Evidence("wall clock", f"{last.seconds:+.1f} s", Agreement.UNAVAILABLE)
    return Finding(kind, Severity.INFO, summary, last.at, fix, evidence=(evidence,))
