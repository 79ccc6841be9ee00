"""Where a run's time and money went: a fold over the events of the journal.

Every event is folded once, in order (``advance``). Each second since the first event belongs to one use: training,
restarting, down, stopped, evaluating, or unknown. Training that a failure takes back belongs to its cause: all of it
since the checkpoint that training resumed from.

Three kinds of event make the wall clock of the events reliable. ``watch-started`` begins each podwatch and says until
when the one before observed the run; ``clock-changed`` says by how much the wall clock was set; all others are stamped
with that clock. The time between two podwatches is unknown, unless the second one takes over the same trainer.

``cost_totals.py`` turns a ledger into totals, an estimate of the time to finish, and money.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Final

from podwatch.domain.event import Event, EventName


class Use(StrEnum):
    """What a second was used for. Stable names: status, heartbeat and metrics show them."""

    TRAINING = "training"
    RESTARTING = "restarting"
    """From a failure, or the begin of a start, to the step that confirms the start."""
    DOWN = "down"
    """Training should run, and podwatch cannot start it: it gave up, or something blocks the start."""
    STOPPED = "stopped"
    EVALUATING = "evaluating"
    """Training is stopped for an evaluation."""
    UNKNOWN = "unknown"
    """No podwatch ran."""
    FINISHED = "finished"
    """After the end of the run: in no total."""


TOTALLED: Final = (Use.TRAINING, Use.RESTARTING, Use.DOWN, Use.STOPPED, Use.EVALUATING, Use.UNKNOWN)
NOT_TRAINING: Final = (Use.RESTARTING, Use.DOWN)

START: Final = "start"
"""The cause of a restart that no failure caused: the first start, or one after a stop."""
OPERATOR: Final = "operator"
PREEMPTED: Final = "preempted"
UNATTENDED: Final = "unattended"
"""The trainer ended while no podwatch ran."""
EVALUATION: Final = "evaluation"
"""Training was stopped for an evaluation."""
WANTED: Final = frozenset({START, OPERATOR, EVALUATION})
"""Causes that are no failures."""

LEDGER_KEY: Final = "account"
"""Journal key of the kept ledger."""
BACK_SECONDS: Final = 5.0
"""An event that is stamped further back than this shows a clock that was set, in a journal without clock-changed."""
MOST_SAVES: Final = 64
MOST_INCIDENTS: Final = 50
MOST_PACES: Final = 60
FEWEST_PACES: Final = 5
"""Fewer show no spread."""
PACE_SECONDS: Final = 60.0
"""The shortest time over which a pace is measured."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What one cause, or one incident, has cost."""

    times: int = 0
    seconds: float = 0.0
    """Without training."""
    steps: int = 0
    """Steps that the resume went back."""
    redone: int = 0
    """Of those, the ones that were trained again."""
    training_seconds: float = 0.0
    """Training since the checkpoint that training resumed from."""

    def plus(self, other: "Loss") -> "Loss":
        return Loss(
            self.times + other.times,
            self.seconds + other.seconds,
            self.steps + other.steps,
            self.redone + other.redone,
            self.training_seconds + other.training_seconds,
        )


@dataclass(frozen=True, slots=True)
class Again:
    """Steps above ``low`` up to ``high`` that are still to be trained again."""

    low: int
    high: int
    cause: str
    incident: int


@dataclass(frozen=True, slots=True)
class Ledger:
    """The fold so far. ``at``: epoch seconds of the last event or look, by the current wall clock.

    ``before`` is the use before a gap, ``gap`` its unobserved seconds, ``unsettled`` the observed seconds since, until
    an event shows what the time is used for.
    """

    since: float | None = None
    at: float = 0.0
    use: Use = Use.UNKNOWN
    seconds: Mapping[Use, float] = field(default_factory=dict)
    desired: str = "running"
    start_id: str = ""
    before: Use = Use.UNKNOWN
    gap: float = 0.0
    unsettled: float = 0.0
    segment: float = 0.0
    """Seconds of training since the last start was confirmed."""
    trained_until: float = 0.0
    """Epoch seconds at which training was last known to run."""
    cause: str = ""
    incident: int = 0
    causes: Mapping[str, Loss] = field(default_factory=dict)
    incidents: Mapping[int, Loss] = field(default_factory=dict)
    lost_training: float = 0.0
    position: int | None = None
    """The step up to which training is, counted from the checkpoint that it resumed from."""
    again: tuple[Again, ...] = ()
    saves: Mapping[int, float] = field(default_factory=dict)
    """Seconds of useful training at each save, by step."""
    found: tuple[tuple[int, float], ...] = ()
    """Saves seen after a gap, before it is known who trained in it: step and epoch seconds."""
    block: tuple[int, float] | None = None
    """Step and seconds of training where the current measurement of the pace began."""
    paces: tuple[float, ...] = ()
    """Seconds of training per step, newest last."""
    counted: bool = True
    """Checkpoint numbers are steps; False: steps are not counted."""

    @property
    def useful(self) -> float:
        return self.seconds.get(Use.TRAINING, 0.0) - self.lost_training


