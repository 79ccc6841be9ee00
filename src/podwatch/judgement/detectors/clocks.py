"""podwatch's own sense of time: holes in what it saw, a suspended machine, a wall clock that jumps (promise 6).

Nothing here asks for an act. It is the reason why others do not: after a hole every window begins anew, because a pod
that was frozen for an hour has made no step for an hour and is not hung (facts/peers.md, bottom line 5). Decisions are
made on the monotonic clock, so a jump of the wall clock is only told.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.policy import DetectionPolicy
from podwatch.domain.snapshot import Snapshot
from podwatch.judgement.detectors.base import Look, Turn
from podwatch.judgement.detectors.window import NO_RHYTHM, NOT_HELD, Held, Rhythm
from podwatch.judgement.learned import Learned

STALL_TURNS = 5.0
"""A pause counts as a hole when it is longer than so many usual turns, and never below the time after which a sensor
that gives no answer is called blind: shorter ones the windows themselves see."""
TURNS_LEARNED = 3
SUSPEND_SECONDS = 2.0
"""CLOCK_BOOTTIME ran ahead of CLOCK_MONOTONIC by this much between two turns: the machine slept."""
JUMP_SECONDS = 5.0
"""NTP slews by 0.5 ms per second at most; this much between two turns was set."""
TOLD_SECONDS = 600.0
"""Such a moment stays in the findings this long: else it would be gone before anybody looks."""
KEPT = 16
STALL = FindingKind.LOOP_STALLED

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened between two turns; ``at`` is the later one (monotonic), ``seconds`` how much."""

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
    """Of late, newest last."""


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

    def advance(self, state: ClocksState, look: Look) -> Turn[ClocksState]:
        snapshot = look.snapshot
        moments = state.moments
        if new := happened(state, snapshot, look.policies.detection):
            moments = (*moments, *new)[-KEPT:]
        if moments:
            moments = tuple(m for m in moments if snapshot.at - m.at <= TOLD_SECONDS)
        later = state.at is None or snapshot.at > state.at
        # One stall teaches nothing; one after the other is how slow this machine is now, and has to be its measure:
        # else every turn would begin every window anew, and nothing would be found any more.
        usual = not new or (_stalled(new) and any(m.at == state.at for m in state.moments if m.kind is STALL))
        rhythm = state.rhythm.update(snapshot.at) if later and usual else Rhythm(snapshot.at, state.rhythm.gaps)
        state = ClocksState(snapshot.at, snapshot.wall, snapshot.boot_at, rhythm, moments)
        return Turn(state, look.learned, tuple(_findings(moments)) if moments else ())


DETECTOR = ClocksDetector()


def happened(state: ClocksState, snapshot: Snapshot, policy: DetectionPolicy) -> tuple[Moment, ...]:
    """What lies between the last turn and this one, if anything."""
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
    """Monotonic seconds before this turn in which nobody looked (0 for a suspend, which that clock does not count);
    None where there is no hole."""
    found = happened(state, snapshot, policy)
    if not found:
        return None
    lost = [m for m in found if m.kind is not FindingKind.CLOCK_JUMP]
    if not lost:
        return None
    return max((m.seconds for m in lost if m.kind is FindingKind.LOOP_STALLED), default=0.0)


def begin_anew(state: S) -> S:
    """The same state with every window empty: nobody saw what happened in the hole. What is no window stays."""
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
        summary = f"podwatch saw nothing for {longest:.0f} s{often}: its own loop stood still, or the pod was frozen"
        fix = "every window has begun anew; if it comes again, the pod is short of CPU, or something stops podwatch"
        evidence = Evidence("sensing loop", f"no turn for {last.seconds:.1f} s", Agreement.UNAVAILABLE, last.seconds)
        return Finding(kind, Severity.WARNING, summary, last.at, fix, evidence=(evidence,))
    if kind is FindingKind.SUSPENDED:
        summary = f"the machine was suspended for {sum(m.seconds for m in moments):.0f} s{often}"
        fix = "every window has begun anew; connections of the run may have broken meanwhile"
        evidence = Evidence("CLOCK_BOOTTIME", f"{last.seconds:.1f} s ahead", Agreement.UNAVAILABLE, last.seconds)
        return Finding(kind, Severity.WARNING, summary, last.at, fix, evidence=(evidence,))
    way = "forward" if last.seconds > 0 else "back"
    summary = f"the wall clock was set {way} by {abs(last.seconds):.0f} s{often}"
    fix = "podwatch judges by another clock; times in logs and of files before and after do not fit together"
    evidence = Evidence("wall clock", f"{last.seconds:+.1f} s", Agreement.UNAVAILABLE)
    return Finding(kind, Severity.INFO, summary, last.at, fix, evidence=(evidence,))
