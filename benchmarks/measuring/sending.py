"""A set of big files, its upload job, and podwatch's own child that sends it."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.stores.open_store import Credentials
from podwatch.sync.upload.child_job import JobFile, UploadJob
from podwatch.sync.upload.start_child import Upload

from benchmarks.measuring import MIB, memory_mib
from podwatch.system.pinned_directories import PinnedTree
from tests.support.b2server import BUCKET, KEY, KEY_ID

PART_SIZE = 100_000_000
"""What the store recommends; podwatch's default is the same."""


def write_file(path: Path, mib: int) -> Path:
    """Random, so that nothing on the way can compress it; in the page cache afterwards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for _ in range(mib):
            file.write(os.urandom(MIB))
    return path


def job_for(paths: Sequence[Path], store: str, name: str, lock: Path, connections: int = 4) -> UploadJob:
    """All files lie in one directory."""
    files = []
    for path in paths:
        found = path.stat()
        key = f"run/podwatch/step_1/{name}/{path.name}"
        files.append(
            JobFile(
                part="trainer", path=path.name, remote=f"trainer/{path.name}", key=key, size=found.st_size,
                mtime_ns=found.st_mtime_ns, mode=0o644, inode=found.st_ino, device=found.st_dev,
            )
        )  # fmt: skip
    return UploadJob(
        step=1, save_id=name, store=store, writer_id="bench", part_size=PART_SIZE, connections=connections,
        lock=str(lock), roots={"trainer": str(paths[0].parent)}, files=tuple(files),
        pins=PinnedTree((paths[0].parent,)).pins(),
    )  # fmt: skip


def b2_credentials(url: str) -> tuple[str, Credentials]:
    return f"b2://{BUCKET}", Credentials(KEY_ID, KEY, url)


@dataclass
class Sent:
    seconds: float
    peak_mib: float


async def send(job: UploadJob, credentials: Credentials | None, *, measure: bool = True) -> Sent:
    """Run podwatch's upload child to its end. Its own start-up counts. ``measure``: its memory, which blocks the loop
    for as long as the kernel keeps the child's memory map."""
    upload = Upload(job)
    peak = 0.0

    async def heard(_: Sequence[dict[str, Any]]) -> None:
        pass

    async def watch() -> None:
        nonlocal peak
        while True:
            if upload.pid is not None:
                try:
                    peak = max(peak, memory_mib(upload.pid, "VmHWM"))
                except OSError:
                    return
            await asyncio.sleep(0.05)

    loop = asyncio.get_running_loop()
    watcher = asyncio.create_task(watch() if measure else asyncio.sleep(0))
    began = loop.time()
    try:
        await upload.run(credentials, heard, lambda _: None)
    finally:
        watcher.cancel()
    return Sent(loop.time() - began, peak)
