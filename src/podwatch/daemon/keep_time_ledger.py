"""Writes the ledger of the run's time (policy/time_ledger.py), and keeps it in the journal for the next podwatch."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from podwatch.client.times_and_sizes import span
from podwatch.daemon.notifications import EventBus
from podwatch.domain.event import Event, EventName
from podwatch.journal import AsyncJournal, Journal
from podwatch.policy.cost_totals import Account, Price, account
from podwatch.policy.overall_status import TrainingState
from podwatch.policy.time_ledger import LEDGER_KEY, Ledger, Use, advance, fold, from_dict, look, to_dict
from podwatch.reporting.daemon_view import DaemonView
from podwatch.system.clock import Clock
from podwatch.system.procfs import boot_id

LOOK_SECONDS: Final = 60.0
"""Time between two looks: a podwatch that is killed loses at most this much of what it saw."""
JUMP_SECONDS: Final = 1.0
"""NTP slews by at most 0.5 ms per second: between two looks the clocks differ more only if the wall clock was set."""
CHUNK: Final = 500

SHOWN: Final[Mapping[TrainingState, Use]] = {
    TrainingState.RUNNING: Use.TRAINING,
    TrainingState.RECOVERING: Use.RESTARTING,
    TrainingState.STARTING: Use.RESTARTING,
    TrainingState.DOWN: Use.DOWN,
    TrainingState.GAVE_UP: Use.DOWN,
    TrainingState.BLOCKED: Use.DOWN,
    TrainingState.STOPPED: Use.STOPPED,
    TrainingState.EVALUATING: Use.EVALUATING,
    TrainingState.FINISHED: Use.FINISHED,
}


class Accountant:
    """Sees every event. ``counted``: the layout's checkpoint numbers are steps."""

    def __init__(self, journal: AsyncJournal, clock: Clock, bus: EventBus, *, counted: bool) -> None:
        self._journal, self._clock, self._bus = journal, clock, bus
        self._counted = counted
        self.ledger = Ledger(counted=counted)
        self._offset = clock.wall() - clock.boottime()

    async def load(self) -> None:
        """Continue the ledger of an earlier podwatch, and record that this one begins."""
        kept = await self._journal.run(Journal.learned, LEDGER_KEY)
        kept = kept if isinstance(kept, dict) else {}
        ledger = from_dict(kept.get("ledger"))
        jumped, text = 0.0, "podwatch begins to observe the run"
        seen: float | None = None
        if ledger is not None:
            ledger = await self._journal.run(partial(_catch_up, ledger=ledger, kept=kept))
            self.ledger = replace(ledger, counted=self._counted)
            seen = ledger.at
            before = kept.get("offset")
            if kept.get("boot") == boot_id() and isinstance(before, int | float):
                jumped = self._offset - before if abs(self._offset - before) >= JUMP_SECONDS else 0.0
            away = max(0.0, self._clock.wall() - jumped - seen)
            text = f"podwatch observes the run again, after {span(away)} without"
        self._bus.before = self._check_clock
        self._bus.listeners.append(self._on_event)
        self._bus.say(EventName.WATCH_STARTED, text, seen=seen, jumped=round(jumped, 3), step=self.ledger.position)

    def look(self, view: DaemonView) -> None:
        """Take the view of now into account, and keep the ledger. Never blocks."""
        self._check_clock()
        newest = view.snapshot.newest_step
        step = newest.step if newest is not None and self._counted else None
        age = 0.0 if newest is None else max(0.0, view.now - newest.at)
        shown = SHOWN.get(view.judgement().state)
        self.ledger = look(self.ledger, self._clock.wall(), step=step, step_age=age, shown=shown)
        self._keep()

    def account(self, *, target: int | None, price: Price) -> Account | None:
        return account(self.ledger, self._clock.wall(), target=target, price=price)

    def _on_event(self, event: Event) -> None:
        before = self.ledger
        self.ledger = advance(before, event)
        if (before.use, before.start_id, before.incident) != (
            self.ledger.use,
            self.ledger.start_id,
            self.ledger.incident,
        ):
            self._keep()

    def _check_clock(self) -> None:
        """Record it if the wall clock was set since the last event."""
        offset = self._clock.wall() - self._clock.boottime()
        jumped, self._offset = offset - self._offset, offset
        if abs(jumped) >= JUMP_SECONDS:
            way = "forward" if jumped > 0 else "back"
            self._bus.say(
                EventName.CLOCK_CHANGED,
                f"the wall clock was set {way} by {span(abs(jumped))}",
                seconds=round(jumped, 3),
            )

    def _keep(self) -> None:
        data = {"ledger": to_dict(self.ledger), "boot": boot_id(), "offset": self._offset}
        self._journal.post(partial(_learn, data=data))


def _learn(journal: Journal, data: dict[str, Any]) -> None:
    """In the journal's thread, after all events that the ledger contains."""
    newest = journal.events(limit=1)
    last = {"upto": newest[-1].id, "upto_wall": newest[-1].wall} if newest else {}
    journal.learn(LEDGER_KEY, data | last)


def _catch_up(journal: Journal, ledger: Ledger, kept: Mapping[str, Any]) -> Ledger:
    """The ledger with the events that were recorded after it was kept. In the journal's thread."""
    upto = kept.get("upto")
    if not isinstance(upto, int) or upto < 2:
        return ledger
    same = journal.events(after_id=upto - 1, limit=1)
    if not same or same[0].id != upto or same[0].wall != kept.get("upto_wall"):
        return ledger  # the database was replaced
    while events := journal.events(after_id=upto, limit=CHUNK):
        ledger = fold(events, ledger)
        upto = events[-1].id
    return ledger
