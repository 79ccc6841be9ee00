"""Whose a checkpoint is, and which ones are on the line that is trained: by the list of starts alone."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.run_state import RunState
from podwatch.domain.starts import (
    MOST_STARTS,
    CurrentLine,
    Origins,
    Provenance,
    Recorded,
    StartedBy,
    TrainerStart,
    changed_start,
    line_of,
    older_branches,
    start_of,
    with_start,
)
from tests.support.starts import branched, guarded

GUARD = guarded("l0", wall=100.0)
A = TrainerStart("a", None, 110.0, branch="l0")
B = TrainerStart("b", 20, 200.0, branch="l0")


def judged(step: int, wall: float, *starts: TrainerStart, recorded: str = "", adopted: str = "") -> Provenance:
    return Origins.of((*GUARD, *starts), adopted=adopted).judge(step, wall, Recorded(recorded))


def fetched(step: int, *starts: TrainerStart, start_id: str = "x", branch: str = "") -> Provenance:
    """Of a checkpoint that is in the store, whatever its times here say."""
    found = {Origins.of((*GUARD, *starts)).judge(step, w, Recorded(start_id, True, branch)) for w in (5.0, 150.0, 9e9)}
    assert len(found) == 1
    return found.pop()


def test_a_checkpoint_belongs_to_the_last_start_that_began_before_it() -> None:
    assert start_of(99.9, (*GUARD, A, B)) is None
    assert [s and s.id for w in (105.0, 110.0, 199.9, 200.0) for s in [start_of(w, (*GUARD, A, B))]] == [
        "guard-l0", "a", "a", "b"
    ]  # fmt: skip


def test_it_is_on_the_line_unless_a_later_start_began_below_it() -> None:
    assert not judged(20, 150.0, A, B).left
    assert judged(25, 150.0, A, B).left
    assert not judged(25, 250.0, A, B).left
    later = TrainerStart("c", 30, 300.0)
    assert judged(25, 150.0, A, B, later).left, "a start above brings nothing back"
    assert not judged(30, 250.0, A, B, later).left
    assert judged(0, 150.0, A, B, TrainerStart("fresh", None, 300.0)).left


def test_a_start_whose_step_is_not_known_leaves_nothing() -> None:
    attached = TrainerStart("c", None, 300.0, StartedBy.OPERATOR, proved=False)
    assert not judged(25, 250.0, A, B, attached).left
    assert judged(25, 250.0, A, B, replace(attached, from_step=22, proved=True)).left


def test_a_return_continues_the_branch_that_was_left_and_leaves_the_other_one() -> None:
    back = TrainerStart("c", 40, 300.0, branch="c", of="a")
    assert not judged(40, 150.0, A, B, back).left
    assert judged(45, 150.0, A, B, back).left
    assert judged(25, 250.0, A, B, back).left, "of the branch in between"
    assert not judged(20, 150.0, A, B, back).left


def test_what_is_older_than_every_start_is_not_this_runs() -> None:
    assert judged(10, 50.0, A) == Provenance("", ours=False)
    assert judged(10, 50.0, B).ours, "training was started from above it"
    assert not judged(21, 50.0, B).ours
    assert not judged(10, 50.0, A, TrainerStart("fresh", None, 300.0)).ours
    assert Origins().judge(10, 50.0) == Provenance("", ours=False), "run.json was not read yet"


def test_a_record_outlives_every_clock() -> None:
    """The clock was set back by an hour before B began: by its times, what A saved would be B's."""
    back = replace(B, wall=50.0)
    assert judged(25, 150.0, A, back).start_id == "b"
    assert judged(25, 150.0, A, back, recorded="a") == Provenance("a", ours=True, left=True)
    assert judged(15, 150.0, A, back, recorded="unknown").start_id == "b", "a start that is not in the list any more"


def test_what_was_adopted_belongs_to_the_start_during_which_it_was() -> None:
    assert judged(10, 50.0, adopted="guard-l0") == Provenance("guard-l0", ours=True, left=False)
    assert judged(20, 50.0, A, B, adopted="a") == Provenance("a", ours=True, left=False)
    assert judged(25, 50.0, A, B, adopted="a") == Provenance("a", ours=True, left=True), "B began below it"
    assert judged(25, 50.0, A, adopted="a") == Provenance("a", ours=True, left=False), "adopted after a fresh start"
    assert judged(10, 50.0, A, adopted="guard-l0").left, "a fresh start has left it"
    assert judged(10, 50.0, A, adopted="dropped") == Provenance("guard-l0", ours=True, left=True)
    assert judged(10, 150.0, A, adopted="guard-l0").start_id == "a", "what appeared later was not adopted"