# -- fold ------------------------------------------------------------------------------------------------------------


def fold(events: Iterable[Event], ledger: Ledger | None = None) -> Ledger:
    ledger = ledger or Ledger()
    for event in events:
        ledger = advance(ledger, event)
    return ledger


def advance(ledger: Ledger, event: Event) -> Ledger:
    """The ledger after ``event``. Events come in the order in which they were recorded."""
    if event.name is EventName.WATCH_STARTED:
        return _watch_started(ledger, event)
    if event.name is EventName.CLOCK_CHANGED:
        ledger = _clock_set(ledger, _number(event, "seconds") or 0.0)
    ledger = until(ledger, event.wall)
    handle = _HANDLERS.get(event.name)
    return ledger if handle is None else handle(ledger, event)


def until(ledger: Ledger, wall: float) -> Ledger:
    """The ledger with the time to ``wall`` added to its current use."""
    if ledger.since is None:
        return replace(ledger, since=wall, at=wall, trained_until=wall)
    passed = wall - ledger.at
    if passed <= 0:
        return replace(ledger, at=wall) if passed < -BACK_SECONDS else ledger
    ledger = _add(replace(ledger, at=wall), ledger.use, passed)
    if ledger.use is Use.TRAINING:
        return replace(ledger, segment=ledger.segment + passed, trained_until=wall)
    return replace(ledger, unsettled=ledger.unsettled + passed) if ledger.use is Use.UNKNOWN else ledger


def look(
    ledger: Ledger, wall: float, *, step: int | None = None, step_age: float = 0.0, shown: Use | None = None
) -> Ledger:
    """The ledger at a look of podwatch at ``wall``. ``step``: the newest one, made ``step_age`` seconds ago.

    ``shown``: what recovery and sensors show. It counts only where no event says it: a trainer that ends while podwatch
    is paused or only observes, a start that waits for an operator, another pod that holds the run.
    """
    ledger = until(ledger, wall)
    if shown is not None and (
        ledger.use is Use.UNKNOWN
        or (ledger.use, shown) in ((Use.TRAINING, Use.DOWN), (Use.DOWN, Use.TRAINING), (Use.RESTARTING, Use.STOPPED))
    ):
        ledger = _enter(ledger, shown)
    if step is None:
        return ledger
    ledger = _reach(ledger, step)
    return _measure(ledger, step, step_age) if ledger.use is Use.TRAINING else ledger


def _measure(ledger: Ledger, step: int, age: float) -> Ledger:
    """Measure the pace between two steps of one start, at least ``PACE_SECONDS`` apart."""
    if age > ledger.segment:
        return ledger  # a step of an earlier start
    now = ledger.seconds.get(Use.TRAINING, 0.0) - age
    if ledger.block is None or step < ledger.block[0]:
        return replace(ledger, block=(step, now))
    first, began = ledger.block
    if step == first or now - began < PACE_SECONDS:
        return ledger
    paces = (*ledger.paces, (now - began) / (step - first))[-MOST_PACES:]
    return replace(ledger, block=(step, now), paces=paces)


def _add(ledger: Ledger, use: Use, seconds: float) -> Ledger:
    """``seconds`` (negative: less) of ``use``, for the current cause and incident."""
    totals = {**ledger.seconds, use: ledger.seconds.get(use, 0.0) + seconds}
    ledger = replace(ledger, seconds=totals)
    return _lose(ledger, Loss(seconds=seconds)) if use in NOT_TRAINING else ledger


def _lose(ledger: Ledger, loss: Loss, cause: str | None = None, incident: int | None = None) -> Ledger:
    name, number = cause if cause is not None else ledger.cause, incident if incident is not None else ledger.incident
    causes = {**ledger.causes, name: ledger.causes.get(name, Loss()).plus(loss)}
    incidents = dict(ledger.incidents)
    if number:
        incidents[number] = incidents.get(number, Loss()).plus(loss)
        for old in sorted(incidents)[:-MOST_INCIDENTS]:
            del incidents[old]
    return replace(ledger, causes=causes, incidents=incidents)


