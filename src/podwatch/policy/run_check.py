"""The verdict of ``podwatch runs check``: is a run well, by what it left in the store.

It is judged from outside the pod, so it must find what the pod cannot report: that it is gone. Every age is a
difference of two times of the store's own clock, or of two times of the pod's own clock.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from podwatch.domain.engine_and_attempt import NO_INSTANCE, Instance, parse_instance
from podwatch.domain.lease import GONE, PATIENCE_SECONDS, HolderState
from podwatch.domain.snapshot import Desired
from podwatch.policy.exit_code import Outcome

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
class Beat:
    """The last heartbeat. ``age``: seconds since it was written. The other ages are seconds at that time. Everything
    but the age can be missing: not readable."""

    age: float
    state: str = ""
    phase: str = ""
    desired: str = ""
    host: str = ""
    overall: str = ""
    reason: str = ""
    step: int | None = None
    step_age: float | None = None
    unstored_step: int | None = None
    """The run's newest complete checkpoint on the pod, if the store does not have it. Only the pod can tell: after a
    fresh start a lower step is the newer one."""
    unstored_age: float | None = None
    """Since when the store has got nothing although a checkpoint waits."""
    outcome: str = ""
    """How the run ended on that pod (policy/exit_code.py); empty while it continues."""
    instance: Instance = NO_INSTANCE

    @property
    def pod(self) -> str:
        """The pod's host name, with the engine's job or the provider's machine."""
        where = self.instance
        attempt = f", attempt {where.attempt}" if where.attempt else ""
        return f"{self.host or '?'}{f' ({where.provider} {where.id}{attempt})' if where.provider else ''}"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the store holds of one run. ``claim_age``: seconds since the newest claim. ``pointer_step``: what
    latest.json names (``pointer``: it names a checkpoint); ``pointer_problem``: why it is not usable."""

    run_id: str
    beat: Beat | None = None
    claim_age: float | None = None
    pointer: bool = False
    pointer_step: int | None = None
    pointer_problem: str = ""
    stopped_by_control: str | None = None
    """The reason in a control.json that stops the run; None: there is none."""
    archived: bool = False
    """Nothing has been written since it was archived."""


@dataclass(frozen=True, slots=True)
class Judgement:
    level: Level
    summary: str
    """One line, without the run's name."""


def judge(found: Evidence, limits: Limits) -> Judgement:
    """The worst of what is found, in one line."""
    stored = f"step {found.pointer_step} is stored" if found.pointer else "no checkpoint is stored"
    if found.archived:
        return Judgement(Level.OK, f"archived; {stored}")
    if found.pointer_problem:
        return Judgement(Level.CRITICAL, f"latest.json is not usable: {found.pointer_problem}")
    beat = found.beat
    if beat is None:
        return _without_heartbeat(found, limits, stored)
    if found.stopped_by_control is not None:
        return _stopped(beat, f"stopped by control.json ({found.stopped_by_control})", stored)
    if beat.state in GONE or (beat.state == HolderState.RESTARTING and beat.desired == Desired.FINISHED):
        return _left(found, beat, limits, stored)
    if beat.age > limits.dead:
        return _dead(found, beat, limits, stored)
    return _guarded(found, beat, limits, stored)


def _without_heartbeat(found: Evidence, limits: Limits, stored: str) -> Judgement:
    if found.claim_age is not None and found.claim_age <= limits.dead:
        return Judgement(
            Level.WARNING, f"a pod claimed the run {_span(found.claim_age)} ago; no heartbeat yet; {stored}"
        )
    if found.claim_age is None and not found.pointer:
        return Judgement(Level.UNKNOWN, "podwatch has written nothing here: check the store's URL and the run id")
    return Judgement(Level.CRITICAL, f"no pod holds the run: there is no heartbeat; {stored}")


def _left(found: Evidence, beat: Beat, limits: Limits, stored: str) -> Judgement:
    """The last podwatch left the run in order; nothing trains."""
    if beat.desired == Desired.FINISHED:
        if beat.unstored_step is not None:
            text = f"finished, but the checkpoint of step {beat.unstored_step} is not stored ({stored})"
            waits = beat.state == HolderState.RELEASED and beat.age <= limits.dead  # podwatch is there: it uploads
            return Judgement(Level.WARNING if waits else Level.CRITICAL, text)
        return Judgement(Level.OK, f"finished; {stored}")
    since = f"{_span(beat.age)} ago"
    if beat.desired == Desired.STOPPED:
        return _stopped(beat, "training is stopped", stored)
    if found.claim_age is not None and found.claim_age <= min(limits.dead, beat.age):
        return Judgement(Level.WARNING, f"another pod claimed the run {_span(found.claim_age)} ago; {stored}")
    how = "was preempted" if beat.state == HolderState.PREEMPTED else "gave up or ended without training"
    how = "gave up" if beat.outcome == Outcome.GAVE_UP else how
    return Judgement(Level.CRITICAL, f"no pod holds the run: pod {beat.pod} {how} {since}; {stored}")


