"""Which line a checkpoint is of: random histories of saves, deaths, rollbacks by hand and restarts of podwatch."""

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from podwatch.checkpoints.held_back import HeldBack
from podwatch.checkpoints.lineage import SHOWN_SECONDS, branch_line, departure, kept_step
from podwatch.config.settings import DiskSettings
from podwatch.disk.next_save import NextSave
from podwatch.disk.plan import DiskFacts, Protection, plan_removals
from podwatch.domain.checkpoint import CheckpointSet, Completeness, HeldAs, newest_complete
from podwatch.domain.run import Lineage
from podwatch.domain.run_state import RunState
from podwatch.domain.snapshot import DiskSample
from podwatch.domain.starts import StartedBy, TrainerStart, changed_start, find_start, with_start
from podwatch.recovery.choose import choose
from podwatch.recovery.start_entries import entered
from tests.support.starts import guarded

C = TrainerStart("c", None, 50.0, StartedBy.OPERATOR, proved=False, branch="l0")


def saved(step: int, wall: float, state: Completeness = Completeness.COMPLETE) -> CheckpointSet:
    save_id = f"{step}@{wall}" if state is Completeness.COMPLETE else ""
    start_id = "c" if wall >= 50 else "a"
    return CheckpointSet(step, "flat", state, (), 10, 3, wall, save_id, began_wall=wall, start_id=start_id)


def test_the_command_proves_it_before_any_save() -> None:
    sets = [saved(100, 10), saved(110, 11), saved(120, 12), saved(125, 13, Completeness.INCOMPLETE)]
    found = departure(sets, C, resumed=100)
    assert found is not None
    assert (found.step, found.newest, found.can_return) == (100, 120, True)
    assert departure(sets, C, resumed=120) is None
    assert departure(sets, C) is None
    assert departure([], C, resumed=100) is None, "nothing is left behind"
    stored = departure(sets, C, resumed=120, stored=[130])
    assert stored is not None
    assert (stored.newest, stored.can_return) == (130, False)


def test_a_save_proves_it_and_the_newest_older_one_below_is_where() -> None:
    sets = [saved(100, 10), saved(110, 11), saved(120, 12)]
    found = departure([*sets, saved(105, 60)], C)
    assert found is not None
    assert (found.step, found.newest) == (100, 120)
    anew = departure([*sets, saved(5, 60)], C)
    assert anew is not None
    assert anew.step is None
    rewritten = replace(saved(110, 60), began_wall=11)
    assert departure([sets[0], rewritten, sets[2]], C) is None
    doubtful = replace(saved(105, 60), held="two trainers")
    assert departure([*sets, doubtful], C) is None


@dataclass(frozen=True)
class InStore:
    step: int
    save_id: str
    lineage: str
    wall: float