def _enter(ledger: Ledger, use: Use) -> Ledger:
    """Begin ``use``; the observed time whose use was not known yet belongs to it too."""
    waited = ledger.unsettled
    ledger = replace(ledger, unsettled=0.0, gap=0.0, found=())
    if ledger.use is Use.UNKNOWN and waited:
        ledger = _add(_add(ledger, Use.UNKNOWN, -waited), use, waited)
    if use is Use.TRAINING and ledger.use is not Use.TRAINING:
        ledger = replace(
            ledger,
            segment=waited if ledger.use is Use.UNKNOWN else 0.0,
            trained_until=ledger.at,
            block=None,
            cause="",
            incident=0,
        )
    return replace(ledger, use=use)


def _reach(ledger: Ledger, step: int) -> Ledger:
    """Training has reached ``step``: what it went over again is redone."""
    if not ledger.counted or (ledger.position is not None and step <= ledger.position):
        return ledger
    left: list[Again] = []
    for part in ledger.again:
        upto = min(max(step, part.low), part.high)
        if upto > part.low:
            ledger = _lose(ledger, Loss(redone=upto - part.low), part.cause, part.incident)
        if upto < part.high:
            left.append(replace(part, low=upto))
    return replace(ledger, position=step, again=tuple(left))


# -- one event -------------------------------------------------------------------------------------------------------


def _watch_started(ledger: Ledger, event: Event) -> Ledger:
    """A podwatch begins. Fields: ``seen``, until when the one before observed the run, by the clock of that time;
    ``step``, up to which step it had seen training; ``jumped``, by how much the clock was set since."""
    if ledger.since is None:
        return until(ledger, event.wall)
    seen = _number(event, "seen")
    if seen is not None:
        ledger = until(ledger, max(seen, ledger.at))
    step = _step(event)
    if step is not None:
        ledger = _reach(ledger, step)
    ledger = _clock_set(ledger, _number(event, "jumped") or 0.0)
    gap = max(0.0, event.wall - ledger.at)
    ledger = replace(ledger, at=event.wall, block=None)
    if ledger.use is Use.FINISHED:
        return _add(ledger, Use.FINISHED, gap)
    again = ledger.use is Use.UNKNOWN  # the podwatch before could not find out either
    return _add(
        replace(
            ledger,
            use=Use.UNKNOWN,
            before=ledger.before if again else ledger.use,
            gap=gap + (ledger.gap + ledger.unsettled if again else 0.0),
            unsettled=0.0,
        ),
        Use.UNKNOWN,
        gap,
    )


def _clock_set(ledger: Ledger, seconds: float) -> Ledger:
    found = tuple((step, wall + seconds) for step, wall in ledger.found)
    return replace(ledger, at=ledger.at + seconds, trained_until=ledger.trained_until + seconds, found=found)


def _found_again(ledger: Ledger, event: Event) -> Ledger:
    """``trainer-adopted``, ``trainer-attached``: podwatch takes over a trainer, or finds that it has ended."""
    start_id = str(event.fields.get("start_id") or "")
    lives = event.fields.get("alive") is not False
    if ledger.use is not Use.UNKNOWN:
        restarts = lives and ledger.use in NOT_TRAINING and event.name is EventName.TRAINER_ADOPTED
        if lives and event.name is EventName.TRAINER_ATTACHED:
            ledger = replace(_enter(ledger, Use.TRAINING), position=None)
        return replace(ledger, start_id=start_id, use=Use.RESTARTING if restarts else ledger.use)
    same = start_id == ledger.start_id and ledger.before in (Use.TRAINING, Use.RESTARTING)
    if same:
        ended = _number(event, "ended_at")
        began = ledger.at - ledger.unsettled - ledger.gap
        ran = ledger.gap if lives else min(max((ended if ended is not None else began) - began, 0.0), ledger.gap)
        ledger = _ran_on(ledger, ran, began, lives=lives)
    elif lives:
        ledger = replace(_enter(ledger, Use.TRAINING), position=None)
    else:
        ledger = _enter(replace(ledger, cause=UNATTENDED, incident=0), Use.DOWN)
    return replace(ledger, start_id=start_id)


def _ran_on(ledger: Ledger, ran: float, began: float, *, lives: bool) -> Ledger:
    """The trainer of before the gap ran for ``ran`` of its seconds, and still runs if it ``lives``."""
    before, rest, found = ledger.before, ledger.gap - ran, ledger.found
    segment, waited = ledger.segment, ledger.unsettled if lives else 0.0
    ledger = _add(_add(ledger, Use.UNKNOWN, -ran), before, ran)
    if before is Use.TRAINING:
        ledger = replace(ledger, segment=segment + ran, trained_until=began + ran)
    if lives:
        ledger = _add(_add(ledger, Use.UNKNOWN, -waited), before, waited)
        ledger = replace(ledger, use=before, gap=0.0, unsettled=0.0, found=())
        if before is Use.TRAINING:
            ledger = replace(ledger, segment=ledger.segment + waited, trained_until=ledger.at)
    else:
        ledger = replace(ledger, cause=UNATTENDED, incident=0) if before is Use.TRAINING else ledger
        ledger = _add(_add(ledger, Use.UNKNOWN, -rest), Use.DOWN, rest)
        ledger = _enter(ledger, Use.DOWN)
    for step, wall in found:
        ledger = _saved(ledger, step, wall)
    return ledger


