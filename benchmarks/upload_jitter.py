"""How late the sensing loop's turns come while a set is uploaded, against the same loop when nothing is.

    python benchmarks/upload_jitter.py [--mib 768]

A loop like the daemon's asks to be woken every 20 ms, many times more often than the real one (2 s), and notes how late
it was. Three uploads run beside it: none, into a local directory store, and to the loopback B2 server, whose own work
(hashing and writing what it gets) no pod would do, so that it is told but not judged.
"""

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import Figures, parser, percentile
from benchmarks.measuring.sending import Sent, b2_credentials, job_for, send, write_file
from tests.support.b2server import B2Server

LIMIT_MS = 20.0
BEAT = 0.02
IDLE_SECONDS = 4.0


async def beats(late: list[float]) -> None:
    while True:
        due = time.monotonic() + BEAT
        await asyncio.sleep(BEAT)
        late.append((time.monotonic() - due) * 1000)


async def while_(work: Awaitable[object]) -> list[float]:
    late: list[float] = []
    task = asyncio.create_task(beats(late))
    try:
        await work
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return late


async def measure(directory: Path, mib: int, rounds: int, figures: Figures) -> None:
    source = write_file(directory / "out" / "model.bin", mib)
    with B2Server(directory / "b2") as server:
        found: dict[str, list[float]] = {"idle": [], "to a directory": [], "to loopback B2": []}
        for number in range(rounds):
            found["idle"] += await while_(asyncio.sleep(IDLE_SECONDS))
            local = job_for([source], f"file://{directory}/store", f"l{number}", directory / "lock")
            found["to a directory"] += await while_(send(local, None, measure=False))
            url, credentials = b2_credentials(server.url)
            remote = job_for([source], url, f"r{number}", directory / "lock")
            sending: Awaitable[Sent] = send(remote, credentials, measure=False)
            found["to loopback B2"] += await while_(sending)
    for name, late in found.items():
        figures.line(
            f"{name}: {len(late)} beats, late p50 {percentile(late, 0.5):.2f} ms, p99 {percentile(late, 0.99):.2f} ms,"
            f" max {max(late):.2f} ms"
        )
    figures.at_most("late while uploading, p99", percentile(found["to a directory"], 0.99), LIMIT_MS, "ms")
    more = percentile(found["to a directory"], 0.99) / percentile(found["idle"], 0.99)
    figures.line(f"{more:.1f} times the idle loop's p99")


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--mib", type=int, default=768)
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    figures = Figures("sensing loop while uploading")
    with tempfile.TemporaryDirectory() as directory:
        mib, rounds = (256, 1) if args.quick else (args.mib, args.rounds)
        asyncio.run(measure(Path(directory), mib, rounds, figures))
    return figures.code


if __name__ == "__main__":
    sys.exit(main())
