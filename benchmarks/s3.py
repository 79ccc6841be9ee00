"""How fast a checkpoint reaches an S3-compatible store: podwatch beside a raw client, rclone and boto3, in one run.

    python benchmarks/s3.py [--gib 4] [--rounds 3] [--only http tls] [--quick]

The service throws bodies away (measuring/discard_s3.py), so that the clients are what is measured; over TLS it decrypts
on the same cores. podwatch hashes each part with SHA-1, sends the hash in a header, then the part, as for a store that
was seen to check it; the raw client reads, hashes and sends once (the limit). Clients take turns within each round; the
files are in the page cache. ``make test-s3`` installs
rclone and boto3 (without the checksum that it adds by default); one that is not here is left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import ROOT, Figures
from benchmarks.measuring.discard_s3 import BUCKET
from benchmarks.measuring.sending import write_file
from benchmarks.measuring.uploaders import Ran, _files, _low, _measured, certificate, certify, rclone_version

CLIENTS = ROOT / ".venv-s3" / "bin"
LIMIT = 0.85
"""Of the raw client (DESIGN: S3, 4 GiB)."""
MEMORY_LIMIT = 80.0
RAW = """
import base64, hashlib, os, queue, socket, ssl, sys, threading
trusted = os.environ.get("BENCH_CERTIFICATE")
tls = ssl.create_default_context(cafile=trusted) if trusted else None
host, port, lanes, *paths = sys.argv[1:]
PART, BLOCK = 100_000_000, 1 << 20
work = queue.SimpleQueue()
for path in paths:
    descriptor, size = os.open(path, os.O_RDONLY), os.stat(path).st_size
    for at in range(0, size, PART):
        work.put((descriptor, at, min(PART, size - at)))
def lane():
    line = socket.create_connection((host, int(port)))
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is not None:
        line = tls.wrap_socket(line, server_hostname=host)
    buffer = memoryview(bytearray(BLOCK))
    while True:
        try:
            descriptor, at, length = work.get_nowait()
        except queue.Empty:
            return
        line.sendall(f"PUT /bench-bucket/raw HTTP/1.1\\r\\nContent-Length: {length}\\r\\n\\r\\n".encode())
        digest, end = hashlib.sha1(), at + length
        while at < end:
            count = os.preadv(descriptor, [buffer[: min(BLOCK, end - at)]], at)
            digest.update(buffer[:count])
            line.sendall(buffer[:count])
            at += count
        answer = b""
        while not answer.endswith(b"\\r\\n\\r\\n"):
            answer += line.recv(65536)
