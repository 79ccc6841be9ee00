"""Every store, real: a directory, B2 and S3 on loopback; S3 as several services differ."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from podwatch.stores.b2 import B2Store, Retry
from podwatch.stores.base import ObjectStore
from podwatch.stores.credentials import Credentials
from podwatch.stores.local import LocalStore
from podwatch.stores.s3 import S3Store
from podwatch.stores.s3_credentials import S3Credentials
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.past_runs import into_bucket, into_directory
from tests.support.s3server import BUCKET as S3_BUCKET
from tests.support.s3server import KEY as S3_KEY
from tests.support.s3server import KEY_ID as S3_KEY_ID
from tests.support.s3server import S3Server
from tests.support.s3server.state import Traits

QUICK = Retry(attempts=4, base=0.01, cap=0.05)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[B2Server]:
    with B2Server(tmp_path_factory.mktemp("b2")) as running:
        yield running


@pytest.fixture
def b2(server: B2Server) -> Iterator[Callable[..., B2Store]]:
    opened: list[B2Store] = []

    def make(
        *,
        bucket: str = BUCKET,
        key_id: str = KEY_ID,
        key: str = KEY,
        writer_id: str = "w1",
        sleep: Callable[[float], None] = time.sleep,
    ) -> B2Store:
        store = B2Store(bucket, Credentials(key_id, key, server.url), writer_id=writer_id, retry=QUICK, sleep=sleep)
        opened.append(store)
        return store

    yield make
    for store in opened:
        store.close()
    server.admin("clear")


@pytest.fixture(scope="module")
def s3server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def s3(s3server: S3Server) -> Iterator[Callable[..., S3Store]]:
    """``traits``: see tests/support/s3server/state.py; the defaults are AWS's without versions."""
    opened: list[S3Store] = []

    def make(
        *,
        writer_id: str = "w1",
        prefix: str = "",
        sleep: Callable[[float], None] = time.sleep,
        features: Mapping[str, object] | None = None,
        credentials: S3Credentials | None = None,
        **traits: object,
    ) -> S3Store:
        if traits:
            s3server.admin("traits", **traits)
        found = credentials or S3Credentials(S3_KEY_ID, S3_KEY, endpoint=s3server.url)
        store = S3Store(
            S3_BUCKET, found, writer_id=writer_id, prefix=prefix, features=features, retry=QUICK, sleep=sleep
        )
        opened.append(store)
        return store

    yield make
    for store in opened:
        store.close()
    s3server.admin("clear")
    s3server.admin("clock", ahead=0.0)
    s3server.admin("traits", **asdict(Traits()))


KINDS: dict[str, dict[str, object]] = {
    "s3": {},
    "s3-versions": {"versions": True},
    "s3-careless": {
        "verify": [], "conditions": "ignore", "etag": "opaque", "composite": False, "copies": "empty",
        "range_status": 200,
    },
}  # fmt: skip
"""As AWS without and with versions; and a server that checks nothing and ignores conditions, as some do."""


@pytest.fixture(params=["file", "b2", *KINDS])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "file":
        return LocalStore(tmp_path / "store", writer_id="w1")
    if request.param in KINDS:
        found: ObjectStore = request.getfixturevalue("s3")(**KINDS[request.param])
        return found
    made: ObjectStore = request.getfixturevalue("b2")()
    return made


@pytest.fixture
def unmarked(store: ObjectStore, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], None]:
    """Puts an object of another program into ``store``, under this key."""

    def put(key: str) -> None:
        folder, _, name = key.rpartition("/")
        (tmp_path / name).write_bytes(b"foreign")
        if isinstance(store, LocalStore):
            into_directory(store.root, folder, {name: tmp_path / name})
        elif isinstance(store, S3Store):
            request.getfixturevalue("s3server").admin("put", key=key, text="foreign")
        else:
            into_bucket(request.getfixturevalue("server"), folder, {name: tmp_path / name})

    return put
