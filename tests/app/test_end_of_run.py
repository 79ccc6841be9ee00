"""The end of a run as the daemon decides it: how long a job stands by, and what is stored before it ends."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from podwatch.app.backup.upload_queue import Unstored
from podwatch.app.end_of_run import EndOfRun, FinalState, FinalSync
from podwatch.app.shutdown import Exit
from podwatch.app.variables_of_own_processes import JOB_PROCESS, UNDER_INIT
from podwatch.domain.facts import StoreFacts
from podwatch.domain.lease import Decision, LeaseAction
from podwatch.domain.snapshot import Desired
from podwatch.job.exit_code import Blame, JobEnd, Outcome, Situation, ended
from podwatch.journal import AsyncJournal, Journal
from podwatch.recovery.state import Phase
from tests.support.clock import AutoClock

pytestmark = pytest.mark.slow

STANDBY = 900.0
HOLD = Decision(LeaseAction.HOLD, publish=True)
WATCH = Decision(LeaseAction.WATCH, "pod-2 holds this run and is alive")
SETTLE = Decision(LeaseAction.SETTLE, "podwatch claimed this run for this pod")
SUPERSEDED = Decision(LeaseAction.SUPERSEDED, "pod-2 has taken this run over", stop=True)
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
        self.recovery = SimpleNamespace(handle=None, context=context, state=state, desired=self.desired, settled=True)
        recovery = SimpleNamespace(standby=STANDBY, on_finished="stay", on_give_up="stay", final_sync=7200.0)
        self.settings = SimpleNamespace(
            recovery=recovery, gpu=SimpleNamespace(poll=2.0), sync=SimpleNamespace(store="b2://bucket")
        )
        self.run = SimpleNamespace(clock=self.clock, journal=self.journal)
        self.exit = Exit()
        self.bus = SimpleNamespace(say=lambda event, text, *_, **_facts: self.said.append((str(event), text)))
        self.gang: Any = None

    def ending(self, final: Any = None, verdicts: Any = None) -> EndOfRun:
        return EndOfRun(cast(Any, self), final, verdicts)

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


class Final:
    """A final sync that finds ``missing`` at each look, and that waits ``seconds``."""

    def __init__(self, daemon: Daemon, missing: tuple[str, ...] = (), seconds: float = 0.0) -> None:
        self.daemon, self.missing, self.seconds = daemon, missing, seconds
        self.runs: list[tuple[Outcome, bool]] = []
        self.left: tuple[str, ...] = ()

    async def run(self, outcome: Outcome, holds: Callable[[], bool], *, evidence: bool = True) -> FinalState | None:
        self.runs.append((outcome, evidence))
        self.left = self.missing
        end = self.daemon.clock.monotonic() + self.seconds
        while holds() and self.daemon.clock.monotonic() < end:
            await self.daemon.clock.sleep(1.0)
        return FinalState(self.missing) if holds() else None

    async def check(self) -> FinalState:
        return FinalState(self.missing)


async def until(check: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not check():
            await asyncio.sleep(0.001)


async def ends(daemon: Daemon, final: Final) -> EndOfRun:
    ending = daemon.ending(final)
    await asyncio.wait_for(ending.watch(), 60)
    return ending


ENDS = {
    "stopped": (Phase.STOPPED, Desired.STOPPED, 65),
    "gave-up": (Phase.GAVE_UP, Desired.RUNNING, 86),
    "blocked": (Phase.BLOCKED, Desired.RUNNING, 65),
}


@pytest.mark.parametrize("name", ENDS)
async def test_every_end_of_a_job_that_leaves_time_is_stored_first_and_keeps_its_code(
    journal: AsyncJournal, name: str
) -> None:
    phase, desired, code = ENDS[name]
    daemon = Daemon(journal, phase=phase, desired=desired)
    final = Final(daemon, ("the checkpoint of step 40",))
    await ends(daemon, final)
    assert [str(outcome) for outcome, _ in final.runs] == [name]
    assert daemon.exit.first == code
    verdict = daemon.exit.verdict
    assert verdict is not None
    assert (str(verdict.outcome), int(verdict.code)) == (name, code)
    assert "Not in the store: the checkpoint of step 40" in verdict.sentence
    stored = Daemon(journal, phase=phase, desired=desired)
    await ends(stored, Final(stored))
    assert stored.exit.verdict is not None
    assert "store" not in stored.exit.verdict.sentence
    assert stored.exit.first == code


class Verdicts:
    """What the store is told of this attempt, and how often the final sync had run then."""

    def __init__(self, final: "Final") -> None:
        self.final, self.told = final, list[tuple[str, str, int]]()

    async def foretell(self, end: JobEnd) -> None:
        self.told.append(("foretold", str(end.outcome), len(self.final.runs)))

    async def keep(self, end: JobEnd) -> JobEnd:
        self.told.append(("kept", str(end.outcome), len(self.final.runs)))
        return end


@pytest.mark.parametrize("name", [*ENDS, "finished"])
async def test_the_store_knows_the_end_before_the_final_sync_unless_the_run_is_finished(
    journal: AsyncJournal, name: str
) -> None:
    """A finished run whose machine dies meanwhile is run again, so that its last steps are stored."""
    phase, desired, _ = ENDS.get(name, (Phase.FINISHED, Desired.FINISHED, 0))
    daemon = Daemon(journal, phase=phase, desired=desired)
    final = Final(daemon)
    verdicts = Verdicts(final)
    await asyncio.wait_for(daemon.ending(final, verdicts).watch(), 60)
    assert verdicts.told == [*([("foretold", name, 0)] if name != "finished" else []), ("kept", name, 1)]


@pytest.mark.parametrize("standing", [WATCH, SUPERSEDED, ASK], ids=lambda s: s.act)
async def test_a_pod_that_must_not_publish_ends_without_a_final_sync(journal: AsyncJournal, standing: Decision) -> None:
    daemon = Daemon(journal, standing=standing, phase=Phase.BLOCKED)
    final = Final(daemon)
    await ends(daemon, final)
    assert (final.runs, daemon.exit.first) == ([], 86)
    ordered = Daemon(journal, standing=replace(standing, ordered=True))
    final = Final(ordered)
    if standing.act is not LeaseAction.SUPERSEDED and standing is not ASK:
        await ends(ordered, final)
        assert (final.runs, ordered.exit.first) == ([], 65)


async def test_a_start_during_the_final_sync_withdraws_the_end(journal: AsyncJournal) -> None:
    daemon = Daemon(journal, phase=Phase.STOPPED, desired=Desired.STOPPED)
    watching = asyncio.create_task(daemon.ending(Final(daemon, seconds=7200.0)).watch())
    await asyncio.sleep(0.05)
    daemon.recovery.desired, daemon.recovery.state.phase = Desired.RUNNING, Phase.RUNNING
    await asyncio.sleep(0.05)
    assert not watching.done()
    assert (daemon.exit.first, daemon.said) == (None, [])
    watching.cancel()


@pytest.mark.parametrize(("name", "code"), [("stopped", 65), ("gave-up", 86), ("blocked", 65), ("finished", 86)])
async def test_a_signal_during_the_final_sync_leaves_the_end_as_it_was_decided(
    journal: AsyncJournal, name: str, code: int
) -> None:
    """An engine must not run a job again that an operator stopped. A finished run that is not stored is run again."""
    phase, desired, _ = ENDS.get(name, (Phase.FINISHED, Desired.FINISHED, 0))
    daemon = Daemon(journal, phase=phase, desired=desired)
    final = Final(daemon, ("the checkpoint of step 40",), seconds=1e9)
    ending = daemon.ending(final)
    watching = asyncio.create_task(ending.watch())
    await until(lambda: final.runs)
    daemon.exit.leave(0)
    daemon.exit.preempted = "the engine ended the job"
    await ending.leaving()
    watching.cancel()
    assert daemon.exit.code == code
    assert daemon.exit.verdict is not None
    assert str(daemon.exit.verdict.outcome) == ("preempted" if name == "finished" else name)
    if name != "finished":
        assert "Not in the store: the checkpoint of step 40" in daemon.exit.verdict.sentence


class Nodes:
    """Of a run on several nodes; they have agreed on ``over`` once this one asked."""

    def __init__(self, order: list[str], agreed: JobEnd | None = None) -> None:
        self.order, self.agreed, self.over = order, agreed, cast("JobEnd | None", None)

    async def agree(self, end: JobEnd, *, storing: float = 0.0) -> JobEnd:
        self.order.append(f"agree {storing:.0f}")
        self.over = self.agreed or JobEnd(end.outcome, end.reason, end.blame)
        return self.over


async def test_several_nodes_agree_before_node_0_stores_and_after_it_if_the_run_is_finished(
    journal: AsyncJournal,
) -> None:
    daemon = Daemon(journal, phase=Phase.STOPPED, desired=Desired.STOPPED)
    final = Final(daemon, ("the checkpoint of step 40",))
    order: list[str] = []
    daemon.gang = Nodes(order)
    await ends(daemon, final)
    assert (order, [str(o) for o, _ in final.runs], daemon.exit.first) == (["agree 7200"], ["stopped"], 65)
    finished = Daemon(journal, phase=Phase.FINISHED, desired=Desired.FINISHED)
    order = []
    finished.gang = Nodes(order)
    await ends(finished, Final(finished, ("the checkpoint of step 40",)))
    assert (order, finished.exit.first) == (["agree 0"], 69), "what node 0 could not store is not forgotten"


async def test_a_plain_pod_that_stays_says_at_once_how_the_run_ended(
    journal: AsyncJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(UNDER_INIT)
    daemon = Daemon(journal, phase=Phase.GAVE_UP)
    final = Final(daemon)
    watching = asyncio.create_task(daemon.ending(final).watch())
    await until(lambda: daemon.said)
    watching.cancel()
    assert (final.runs, daemon.exit.first) == ([], None)
    leaves = Daemon(journal, phase=Phase.GAVE_UP)
    leaves.settings.recovery.on_give_up = "exit"
    final = Final(leaves)
    await ends(leaves, final)
    assert (final.runs, leaves.exit.first) == ([(Outcome.GAVE_UP, False)], 86)


async def test_a_plain_pod_that_stays_corrects_what_it_said_once_the_rest_is_stored(
    journal: AsyncJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(UNDER_INIT)
    daemon = Daemon(journal, phase=Phase.FINISHED, desired=Desired.FINISHED)
    final = Final(daemon, ("the checkpoint of step 40",))
    watching = asyncio.create_task(daemon.ending(final).watch())
    await until(lambda: daemon.exit.verdict)
    final.missing = ()
    await until(lambda: daemon.exit.verdict is not None and daemon.exit.verdict.code == 0)
    watching.cancel()
    assert [event for event, _ in daemon.said] == ["run-ended"] * 2
    assert "step 40" in daemon.said[0][1]
    assert (len(final.runs), daemon.exit.first) == (1, None)


class Pod:
    """Ends this machine after every outcome; ``stored`` is what its command is told."""

    def __init__(self) -> None:
        self.stored: list[bool] = []

    def wants(self, _outcome: Outcome) -> bool:
        return True

    async def end_pod(self, _outcome: Outcome, *, stored: bool, recheck: object) -> None:
        self.stored.append(stored)


@pytest.mark.parametrize("standing", [HOLD, WATCH], ids=lambda s: s.act)
@pytest.mark.parametrize("missing", [(), ("the checkpoint of step 40",)], ids=["all-stored", "one-missing"])
async def test_a_machine_with_something_that_is_not_stored_is_never_ended_as_stored(
    journal: AsyncJournal, monkeypatch: pytest.MonkeyPatch, standing: Decision, missing: tuple[str, ...]
) -> None:
    """Also where podwatch must not publish, so that there is no final sync whose result would say so."""
    monkeypatch.delenv(UNDER_INIT)
    daemon = Daemon(journal, phase=Phase.GAVE_UP, standing=standing)
    final, pod = Final(daemon, missing), Pod()
    ending = EndOfRun(cast(Any, daemon), cast(Any, final), pod=cast(Any, pod))
    watching = asyncio.create_task(ending.watch())
    await until(lambda: pod.stored)
    watching.cancel()
    assert pod.stored == [not missing]
    assert len(final.runs) == (standing is HOLD)


async def test_what_was_stored_at_an_end_that_was_withdrawn_says_nothing_about_the_next_end(
    journal: AsyncJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gave up with all of it stored, started again by an operator, then another pod takes the run over."""
    monkeypatch.delenv(UNDER_INIT)
    daemon = Daemon(journal, phase=Phase.GAVE_UP)
    final, pod = Final(daemon), Pod()
    ending = EndOfRun(cast(Any, daemon), cast(Any, final), pod=cast(Any, pod))
    watching = asyncio.create_task(ending.watch())
    await until(lambda: pod.stored)
    daemon.recovery.state.phase = Phase.RUNNING
    await until(lambda: daemon.exit.verdict is None)
    final.missing = ("the checkpoint of step 60",)
    daemon.standing = SUPERSEDED
    await until(lambda: len(pod.stored) == 2)
    watching.cancel()
    assert pod.stored == [True, False]


