"""The control socket under many clients that ask nothing, half, or nonsense: a command of the operator gets in."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from podwatch.api.control_socket import MAX_CONNECTIONS, MAX_LINE
from tests.api.test_control_socket import Rig

pytestmark = pytest.mark.slow

CROWDS = {
    "silent": b"",
    "half a request": b'{"id": 1, "method": "sta',
    "answered, then silent": b'{"id": 1, "method": "status"}\n',
    "nonsense, then silent": b"\xff\0nonsense\n",
    "half a huge line": b"x" * (MAX_LINE - 10),
}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """Its deadline is so long that it lets no client in."""
    made = Rig(tmp_path / "run" / "control" / "control.sock", 600.0)
    await made.server.start()
    yield made
    await made.server.stop(grace=0.1)


@pytest.mark.parametrize("data", CROWDS.values(), ids=CROWDS.keys())
async def test_a_crowd_does_not_shut_out_a_command(rig: Rig, data: bytes) -> None:
    crowd = []
    try:
        for n in range(300):
            crowd.append(await asyncio.open_unix_connection(str(rig.path)))
            crowd[-1][1].write(data)
            if n % 60 == 59:
                assert await rig.call("status", timeout=20.0) == {"overall": "ok"}
        assert await rig.call("echo", {"stop": True}, timeout=20.0) == {"stop": True}
        assert len(rig.server._open) <= MAX_CONNECTIONS
    finally:
        for _, writer in crowd:
            writer.transport.abort()


async def test_clients_that_do_not_read_make_room(rig: Rig) -> None:
    """Their answers fill every buffer on the way."""
    big = b'{"id": 1, "method": "echo", "params": {"x": "' + b"y" * 60_000 + b'"}}\n'
    crowd = []
    try:
        for _ in range(MAX_CONNECTIONS + 5):
            reader, writer = await asyncio.open_unix_connection(str(rig.path), limit=1 << 10)
            crowd.append((reader, writer))
            writer.write(big * 40)
        for _ in range(3):
            assert await rig.call("status", timeout=30.0) == {"overall": "ok"}
    finally:
        for _, writer in crowd:
            writer.transport.abort()


async def test_a_call_under_way_is_not_dropped_for_the_crowd(rig: Rig) -> None:
    pending = asyncio.create_task(rig.call("slow"))
    async with asyncio.timeout(60):
        while not rig.server._calls:
            await asyncio.sleep(0.01)
    crowd = [await asyncio.open_unix_connection(str(rig.path)) for _ in range(3 * MAX_CONNECTIONS)]
    rig.release.set()
    assert await pending == {}
    for _, writer in crowd:
        writer.transport.abort()


async def test_a_flood_during_the_commands(rig: Rig) -> None:
    over = asyncio.Event()

    async def flood() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_unix_connection(str(rig.path))
                writer.write(b'{"half": ')
                await asyncio.sleep(0)

    flooding = [asyncio.create_task(flood()) for _ in range(6)]
    try:
        for _ in range(15):
            assert await rig.call("status", timeout=30.0) == {"overall": "ok"}
    finally:
        over.set()
        await asyncio.gather(*flooding)
