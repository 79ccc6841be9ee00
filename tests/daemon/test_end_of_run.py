"""The end of a run as the daemon decides it: how long a job stands by, and what is stored before it ends."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from podwatch.daemon.end_of_run import EndOfRun
from podwatch.daemon.shutdown import Exit
from podwatch.daemon.variables_of_own_processes import JOB_PROCESS, UNDER_INIT
from podwatch.domain.snapshot import Desired
from podwatch.journal import AsyncJournal, Journal
from podwatch.policy.exit_code import Blame, Outcome, Situation, ended
from podwatch.policy.who_holds_the_run import Decision, LeaseAction
from podwatch.recovery.state import Phase
from tests.support.clock import AutoClock

STANDBY = 900.0
HOLD = Decision(LeaseAction.HOLD, publish=True)
WATCH = Decision(LeaseAction.WATCH, "pod-2 holds this run and is alive")
SETTLE = Decision(LeaseAction.SETTLE, "podwatch claimed this run for this pod")
ASK = Decision(LeaseAction.ASK, "the store does not answer")


@dataclass
class Daemon:
    """What the end of a run looks at. ``said``: (event, text)."""

    journal: AsyncJournal
    clock: AutoClock = field(default_factory=AutoClock)
    standing: Decision = HOLD
    phase: Phase = Phase.RUNNING
    desired: Desired = Desired.RUNNING
    said: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        context = SimpleNamespace(tools=self, blame=Blame.UNKNOWN)
        state = SimpleNamespace(phase=self.phase, detail="the reason")
        self.recovery = SimpleNamespace(
            handle=None, context=context, state=state, desired=self.desired, runner=SimpleNamespace(ready=True)
        )
        recovery = SimpleNamespace(standby=STANDBY, on_finished="stay", on_give_up="stay", final_sync=7200.0)
        self.settings = SimpleNamespace(
            recovery=recovery, gpu=SimpleNamespace(poll=2.0), sync=SimpleNamespace(store="b2://bucket")
        )
        self.run = SimpleNamespace(clock=self.clock, journal=self.journal)
        self.exit = Exit()
        self.bus = SimpleNamespace(say=lambda event, text, *_, **_facts: self.said.append((str(event), text)))
        self.gang = None

    def ending(self, final: Any = None) -> EndOfRun:
        return EndOfRun(cast(Any, self), cast(Any, self), final)

    def over(self, ending: EndOfRun) -> Outcome | None:
        end = ended(ending.situation(), STANDBY)
        return None if end is None else end.outcome


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[AsyncJournal]:
    made = AsyncJournal(Journal.open(tmp_path / "journal.sqlite"))
    yield made
    await made.close()


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNDER_INIT, "job")
    monkeypatch.setenv(JOB_PROCESS, "boot:1:100:5")


async def test_a_job_that_another_pod_keeps_from_training_ends_after_the_standby_not_earlier(
    journal: AsyncJournal,
) -> None:
    daemon = Daemon(journal, standing=WATCH, phase=Phase.BLOCKED)
    ending = daemon.ending()
    assert daemon.over(ending) is None
    daemon.clock.advance(STANDBY - 1)
    assert daemon.over(ending) is None
    daemon.clock.advance(1)
    assert daemon.over(ending) is Outcome.HELD


async def test_the_standby_counts_over_restarts_of_the_daemon_but_not_over_attempts(
    journal: AsyncJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Daemon(journal, standing=WATCH, phase=Phase.BLOCKED)
    daemon.ending().situation()
    daemon.clock.advance(STANDBY / 2)
    second = daemon.ending()
    await second.recall()
    assert second.situation().waited == STANDBY / 2
    daemon.clock.advance(STANDBY / 2)
    third = daemon.ending()
    await third.recall()
    assert daemon.over(third) is Outcome.HELD
    monkeypatch.setenv(JOB_PROCESS, "boot:1:200:7")
    next_attempt = daemon.ending()
    await next_attempt.recall()
    assert next_attempt.situation().waited == 0.0


async def test_a_standby_that_ended_is_not_continued_by_the_next_daemon(journal: AsyncJournal) -> None:
    daemon = Daemon(journal, standing=WATCH, phase=Phase.BLOCKED)
    ending = daemon.ending()
    ending.situation()
    daemon.clock.advance(500)
    daemon.standing, daemon.recovery.state.phase = HOLD, Phase.RUNNING
    assert ending.situation() == Situation(why="the reason")
    daemon.standing = WATCH
    again = daemon.ending()
    await again.recall()
    assert again.situation().waited == 0.0


async def test_a_job_does_not_end_while_its_own_claim_is_decided(journal: AsyncJournal) -> None:
    """The other pod ended in the last minutes of the standby: this one is about to train."""
    daemon = Daemon(journal, standing=WATCH, phase=Phase.BLOCKED)
    ending = daemon.ending()
    ending.situation()
    daemon.clock.advance(STANDBY - 10)
    daemon.standing = SETTLE
    assert daemon.over(ending) is None
    daemon.clock.advance(100)
    assert daemon.over(ending) is None
    daemon.standing = WATCH
    assert daemon.over(ending) is Outcome.HELD, "another claim won: the standby is over"


async def test_a_store_that_does_not_say_who_holds_the_run_is_not_another_pod(journal: AsyncJournal) -> None:
    daemon = Daemon(journal, standing=ASK, phase=Phase.BLOCKED)
    ending = daemon.ending()
    assert (ending.situation().held, ending.situation().unanswered) == (False, True)
    daemon.clock.advance(STANDBY - 1)
    assert daemon.over(ending) is None
    daemon.clock.advance(1)
    end = ended(ending.situation(), STANDBY)
    assert end is not None
    assert (end.outcome, end.reason) == (Outcome.BLOCKED, ASK.why_not)
    assert end.lease_unknown
    daemon.standing = WATCH
    assert daemon.over(ending) is Outcome.HELD, "the time counts on when the store answers"


async def test_watch_ends_the_job_with_86(journal: AsyncJournal) -> None:
    daemon = Daemon(journal, standing=WATCH, phase=Phase.BLOCKED)
    began = daemon.clock.monotonic()
    await asyncio.wait_for(daemon.ending().watch(), 60)
    assert daemon.exit.first == 86
    assert STANDBY <= daemon.clock.monotonic() - began < STANDBY + 10
    assert [event for event, _ in daemon.said] == ["run-ended"]
    assert "pod-2 holds this run and is alive" in daemon.said[0][1]
