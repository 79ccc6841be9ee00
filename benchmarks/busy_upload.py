"""An upload on a pod whose cores are all busy: podwatch beside rclone, and what the busy processes lose to each.

    python benchmarks/busy_upload.py [--rounds 3] [--mib 512] [--per-core 2]

On every core that may be used, ``--per-core`` loops count, all in one session, as training's processes are in theirs.
In each round come, interleaved: nothing, rclone at ordinary priority, podwatch's upload while its backup is behind (a
newer checkpoint waits: nice 0), and one of a 16th of the size that keeps pace (nice 15). rclone, podwatch's child and
the service each have a session of their own.
The service throws bodies away; its own CPU time is not counted as podwatch's or rclone's.

Lost is what the loops counted less than they would have while nothing was sent, in shares of what they had then. Beside
one other session, a fair share is half. Other work on the machine takes from all, and what it takes changes: only
ratios within one run say much, and losses of short turns more than those of long ones.
"""

import mmap
import os
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import MIB, ROOT, Figures, cpu_seconds, machine, parser
from benchmarks.measuring.discard import BUCKET
from benchmarks.measuring.sending import write_file
from benchmarks.measuring.uploaders import rclone_version

CLIENTS = (ROOT / ".venv-clients" / "bin" / "rclone", Path(shutil.which("rclone") or "/usr/bin/rclone"))
LOOP = """
import mmap, os, struct, sys
core, slot, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.sched_setaffinity(0, {core})
shared = mmap.mmap(os.open(path, os.O_RDWR), 0)
count = 0
while True:
    for _ in range(10_000):
        pass
    count += 1
    struct.pack_into("q", shared, 8 * slot, count)
"""
PODWATCH = """
import resource, sys, time
from pathlib import Path
from benchmarks.measuring.discard import BUCKET
from benchmarks.measuring.sending import LOW, Sending, access_of
url, home, behind, *paths = sys.argv[1:]
store = f"b2://{BUCKET}"
def spent():
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
sending = Sending([Path(p) for p in paths], store, access_of(url, store), Path(home), nice=0 if behind else LOW)
sys.stdin.readline()
used = spent()
sending.run()
print(spent() - used, flush=True)
"""
BEHIND, PACE = "podwatch, behind", "podwatch, keeping pace"
GOAL, FAIR = 0.5, 0.5


@dataclass(frozen=True, slots=True)
class Ran:
    """``lost``: the share of what the loops count when alone. ``took``: cores that the client took on average."""

    seconds: float
    lost: float
    took: float


