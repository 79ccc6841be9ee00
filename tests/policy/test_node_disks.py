"""Which parts of checkpoints the other nodes delete, where each has a disk of its own."""

from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.node_files import NodeList, NodeStep
from podwatch.policy.gang import to_delete

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
