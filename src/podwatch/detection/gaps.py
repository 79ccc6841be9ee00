"""Gaps in podwatch's own observation: a stalled sensing loop, a suspended machine.

Nothing here requests an action. It prevents false verdicts of other detectors: after a gap every window restarts,
because a pod that was frozen for an hour has made no step for an hour and is not hung. Decisions use the monotonic
clock, so a jump of the wall clock changes nothing.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from podwatch.config.settings import GpuSettings
from podwatch.detection.base import DetectorResult, Look
from podwatch.detection.learned import Learned
from podwatch.detection.windows import NO_RHYTHM, NOT_HELD, Held, Rhythm
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.snapshot import Snapshot

STALL_TURNS = 5.0
"""A pause counts as a stall if it is longer than this many median turns, and longer than the time after which a silent
sensor counts as blind. The windows themselves detect shorter pauses."""
TURNS_LEARNED = 3
SUSPEND_SECONDS = 2.0
"""If CLOCK_BOOTTIME advances by this much more than CLOCK_MONOTONIC between two turns, the machine was suspended."""
TOLD_SECONDS = 600.0
"""How long the finding stays after a stall, so that an operator sees it."""
KEPT = 16

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class TurnGap:
    """A gap between two turns. ``at``: the later turn; ``stalled``: seconds without a turn, if they were too many;
    ``suspended``: seconds that the machine slept, which the monotonic clock does not count."""

    at: float
    stalled: float
    suspended: float


@dataclass(frozen=True, slots=True)
class GapsState:
    """``stalls``: those of the last ``TOLD_SECONDS``, newest last."""

    at: float | None = None
    boot: float | None = None
    rhythm: Rhythm = NO_RHYTHM
    stalls: tuple[TurnGap, ...] = ()


class GapsDetector:
    name = "gaps"
    kinds = (FindingKind.LOOP_STALLED,)
    needs: tuple[str, ...] = ()
    second: tuple[str, ...] = ()
    survives_restart = True

    def initial(self) -> GapsState:
        return GapsState()

    def armed(self, state: GapsState, learned: Learned) -> tuple[str, ...]:
        return ()

    def advance(self, state: GapsState, look: Look) -> DetectorResult[GapsState]:
        snapshot = look.snapshot
        stalls = state.stalls
        gap = find_gap(state, snapshot, look.policies.gpu)
        if gap is not None and gap.stalled:
            stalls = (*stalls, gap)[-KEPT:]
        if stalls:
            stalls = tuple(s for s in stalls if snapshot.at - s.at <= TOLD_SECONDS)
        later = state.at is None or snapshot.at > state.at
        # A single stall is not learned. Consecutive stalls are the pace of a slow machine and are learned: otherwise
        # every turn would restart every window, and nothing would ever be detected.
        usual = gap is None or (not gap.suspended and any(s.at == state.at for s in state.stalls))
        rhythm = state.rhythm.update(snapshot.at) if later and usual else Rhythm(snapshot.at, state.rhythm.gaps)
        state = GapsState(snapshot.at, snapshot.boot_at, rhythm, stalls)
        return DetectorResult(state, look.learned, (_stalled(stalls),) if stalls else ())


DETECTOR = GapsDetector()


def find_gap(state: GapsState, snapshot: Snapshot, policy: GpuSettings) -> TurnGap | None:
    """The gap between the last turn and this one; None if there is none."""
    if state.at is None or snapshot.at <= state.at:
        return None
    passed = snapshot.at - state.at
    slept = 0.0
    if snapshot.boot_at is not None and state.boot is not None:
        slept = max(0.0, snapshot.boot_at - state.boot - passed)
    if slept <= SUSPEND_SECONDS:
        slept = 0.0
    gaps = state.rhythm.gaps
    if len(gaps) < TURNS_LEARNED or passed <= max(policy.blind_after, STALL_TURNS * sorted(gaps)[len(gaps) // 2]):
        passed = 0.0
    return TurnGap(snapshot.at, passed, slept) if passed or slept else None


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


def _stalled(stalls: tuple[TurnGap, ...]) -> Finding:
    last, longest = stalls[-1], max(s.stalled for s in stalls)
    often = f", {len(stalls)} times within {TOLD_SECONDS / 60:.0f} min" if len(stalls) > 1 else ""
    return Finding(
        FindingKind.LOOP_STALLED,
        Severity.WARNING,
        f"podwatch observed nothing for {longest:.0f} s{often}: its process was stalled or the pod was frozen",
        last.at,
        "podwatch measures its waiting times from now on, so the gap does not count as a hang; if this repeats,"
        " check whether the pod is short of CPU or something stops podwatch",
        evidence=(Evidence("sensing loop", f"no turn for {last.stalled:.1f} s", Agreement.UNAVAILABLE, last.stalled),),
    )
