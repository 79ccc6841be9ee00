"""What an idle daemon costs, with 8 GPUs polled every 2 s and 20 trainer processes: CPU, memory, and growth over a run
at forty times its rhythm; beside other monitors that this machine has, in the same run.

    python benchmarks/footprint.py [--seconds 60] [--accelerated 180]

It measures once memory has settled: at least 100 s after the start, because the sets settle and the detectors arm
until then.

Peers: a bare uvicorn with an empty application (what any Python daemon with an HTTP port pays), and where found on PATH
or named, nvitop's collector (``--nvitop PYTHON``: an interpreter that can import it), monit (``--monit BINARY``) and
prometheus-node-exporter (``--node-exporter BINARY``, asked for its metrics every 2 s). They watch less than podwatch
does: figures for scale, not for a race.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import Figures, cpu_seconds, memory_mib, parser, until
from benchmarks.measuring.pod import Pod
from tests.support.b2server import B2Server

CPU_LIMIT = 0.4
"""Per cent of one core."""
RSS_LIMIT = 120.0
"""MiB, with and without a store."""
GROWTH_LIMIT = 2.0
"""MiB over an accelerated run of 1,200 polls and more."""
SETTLE, STEADY, LONGEST_SETTLE = 100.0, 20.0, 300.0
"""Seconds after the start before measuring: at least, without growth, and at most."""
STEADY_MIB = 0.25
"""Less than this in ``STEADY`` seconds is no growth."""
FAST_POLL = "50ms"
BARE = """
import uvicorn
async def app(scope, receive, send):
    pass
uvicorn.run(app, port=0, lifespan="off", log_level="critical")
"""
NVITOP = """
import time
from nvitop import Device, ResourceMetricCollector
devices = Device.all()
with ResourceMetricCollector(devices=devices, root_pids=set(), interval=2.0)(tag="bench"):
    time.sleep(3600)
"""


@dataclass(slots=True)
class Cost:
    name: str
    share: float
    """Per cent of one core."""
    rss: float
    growth: float


def measure(name: str, pid: int, seconds: float) -> Cost:
    spent, began, memory = cpu_seconds(pid), time.monotonic(), memory_mib(pid)
    time.sleep(seconds)
    share = (cpu_seconds(pid) - spent) / (time.monotonic() - began) * 100
    return Cost(name, share, memory_mib(pid), memory_mib(pid) - memory)


def settled(pid: int, least: float) -> None:
    """Return once memory has not grown for ``STEADY`` seconds, ``least`` seconds from now at the earliest."""
    end = time.monotonic() + LONGEST_SETTLE
    time.sleep(max(0.0, least - STEADY))
    before = memory_mib(pid)
    while time.monotonic() < end:
        time.sleep(min(least, STEADY))
        now = memory_mib(pid)
        if now - before < STEADY_MIB:
            return
        before = now


def as_phone(url: str, over: threading.Event) -> None:
    """Ask for the page as its script does while it is in view: every 10 s, with plots only if they are newer."""
    drawn = ""
    while not over.is_set():
        with urllib.request.urlopen(f"{url}/?drawn={drawn}", timeout=30) as answer:
            found = re.search(rb'data-stamp="(\d+)"', answer.read())
        drawn = found[1].decode() if found else drawn
        over.wait(10.0)


def page_milliseconds(pod: Pod) -> float:
    """CPU of one answer whose plots are shown already, over 200 of them: it can be measured on a busy machine too."""
    with urllib.request.urlopen(f"{pod.url}/", timeout=30) as answer:
        found = re.search(rb'data-stamp="(\d+)"', answer.read())
    drawn = found[1].decode() if found else ""
    spent = cpu_seconds(pod.pid)
    for _ in range(200):
        with urllib.request.urlopen(f"{pod.url}/?drawn={drawn}", timeout=30) as answer:
            answer.read()
    return (cpu_seconds(pod.pid) - spent) / 200 * 1000


@contextlib.contextmanager
def page_open(url: str) -> Iterator[None]:
    """A phone shows the page. The thread is of this process: its cost is not podwatch's."""
    over = threading.Event()
    phone = threading.Thread(target=as_phone, args=(url, over))
    phone.start()
    try:
        yield
    finally:
        over.set()
        phone.join()


def podwatch(
    figures: Figures, title: str, seconds: float, settle: float, *, with_store: bool, with_page: bool = False
) -> Cost:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = stack.enter_context(B2Server(directory / "b2")) if with_store else None
        pod = stack.enter_context(Pod(directory, store))
        if store is not None:
            until(lambda: store.versions("latest.json"), 300, "the newest set is in the store")
        settled(pod.pid, settle)
        if with_page:
            figures.line(f"{title}: {page_milliseconds(pod):.2f} ms of CPU for each answer, every 10 s while in view")
            stack.enter_context(page_open(pod.url))
            time.sleep(2.0)  # the first visit imports and draws
        cost = measure(title, pod.pid, seconds)
        peak = memory_mib(pod.pid, "VmHWM")
    figures.line(f"{title}: peak RSS {peak:.1f} MiB; growth {cost.growth:.2f} MiB in {seconds:.0f} s")
    figures.at_most(f"{title}: CPU of one core", cost.share, CPU_LIMIT, "%")
    figures.at_most(f"{title}: RSS", cost.rss, RSS_LIMIT, "MiB")
    return cost