def _stopped(beat: Beat, what: str, stored: str) -> Judgement:
    """Stopped by an operator, or by podwatch itself, which then left its reason."""
    if beat.overall == "critical" and beat.desired == Desired.STOPPED:
        return Judgement(Level.CRITICAL, f"{what}: {beat.reason or 'see `podwatch status` on the pod'}; {stored}")
    if beat.unstored_step is not None:
        where = f"step {beat.unstored_step} is only on pod {beat.pod}"
        return Judgement(Level.WARNING, f"{what}; {stored}, {where}")
    return Judgement(Level.OK, f"{what}; {stored}")


def _dead(found: Evidence, beat: Beat, limits: Limits, stored: str) -> Judgement:
    if found.claim_age is not None and found.claim_age <= limits.dead:
        return Judgement(
            Level.WARNING,
            f"pod {beat.pod} is silent since {_span(beat.age)}; another pod claimed the run"
            f" {_span(found.claim_age)} ago; {stored}",
        )
    lost = ""
    if beat.step is not None:
        lost = f"; its last step was {beat.step}"
    what = "podwatch ended there" if beat.state == HolderState.RESTARTING else "no heartbeat"
    return Judgement(Level.CRITICAL, f"dead: {what} from pod {beat.pod} since {_span(beat.age)}{lost}; {stored}")


def _guarded(found: Evidence, beat: Beat, limits: Limits, stored: str) -> Judgement:
    if not beat.state:
        return Judgement(Level.UNKNOWN, f"a pod holds the run, but its heartbeat cannot be read; {stored}")
    down = beat.desired == Desired.RUNNING and beat.phase in _DOWN
    at = "training is down" if down else "no step yet" if beat.step is None else f"step {beat.step}"
    why = beat.reason or "see `podwatch status` on the pod"
    if down or beat.overall == "critical":
        return Judgement(Level.CRITICAL, f"{at}; {why}; {stored}")
    if beat.age > limits.late:
        return Judgement(Level.WARNING, f"{at}; no heartbeat since {_span(beat.age)}; {stored}")
    step_age = None if beat.step_age is None else beat.step_age + beat.age
    training = beat.desired == Desired.RUNNING and beat.phase not in _RESTS
    if training and limits.step and step_age is not None and step_age > limits.step:
        return Judgement(Level.WARNING, f"{at}; no new step since {_span(step_age)}; {stored}")
    waiting = None if beat.unstored_age is None else beat.unstored_age + beat.age
    if waiting is not None and waiting > limits.upload:
        text = f"{at}; upload is behind: nothing was stored for {_span(waiting)}, step {beat.unstored_step} waits"
        return Judgement(Level.WARNING, f"{text}; {stored}")
    if beat.overall == "warning":
        return Judgement(Level.WARNING, f"{at}; {why}; {stored}")
    if beat.overall == "unknown":
        return Judgement(Level.UNKNOWN, f"{at}; podwatch cannot observe training: {why}; {stored}")
    new = "" if step_age is None else f", {_span(step_age)} ago"
    return Judgement(Level.OK, f"{at}{new}; {stored}")


_TEXTS = ("state", "phase", "desired", "host", "overall", "reason", "outcome")


def parse_beat(document: Mapping[str, Any], age: float) -> Beat:
    """A heartbeat's document; every field that is not what it should be is left out. ``age``: by the store's clock."""
    written = _number(document.get("written_wall"))

    def before(name: str) -> float | None:
        at = _number(document.get(name))
        return None if at is None or written is None else max(0.0, written - at)

    return Beat(
        age=max(0.0, age),
        **{name: _text(document.get(name)) for name in _TEXTS},
        instance=parse_instance(document.get("instance")),
        step=_step(document.get("step")),
        step_age=before("step_wall"),
        unstored_step=_step(document.get("unstored_step")),
        unstored_age=before("unstored_since_wall"),
    )


def _text(value: object) -> str:
    return value[:300] if isinstance(value, str) else ""


def _step(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 10**18 else None


def _number(value: object) -> float | None:
    if type(value) is int and abs(value) < 2**53:
        return float(value)
    return value if type(value) is float and math.isfinite(value) else None


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h" if hours < 48 else f"{hours // 24} d"
