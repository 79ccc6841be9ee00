"""The verdict of ``podwatch runs check``: is a run well, by what it left in the store.

It is judged from outside the pod, so it must find what the pod cannot report: that it is gone. Every age is a
difference of two times of the store's own clock, or of two times of the pod's own clock.
"""

from dataclasses import dataclass
from enum import IntEnum

from podwatch.domain.lease import GONE, PATIENCE_SECONDS, Beat, HolderState
from podwatch.domain.outcome import Outcome
from podwatch.domain.snapshot import Desired
from podwatch.domain.times import span
from podwatch.store.runs.read import RunInStore

_RESTS = ("paused", "evaluating")
_DOWN = ("blocked", "backoff", "gave-up")
"""Phases as the heartbeat names them (recovery/state.py)."""


class Level(IntEnum):
    """Exit code of ``podwatch runs check``, as of ``podwatch status``."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. ``dead``: without a heartbeat, as long as another pod waits before it takes the run; ``late``: two of
    them can be missing (a slow store, a restart of podwatch). ``step``: without a new step, 0 for no limit;
    ``upload``: a complete checkpoint that is not in the store."""

    dead: float = PATIENCE_SECONDS
    late: float = 180.0
    step: float = 3600.0
    upload: float = 3600.0


@dataclass(frozen=True, slots=True)
class Judgement:
    level: Level
    summary: str
    """One line, without the run's name."""


def judge(found: RunInStore, limits: Limits) -> Judgement:
    """The worst of what is found, in one line."""
    newest, beat, claim_age = found.newest, found.active.beat, found.active.claim_age
    stored = "no checkpoint is stored" if newest.step is None else f"step {newest.step} is stored"
    if found.archived_wall is not None:
        return Judgement(Level.OK, f"archived; {stored}")
    if newest.problem:
        return Judgement(Level.CRITICAL, f"the newest checkpoint is not usable: {newest.problem}")
    if beat is None:
        return _without_heartbeat(claim_age, limits, stored, is_stored=newest.step is not None)
    if found.stopped_by_control is not None:
        return _stopped(beat, f"stopped by control.json ({found.stopped_by_control})", stored)
    if beat.said.state in GONE or (beat.said.state == HolderState.RESTARTING and beat.said.desired == Desired.FINISHED):
        return _left(claim_age, beat, limits, stored)
    if beat.age > limits.dead:
        return _dead(claim_age, beat, limits, stored)
    return _guarded(beat, limits, stored)


def _without_heartbeat(claim_age: float | None, limits: Limits, stored: str, *, is_stored: bool) -> Judgement:
    if claim_age is not None and claim_age <= limits.dead:
        return Judgement(Level.WARNING, f"a pod claimed the run {span(claim_age)} ago; no heartbeat yet; {stored}")
    if claim_age is None and not is_stored:
        return Judgement(Level.UNKNOWN, "podwatch has written nothing here: check the store's URL and the run id")
    return Judgement(Level.CRITICAL, f"no pod holds the run: there is no heartbeat; {stored}")


def _left(claim_age: float | None, beat: Beat, limits: Limits, stored: str) -> Judgement:
    """The last podwatch left the run in order; nothing trains."""
    if beat.said.desired == Desired.FINISHED:
        if beat.said.unstored_step is not None:
            text = f"finished, but the checkpoint of step {beat.said.unstored_step} is not stored ({stored})"
            waits = beat.said.state == HolderState.RELEASED and beat.age <= limits.dead  # podwatch is there: it uploads
            return Judgement(Level.WARNING if waits else Level.CRITICAL, text)
        return Judgement(Level.OK, f"finished; {stored}")
    since = f"{span(beat.age)} ago"
    if beat.said.desired == Desired.STOPPED:
        return _stopped(beat, "training is stopped", stored)
    if claim_age is not None and claim_age <= min(limits.dead, beat.age):
        return Judgement(Level.WARNING, f"another pod claimed the run {span(claim_age)} ago; {stored}")
    how = "was preempted" if beat.said.state == HolderState.PREEMPTED else "gave up or ended without training"
    how = "gave up" if beat.said.outcome == Outcome.GAVE_UP else how
    return Judgement(Level.CRITICAL, f"no pod holds the run: pod {beat.said.described} {how} {since}; {stored}")


def _stopped(beat: Beat, what: str, stored: str) -> Judgement:
    """Stopped by an operator, or by podwatch itself, which then left its reason."""
    if beat.said.overall == "critical" and beat.said.desired == Desired.STOPPED:
        return Judgement(Level.CRITICAL, f"{what}: {beat.said.reason or 'see `podwatch status` on the pod'}; {stored}")
    if beat.said.unstored_step is not None:
        where = f"step {beat.said.unstored_step} is only on pod {beat.said.described}"
        return Judgement(Level.WARNING, f"{what}; {stored}, {where}")
    return Judgement(Level.OK, f"{what}; {stored}")


def _dead(claim_age: float | None, beat: Beat, limits: Limits, stored: str) -> Judgement:
    if claim_age is not None and claim_age <= limits.dead:
        return Judgement(
            Level.WARNING,
            f"pod {beat.said.described} is silent since {span(beat.age)}; another pod claimed the run"
            f" {span(claim_age)} ago; {stored}",
        )
    lost = ""
    if beat.said.step is not None:
        lost = f"; its last step was {beat.said.step}"
    what = "podwatch ended there" if beat.said.state == HolderState.RESTARTING else "no heartbeat"
    return Judgement(
        Level.CRITICAL, f"dead: {what} from pod {beat.said.described} since {span(beat.age)}{lost}; {stored}"
    )


def _guarded(beat: Beat, limits: Limits, stored: str) -> Judgement:
    if not beat.said.state:
        return Judgement(Level.UNKNOWN, f"a pod holds the run, but its heartbeat cannot be read; {stored}")
    down = beat.said.desired == Desired.RUNNING and beat.said.phase in _DOWN
    at = "training is down" if down else "no step yet" if beat.said.step is None else f"step {beat.said.step}"
    why = beat.said.reason or "see `podwatch status` on the pod"
    if down or beat.said.overall == "critical":
        return Judgement(Level.CRITICAL, f"{at}; {why}; {stored}")
    if beat.age > limits.late:
        return Judgement(Level.WARNING, f"{at}; no heartbeat since {span(beat.age)}; {stored}")
    step_age = None if beat.step_age is None else beat.step_age + beat.age
    training = beat.said.desired == Desired.RUNNING and beat.said.phase not in _RESTS
    if training and limits.step and step_age is not None and step_age > limits.step:
        return Judgement(Level.WARNING, f"{at}; no new step since {span(step_age)}; {stored}")
    waiting = None if beat.unstored_age is None else beat.unstored_age + beat.age
    if waiting is not None and waiting > limits.upload:
        text = f"{at}; upload is behind: nothing was stored for {span(waiting)}, step {beat.said.unstored_step} waits"
        return Judgement(Level.WARNING, f"{text}; {stored}")
    if beat.said.overall == "warning":
        return Judgement(Level.WARNING, f"{at}; {why}; {stored}")
    if beat.said.overall == "unknown":
        return Judgement(Level.UNKNOWN, f"{at}; podwatch cannot observe training: {why}; {stored}")
    new = "" if step_age is None else f", {span(step_age)} ago"
    return Judgement(Level.OK, f"{at}{new}; {stored}")
