"""Clients that fetch the same files from the same B2 service, each a process of its own: time, CPU and memory."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring import ROOT
from benchmarks.measuring.discard import BUCKET
from benchmarks.measuring.serving import PART
from benchmarks.measuring.uploaders import Ran, _low, _measured, certificate
from podwatch.system.files import sync_filesystem

PREFIX = "set/"
Listed = list[tuple[str, str, int, list[str]]]
"""(name, file id, size, SHA-1 of each part) of every file that the service has."""

RAW = """
import hashlib, json, os, queue, socket, ssl, sys, threading
trusted = os.environ.get("BENCH_CERTIFICATE")
tls = ssl.create_default_context(cafile=trusted) if trusted else None
host, port, lanes, target, listed = sys.argv[2:]
PART, BLOCK = int(sys.argv[1]), 1 << 20
work = queue.SimpleQueue()
for name, file_id, size, hashes in json.load(open(listed)):
    descriptor = os.open(os.path.join(target, name), os.O_WRONLY | os.O_CREAT, 0o600)
    os.ftruncate(descriptor, size)
    for number, at in enumerate(range(0, size, PART)):
        work.put((descriptor, file_id, at, min(PART, size - at), hashes[number]))
def lane():
    line = socket.create_connection((host, int(port)))
    if tls is not None:
        line = tls.wrap_socket(line, server_hostname=host)
    buffer = memoryview(bytearray(BLOCK))
    while True:
        try:
            descriptor, file_id, at, length, expected = work.get_nowait()
        except queue.Empty:
            return
        line.sendall((f"GET /b2api/v4/b2_download_file_by_id?fileId={file_id} HTTP/1.1\\r\\n"
                      f"Range: bytes={at}-{at + length - 1}\\r\\n\\r\\n").encode())
        head = b""
        while not head.endswith(b"\\r\\n\\r\\n"):
            head += line.recv(1)
        digest, end = hashlib.sha1(), at + length
        while at < end:
            count = line.recv_into(buffer, min(BLOCK, end - at))
            digest.update(buffer[:count])
            os.pwrite(descriptor, buffer[:count], at)
            at += count
        assert digest.hexdigest() == expected
threads = [threading.Thread(target=lane) for _ in range(int(lanes))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
HASHED = """
import hashlib, json, os, sys
from concurrent.futures import ThreadPoolExecutor
target, part, listed, *copy = sys.argv[1:]
if os.spawnvp(os.P_WAIT, copy[0], copy):
    sys.exit("the copy failed")
def check(name, number, expected):
    digest = hashlib.sha1()
    at, left = number * int(part), int(part)
    with open(os.path.join(target, name), "rb", buffering=0) as file:
        file.seek(at)
        while left and (data := file.read(min(1 << 20, left))):
            digest.update(data)
            left -= len(data)
    assert digest.hexdigest() == expected, name
work = []
for name, _, _, sha1 in json.load(open(listed)):
    work += [(name, n, value) for n, value in enumerate(sha1)]
with ThreadPoolExecutor(os.cpu_count()) as pool:
    for done in [pool.submit(check, *one) for one in work]:
        done.result()
"""
PODWATCH = """
import json, resource, sys, time
from benchmarks.measuring.downloaders import fetch_with_podwatch
seconds, peak = fetch_with_podwatch(*sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([seconds, used.ru_utime + used.ru_stime, peak]))
"""


@dataclass(frozen=True, slots=True)
class Downloader:
    name: str
    run: Callable[[str, Path, Path, Listed], Ran]
    """``run(service URL, an empty directory for the files, another for what the client needs, what there is)``."""


def durable(run: Callable[[], Ran], target: Path) -> tuple[Ran, float]:
    """What a client took, and the seconds until all of it is on the disk: podwatch waits for that, others do not."""
    ran = run()
    began = time.monotonic()
    descriptor = os.open(target, os.O_RDONLY)
    sync_filesystem(descriptor)
    os.close(descriptor)
    return ran, ran.seconds + time.monotonic() - began


def podwatch() -> Downloader:
    """The real child with its real job; its start and its waiting for the disk count."""

    def run(url: str, target: Path, home: Path, listed: Listed) -> Ran:
        (home / "listed.json").write_text(json.dumps(listed))
        command = [sys.executable, "-c", PODWATCH, url, str(target), str(home / "listed.json")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"podwatch failed: {done.stderr[-1500:]}")
        return Ran(*json.loads(done.stdout.splitlines()[-1]))

    return Downloader("podwatch", run)


def fetch_with_podwatch(url: str, target: str, listed: str) -> tuple[float, float]:
    """Seconds, and the child's peak in MiB. Every file of the service is an object with one hash."""
    from benchmarks.measuring.sending import access_of, run_transfer
    from podwatch.domain.checkpoint import FileEntry
    from podwatch.store.transfer.job import TransferJob

    rows = [(name, size, digest) for name, _, size, (digest,) in json.loads(Path(listed).read_text())]
    part = PREFIX.rstrip("/")
    files = tuple(FileEntry(name, part, size, 1, hashes=(f"sha1:{digest}",)) for name, size, digest in rows)
    store, root = f"b2://{BUCKET}", os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    began = time.monotonic()
    peak = run_transfer(TransferJob("fetch", store, "", files, 1 << 40, {part: root}), access_of(url, store))
    seconds = time.monotonic() - began
    os.close(root)
    return seconds, peak


def raw(lanes: int) -> Downloader:
    def run(url: str, target: Path, home: Path, listed: Listed) -> Ran:
        host, port = url.partition("://")[2].split(":")
        (home / "listed.json").write_text(json.dumps(listed))
        command = [
            sys.executable,
            "-S",
            "-c",
            RAW,
            str(PART),
            host,
            port,
            str(lanes),
            str(target),
            str(home / "listed.json"),
        ]
        return _measured(command, home, certificate(url))

    return Downloader(f"Python without HTTP library, {lanes} conns", run)


def b2_sync(binary: Path, *options: str) -> Downloader:
    def run(url: str, target: Path, home: Path, listed: Listed) -> Ran:
        keys = {"B2_APPLICATION_KEY_ID": "id", "B2_APPLICATION_KEY": "key", "B2_ENVIRONMENT": url}
        command = [str(binary), "sync", "--no-progress", *options, f"b2://{BUCKET}/{PREFIX}", str(target)]
        return _low(command, home, **keys)

    return Downloader(" ".join(("b2 sync", *options)), run)


def rclone(binary: Path, version: str, *options: str, hashing: bool = False) -> Downloader:
    """``hashing``: the SHA-1 of every part is compared afterwards, on all cores."""

    def run(url: str, target: Path, home: Path, listed: Listed) -> Ran:
        config = {"RCLONE_CONFIG": str(home / "none"), "RCLONE_CONFIG_B_TYPE": "b2", "RCLONE_CONFIG_B_ACCOUNT": "id"}
        config |= {"RCLONE_CONFIG_B_KEY": "key", "RCLONE_CONFIG_B_ENDPOINT": url}
        command = [str(binary), "copy", *options, f"b:{BUCKET}/{PREFIX}", str(target)]
        if hashing:
            (home / "listed.json").write_text(json.dumps(listed))
            check = [sys.executable, "-S", "-c", HASHED, str(target), str(PART), str(home / "listed.json")]
            command = [*check, *command]
        return _low(command, home, **config)

    return Downloader(" ".join((f"rclone {version}", *options, *(["+ hashing"] if hashing else []))), run)
