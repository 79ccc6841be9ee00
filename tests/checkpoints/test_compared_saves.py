"""A save is compared with the saves around it, inspected once, and never condemned for an inspection that failed."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podwatch.checkpoints.inspection import Inspection
from podwatch.checkpoints.inspector import INSPECTOR, Inspector
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.table import TrainerTable
from tests.drivers.checkpoints import Catalogue, Completeness, catalogue_of, judge, one_reader, open_layout
from tests.support.checkpoints import ManualClock
from tests.support.layout_checks import age
from tests.support.layout_makers import Script, core, run


@pytest.fixture(autouse=True)
def reader() -> Iterator[None]:
    with one_reader():
        yield


class Pod:
    def __init__(self, out: Path) -> None:
        self.out, self.clock = out, ManualClock()
        self.catalogue: Catalogue = catalogue_of(open_layout("hf", out), self.clock, settle=5, settle_weak=60)

    def save(self, step: int, *without: str) -> Path:
        run(core.hf(self.out, step))
        for name in without:
            (self.out / f"checkpoint-{step}" / name).unlink()
        age(self.out / f"checkpoint-{step}", 100)
        return self.out / f"checkpoint-{step}"

    def look(self, *, writers_ended: bool = False) -> dict[int, str]:
        for _ in range(4):
            self.catalogue.rescan(writers_ended=writers_ended)
            self.clock.advance(1000)
        return {s.step: s.completeness.value for s in self.catalogue.rescan(writers_ended=writers_ended)}


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    pod = Pod(tmp_path)
    pod.save(10)
    assert pod.look() == {10: "complete"}
    return pod


EXTRA = "notes.json"


def with_extra(directory: Path) -> None:
    (directory / EXTRA).write_text("{}")
    age(directory, 200)


def test_one_that_differs_is_kept_and_complete_once_a_second_one_agrees(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    with_extra(pod.save(10))
    pod.save(20)
    assert pod.look() == {10: "complete", 20: "writing"}
    (alone,) = [s for s in pod.catalogue.sets if s.step == 20]
    assert alone.unclear, "reported, and never removed"
    assert alone.reason == f"it has 0 files like checkpoint/{EXTRA}, step 10 has 1"
    pod.save(30)
    assert pod.look() == {10: "complete", 20: "complete", 30: "complete"}


def test_one_between_two_that_agree_is_not_whole(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    for step in (10, 20, 30):
        directory = pod.save(step)
        if step != 20:
            with_extra(directory)
    assert pod.look() == {10: "complete", 20: "writing", 30: "complete"}


def test_where_the_end_is_marked_every_second_save_can_have_more(tmp_path: Path) -> None:
    """An export at every second save: what has none of it is whole, too."""
    pod = Pod(tmp_path)
    for step in (10, 20, 30, 40):
        directory = pod.save(step)
        if step in (10, 30):
            with_extra(directory)
        found = pod.look()
    assert set(found.values()) == {"complete"}


def test_where_the_end_is_marked_and_the_writers_ended_it_is_whole(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    with_extra(pod.save(10))
    pod.save(20)
    assert pod.look(writers_ended=True) == {10: "complete", 20: "complete"}
    assert pod.look() == {10: "complete", 20: "complete"}, "and stays so"


RANKS = [f"rng_state_{rank}.pth" for rank in range(4)]


def of_ranks(pod: Pod, step: int, count: int = 4) -> None:
    """A save of four ranks, whose end nothing marks: some of the ranks' files can be missing."""
    directory = pod.save(step, "rng_state.pth")
    script = Script()
    for name in RANKS[:count]:
        script.torch(directory / name)
    run(script.operations)
    age(directory, 100)