def _starting(ledger: Ledger, event: Event) -> Ledger:
    if "start_id" not in event.fields:
        return ledger  # a remark about the start
    if not ledger.cause:
        ledger = _lose(replace(ledger, cause=START, incident=0), Loss(times=1))
    if ledger.use is not Use.RESTARTING:
        ledger = _enter(ledger, Use.RESTARTING)
    ledger = _resume(ledger, _step(event))
    return replace(ledger, start_id=str(event.fields.get("start_id") or ""))


def _resume(ledger: Ledger, step: int | None) -> Ledger:
    """Training starts from ``step`` (None: fresh). What it did since that checkpoint is lost."""
    low, useful = step or 0, ledger.useful
    known = 0.0 if step is None else ledger.saves.get(step)
    steps = max(0, ledger.position - low) if ledger.position is not None else 0
    if known is not None:
        gone = max(0.0, useful - known)
    else:  # a checkpoint that this pod did not see being saved
        gone = min(useful, steps * statistics.median(ledger.paces)) if ledger.paces else 0.0
    ledger = _lose(ledger, Loss(steps=steps, training_seconds=gone))
    again = (Again(low, low + steps, ledger.cause, ledger.incident),) if steps else ()
    saves = {number: at for number, at in ledger.saves.items() if number <= low}
    if step is not None:
        saves[step] = useful - gone
    return replace(
        ledger,
        lost_training=ledger.lost_training + gone,
        position=low if ledger.counted else None,
        again=(*again, *ledger.again),
        saves=saves,
        block=None,
    )


def _confirmed(ledger: Ledger, event: Event) -> Ledger:
    ledger = _enter(ledger, Use.TRAINING)
    step = _step(event)
    return ledger if step is None else _reach(ledger, step)


def _unconfirmed(ledger: Ledger, event: Event) -> Ledger:
    """``finding-raised``: no step number can be read, so no step will confirm the start."""
    seen = event.fields.get("finding") == "resume-unconfirmed" and ledger.use is Use.RESTARTING
    return _enter(ledger, Use.TRAINING) if seen else ledger


def _failed(ledger: Ledger, event: Event) -> Ledger:
    """``incident-opened``. Field ``began``: when the failure began. Training since then was none."""
    number = event.fields.get("incident")
    if not isinstance(number, int):
        return ledger
    began = _number(event, "began")
    moved = 0.0
    if ledger.use is Use.TRAINING and began is not None:
        moved = min(max(event.wall - began, 0.0), ledger.segment)
    use = Use.DOWN if event.fields.get("gave_up") else Use.RESTARTING
    cause = str(event.fields.get("kind") or "start-failed")
    ledger = replace(_enter(ledger, use) if ledger.use is Use.UNKNOWN else ledger, cause=cause, incident=number)
    if moved:
        ledger = _add(_add(ledger, Use.TRAINING, -moved), use, moved)
        ledger = replace(ledger, segment=ledger.segment - moved, trained_until=ledger.trained_until - moved)
    return _lose(_enter(ledger, use), Loss(times=1))


def _gave_up(ledger: Ledger, event: Event) -> Ledger:
    return _enter(ledger, Use.DOWN) if ledger.use in (Use.RESTARTING, Use.EVALUATING, Use.UNKNOWN) else ledger


def _stopping(ledger: Ledger, event: Event) -> Ledger:
    """Fields ``step``: the last step seen; ``evaluation``: training is stopped for one."""
    if "start_id" not in event.fields:
        return ledger
    step = _step(event)
    if step is not None:
        ledger = _reach(ledger, step)
    if ledger.use is not Use.TRAINING:
        return ledger
    if ledger.desired == "finished":
        return _enter(ledger, Use.FINISHED)
    if ledger.desired == "stopped":
        return _enter(ledger, Use.STOPPED)
    if event.fields.get("evaluation"):
        return _enter(_lose(replace(ledger, cause=EVALUATION, incident=0), Loss(times=1)), Use.EVALUATING)
    if not ledger.cause:
        ledger = _lose(replace(ledger, cause=OPERATOR, incident=0), Loss(times=1))
    return _enter(ledger, Use.RESTARTING)


