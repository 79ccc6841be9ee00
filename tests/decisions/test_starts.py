"""Which checkpoints are on the current line, and which start wrote one."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.starts import UNKNOWN, TrainerStart, current_line, is_on, start_that_wrote

Saves = set[tuple[int, str]]


def on_line(starts: list[TrainerStart], saves: Saves) -> Saves:
    line = current_line(starts)
    return {(step, start) for step, start in saves if is_on(line, step, start)}


A = TrainerStart("A")
TO_90 = {(step, "A") for step in range(10, 91, 10)}


@pytest.mark.parametrize(
    ("starts", "saves", "left"),
    [
        pytest.param([A], TO_90, set(), id="one start"),
        pytest.param([A, TrainerStart("B", 90, "A")], TO_90 | {(100, "B")}, set(), id="restart from the newest"),
        pytest.param(
            [A, TrainerStart("B", 50, "A")],
            TO_90 | {(60, "B")},
            {(60, "A"), (70, "A"), (80, "A"), (90, "A")},
            id="step back, or an operator's branch",
        ),
        pytest.param(
            [A, TrainerStart("B", 50, "A"), TrainerStart("C", 90, "A")],
            TO_90 | {(60, "B"), (100, "C")},
            {(60, "B")},
            id="return to the earlier branch",
        ),
        pytest.param(
            [A, TrainerStart("B", 50, "A"), TrainerStart("C", 90, "A"), TrainerStart("D", 60, "B")],
            TO_90 | {(60, "B"), (100, "C")},
            {(step, "A") for step in range(60, 91, 10)} | {(100, "C")},
            id="and back again",
        ),
        pytest.param([A, TrainerStart("B")], TO_90 | {(10, "B")}, TO_90, id="fresh"),
        pytest.param([A, TrainerStart("B"), TrainerStart("C", 10, "B")], TO_90 | {(10, "B")}, TO_90, id="after fresh"),
        pytest.param(
            [A, TrainerStart("B"), TrainerStart("C", 30, "A")],
            TO_90 | {(10, "B")},
            {(10, "B")} | {(step, "A") for step in range(40, 91, 10)},
            id="return from a fresh start",
        ),
        pytest.param(
            [A, TrainerStart("B", 90, "A"), TrainerStart("C", 90, "A")], TO_90 | {(100, "C")}, set(), id="no save"
        ),
        pytest.param(
            [A, TrainerStart("attached", 90, "A")], TO_90 | {(100, "attached")}, set(), id="attached trainer"
        ),
        pytest.param([TrainerStart("other pod"), TrainerStart("here", 40, "other pod")],
                     {(40, "other pod"), (50, "other pod"), (50, "here")}, {(50, "other pod")}, id="another pod"),
        pytest.param([TrainerStart("here", 40, "not listed")],
                     {(40, "not listed"), (50, "not listed"), (50, "here")}, {(50, "not listed")}, id="a lost start"),
        pytest.param([TrainerStart("here", 40)], {(40, UNKNOWN), (50, UNKNOWN), (50, "here")}, {(50, UNKNOWN)},
                     id="from an adopted one"),
        pytest.param([], {(40, UNKNOWN)}, set(), id="no start yet"),
        pytest.param([TrainerStart("fresh")], {(40, UNKNOWN), (5, "fresh")}, {(40, UNKNOWN)}, id="fresh beside others"),
        pytest.param([A, TrainerStart("B", 50, "A"), TrainerStart("C", 10, "B")], {(10, "A"), (20, "A"), (10, "B")},
                     {(20, "A")}, id="from a save of a start that fell below its own beginning"),
        pytest.param([TrainerStart("B", 9, "C"), TrainerStart("C", 9, "B")], {(5, "B"), (5, "C")}, set(),
                     id="parents in a circle"),
    ],
)  # fmt: skip
def test_what_is_left_behind(starts: list[TrainerStart], saves: Saves, left: Saves) -> None:
    assert saves - on_line(starts, saves) == left


@dataclass
class Node:
    """One save. ``before``: the save from which training reached it."""

    step: int
    start: str
    before: "Node | None"


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[TrainerStart], list[Node], Node | None]:
    """(starts, all their saves, the save that training has reached). Each start resumes any earlier save or none."""
    starts: list[TrainerStart] = []
    nodes: list[Node] = []
    at: Node | None = None
    for number in range(draw(st.integers(1, 7))):
        at = draw(st.sampled_from([None, *nodes]))
        name = f"s{number}"
        starts.append(TrainerStart(name, None if at is None else at.step, UNKNOWN if at is None else at.start))
        for _ in range(draw(st.integers(0, 3))):
            at = Node((0 if at is None else at.step) + draw(st.integers(1, 3)), name, at)
            nodes.append(at)
    return starts, nodes, at


@given(histories())
def test_the_line_is_the_way_back_from_what_training_has_reached(
    history: tuple[list[TrainerStart], list[Node], Node | None],
) -> None:
    starts, nodes, at = history
    way: Saves = set()
    while at is not None:
        way.add((at.step, at.start))
        at = at.before
    assert on_line(starts, {(n.step, n.start) for n in nodes}) == way


@given(histories())
def test_a_step_is_on_the_line_once(history: tuple[list[TrainerStart], list[Node], Node | None]) -> None:
    starts, nodes, _ = history
    found = [step for step, _ in on_line(starts, {(n.step, n.start) for n in nodes})]
    assert len(found) == len(set(found))


@given(histories(), st.data())
def test_a_start_from_any_save_leaves_what_is_above_it_and_nothing_below(
    history: tuple[list[TrainerStart], list[Node], Node | None], data: st.DataObject
) -> None:
    starts, nodes, _ = history
    saves = {(n.step, n.start) for n in nodes}
    before = on_line(starts, saves)
    if before:
        step, start = data.draw(st.sampled_from(sorted(before)))
        assert on_line([*starts, TrainerStart("next", step, start)], saves) == {s for s in before if s[0] <= step}


SPANS = [
    TrainerStart("one", None, began_ns=100, ended_ns=199),
    TrainerStart("two", 10, "one", 200, 299),
    TrainerStart("three", 5, "one", 300),
]


@pytest.mark.parametrize(
    ("times", "start"),
    [([150], "one"), ([299, 200], "two"), ([300, 10**9], "three"), ([50], None), ([150, 250], None), ([], None)],
)
def test_a_checkpoint_is_of_the_start_during_which_all_its_files_appeared(times: list[int], start: str | None) -> None:
    found = start_that_wrote(times, SPANS)
    assert (found and found.start_id) == start


def test_a_start_whose_time_is_not_known_wrote_nothing() -> None:
    assert start_that_wrote([5], [TrainerStart("elsewhere")]) is None
