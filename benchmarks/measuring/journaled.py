"""podwatch's upload with the daemon's side of it: its own Sender, which writes what the child tells to a journal."""

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.measuring.discard import BUCKET
from benchmarks.measuring.sending import job_for
from podwatch.config.settings import Settings
from podwatch.journal.async_journal import AsyncJournal
from podwatch.journal.journal import Journal
from podwatch.journal.records import UploadedObject
from podwatch.stores.credentials import Credentials
from podwatch.sync.sender import Sender
from podwatch.system.clock import SystemClock
from podwatch.system.threads import Worker

NOT_LOWERED = """
import os, sys
from podwatch.sync import child
child.lower_priority = lambda parent: None
os._exit(child.main())
"""


def keep_priority() -> None:
    """Start the child as it is but for the priority it gives itself."""
    start = asyncio.create_subprocess_exec

    async def started(*command: str, **options: Any) -> asyncio.subprocess.Process:
        name = command.index("podwatch.sync.child")
        return await start(command[0], "-P", "-c", NOT_LOWERED, *command[name + 1 :], **options)

    cast(Any, asyncio).create_subprocess_exec = started


BEAT = 0.02
"""Seconds: a loop like the daemon's asks to be woken this often, a hundred times as often as the real one."""


AHEAD = 3.0
"""Seconds: less than any layout's settle time, so that the real child has had longer."""


@dataclass(frozen=True, slots=True)
class Sent:
    """``seconds`` from the set's being ready to the last object in the journal, ``cpu`` seconds of the daemon's side in
    them, and how many milliseconds late its loop's turns came."""

    seconds: float
    cpu: float
    late: tuple[float, ...]


async def beats(late: list[float]) -> None:
    while True:
        due = time.monotonic() + BEAT
        await asyncio.sleep(BEAT)
        late.append((time.monotonic() - due) * 1000)


async def idle(seconds: float) -> tuple[float, ...]:
    """How late the turns of a loop come that has nothing else to do."""
    late: list[float] = []
    beating = asyncio.create_task(beats(late))
    await asyncio.sleep(seconds)
    beating.cancel()
    return tuple(late)


async def send_journaled(url: str, home: str, paths: list[Path], *, ahead: bool) -> Sent:
    """With the settings' defaults. ``ahead``: the child has been started while the set was written, as the daemon does
    it; else its start counts, as where nobody saw the set coming."""
    if "PODWATCH_BENCH_LOWEST" not in os.environ:
        keep_priority()
    journal = AsyncJournal(Journal.open(Path(home) / "journal.sqlite"))
    settings = Settings.model_validate(
        {
            "run_id": "run",
            "state_dir": home,
            "trainer": {"layout": "custom", "output_dir": str(paths[0].parent)},
            "checkpoints": {"custom": {"step_dir": "s_{step}", "required": ["x"], "last": "x"}},
            "sync": {"store": f"b2://{BUCKET}"},
        }
    )
    worker = Worker("bench")
    sender = Sender(
        settings=settings,
        identity=cast(Any, lambda: SimpleNamespace(writer_id="bench")),
        catalogue=cast(Any, None),
        journal=journal,
        clock=SystemClock(),
        credentials=lambda: Credentials("id", "key", url),
        worker=worker,
    )
    part = SimpleNamespace(part=SimpleNamespace(name="trainer", path=paths[0].parent))
    contents = cast(Any, SimpleNamespace(set=SimpleNamespace(step=1, save_id="s"), parts=[part]))
    todo = job_for(paths, settings.sync.store, "s", Path(home) / "lock").files
    done: dict[str, UploadedObject] = {}
    late: list[float] = []
    if ahead:
        sender.children.expect(True)
        await asyncio.sleep(AHEAD)
    beating = asyncio.create_task(beats(late))
    began, cpu = time.monotonic(), time.process_time()
    await sender.upload(contents, todo, done, lambda _: None)
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    beating.cancel()
    if len(done) != len(paths) or len(journal.sync.objects(1, "s")) != len(paths):
        raise SystemExit("podwatch did not send everything")
    return Sent(seconds, cpu, tuple(late))
