"""How late the sensing loop's turns come while a set is uploaded, against the same loop when nothing is.

    python benchmarks/upload_jitter.py [--mib 768]

A loop like the daemon's asks to be woken every 20 ms, many times more often than the real one (2 s), and notes how late
it was. Three uploads run beside it: none, into a local directory store, and to the loopback B2 server, whose own work
(hashing and writing what it gets) no pod would do, so that it is told but not judged.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import Figures, parser, percentile
from benchmarks.measuring.sending import Sending, idle, write_file
from podwatch.store.objects.b2 import B2Access
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server

LIMIT_MS = 20.0
IDLE_SECONDS = 4.0


async def measure(directory: Path, mib: int, rounds: int, figures: Figures) -> None:
    source = write_file(directory / "out" / "model.bin", mib)
    with B2Server(directory / "b2") as server:
        found: dict[str, list[float]] = {"idle": [], "to a directory": [], "to loopback B2": []}
        for number in range(rounds):
            found["idle"] += await idle(IDLE_SECONDS)
            local = Sending([source], f"file://{directory}/store", None, directory, f"l{number}", connections=4)
            found["to a directory"] += (await local.measure()).late
            access = B2Access(KEY_ID, KEY, server.url)
            remote = Sending([source], f"b2://{BUCKET}", access, directory, f"r{number}", connections=4)
            found["to loopback B2"] += (await remote.measure()).late
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