class Loops:
    """The busy processes, in a session of their own."""

    def __init__(self, directory: Path, per_core: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        places = [core for core in cores for _ in range(per_core)]
        path = directory / "counts"
        path.write_bytes(bytes(8 * len(places)))
        self._shared = mmap.mmap(os.open(path, os.O_RDWR), 0)
        self.cores, self._count = len(cores), len(places)
        starter = "import os, subprocess, sys\nos.setsid()\nps = [subprocess.Popen([sys.executable, '-S', '-c',"
        starter += " sys.argv[1], c, str(i), sys.argv[2]]) for i, c in enumerate(sys.argv[3:])]\n"
        starter += "print(*(p.pid for p in ps), flush=True)\nsys.stdin.read()\n[p.kill() for p in ps]"
        command = [sys.executable, "-S", "-c", starter, LOOP, str(path), *map(str, places)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.pids = [int(p) for p in self._process.stdout.readline().split()]
        while min(self._counts()) == 0:
            time.sleep(0.05)

    def _counts(self) -> tuple[int, ...]:
        return struct.unpack_from(f"{self._count}q", self._shared)

    def each(self) -> int:
        return sum(self._counts())

    def cpu(self) -> float:
        return sum(cpu_seconds(pid) for pid in self.pids)

    def end(self) -> None:
        self._process.communicate()


@contextmanager
def service() -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "benchmarks.measuring.discard"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.kill()


class Measured:
    """Times one thing, and what the loops counted meanwhile."""

    def __init__(self, loops: Loops, server: int) -> None:
        self._loops, self._server = loops, server
        self.alone = 0.0
        """Counts per second while nothing is sent, and the CPU seconds that one count takes."""
        self.each = 0.0

    def baseline(self, seconds: float) -> float:
        """Returns how many cores the loops had."""
        before, cpu, began = self._loops.each(), self._loops.cpu(), time.monotonic()
        time.sleep(seconds)
        passed, counted = time.monotonic() - began, self._loops.each() - before
        self.alone, self.each = counted / passed, (self._loops.cpu() - cpu) / counted
        return (self._loops.cpu() - cpu) / passed

    def run(self, work: Callable[[], float]) -> Ran:
        """``work`` returns the CPU seconds that it took."""
        before, server, began = self._loops.each(), cpu_seconds(self._server), time.monotonic()
        used = work()
        seconds = time.monotonic() - began
        would = self.alone * seconds
        served = (cpu_seconds(self._server) - server) / self.each  # in counts
        lost = max(0.0, would - (self._loops.each() - before) - served) / would
        return Ran(seconds, lost, used / seconds)


def rclone(binary: Path, url: str, directory: Path, home: Path) -> float:
    """Its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {"RCLONE_CONFIG": str(home / "none"), "RCLONE_CONFIG_B_TYPE": "b2", "RCLONE_CONFIG_B_ACCOUNT": "id"}
    env |= {"RCLONE_CONFIG_B_KEY": "key", "RCLONE_CONFIG_B_ENDPOINT": url, "PATH": os.environ["PATH"]}
    command = [str(binary), "copy", str(directory), f"b:{BUCKET}/{home.name}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, start_new_session=True, check=False)
    if done.returncode:
        raise SystemExit(f"rclone failed: {done.stderr[-1000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@contextmanager
def podwatch(url: str, home: Path, paths: list[Path], *, behind: bool) -> Iterator[Callable[[], float]]:
    """A daemon's side of its own; a call sends the files and returns the CPU seconds of both sides."""
    command = [sys.executable, "-c", PODWATCH, url, str(home), "behind" if behind else "", *map(str, paths)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, start_new_session=True)

    def send() -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        if not (words := process.stdout.readline().split()):
            raise SystemExit("podwatch failed")
        return float(words[0])

    try:
        yield send
    finally:
        process.kill()
        process.communicate()


def into_cache(paths: list[Path]) -> None:
    """podwatch lets go of what it sent; without this the next one would read from the disk."""
    buffer = bytearray(MIB)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def measure(scratch: Path, mib: int, rounds: int, per_core: int, *, figures: Figures) -> dict[str, list[Ran]]:
    binary = next((p for p in CLIENTS if rclone_version(p)), None)
    if binary is None:
        figures.line("rclone is not here: left out (apt install rclone, or make test-clients)")
    name = f"rclone {rclone_version(binary)}, ordinary priority" if binary is not None else ""
    paths = [write_file(scratch / "set" / f"{n}.bin", mib // 4) for n in range(4)]
    small = [write_file(scratch / "small" / "0.bin", max(1, mib // 16))]
    os.sync()
    taken: dict[str, list[Ran]] = {}
    loops = Loops(scratch, per_core)
    try:
        with service() as (url, server):
            measured = Measured(loops, server)
            for turn in range(rounds):
                home = scratch / f"home-{turn}"
                home.mkdir()
                had = measured.baseline(4.0)
                figures.line(f"round {turn + 1}: alone, the loops have {had:.2f} of {loops.cores} cores; {machine()}")
                order = ["rclone", "podwatch"] if turn % 2 == 0 else ["podwatch", "rclone"]
                for who in order:
                    if who == "rclone" and binary is not None:
                        into_cache(paths)
                        ran = measured.run(lambda home=home: rclone(binary, url, paths[0].parent, home))  # type: ignore[misc]
                        taken.setdefault(name, []).append(ran)
                    if who == "podwatch":
                        with podwatch(url, home, paths, behind=True) as send:
                            into_cache(paths)
                            taken.setdefault(BEHIND, []).append(measured.run(send))
                (home / "pace").mkdir()
                with podwatch(url, home / "pace", small, behind=False) as send:
                    into_cache(small)
                    taken.setdefault(PACE, []).append(measured.run(send))
    finally:
        loops.end()
    return taken


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--mib", type=int, default=512)
    options.add_argument("--per-core", type=int, default=2)
    args = options.parse_args()
    figures = Figures("upload on busy cores")
    mib, rounds = (256, 1) if args.quick else (args.mib, args.rounds)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        taken = measure(Path(directory), mib, rounds, args.per_core, figures=figures)
    figures.line("")
    figures.line("| client | s [min-max] | MB/s | takes of a core | the loops lose |")
    figures.line("|---|---|---|---|---|")
    middle = {}
    for name, ran in taken.items():
        size = (max(1, mib // 16) if name == PACE else mib) * MIB
        seconds = middle[name] = statistics.median(r.seconds for r in ran)
        lost = statistics.median(r.lost for r in ran)
        took = statistics.median(r.took for r in ran)
        span = f"{seconds:.2f} [{min(r.seconds for r in ran):.2f}-{max(r.seconds for r in ran):.2f}]"
        figures.line(f"| {name} | {span} | {size / seconds / 1e6:.0f} | {took:.2f} | {100 * lost:.0f} % |")
    figures.line("")
    for name, seconds in middle.items():
        if name.startswith("rclone"):
            figures.at_least(f"behind, against {name}", seconds / middle[BEHIND], GOAL, "x")
    figures.at_most("what the busy processes lose to it", statistics.median(r.lost for r in taken[BEHIND]), FAIR, "")
    figures.line(f"took {time.monotonic() - began:.0f} s")
    return figures.code


if __name__ == "__main__":
    sys.exit(main())
