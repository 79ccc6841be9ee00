"""What files of the trainer name is known after each look, and kept from removal."""

import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path

from podwatch.app.rescans import KEPT, Announced, Rescans
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.shapes import Site
from podwatch.checkpoints.trainer import all_trainers
from podwatch.checkpoints.trainers import layout_of
from podwatch.domain.checkpoint import CheckpointSet, Completeness
from podwatch.domain.event import Event
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import SystemClock
from tests.support.layout_makers import run
from tests.support.layout_makers.core import TRACKER, verl_fsdp


async def test_the_trainers_own_pins_are_read_with_every_look(tmp_path: Path) -> None:
    run(verl_fsdp(tmp_path, 10))
    layout, clock, worker = layout_of(all_trainers()["verl"], Site(tmp_path)), SystemClock(), Worker("looks")
    refuse, refreshed = False, list[str]()

    class Watching:
        def refresh(self) -> None:
            refreshed.append(threading.current_thread().name)
            if refuse:
                raise PermissionError(13, "Permission denied")

    catalogue = Catalogue(layout, clock, settle=0.0, settle_weak=0.0)
    rescans = Rescans(catalogue, worker, clock, lambda _event: None, Announced(), seconds=10.0)
    rescans.watcher = Watching()  # type: ignore[assignment]
    try:
        assert [s.step for s in await rescans.rescan()] == [10]
        assert rescans.named == {10: f"named by {TRACKER}"}
        assert refreshed == ["podwatch-looks"], "never on the loop: the trainer's disk may hang"
        refuse = True
        await rescans.rescan()
        assert "Permission denied" in rescans.blind
        assert rescans.named == {10: f"named by {TRACKER}"}
    finally:
        worker.close()


class Shelf:
    """Stands for the catalogue: what each look finds."""

    problem = ""

    def __init__(self) -> None:
        self.sets: tuple[CheckpointSet, ...] = ()
        self.layout = layout_of(all_trainers()["verl"], Site(Path("/nowhere")))

    def watch_dirs(self) -> tuple[Path, ...]:
        return ()

    def rescan(self, *, writers_ended: bool = False, list_again: bool = False) -> tuple[CheckpointSet, ...]:
        return self.sets


def a_set(step: int, save_id: str = "", completeness: Completeness = Completeness.COMPLETE) -> CheckpointSet:
    whole = completeness is Completeness.COMPLETE
    return CheckpointSet(step, "x", completeness, (), 1, 1, 1000.0 + step, (save_id or f"id{step}") if whole else "")


class Podwatches:
    """One podwatch after the other, with one journal."""

    def __init__(self) -> None:
        self.journal: object = None
        self.shelf = Shelf()
        self.told: list[Event] = []
        self.worker = Worker("looks")

    def start(self) -> Callable[..., Awaitable[list[str]]]:
        """A new podwatch; the call lets it look at these sets, and returns what it announces."""
        rescans = Rescans(
            self.shelf,  # type: ignore[arg-type]
            self.worker,
            SystemClock(),
            self.told.append,
            Announced(self),  # type: ignore[arg-type]
            seconds=10.0,
        )

        async def look(*sets: CheckpointSet) -> list[str]:
            self.told.clear()
            self.shelf.sets = sets
            await rescans.rescan()
            return [f"{event.name} {event.fields['step']}" for event in self.told]

        return look

    @property
    def sync(self) -> "Podwatches":
        """Stands for the journal."""
        return self

    def learned(self, _key: str) -> object:
        return self.journal

    def post(self, _learn: object, _key: str, known: object) -> None:
        self.journal = json.loads(json.dumps(known))


async def test_a_checkpoint_is_announced_once_however_often_podwatch_starts() -> None:
    pods = Podwatches()
    look = pods.start()
    assert await look(a_set(5), a_set(10)) == ["checkpoint-complete 10"], "of what was there only the newest"
    assert await look(a_set(5), a_set(10), a_set(15)) == ["checkpoint-complete 15"]
    for _ in range(2):
        look = pods.start()
        assert await look(a_set(5), a_set(10), a_set(15)) == []
        unsettled = replace(a_set(15), completeness=Completeness.WRITING, save_id="")
        assert await look(a_set(5), a_set(10), unsettled) == []
        assert await look(a_set(5), a_set(10), a_set(15)) == [], "it only had to settle again"


async def test_what_is_new_is_announced_after_a_restart_too() -> None:
    pods = Podwatches()
    await pods.start()(a_set(5), a_set(10))
    look = pods.start()
    assert await look(a_set(5), a_set(10), a_set(15)) == ["checkpoint-complete 15"], "saved while no podwatch ran"
    look = pods.start()
    assert await look(a_set(5), a_set(10), a_set(15, "another")) == ["checkpoint-complete 15"], "saved again"
    assert await look(a_set(5), a_set(10)) == ["checkpoint-gone 15"]
    assert await look(a_set(5), a_set(10), a_set(15, "another")) == ["checkpoint-complete 15"], "restored"


