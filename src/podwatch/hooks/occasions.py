"""Which hook occasions an event is, which occasion runs next, and what an interrupted run means (docs/hooks.md).

Pure. An occasion is one event as hooks name it; its id stays the same when it is run again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from podwatch.domain.document import Document, Json, Real, Text, Whole
from podwatch.domain.event import Event, EventName

AT_LEAST_ONCE: Final = frozenset({"checkpoint", "published", "milestone", "finished"})
"""A run of these that podwatch's end interrupted is run again, with the same id. They are facts about a checkpoint or
the run, for which a second run does no harm and a missing one does. All others run at most once: they are about a
moment, which is over when podwatch returns."""
INTERRUPTED_AT_MOST: Final = 3
"""Runs of one occasion that podwatch's end interrupted before it is given up: a hook that takes the machine down would
do so at every start."""
FAILING_AFTER: Final = 2
"""Occasions in a row that failed, with their retries, before the finding: one failure can be the network's."""

_KINDS: Final[Mapping[EventName, str]] = {
    EventName.CHECKPOINT_COMPLETE: "checkpoint",
    EventName.CHECKPOINT_DAMAGED: "damaged",
    EventName.PUBLISHED: "published",
    EventName.TRAINER_STARTED: "started",
    EventName.INCIDENT_OPENED: "incident",
    EventName.INCIDENT_CLOSED: "restarted",
    EventName.GAVE_UP: "gave-up",
    EventName.SUPERSEDED: "superseded",
    EventName.DAEMON_STOPPING: "preempted",
    EventName.TRAINER_FINISHED: "finished",
    EventName.RUN_ENDED: "ended",
}
SOURCES: Final = frozenset(_KINDS)
"""The events that can be an occasion."""


@dataclass(frozen=True, slots=True)
class Occasion(Document):
    """One reason to run a hook. ``event_id``: the journal's row (0: none). ``skipped``: older occasions of this kind
    that this one replaced. ``interrupted``: how often podwatch's end interrupted its run."""

    FILE = "occasion of a hook"

    kind: Text
    id: Text
    wall: Real
    event_id: Whole = 0
    step: Whole | None = None
    save_id: Text = ""
    severity: Text = "info"
    message: Text = ""
    fields: Json = field(default_factory=dict)
    skipped: Whole = 0
    interrupted: Whole = 0

    @property
    def again(self) -> bool:
        """Whether an interrupted run of it is repeated."""
        return self.kind in AT_LEAST_ONCE and self.interrupted < INTERRUPTED_AT_MOST


def kinds_of(event: Event, *, milestone: bool = False) -> tuple[str, ...]:
    """The names under which hooks can ask for the event, the most specific first; empty for most events."""
    kind = _KINDS.get(event.name)
    if kind is None:
        return ()
    if kind == "published" and milestone:
        return ("milestone", "published")
    if kind == "incident" and "incident" not in event.fields:
        return ()  # only that the bundle could not be written
    if kind == "restarted" and event.fields.get("resumed_step") is None:
        return ()  # closed without a restart
    if kind == "preempted" and not event.fields.get("preempted"):
        return ()
    return (kind,)


def occasion_of(event: Event, wanted: Sequence[str], *, milestone: bool = False) -> Occasion | None:
    """The event as an occasion of a hook with ``on = wanted``; None if the hook does not ask for it."""
    kind = next((k for k in kinds_of(event, milestone=milestone) if k in wanted), None)
    if kind is None:
        return None
    step, save = event.fields.get("step", event.fields.get("resumed_step")), str(event.fields.get("save_id") or "")
    number = step if isinstance(step, int) and not isinstance(step, bool) else None
    return Occasion(
        kind,
        _id(kind, event, number, save),
        event.wall,
        event.id,
        number,
        save,
        str(event.severity),
        event.message,
        dict(event.fields),
    )


def _id(kind: str, event: Event, step: int | None, save_id: str) -> str:
    if kind in ("checkpoint", "damaged"):
        return f"{kind}:{step}:{save_id}"
    if kind in ("published", "milestone"):
        return f"{kind}:{event.fields.get('generation')}:{event.fields.get('seq')}"
    return f"{kind}:{round(event.wall * 1000)}"


def next_of(pending: Sequence[Occasion], *, coalesce: bool) -> tuple[Occasion | None, tuple[Occasion, ...]]:
    """The occasion to run next, and those that stay. With ``coalesce`` only the newest of each kind is run; it counts
    the others."""
    if not pending:
        return None, ()
    if not coalesce:
        return pending[0], tuple(pending[1:])
    newest = {one.kind: n for n, one in enumerate(pending)}
    first = min(newest.values())
    chosen = pending[first]
    rest = tuple(one for one in pending if one.kind != chosen.kind)
    older = [one for one in pending[:first] if one.kind == chosen.kind]
    return replace(chosen, skipped=sum(1 + one.skipped for one in older)), rest


def pause_seconds(attempt: int) -> float:
    """Before the next attempt after ``attempt`` (from 1) failed: 10 s, then three times longer each time, at most ten
    minutes."""
    return min(600.0, 10.0 * 3.0 ** (attempt - 1))