def accelerated(figures: Figures, seconds: float, settle: float) -> None:
    """Every sensor and every detector at forty times the rhythm: two hours of looks in three minutes."""
    with tempfile.TemporaryDirectory() as name, Pod(Path(name), poll=FAST_POLL) as pod:
        settled(pod.pid, settle)
        points: list[tuple[float, float]] = []
        before, began = pod.turns, time.monotonic()
        while (now := time.monotonic() - began) < seconds:
            points.append((now, memory_mib(pod.pid)))
            time.sleep(0.5)
        turns, peak = pod.turns - before, memory_mib(pod.pid, "VmHWM")
    tenth = max(1, len(points) // 10)

    def around(share: float) -> float:
        first = int(share * (len(points) - tenth))
        return sum(m for _, m in points[first : first + tenth]) / tenth

    begin, middle, end = around(0.0), around(0.5), around(1.0)
    half, level = seconds / 2, sum(m for _, m in points) / len(points)
    slope = sum((t - half) * (m - level) for t, m in points) / sum((t - half) ** 2 for t, _ in points)
    figures.line(
        f"{turns} turns in {seconds:.0f} s (at 2 s: {turns * 2 / 3600:.1f} h): RSS {begin:.1f} MiB, in the middle"
        f" {middle:.1f}, at the end {end:.1f}, peak {peak:.1f};"
        f" slope {slope * seconds / max(1, turns) * 1000:.2f} MiB in 1,000 turns"
    )
    figures.at_most(f"growth over {turns} turns", end - begin, GROWTH_LIMIT, "MiB")


@contextlib.contextmanager
def running(argv: list[str], directory: Path, environ: dict[str, str] | None = None) -> Iterator[int]:
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **(environ or {})}
        )
    try:
        time.sleep(3.0)
        if process.poll() is not None:
            raise RuntimeError(f"{argv[0]} ended: {(directory / 'log').read_text()[-300:]}")
        yield process.pid
    finally:
        process.kill()
        process.wait()


def bare(seconds: float, directory: Path) -> Cost:
    with running([sys.executable, "-c", BARE], directory) as pid:
        return measure("bare uvicorn, no requests", pid, seconds)


def nvitop(python: str, seconds: float, directory: Path) -> Cost:
    from tests.support.nvml import GIB, NvmlWorld, build_nvml

    world = NvmlWorld(directory / "world", devices=8)
    for index in range(8):
        world.set_memory(index, 60 * GIB)
    with running([python, "-c", NVITOP], directory, world.environment(build_nvml(directory))) as pid:
        return measure("nvitop's collector, 8 GPUs, 2 s", pid, seconds)


def monit(binary: str, seconds: float, directory: Path) -> Cost:
    control = directory / "monitrc"
    watched = f"check process bench with pidfile {directory}/pid\ncheck filesystem root with path /\n"
    control.write_text(
        f"set daemon 2\nset logfile {directory}/monit.log\nset idfile {directory}/id\nset statefile {directory}/state\n"
        f"set pidfile {directory}/monit.pid\n{watched}check system $HOST\n  if memory usage > 99% then alert\n"
    )
    control.chmod(0o600)
    (directory / "pid").write_text(str(os.getpid()))
    with running([binary, "-I", "-c", str(control)], directory) as pid:
        return measure("monit, 1 process and 1 filesystem, 2 s", pid, seconds)


def node_exporter(binary: str, seconds: float, directory: Path) -> Cost:
    url = "http://127.0.0.1:19100/metrics"
    with running([binary, "--web.listen-address=127.0.0.1:19100"], directory) as pid:
        end = time.monotonic() + seconds
        spent, began, memory = cpu_seconds(pid), time.monotonic(), memory_mib(pid)
        while time.monotonic() < end:
            with urllib.request.urlopen(url, timeout=5) as answer:
                answer.read()
            time.sleep(2.0)
        share = (cpu_seconds(pid) - spent) / (time.monotonic() - began) * 100
        return Cost("prometheus-node-exporter, asked every 2 s", share, memory_mib(pid), memory_mib(pid) - memory)


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument(
        "--accelerated", type=float, default=180.0, help="seconds of the run at forty times the rhythm"
    )
    options.add_argument("--nvitop", default="", help="a Python that can import nvitop")
    options.add_argument("--monit", default=shutil.which("monit") or "")
    options.add_argument("--node-exporter", default=shutil.which("prometheus-node-exporter") or "")
    args = options.parse_args()
    seconds, settle = (20.0, 10.0) if args.quick else (args.seconds, SETTLE)
    figures = Figures("idle daemon")
    costs = [
        podwatch(figures, "podwatch, no store", seconds, settle, with_store=False),
        podwatch(figures, "podwatch, a B2 store", seconds, settle, with_store=True),
        podwatch(figures, "podwatch, no store, the page on a phone", seconds, settle, with_store=False, with_page=True),
    ]
    accelerated(figures, seconds if args.quick else args.accelerated, settle)
    peers: list[tuple[str, Callable[[float, Path], Cost]]] = [("uvicorn", bare)]
    if args.nvitop:
        peers.append(("nvitop", lambda s, d: nvitop(args.nvitop, s, d)))
    if args.monit:
        peers.append(("monit", lambda s, d: monit(args.monit, s, d)))
    if args.node_exporter:
        peers.append(("node exporter", lambda s, d: node_exporter(args.node_exporter, s, d)))
    for name, peer in peers:
        with tempfile.TemporaryDirectory() as directory:
            try:
                costs.append(peer(seconds, Path(directory)))
            except (OSError, RuntimeError) as error:
                figures.line(f"{name} could not be measured: {error}")
    figures.line(f"{'':44} {'CPU %':>7} {'RSS MiB':>8} {'growth':>7}")
    for cost in costs:
        figures.line(f"{cost.name:44} {cost.share:7.2f} {cost.rss:8.1f} {cost.growth:7.2f}")
    return figures.code


if __name__ == "__main__":
    sys.exit(main())
