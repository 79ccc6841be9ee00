"""How fast checkpoints reach B2: podwatch beside the machine's limit, b2sdk, `b2 sync` and two rclones, in one run.

    python benchmarks/upload.py [--rounds 3] [--only large small far tls] [--quick] [--svg FILE]

The service throws bodies away (measuring/discard.py), so that the clients are what is measured. ``large`` is a
checkpoint of 4.29 GB (1 x 2 GiB + 4 x 512 MiB), ``small`` 2,000 files of 64 KiB, ``far`` 1.07 GB (2 x 512 MiB) at 60 ms
and 40 MB/s per connection, ``tls`` 2.15 GB (4 x 512 MiB) over TLS. Clients take turns within each round, and each round
begins with another one; files are in the page cache before each turn; all run at the same priority (``--nice``: that
of podwatch's child in real life). Start-up counts. Medians; on a shared machine ratios are what counts, those of CPU
time most.

While podwatch sends, a loop as the daemon's notes how late it wakes; that is judged with ``--nice`` and by
upload_jitter.py. The clients come from ``make test-clients`` and Debian; one that is not here is left out. rclone paces
itself to 100 calls a second, so that ``small`` takes 22 s whatever else happens: it has one round there. Three rounds
take seven minutes on two quiet cores.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import MIB, ROOT, Figures, machine, parser, percentile
from benchmarks.measuring.bars import svg
from benchmarks.measuring.sending import write_file
from benchmarks.measuring.uploaders import (
    NICE,
    Ran,
    Uploader,
    b2_sync,
    b2sdk,
    certify,
    podwatch,
    raw,
    rclone,
    rclone_version,
)

CLIENTS = ROOT / ".venv-clients" / "bin"
MEMORY_LIMIT = 80.0
LATE_MS = 20.0
FEWEST_BEATS = 100
"""For a 99th percentile that means something: a short upload has too few."""


@dataclass(frozen=True, slots=True)
class Work:
    name: str
    title: str
    sizes: tuple[int, ...]
    """Bytes of each file."""
    clients: tuple[Uploader, ...]
    options: tuple[str, ...] = ()
    """Of the service."""
    once: tuple[Uploader, ...] = ()
    """Measured in the first round only."""


def works(quick: bool, certificate: Path) -> list[Work]:
    b2, new, old = CLIENTS / "b2", CLIENTS / "rclone", Path("/usr/bin/rclone")
    versions = [(path, v) for path in (new, old) if (v := rclone_version(path))]
    sync = [b2_sync(b2)] if b2.exists() else []
    many = [b2_sync(b2, "--threads", "20")] if b2.exists() else []
    rclones = tuple(rclone(path, version) for path, version in versions)
    wide = [rclone(path, version, "--transfers", "16") for path, version in versions[:1]]
    half = 512 * MIB
    big = (half,) if quick else (4 * half, *(4 * [half]))
    count = 300 if quick else 2000
    far = 2 * ((128 if quick else 512) * MIB,)
    tls = (1 if quick else 4) * (half,)
    key = certificate.with_suffix(".key")
    return [
        Work("large", f"{sum(big) / 1e9:.2f} GB in {len(big)} file(s)", big,
             (podwatch(), raw(4), b2sdk(1), *sync, *rclones)),
        Work("small", f"{count} files of 64 KiB", (65536,) * count,
             (podwatch(), raw(4), b2sdk(4), *sync, *many), once=rclones),
        Work("far", f"{sum(far) / 1e9:.2f} GB in 2 files, 60 ms, 40 MB/s per connection", far,
             (podwatch(), raw(32), *sync, *many, *rclones, *wide),
             ("--latency", "0.06", "--rate", "40e6")),
        Work("tls", f"{sum(tls) / 1e9:.2f} GB in {len(tls)} file(s), TLS", tls,
             (podwatch(), raw(4), *sync, *rclones), ("--tls", str(certificate), str(key))),
    ]  # fmt: skip


@contextmanager
def service(work: Work) -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.measuring.discard", *work.options]
    if "--tls" in work.options:
        os.environ["REQUESTS_CA_BUNDLE"] = work.options[1]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()
            os.environ.pop("REQUESTS_CA_BUNDLE", None)


def into_cache(directory: Path) -> None:
    """podwatch lets go of what it sent; without this the next one would read from the disk."""
    buffer = bytearray(MIB)
    for path in directory.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def measure(work: Work, scratch: Path, rounds: int) -> dict[str, list[Ran]]:
    directory = scratch / work.name
    directory.mkdir()
    for number, size in enumerate(work.sizes):
        path = directory / f"__{number:04}_0.distcp"
        if size >= MIB:
            write_file(path, size // MIB)
        else:
            path.write_bytes(os.urandom(size))
    os.sync()  # or the first would share the machine with the writing back of its files
    clients = (*work.clients, *work.once)
    taken: dict[str, list[Ran]] = {client.name: [] for client in clients}
    for turn in range(rounds):
        start = turn % len(work.clients)  # nobody is always the one after the one that leaves the memory in disorder
        order = clients if turn == 0 else (*work.clients[start:], *work.clients[:start])
        for number, client in enumerate(order):
            into_cache(directory)
            home = scratch / f"{work.name}-{turn}-{number}"
            home.mkdir()
            with service(work) as url:
                taken[client.name].append(client.run(url, directory, home))
    for path in directory.iterdir():
        path.unlink()
    return taken


def report(work: Work, taken: dict[str, list[Ran]], figures: Figures) -> dict[str, tuple[float, float]]:
    """The table, as benchmarks/transfers.md has it. Returns each client's median seconds and CPU seconds per GB."""
    total = sum(work.sizes)
    middle = {
        name: (statistics.median(r.seconds for r in ran), statistics.median(r.cpu for r in ran) / total * 1e9)
        for name, ran in taken.items()
    }
    ours, our_cpu = middle["podwatch"]
    figures.line("")
    figures.line(f"{work.title} ({machine()})")
    figures.line("")
    figures.line("| client | s [min-max] | MB/s | CPU s per GB | peak MiB | podwatch is | and takes |")
    figures.line("|---|---|---|---|---|---|---|")
    for name, ran in taken.items():
        seconds, cpu = middle[name]
        span = f"{seconds:.2f} [{min(r.seconds for r in ran):.2f}-{max(r.seconds for r in ran):.2f}]"
        ratio = " | " if name == "podwatch" else f"{seconds / ours:.2f}x as fast | {our_cpu / cpu:.2f} of its CPU"
        peak = max(r.peak_mib for r in ran)
        figures.line(f"| {name} | {span} | {total / seconds / 1e6:.0f} | {cpu:.2f} | {peak:.0f} | {ratio} |")
    figures.line("")
    return middle


