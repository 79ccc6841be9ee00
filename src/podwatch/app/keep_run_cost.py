"""Keeps in the journal what the run's costs (report/run_cost.py) need besides incidents, and adds those of earlier
pods."""

from dataclasses import replace
from typing import Final

from podwatch.app.event_bus import EventBus
from podwatch.domain.account_document import AccountTotals
from podwatch.domain.event import Event, EventName, Incident
from podwatch.domain.finding import FindingKind
from podwatch.domain.status_document import TrainingState
from podwatch.journal import AsyncJournal, Journal
from podwatch.report.daemon_view import DaemonView
from podwatch.report.overall_status import judge
from podwatch.report.run_cost import (
    COST_KEY,
    Account,
    Price,
    Spent,
    Steps,
    account,
    measured,
    step_seconds,
    totals_of,
)
from podwatch.system.clock import Clock
from podwatch.system.procfs import boot_id

INCIDENTS_COUNTED: Final = 1000
KEEP_SECONDS: Final = 60.0
"""Interval of ``count``."""
_DOWN: Final = (TrainingState.DOWN, TrainingState.GAVE_UP, TrainingState.BLOCKED)


class Accountant:
    """Sees every event. ``counted``: the layout's checkpoint numbers are steps."""

    def __init__(self, journal: AsyncJournal, clock: Clock, bus: EventBus, *, counted: bool) -> None:
        self._journal, self._clock, self._bus, self._counted = journal, clock, bus, counted
        self._spent = Spent(clock.wall())
        self._at = clock.boottime()
        self._incidents: dict[int, Incident] = {}
        self._window: Steps = ()
        self._finished = False

    async def load(self) -> None:
        """Continue what an earlier podwatch has kept. The time between counts if the machine ran through it."""
        kept = await self._journal.run(Journal.learned, COST_KEY)
        kept = kept if isinstance(kept, dict) else {}
        if (spent := Spent.kept(kept.get("spent"))) is not None:
            self._spent = spent
            if kept.get("boot") == boot_id():
                self._at = min(float(kept.get("boottime") or self._at), self._at)
        found = await self._journal.run(Journal.incidents, INCIDENTS_COUNTED)
        self._incidents = {one.id: one for one in found}
        self._bus.listeners.append(self._on_event)

    def count(self, view: DaemonView) -> None:
        """Take the view of now into account, and keep the result. Never blocks."""
        state, newest = judge(view).state, view.facts.pod.newest_step
        save_gap = view.learned.median_save_gap_seconds
        self._finished = state is TrainingState.FINISHED
        if state is not TrainingState.RUNNING or newest is None or newest.step is None or not self._counted:
            self._window = ()
        else:
            self._window = measured(self._window, newest.step, newest.at, save_gap)
        passed, now = self._passed(), self._clock.boottime()
        healing = any(one.closed_wall is None for one in self._incidents.values())
        self._spent = replace(
            self._spent,
            seconds=self._spent.seconds + passed,
            down=self._spent.down + (passed if state in _DOWN and not healing else 0.0),
            step_seconds=step_seconds(self._window, save_gap) or self._spent.step_seconds,
        )
        self._at = now
        self._keep()

    def take_over(self, account: AccountTotals | None, claim: int) -> None:
        """Continue the account in the last heartbeat of another pod (None: there is none); it contains what this pod
        had left before. Once for each ``claim`` (its generation) with which this pod holds the run: what another pod
        writes later does not replace what this pod has counted since."""
        if claim <= self._spent.claim:
            return
        self._spent = replace(self._spent, claim=claim)
        if (earlier := totals_of(account)) is not None:
            closed = (one.id for one in self._incidents.values() if one.closed_wall is not None)
            self._spent = Spent(
                self._clock.wall(),
                step_seconds=self._spent.step_seconds,
                earlier=earlier,
                after=max(closed, default=0),
                unconfirmed=self._spent.unconfirmed,
                claim=claim,
            )
            self._at = self._clock.boottime()
        self._keep()

    def account(
        self, price: Price, median: float | None = None, *, target: int | None = None, step: int | None = None
    ) -> Account:
        """``median``: the learned time of a step; ``step``: the newest."""
        spent = replace(self._spent, seconds=self._spent.seconds + self._passed())
        return account(
            spent,
            self._incidents.values(),
            self._clock.wall(),
            price=price,
            median=median if self._counted else None,
            left=None if target is None or step is None or not self._counted else target - step,
        )

    def _passed(self) -> float:
        return 0.0 if self._finished else max(0.0, self._clock.boottime() - self._at)

    def _on_event(self, event: Event) -> None:
        """The journal gets the same, later."""
        if event.name in (EventName.INCIDENT_OPENED, EventName.TRAINER_STARTING):
            self._window = ()
        if event.name is EventName.FINDING_RAISED and event.fields.get("finding") == FindingKind.RESUME_UNCONFIRMED:
            still = {str(one.id): event.wall for one in self._incidents.values() if one.closed_wall is None}
            self._spent = replace(self._spent, unconfirmed={**still, **self._spent.unconfirmed})
        fields, number = event.fields, event.fields.get("incident")
        if not isinstance(number, int):
            return
        if event.name is EventName.INCIDENT_OPENED:
            kind, began, steps = fields.get("kind", "start-failed"), fields.get("began"), fields.get("lost_steps")
            self._incidents[number] = Incident(
                number,
                str(kind),
                float(began) if isinstance(began, int | float) else event.wall,
                "",
                lost_steps=steps if isinstance(steps, int) else None,
            )
        elif event.name is EventName.INCIDENT_CLOSED and number in self._incidents:
            resumed, steps = fields.get("resumed_step"), fields.get("lost_steps")
            one = self._incidents[number]
            self._incidents[number] = replace(
                one,
                closed_wall=event.wall if one.closed_wall is None else one.closed_wall,
                resumed_step=resumed if isinstance(resumed, int) else one.resumed_step,
                lost_steps=steps if isinstance(steps, int) else one.lost_steps,
            )

    def _keep(self) -> None:
        data = {"spent": self._spent.to_json(), "boot": boot_id(), "boottime": self._at}
        self._journal.post(Journal.learn, COST_KEY, data)
