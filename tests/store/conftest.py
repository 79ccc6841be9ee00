"""Every kind of store, real: a directory, B2 and S3 on loopback as services differ, moto's and rclone's servers."""

import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from podwatch.store.objects.b2 import B2Access, B2Objects
from podwatch.store.objects.base import Objects, Retry
from podwatch.store.objects.directory import DirectoryObjects
from podwatch.store.objects.s3 import S3Access, S3Objects
from podwatch.store.objects.transport import Patience, Transport
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.s3server import BUCKET as S3_BUCKET
from tests.support.s3server import KEY as S3_KEY
from tests.support.s3server import KEY_ID as S3_KEY_ID
from tests.support.s3server import S3Server
from tests.support.s3server.state import Traits
from tests.support.warm import children

ROOT = Path(__file__).resolve().parents[2]
QUICK = Retry(attempts=4, base=0.01, cap=0.05)
HASTY = Patience(connect=2.0, idle=1.0, document=2.0)

KINDS: dict[str, dict[str, object]] = {
    "s3": {},
    "s3-versions": {"versions": True},
    "s3-md5-only": {"verify": ["md5"], "etag": "opaque", "range_status": 200},
    "s3-careless": {"verify": [], "conditions": "ignore", "etag": "opaque", "range_status": 200},
}


@pytest.fixture(scope="module")
def quick_children() -> Iterator[None]:
    """Those of a transfer are forked from a process that has imported what they need: where the transfer itself is not
    the subject."""
    with children():
        yield


@pytest.fixture(scope="session")
def b2server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[B2Server]:
    with B2Server(tmp_path_factory.mktemp("b2")) as running:
        yield running


@pytest.fixture(scope="session")
def s3server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def b2(b2server: B2Server) -> Iterator[Callable[..., B2Objects]]:
    opened: list[B2Objects] = []

    def make(key_id: str = KEY_ID, key: str = KEY, bucket: str = BUCKET, retry: Retry = QUICK) -> B2Objects:
        access = B2Access(key_id, key, b2server.url)
        opened.append(B2Objects(bucket, access, retry=retry, transport=Transport(4, HASTY)))
        return opened[-1]

    yield make
    for store in opened:
        store.close()
    b2server.admin("clear")
    b2server.admin("clock", ahead=0.0)


@pytest.fixture
def s3(s3server: S3Server) -> Iterator[Callable[..., S3Objects]]:
    """``traits``: see tests/support/s3server/state.py; the defaults are AWS's without versions."""
    opened: list[S3Objects] = []

    def make(
        access: S3Access | None = None, checksum: str = "sha256", retry: Retry = QUICK, **traits: object
    ) -> S3Objects:
        s3server.admin("traits", **traits)
        access = access or S3Access(S3_KEY_ID, S3_KEY, endpoint=s3server.url)
        opened.append(S3Objects(S3_BUCKET, access, checksum=checksum, retry=retry, transport=Transport(4, HASTY)))
        return opened[-1]

    yield make
    for store in opened:
        store.close()
    s3server.admin("clear")
    s3server.admin("clock", ahead=0.0)
    s3server.admin("traits", **asdict(Traits()))


def _program(name: str) -> str:
    for place in (ROOT / ".venv-s3/bin" / name, ROOT / ".venv/bin" / name):
        if place.exists():
            return str(place)
    return shutil.which(name) or ""


def _serving(command: list[str], port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return process
        except OSError:
            time.sleep(0.1)
    process.kill()
    pytest.fail(f"{command[0]} did not start")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _neighbour(command: list[str], port: int, bucket: str) -> Iterator[S3Objects]:
    process = _serving(command, port)
    try:
        url = f"http://127.0.0.1:{port}"
        made = urllib.request.Request(f"{url}/{bucket}", method="PUT")
        if "moto" in command[0]:
            urllib.request.urlopen(made, timeout=30).close()
        store = S3Objects(bucket, S3Access("AKTEST000000", "secretsecret", endpoint=url), retry=QUICK)
        yield store
        store.close()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Objects]:
    program, port = _program("moto_server"), _free_port()
    if not program:
        pytest.skip("moto_server is not installed (make test-s3 installs it)")
    yield from _neighbour([program, "-H", "127.0.0.1", "-p", str(port)], port, "moto-bucket")


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Objects]:
    program, port = _program("rclone"), _free_port()
    if (
        not program
        or "\n  s3 " not in subprocess.run([program, "serve", "--help"], capture_output=True, text=True).stdout
    ):
        pytest.skip("rclone serve s3 is not installed (make test-s3 installs it)")
    home = tmp_path_factory.mktemp("rclone")
    (home / "rclone-bucket").mkdir()
    listen = ["--addr", f"127.0.0.1:{port}", "--auth-key", "AKTEST000000,secretsecret"]
    yield from _neighbour([program, "serve", "s3", *listen, str(home)], port, "rclone-bucket")


@pytest.fixture(params=["file", "b2", *KINDS, "moto", "rclone"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    """Checked, as podwatch does before it uses one: so it knows which hash is compared."""
    made: Objects
    if request.param == "file":
        made = DirectoryObjects(tmp_path / "store")
    elif request.param in KINDS:
        made = request.getfixturevalue("s3")(**KINDS[request.param])
    elif request.param == "b2":
        made = request.getfixturevalue("b2")()
    else:
        return request.getfixturevalue(request.param)  # type: ignore[no-any-return]
    made.check("checks/")
    return made
