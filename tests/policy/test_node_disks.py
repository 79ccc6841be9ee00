"""Which parts of checkpoints the other nodes delete, where each has a disk of its own."""

from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.node_files import NodeList, NodeStep
from podwatch.policy.nodes import to_cancel, to_delete

STEPS = st.frozensets(st.integers(0, 12), max_size=8)


def listed(steps: frozenset[int]) -> list[NodeList]:
    found = tuple(NodeStep(s, (FileEntry("a", "checkpoint", 1, s, node=1),), settled=True) for s in sorted(steps))
    return [NodeList(1, "node 1", found)]


def test_what_node_0_has_deleted() -> None:
    gone = to_delete(listed(frozenset({4, 8, 12})), {8, 12}, {4, 8, 12}, set(), 12)
    assert list(gone) == [4]
    assert gone[4] == {1: listed(frozenset({4}))[0].steps[0].digest}


@given(there=STEPS, present=STEPS, seen=STEPS, stored=STEPS, newest=st.integers(-1, 12))
def test_never_too_much(
    there: frozenset[int], present: frozenset[int], seen: frozenset[int], stored: frozenset[int], newest: int
) -> None:
    gone = to_delete(listed(there), present, seen, stored, newest)
    for step in gone:
        assert step < newest, "the newest stored checkpoint, and newer ones, stay"
        assert step not in present, "node 0 still has its part"
        assert newest in present, "node 0's disk is there"
        assert step in stored or step in seen, "node 0 has deleted it, or the store has it"


UPLOADS = st.frozensets(st.tuples(st.integers(0, 12), st.sampled_from("ab")), max_size=8)


@given(begun=UPLOADS, abandoned=UPLOADS, asked=st.tuples(st.integers(0, 12), st.sampled_from("ab")) | st.none(),
       newest=st.integers(-1, 12))  # fmt: skip
def test_what_can_still_be_finished_is_not_cancelled(
    begun: frozenset[tuple[int, str]],
    abandoned: frozenset[tuple[int, str]],
    asked: tuple[int, str] | None,
    newest: int,
) -> None:
    cancelled = to_cancel(begun, abandoned, asked, newest)
    assert asked not in cancelled, "node 0 asks for it"
    for one in begun:
        assert (one in cancelled) == (one != asked and (one in abandoned or one[0] < newest))