def test_an_operator_who_goes_below_what_was_adopted_has_left_it() -> None:
    below = TrainerStart("c", 20, 300.0, StartedBy.OPERATOR, branch="c")
    assert judged(25, 50.0, below, adopted="guard-l0").left
    assert not judged(20, 50.0, below, adopted="guard-l0").left


def test_what_came_from_the_store_is_ours_and_of_the_start_that_its_manifest_names() -> None:
    other = TrainerStart("x", None, 0.0, StartedBy.OTHER_POD, proved=False, branch="l0")
    here = TrainerStart("c", 90, 300.0, branch="l0")
    assert fetched(90, A, B, other, here) == Provenance("x", ours=True, left=False)
    assert fetched(95, A, B, other, here) == Provenance("x", ours=True, left=True)
    assert fetched(25, A, B, start_id="a") == Provenance("a", ours=True, left=True)
    assert judged(10, 250.0, A, B, other).start_id == "b", "nothing of another pod appeared here"


def test_one_of_an_unknown_start_is_on_the_line_as_far_as_its_branch_is() -> None:
    """As what is in the store is: another pod trained on, and its checkpoint was fetched and not started from yet."""
    assert fetched(90, A, B, branch="l0") == Provenance("x", ours=True, left=False)
    branched_off = TrainerStart("c", 50, 300.0, branch="l1")
    assert fetched(50, A, B, branched_off, branch="l0") == Provenance("x", ours=True, left=False)
    assert fetched(60, A, B, branched_off, branch="l0").left
    assert not fetched(60, A, B, branched_off, branch="l1").left
    assert fetched(1, A, B, TrainerStart("fresh", None, 300.0, branch="l1"), branch="l0").left
    first, off = TrainerStart("b", 90, 200.0, branch="l0"), TrainerStart("c", 50, 300.0, branch="l1")
    back = TrainerStart("d", 95, 400.0, branch="l2", of="b")
    assert fetched(70, first, off, back, branch="l1").left, "its branch was left altogether"


def test_one_of_an_unknown_branch_is_on_the_line_up_to_the_first_start() -> None:
    assert fetched(90, branch="z") == Provenance("x", ours=True, left=False), "nothing was started yet"
    assert fetched(90, A, B, branch="z") == Provenance("x", ours=True, left=True)
    assert fetched(20, B, branch="z") == Provenance("x", ours=True, left=False)
    assert fetched(21, B, branch="z").left


def test_branches_have_the_names_that_the_store_knows() -> None:
    starts = branched(branched(GUARD, "l1", 40, wall=200.0), "l2", 30, wall=300.0, left=90)
    run = RunState("r", starts=starts)
    assert (run.lineage.id, run.lineage.parent, run.lineage.parent_step) == ("l2", "l1", 30)
    assert (run.lineage.left_step, run.lineage.opened_wall) == (90, 300.0)
    assert run.ancestry == {"l0": 30, "l1": 30}
    back = TrainerStart("c", 35, 400.0, branch="l3", of="start-l1")
    assert older_branches((*starts, back)) == {"l0": 35, "l1": 35}
    assert RunState("r", starts=(*starts, back)).lineage.parent == "l1"
    assert RunState("r", starts=branched(starts, "l3", None)).ancestry == {}
    assert RunState("r", starts=GUARD).lineage.parent == ""
    assert run.guarded_since == 100.0


def test_the_list_stays_short_and_what_it_drops_belongs_to_the_start_before() -> None:
    starts = branched(GUARD, "l1", 40, wall=200.0)
    for number in range(1000):
        starts = with_start(starts, TrainerStart(f"s{number}", 40 + number, 300.0 + number, branch="l1"))
    assert len(starts) == MOST_STARTS
    assert [s.id for s in starts[:2]] == ["guard-l0", "start-l1"]
    assert starts[-1].id == "s999"
    assert RunState("r", starts=starts).ancestry == {"l0": 40}
    assert Origins.of(starts).judge(40, 350.0, Recorded("s50")) == Provenance("start-l1", ours=True, left=False)


def test_a_start_is_in_the_list_once_and_the_begin_of_the_guard_stays() -> None:
    again = replace(A, from_step=3)
    assert with_start((*GUARD, A), again) == (*GUARD, again)
    starts = GUARD
    for number in range(2 * MOST_STARTS):
        starts = with_start(starts, TrainerStart(f"s{number}", number, 200.0 + number, branch="l0"))
    assert starts[0] == GUARD[0]


