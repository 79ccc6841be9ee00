"""The upload's real process on a busy machine: given more while the backup is behind, and less once it is not.

Every core has busy loops. The file is longer than what can be sent meanwhile, so that no test waits for a time.
"""

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.journal.async_journal import AsyncJournal
from podwatch.journal.journal import Journal
from podwatch.policy.choose_cpu_priority import Level, Standing, Timing
from podwatch.sync.syncer import Syncer
from podwatch.sync.upload.apply_cpu_priority import RATES, Outlook, Priority
from podwatch.sync.upload.start_child import Children
from podwatch.system.child import autogroup_of
from tests.support.busy import busy_cores, without_nice_right
from tests.support.clock import ManualClock
from tests.support.hurry import hurrying
from tests.sync.conftest import Run, World, until

pytestmark = pytest.mark.slow

QUICK = Timing(
    look=0.2, settle=0.4, patience=0.6, patience_most=5.0, report=0.4, slow=0.0, slow_no_more=0.0, waits_no_more=0.0
)
"""Looks so short say nothing of a rate, and at ordinary priority it is the store that waits for a CPU here."""
LONG, RATE = 20_000_000_000, 50_000_000
"""Bytes, and bytes per second: it does not end before the test, and takes more CPU than the lowest priority gets."""
PATIENCE = 240.0
"""Seconds until a test gives up: every core is busy, and others may run tests beside it."""


def values(syncer: Syncer) -> tuple[int | None, int | None, int | None]:
    """(pid, autogroup, nice) of what sends, from the kernel."""
    running = syncer._sender.running
    pid = None if running is None else running.pid
    if pid is None:
        return None, None, None
    nice = None
    with contextlib.suppress(ProcessLookupError):
        nice = os.getpriority(os.PRIO_PROCESS, pid)
    return pid, autogroup_of(pid), nice


def has(syncer: Syncer, value: int) -> bool:
    """Where the kernel has autogroups, these are what counts between sessions; the nice value counts elsewhere."""
    _, autogroup, nice = values(syncer)
    return autogroup == value if autogroup is not None else nice == value


def changes(world: World) -> list[str]:
    return [str(e.fields["level"]) for e in world.events if e.name == "upload-priority"]


async def one_stored(world: World, run: Run) -> Syncer:
    """A run with a checkpoint in the store, so that only what a test says makes the next one urgent."""
    sync = world.settings.sync.model_copy(update={"max_rate": RATE})
    world.settings = world.settings.model_copy(update={"sync": sync})
    world.write_set(1, tiny=True, size=1000)
    world.scan()
    with hurrying():
        syncer = await run(world)
        await until(lambda: syncer.status().last_step == 1, PATIENCE)
    syncer._sender.priority.timing = QUICK
    return syncer


def write_long(world: World, step: int, size: int = LONG) -> Path:
    root = world.write_set(step, tiny=True, size=10)
    os.truncate(root / "model.bin", size)
    world.scan()
    return root


async def test_nice_is_raised_while_the_disk_waits_and_lowered_afterwards(b2: World, run: Run) -> None:
    syncer = await one_stored(b2, run)
    waits = True
    syncer.prospects = lambda: Outlook(disk_waits=waits)
    with busy_cores():
        write_long(b2, 5)
        syncer.notify()
        await until(lambda: has(syncer, 19), PATIENCE)
        await until(lambda: has(syncer, 0), PATIENCE)
        assert changes(b2) == ["raised", "ordinary"]
        pace = syncer.status().pace
        assert pace.level == "ordinary"
        assert "the disk needs the space" in pace.reason
        assert pace.rate is not None
        waits = False
        await until(lambda: has(syncer, 19), PATIENCE)
    assert changes(b2) == ["raised", "ordinary", "raised", "lowest"]
    assert syncer.status().pace.level == "lowest"
    assert syncer.status().uploading_step == 5, "all of that while one upload ran"


async def test_nice_stays_the_lowest_while_the_backup_keeps_pace(b2: World, run: Run) -> None:
    syncer = await one_stored(b2, run)
    looks: list[float] = []

    def calm() -> Outlook:
        looks.append(syncer.status().pace.cpu_wait or 0.0)
        return Outlook(steps_at_risk=1, steps_per_save=10)

    syncer.prospects = calm
    with busy_cores():
        write_long(b2, 5)
        syncer.notify()
        await until(lambda: sum(share >= QUICK.waits for share in looks) > 10, PATIENCE)
        assert has(syncer, 19)
    assert changes(b2) == []


async def test_nice_cannot_be_lowered_without_the_right_so_that_another_child_continues(b2: World, run: Run) -> None:
    """Any wait for a CPU counts here, so that the load of this machine does not decide. The line is slow until then."""
    assert b2.server is not None
    syncer = await one_stored(b2, run)
    syncer._sender.priority.timing = replace(QUICK, waits=0.0)
    parts = 20
    syncer.prospects = lambda: Outlook(disk_waits=True)
    before = b2.server.calls().get("b2_upload_part", 0)
    b2.server.pace(rate=500_000)
    with without_nice_right():
        write_long(b2, 5, parts * 5_000_000)
        syncer.notify()
        await until(lambda: has(syncer, 19), PATIENCE)
        first, _, nice = values(syncer)
        assert nice == 19
        await until(lambda: values(syncer)[0] not in (None, first) and values(syncer)[2] in range(19), PATIENCE)
    b2.server.pace()
    with hurrying():
        await until(lambda: syncer.status().last_step == 5, PATIENCE)
    replaced = [e for e in b2.events if e.name == "upload-priority" and e.fields["new_process"]]
    assert replaced
    again = b2.server.calls().get("b2_upload_part", 0) - before - parts
    assert again <= b2.settings.sync.connections_max * len(replaced), "only what was on its way is sent again"
    assert "upload-abandoned" not in b2.names()
    assert b2.violations() == []
    assert b2.journal.learned(RATES)


async def test_what_no_resume_needs_travels_at_the_lowest_whatever_the_last_upload_had(local: World) -> None:
    clock, said = ManualClock(), list[str]()
    children = Children(local.store_url)
    priority = Priority(clock, AsyncJournal(local.journal), children, lambda _name, text, *_, **__: said.append(text))
    priority._standing = Standing(level=Level.ORDINARY, reason="a newer checkpoint is waiting for upload")
    await priority.begin(urgent=False)
    assert (children.level, priority.pace.level, priority.pace.reason) == (Level.LOWEST, "lowest", "")
    priority.end(0, whole=True)
    assert (children.level, priority.pace.level) == (Level.ORDINARY, "ordinary")
    clock.advance(2 * priority.timing.patience)
    await priority.begin(urgent=False)
    priority.end(0, whole=True)
    assert said == []
    await priority.begin(urgent=True)
    assert children.level is Level.LOWEST
    assert said == ["the next upload runs at the lowest priority: not needed for 120 s"]


async def test_what_the_line_delivered_is_kept_for_the_next_podwatch(local: World) -> None:
    clock, journal = ManualClock(), AsyncJournal(local.journal)
    priority = Priority(clock, journal, Children(local.store_url), lambda *_, **__: None)
    for number in range(10):
        await priority.begin(urgent=True)
        clock.advance(10.0)
        priority.end((number + 1) * 100_000_000, whole=number != 9)
    await priority.begin(urgent=True)
    priority.end(1000, whole=True)  # too little to say anything
    assert await journal.run(Journal.learned, RATES) == [float(n) * 10_000_000 for n in range(2, 10)]
