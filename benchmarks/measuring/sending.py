"""A set of big files, and podwatch's own child that sends it, or fetches it, with its real job."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring import MIB, memory_mib
from podwatch.domain.checkpoint import FileEntry
from podwatch.store.objects.b2 import B2Access
from podwatch.store.objects.s3 import S3Access
from podwatch.store.transfer.job import TransferJob
from podwatch.store.transfer.start import Transfer

PIECE_SIZE = 100_000_000
"""The default of ``sync.part_size``."""
BEAT = 0.02
"""Seconds: a loop like the daemon's asks to be woken this often, a hundred times as often as the real one."""
LOW = 15
"""As podwatch's child while nothing is urgent."""


def write_file(path: Path, mib: int) -> Path:
    """Random, so that nothing on the way can compress it; in the page cache afterwards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for _ in range(mib):
            file.write(os.urandom(MIB))
    return path


def access_of(url: str, store: str) -> B2Access | S3Access | None:
    """For a service at ``url``."""
    if store.startswith("s3://"):
        return S3Access("id", "key", endpoint=url)
    return B2Access("id", "key", url) if store.startswith("b2://") else None


@dataclass(frozen=True, slots=True)
class Sent:
    """``seconds`` from the child's start to its end, ``cpu`` seconds of the daemon's side in them, how many
    milliseconds late its loop's turns came, and the child's peak memory."""

    seconds: float
    cpu: float
    late: tuple[float, ...]
    peak_mib: float


@dataclass(frozen=True, slots=True)
class Sending:
    """All ``paths``, in one directory, as one save. ``home``: where the list of sent pieces lies."""

    paths: Sequence[Path]
    store: str
    access: B2Access | S3Access | None
    home: Path
    name: str = "save"
    nice: int = 0
    connections: int = 8

    @contextmanager
    def job(self) -> Iterator[TransferJob]:
        found = [(path.name, path.stat()) for path in self.paths]
        files = tuple(
            FileEntry(name, "trainer", s.st_size, s.st_mtime_ns, 0o644, s.st_ino, s.st_dev) for name, s in found
        )
        root_of_files = os.open(self.paths[0].parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield TransferJob(
                "send", self.store, f"run/podwatch/step_1/{self.name}/", files, PIECE_SIZE, {"trainer": root_of_files},
                sent=str(self.home / f"sent.{self.name}"), connections=self.connections, nice=self.nice,
            )  # fmt: skip
        finally:
            os.close(root_of_files)

    def run(self) -> float:
        """Send it; the child's peak in MiB. Blocks."""
        with self.job() as job:
            return run_transfer(job, self.access)

    async def measure(self) -> Sent:
        """From a thread, beside a loop like the daemon's."""
        late: list[float] = []
        beating = asyncio.create_task(beats(late))
        began, cpu = time.monotonic(), time.process_time()
        peak = await asyncio.to_thread(self.run)
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        beating.cancel()
        return Sent(seconds, cpu, tuple(late), peak)


def run_transfer(job: TransferJob, access: B2Access | S3Access | None) -> float:
    """The child's peak in MiB; raises SystemExit where it did not move everything."""
    done = 0

    def hear(message: dict[str, object]) -> None:
        nonlocal done
        done += message.get("type") == "piece"

    transfer = Transfer(job)
    with Memory(lambda: transfer.pid) as memory:
        transfer.run(access, hear)
    if job.direction == "send" and done != len(job.pieces):
        raise SystemExit("podwatch did not move everything")
    return memory.peak


class Memory:
    """The peak of a process in MiB, looked at every 0.4 s."""

    def __init__(self, pid: Callable[[], int | None]) -> None:
        self.peak = 0.0
        self._pid, self._over = pid, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.4):
            if (pid := self._pid()) is not None:
                with contextlib.suppress(OSError, ValueError):
                    self.peak = max(self.peak, memory_mib(pid, "VmHWM"))


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
