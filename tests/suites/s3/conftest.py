"""S3 servers and clients that know nothing of podwatch: rclone's and moto's server, boto3, rclone (make test-s3)."""

import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from podwatch.stores.base import ObjectStore
from podwatch.stores.http_transfer import Retry
from podwatch.stores.s3 import S3Store
from podwatch.stores.s3_credentials import S3Credentials
from tests.support.ports import free_port

ROOT = Path(__file__).parents[3]
VENV = ROOT / ".venv-s3" / "bin"
KEY_ID, KEY, BUCKET = "AKTESTKEY0001", "s3-secret-never-to-be-seen", "test-bucket"
QUICK = Retry(attempts=4, base=0.01, cap=0.05)


def tool(name: str) -> Path:
    """Skips where `make test-s3` could not install it."""
    path = VENV / name
    if not path.exists():
        pytest.skip(f"{path} is not installed (make test-s3)")
    return path


@dataclass(frozen=True)
class Running:
    """A server that listens; ``checks``: what podwatch must find out about its checksums and conditions."""

    name: str
    url: str
    expected: dict[str, object]


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        assert process.poll() is None, "the server ended"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError("the server does not listen")


@pytest.fixture(scope="session", params=["rclone", "moto"])
def foreign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    port, directory = free_port(), tmp_path_factory.mktemp(request.param)
    url = f"http://127.0.0.1:{port}"
    if request.param == "rclone":
        (directory / BUCKET).mkdir()
        command = [tool("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY_ID},{KEY}"]
        command += ["--vfs-cache-mode", "off", directory]
        # It refuses a wrong Content-MD5, ignores conditions and all other checksums, and keeps no versions.
        expected: dict[str, object] = {"object_checks": ["md5"], "etag_md5": True, "create": False, "replace": False}
    else:
        command = [tool("moto_server"), "-H", "127.0.0.1", "-p", str(port)]
        # It checks no checksum at all, and echoes them.
        expected = {"object_checks": [], "part_checks": [], "etag_md5": True, "create": True, "replace": True}
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory), "LC_ALL": "C.UTF-8"}
    process = subprocess.Popen(
        [str(c) for c in command], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait(port, process)
        if request.param == "moto":
            made = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
            made.add_header("Authorization", f"AWS4-HMAC-SHA256 Credential={KEY_ID}/20260101/us-east-1/s3/aws4_request")
            urllib.request.urlopen(made, timeout=30).close()
        yield Running(request.param, url, expected)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def open_s3(foreign: Running) -> Iterator[Callable[..., S3Store]]:
    opened: list[S3Store] = []

    def make(writer_id: str = "w1") -> S3Store:
        credentials = S3Credentials(KEY_ID, KEY, endpoint=foreign.url)
        opened.append(S3Store(BUCKET, credentials, writer_id=writer_id, retry=QUICK))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def store(open_s3: Callable[..., S3Store]) -> ObjectStore:
    return open_s3()


@pytest.fixture
def unmarked(foreign: Running, store: ObjectStore) -> Callable[[str], None]:
    """Puts an object of another program into the bucket, under this key."""
    script = (
        "import boto3, sys\n"
        "boto3.client('s3', endpoint_url=sys.argv[1], region_name='us-east-1').put_object("
        f"Bucket={BUCKET!r}, Key=sys.argv[2], Body=b'foreign')"
    )

    def put(key: str) -> None:
        subprocess.run([tool("python"), "-c", script, foreign.url, key], env=aws(foreign.url), check=True, timeout=60)

    return put


def aws(url: str) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"], "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": KEY,
        "AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL": url, "HOME": "/nonexistent",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required", "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    }  # fmt: skip
