"""Which checkpoints are evaluated and when, the table of results, and the best of them (docs/hooks.md).

Pure. ``State`` is a fold over the events of the journal; a target is a checkpoint that waits for its evaluation.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from podwatch.domain.document import Document, Flag, Many, Real, Text, Whole
from podwatch.domain.event import Event, EventName
from podwatch.domain.snapshot import Desired

STATE_KEY: Final = "evaluation"
"""Journal key of the kept ``State``."""
RESULTS_KEY: Final = "evaluation-results"
"""Journal key of the table."""
BEST_PIN: Final = "best evaluation"
"""The reason of a pin begins with this if podwatch made it for the best result."""
INTERRUPTED_AT_MOST: Final = 3
"""Runs of one target that podwatch's end interrupted before it is given up."""
FAILING_AFTER: Final = 2
"""Failed evaluations in a row before the finding."""
FRESH_SECONDS: Final = 30.0
"""Training stops for an evaluation only within this time after a save: it repeats all steps since."""
MOST_RESULTS: Final = 2000
MOST_METRICS: Final = 200
MOST_AGAIN: Final = 200
MOST_NAMED: Final = 6
MOST_DEPTH: Final = 6

REQUEST: Final = "request"
END: Final = "end"
"""``Target.why`` of the evaluation at the end of training."""


@dataclass(frozen=True, slots=True)
class Rules:
    """``[evaluation]``: when a checkpoint is due. 0 and False: not for this reason."""

    every_saves: int = 0
    every_steps: int = 0
    at_end: bool = False
    coalesce: bool = True


@dataclass(frozen=True, slots=True)
class Target:
    """One checkpoint to evaluate. ``save_id`` is empty if only the step is known (a request for a stored one)."""

    step: Whole
    save_id: Text = ""
    why: Text = ""
    interrupted: Whole = 0


@dataclass(frozen=True, slots=True)
class State(Document):
    """``cursor``: the last event that was taken into account. ``saves``: complete checkpoints since the last one that
    was due. ``last``: the step of the last one that was due by its step. ``newest``: the last one that became complete,
    at ``saved_wall`` (epoch seconds; 0 after a start: nothing was saved since). ``resumed``: the step of that start.
    ``again``: (step, save id before, save id) of checkpoints whose files changed when training resumed from them.
    ``ended``: training is finished."""

    FILE = "state of evaluations"

    cursor: Whole = 0
    saves: Whole = 0
    last: Whole = 0
    newest: Target | None = None
    saved_wall: Real = 0.0
    resumed: Whole | None = None
    again: Many[tuple[Whole, Text, Text]] = ()
    ended: Flag = False
    waiting: Many[Target] = ()
    running: Many[Target] = ()
    failures: Whole = 0
    why: Text = ""


# -- what is due -----------------------------------------------------------------------------------------------------


def on_event(state: State, event: Event, rules: Rules) -> State:
    """The state after ``event``."""
    state = replace(state, cursor=max(state.cursor, event.id))
    step, save = event.fields.get("step"), str(event.fields.get("save_id") or "")
    number = step if isinstance(step, int) and not isinstance(step, bool) else None
    match event.name:
        case EventName.CHECKPOINT_COMPLETE if number is not None and number == state.resumed:
            return _resumed_from(state, Target(number, save), rules)
        case EventName.CHECKPOINT_COMPLETE if number is not None:
            return _saved(state, Target(number, save), rules, event.wall)
        case EventName.TRAINER_FINISHED:
            state = replace(state, ended=True)
            if rules.at_end and state.newest is not None:
                return _add(state, replace(state.newest, why=END), rules)
        case EventName.TRAINER_STARTING if "start_id" in event.fields:
            resumed = number if number is not None else 0
            newest = state.newest if state.newest is not None and state.newest.step <= resumed else None
            state = replace(state, ended=False, last=min(state.last, resumed), newest=newest)
            return replace(state, resumed=number, saved_wall=0.0)
    return state


def _saved(state: State, target: Target, rules: Rules, wall: float) -> State:
    if state.newest is not None and (state.newest.step, state.newest.save_id) == (target.step, target.save_id):
        return state  # reported again
    state = replace(state, newest=target, saved_wall=wall, saves=state.saves + 1)
    if state.ended:  # training had ended before its last checkpoint was complete
        state = replace(state, waiting=tuple(t for t in state.waiting if t.why != END))
    if rules.every_saves and state.saves >= rules.every_saves:
        return _add(replace(state, saves=0), replace(target, why="save"), rules)
    if rules.every_steps and target.step // rules.every_steps > state.last // rules.every_steps:
        return _add(replace(state, last=target.step), replace(target, why="step"), rules)
    if state.ended and rules.at_end:
        return _add(state, replace(target, why=END), rules)
    return state


