"""Clients that send the same files to the same B2 service, each a process of its own: time, CPU and memory.

All run at the same priority: as they are started, or with ``NICE`` in the environment as podwatch's child is
while nothing is urgent, which on a busy machine measures how little is left over.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring import ROOT
from benchmarks.measuring.discard import BUCKET

LONGEST = 240.0
"""Seconds after which a client counts as hung."""
NICE = "PODWATCH_BENCH_NICE"
PLAIN = "import os, sys\n"
LOW = """
import contextlib, os, sys
os.setsid()
os.nice(15)
with contextlib.suppress(OSError):
    open("/proc/self/autogroup", "w").write("15")
"""
SDK = """
from concurrent.futures import ThreadPoolExecutor
from b2sdk.v3 import B2Api, InMemoryAccountInfo
url, bucket, at_once, *paths = sys.argv[1:]
api = B2Api(InMemoryAccountInfo())
api.authorize_account(application_key_id="id", application_key="key", realm=url)
place = api.get_bucket_by_name(bucket)
def send(path):
    place.upload_local_file(local_file=path, file_name="sdk/" + os.path.basename(path))
with ThreadPoolExecutor(int(at_once)) as pool:
    list(pool.map(send, paths))
"""
RAW = """
import hashlib, queue, socket, ssl, threading
trusted = os.environ.get("BENCH_CERTIFICATE")
tls = ssl.create_default_context(cafile=trusted) if trusted else None
host, port, lanes, *paths = sys.argv[1:]
PART, BLOCK = 100_000_000, 1 << 20
work = queue.SimpleQueue()
for path in paths:
    descriptor, size = os.open(path, os.O_RDONLY), os.stat(path).st_size
    for number, at in enumerate(range(0, max(size, 1), PART), 1):
        work.put((descriptor, number if size > PART else 0, at, min(PART, size - at)))
def lane():
    line = socket.create_connection((host, int(port)))
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is not None:
        line = tls.wrap_socket(line, server_hostname=host)
    buffer = memoryview(bytearray(BLOCK))
    while True:
        try:
            descriptor, number, at, length = work.get_nowait()
        except queue.Empty:
            return
        call = "b2_upload_part/raw/t" if number else "b2_upload_file/t"
        head = f"POST /b2api/v4/{call} HTTP/1.1\\r\\nContent-Length: {length + 40}\\r\\n"
        head += f"X-Bz-Part-Number: {number}\\r\\n"
        head += "X-Bz-File-Name: f\\r\\nX-Bz-Content-Sha1: hex_digits_at_end\\r\\n\\r\\n"
        line.sendall(head.encode())
        digest, end = hashlib.sha1(), at + length
        while at < end:
            count = os.preadv(descriptor, [buffer[: min(BLOCK, end - at)]], at)
            digest.update(buffer[:count])
            line.sendall(buffer[:count])
            at += count
        line.sendall(digest.hexdigest().encode())
        answer = b""
        while not answer.endswith(b"}"):
            answer += line.recv(65536)