def test_a_return_to_a_start_that_is_dropped_is_one_to_the_start_before_it() -> None:
    left, back = TrainerStart("b", 5, 250.0, branch="l1"), TrainerStart("c", 7, 260.0, branch="l2", of="a")
    starts = (*GUARD, A, left, back)
    for number in range(MOST_STARTS - 3):
        starts = with_start(starts, TrainerStart(f"s{number}", 90, 300.0 + number, branch="l2"))
    assert [(s.id, s.of) for s in starts[:3]] == [("guard-l0", ""), ("b", ""), ("c", "guard-l0")]


def test_a_change_is_of_one_start() -> None:
    assert changed_start((*GUARD, A, B), "a", seen=False) == (*GUARD, replace(A, seen=False), B)
    assert [by for by in StartedBy if replace(A, by=by).trains] == [StartedBy.PODWATCH, StartedBy.OPERATOR]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=150))
def test_however_many_there_are_run_json_can_hold_them(history: list[tuple[int, int, bool]]) -> None:
    starts = GUARD
    for number, (step, of, opens) in enumerate(history):
        branch = f"b{number}" if opens else starts[-1].branch
        back = starts[-of].id if opens and 0 < of <= len(starts) else ""
        starts = with_start(starts, TrainerStart(f"{number:016x}", step, 200.0 + number, branch=branch, of=back))
    ids = {s.id for s in starts}
    assert all(s.of in ids or not s.of for s in starts)
    assert line_of(starts).limits[starts[-1].id] is None
    state = RunState("r", starts=starts)
    assert RunState.from_bytes(state.to_bytes()) == state
    assert len(state.to_bytes()) < 24_000


# -- random histories against what happened ----------------------------------------------------------------------------


@dataclass
class History:
    """Training that is started, saves, and is started again below; the clock can be set back between two starts."""

    starts: tuple[TrainerStart, ...] = GUARD
    clock: float = 101.0
    truth: dict[int, str] = field(default_factory=dict)
    """Step on this pod -> the start that saved it."""
    walls: dict[int, float] = field(default_factory=dict)
    recorded: dict[int, str] = field(default_factory=dict)
    line: list[int] = field(default_factory=list)

    def begin(self, from_step: int | None, set_back: float) -> None:
        """What exists is recorded before the next start, as the daemon does."""
        judge = Origins.of(self.starts)
        for step, wall in self.walls.items():
            self.recorded.setdefault(step, judge.judge(step, wall).start_id)
        self.clock = max(0.0, self.clock - set_back)
        start = TrainerStart(f"s{len(self.starts)}", from_step, self.clock, branch="l0")
        self.starts = with_start(self.starts, start)
        self.line = [] if from_step is None else [n for n in self.line if n <= from_step]

    def save(self, step: int) -> None:
        self.clock += 1.0
        self.truth[step], self.walls[step] = self.starts[-1].id, self.clock
        self.recorded.pop(step, None)
        if step not in self.line:
            self.line.append(step)


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 30), st.sampled_from([0.0, 0.0, 5.0, 3600.0])), min_size=1, max_size=40
    )
)
def test_the_line_is_what_was_trained(acts: list[tuple[bool, int, float]]) -> None:
    history = History()
    history.begin(None, 0.0)
    for begins, number, set_back in acts:
        if begins:
            below = [n for n in history.line if n <= number]
            history.begin(max(below, default=None), set_back)
        else:
            history.save(number)
        judge = Origins.of(history.starts)
        found = {
            step: judge.judge(step, wall, Recorded(history.recorded.get(step, "")))
            for step, wall in history.walls.items()
        }
        assert {step: one.start_id for step, one in found.items()} == history.truth
        assert sorted(step for step, one in found.items() if not one.left) == sorted(history.line)


@pytest.mark.parametrize("step", [0, 20, 21])
def test_the_step_of_the_start_itself_is_on_the_line(step: int) -> None:
    assert judged(step, 150.0, A, B).left is (step > 20)


# -- random trees of starts, each of which resumes any earlier save ----------------------------------------------------

Saves = set[tuple[int, str]]


def on_line(starts: list[TrainerStart], saves: Saves) -> Saves:
    limits = line_of(starts).limits
    return {(n, s) for n, s in saves if s in limits and (limits[s] is None or n <= (limits[s] or 0))}


TO_90 = {(step, "a") for step in range(10, 91, 10)}