def _resumed_from(state: State, target: Target, rules: Rules) -> State:
    """Training resumed from this checkpoint and wrote some of its files again (prime-rl its broadcast), so that its
    save id is another one. It is no new save: otherwise a stop for its evaluation would cause the next one. It is one
    if it was not complete yet when training ended. What is known of none (a new pod) counts as no save."""
    before = state.newest
    if before is not None and before.step < target.step:
        return replace(_saved(state, target, rules, 0.0), saved_wall=state.saved_wall)
    if before is None or before.step != target.step or before.save_id in ("", target.save_id):
        return state
    again = (*state.again, (target.step, before.save_id, target.save_id))[-MOST_AGAIN:]
    waiting = tuple(
        replace(t, save_id=target.save_id) if (t.step, t.save_id) == (target.step, before.save_id) else t
        for t in state.waiting
    )
    return replace(state, newest=target, again=again, waiting=waiting)


def with_earlier(there: Iterable[tuple[int, str]], again: Sequence[tuple[int, str, str]]) -> frozenset[tuple[int, str]]:
    """The checkpoints (step, save id), each also under the ids that it had before training resumed from it."""
    found = set(there)
    for step, before, now in reversed(again):
        if (step, now) in found:
            found.add((step, before))
    return frozenset(found)


def _add(state: State, target: Target, rules: Rules) -> State:
    """``coalesce``: a newer due checkpoint replaces those that wait; a request of the operator is never replaced."""
    kept = tuple(t for t in state.waiting if not _same(t, target))
    if any(_same(t, target) for t in state.running):
        return state
    if rules.coalesce:
        kept = tuple(t for t in kept if t.why == REQUEST)
    return replace(state, waiting=(*kept, target))


def _same(one: Target, other: Target) -> bool:
    return one.step == other.step and (one.save_id == other.save_id or not (one.save_id and other.save_id))


def last(state: State) -> Target | None:
    """The last checkpoint of training that has ended, if its evaluation waits or runs."""
    due = (*state.running, *state.waiting) if state.ended else ()
    return next((t for t in due if t.why == END or (state.newest is not None and _same(t, state.newest))), None)


def requested(state: State, targets: Iterable[Target]) -> State:
    """The state after `podwatch eval`: each of ``targets`` is evaluated, also if it was before."""
    found = state.waiting
    for target in targets:
        if not any(_same(t, target) for t in found):
            found = (*found, replace(target, why=REQUEST))
    return replace(state, waiting=found)


def started(state: State, target: Target) -> State:
    """The state while ``target`` is evaluated."""
    return replace(state, waiting=tuple(t for t in state.waiting if t != target), running=(target,))


def resumed(state: State, also: Collection[Target] = ()) -> tuple[State, tuple[Target, ...]]:
    """The state after an interruption (podwatch ended, or an operator's request): interrupted evaluations are repeated,
    and the targets that were interrupted too often are given up. ``also``: targets that wait, for which training was
    stopped in vain."""
    cut = (*state.running, *(t for t in state.waiting if t in also))
    interrupted = tuple(replace(t, interrupted=t.interrupted + 1) for t in cut)
    kept = tuple(t for t in interrupted if t.interrupted < INTERRUPTED_AT_MOST)
    lost = tuple(t for t in interrupted if t not in kept)
    return replace(state, running=(), waiting=(*kept, *(t for t in state.waiting if t not in cut))), lost


# -- training stops for it -------------------------------------------------------------------------------------------


def stop_for(state: State, ready: Sequence[Target], wall: float, desired: Desired) -> tuple[Target, ...]:
    """The targets to evaluate now on training's GPUs; empty: wait. ``ready``: those that wait and whose files are on
    this pod. Training that runs is stopped only just after a save, so that it repeats few steps. Nothing needs to be
    stopped once it has finished; where an operator stopped it, only the operator's requests use its GPUs."""
    if desired is Desired.FINISHED:
        return tuple(ready)
    if desired is Desired.STOPPED:
        return tuple(t for t in ready if t.why == REQUEST)
    fresh = -1.0 <= wall - state.saved_wall <= FRESH_SECONDS
    return tuple(ready) if fresh else ()


def ready(state: State, local: Collection[tuple[int, str]], fetched: Collection[Target]) -> tuple[Target, ...]:
    """The targets that wait and whose files are on this pod."""
    return tuple(t for t in state.waiting if t in fetched or among(t, local))


def among(target: Target, saves: Collection[tuple[int, str]]) -> bool:
    """Whether it is one of these checkpoints (step, save id)."""
    return any(step == target.step and target.save_id in ("", save) for step, save in saves)