@dataclass
class Pod:
    """One pod's checkpoints, and what podwatch durably knows of them."""

    record: RunState = field(default_factory=lambda: RunState("r", starts=guarded("l0", wall=1.0)))
    disk: dict[int, CheckpointSet] = field(default_factory=dict)
    line: dict[int, str] = field(default_factory=dict)
    """The truth: the steps of the line that is trained, with their save ids."""
    stored: list[InStore] = field(default_factory=list)
    old_newest: CheckpointSet | None = None
    step: int = 0
    wall: float = 100.0
    began: float = 100.0
    resumed: int | None = None

    def sets(self) -> tuple[CheckpointSet, ...]:
        held = HeldBack()
        held.follow(self.record)
        return held.mark([self.disk[step] for step in sorted(self.disk)])

    def save(self, steps: int, whole: bool) -> None:
        self.step, self.wall = self.step + steps, self.wall + 10
        self.disk[self.step] = saved(self.step, self.wall, Completeness.COMPLETE if whole else Completeness.INCOMPLETE)
        if whole:
            self.line[self.step] = self.disk[self.step].save_id

    def by_hand(self, step: int, says_so: bool) -> None:
        """An operator ends training and resumes from a step of the present line."""
        self.wall += 10
        self.began, self.resumed, self.step = self.wall, step if says_so else None, step
        branch = self.record.lineage.id
        start = TrainerStart(
            f"by hand at {self.wall}", None, self.wall, StartedBy.OPERATOR, proved=False, branch=branch
        )
        self.record = replace(self.record, starts=with_start(self.record.starts, start))
        above = [n for n in self.line if n > step]
        if above:
            self.old_newest = self.disk[max(above)]
        self.line = {n: save_id for n, save_id in self.line.items() if n <= step}
        self.wall += 10

    def look(self) -> None:
        """What podwatch does with each rescan; also the first thing after it was away."""
        stored = [p.step for p in self.stored if p.lineage == self.record.lineage.id and p.wall < self.began]
        starts = self.record.starts
        left = departure(self.sets(), starts[-1], resumed=self.resumed, stored=stored)
        if left is not None:
            opened = changed_start(starts, starts[-1].id, from_step=left.step, proved=True, branch=starts[-1].id)
            self.record = replace(self.record, starts=opened)

    def upload(self) -> None:
        newest = newest_complete(self.sets())
        if newest is None or any((p.step, p.save_id) == (newest.step, newest.save_id) for p in self.stored):
            return
        self.stored.append(InStore(newest.step, newest.save_id, self.record.lineage.id, self.wall))

    def prune(self) -> None:
        """As hard as the disk can ask for it."""
        sets, lineage = self.sets(), self.record.lineage
        stored = max((p.step for p in self.stored if p.lineage == lineage.id), default=None)
        kept = kept_step(sets, lineage, has_store=True, stored=stored)
        protected = {s.step: Protection.EARLIER_BRANCH for s in sets if s.earlier and kept is not None}
        if kept is not None:
            protected[kept] = Protection.EARLIER_NEWEST
        given = DiskFacts(
            sets,
            DiskSample("/", 1000, 1000, 0),
            NextSave(10_000, 0, 10_000, 0),
            stored=frozenset((p.step, p.save_id) for p in self.stored),
            protected=protected,
        )
        for removal in plan_removals(given, DiskSettings()).removals:
            if removal.step is not None and not removal.part:
                gone = self.disk.pop(removal.step)
                if self.line.get(removal.step) == gone.save_id:
                    del self.line[removal.step]


acts = st.one_of(
    st.tuples(st.just("save"), st.integers(1, 10), st.booleans()),
    st.tuples(st.just("save"), st.integers(1, 10), st.just(True)),
    st.tuples(st.just("by hand"), st.integers(0, 20), st.booleans()),
    st.tuples(st.just("look"), st.just(0), st.just(True)),
    st.tuples(st.just("upload"), st.just(0), st.just(True)),
    st.tuples(st.just("prune"), st.just(0), st.just(True)),
)


@given(st.lists(acts, max_size=40))
def test_what_is_chosen_is_the_newest_whole_checkpoint_of_the_line(history: list[tuple[str, int, bool]]) -> None:
    pod = Pod()
    for what, number, flag in history:
        if what == "save":
            pod.save(number, flag)
            pod.look()
        elif what == "by hand":
            pod.look()  # podwatch had seen what the start before it saved
            steps = sorted(pod.line)
            if not steps:
                continue
            pod.by_hand(steps[-1 - number % len(steps)], flag)
            if flag:
                pod.look()
            else:
                pod.save(1, whole=True)  # proved by its first save
                pod.look()
        elif what == "look":
            pod.look()
        elif what == "upload":
            pod.upload()
        else:
            _pruned(pod)
        pod.look()
        chosen = choose(pod.sets(), lineage=pod.record.lineage)
        newest = max(pod.line, default=None)
        assert chosen.step == newest, (what, number, flag)
        if newest is not None:
            assert chosen.save_id == pod.line[newest]


