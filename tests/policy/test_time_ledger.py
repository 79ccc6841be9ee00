"""Accounting against simulated runs whose truth is known: equal to the second, whatever happened to podwatch, to the
trainer and to the clock meanwhile.

The simulation knows nothing of the ledger: it writes down true seconds, and one list entry per trained step.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.domain.event import Event, EventName
from podwatch.journal import Journal
from podwatch.policy.cost_totals import account
from podwatch.policy.time_ledger import TOTALLED, Ledger, Loss, Use, advance, fold, from_dict, look, to_dict
from tests.support.examples import examples

WALL = 1_769_832_000.0
STEP = 10.0


@dataclass
class Simulated:
    """A run, second by second. ``t`` is true time; ``offset`` what the wall clock adds to it."""

    t: float = 0.0
    offset: float = WALL
    events: list[Event] = field(default_factory=list)
    used: Counter[Use] = field(default_factory=Counter)
    without: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    redone: Counter[str] = field(default_factory=Counter)
    trained: list[tuple[float, float]] = field(default_factory=list)
    """True times of training that no resume has taken back."""
    lost_training: float = 0.0
    position: int = 0
    lost_by: dict[int, str] = field(default_factory=dict)
    saved: dict[int, float] = field(default_factory=dict)
    late: list[tuple[float, int, float]] = field(default_factory=list)
    """Saves that are not reported yet: when podwatch will see that they are complete, the step, when it was saved."""
    watched: bool = True
    seen: float = 0.0
    starts: int = 0
    training: bool = False
    cause: str = ""
    incidents: int = 0
    ledger: Ledger = field(default_factory=Ledger)

    def say(self, name: EventName, **fields: object) -> None:
        event = Event(name, self.t + self.offset, "", fields=fields)  # type: ignore[arg-type]
        self.events.append(event)
        self.ledger = advance(self.ledger, event)

    def look(self) -> None:
        self.ledger = look(self.ledger, self.t + self.offset, step=self.position if self.training else None)
        self.seen = self.t

    def spend(self, use: Use, seconds: float) -> None:
        self.used[use] += seconds
        if use in (Use.RESTARTING, Use.DOWN):
            self.without[self.cause] += seconds
        end = self.t + seconds
        while self.watched and self.late and self.late[0][0] <= end:
            due, step, at = self.late.pop(0)
            self.t = max(self.t, due)
            self.say(EventName.CHECKPOINT_COMPLETE, step=step, changed_at=at + self.offset)
        self.t = end

    # -- what can happen ----------------------------------------------------------------------------------------------

    def train(self, steps: int, more: float) -> None:
        """``steps`` whole steps and a part of one."""
        began = self.t
        for _ in range(steps):
            self.spend(Use.TRAINING, STEP)
            self.position += 1
            if self.position in self.lost_by:
                self.redone[self.lost_by.pop(self.position)] += 1
        self.spend(Use.TRAINING, more)
        self.trained.append((began, self.t))
        if self.watched:
            self.look()

    def save(self, delay: float) -> None:
        self.saved[self.position] = self.t
        self.late = sorted([*(entry for entry in self.late if entry[1] != self.position)])
        self.late.append((max([self.t + delay, *(due for due, _, _ in self.late)]), self.position, self.t))

    def start(self, step: int | None, wait: float, load: float) -> None:
        self.cause = self.cause or "start"
        if self.cause == "start":
            self.failures["start"] += 1
        self.starts += 1
        known = self.t if step is None else self.saved.get(step, 0.0)
        gone = sum(max(0.0, end - max(begin, known if step is not None else 0.0)) for begin, end in self.trained)
        self.lost_training += gone
        cut = known if step is not None else 0.0
        self.trained = [(begin, min(end, cut)) for begin, end in self.trained if begin < cut]
        low = step or 0
        for number in range(low + 1, self.position + 1):
            self.lost[self.cause] += 1
            self.lost_by[number] = self.cause
        self.position = low
        self.saved = {number: at for number, at in self.saved.items() if number <= low}
        self.late = [entry for entry in self.late if entry[1] <= low]
        self.say(EventName.TRAINER_STARTING, start_id=f"s{self.starts}", step=step)
        self.spend(Use.RESTARTING, wait)
        self.say(EventName.TRAINER_STARTED, start_id=f"s{self.starts}", step=step)
        self.spend(Use.RESTARTING, load)
        self.say(EventName.TRAINER_CONFIRMED, step=self.position)
        self.training, self.cause = True, ""

    def again(self) -> int | None:
        """The newest save that podwatch knows."""
        known = {step for _, step, _ in self.late}
        return max((step for step in self.saved if step not in known), default=None)

    def fail(self, notice: float, stop: float, load: float, *, gave_up: float = 0.0) -> None:
        """The trainer ends; podwatch notices it ``notice`` seconds later, and restarts or gives up for a while."""
        began, self.cause, self.training = self.t, "silent-death", False
        self.failures[self.cause] += 1
        self.spend(Use.DOWN if gave_up else Use.RESTARTING, notice)
        self.incidents += 1
        self.say(
            EventName.INCIDENT_OPENED,
            incident=self.incidents,
            kind=self.cause,
            began=began + self.offset,
            gave_up=bool(gave_up),
        )
        self.say(EventName.TRAINER_STOPPING, start_id=f"s{self.starts}", step=self.position)
        self.spend(Use.DOWN if gave_up else Use.RESTARTING, stop + gave_up)
        self.start(self.again(), 1.0, load)

    def stop(self, seconds: float, load: float) -> None:
        self.training = False
        self.say(EventName.DESIRED_CHANGED, desired="stopped")
        self.say(EventName.TRAINER_STOPPING, start_id=f"s{self.starts}", step=self.position)
        self.spend(Use.STOPPED, seconds)
        self.say(EventName.DESIRED_CHANGED, desired="running")
        self.start(self.again(), 2.0, load)

    def restart(self, load: float) -> None:
        self.training, self.cause = False, "operator"
        self.failures["operator"] += 1
        self.say(EventName.TRAINER_STOPPING, start_id=f"s{self.starts}", step=self.position)
        self.spend(Use.RESTARTING, 3.0)
        self.start(self.again(), 1.0, load)

    def evaluate(self, seconds: float, held: float, load: float, *, killed: float = 0.0) -> None:
        """Training stops for an evaluation. ``held``: its memory is still held for so long after that. ``killed``:
        podwatch is killed in the middle, and back so much later."""
        self.training, self.cause = False, "evaluation"
        self.failures["evaluation"] += 1
        self.say(EventName.TRAINER_STOPPING, start_id=f"s{self.starts}", step=self.position, evaluation=True)
        self.spend(Use.EVALUATING, seconds)
        self.look()
        if killed:
            seen = self.leave(killed=1.0)
            self.spend(Use.UNKNOWN, killed)
            self.back(seen, 0.0)
        elif held:
            self.say(EventName.RECOVERY_BLOCKED)
            self.spend(Use.DOWN, held)
        self.start(self.again(), 1.0, load)

    def set_clock(self, seconds: float) -> None:
        self.offset += seconds
        self.say(EventName.CLOCK_CHANGED, seconds=seconds)

    # -- podwatch is away ---------------------------------------------------------------------------------------------

    def leave(self, *, killed: float) -> tuple[float, float]:
        """podwatch ends; ``killed``: that long after it last wrote anything. Returns when it wrote, and the offset."""
        if not killed:
            self.say(EventName.DAEMON_STOPPING)
            self.look()
        self.ledger = from_dict(json.loads(json.dumps(to_dict(self.ledger)))) or Ledger()
        self.watched = False
        return self.t, self.offset

    def back(self, seen: tuple[float, float], jumped: float) -> None:
        self.watched = True
        self.offset += jumped
        self.say(EventName.WATCH_STARTED, seen=sum(seen), jumped=jumped, step=self.ledger.position)
        newest = self.late[-1:]
        for _, step, at in newest:
            self.say(EventName.CHECKPOINT_COMPLETE, step=step, changed_at=at + self.offset)
        for _, step, _ in self.late[:-1]:
            del self.saved[step]  # only the newest of those saves is reported
        self.late = []

    def away_while_it_runs(self, killed: float, steps: int, jumped: float) -> None:
        seen = self.leave(killed=killed)
        self.train(steps, killed)
        self.back(seen, jumped)
        self.spend(Use.TRAINING, 4.0)
        self.trained.append((self.t - 4.0, self.t))
        self.say(EventName.TRAINER_ADOPTED, start_id=f"s{self.starts}", alive=True, ended_at=None)
        self.say(EventName.DAEMON_STARTED)
        self.look()

    def away_while_it_ends(self, killed: float, steps: int, dead: float, load: float) -> None:
        seen = self.leave(killed=killed)
        self.train(steps, killed)
        ended, self.training, self.cause = self.t, False, "unattended"
        self.spend(Use.DOWN, dead)
        self.back(seen, 0.0)
        self.say(EventName.TRAINER_ADOPTED, start_id=f"s{self.starts}", alive=False, ended_at=ended + self.offset)
        self.say(EventName.DAEMON_STARTED)
        self.cause = "trainer-exited"
        self.failures[self.cause] += 1
        self.incidents += 1
        self.say(
            EventName.INCIDENT_OPENED,
            incident=self.incidents,
            kind=self.cause,
            began=self.t + self.offset,
            gave_up=False,
        )
        self.say(EventName.TRAINER_STOPPING, start_id=f"s{self.starts}", step=self.position)
        self.spend(Use.RESTARTING, 2.0)
        self.start(self.again(), 1.0, load)

    def reboot(self, off: float, load: float) -> None:
        """Nothing is known of the time until the next podwatch, and of the steps and saves in it."""
        seen = self.leave(killed=0.0)
        self.training = False
        self.late = []
        self.saved = {step: at for step, at in self.saved.items() if step in self.ledger.saves}
        self.spend(Use.UNKNOWN, off)
        self.back(seen, 0.0)
        self.start(self.again(), 5.0, load)


seconds = st.integers(0, 400).map(float)
some = st.integers(1, 30)
ACTIONS = st.one_of(
    st.builds(lambda n, more, delay: ("train", n, more, delay), some, st.integers(0, 9).map(float), seconds),
    st.builds(lambda *a: ("fail", *a), st.integers(0, 90).map(float), seconds, seconds),
    st.builds(lambda *a: ("give up", *a), st.integers(0, 90).map(float), seconds, seconds),
    st.builds(lambda *a: ("stop", *a), seconds, seconds),
    st.builds(lambda *a: ("restart", *a), seconds),
    st.builds(lambda *a: ("evaluate", *a), seconds, st.sampled_from([0.0, 0.0, 30.0]), seconds),
    st.builds(lambda *a: ("evaluate, killed", *a), seconds, seconds, seconds),
    st.builds(lambda *a: ("clock", *a), st.integers(-90_000, 90_000).map(float)),
    st.builds(
        lambda *a: ("away", *a), st.sampled_from([0.0, 7.0]), some, st.sampled_from([0.0, 0.0, -3600.0, 86_400.0])
    ),
    st.builds(lambda *a: ("ends", *a), st.sampled_from([0.0, 7.0]), some, seconds, seconds),
    st.builds(lambda *a: ("reboot", *a), seconds, seconds),
)


def simulated(actions: list[tuple[object, ...]]) -> Simulated:
    run = Simulated()
    run.say(EventName.WATCH_STARTED, seen=None, jumped=0.0)
    run.start(None, 5.0, 60.0)
    for name, *given_ in actions:
        numbers: list[float] = given_  # type: ignore[assignment]
        match name:
            case "train":
                run.train(int(numbers[0]), numbers[1])
                run.save(numbers[2])
                run.train(2, 0.0)
            case "fail":
                # An early failure is one that podwatch sees within this start.
                run.train(10, 0.0)
                run.fail(numbers[0], numbers[1], numbers[2])
            case "give up":
                run.train(10, 0.0)
                run.fail(numbers[0], 1.0, numbers[2], gave_up=1.0 + numbers[1])
            case "stop":
                run.stop(*numbers)
            case "restart":
                run.restart(*numbers)
            case "evaluate":
                run.evaluate(*numbers)
            case "evaluate, killed":
                run.evaluate(numbers[0], 0.0, numbers[1], killed=1.0 + numbers[2])
            case "clock":
                run.set_clock(*numbers)
            case "away":
                run.away_while_it_runs(numbers[0], int(numbers[1]), numbers[2])
            case "ends":
                run.away_while_it_ends(numbers[0], int(numbers[1]), *numbers[2:])
            case "reboot":
                run.reboot(*numbers)
    run.train(3, 1.0)
    return run


def check(run: Simulated, ledger: Ledger) -> None:
    found = account(ledger, run.t + run.offset)
    assert found is not None
    for use in TOTALLED:
        assert found.seconds[use] == pytest.approx(run.used[use], abs=0.01), use
    assert sum(found.seconds.values()) == pytest.approx(run.t, abs=0.01)
    assert found.useful_seconds == pytest.approx(run.used[Use.TRAINING] - run.lost_training, abs=0.01)
    causes = {*run.without, *run.lost, *run.failures, *found.causes}
    for cause in causes:
        loss = found.causes.get(cause, Loss())
        assert loss.seconds == pytest.approx(run.without[cause], abs=0.01), cause
        assert (loss.steps, loss.redone) == (run.lost[cause], run.redone[cause]), cause
        assert loss.times == run.failures[cause], cause


@settings(max_examples=examples(60))
@given(st.lists(ACTIONS, max_size=12))
def test_equal_to_the_truth_to_the_second(actions: list[tuple[object, ...]]) -> None:
    run = simulated(actions)
    check(run, run.ledger)


@pytest.mark.parametrize(("desired", "use"), [("stopped", Use.STOPPED), ("finished", None), ("running", Use.UNKNOWN)])
def test_a_new_state_directory_finds_that_the_run_was_stopped(desired: str, use: Use | None) -> None:
    """Seen: "unknown", and so without a price, while the status said TRAINING IS STOPPED."""
    begin = Event(EventName.WATCH_STARTED, WALL, "")
    ledger = fold([begin, Event(EventName.DAEMON_STARTED, WALL, "", fields={"desired": desired})])
    found = account(look(ledger, WALL + 60.0), WALL + 60.0)
    assert found is not None
    assert {u: s for u, s in found.seconds.items() if s} == ({} if use is None else {use: 60.0})


@settings(max_examples=8)
@given(actions=st.lists(ACTIONS, max_size=10))
def test_the_same_from_the_real_journal(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[object, ...]]
) -> None:
    """The events alone, written to and read from the database, without what podwatch kept beside them."""
    run = simulated(actions)
    path: Path = tmp_path_factory.mktemp("journal") / "journal.sqlite"
    journal = Journal.open(path)
    try:
        journal.together([lambda j, e=event: j.add_event(e) for event in run.events])  # type: ignore[misc]
        read = journal.events(after_id=-1, limit=10_000)
    finally:
        journal.close()
    assert len(read) == len(run.events)
    check(run, look(fold(read), run.t + run.offset, step=run.position))


@settings(max_examples=examples(25))
@given(st.lists(ACTIONS, max_size=8), st.integers(0, 100))
def test_a_ledger_that_was_kept_continues_where_it_was(actions: list[tuple[object, ...]], at: int) -> None:
    """Also after the journal dropped the events before it."""
    events = simulated(actions).events
    cut = min(at, len(events))
    kept = from_dict(json.loads(json.dumps(to_dict(fold(events[:cut])))))
    assert kept is not None
    assert fold(events[cut:], kept) == fold(events)
