"""Both stores, real: a directory, and B2 on loopback."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podwatch.stores.b2 import B2Store, Retry
from podwatch.stores.base import ObjectStore
from podwatch.stores.credentials import Credentials
from podwatch.stores.local import LocalStore
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server

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


@pytest.fixture(params=["file", "b2"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "file":
        return LocalStore(tmp_path / "store", writer_id="w1")
    made: ObjectStore = request.getfixturevalue("b2")()
    return made
