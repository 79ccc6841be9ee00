"""What became of each checkpoint is counted once, over restarts of podwatch, too."""

from podwatch.domain.checkpoint import CheckpointSet, Completeness, HeldAs
from podwatch.domain.facts import UploadOutcome
from podwatch.journal.async_journal import AsyncJournal
from podwatch.journal.journal import Journal
from podwatch.sync.upload.outcomes import TALLY, CheckpointTally
from tests.sync.conftest import Run, World, until

STORED, SKIPPED, ABANDONED = UploadOutcome.STORED, UploadOutcome.SKIPPED, UploadOutcome.ABANDONED

PATIENCE = 240.0
"""Seconds until a test gives up: others may keep every core busy beside it."""


def steps(world: World, name: str) -> list[int]:
    return [int(e.fields["step"]) for e in world.events if e.name == name]


async def test_older_checkpoints_that_wait_are_skipped_for_the_newest(local: World, run: Run) -> None:
    for step in (5, 10, 15):
        local.write_set(step, tiny=True, size=1000)
    local.scan()
    first = await run(local)
    first.notify()
    await until(lambda: first.status().last_step == 15, PATIENCE)
    await until(lambda: steps(local, "upload-skipped") == [5, 10], PATIENCE)
    assert {e.fields["newer_step"] for e in local.events if e.name == "upload-skipped"} == {15}
    assert first.status().tally.outcomes == (SKIPPED, SKIPPED, STORED)
    await first.stop()
    await first._journal.run(Journal.learned, TALLY)  # what was posted before is written: the daemon closes its journal
    local.journal = Journal.open(local.directory / "state" / "journal.sqlite")
    local.events.clear()
    again = await run(local)
    local.write_set(20, tiny=True, size=1000)
    local.scan()
    again.notify()
    await until(lambda: len(again.status().tally.outcomes) == 4, PATIENCE)
    assert again.status().tally.outcomes == (SKIPPED, SKIPPED, STORED, STORED)
    assert steps(local, "upload-skipped") == []


def found(step: int, save_id: str = "", **more: object) -> CheckpointSet:
    return CheckpointSet(
        step=step, layout="custom", completeness=Completeness.COMPLETE, parts=(), size_bytes=1, file_count=1,
        changed_wall=0.0, save_id=save_id or f"s{step}", **more,  # type: ignore[arg-type]
    )  # fmt: skip


async def test_what_is_counted_and_what_is_not(local: World) -> None:
    journal = AsyncJournal(local.journal)
    skipped: list[int] = []
    tally = CheckpointTally(journal, lambda _name, _text, _severity, **fields: skipped.append(fields["step"]))
    await tally.load()
    left = found(14, held="x", held_as=HeldAs.EARLIER_BRANCH)
    old, again, held = found(5), found(20, "first"), found(12, held="x")
    tally.see([old, found(10), held, left, found(15), again], set(), "a", last=9)
    tally.see([found(10), found(15), found(20, "second")], set(), "a", last=9)
    assert tally.newer_waits(15)
    assert not tally.newer_waits(20)
    tally.abandoned((15, "s15"))
    tally.abandoned((15, "s15"))
    tally.abandoned((5, "s5"))
    tally.stored((20, "second"), seconds=10.0, save_seconds=5.0)
    assert skipped == [10], "5 was counted by an earlier podwatch, 12 and 14 are not this branch's, 20 was saved again"
    assert tally.now.outcomes == (ABANDONED, SKIPPED, STORED)
    assert (tally.now.upload_seconds, tally.now.save_seconds) == (10.0, 5.0)
    tally.see([found(25)], set(), "a", last=20)
    tally.see([found(22)], set(), "b", last=-1)
    tally.stored((30, "s30"), seconds=1.0, save_seconds=None)
    assert skipped == [10, 22], "25 belongs to the branch that was left"
    after = CheckpointTally(journal, lambda *_said, **_fields: None)
    await after.load()
    assert after.now == tally.now
    assert after.now.save_seconds == 5.0
