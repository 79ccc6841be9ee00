"""Removal on a real file system, with crashes at every point."""

import errno
import os
from pathlib import Path

import pytest

import podwatch.disk.remove as remover_module
from podwatch.disk.leftovers import quarantine_entries, trash_entries
from podwatch.disk.plan import Removal, RemovalKind, RemovalPlan
from podwatch.disk.remove import Remover, move_to_trash, removable
from podwatch.domain.event import Event, EventName
from podwatch.domain.quarantine_index import QuarantineIndex
from podwatch.system.clock import SystemClock
from podwatch.system.own_directories import Workspace


class Pod:
    def __init__(self, tmp: Path) -> None:
        self.out = tmp / "outputs"
        self.workspace = Workspace(self.out)
        for directory in (self.out, self.workspace.trash, self.workspace.quarantine):
            directory.mkdir(parents=True)
        self.events: list[Event] = []
        self.remover = self.fresh()

    def fresh(self) -> Remover:
        return Remover(self.workspace, SystemClock(), self.events.append)

    def save(self, step: int) -> None:
        for path in self.paths(step):
            path.mkdir(parents=True)
            (path / "data.bin").write_bytes(b"x" * 8192)

    def paths(self, step: int) -> tuple[Path, ...]:
        return (
            self.out / "checkpoints" / f"step_{step}",
            self.out / "run_default" / "checkpoints" / f"step_{step}",
            self.out / "weights" / f"step_{step}",
        )

    def there(self, step: int) -> list[bool]:
        return [p.exists() for p in self.paths(step)]


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


def plan(*removals: Removal) -> RemovalPlan:
    return RemovalPlan(removals)


def whole(step: int, kind: RemovalKind = RemovalKind.STORED) -> Removal:
    return Removal(kind, 3 * 8192, "in the store", step)


def test_a_set_goes_with_all_its_parts(pod: Pod) -> None:
    pod.save(5)
    pod.save(10)
    report = pod.remover.carry_out(plan(whole(5)), pod.paths)
    assert report.problems == ()
    assert report.freed_bytes >= 3 * 8192
    assert pod.there(5) == [False] * 3
    assert pod.there(10) == [True] * 3
    assert trash_entries(pod.workspace.tree, pod.workspace.trash) == ()
    assert [(e.name, e.fields["step"]) for e in pod.events] == [(EventName.PRUNED, 5)]


def test_what_someone_else_removed_is_fine(pod: Pod) -> None:
    report = pod.remover.carry_out(plan(whole(5)), pod.paths)
    assert (report.done, report.problems, pod.events) == ((), (), [])


class Crash(BaseException):
    """Nothing in the code under test may catch it: the process is gone."""