async def test_damage_is_announced_once_too() -> None:
    pods = Podwatches()
    await pods.start()(a_set(5), a_set(10))
    broken = a_set(10, completeness=Completeness.DAMAGED)
    look = pods.start()
    assert await look(a_set(5), broken) == ["checkpoint-damaged 10"], "while no podwatch ran"
    assert await look(a_set(5), broken) == []
    look = pods.start()
    assert await look(a_set(5), broken) == []
    assert await look(a_set(5), a_set(10)) == ["checkpoint-complete 10"]


async def test_what_the_journal_keeps_is_bounded_and_a_strange_journal_is_no_problem() -> None:
    pods = Podwatches()
    await pods.start()(*(a_set(step) for step in range(KEPT + 5)))
    assert isinstance(pods.journal, dict)
    steps = [key for key in pods.journal if key.isdecimal()]
    assert (len(steps), str(KEPT + 4) in steps, "0" in steps) == (KEPT, True, False)
    several: tuple[object, ...] = ([], "x", {"a": 1, "-1": "x", "10": 7})
    for strange in several:
        pods.journal = strange
        assert await pods.start()(a_set(10)) == ["checkpoint-complete 10"]


MANY = tuple(a_set(step) for step in range(KEPT + 50))


def writing(sets: Iterable[CheckpointSet]) -> tuple[CheckpointSet, ...]:
    """As the first look after a start finds them."""
    return tuple(replace(found, completeness=Completeness.WRITING, save_id="") for found in sets)


async def test_more_checkpoints_than_the_journal_keeps_are_reported_once_over_restarts() -> None:
    pods = Podwatches()
    await pods.start()(*MANY)
    for _ in range(3):
        look = pods.start()
        assert await look(*writing(MANY)) == []
        assert await look(*MANY) == [], "the oldest are reported again"
        assert await look(*MANY) == []


async def test_of_what_is_there_at_the_first_start_only_the_newest_is_reported_once_it_has_settled() -> None:
    pods = Podwatches()
    look = pods.start()
    there, last = (a_set(5), a_set(10)), a_set(15)
    assert await look(*writing((*there, last))) == []
    assert await look(*there, *writing([last])) == ["checkpoint-complete 10"]
    assert pods.told[0].message.startswith("checkpoint of step 10 found")
    assert await look(*there, last) == ["checkpoint-complete 15"]
    look = pods.start()
    assert await look(*writing((*there, last, a_set(20), a_set(25)))) == []
    assert await look(*there, last, a_set(20), a_set(25)) == ["checkpoint-complete 25"], "of several saved meanwhile"
    during = replace(a_set(5, "again"), changed_wall=time.time() + 5)
    assert await look(during, *there[1:], last, a_set(20), a_set(25)) == ["checkpoint-complete 5"]


async def test_a_checkpoint_below_those_kept_that_is_saved_again_is_reported() -> None:
    """Training went back to an early step: its saves have low numbers, and are new."""
    pods = Podwatches()
    await pods.start()(*MANY)
    later = time.time() + 60
    again = replace(a_set(3, "another"), changed_wall=later)
    between = (*MANY[:3], again, *MANY[4:])
    look = pods.start()
    await look(*writing(between))
    assert await look(*between) == ["checkpoint-complete 3"]
    another = replace(a_set(7, "other"), changed_wall=later)
    assert await look(*between[:7], another, *between[8:]) == ["checkpoint-complete 7"]


async def test_a_checkpoint_below_those_kept_that_is_restored_is_reported() -> None:
    pods = Podwatches()
    await pods.start()(*MANY)
    look = pods.start()
    await look(*MANY)
    assert await look(*MANY[1:]) == ["checkpoint-gone 0"]
    assert await look(*MANY) == ["checkpoint-complete 0"]


async def test_what_is_left_of_a_deleted_checkpoint_is_reported_as_gone_once_over_restarts() -> None:
    pods = Podwatches()
    await pods.start()(a_set(5), a_set(10))
    left = replace(a_set(10, completeness=Completeness.INCOMPLETE), remainder=True)
    look = pods.start()
    assert await look(a_set(5), *writing([a_set(10)])) == []
    assert await look(a_set(5), left) == ["checkpoint-gone 10"]
    assert await look(a_set(5), left) == []
    assert await look(a_set(5)) == []
    look = pods.start()
    assert await look(a_set(5), left) == []
    assert await look(a_set(5), a_set(10)) == ["checkpoint-complete 10"], "put back"
