"""Which saves carry what no resume needs: the same ones that stay as milestones, and the last one of a finished run."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from podwatch.config.settings import SyncSettings
from podwatch.domain.stored_checkpoint import PublishedSave
from podwatch.policy.store_retention import Kind, Occasion, occasions, plan_remote, still_owed


def save(seq: int, step: int | None = None, save_id: str = "") -> PublishedSave:
    step = seq * 10 if step is None else step
    return PublishedSave(step, save_id or f"s{step}", "line", 1, seq, "key", "", "0" * 40, 1, 1, float(seq))


seqs = st.lists(st.integers(1, 60), unique=True, min_size=1, max_size=25).map(sorted)
whens = st.sampled_from(["milestones", "all", "none"])


def ask(
    saves: list[PublishedSave], here: set[tuple[int, str]], when: str, every: int, done: bool
) -> tuple[Occasion, ...]:
    return occasions(saves, here, when=when, keep_every=every, finished=done)


@given(seqs, st.integers(0, 12), whens, st.booleans(), st.data())
def test_only_what_is_here_and_only_where_there_is_an_occasion(
    numbers: list[int], every: int, when: str, finished: bool, data: st.DataObject
) -> None:
    saves = [save(n) for n in numbers]
    here = {(s.step, s.save_id) for s in saves if data.draw(st.booleans())}
    found = ask(saves, here, when, every, finished)
    assert {o.key for o in found} <= here
    assert [o.step for o in found] == sorted((o.step for o in found), reverse=True), "newest first"
    newest = (saves[-1].step, saves[-1].save_id)
    assert {o.key for o in found if o.kind is Kind.FINAL} == ({newest} & here if finished else set())
    if when == "all":
        assert {o.key for o in found} == here
    else:
        assert not [o for o in found if o.kind is Kind.SAVE]
    if every == 0 and when != "all":
        assert len(found) <= 1


@given(seqs, st.integers(1, 12))
def test_every_milestone_that_carries_them_stays_in_the_store(numbers: list[int], every: int) -> None:
    """Otherwise gigabytes would be sent for a save that retention removes."""
    saves = [save(n) for n in numbers]
    all_of_them = {(s.step, s.save_id) for s in saves}
    carry = {o.key for o in ask(saves, all_of_them, "milestones", every, False)}
    sync = SyncSettings(keep_last=1, keep_every=every)
    gone = {(r.step, r.save_id) for r in plan_remote(saves, (), {}, sync, 1e9)}
    assert not carry & gone
    assert carry | gone | {(saves[-1].step, saves[-1].save_id)} == all_of_them


@given(seqs, st.integers(1, 12), st.integers(1, 5))
def test_a_later_save_takes_the_occasion_from_none(numbers: list[int], every: int, more: int) -> None:
    saves = [save(n) for n in numbers]
    here = {(s.step, s.save_id) for s in saves}
    before = ask(saves, here, "milestones", every, False)
    assert set(before) <= set(ask([*saves, save(numbers[-1] + more)], here, "milestones", every, False))


def test_a_save_named_again_is_one_save() -> None:
    """As at a step back: the pointer names an older save anew."""
    saves = [save(1), save(2), replace(save(1), seq=3)]
    found = ask(saves, {(10, "s10"), (20, "s20")}, "none", 0, True)
    assert [(o.step, o.kind) for o in found] == [(10, Kind.FINAL)]


def test_at_the_end_all_parts_are_looked_at_once_more() -> None:
    sent = {"weights": "milestone"}
    assert still_owed(("weights", "extra"), Kind.MILESTONE, sent) == ("extra",)
    assert still_owed(("weights", "extra"), Kind.FINAL, sent) == ("weights", "extra")
    assert still_owed(("weights",), Kind.FINAL, {"weights": "final"}) == ()
    assert still_owed(("weights",), Kind.SAVE, {"weights": "final"}) == ()
