"""The daemon's connection to a directory store: one that vanishes is an outage, never an empty store."""

from pathlib import Path

import pytest

from podwatch.app.backup.connection import StoreConnection
from podwatch.config.settings import Settings
from podwatch.domain.errors import RemoteError
from tests.support.clock import AutoClock


def connection(tmp_path: Path, store: Path) -> StoreConnection:
    settings = Settings(run_id="r1", trainer={"output_dir": tmp_path / "out"}, sync={"store": f"file://{store}"})  # type: ignore[arg-type]
    return StoreConnection(settings, AutoClock(), lambda _event: None)


def test_a_directory_that_was_replaced_is_not_an_empty_store(tmp_path: Path) -> None:
    store = tmp_path / "volume"
    found = connection(tmp_path, store)
    found.now(lambda objects: objects.put("r1/podwatch/heartbeat.json", b"{}"))
    assert [item.size for item in found.now(lambda objects: list(objects.list("r1/")))] == [2]
    store.rename(tmp_path / "away")
    for _ in range(2):  # as it is unmounted, and as the mount point is left
        with pytest.raises(RemoteError):
            found.now(lambda objects: list(objects.list("r1/")))
        store.mkdir(exist_ok=True)
    store.rmdir()
    (tmp_path / "away").rename(store)
    assert [item.size for item in found.now(lambda objects: list(objects.list("r1/")))] == [2]


def test_what_is_missing_above_it_is_not_made(tmp_path: Path) -> None:
    found = connection(tmp_path, tmp_path / "mnt" / "volume")
    with pytest.raises(RemoteError):
        found.now(lambda objects: objects.put("r1/podwatch/heartbeat.json", b"{}"))
    assert not (tmp_path / "mnt").exists()
