"""Pods with empty state directories follow each other: the store keeps what it keeps of one pod that lived through all
of it, or more."""

import json
import sys
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from podwatch.config.settings import SyncSettings
from podwatch.domain.lease import (
    MOST_SAVES,
    Claim,
    HandedOverSaves,
    Heartbeat,
    HolderState,
    Pod,
    pins_of,
    read_beat,
)
from podwatch.domain.manifest import Pointer
from podwatch.domain.stored_checkpoint import KnownSaves, PublishedSave
from podwatch.policy.store_retention import (
    earlier_newest,
    handed_over,
    in_order,
    judged,
    milestones,
    plan_remote,
    taken_over,
)
from tests.support.examples import examples

pytestmark = pytest.mark.slow

HOUR, DAY = 3600.0, 86400.0
Key = tuple[int, str]


def signed(said: Heartbeat, writer: str, generation: int) -> bytes:
    return said.signed(Pod(writer), Claim(generation, "n"), HolderState.RUNNING, "").to_bytes()


def saved(step: int, seq: int, wall: float, *, generation: int = 1, lineage: str = "line") -> PublishedSave:
    return PublishedSave(step, f"s{seq}", lineage, generation, seq, "", "", "", 0, 10, wall)


@dataclass
class Journal:
    """What one podwatch knows."""

    writer: str
    generation: int
    lineage: str
    published: dict[Key, PublishedSave] = field(default_factory=dict)
    earlier: list[PublishedSave] = field(default_factory=list)
    pins: dict[int, str] = field(default_factory=dict)
    parent: tuple[int | None] | None = None
    foreign: bytes | None = None
    """The heartbeat of another pod that is not taken over yet."""
    pointer: Pointer | None = None
    """As read when it won the run."""

    def note(self, save: PublishedSave) -> None:
        self.published[save.step, save.save_id] = save

    def prune(self, sync: SyncSettings, now: float, named: Pointer | None, *, alone: bool) -> set[Key]:
        if self.foreign is not None and (beat := read_beat(self.foreign)) is not None and beat.said.pins:
            return set()
        saves = judged(list(self.published.values()), self.earlier, None if alone else self.generation)
        kept = frozenset[Key]()
        if self.parent is not None:
            kept = earlier_newest(saves, self.lineage, self.parent[0])
        plan = plan_remote(
            saves,
            {named.save_id} if named is not None else (),
            self.pins,
            sync,
            now,
            own_generation=None if alone else self.generation,
            kept=kept,
        )
        gone = {(r.step, r.save_id) for r in plan}
        self.published = {key: s for key, s in self.published.items() if key not in gone}
        self.earlier = [s for s in self.earlier if (s.step, s.save_id) not in gone]
        return gone


@dataclass
class Bucket:
    saves: set[Key] = field(default_factory=set)
    pointer: Pointer | None = None
    heartbeat: bytes | None = None


