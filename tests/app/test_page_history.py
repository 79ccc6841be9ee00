"""What the daemon writes for the page's plots: a moment a minute, each change at its time, and no harm from a disk."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podwatch.app.page_history import History, moment_of
from podwatch.domain.event import Event, EventName
from podwatch.domain.snapshot import TrainingMetrics, observed
from podwatch.recording.last_day import last_day
from podwatch.system.blocking_calls import Worker
from tests.report import views
from tests.report.views import GB, GIB, NOW, WALL


@pytest.fixture
def rig(tmp_path: Path) -> Any:
    disk = Worker("test")
    bus = SimpleNamespace(listeners=[])
    path = tmp_path / "history.jsonl"
    yield SimpleNamespace(path=path, bus=bus, history=History(path, disk, bus))  # type: ignore[arg-type]
    disk.close()


def happens(rig: Any, name: EventName, second: float, **fields: str) -> None:
    for listener in rig.bus.listeners:
        listener(Event(name, WALL + second, "it happened", fields=fields))


def test_a_moment_has_what_is_known() -> None:
    view = views.healthy()
    figures = TrainingMetrics(85, NOW, (("reward", 0.5), ("kl", 0.1)))
    moment = moment_of(views.changed(view, snapshot=replace(view.facts.pod, training=observed((figures,), NOW))))
    assert moment.gpus == ((0, 71 * GIB, 80 * GIB), (1, 64 * GIB, 80 * GIB))
    assert (moment.disk, moment.next_save) == ((140 * GB, 250 * GB), 52 * GB)
    assert (moment.step, moment.step_at, moment.reward, moment.loss) == (85, WALL - 18, 0.5, None)


async def test_changes_between_two_looks_are_kept_at_their_time(rig: Any) -> None:
    await rig.history.record(views.healthy())
    happens(rig, EventName.INCIDENT_OPENED, 10, incident="1")
    happens(rig, EventName.INCIDENT_OPENED, 11)  # a remark
    happens(rig, EventName.TRAINER_STARTING, 15, start_id="s")
    happens(rig, EventName.TRAINER_STARTING, 16)  # a remark
    happens(rig, EventName.TRAINER_CONFIRMED, 40, step="1")
    shown = await rig.history.last_day(WALL + 45)
    assert [(m.at - WALL, m.state, m.started) for m in shown] == [
        (0, "running", False), (10, "recovering", False), (15, "starting", True), (40, "running", False),
    ]  # fmt: skip
    await rig.history.record(replace(views.healthy(), now_wall=WALL + 60))
    assert [m.at - WALL for m in await rig.history.last_day(WALL + 61)] == [0, 10, 15, 40, 60]
    assert [m.at - WALL for m in last_day(rig.path, WALL + 61)] == [0, 10, 15, 40, 60]


async def test_a_disk_that_refuses_loses_nothing_that_it_takes_later(rig: Any) -> None:
    rig.path.mkdir()
    await rig.history.record(views.healthy())
    assert [m.at for m in await rig.history.last_day(WALL)] == [WALL]
    rig.path.rmdir()
    await rig.history.record(replace(views.healthy(), now_wall=WALL + 60))
    assert [m.at - WALL for m in last_day(rig.path, WALL + 60)] == [0, 60]
