"""Writes the last day of the run for the page's plots (recording/last_day.py): once a minute, and what changed
between."""

from functools import partial
from pathlib import Path
from typing import Final

from podwatch.app.event_bus import EventBus
from podwatch.domain.event import Event, EventName
from podwatch.domain.status_document import TrainingState
from podwatch.recording.last_day import DAY, Moment, append, last_day
from podwatch.report.daemon_view import DaemonView
from podwatch.report.overall_status import judge
from podwatch.system.blocking_calls import Worker

DEADLINE_SECONDS: Final = 5.0
MOST_WAITING: Final = 600
"""Changes kept for a disk that takes none: more than a day of restarts."""


_CHANGES: Final = {
    EventName.INCIDENT_OPENED: ("incident", TrainingState.RECOVERING),
    EventName.TRAINER_STARTING: ("start_id", TrainingState.STARTING),
    EventName.TRAINER_CONFIRMED: ("step", TrainingState.RUNNING),
}
"""Event -> the field without which it is a remark, and what training does from then on."""


class History:
    def __init__(self, path: Path, disk: Worker, bus: EventBus) -> None:
        self._path, self._disk = path, disk
        self._waiting: list[Moment] = []
        bus.listeners.append(self._on_event)

    def _on_event(self, event: Event) -> None:
        field, state = _CHANGES.get(event.name, ("", TrainingState.UNKNOWN))
        if field and field in event.fields:
            started = event.name is EventName.TRAINER_STARTING
            self._waiting = [*self._waiting, Moment(event.wall, str(state), started)][-MOST_WAITING:]

    async def record(self, view: DaemonView) -> None:
        """Write the moment of ``view``. A disk that fails leaves a hole in the plots and nothing else."""
        self._waiting = [*self._waiting, moment_of(view)][-MOST_WAITING:]
        waiting = tuple(self._waiting)
        try:
            await self._disk.call(append, self._path, waiting, timeout=DEADLINE_SECONDS)
        except OSError:  # TimeoutError included
            return
        self._waiting = [moment for moment in self._waiting if moment not in waiting]

    async def last_day(self, now_wall: float) -> tuple[Moment, ...]:
        """With what is not written yet; raises nothing."""
        try:
            kept = await self._disk.call(partial(last_day, self._path, now_wall), timeout=DEADLINE_SECONDS)
        except OSError:
            kept = ()
        known = kept[-MOST_WAITING:]
        return (*kept, *(m for m in self._waiting if now_wall - DAY <= m.at <= now_wall and m not in known))


def moment_of(view: DaemonView) -> Moment:
    snapshot = view.facts.pod
    disk, newest = snapshot.disk.value, snapshot.newest_step
    training = snapshot.training.value
    figures = dict(training[-1].values) if training else {}
    return Moment(
        view.now_wall,
        str(judge(view).state),
        gpus=tuple(
            (gpu.index, gpu.memory_used_bytes, gpu.memory_total_bytes)
            for gpu in snapshot.gpus.value or ()
            if gpu.memory_used_bytes is not None and gpu.memory_total_bytes
        ),
        disk=None if disk is None else (disk.used_bytes, disk.capacity_bytes),
        next_save=view.next_save_bytes,
        step=None if newest is None else newest.step,
        step_at=None if newest is None else view.wall_of(newest.at),
        reward=figures.get("reward"),
        loss=figures.get("loss"),
    )