class Story:
    """The same training twice: by one pod, and by pods that follow each other."""

    def __init__(self, sync: SyncSettings) -> None:
        self.sync, self.now, self.step = sync, 1_000_000.0, 0
        self.alone, self.one = Bucket(), Journal("one", 1, "line0")
        self.shared, self.pod = Bucket(), Journal("w1", 1, "line0")
        self.frozen: bytes | None = None
        self.lineages = 0

    def each(self) -> tuple[tuple[Bucket, Journal], ...]:
        return (self.alone, self.one), (self.shared, self.pod)

    def move(self, bucket: Bucket, journal: Journal, save: PublishedSave | None) -> int:
        seq = (bucket.pointer.seq if bucket.pointer is not None else 0) + 1
        bucket.pointer = Pointer(
            generation=journal.generation,
            seq=seq,
            run_id="run",
            lineage=journal.lineage,
            step=None if save is None else save.step,
            manifest_sha1="0" * 40,
            save_id="" if save is None else save.save_id,
            writer_id=journal.writer,
            created_at="",
            host="",
        )
        if save is not None:
            journal.note(replace(save, seq=seq, generation=journal.generation, wall=self.now))
        return seq

    def save(self, seconds: float) -> None:
        self.now += seconds
        self.step += 5
        for bucket, journal in self.each():
            new = saved(self.step, 0, self.now, lineage=journal.lineage)
            new = replace(new, save_id=f"at{self.now:.0f}-{self.step}")
            self.move(bucket, journal, new)
            bucket.saves.add((new.step, new.save_id))
            bucket.saves -= journal.prune(self.sync, self.now, bucket.pointer, alone=bucket is self.alone)

    def back(self, number: int) -> None:
        """Not to a milestone: it gets a new number, and which save is then the first of its block depends on what is
        still there."""
        fixed = milestones(in_order(self.one.published.values()), self.sync.keep_every)
        there = sorted(self.alone.saves - fixed)
        if not there:
            return
        key = there[number % len(there)]
        self.lineages += 1
        for bucket, journal in self.each():
            known = journal.published.get(key)
            if known is None:  # fetched: the store does not show its order
                known = replace(saved(key[0], 0, self.now), save_id=key[1], generation=0, restored=True)
                journal.note(known)
            journal.lineage, journal.parent = f"line{self.lineages}", (key[0],)
            self.move(bucket, journal, known)
        self.step = key[0]

    def fresh(self) -> None:
        self.lineages += 1
        for bucket, journal in self.each():
            journal.lineage, journal.parent = f"line{self.lineages}", (None,)
            self.move(bucket, journal, None)
        self.step = 0

    def pin(self, number: int) -> None:
        there = sorted(self.alone.saves)
        for _, journal in self.each():
            if there:
                journal.pins[there[number % len(there)][0]] = "the best"
        self.beat()  # at once

    def beat(self) -> None:
        pod = self.pod
        if pod.foreign is not None:
            beat = read_beat(pod.foreign)
            assert beat is not None
            pod.pins |= beat.said.pinned
            saves = beat.said.saves
            found = taken_over(saves.taken() if saves is not None else None, pod.pointer, pod.writer)
            pod.earlier = in_order([*pod.earlier, *found])
            pod.foreign = None
        known = handed_over(pod.published.values(), pod.earlier, pod.generation)
        said = Heartbeat(pins=pins_of(pod.pins), saves=None if known is None else HandedOverSaves.of(known))
        self.shared.heartbeat = signed(said, pod.writer, pod.generation)

    def replaced(self) -> None:
        old, pointer = self.pod, self.shared.pointer
        self.frozen = self.shared.heartbeat
        lineage = old.lineage if pointer is None else pointer.lineage
        self.pod = Journal(f"w{old.generation + 1}", old.generation + 1, lineage, pointer=pointer)
        self.pod.foreign = self.shared.heartbeat
        if pointer is not None and pointer.step is not None:
            self.pod.note(
                replace(
                    saved(pointer.step, pointer.seq, self.now, generation=pointer.generation, lineage=lineage),
                    save_id=pointer.save_id,
                    restored=True,
                )
            )

    def woken(self) -> None:
        """A pod that was frozen writes what it was about to write; the holder sees it at its next heartbeat, and
        writes its own, with what was pinned meanwhile."""
        if self.frozen is None:
            return
        self.shared.heartbeat = self.frozen
        self.pod.foreign = self.pod.foreign or self.frozen
        if self.pod.pins:
            self.beat()

    def check(self) -> None:
        missing = self.alone.saves - self.shared.saves
        assert not missing, "one pod would have kept them"
        pointer = self.shared.pointer
        if pointer is not None and pointer.step is not None:
            assert (pointer.step, pointer.save_id) in self.shared.saves


WEIGHTS = {"save": 20, "beat": 12, "replaced": 4, "back": 3, "fresh": 1, "pin": 2, "woken": 1}


def live(story: Story, choice: Random) -> None:
    """Events in an order that ``choice`` makes up; checked after each."""
    for name in choice.choices(list(WEIGHTS), list(WEIGHTS.values()), k=choice.randint(5, 60)):
        match name:
            case "save":
                story.save(choice.choice([60.0, HOUR, HOUR, 7 * HOUR, 2 * DAY, 2 * DAY]))
            case "back":
                story.back(choice.randint(0, 30))
            case "pin":
                story.pin(choice.randint(0, 30))
            case _:
                getattr(story, name)()
        story.check()


@pytest.mark.hypothesis  # its sequences are as many as the profile says
def test_no_sequence_of_pods_deletes_what_one_pod_keeps() -> None:
    for seed in range(examples(4000)):
        choice = Random(seed)
        live(Story(SyncSettings(keep_last=choice.randint(1, 4), keep_every=choice.randint(0, 5))), choice)