@pytest.mark.parametrize("point", range(5))
def test_a_crash_at_any_point_leaves_a_whole_set_or_none(pod: Pod, monkeypatch: pytest.MonkeyPatch, point: int) -> None:
    """Points: three renames, delete, one after the end."""
    pod.save(5)
    calls = 0

    def dying(original):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            nonlocal calls
            if calls == point:
                raise Crash
            calls += 1
            return original(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(remover_module, "move_to_trash", dying(move_to_trash))
        patch.setattr(remover_module, "_delete", dying(remover_module._delete))
        patch.setattr(remover_module.threading, "Thread", Inline)
        try:
            pod.remover.carry_out(plan(whole(5)), pod.paths)
        except Crash:
            pass
    if pod.there(5)[0]:
        assert pod.there(5) == [True] * 3, "the part that decides completeness is still there: so is the rest"
    pod.fresh().sweep_trash()
    assert pod.there(5)[0] is (point == 0), "the rest of what lost its first part is an incomplete checkpoint"
    assert trash_entries(pod.workspace.tree, pod.workspace.trash) == ()
    assert pod.fresh().carry_out(plan(whole(5, RemovalKind.INCOMPLETE)), pod.paths).problems == ()
    assert pod.there(5) == [False] * 3


class Inline:
    def __init__(self, *, target, args, name, daemon):  # type: ignore[no-untyped-def]
        self._target, self._args = target, args

    def start(self) -> None:
        self._target(*self._args)

    def join(self) -> None:
        pass


def test_what_an_error_left_is_reported_and_goes_with_the_next_plan(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    pod.save(5)

    def refusing(path: Path, *args, **kwargs):  # type: ignore[no-untyped-def]
        if "weights" in path.parts:
            raise OSError(errno.EIO, "input/output error", str(path))
        return move_to_trash(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(remover_module, "move_to_trash", refusing)
        report = pod.remover.carry_out(plan(whole(5)), pod.paths)
    assert len(report.problems) == 1
    assert [e.name for e in pod.events] == [EventName.PRUNED, EventName.PRUNE_STUCK]
    assert pod.there(5) == [False, False, True]
    pod.remover.carry_out(plan(whole(5, RemovalKind.INCOMPLETE)), pod.paths)
    assert pod.there(5) == [False] * 3


def test_nothing_outside_the_roots_and_nothing_behind_a_symlink(pod: Pod, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    (foreign / "step_5").mkdir(parents=True)
    (foreign / "step_5" / "keep").write_text("mine")
    report = pod.remover.carry_out(plan(whole(5)), lambda _: (foreign / "step_5",))
    assert len(report.problems) == 1
    (pod.out / "checkpoints").symlink_to(foreign)
    report = pod.remover.carry_out(plan(whole(5)), lambda _: (pod.out / "checkpoints" / "step_5",))
    assert len(report.problems) == 1
    dotted = pod.out / ".." / "foreign" / "step_5"
    assert len(pod.remover.carry_out(plan(whole(5)), lambda _: (dotted,)).problems) == 1
    assert (foreign / "step_5" / "keep").read_text() == "mine"


def test_a_step_that_is_a_symlink_loses_the_link_only(pod: Pod, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "keep").write_text("mine")
    link = pod.out / "step_5"
    link.symlink_to(foreign)
    inside = pod.out / "step_6"
    inside.mkdir()
    (inside / "latest").symlink_to(foreign)
    steps = {5: (link,), 6: (inside,)}
    assert pod.remover.carry_out(plan(whole(5), whole(6)), lambda s: steps[s]).problems == ()
    assert not os.path.lexists(link)
    assert not inside.exists()
    assert (foreign / "keep").read_text() == "mine"


def test_the_root_itself_is_never_removed(pod: Pod) -> None:
    with pytest.raises(Exception, match="outside the configured"):
        removable(pod.out, pod.workspace)


def test_a_root_reached_through_a_symlink_works(pod: Pod, tmp_path: Path) -> None:
    pod.save(5)
    alias = tmp_path / "alias"
    alias.symlink_to(pod.out)
    remover = Remover(Workspace(alias).probe(), SystemClock(), pod.events.append)
    report = remover.carry_out(plan(whole(5)), lambda _: (alias / "checkpoints" / "step_5",))
    assert report.problems == ()
    assert pod.there(5)[0] is False


def test_an_optional_part_goes_alone(pod: Pod) -> None:
    pod.save(5)
    weights = pod.paths(5)[2]
    part = Removal(RemovalKind.OPTIONAL_PART, 8192, "a resume does not need it", 5, str(weights), "weights")
    pod.remover.carry_out(plan(part), pod.paths)
    assert pod.there(5) == [True, True, False]


def test_many_small_removals_are_told_in_one_line(pod: Pod) -> None:
    for step in (5, 10):
        pod.save(step)
    parts = [
        Removal(RemovalKind.OPTIONAL_PART, 4096, "a resume does not need it", step, str(pod.paths(step)[2]), "weights")
        for step in (5, 10)
    ]
    pod.remover.carry_out(plan(*parts), pod.paths)
    (told,) = pod.events
    assert told.fields["count"] == 2
    assert "2 parts that a resume does not need of steps 5 to 10" in told.message


def test_names_that_are_taken_in_the_trash(pod: Pod) -> None:
    pod.save(5)
    left = pod.workspace.trash / "1.5.0"
    left.mkdir()
    (left / "file").write_text("older")
    move_to_trash(pod.paths(5)[0], pod.workspace, pod.workspace.trash, "1.5.0", expected=None)
    assert len(trash_entries(pod.workspace.tree, pod.workspace.trash)) == 2


def test_quarantine_expires_but_never_while_it_is_needed(pod: Pod) -> None:
    for number, (wall, steps) in enumerate([(0.0, {40: "complete"}), (0.0, {45: "incomplete"})], 1):
        directory = pod.workspace.quarantine / str(number)
        directory.mkdir()
        (directory / "index.json").write_bytes(QuarantineIndex(number, wall, steps=steps).to_bytes())
    (pod.workspace.quarantine / "3").mkdir()
    (pod.workspace.quarantine / ".spare").mkdir()

    def entries(now: float, successor: int) -> list[tuple[int, bool, bool]]:
        found = quarantine_entries(pod.workspace, now_wall=now, keep_seconds=100.0, verified=successor)
        return [(e.step, e.expired, e.needed) for e in found]

    assert entries(50.0, 0) == [(40, False, True), (45, False, False), (-1, False, True)]
    assert entries(150.0, 40) == [(40, True, False), (45, True, False), (-1, False, True)]
    expired = quarantine_entries(pod.workspace, now_wall=150.0, keep_seconds=100.0, verified=1 << 62)[0]
    removal = Removal(RemovalKind.QUARANTINE, expired.bytes, "expired", path=expired.path)
    assert pod.remover.carry_out(plan(removal), pod.paths).problems == ()
    assert sorted(p.name for p in pod.workspace.quarantine.iterdir()) == [".spare", "2", "3"]


def test_what_came_into_use_after_the_plan_was_made_stays(pod: Pod) -> None:
    for step in (5, 10, 15):
        pod.save(step)
    in_use: set[int] = set()

    def veto(removal: Removal) -> str:
        reason = "being resumed from" if removal.step in in_use else ""
        in_use.add(10)  # while the first one is being removed, training is started from the second
        return reason

    report = pod.remover.carry_out(plan(whole(5), whole(10), whole(15)), pod.paths, veto)
    assert [r.step for r in report.done] == [5, 15]
    assert pod.there(10) == [True, True, True]
