"""How fast checkpoints come back from B2: podwatch beside rclone, `b2 sync` and a bare Python client, in one run.

    python benchmarks/restore.py [--rounds 3] [--only large small far tls] [--scratch DIR] [--quick]

``large`` is a checkpoint of 4.29 GB (1 x 2 GiB + 4 x 512 MiB), ``small`` 2,000 files of 64 KiB, ``far`` 1.07 GB (2 x
512 MiB) at 60 ms and 40 MB/s per connection, ``tls`` 2.15 GB (4 x 512 MiB) over TLS. The service hands files out of the
page cache (measuring/serving.py). Clients take turns within each round, and each round begins with another one, each
into a directory of its own below ``--scratch``; start-up counts. podwatch compares every part with its hash and waits
until all is on the disk; "to disk" is the same for the others. "rclone + hashing" compares every part, too, after the
copy and on all cores. What came is compared with what was sent. The ratio is the median of the rounds' own ratios,
because neighbours on a shared machine change from round to round.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import MIB, ROOT, Figures, machine, parser
from benchmarks.measuring.downloaders import (
    PREFIX,
    Downloader,
    Listed,
    b2_sync,
    durable,
    podwatch,
    raw,
    rclone,
)
from benchmarks.measuring.sending import write_file
from benchmarks.measuring.uploaders import Ran, certify, rclone_version

CLIENTS = ROOT / ".venv-clients" / "bin"
MEMORY_LIMIT = 80.0


@dataclass(frozen=True, slots=True)
class Work:
    name: str
    title: str
    sizes: tuple[int, ...]
    latency: float
    rate: float
    clients: tuple[Downloader, ...]
    tls: tuple[str, ...] = ()
    """Certificate and key."""


def works(quick: bool, certificate: Path) -> list[Work]:
    b2, new = CLIENTS / "b2", CLIENTS / "rclone"
    sync = [b2_sync(b2)] if b2.exists() else []
    many = [b2_sync(b2, "--threads", "20")] if b2.exists() else []
    version = rclone_version(new)
    copy = [rclone(new, version)] if version else []
    checked = [rclone(new, version, hashing=True)] if version else []
    wide = [rclone(new, version, "--transfers", "16", "--multi-thread-streams", "16")] if version else []
    piece = 95 * MIB  # what podwatch stores are pieces: each client fetches the same objects
    big = (5 if quick else 42) * (piece,)
    count = 300 if quick else 2000
    tls = (5 if quick else 21) * (piece,)
    far = (3 if quick else 11) * (piece,)
    return [
        Work("large", f"{sum(big) / 1e9:.2f} GB in {len(big)} files", big, 0.0, 0.0,
             (podwatch(), raw(4), *sync, *copy, *checked)),
        Work("small", f"{count} files of 64 KiB", (65536,) * count, 0.0, 0.0,
             (podwatch(), raw(4), *sync, *many, *copy, *wide)),
        Work("far", f"{sum(far) / 1e9:.2f} GB in {len(far)} files, 60 ms, 40 MB/s per connection", far, 0.06, 40e6,
             (podwatch(), raw(32), *sync, *many, *copy, *wide)),
        Work("tls", f"{sum(tls) / 1e9:.2f} GB in {len(tls)} file(s), TLS", tls, 0.0, 0.0,
             (podwatch(), raw(4), *sync, *copy, *checked),
             (str(certificate), str(certificate.with_suffix(".key")))),
    ]  # fmt: skip


@contextmanager
def service(work: Work, source: Path) -> Iterator[tuple[str, Listed]]:
    command = [sys.executable, "-m", "benchmarks.measuring.serving", str(source), "--prefix", PREFIX]
    command += ["--latency", str(work.latency), "--rate", str(work.rate)]
    if work.tls:
        command += ["--tls", *work.tls]
        os.environ["REQUESTS_CA_BUNDLE"] = work.tls[0]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            listed = []
            while (line := process.stdout.readline().strip()).startswith("["):
                name, file_id, size, hashes = json.loads(line)
                listed.append((name, file_id, size, hashes))
            if not line:
                raise RuntimeError("the service did not start")
            yield line, listed
        finally:
            process.kill()
            os.environ.pop("REQUESTS_CA_BUNDLE", None)


def measure(work: Work, scratch: Path, rounds: int) -> dict[str, list[tuple[Ran, float]]]:
    source = scratch / work.name
    source.mkdir()
    for number, size in enumerate(work.sizes):
        path = source / f"__{number:04}_0.distcp"
        if size >= MIB:
            write_file(path, size // MIB)
        else:
            path.write_bytes(os.urandom(size))
    taken: dict[str, list[tuple[Ran, float]]] = {client.name: [] for client in work.clients}
    with service(work, source) as (url, listed):
        for turn in range(rounds):
            start = turn % len(work.clients)  # nobody is always the one after the same other
            for number, client in enumerate((*work.clients[start:], *work.clients[:start])):
                home, target = (scratch / f"{work.name}-{what}-{turn}-{number}" for what in ("home", "target"))
                home.mkdir()
                target.mkdir()
                os.sync()
                taken[client.name].append(durable(lambda c=client, t=target, h=home: c.run(url, t, h, listed), target))  # type: ignore[misc]
                if turn == 0:
                    compare(source, target, client.name)
                shutil.rmtree(target)
    shutil.rmtree(source)
    return taken


def compare(source: Path, target: Path, client: str) -> None:
    found = {p.name: p for p in target.rglob("*.distcp")}
    for path in source.iterdir():
        if path.name not in found or subprocess.run(["cmp", "-s", path, found[path.name]], check=False).returncode:
            raise SystemExit(f"{client} did not bring {path.name} as it is")


def report(work: Work, taken: dict[str, list[tuple[Ran, float]]], figures: Figures) -> None:
    """The table: medians of each client until it ended, and until all was on the disk."""
    total = sum(work.sizes)
    middle = {
        name: (statistics.median(r.seconds for r, _ in ran), statistics.median(s for _, s in ran))
        for name, ran in taken.items()
    }
    figures.line(f"-- {work.title} ({machine()})")
    figures.line(
        f"{'client':46} {'s [min-max]':>20} {'to disk':>7} {'MB/s':>6} {'CPU s/GB':>8} {'MiB':>5}  podwatch is"
    )
    for name, ran in taken.items():
        seconds = [r.seconds for r, _ in ran]
        cpu = statistics.median(r.cpu for r, _ in ran) / total * 1e9
        span = f"{middle[name][0]:.2f} [{min(seconds):.2f}-{max(seconds):.2f}]"
        ratio = "" if name == "podwatch" else f"{ratios(taken, name)[0]:.2f}x ({ratios(taken, name)[1]:.2f}x to disk)"
        peak = max(r.peak_mib for r, _ in ran)
        speed = total / middle[name][0] / 1e6
        figures.line(f"{name:46} {span:>20} {middle[name][1]:7.2f} {speed:6.0f} {cpu:8.2f} {peak:5.0f}  {ratio}")


def ratios(taken: dict[str, list[tuple[Ran, float]]], name: str) -> tuple[float, float]:
    """How many times as fast podwatch is, round by round, the median: until it ended, and until all was on the disk."""
    pairs = list(zip(taken[name], taken["podwatch"], strict=True))
    return (
        statistics.median(theirs.seconds / ours.seconds for (theirs, _), (ours, _) in pairs),
        statistics.median(theirs / ours for (_, theirs), (_, ours) in pairs),
    )


GOALS = {"rclone": 0.9, "rclone + hashing": 1.2}
"""Of large files; everywhere else podwatch should be ahead of all."""


def judge(work: Work, taken: dict[str, list[tuple[Ran, float]]], figures: Figures) -> None:
    ours = [r for r, _ in taken["podwatch"]]
    figures.at_most("peak memory", max(r.peak_mib for r in ours), MEMORY_LIMIT, "MiB")
    for name in taken:
        kind = "rclone + hashing" if name.endswith("+ hashing") else name.partition(" ")[0]
        if kind in ("b2", *GOALS):
            goal = GOALS.get(kind, 1.0) if work.name == "large" else 1.0
            figures.at_least(f"speed against {name}", ratios(taken, name)[0], goal, "x")


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--only", nargs="*", choices=("large", "small", "far", "tls"), default=())
    options.add_argument("--scratch", type=Path, help="where files are served from and brought to; default: TMPDIR")
    args = options.parse_args()
    figures = Figures("restore")
    with tempfile.TemporaryDirectory(dir=args.scratch) as directory:
        certificate = Path(directory) / "certificate.pem"
        secure = certify(certificate)
        for work in works(args.quick, certificate):
            if (not args.only or work.name in args.only) and (secure or work.name != "tls"):
                taken = measure(work, Path(directory), 1 if args.quick else args.rounds)
                report(work, taken, figures)
                judge(work, taken, figures)
    return figures.code


if __name__ == "__main__":
    sys.exit(main())
