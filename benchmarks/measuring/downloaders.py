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
from benchmarks.measuring.uploaders import Ran, _low, _measured
from podwatch.system.files import sync_filesystem

PREFIX = "set/"
Listed = list[tuple[str, str, int, list[str]]]
"""(name, file id, size, SHA-1 of each part) of every file that the service has."""

RAW = """
import hashlib, json, os, queue, socket, sys, threading
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
PODWATCH = """
import json, resource, sys, time
from benchmarks.measuring.downloaders import fetch_with_podwatch
seconds = fetch_with_podwatch(*sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))
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


def fetch_with_podwatch(url: str, target: str, listed: str) -> float:
    from podwatch.domain.remote import ManifestFile
    from podwatch.stores.credentials import Credentials
    from podwatch.sync.fetch_job import FetchJob
    from podwatch.sync.fetch_process import FetchProcess
    from podwatch.system.pinned import pin_of

    files = tuple(
        ManifestFile(f"trainer/{name}", "trainer", size, 1, 0o644, PREFIX + name, file_id, tuple(hashes))
        for name, file_id, size, hashes in json.loads(Path(listed).read_text())
    )
    job = FetchJob(
        step=1, store=f"b2://{BUCKET}", writer_id="bench", part_size=PART, files=files, symlinks=(),
        staging={"trainer": target}, targets={"trainer": target + "/nothing"}, connections=4, connections_max=32,
        pins=(pin_of(Path(target).parent),),
    )  # fmt: skip
    began = time.monotonic()
    done = FetchProcess(lambda: Credentials("id", "key", url)).fetch(job, lambda _here, _came: None)
    if done.downloaded != sum(f.size for f in files):
        raise SystemExit("podwatch did not fetch everything")
    return time.monotonic() - began


def raw(lanes: int) -> Downloader:
    def run(url: str, target: Path, home: Path, listed: Listed) -> Ran:
        host, port = url.removeprefix("http://").split(":")
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
        return _measured(command, home, {})

    return Downloader(f"limit: receive + SHA-1 + write, {lanes} conns", run)


def b2_sync(binary: Path, *options: str) -> Downloader:
    def run(url: str, target: Path, home: Path, listed: Listed) -> Ran:
        keys = {"B2_APPLICATION_KEY_ID": "id", "B2_APPLICATION_KEY": "key", "B2_ENVIRONMENT": url}
        command = [str(binary), "sync", "--no-progress", *options, f"b2://{BUCKET}/{PREFIX}", str(target)]
        return _low(command, home, **keys)

    return Downloader(" ".join(("b2 sync", *options)), run)


def rclone(binary: Path, version: str, *options: str) -> Downloader:
    def run(url: str, target: Path, home: Path, listed: Listed) -> Ran:
        config = {"RCLONE_CONFIG": str(home / "none"), "RCLONE_CONFIG_B_TYPE": "b2", "RCLONE_CONFIG_B_ACCOUNT": "id"}
        config |= {"RCLONE_CONFIG_B_KEY": "key", "RCLONE_CONFIG_B_ENDPOINT": url}
        return _low([str(binary), "copy", *options, f"b:{BUCKET}/{PREFIX}", str(target)], home, **config)

    return Downloader(" ".join((f"rclone {version}", *options)), run)