threads = [threading.Thread(target=lane) for _ in range(int(lanes))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
PODWATCH = """
import asyncio, json, pathlib, resource, sys
from benchmarks.measuring.sending import Sending, access_of
url, home, *paths = sys.argv[1:]
store = "s3://bench-bucket"
sending = Sending([pathlib.Path(p) for p in paths], store, access_of(url, store), pathlib.Path(home))
sent = asyncio.run(sending.measure())
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([sent.seconds, used.ru_utime + used.ru_stime + sent.cpu, used.ru_maxrss / 1024]))
"""
BOTO = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
url, at_once, part, *paths = sys.argv[1:]
s3 = boto3.client("s3", endpoint_url=url, region_name="us-east-1",
                  config=Config(max_pool_connections=16, request_checksum_calculation="when_required"))
config = TransferConfig(multipart_chunksize=int(part) << 20, max_concurrency=int(at_once))
for path in paths:
    s3.upload_file(path, "bench-bucket", "boto/" + os.path.basename(path), Config=config)
"""


@dataclass(frozen=True, slots=True)
class Client:
    name: str
    run: Callable[[str, Path, Path], Ran]


def raw(lanes: int) -> Client:
    def run(url: str, directory: Path, home: Path) -> Ran:
        host, port = url.partition("://")[2].split(":")
        command = [sys.executable, "-S", "-c", RAW, host, port, str(lanes), *_files(directory)]
        return _measured(command, home, certificate(url))

    return Client(f"limit: read + SHA-1 + send, {lanes} conns", run)


def podwatch() -> Client:
    def run(url: str, directory: Path, home: Path) -> Ran:
        command = [sys.executable, "-c", PODWATCH, url, str(home), *_files(directory)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"podwatch failed: {done.stderr[-1500:]}")
        return Ran(*json.loads(done.stdout.splitlines()[-1]))

    return Client("podwatch", run)


def boto(at_once: int, part: int) -> Client:
    def run(url: str, directory: Path, home: Path) -> Ran:
        keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "AWS_EC2_METADATA_DISABLED": "true"}
        keys |= {"AWS_CA_BUNDLE": os.environ.get("REQUESTS_CA_BUNDLE", "")} if url.startswith("https") else {}
        command = [str(CLIENTS / "python"), "-c", BOTO, url, str(at_once), str(part), *_files(directory)]
        return _low(command, home, **keys)

    return Client(f"boto3 upload_file, {at_once} x {part} MiB", run)


def rclone(version: str, transfers: int, part: int) -> Client:
    def run(url: str, directory: Path, home: Path) -> Ran:
        config = {
            "RCLONE_CONFIG": str(home / "none"),
            "RCLONE_CONFIG_S_TYPE": "s3",
            "RCLONE_CONFIG_S_PROVIDER": "Other",
        }
        config |= {"RCLONE_CONFIG_S_ACCESS_KEY_ID": "id", "RCLONE_CONFIG_S_SECRET_ACCESS_KEY": "key"}
        config |= {"RCLONE_CONFIG_S_ENDPOINT": url}
        options = ["--s3-no-check-bucket", "--s3-chunk-size", f"{part}M", "--transfers", str(transfers)]
        command = [str(CLIENTS / "rclone"), "copy", *options, str(directory), f"s:{BUCKET}/{home.name}"]
        return _low(command, home, **config)

    return Client(f"rclone {version}, {transfers} files x {part} MiB", run)


def clients() -> list[Client]:
    found = [podwatch(), raw(4)]
    if version := rclone_version(CLIENTS / "rclone"):
        found.append(rclone(version, 4, 32))
    if (CLIENTS / "python").exists():
        found += [boto(10, 8), boto(4, 32)]
    return found


def service(scheme: str, directory: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "benchmarks.measuring.discard_s3"]
    if scheme == "tls":
        pem = directory / "service.pem"
        if not certify(pem):
            raise SystemExit("openssl is not here: --only http")
        os.environ["REQUESTS_CA_BUNDLE"] = str(pem)
        command += ["--tls", str(pem), str(pem.with_suffix(".key"))]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert started.stdout is not None
    return started, started.stdout.readline().strip()


def compare(scheme: str, gib: float, rounds: int, figures: Figures, base: Path) -> None:
    files = base / f"files-{scheme}"
    files.mkdir()
    mib = int(gib * 1024)
    for number, size in enumerate((mib // 2, *[mib // 8] * 4)):
        write_file(files / f"{number}.bin", size)
    total = sum(path.stat().st_size for path in files.iterdir())
    process, url = service(scheme, base)
    runs: dict[str, list[Ran]] = {}
    try:
        for turn in range(rounds):
            order = clients()
            for number, client in enumerate(order[turn % len(order) :] + order[: turn % len(order)]):
                home = base / f"{scheme}-{turn}-{number}"
                home.mkdir()
                runs.setdefault(client.name, []).append(client.run(url, files, home))
    finally:
        process.kill()
        os.environ.pop("REQUESTS_CA_BUNDLE", None)
    for path in files.iterdir():
        path.unlink()
    figures.line(f"{scheme}: {gib:g} GiB in 5 files, {rounds} rounds")
    speeds = {name: statistics.median(total / r.seconds / 1e6 for r in done) for name, done in runs.items()}
    for name, speed in sorted(speeds.items(), key=lambda item: -item[1]):
        cpu = statistics.median(r.cpu for r in runs[name])
        peak = max(r.peak_mib for r in runs[name])
        figures.line(f"  {name:44} {speed:7.0f} MB/s  {cpu:5.1f} CPU-s  {peak:5.0f} MiB")
    mine = speeds["podwatch"]
    for name, speed in speeds.items():
        if name.startswith("limit"):
            figures.at_least(f"{scheme}: of the raw limit", mine / speed, LIMIT, "x")
        elif name != "podwatch":
            figures.at_least(f"{scheme}: beside {name}", mine / speed, 1.0, "x")
    figures.at_most(f"{scheme}: memory", max(r.peak_mib for r in runs["podwatch"]), MEMORY_LIMIT, "MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=["http", "tls"])
    parser.add_argument("--quick", action="store_true", help="1 GiB, one round")
    args = parser.parse_args()
    gib, rounds = (1.0, 1) if args.quick else (args.gib, args.rounds)
    figures = Figures("S3 uploads")
    for scheme in args.only:
        with tempfile.TemporaryDirectory(prefix="podwatch-s3-") as directory:
            compare(scheme, gib, rounds, figures, Path(directory))
    return figures.code


if __name__ == "__main__":
    sys.exit(main())
