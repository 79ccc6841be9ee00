"""A step that podwatch reads late, when the failure of its start is already counted."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from podwatch.checkpoints.second_writer import ALONE
from podwatch.config.settings import GpuSettings, RecoverySettings
from podwatch.domain.finding import FindingKind
from podwatch.domain.run_state import RestartHistory, RunState
from podwatch.recovery.context import Notes
from podwatch.recovery.follow_attempt import AttemptFollower
from podwatch.recovery.state import Phase
from tests.support.clock import ManualClock


@pytest.mark.parametrize(("counted", "gave_up"), [("start-1", True), ("start-0", False), ("", False)])
def test_a_step_of_a_start_that_was_counted_as_failed_takes_nothing_back(counted: str, gave_up: bool) -> None:
    """Else a job with a machine fault waits for an hour instead of ending."""
    clock = ManualClock()
    context = SimpleNamespace(
        attempt=SimpleNamespace(start_id="start-1", see=lambda *_: True),
        run=RunState("r1", history=RestartHistory(gave_up_at=990.0)),
        notes=Notes(clock), phase=Phase.GAVE_UP, unconfirmed=False, is_counted=lambda start_id: start_id == counted,
    )  # fmt: skip

    def note(change: Callable[[RunState], RunState]) -> None:
        context.run = change(context.run)

    settings = SimpleNamespace(gpu=GpuSettings(), recovery=RecoverySettings())
    file = SimpleNamespace(note=note, record_soon=lambda: None)
    context.tools = SimpleNamespace(clock=clock, settings=settings, run_file=file)
    snapshot = SimpleNamespace(trainer=SimpleNamespace(value=None), at=1000.0)
    AttemptFollower(cast(Any, context)).watch(cast(Any, snapshot), ALONE)
    assert context.run.history.gave_up is gave_up
    assert [f.kind for f in context.notes.all if f.kind is FindingKind.GAVE_UP] == []
