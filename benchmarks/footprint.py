"""What an idle daemon costs: CPU over a minute and memory, with 8 GPUs polled every 2 s and 20 trainer processes.

    python benchmarks/footprint.py [--seconds 60]

The peer of the memory figure is a bare uvicorn with an empty application, measured in the same run: the part of our
memory that any Python daemon with an HTTP port pays.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import Figures, cpu_seconds, memory_mib, parser, until
from benchmarks.measuring.pod import Pod
from tests.support.b2server import B2Server

CPU_LIMIT, RSS_LIMIT = 0.5, 70.0
SETTLE = 25.0
"""Seconds before measuring: the sets settle, the detectors arm."""
BARE = """
import uvicorn
async def app(scope, receive, send):
    pass
uvicorn.run(app, port=0, lifespan="off", log_level="critical")
"""


def measure(figures: Figures, title: str, seconds: float, settle: float, peer: int, *, with_store: bool) -> None:
    figures.line(f"-- {title}")
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = stack.enter_context(B2Server(directory / "b2")) if with_store else None
        pod = stack.enter_context(Pod(directory, store))
        time.sleep(settle)
        if store is not None:
            until(lambda: store.versions("latest.json"), 60, "the newest set is in the store")
        spent, began, memory = cpu_seconds(pod.pid), time.monotonic(), memory_mib(pod.pid)
        time.sleep(seconds)
        share = (cpu_seconds(pod.pid) - spent) / (time.monotonic() - began) * 100
        rss, peak = memory_mib(pod.pid), memory_mib(pod.pid, "VmHWM")
    figures.line(f"CPU of start-up and settling: {spent:.2f} s in all; peak RSS {peak:.1f} MiB")
    figures.line(f"growth of RSS over {seconds:.0f} s: {rss - memory:.2f} MiB")
    figures.at_most("CPU of one core", share, CPU_LIMIT, "%")
    figures.at_most("RSS", rss, RSS_LIMIT, "MiB")
    bare = memory_mib(peer)
    figures.line(f"bare uvicorn in the same run: {bare:.1f} MiB; podwatch is {rss / bare:.2f} times that")


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--seconds", type=float, default=60.0)
    args = options.parse_args()
    seconds, settle = (20.0, 10.0) if args.quick else (args.seconds, SETTLE)
    figures = Figures("idle daemon")
    bare = subprocess.Popen([sys.executable, "-c", BARE])
    try:
        measure(figures, "no store", seconds, settle, bare.pid, with_store=False)
        measure(figures, "with a B2 store, the newest set uploaded", seconds, settle, bare.pid, with_store=True)
    finally:
        bare.kill()
        bare.wait()
    return figures.code


if __name__ == "__main__":
    sys.exit(main())