async def test_a_best_checkpoint_that_the_evaluation_at_the_end_pins_is_stored_too(journal: AsyncJournal) -> None:
    daemon = Daemon(journal, phase=Phase.FINISHED, desired=Desired.FINISHED)
    final = Final(daemon)

    class Evaluations:
        async def owed(self) -> str:
            if not final.left and len(final.runs) == 1:
                final.missing = ("the pinned checkpoint of step 20",)
            return ""

    ending = EndOfRun(cast(Any, daemon), cast(Any, final), evaluations=cast(Any, Evaluations()))
    await asyncio.wait_for(ending.watch(), 60)
    assert [outcome for outcome, _ in final.runs] == [Outcome.FINISHED] * 2
    assert daemon.exit.first == 69, "the second final sync did not store it either"


@pytest.mark.parametrize("of", ["what was before", "the end"])
async def test_a_signal_while_the_hooks_run_ends_with_the_code_that_is_decided(journal: AsyncJournal, of: str) -> None:
    """Not with 0, as if all was stored, and not with 86: the run is finished."""
    daemon = Daemon(journal, phase=Phase.FINISHED, desired=Desired.FINISHED)
    final = Final(daemon, ("the checkpoint of step 40",))

    class Hooks:
        async def owed(self) -> str:
            reported = any(event == "run-ended" for event, _ in daemon.said)
            return "the hook note" if of == "what was before" or reported else ""

    ending = EndOfRun(cast(Any, daemon), cast(Any, final), hooks=cast(Any, Hooks()))
    watching = asyncio.create_task(ending.watch())
    await until(lambda: daemon.exit.waits_for)
    assert "the hook note" in daemon.exit.waits_for
    assert any(event == "run-ended" for event, _ in daemon.said) == (of == "the end")
    daemon.exit.leave(0)
    watching.cancel()
    await ending.leaving()
    assert daemon.exit.code == 69


