"""Removing a 47 GB-shaped set: how late the sensing loop's turns come meanwhile, and how long it takes beside `rm -rf`.

    python benchmarks/removal.py [--gib 47] [--files 10000]

The set has a few huge shards, as real blocks (fallocate) as far as half of the free disk allows, and many small files,
as rollouts and exports have. A loop like the daemon's asks to be woken every 10 ms, and notes how late it was; a writer
beside it syncs 1 MiB at a time, as a trainer's log and shards do. podwatch removes in its worker at the lowest
priority, with a pause after every 32 entries; `rm -rf` runs as the process a person would start.
"""

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import Figures, parser, percentile
from podwatch.disk.plan import Removal, RemovalKind, RemovalPlan
from podwatch.disk.remove import Remover
from podwatch.domain.event import Event
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import SystemClock
from podwatch.system.own_directories import Workspace

LIMIT_MS = 50.0
BEAT = 0.01
SHARDS = 8
SMALL = 8 * 1024
MIB = 1 << 20


def make_set(root: Path, size: int, files: int) -> None:
    shards = root / "checkpoints" / "step_5" / "trainer"
    shards.mkdir(parents=True)
    for number in range(SHARDS):
        with (shards / f"__{number}_0.distcp").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, size // SHARDS))
    body = b"x" * SMALL
    for number in range(files):
        directory = root / "checkpoints" / "step_5" / "rollouts" / str(number // 100)
        if number % 100 == 0:
            directory.mkdir(parents=True)
        (directory / f"{number}.bin").write_bytes(body)


class Beside:
    """The loop's beats and a writer's, while something happens."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.late: list[float] = []
        self.writes: list[float] = []
        self.seconds = 0.0

    async def run(self, work: Callable[[], Awaitable[object]]) -> None:
        stop = threading.Event()
        writer = threading.Thread(target=self._write, args=(stop,), daemon=True)
        writer.start()
        beats = asyncio.create_task(self._beat())
        await asyncio.sleep(0.2)
        self.late.clear()
        self.writes.clear()
        began = time.monotonic()
        await work()
        self.seconds += time.monotonic() - began
        beats.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beats
        stop.set()
        writer.join()

    async def _beat(self) -> None:
        while True:
            due = time.monotonic() + BEAT
            await asyncio.sleep(BEAT)
            self.late.append((time.monotonic() - due) * 1000)

    def _write(self, stop: threading.Event) -> None:
        block = bytes(MIB)
        descriptor = os.open(self.scratch / "writer", os.O_WRONLY | os.O_CREAT, 0o600)
        while not stop.is_set():
            began = time.monotonic()
            os.pwrite(descriptor, block, 0)
            os.fdatasync(descriptor)
            self.writes.append((time.monotonic() - began) * 1000)
            time.sleep(0.02)
        os.close(descriptor)


async def ours(root: Path, beside: Beside) -> None:
    workspace = Workspace(root / "out").probe()
    events: list[Event] = []
    remover = Remover(workspace, SystemClock(), events.append)
    removal = Removal(RemovalKind.STORED, 1, "benchmark", 5)
    plan = RemovalPlan((removal,))
    worker = Worker("removals")
    where = (root / "out" / "checkpoints" / "step_5",)

    async def work() -> None:
        report = await worker.call(remover.carry_out, plan, lambda _: where)
        if report.problems or where[0].exists():
            raise SystemExit(f"not removed: {report.problems}")

    try:
        await beside.run(work)
    finally:
        worker.close()


async def rm(root: Path, beside: Beside) -> None:
    async def work() -> None:
        process = await asyncio.create_subprocess_exec("rm", "-rf", str(root / "out" / "checkpoints" / "step_5"))
        await process.wait()

    await beside.run(work)


def measure(base: Path, size: int, files: int, rounds: int, figures: Figures) -> None:
    found: dict[str, Beside] = {}
    idle = Beside(base)
    asyncio.run(idle.run(lambda: asyncio.sleep(2.0)))
    found["nothing"] = idle
    for _ in range(rounds):
        for name, remove in (("podwatch", ours), ("rm -rf", rm)):
            with tempfile.TemporaryDirectory(dir=base) as directory:
                root = Path(directory)
                (root / "out").mkdir()
                make_set(root / "out", size, files)
                os.sync()
                one = Beside(base)
                asyncio.run(remove(root, one))
                before = found.setdefault(name, Beside(base))
                before.late += one.late
                before.writes += one.writes
                before.seconds += one.seconds / rounds
    for name, beside in found.items():
        late, writes = beside.late or [0.0], beside.writes or [0.0]
        figures.line(
            f"{name}: {beside.seconds:.2f} s; loop late p50 {percentile(late, 0.5):.2f} ms,"
            f" p99 {percentile(late, 0.99):.2f} ms, max {max(late):.1f} ms;"
            f" a writer's 1 MiB p50 {percentile(writes, 0.5):.1f} ms, max {max(writes):.0f} ms"
        )
    figures.at_most("loop late while removing, max", max(found["podwatch"].late), LIMIT_MS, "ms")
    figures.line(f"{found['podwatch'].seconds / found['rm -rf'].seconds:.1f} times as long as rm -rf")


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--gib", type=float, default=47.0)
    options.add_argument("--files", type=int, default=10_000)
    options.add_argument("--dir", default=None, help="on which disk; default: the temporary directory")
    args = options.parse_args()
    base = Path(args.dir or tempfile.gettempdir())
    wanted = int((2.0 if args.quick else args.gib) * (1 << 30))
    size = min(wanted, shutil.disk_usage(base).free // 2)
    files, rounds = (4000, 1) if args.quick else (args.files, 2)
    figures = Figures(f"removing {size / 1e9:.0f} GB in {SHARDS} shards and {files} small files")
    with tempfile.TemporaryDirectory(dir=base) as directory:
        measure(Path(directory), size, files, rounds, figures)
    return figures.code


if __name__ == "__main__":
    sys.exit(main())
