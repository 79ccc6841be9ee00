"""One file, and the same bytes as 8 files, to the loopback B2 server: podwatch's child, b2sdk's own upload, the floor.

    python benchmarks/upload.py [--mib 256] [--rounds 3]

All three run as processes of the lowest priority, as podwatch's child does, and their start-up counts. The floor reads
each file once, hashes it and writes it to a local socket that nobody looks at. The server hashes and stores what it
gets in Python on the same cores, so both clients are bound by it: the ratios count, not the MB/s.
"""

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import ROOT, Figures, memory_mib, parser, percentile
from benchmarks.measuring.sending import b2_credentials, job_for, send, write_file
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server

MEMORY_LIMIT = 80.0
LOW = """
import contextlib, os
os.setsid()
os.nice(19)
with contextlib.suppress(OSError):
    open("/proc/self/autogroup", "w").write("19")
"""
RAW = """
import hashlib, os, socket, sys, threading
ours, theirs = socket.socketpair()
def swallow():
    buffer = bytearray(1 << 20)
    while theirs.recv_into(buffer):
        pass
threading.Thread(target=swallow, daemon=True).start()
digest, buffer = hashlib.sha1(), memoryview(bytearray(1 << 20))
for path in sys.argv[1:]:
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            ours.sendall(buffer[:count])
"""
SDK = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from b2sdk.v3 import B2Api, InMemoryAccountInfo
url, bucket, key_id, key, prefix, *paths = sys.argv[1:]
api = B2Api(InMemoryAccountInfo(), max_upload_workers=4)
api.authorize_account(application_key_id=key_id, application_key=key, realm=url)
place = api.get_bucket_by_name(bucket)
def send(path):
    place.upload_local_file(local_file=path, file_name=prefix + os.path.basename(path))
with ThreadPoolExecutor(4) as pool:
    list(pool.map(send, paths))
"""


def other(code: str, *arguments: str) -> tuple[float, float]:
    """Seconds and peak memory of a client of its own."""
    began, peak = time.monotonic(), 0.0
    process = subprocess.Popen([sys.executable, "-c", LOW + code, *arguments], cwd=ROOT)
    while process.poll() is None:
        try:
            peak = max(peak, memory_mib(process.pid, "VmHWM"))
        except OSError:
            break
        time.sleep(0.02)
    if process.wait():
        raise SystemExit(f"a peer failed with exit code {process.returncode}")
    return time.monotonic() - began, peak


def measure(directory: Path, args: argparse.Namespace, figures: Figures) -> None:
    mib, rounds = (64, 2) if args.quick else (args.mib, args.rounds)
    for count in (1, 8):
        sources = [write_file(directory / str(count) / f"__{n}_0.distcp", mib // count) for n in range(count)]
        paths = [str(s) for s in sources]
        taken: dict[str, list[float]] = {"podwatch": [], "b2sdk": [], "floor": []}
        peaks = {"podwatch": 0.0, "b2sdk": 0.0}
        for number in range(rounds):
            with B2Server(directory / f"b2-{count}-{number}") as server:
                url, credentials = b2_credentials(server.url)
                sent = asyncio.run(send(job_for(sources, url, "ours", directory / "lock"), credentials))
                taken["podwatch"].append(sent.seconds)
                peaks["podwatch"] = max(peaks["podwatch"], sent.peak_mib)
                seconds, peak = other(SDK, server.url, BUCKET, KEY_ID, KEY, "sdk/", *paths)
                taken["b2sdk"].append(seconds)
                peaks["b2sdk"] = max(peaks["b2sdk"], peak)
                taken["floor"].append(other(RAW, *paths)[0])
            shutil.rmtree(directory / f"b2-{count}-{number}")
        middle = {name: percentile(seconds, 0.5) for name, seconds in taken.items()}
        figures.line(f"-- {mib} MiB as {count} file{'s' if count > 1 else ''}")
        for name, seconds in middle.items():
            memory = f", peak {peaks[name]:.0f} MiB" if name in peaks else ""
            figures.line(f"{name}: {seconds:.2f} s, {mib * 1.048576 / seconds:.0f} MB/s{memory}")
        figures.at_least("speed against b2sdk's upload_local_file", middle["b2sdk"] / middle["podwatch"], 1.0, "x")
        figures.line(f"share of the floor's speed: {middle['floor'] / middle['podwatch']:.2f}")
        figures.at_most("peak memory of the child", peaks["podwatch"], MEMORY_LIMIT, "MiB")


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--mib", type=int, default=256)
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    figures = Figures("upload")
    with tempfile.TemporaryDirectory() as directory:
        measure(Path(directory), args, figures)
    return figures.code


if __name__ == "__main__":
    sys.exit(main())