async def test_watch_ends_the_job_with_86(journal: AsyncJournal) -> None:
    daemon = Daemon(journal, standing=WATCH, phase=Phase.BLOCKED)
    began = daemon.clock.monotonic()
    await asyncio.wait_for(daemon.ending().watch(), 60)
    assert daemon.exit.first == 86
    assert STANDBY <= daemon.clock.monotonic() - began < STANDBY + 10
    assert [event for event, _ in daemon.said] == ["run-ended"]
    assert "pod-2 holds this run and is alive" in daemon.said[0][1]


class Store:
    """A syncer that has not stored step 40; from ``taken_at`` (monotonic second) on another pod holds the run."""

    def __init__(self, daemon: Daemon, taken_at: float) -> None:
        self.daemon, self.taken_at = daemon, taken_at

    def run_ended(self) -> None: ...

    def status(self) -> StoreFacts:
        return StoreFacts()

    async def unstored(self) -> Unstored:
        return Unstored(("the checkpoint of step 40",), ("the pinned checkpoint of step 20 (held back)",))

    def why_not_ours(self) -> str:
        return "pod-2 holds this run" if self.daemon.clock.monotonic() >= self.taken_at else ""


def final_sync(daemon: Daemon, store: Store) -> FinalSync:
    async def look(**_: bool) -> tuple[()]:
        return ()

    parts = cast(Any, daemon)
    parts.store, parts.backup = SimpleNamespace(elsewhere=False), store
    parts.checkpoints = SimpleNamespace(rescans=SimpleNamespace(rescan=look))
    return FinalSync(parts, None)


