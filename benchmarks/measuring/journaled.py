"""podwatch's upload with the daemon's side of it: its own Sender, which writes what the child tells to a journal."""

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from podwatch.journal.upload_records import UploadedObject
from podwatch.stores.credentials import Credentials
from podwatch.stores.s3_credentials import S3Credentials
from podwatch.sync.interfaces import FEATURES
from podwatch.sync.upload.uploader import Sender

from benchmarks.measuring.discard import BUCKET
from benchmarks.measuring.sending import job_for
from podwatch.config.settings import Settings
from podwatch.journal.async_journal import AsyncJournal
from podwatch.journal.journal import Journal
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import SystemClock

BEAT = 0.02
"""Seconds: a loop like the daemon's asks to be woken this often, a hundred times as often as the real one."""


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


def credentials_of(url: str, store: str) -> Credentials:
    if store.startswith("s3://"):
        return Credentials(s3=S3Credentials("id", "key", endpoint=url))
    return Credentials("id", "key", url)


def sender_for(url: str, home: str, paths: list[Path], store: str = f"b2://{BUCKET}") -> Sender:
    """The daemon's own, with the settings' defaults and a journal in ``home``."""
    settings = Settings.model_validate(
        {
            "run_id": "run",
            "state_dir": home,
            "trainer": {"layout": "custom", "output_dir": str(paths[0].parent)},
            "checkpoints": {"custom": {"step_dir": "s_{step}", "required": ["x"], "last": "x"}},
            "sync": {"store": store},
        }
    )
    return Sender(
        settings,
        cast(
            Any,
            SimpleNamespace(
                identity=lambda: SimpleNamespace(writer_id="bench"), credentials=lambda: credentials_of(url, store)
            ),
        ),
        cast(Any, None),
        AsyncJournal(Journal.open(Path(home) / "journal.sqlite")),
        SystemClock(),
        Worker("bench"),
    )


async def send_one(
    sender: Sender, home: str, paths: list[Path], save_id: str, *, urgent: bool = True
) -> dict[str, UploadedObject]:
    """All ``paths``, in one directory, as one checkpoint. Returns what is in the store then."""
    part = SimpleNamespace(part=SimpleNamespace(name="trainer", path=paths[0].parent))
    contents = cast(Any, SimpleNamespace(set=SimpleNamespace(step=1, save_id=save_id), parts=[part], files=()))
    todo = job_for(paths, f"b2://{BUCKET}", save_id, Path(home) / "lock").files
    done: dict[str, UploadedObject] = {}
    await sender.upload(contents, todo, done, lambda _: None, urgent=urgent)
    if len(done) != len(paths):
        raise SystemExit("podwatch did not send everything")
    return done


async def send_journaled(
    url: str, home: str, paths: list[Path], *, store: str = f"b2://{BUCKET}", features: object = None
) -> Sent:
    """With the settings' defaults."""
    sender = sender_for(url, home, paths, store)
    if features is not None:
        sender._journal.sync.learn(FEATURES, {"url": store, "features": features})
    late: list[float] = []
    beating = asyncio.create_task(beats(late))
    began, cpu = time.monotonic(), time.process_time()
    await send_one(sender, home, paths, "s", urgent="PODWATCH_BENCH_NICE" not in os.environ)
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    beating.cancel()
    if len(sender._journal.sync.objects(1, "s")) != len(paths):
        raise SystemExit("podwatch did not send everything")
    return Sent(seconds, cpu, tuple(late))