def _pruned(pod: Pod) -> None:
    newest, old = newest_complete(pod.sets()), pod.old_newest
    verified = any(
        p.lineage == pod.record.lineage.id
        and p.step > (-1 if pod.record.lineage.parent_step is None else pod.record.lineage.parent_step)
        for p in pod.stored
    )
    there = old is not None and pod.disk.get(old.step) == old
    left = max((s.step for s in pod.sets() if s.earlier and s.complete), default=None)
    pod.prune()
    if newest is not None:
        assert pod.disk[newest.step].save_id == newest.save_id, "the newest of the line"
    if there and old is not None and not verified and left == old.step:
        assert pod.disk.get(old.step) == old, "the old line's newest, before the new one is in the store"


def test_a_return_leaves_what_the_other_branch_has_saved() -> None:
    pod = Pod()
    for step in (100, 110, 120):
        pod.save(step - pod.step, whole=True)
    pod.by_hand(100, says_so=True)
    pod.look()
    pod.save(5, whole=True)
    assert {s.step for s in pod.sets() if s.earlier} == {110, 120}
    branch = pod.record.lineage
    chosen = next(s for s in pod.sets() if s.step == 120)
    start = TrainerStart("back", 120, pod.wall + 1)
    pod.record = entered(pod.record, start, chosen=chosen, back=True, opens=True, known_branch="")
    assert {s.step for s in pod.sets() if s.earlier} == {105}
    assert (pod.record.lineage.id, pod.record.lineage.parent, pod.record.ancestry) == ("back", "l0", {"l0": 120})
    assert find_start(branch.id, pod.record.starts) is not None


BACK = 1_769_874_360.0  # 2026-01-31 15:46 UTC


def test_the_status_explains_a_run_that_was_taken_back_for_a_day() -> None:
    line = Lineage("l1", "l0", 40, left_step=90, opened_wall=BACK)
    left = [replace(saved(n, 10), held="left", held_as=HeldAs.EARLIER_BRANCH) for n in (80, 90)]
    own = saved(50, BACK + 60)
    first = branch_line(left, line, 90, has_store=True, wall=BACK + 10)
    assert first == (
        "the operator took training back from step 90 to step 40 at 15:46 UTC; steps 80 and 90 of the earlier branch"
        " are on this pod; podwatch keeps step 90 until a new checkpoint of the current branch is verified in the"
        " store",
        "nothing; to return to the earlier branch: `podwatch restart --step 90`",
    )
    later = branch_line([own, *left], line, None, has_store=True, wall=BACK + SHOWN_SECONDS - 60)
    assert later is not None
    assert "from step 90 to step 40 at 2026-01-31 15:46 UTC; steps 80 and 90 of" in later[0]
    assert "keeps" not in later[0]
    pruned = branch_line([own], line, None, has_store=True, wall=BACK + 600)
    assert pruned is not None
    assert pruned[1] == "nothing"
    assert "no checkpoint of the earlier branch is left on this pod" in pruned[0]
    assert branch_line([own, *left], line, None, has_store=True, wall=BACK + SHOWN_SECONDS) is None
    assert branch_line(left, line, 90, has_store=False, wall=BACK + 9 * SHOWN_SECONDS) is not None, "it must stay"


def test_what_podwatch_or_an_older_podwatch_left_is_not_said_to_be_the_operators_act() -> None:
    left = [replace(saved(n, 10), held="left", held_as=HeldAs.EARLIER_BRANCH) for n in range(10, 80, 10)]
    line = Lineage("l1", "l0", 5)
    assert branch_line(left, line, None, has_store=True, wall=BACK) is None
    kept = branch_line(left, line, 70, has_store=False, wall=BACK)
    assert kept is not None
    assert "operator" not in kept[0]
    assert kept[0].startswith(
        "steps 10, 20, 30, ... and 70 of the earlier branch are on this pod; podwatch keeps step 70"
    )
    anew = branch_line(
        left, replace(line, parent_step=None, left_step=70, opened_wall=BACK), None, has_store=True, wall=BACK
    )
    assert anew is not None
    assert "from the beginning at 15:46 UTC, after it had reached step 70" in anew[0]