@pytest.mark.parametrize(
    ("starts", "saves", "left"),
    [
        ([("a", None, "")], TO_90, set()),
        ([("a", None, ""), ("b", 90, "a")], TO_90 | {(100, "b")}, set()),
        ([("a", None, ""), ("b", 50, "a")], TO_90 | {(60, "b")}, {(n, "a") for n in (60, 70, 80, 90)}),
        ([("a", None, ""), ("b", 50, "a"), ("c", 90, "a")], TO_90 | {(60, "b"), (100, "c")}, {(60, "b")}),
        (
            [("a", None, ""), ("b", 50, "a"), ("c", 90, "a"), ("d", 60, "b")],
            TO_90 | {(60, "b"), (100, "c")},
            {(n, "a") for n in (60, 70, 80, 90)} | {(100, "c")},
        ),
        ([("a", None, ""), ("b", None, ""), ("c", 10, "b")], TO_90 | {(10, "b")}, TO_90),
        (
            [("a", None, ""), ("b", None, ""), ("c", 30, "a")],
            TO_90 | {(10, "b")},
            {(10, "b")} | {(n, "a") for n in range(40, 91, 10)},
        ),
        ([("a", None, ""), ("b", 90, "a"), ("c", 90, "a")], TO_90 | {(100, "c")}, set()),
        ([("a", None, ""), ("b", 50, "a"), ("c", 10, "b")], {(10, "a"), (20, "a"), (10, "b")}, {(20, "a")}),
        ([("b", 9, "c"), ("c", 9, "b")], {(5, "b"), (9, "c"), (12, "c"), (12, "b")}, {(12, "b")}),
        ([("a", 9, "a")], {(5, "a"), (12, "a")}, set()),
        ([("a", None, ""), ("b", 50, "lost")], TO_90 | {(60, "b")}, {(n, "a") for n in (60, 70, 80, 90)}),
    ],
    ids=[
        "one", "restart", "step back", "return", "and back again", "after fresh", "return from a fresh start",
        "no save", "from a save of a start below its own beginning", "parents in a circle", "its own parent",
        "a lost start",
    ],
)  # fmt: skip
def test_what_is_left_behind(starts: list[tuple[str, int | None, str]], saves: Saves, left: Saves) -> None:
    assert saves - on_line([TrainerStart(name, step, of=of) for name, step, of in starts], saves) == left


@dataclass
class Node:
    """One save. ``before``: the save from which training reached it."""

    step: int
    start: str
    before: "Node | None"


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[TrainerStart], list[Node], Node | None]:
    """(starts, all their saves, the save that training has reached)."""
    starts: list[TrainerStart] = []
    nodes: list[Node] = []
    at: Node | None = None
    for number in range(draw(st.integers(1, 7))):
        at = draw(st.sampled_from([None, *nodes]))
        name = f"s{number}"
        starts.append(TrainerStart(name, None if at is None else at.step, of="" if at is None else at.start))
        for _ in range(draw(st.integers(0, 3))):
            at = Node((0 if at is None else at.step) + draw(st.integers(1, 3)), name, at)
            nodes.append(at)
    return starts, nodes, at


@given(trees())
def test_the_line_is_the_way_back_from_what_training_has_reached(
    tree: tuple[list[TrainerStart], list[Node], Node | None],
) -> None:
    starts, nodes, at = tree
    way: Saves = set()
    while at is not None:
        way.add((at.step, at.start))
        at = at.before
    assert on_line(starts, {(n.step, n.start) for n in nodes}) == way


@given(trees())
def test_a_step_is_on_the_line_once(tree: tuple[list[TrainerStart], list[Node], Node | None]) -> None:
    starts, nodes, _ = tree
    found = [step for step, _ in on_line(starts, {(n.step, n.start) for n in nodes})]
    assert len(found) == len(set(found))


@given(trees(), st.data())
def test_a_start_from_any_save_of_the_line_leaves_what_is_above_it_and_nothing_below(
    tree: tuple[list[TrainerStart], list[Node], Node | None], data: st.DataObject
) -> None:
    starts, nodes, _ = tree
    saves = {(n.step, n.start) for n in nodes}
    before = on_line(starts, saves)
    if before:
        step, start = data.draw(st.sampled_from(sorted(before)))
        assert on_line([*starts, TrainerStart("next", step, of=start)], saves) == {s for s in before if s[0] <= step}


def test_without_a_start_everything_older_is_on_the_line_and_nothing_appeared_during_one() -> None:
    assert line_of(()) == CurrentLine({}, None)
    assert start_of(5.0, ()) is None
    elsewhere = TrainerStart("elsewhere", by=StartedBy.OTHER_POD)
    assert start_of(5.0, (elsewhere,)) is None, "its time is not known here"