def judge(work: Work, taken: dict[str, list[Ran]], middle: dict[str, tuple[float, float]], figures: Figures) -> None:
    ours = middle["podwatch"][0]
    figures.at_most("peak memory of the child", max(r.peak_mib for r in taken["podwatch"]), MEMORY_LIMIT, "MiB")
    for name, (seconds, _) in middle.items():
        if name.startswith("limit") and work.name == "large":
            figures.at_least("share of the limit's speed", seconds / ours, 0.8, "of it")
        elif name.startswith("b2 sync"):
            figures.at_least(f"speed against {name}", seconds / ours, 3.0 if work.name == "large" else 1.0, "x")
        elif name.startswith("rclone"):
            new = work.name == "large" and " 1.60" not in name
            figures.at_least(f"speed against {name}", seconds / ours, 1.8 if new else 1.0, "x")
    late = [ms for r in taken["podwatch"] for ms in r.late]
    quiet = [ms for r in taken["podwatch"] for ms in r.quiet]
    if len(late) >= FEWEST_BEATS:
        figures.line(f"the loop before: late p50 {percentile(quiet, 0.5):.2f}, p99 {percentile(quiet, 0.99):.2f} ms")
        p99 = percentile(late, 0.99)
        figures.line(f"while sending: late p50 {percentile(late, 0.5):.2f}, p99 {p99:.2f}, max {max(late):.2f} ms")
        if NICE in os.environ:  # with the child at ordinary priority it is worse than it ever is: told, not judged
            figures.at_most("late while sending, p99", p99, LATE_MS, "ms")


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--only", nargs="*", choices=("large", "small", "far", "tls"), default=())
    options.add_argument("--nice", action="store_true", help="all at the nice value of podwatch's child")
    options.add_argument("--svg", type=Path, help="write the plot there")
    args = options.parse_args()
    if args.nice:
        os.environ[NICE] = "1"
    figures = Figures("upload")
    plotted = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        certificate = Path(directory) / "certificate.pem"
        secure = certify(certificate)
        for work in works(args.quick, certificate):
            if (not args.only or work.name in args.only) and (secure or work.name != "tls"):
                taken = measure(work, Path(directory), 1 if args.quick else args.rounds)
                middle = report(work, taken, figures)
                judge(work, taken, middle, figures)
                plotted.append((work.title, middle))
    figures.line(f"took {time.monotonic() - began:.0f} s")
    if args.svg:
        args.svg.parent.mkdir(parents=True, exist_ok=True)
        args.svg.write_text(svg(plotted, f"Medians of {1 if args.quick else args.rounds} round(s); {machine()}"))
    return figures.code


if __name__ == "__main__":
    sys.exit(main())