def test_the_comparison_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rule that the pointer moved at most once, a save that training went back to is deleted."""

    def careless(known: KnownSaves | None, pointer: Pointer | None, _writer: str) -> tuple[PublishedSave, ...]:
        return () if known is None or pointer is None else known.saves

    monkeypatch.setattr(sys.modules[__name__], "taken_over", careless)
    with pytest.raises(AssertionError, match="one pod would have kept them"):
        test_no_sequence_of_pods_deletes_what_one_pod_keeps()


@pytest.mark.parametrize("saves", [1, 2, 7])
def test_replaced_pods_leave_no_more_than_one_pod_does(saves: int) -> None:
    story = Story(SyncSettings())
    for _ in range(12):
        for _ in range(saves):
            story.save(HOUR)
            story.beat()
        story.replaced()
        story.beat()
        story.check()
    story.save(2 * DAY)
    story.save(2 * DAY)
    assert story.shared.saves == story.alone.saves


# -- what is not certain stays ----------------------------------------------------------------------------------------


def pointer(save: PublishedSave, *, writer: str = "w1") -> Pointer:
    return Pointer(
        generation=save.generation,
        seq=save.seq,
        run_id="run",
        lineage=save.lineage,
        step=save.step,
        save_id=save.save_id,
        manifest_sha1="0" * 40,
        writer_id=writer,
        created_at="",
        host="",
    )


def test_saves_whose_order_is_not_certain_are_not_judged() -> None:
    saves = tuple(saved(n * 5, n, n * HOUR) for n in range(1, 9))
    known = handed_over(saves, (), 1)
    assert known == KnownSaves(1, 8, saves)
    newest = pointer(saves[-1])
    assert taken_over(known, newest, "w2") == saves
    assert taken_over(known, replace(newest, seq=9), "w2")[-1].seq == 9, "it was named again"
    assert taken_over(known, replace(newest, seq=10), "w2") == (), "one of them can have been named again"
    assert taken_over(known, replace(newest, seq=7), "w2") == ()
    assert taken_over(known, replace(newest, generation=2), "w2") == (), "a late heartbeat of an earlier pod"
    assert taken_over(known, newest, "w1") == (), "its own journal knows more"
    assert taken_over(known, None, "w2") == ()
    assert taken_over(None, newest, "w2") == ()
    assert handed_over((), (), 1) is None
    assert handed_over(saves, (), 0) is None
    fetched = replace(saves[0], seq=0)
    assert handed_over([fetched], (), 1) is None
    plan = plan_remote([fetched, *saves[1:]], (), {}, SyncSettings(keep_last=1, keep_every=0), 1000 * HOUR)
    assert fetched.step not in {r.step for r in plan}
    late = handed_over([*saves, saved(45, 9, 0.0, generation=3)], (), 3, since=3, at=(1, 8))
    assert late is not None
    assert [s.seq for s in late.saves] == [8, 9], "another pod held the run in between"
    restored, own = [replace(saves[-1], restored=True)], saved(45, 9, 0.0, generation=2)
    assert judged(restored, saves, 2) == restored
    assert len(judged([*restored, own], saves, 2)) == 10
    assert len(judged([*restored, own], saves, 3)) == 2, "stored before another pod held the run"
    assert len(judged([*restored, replace(own, seq=1)], saves, 2)) == 2, "the numbers began again"


def test_a_list_that_is_wrong_anywhere_is_not_used() -> None:
    saves = tuple(saved(n * 5, n, n * HOUR) for n in range(1, 4))
    known = handed_over(saves, (), 1)
    assert known is not None
    right = json.loads(signed(Heartbeat(saves=HandedOverSaves.of(known)), "w1", 1))

    def read(**changes: object) -> KnownSaves | None:
        listed = [right["saves"]["known"][0] | changes, *right["saves"]["known"][1:]]
        beat = read_beat(json.dumps(right | {"saves": right["saves"] | {"known": listed}}).encode())
        assert beat is not None
        not_json = any(value != value for value in changes.values())
        assert beat.said.readable != not_json, "the rest of the heartbeat is believed"
        return None if beat.said.saves is None else beat.said.saves.taken()

    assert read() == known
    assert read(save_id="../../other") is None
    assert read(save_id="") is None
    assert read(step=-1) is None
    assert read(step="5") is None
    assert read(seq=0) is None
    assert read(seq=4) is None, "after the newest"
    assert read(generation=2) is None
    assert read(stored_wall=0) is None
    assert read(stored_wall=None) is None
    assert read(stored_wall=float("nan")) is None
    many = KnownSaves(1, 1000, tuple(saved(n, n, 1.0) for n in range(1, 1001)))
    assert len(HandedOverSaves.of(many).known) == MOST_SAVES
