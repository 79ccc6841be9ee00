"""What was begun is finished: over any schedule of saves and interruptions, a publication is never further away than
one upload."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.checkpoint import CheckpointSet, Completeness, HeldAs
from podwatch.store.uploads import Begun, Waiting, next_upload, why_given_up


def made(step: int, save_id: str = "a", held_as: HeldAs | None = None, held: str = "") -> CheckpointSet:
    held = held or ("left" if held_as else "")
    return CheckpointSet(
        step, "hf", Completeness.COMPLETE, (), 100, 3, 0.0, save_id=save_id, held=held, held_as=held_as
    )


def test_what_was_begun_is_finished_or_given_up() -> None:
    def why(step: int, found: CheckpointSet | None, **facts: Any) -> str:
        return why_given_up(Begun(step, "a", found, newest_stored=15, **facts)).split(",")[0]

    branch, gone = (
        "it belongs to an earlier branch of this run",
        "it was removed or saved again before it was in the store",
    )
    assert why(10, made(10)) == "step 15 is in the store"
    assert why(10, made(10), pinned=True) == ""
    assert why(20, made(20, "other")) == gone
    assert why(20, made(20, "other"), linked=True) == gone
    assert why(30, made(30, held_as=HeldAs.EARLIER_BRANCH)) == branch
    assert why(30, made(30), same_lineage=False) == branch
    assert why(40, made(40), void=True) == "its files changed"
    assert why(50, made(50, "")) == gone
    assert why(70, made(70)) == ""
    assert why(80, None) == gone
    assert why(80, None, linked=True) == "", "podwatch has its files"
    assert why(80, None, scanned=False) == "", "the pod's checkpoints are not known yet"


def test_nothing_to_do() -> None:
    assert next_upload(None, ()) is None


def test_the_newest_where_nothing_was_begun_and_where_as_much_is_left() -> None:
    newest, begun = Waiting(20, "b", 100), Waiting(10, "a", 100)
    assert next_upload(newest, ()) == newest
    assert next_upload(newest, [begun]) == newest


def test_what_was_begun_where_less_is_left_of_it_or_nothing_newer_can_be_sent() -> None:
    begun = Waiting(10, "a", 99)
    assert next_upload(Waiting(20, "b", 100), [begun]) == begun
    assert next_upload(None, [begun]) == begun


def test_a_smaller_newest_goes_first() -> None:
    assert next_upload(Waiting(20, "b", 10), [Waiting(10, "a", 99)]) == Waiting(20, "b", 10)


SAVE = st.tuples(st.just("save"), st.integers(1, 100))
SEND = st.tuples(st.just("send"), st.integers(1, 60))


@given(st.lists(SAVE | SEND, max_size=60))
def test_no_schedule_costs_more_than_one_upload(events: list[tuple[str, int]]) -> None:
    """Bytes sent between two publications: never more than the largest checkpoint. Each "send" ends with a restart."""
    left: dict[int, int] = {}
    sizes: dict[int, int] = {}
    published, sent = 0, 0
    for kind, amount in events:
        if kind == "save":
            step = len(sizes) + 1
            sizes[step] = left[step] = amount
            continue
        room = amount
        while room:
            newest = max(left, default=0)
            begun = [Waiting(s, "", n) for s, n in left.items() if n < sizes[s] and s > published]
            fresh = Waiting(newest, "", left[newest]) if newest > published else None
            chosen = next_upload(fresh, begun)
            if chosen is None:
                break
            for given_up in begun:
                if given_up.step != chosen.step:
                    del left[given_up.step]
            part = min(room, left[chosen.step])
            left[chosen.step] -= part
            room, sent = room - part, sent + part
            assert sent <= max(sizes.values())
            if left[chosen.step] == 0:
                published, sent = chosen.step, 0
                del left[chosen.step]