async def test_a_disk_that_hangs_does_not_hold_the_end(journal: AsyncJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podwatch.app.end_of_run.ANSWER_SECONDS", 0.01)
    daemon = Daemon(journal)
    daemon.settings.recovery.final_sync = 3.0
    store = Store(daemon, 1e9)
    monkeypatch.setattr(store, "unstored", asyncio.Event().wait)
    final = final_sync(daemon, store)
    stored = await asyncio.wait_for(final.run(Outcome.FINISHED, lambda: True), 30)
    assert stored is not None
    assert "hangs" in stored.unstored[0]
    assert "hangs" in (await asyncio.wait_for(final.check(), 30)).unstored[0], "[end_pod] keeps the disk"


async def test_what_another_pod_keeps_from_being_stored_is_not_waited_for(journal: AsyncJournal) -> None:
    daemon = Daemon(journal)
    daemon.settings.recovery.final_sync = 100.0
    began = daemon.clock.monotonic()
    final = final_sync(daemon, Store(daemon, began + 40))
    stored = await final.run(Outcome.FINISHED, lambda: True)
    assert stored is not None
    unstored = ("the checkpoint of step 40 (pod-2 holds this run)", "the pinned checkpoint of step 20 (held back)")
    assert stored.unstored == final.left == unstored
    assert 40 <= daemon.clock.monotonic() - began < 50
