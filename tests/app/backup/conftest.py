"""A pod with a backup in a directory, and one with a backup in B2 on loopback."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.app.backup.backup_world import World
from tests.support.b2server import BUCKET, B2Server
from tests.support.hurry import hurrying
from tests.support.warm import children


@pytest.fixture(autouse=True)
def quick_children() -> Iterator[None]:
    """Of ordinary priority, and forked from a process that has imported what they need."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(hurrying())
        stack.enter_context(children())
        yield


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path / "pod", f"file://{tmp_path}/store")
    yield world
    await world.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[B2Server]:
    with B2Server(tmp_path / "b2") as running:
        yield running


@pytest.fixture
async def b2(tmp_path: Path, server: B2Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    world = World(tmp_path / "pod", f"b2://{BUCKET}")
    yield world
    await world.stop()