def _desired(ledger: Ledger, event: Event) -> Ledger:
    ledger = replace(ledger, desired=str(event.fields.get("desired") or "running"))
    if ledger.desired == "running" or ledger.use is Use.TRAINING:
        return ledger
    ledger = _enter(ledger, Use.FINISHED if ledger.desired == "finished" else Use.STOPPED)
    return replace(ledger, cause="", incident=0)


def _finished(ledger: Ledger, event: Event) -> Ledger:
    return replace(_enter(ledger, Use.FINISHED), cause="", incident=0, desired="finished")


def _begun(ledger: Ledger, event: Event) -> Ledger:
    """``daemon-started``: recovery has looked at the pod. Without a trainer, what was desired tells the rest. Field
    ``desired``: by the run record, which a new state directory finds."""
    ledger = replace(ledger, desired=str(event.fields.get("desired") or ledger.desired))
    if ledger.use is not Use.UNKNOWN or ledger.desired == "running":
        return ledger
    return _enter(ledger, Use.FINISHED if ledger.desired == "finished" else Use.STOPPED)


def _leaving(ledger: Ledger, event: Event) -> Ledger:
    if not event.fields.get("preempted") or ledger.use is not Use.TRAINING:
        return ledger
    return _lose(replace(ledger, cause=PREEMPTED, incident=0), Loss(times=1))


def _checkpoint(ledger: Ledger, event: Event) -> Ledger:
    """``checkpoint-complete``. Field ``changed_at``: when its last file was written."""
    step, changed = _step(event), _number(event, "changed_at")
    if step is None:
        return ledger
    wall = event.wall if changed is None else changed
    if ledger.use is Use.UNKNOWN and ledger.before is Use.TRAINING:  # how long it trained on is not known yet
        return replace(ledger, found=(*ledger.found, (step, wall))[-MOST_SAVES:])
    return _saved(ledger, step, wall)


def _saved(ledger: Ledger, step: int, wall: float) -> Ledger:
    age = min(max(0.0, ledger.trained_until - wall), ledger.segment)
    saves = {**ledger.saves, step: ledger.useful - age}
    for old in list(saves)[:-MOST_SAVES]:
        del saves[old]
    return replace(ledger, saves=saves)


_HANDLERS: Final[Mapping[EventName, Callable[[Ledger, Event], Ledger]]] = {
    EventName.DAEMON_STARTED: _begun,
    EventName.DAEMON_STOPPING: _leaving,
    EventName.TRAINER_ADOPTED: _found_again,
    EventName.TRAINER_ATTACHED: _found_again,
    EventName.TRAINER_STARTING: _starting,
    EventName.TRAINER_CONFIRMED: _confirmed,
    EventName.TRAINER_STOPPING: _stopping,
    EventName.TRAINER_FINISHED: _finished,
    EventName.FINDING_RAISED: _unconfirmed,
    EventName.INCIDENT_OPENED: _failed,
    EventName.GAVE_UP: _gave_up,
    EventName.RECOVERY_BLOCKED: _gave_up,
    EventName.DESIRED_CHANGED: _desired,
    EventName.CHECKPOINT_COMPLETE: _checkpoint,
}


def _number(event: Event, name: str) -> float | None:
    value = event.fields.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _step(event: Event) -> int | None:
    value = event.fields.get("step")
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# -- kept in the journal ---------------------------------------------------------------------------------------------


def to_dict(ledger: Ledger) -> dict[str, Any]:
    """JSON-safe."""
    return asdict(ledger)


def from_dict(data: object) -> Ledger | None:
    """The ledger that ``to_dict`` wrote; None if it cannot be read."""
    if not isinstance(data, Mapping):
        return None
    try:
        known = {f.name: data[f.name] for f in fields(Ledger) if f.name in data}
        known |= {
            "use": Use(known["use"]),
            "before": Use(known["before"]),
            "seconds": {Use(name): float(value) for name, value in known["seconds"].items()},
            "causes": {str(name): Loss(**loss) for name, loss in known["causes"].items()},
            "incidents": {int(number): Loss(**loss) for number, loss in known["incidents"].items()},
            "again": tuple(Again(**part) for part in known["again"]),
            "saves": {int(step): float(at) for step, at in known["saves"].items()},
            "found": tuple((int(step), float(at)) for step, at in known["found"]),
            "block": None if known["block"] is None else (int(known["block"][0]), float(known["block"][1])),
            "paces": tuple(float(pace) for pace in known["paces"]),
        }
        return Ledger(**known)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return None
