"""A trainer that saves for ever on a disk that holds only a few of its saves: it never meets a full disk.

On a real small filesystem (tmpfs, needs root); elsewhere the disk is made small by its configured capacity.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podwatch.disk import prune
from podwatch.disk.plan import RemovalKind
from podwatch.domain.checkpoint import newest_complete
from podwatch.domain.errors import Busy
from podwatch.domain.event import EventName
from tests.support.checkpoints import broadcast_operations, finish, prime_rl_operations, write_rollouts
from tests.support.mounts import small_mount
from tests.support.small_disk import Guard, guarded

pytestmark = pytest.mark.slow

MIB = 1 << 20
DISK = 24 * MIB
SHARD = 2 * MIB
INTERVAL = 4


class Trainer(threading.Thread):
    """Broadcasts and rollouts at every step, a save at every fourth; stops at the first error, as a trainer does.

    ``settled`` is asked before and after each save: the half hour between two of a trainer's saves becomes "until the
    guard has looked".
    """

    def __init__(self, out: Path, variant: str, steps: int, settled: Callable[[int, float], bool]) -> None:
        super().__init__(daemon=True)
        self.out, self.variant, self.steps, self.settled = out, variant, steps, settled
        self.error: OSError | None = None
        self.written = 0
        self.step = 0

    def run(self) -> None:
        own = self.out / "run_default" if self.variant == "A" else self.out
        try:
            for step in range(1, self.steps + 1):
                self.step = step
                write_rollouts(self.out, step, self.variant)
                if step % INTERVAL:
                    finish(broadcast_operations(own / "broadcasts" / f"step_{step}", MIB // 4))
                    self.written += MIB // 4
                    continue
                self.pause(step - INTERVAL)
                finish(prime_rl_operations(self.out, step, self.variant, size=SHARD, weights=True))
                self.written += 2 * SHARD
                self.pause(step)
        except OSError as error:
            self.error = error

    def pause(self, saved: int) -> None:
        began = time.monotonic()
        while not self.settled(saved, began):
            if time.monotonic() - began > 30.0:
                raise OSError(f"after 30 s the guard has not settled step {saved}")
            time.sleep(0.005)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[Path, int | None]]:
    """A directory on a disk of 24 MiB, and the capacity to configure where it could not be mounted."""
    mount = tmp_path / "disk"
    with small_mount(mount, DISK) as mounted:
        yield mount, None if mounted else DISK


async def trained(guard: Guard, variant: str, steps: int) -> tuple[Trainer, list[int]]:
    """Run it to its end; the newest complete steps as seen meanwhile."""
    trainer = Trainer(guard.out, variant, steps, guard.settled)
    trainer.start()
    newest = []
    try:
        while trainer.is_alive():
            found = newest_complete(guard.catalogue.sets)
            newest.append(found.step if found is not None else 0)
            if found is not None:
                required = [Path(p.path) for p in found.parts if p.required]
                assert all(p.is_dir() for p in required), f"the newest complete set {found.step} lost a part"
            await asyncio.sleep(0.02)
    finally:
        trainer.steps = 0
        trainer.join(5.0)
    return trainer, newest


@pytest.mark.parametrize(("limit", "variant"), [("disk", "A"), ("disk", "B"), ("capacity", "A")])
async def test_never_full_while_the_store_keeps_up(
    small: tuple[Path, int | None], tmp_path: Path, variant: str, limit: str
) -> None:
    root, capacity = small
    if limit == "capacity":
        root, capacity = tmp_path / "quota", DISK
        root.mkdir()
    async with guarded(root, tmp_path, capacity, store=True, variant=variant) as guard:
        trainer, newest = await trained(guard, variant, steps=44)
        assert trainer.error is None, f"step {trainer.step}: {trainer.error}"
        assert trainer.written > 1.9 * DISK, "it wrote twice what the disk holds"
        assert newest == sorted(newest), "the newest complete step never goes back"
        assert sum(guard.workspace.tree.measure(p)[0] for p in guard.out.iterdir()) < DISK
        kinds = {str(e.fields["kind"]) for e in guard.events if e.name is EventName.PRUNED}
        assert RemovalKind.UNSTORED not in kinds
        assert {RemovalKind.BY_PRODUCT, RemovalKind.STORED} <= kinds
        assert not [e.text for e in guard.events if e.name is EventName.PRUNE_STUCK]


async def test_without_a_store_the_oldest_go_and_the_newest_stays(
    small: tuple[Path, int | None], tmp_path: Path
) -> None:
    root, capacity = small
    async with guarded(root, tmp_path, capacity, store=False, variant="A") as guard:
        trainer, newest = await trained(guard, "A", steps=28)
        assert trainer.error is None, f"step {trainer.step}: {trainer.error}"
        assert newest == sorted(newest)
        gone = [
            int(str(e.fields["step"]))
            for e in guard.events
            if e.name is EventName.PRUNED and e.fields["kind"] == RemovalKind.UNSTORED
        ]
        assert gone
        assert gone == sorted(gone)


async def test_a_plan_does_not_outlive_what_it_was_made_from(small: tuple[Path, int | None], tmp_path: Path) -> None:
    """Between the plan and each removal training may have been started from one of its steps (promise 2)."""
    root, capacity = small
    guard = Guard(root, tmp_path, capacity, store=False, variant="A")
    await guard.disk.start()
    try:
        for step in (5, 10, 15, 20):
            finish(prime_rl_operations(guard.out, step, "A", size=SHARD, weights=True))
        (guard.out / "ballast").write_bytes(b"x" * (DISK - 8 * SHARD - 3 * MIB))
        await wait_until(lambda: len([s for s in guard.catalogue.rescan() if s.complete]) == 4)
        await guard.rescans.rescan()
        await wait_until(lambda: guard.disk.latest().ok)
        planned = guard.pruner.plan()
        going = [r.step for r in planned.removals if r.kind is RemovalKind.UNSTORED]
        assert going[:1] == [5]
        guard.resume_sources = {5}
        await guard.pruner._carry_out(planned)
        guard.catalogue.rescan()
        assert 5 in {s.step for s in guard.catalogue.sets if s.complete}
        going = [r.step for r in guard.pruner.plan().removals if r.kind is RemovalKind.UNSTORED]
        assert going[:1] == [10]
        planned, guard.pins = guard.pruner.plan(), {10: "by hand"}
        await guard.pruner._carry_out(planned)
        guard.catalogue.rescan()
        assert {5, 10} <= {s.step for s in guard.catalogue.sets if s.complete}
        guard.held = "training is being started"
        with pytest.raises(Busy, match="podwatch deletes nothing now"):
            await guard.pruner.prune_now()
    finally:
        await guard.close()


async def test_nothing_is_deleted_by_a_look_at_the_disk_from_before_the_last_removal(
    small: tuple[Path, int | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an operator who prunes twice loses checkpoints for space that is free already (promise 2)."""
    root, capacity = small
    guard = Guard(root, tmp_path, capacity, store=False, variant="A")
    await guard.disk.start()
    try:
        for step in (5, 10, 15, 20):
            finish(prime_rl_operations(guard.out, step, "A", size=SHARD, weights=True))
        (guard.out / "ballast").write_bytes(b"x" * (DISK - 8 * SHARD - 3 * MIB))
        await wait_until(lambda: len([s for s in guard.catalogue.rescan() if s.complete]) == 4)
        await guard.rescans.rescan()
        await wait_until(lambda: guard.disk.latest().ok)
        before = guard.facts().pod
        monkeypatch.setattr(prune, "DISK_ANSWER_SECONDS", 0.5)
        monkeypatch.setattr(guard, "pod", lambda: before)
        assert (await guard.pruner.prune_now()).removals
        left = [s.step for s in guard.catalogue.rescan() if s.complete]
        with pytest.raises(Busy, match="has not read the disk"):
            await guard.pruner.prune_now()
        monkeypatch.undo()
        await guard.pruner.prune_now()
        assert [s.step for s in guard.catalogue.rescan() if s.complete] == left
    finally:
        await guard.close()