def named(targets: Sequence[Target]) -> str:
    """``step 10, 20``; of many only the first."""
    more = f" and {len(targets) - MOST_NAMED} more" if len(targets) > MOST_NAMED else ""
    return "step " + ", ".join(str(t.step) for t in targets[:MOST_NAMED]) + more


def enough_room(free: int | None, needed: int) -> bool:
    """Whether the disk has room for an evaluation. Unknown counts as enough: the disk's own findings report that."""
    return free is None or free >= needed


# -- results ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result(Document):
    """One row of the table. ``source``: ``local`` or ``store``. ``wall``: epoch seconds of its end."""

    FILE = "result of an evaluation"

    step: Whole
    save_id: Text
    ok: Flag
    wall: Real
    seconds: Real = 0.0
    source: Text = "local"
    why: Text = ""
    metrics: Mapping[Text, Real] = field(default_factory=dict)


def flatten(document: object, prefix: str = "", depth: int = 0) -> dict[str, float]:
    """The numbers of a JSON document by their path: ``{"results": {"gsm8k": {"acc": 0.5}}}`` is
    ``{"results.gsm8k.acc": 0.5}``. NaN and infinity are left out; at most ``MOST_METRICS``."""
    found: dict[str, float] = {}
    if isinstance(document, Mapping) and depth < MOST_DEPTH:
        for name, value in document.items():
            inner = flatten(value, f"{prefix}.{name}" if prefix else str(name), depth + 1)
            for key, number in inner.items():
                if len(found) < MOST_METRICS:
                    found[key[:200]] = number
    elif isinstance(document, int | float) and not isinstance(document, bool) and prefix:
        try:
            number = float(document)
        except OverflowError:
            return {}
        return {prefix: number} if abs(number) < float("inf") else {}
    return found


def with_result(table: Sequence[Result], result: Result) -> tuple[Result, ...]:
    """The table with ``result``, by step. One row for each checkpoint: a failure does not replace a result."""
    before = next((r for r in table if (r.step, r.save_id) == (result.step, result.save_id)), None)
    if before is not None and before.ok and not result.ok:
        return tuple(table)
    rest = [r for r in table if r is not before]
    rest.append(result)
    rest.sort(key=lambda r: r.wall)
    return tuple(sorted(rest[-MOST_RESULTS:], key=lambda r: (r.step, r.wall)))


def best(
    table: Iterable[Result], metric: str, *, lower: bool, there: Collection[tuple[int, str]] | None = None
) -> Result | None:
    """The best result by ``metric``; of equal ones the earlier step. ``there``: the checkpoints that still exist;
    others do not count."""
    known = [r for r in table if r.ok and metric in r.metrics and (there is None or (r.step, r.save_id) in there)]
    return min(known, key=lambda r: (r.metrics[metric] if lower else -r.metrics[metric], r.step), default=None)


def columns(table: Iterable[Result], metric: str = "") -> tuple[str, ...]:
    """The names of all metrics, the configured one first."""
    names = sorted({name for r in table for name in r.metrics})
    return (metric, *(n for n in names if n != metric)) if metric in names else tuple(names)


# -- the command -----------------------------------------------------------------------------------------------------

PLACEHOLDERS: Final = ("checkpoint", "weights", "step", "run_id", "output")


class MissingValue(Exception):  # noqa: N818 - it is no error of podwatch
    """A placeholder has no value for this checkpoint; the text says why and what to do."""


def fill(command: Sequence[str], values: Mapping[str, str], missing: Mapping[str, str]) -> tuple[str, ...]:
    """The command with its placeholders replaced; other braces stay. Raises MissingValue with the text of ``missing``
    if it uses one without a value."""
    found = []
    for word in command:
        for name in PLACEHOLDERS:
            mark = "{" + name + "}"
            if mark not in word:
                continue
            if not values.get(name):
                raise MissingValue(missing.get(name, f"{mark} has no value"))
            word = word.replace(mark, values[name])  # noqa: PLW2901
        found.append(word)
    return tuple(found)


def no_weights(layout: str, convert: str, note: str) -> str:
    """Why ``{weights}`` has no value for a checkpoint, and how to make them."""
    text = f"this checkpoint (layout {layout}) has no weights that vLLM or transformers can load"
    if convert:
        text += f"; to convert it, with CHECKPOINT as {{checkpoint}}: {convert}"
    if note:
        text += f" ({note})"
    return text + ". docs/hooks.md shows a command that converts first"


# -- kept in the journal ---------------------------------------------------------------------------------------------


def results_from_list(kept: object) -> tuple[Result, ...]:
    """The table that podwatch kept; rows that cannot be read are left out."""
    rows = [Result.kept(row) for row in kept] if isinstance(kept, list) else []
    return tuple(row for row in rows if row is not None)
