"""A real trainer process that saves for ever on a real small file system, in the user's proportions: 250 GB, of which
91 are others' and each save takes 47, so that 65 are free beside two sets. It never meets a full disk, whatever the
store does.

Scaled by 32 KiB for a GB. `make test-disk` runs it for hundreds of saves.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from podwatch.disk.plan import RemovalKind
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.event import EventName
from tests.support.mounts import small_mount
from tests.support.small_disk import Guard, guarded

pytestmark = pytest.mark.slow

GB = 32 * 1024
DISK, OTHERS, SAVE = 250 * GB, 91 * GB, 47 * GB
SAVES = int(os.environ.get("PODWATCH_DISK_SAVES", "8"))
TICKS = 6
"""Rounds of the guard between two saves. On the pod it is 120: a rescan every 10 s, a save every 20 minutes."""


class Line:
    """A store behind a line: it takes the newest set, one at a time, in so many ticks, and nothing while it is down.
    Reads each set's files as an upload would, and gives it up when one is gone."""

    def __init__(self, ticks: int, down: tuple[int, int]) -> None:
        self.ticks, self.down = ticks, down
        self.have: set[tuple[int, str]] = set()
        self.sending: CheckpointSet | None = None
        self.since = self.now = 0
        self.abandoned: list[int] = []

    def stored(self) -> frozenset[tuple[int, str]]:
        return frozenset(self.have)

    def uploading(self) -> int | None:
        return self.sending.step if self.sending is not None else None

    async def abandon(self, step: int) -> None:
        self.abandoned.append(step)
        self.sending = None

    def tick(self, newest: CheckpointSet | None) -> None:
        self.now += 1
        if self.down[0] <= self.now < self.down[1]:
            self.since += 1
            return
        if self.sending is None:
            if newest is not None and (newest.step, newest.save_id) not in self.have:
                self.sending, self.since = newest, self.now
            return
        if any(not Path(p.path).is_dir() for p in self.sending.parts if p.required):
            self.sending = None  # the trainer was faster
        elif self.now - self.since >= self.ticks:
            self.have.add((self.sending.step, self.sending.save_id))
            self.sending = None


@dataclass
class Run:
    report: dict[str, Any]
    code: int
    newest: list[int]
    line: Line
    guard: Guard


async def run(guard: Guard, root: Path, report: Path, line: Line, *, others: int = 0, **how: Any) -> Run:
    settings = {
        "out": str(guard.out), "report": str(report), "saves": SAVES, "ticks": TICKS, "size": SAVE, "keep_last": None,
        "burst": 0, "links": "", **how,
    }  # fmt: skip
    (root / "others").write_bytes(b"x" * (others or OTHERS))
    guard.uploads = line
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.saving_process", stdin=asyncio.subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(json.dumps(settings).encode() + b"\n")
    newest: list[int] = []
    async for _ in turns(guard):
        if process.returncode is not None:
            break
        found = guard.newest()
        if found is not None:
            newest.append(found.step)
            required = [Path(p.path) for p in found.parts if p.required]
            # The trainer's own retention may be quicker than a look; where it has none, nobody else deletes.
            whole = all(p.is_dir() for p in required)
            assert whole or how.get("keep_last"), f"the newest complete set {found.step} lost a part"
        line.tick(found)
        try:
            process.stdin.write(b"\n")
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            break
    code = await process.wait()
    return Run(json.loads(report.read_text()), code, newest, line, guard)


async def turns(guard: Guard) -> AsyncIterator[None]:
    """Each is a whole round of the guard: checkpoints and disk looked at, what had to go removed."""
    while True:
        at, plan = guard.disk.latest().at, guard.pruner.last_plan
        while guard.disk.latest().at == at or (guard.pruner.last_plan is plan and plan is not None):
            await asyncio.sleep(0.003)
        yield


def unsynced(found: Run) -> list[int]:
    return [
        int(str(e.fields["step"]))
        for e in found.guard.events
        if e.name is EventName.PRUNED and e.fields["kind"] == RemovalKind.UNSTORED
    ]


def check(found: Run) -> None:
    """Promise 2, and that nothing went unsaid."""
    assert found.code == 0, found.report
    assert found.report["written"] == SAVES
    assert found.newest == sorted(found.newest), "the newest complete step never goes back"
    gone = set(unsynced(found))
    safe = {step for step, _ in found.line.have}
    left = {s.step for s in found.guard.catalogue.sets if s.complete}
    told = {int(str(e.fields["step"])) for e in found.guard.events if e.name is EventName.PRUNED and e.fields["step"]}
    assert not gone & safe, "what was in the store is not told as unsynced"
    assert gone | safe | left >= told, "each removal is told, and as what it was"


@pytest.fixture
def disk(tmp_path: Path) -> Any:
    with small_mount(tmp_path / "disk", DISK) as mounted:
        if not mounted:
            pytest.skip("mounting a tmpfs is not allowed here")
        yield tmp_path / "disk"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("fast", Line(2, (0, 0))),
        ("slow", Line(2 * TICKS + 3, (0, 0))),
        ("down", Line(2, (12, 12 + TICKS * SAVES // 2))),
    ],
)
async def test_a_trainer_that_never_deletes_never_meets_a_full_disk(
    disk: Path, tmp_path: Path, name: str, line: Line
) -> None:
    async with guarded(disk, tmp_path, None, store=True, variant="B") as guard:
        found = await run(guard, disk, tmp_path / "report.json", line)
        check(found)
        if name == "fast":
            assert unsynced(found) == []
        else:
            assert unsynced(found), "something had to go unsynced, and it was told"
        assert len(line.have) >= (1 if name == "slow" else SAVES // 3)


async def test_the_trainers_own_retention_bursts_and_links(disk: Path, tmp_path: Path) -> None:
    """Two saves at once, the first of which nobody could foresee: 20 GB more, so that it fits as far as the trainer's
    own deletion goes. That races ours all the time."""
    precious = disk / "precious"
    precious.mkdir()
    (precious / "tokenizer.json").write_text("shared")
    async with guarded(disk, tmp_path, None, store=True, variant="B") as guard:
        line = Line(2, (0, 0))
        found = await run(
            guard, disk, tmp_path / "report.json", line, keep_last=2, burst=4, others=71 * GB, links=str(precious)
        )
        check(found)
        assert (precious / "tokenizer.json").read_text() == "shared"
        assert sorted(p.name for p in precious.iterdir()) == ["tokenizer.json"]