async def test_what_a_symlink_names_stays(small: tuple[Path, int | None], tmp_path: Path) -> None:
    root, capacity = small
    guard = Guard(root, tmp_path, capacity, store=False, variant="A")
    await guard.disk.start()
    try:
        for step in (5, 10, 15, 20):
            finish(prime_rl_operations(guard.out, step, "A", size=SHARD, weights=True))
        checkpoints = guard.out / "checkpoints"
        (checkpoints / "best").symlink_to("step_5")
        (checkpoints / "dangling").symlink_to("step_99")
        (guard.out / "eval-me").symlink_to(checkpoints / "step_10" / "trainer")
        await wait_until(lambda: len([s for s in guard.catalogue.rescan() if s.complete]) == 4)
        (guard.out / "ballast").write_bytes(b"x" * (DISK - 8 * SHARD - 3 * MIB))
        await guard.rescans.rescan()
        assert guard.rescans.named == {5: "the symlink best", 10: "the symlink eval-me"}
        at = guard.disk.latest().at
        await wait_until(lambda: guard.disk.latest().ok)
        for _ in range(100):
            if guard.disk.latest().at > at:
                break
            await asyncio.sleep(0.05)
        gone = {r.step for r in guard.pruner.plan().removals if not r.path}
        assert gone == {15}
        told = {k.step: k.reason for k in guard.pruner.plan().remaining}
        assert told[5] == "pinned: the symlink best"
    finally:
        await guard.close()


async def test_what_would_free_nothing_stays(small: tuple[Path, int | None], tmp_path: Path) -> None:
    """An export that is made of hard links to the oldest checkpoint, as `cp -rl` makes it; no store."""
    root, capacity = small
    async with guarded(root, tmp_path, capacity, store=False, variant="B") as guard:
        for step in (5, 10, 15):
            finish(prime_rl_operations(guard.out, step, "B", size=SHARD))
        await wait_until(lambda: len([s for s in guard.catalogue.sets if s.complete]) == 3)
        for path in [p for p in (guard.out / "checkpoints" / "step_5").rglob("*") if p.is_file()]:
            copy = root / "export" / path.relative_to(guard.out)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.hardlink_to(path)
        used = sum(guard.workspace.tree.measure(p)[0] for p in guard.out.iterdir())
        (guard.out / "ballast").write_bytes(b"x" * (DISK - used - MIB // 8))  # room only if broadcasts and one more go
        await wait_until(lambda: {e.fields["step"] for e in guard.events if e.name is EventName.PRUNED} == {None, 10})
        assert sorted(p.name for p in (guard.out / "checkpoints").glob("step_*")) == ["step_15", "step_5"]


async def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.05)