def test_where_no_end_is_marked_ended_writers_do_not_make_it_whole(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    for step, count in ((10, 4), (20, 4), (30, 3)):
        of_ranks(pod, step, count)
        found = pod.look(writers_ended=True)
    assert (found[10], found[20]) == ("complete", "complete")
    assert found[30] != "complete"


def test_two_that_were_cut_off_far_apart_do_not_agree(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    found = {}
    for step, count in ((10, 4), (20, 4), (30, 2), (40, 4), (50, 4), (60, 2)):
        of_ranks(pod, step, count)
        found = pod.look()
    assert {step for step, state in found.items() if state == "complete"} == {10, 20, 40, 50}
    assert found[30] == "incomplete", "it holds no room back, and pruning may remove it"
    of_ranks(pod, 70, 2)
    found = pod.look()
    assert {step for step, state in found.items() if state == "complete"} == {10, 20, 40, 50, 60, 70}


def test_writers_that_end_later_make_one_whole_whose_end_is_marked(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    for step in (10, 20):
        with_extra(pod.save(step))
    pod.save(30)
    assert pod.look()[30] == "writing"
    assert pod.look(writers_ended=True)[30] == "complete"


def test_what_was_added_later_is_not_asked_of_the_next_save(pod: Pod) -> None:
    with_extra(pod.out / "checkpoint-10")
    pod.save(20)
    assert pod.look() == {10: "complete", 20: "complete"}


def test_an_unchanged_checkpoint_is_not_inspected_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read when it is found, and once more when it has been unchanged for some seconds."""
    asked: list[int] = []
    real = Inspector.inspect

    def inspect(self: Inspector, table: TrainerTable, step: int, *others: Any) -> Inspection:
        asked.append(step)
        return real(self, table, step, *others)

    monkeypatch.setattr(Inspector, "inspect", inspect)
    pod = Pod(tmp_path)
    for step in range(10, 90, 10):
        pod.save(step)
    assert set(pod.look().values()) == {"complete"}
    assert sorted(asked) == sorted([*range(10, 90, 10)] * 2)
    pod.save(90)
    pod.look()
    assert set(asked[16:]) == {90}


def test_a_child_that_is_killed_condemns_nothing(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    pod.save(20)

    def killed(self: Inspector, _line: bytes, _seconds: float) -> bytes:
        self._started().kill()
        raise OSError("the child ended")

    monkeypatch.setattr(Inspector, "_exchange", killed)
    assert pod.look() == {10: "complete", 20: "writing"}
    (found,) = [s for s in pod.catalogue.sets if s.step == 20]
    assert found.unclear
    monkeypatch.undo()
    assert pod.look() == {10: "complete", 20: "complete"}


def test_one_that_takes_too_long_is_not_read_again_at_once(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    pod.save(20)
    monkeypatch.setattr("podwatch.checkpoints.layout._SLOW", -1.0)
    monkeypatch.setattr("podwatch.checkpoints.layout._PATIENCE", 1e6)
    asked: list[int] = []

    def late(_self: Inspector, _line: bytes, _seconds: float) -> bytes:
        asked.append(1)
        raise TimeoutError

    monkeypatch.setattr(Inspector, "_exchange", late)
    assert pod.look()[20] == Completeness.WRITING.value
    assert len(asked) == 1


def test_a_new_look_reads_again_what_has_the_same_size_and_time(pod: Pod) -> None:
    layout = open_layout("hf", pod.out)
    assert isinstance(layout, Layout)
    assert layout.inspector is INSPECTOR
    found = judge(layout, 10)
    assert found is not None
    assert found.whole
    path = pod.out / "checkpoint-10" / "optimizer.pt"
    before = path.stat()
    path.write_bytes(bytes(before.st_size))

    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    found = judge(layout, 10)
    assert found is not None
    assert found.damaged


def test_what_was_found_complete_stays_so_when_the_one_that_agreed_is_gone(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    with_extra(pod.save(10))
    pod.save(20)
    third = pod.save(30)
    assert pod.look() == {10: "complete", 20: "complete", 30: "complete"}
    third.rename(tmp_path / "aside")
    assert pod.look() == {10: "complete", 20: "complete"}
    assert pod.catalogue.verify(20) == ()