threads = [threading.Thread(target=lane) for _ in range(int(lanes))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
PODWATCH = """
import asyncio, json, os, pathlib, resource, sys
from benchmarks.measuring.discard import BUCKET
from benchmarks.measuring.sending import LOW, Sending, access_of, idle
quiet = asyncio.run(idle(1.0))
url, home, *paths = sys.argv[1:]
store = f"b2://{BUCKET}"
nice = LOW if "PODWATCH_BENCH_NICE" in os.environ else 0
sending = Sending([pathlib.Path(p) for p in paths], store, access_of(url, store), pathlib.Path(home), nice=nice)
sent = asyncio.run(sending.measure())
used = resource.getrusage(resource.RUSAGE_CHILDREN)
cpu = used.ru_utime + used.ru_stime + sent.cpu
print(json.dumps([sent.seconds, cpu, used.ru_maxrss / 1024, sent.late, quiet]))
"""


def _trusted() -> dict[str, str]:
    """Where the service speaks TLS: its certificate, for requests and for rclone."""
    name = os.environ.get("REQUESTS_CA_BUNDLE", "")
    return {"REQUESTS_CA_BUNDLE": name, "RCLONE_CA_CERT": name} if name else {}


def certificate(url: str) -> dict[str, str]:
    """For the client without a library: the service's, where it speaks TLS. The environment may name one of its own."""
    return {"BENCH_CERTIFICATE": os.environ["REQUESTS_CA_BUNDLE"]} if url.startswith("https") else {}


def _prelude() -> str:
    return LOW if NICE in os.environ else PLAIN


@dataclass(frozen=True, slots=True)
class Ran:
    """Wall and CPU seconds (user and system, all threads), peak memory in MiB. Of podwatch's uploads also how late, in
    ms, turns of the daemon's loop came while it sent, and before."""

    seconds: float
    cpu: float
    peak_mib: float
    late: tuple[float, ...] = ()
    quiet: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Uploader:
    name: str
    run: Callable[[str, Path, Path], Ran]
    """``run(service URL, directory of the files, an empty directory)``."""


def _low(command: Sequence[str], home: Path, **environment: str) -> Ran:
    """Lower, then become the client, so that what is measured is the client alone."""
    code = _prelude() + "os.execvp(sys.argv[1], sys.argv[1:])"
    return _measured([sys.executable, "-S", "-c", code, *command], home, environment)


def _measured(command: Sequence[str], home: Path, environment: dict[str, str]) -> Ran:
    log = home / "log"
    with log.open("wb") as out:
        began = time.monotonic()
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "LC_ALL": "C.UTF-8", **environment, **_trusted()}
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=env)
        ends = threading.Timer(LONGEST, process.kill)
        ends.start()
        _, status, used = os.wait4(process.pid, 0)
        ends.cancel()
        seconds = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"a client failed ({command[-3:]}): {log.read_text()[-1500:]}")
    return Ran(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def _files(directory: Path) -> list[str]:
    return [str(p) for p in sorted(directory.iterdir())]


def podwatch() -> Uploader:
    """The engine with the daemon's own journal: the child, and what the daemon spends on it. Its CPU and memory are
    those of all of it, the start included; its time is that from the finished set on."""

    def run(url: str, directory: Path, home: Path) -> Ran:
        command = [sys.executable, "-c", PODWATCH, url, str(home), *_files(directory)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"podwatch failed: {done.stderr[-1500:]}")
        seconds, cpu, peak, late, quiet = json.loads(done.stdout.splitlines()[-1])
        return Ran(seconds, cpu, peak, tuple(late), tuple(quiet))

    return Uploader("podwatch", run)


def raw(lanes: int) -> Uploader:
    def run(url: str, directory: Path, home: Path) -> Ran:
        host, port = url.partition("://")[2].split(":")
        code = _prelude() + RAW
        return _measured(
            [sys.executable, "-S", "-c", code, host, port, str(lanes), *_files(directory)], home, certificate(url)
        )

    return Uploader(f"limit: read + SHA-1 + send, {lanes} conns", run)


def b2sdk(at_once: int) -> Uploader:
    def run(url: str, directory: Path, home: Path) -> Ran:
        code = _prelude() + SDK
        return _measured([sys.executable, "-c", code, url, BUCKET, str(at_once), *_files(directory)], home, {})

    return Uploader(f"b2sdk upload_local_file, {at_once} at once", run)


def b2_sync(binary: Path, *options: str) -> Uploader:
    def run(url: str, directory: Path, home: Path) -> Ran:
        keys = {"B2_APPLICATION_KEY_ID": "id", "B2_APPLICATION_KEY": "key", "B2_ENVIRONMENT": url}
        command = [str(binary), "sync", "--no-progress", *options, str(directory), f"b2://{BUCKET}/{home.name}"]
        return _low(command, home, **keys)

    return Uploader(" ".join(("b2 sync", *options)), run)


def rclone(binary: Path, version: str, *options: str) -> Uploader:
    def run(url: str, directory: Path, home: Path) -> Ran:
        config = {"RCLONE_CONFIG": str(home / "none"), "RCLONE_CONFIG_B_TYPE": "b2", "RCLONE_CONFIG_B_ACCOUNT": "id"}
        config |= {"RCLONE_CONFIG_B_KEY": "key", "RCLONE_CONFIG_B_ENDPOINT": url}
        command = [str(binary), "copy", *options, str(directory), f"b:{BUCKET}/{home.name}"]
        return _low(command, home, **config)

    return Uploader(" ".join((f"rclone {version}", *options)), run)


def rclone_version(binary: Path) -> str:
    """ "" where it is not here."""
    if not binary.exists():
        return ""
    done = subprocess.run([str(binary), "version"], capture_output=True, text=True, check=False)
    return done.stdout.split()[1].removeprefix("v").removesuffix("-DEV")


def certify(certificate: Path) -> bool:
    """A certificate for this run; False where openssl is not here."""
    if shutil.which("openssl") is None:
        return False
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(certificate.with_suffix(".key")), "-out", str(certificate)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
