"""A stray step directory is not believed, and a real checkpoint is never refused."""

from hypothesis import given
from hypothesis import strategies as st

from podwatch.checkpoints.held_back import HeldBack
from podwatch.checkpoints.implausible_steps import NO_TRAINING, StepEvidence, implausible
from podwatch.checkpoints.records import CheckpointRecords
from podwatch.domain.checkpoint import CheckpointSet, Completeness, HeldAs, newest_complete, newest_whole
from podwatch.domain.run import Lineage
from podwatch.domain.stored_checkpoint import StoredCheckpoint
from podwatch.recovery.choose import choose

STRAY = 99999999999999999
LINE = Lineage("b")


def saved(step: int, wall: float | None = None, save_id: str = "") -> CheckpointSet:
    wall = float(step) if wall is None else wall
    return CheckpointSet(step, "hf", Completeness.COMPLETE, (), 1, 1, wall, save_id or f"s{step}-{wall}")


def odd(*sets: CheckpointSet, **evidence: object) -> list[int]:
    return sorted(implausible(sets, StepEvidence(**evidence)))  # type: ignore[arg-type]


def test_the_stray_is_implausible_with_any_evidence_or_none() -> None:
    assert odd(saved(STRAY)) == [STRAY]
    assert odd(saved(100), saved(STRAY)) == [STRAY]
    assert odd(saved(100), saved(105), saved(STRAY), target=1000, trained=107) == [STRAY]


def test_a_checkpoint_about_which_nothing_is_known_stays_usable() -> None:
    assert odd(saved(1000)) == []
    assert odd(saved(20_251_122)) == []
    assert odd(saved(1000), target=500) == [], "a lower target was configured since"
    assert odd(saved(0), saved(11), target=1) == [], "it saves less often than that"
    assert odd(saved(10), saved(4000)) == [], "a trial of a few steps beside the run"
    assert odd(saved(1), saved(150_000)) == [], "the first save beside the last"
    assert odd(saved(30_000), trained=3) == [], "the log counts epochs"
    assert odd(saved(30_000), saved(31_000), trained=3, step_seconds=1.0) == []


def test_a_lone_outlier_far_above_a_cluster_is_implausible() -> None:
    assert odd(saved(100), saved(105), saved(110), saved(999_999)) == [999_999]
    assert odd(saved(100), saved(105), saved(110), saved(5000), target=200) == [5000]
    assert odd(saved(100), saved(105), saved(110), saved(5000), target=6000) == []


def test_the_speed_of_training_says_how_far_it_can_be() -> None:
    run = {"trained": 112, "trained_wall": 1000.0, "step_seconds": 30.0}
    sets = [saved(n, float(n)) for n in (100, 105, 110)]
    assert odd(*sets, saved(5000, 1010.0), **run) == [5000]
    assert odd(*sets, saved(115, 1010.0), saved(120, 1020.0), **run) == []
    hours = 8 * 3600.0
    assert odd(saved(110), saved(1000, 1000 + hours), saved(1005, 1000 + hours), **run) == [], "podwatch was away"


def test_what_was_doubted_stays_doubted_until_it_is_saved_again_or_named() -> None:
    stray = saved(500, 10.0, "stray")
    doubted = frozenset({(500, "stray")})
    assert odd(saved(490), stray, trained=505, doubted=doubted) == [500]
    assert odd(saved(490), saved(500, 20.0, "again"), trained=505, doubted=doubted) == []
    assert odd(saved(490), stray, trained=505, doubted=doubted, believed=doubted) == []


def test_it_is_neither_the_newest_nor_chosen_and_alone_it_is_asked_about() -> None:
    held = HeldBack()
    held.explain(StepEvidence(trained=12))
    sets = held.mark([saved(5), saved(10), saved(STRAY)])
    assert [s.held_as for s in sets] == [None, None, HeldAs.IMPLAUSIBLE]
    for newest in (newest_complete(sets), newest_whole(sets)):
        assert newest is not None
        assert newest.step == 10
    assert choose(sets, lineage=LINE).step == 10
    alone = choose(held.mark([saved(STRAY)]), lineage=LINE)
    assert alone.source == "none", "never a fresh start over it"
    assert choose(held.mark([saved(STRAY)]), lineage=LINE, wanted=STRAY).step == STRAY
    assert choose([], [StoredCheckpoint(STRAY, "r", "b", 1, 1)], lineage=LINE).source == "none"
    assert choose([saved(5)], [StoredCheckpoint(STRAY, "r", "b", 1, 1)], lineage=LINE).step == 5
    assert not held.mark(sets[:2])[0].held
    records = CheckpointRecords()
    records.decided = {(STRAY, sets[-1].save_id): ""}
    assert held.mark([saved(STRAY)], records)[0].held_as is None


History = tuple[int, int, float, list[int], int, bool, int | None]
histories = st.tuples(
    st.integers(0, 100_000),  # where the run was when podwatch saw it first
    st.integers(1, 5000),  # save interval
    st.floats(0.01, 600.0),  # seconds for a step
    st.lists(st.integers(1, 300), min_size=1, max_size=8),  # saves that pass while podwatch is away
    st.integers(1, 5),  # checkpoints that the trainer keeps
    st.booleans(),  # whether its log shows steps
    st.one_of(st.none(), st.integers(1, 10**6)),
)


@given(histories)
def test_what_training_saves_is_never_implausible(history: History) -> None:
    first, interval, seconds, absences, keep, shows, target = history
    step, wall = first - first % interval, 1e9
    on_disk: list[CheckpointSet] = []
    evidence = StepEvidence(target=target)
    for away in absences:
        for _ in range(away):
            step, wall = step + interval, wall + interval * seconds
            on_disk = [*on_disk, saved(step, wall)][-keep:]
        # podwatch comes back: the log is not read yet
        assert implausible(on_disk, evidence) == {}
        if shows:
            evidence = StepEvidence(target, trained=step + interval // 2, trained_wall=wall, step_seconds=seconds)
        assert implausible(on_disk, evidence) == {}


@given(histories, st.integers(NO_TRAINING, 10**18))
def test_a_stray_changes_nothing_for_the_others(history: History, stray: int) -> None:
    first, interval, seconds, _, keep, shows, target = history
    on_disk = [saved(first + n * interval, 1e9 + n) for n in range(keep)]
    trained = on_disk[-1].step if shows else None
    evidence = StepEvidence(target, trained=trained, trained_wall=1e9, step_seconds=seconds)
    assert sorted(implausible([*on_disk, saved(stray)], evidence)) == [stray]
    assert choose(_marked(on_disk, stray, evidence), lineage=LINE).step == on_disk[-1].step


def _marked(on_disk: list[CheckpointSet], stray: int, evidence: StepEvidence) -> tuple[CheckpointSet, ...]:
    held = HeldBack()
    held.explain(evidence)
    return held.mark([*on_disk, saved(stray)])


class Counted(int):
    """A step that counts how often it is compared or subtracted."""

    uses = 0

    def __sub__(self, other: int) -> int:
        Counted.uses += 1
        return int(self) - int(other)


def test_the_cost_grows_with_the_number_of_checkpoints_and_not_with_its_square() -> None:
    sets = [saved(Counted(step)) for step in range(5, 3000, 5)]
    Counted.uses = 0
    assert implausible(sets, StepEvidence()) == {}
    assert 0 < Counted.uses <= 2 * len(sets)
