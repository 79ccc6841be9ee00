"""The control socket with real connections, other users included."""

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from podwatch.api.control_socket import MAX_LINE, ControlServer
from podwatch.cli.ask_daemon import NotRunning, RemoteRefusal, call
from podwatch.domain.errors import Busy, ExitCode, InternalError, PermissionDenied, PodwatchError, UsageError


class Rig:
    def __init__(self, path: Path, idle_seconds: float = 30.0) -> None:
        self.path = path
        self.release = asyncio.Event()
        self.done: list[str] = []
        self.errors: list[str] = []
        self.server = ControlServer(
            path,
            {"status": self.status, "echo": self.echo, "slow": self.slow, "busy": self.busy, "bug": self.bug},
            idle_seconds=idle_seconds,
            on_error=lambda method, error: self.errors.append(f"{method}: {error}"),
        )

    async def status(self, params):
        return {"overall": "ok"}

    async def echo(self, params):
        return params

    async def slow(self, params):
        await self.release.wait()
        self.done.append("slow")
        return {}

    async def busy(self, params):
        raise Busy("held", where="lock", fix="wait")

    async def bug(self, params):
        raise KeyError("secret-value")

    async def call(self, method, params=None, **kwargs):
        return await asyncio.to_thread(call, self.path, method, params, **kwargs)


@pytest.fixture
async def rig(tmp_path):
    made = Rig(tmp_path / "run" / "control" / "control.sock")
    await made.server.start()
    yield made
    await made.server.stop(grace=0.1)


@pytest.fixture
async def hasty(tmp_path):
    """One that drops who says nothing for half a second."""
    made = Rig(tmp_path / "run" / "control" / "control.sock", 0.5)
    await made.server.start()
    yield made
    await made.server.stop(grace=0.1)


async def test_a_call_there_and_back(rig):
    assert await rig.call("echo", {"step": 80, "text": "ä\n"}) == {"step": 80, "text": "ä\n"}


async def test_socket_and_directory_are_ours_alone(rig):
    assert stat.S_IMODE(rig.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(rig.path.parent.stat().st_mode) == 0o700


async def test_refusals_travel_with_their_exit_code(rig):
    with pytest.raises(RemoteRefusal) as caught:
        await rig.call("busy")
    assert (caught.value.what, caught.value.where, caught.value.fix) == ("held", "lock", "wait")
    assert caught.value.exit_code is ExitCode.TRY_AGAIN
    with pytest.raises(PodwatchError, match="method 'nonsense' not found"):
        await rig.call("nonsense")


async def test_a_bug_is_told_to_the_log_and_not_to_the_caller(rig):
    with pytest.raises(RemoteRefusal, match="internal error in bug: KeyError") as caught:
        await rig.call("bug")
    assert "secret-value" not in str(caught.value)
    assert rig.errors == ["bug: 'secret-value'"]


async def talk(path: Path, data: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(data)
    writer.write_eof()
    await writer.drain()
    try:
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except OSError:
            pass


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense\n",
        b"[]\n",
        b'{"id": 1}\n',
        b'{"method": 5}\n',
        b'{"method":"echo","params":[1]}\n',
        b"\xff\xfe\n",
        b"[" * 5000 + b"\n",
    ],
)
async def test_bad_requests_get_an_answer(rig, line):
    answer = json.loads(await talk(rig.path, line))
    assert answer["ok"] is False
    assert answer["error"]["exit_code"] == 64


async def test_an_endless_line_is_cut_off(rig):
    answer = json.loads(await talk(rig.path, b"x" * (MAX_LINE + 10)))
    assert "too long" in answer["error"]["what"]
    assert await rig.call("status")


async def test_a_silent_client_is_dropped_and_does_not_stop_others(hasty):
    reader, writer = await asyncio.open_unix_connection(str(hasty.path))
    assert await hasty.call("status") == {"overall": "ok"}
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()
    await writer.wait_closed()


async def test_a_second_request_on_a_connection_is_not_read(rig):
    data = b"".join(json.dumps({"id": n, "method": "echo", "params": {"n": n}}).encode() + b"\n" for n in range(3))
    (answer,) = (await talk(rig.path, data)).splitlines()
    assert json.loads(answer)["id"] == 0


async def test_a_hundred_silent_clients_do_not_shut_out_a_command(rig):
    crowd = [await asyncio.open_unix_connection(str(rig.path)) for _ in range(100)]
    try:
        assert await rig.call("status", timeout=20.0) == {"overall": "ok"}
    finally:
        for _, writer in crowd:
            writer.transport.abort()


async def test_what_was_asked_is_done_even_when_the_client_leaves(rig):
    _, writer = await asyncio.open_unix_connection(str(rig.path))
    writer.write(b'{"id":1,"method":"slow"}\n')
    await writer.drain()
    assert await rig.call("status")
    writer.close()
    rig.release.set()
    async with asyncio.timeout(60):
        while rig.done != ["slow"]:
            await asyncio.sleep(0.01)


async def test_stop_ends_calls_after_the_grace_and_removes_the_socket(rig):
    pending = asyncio.create_task(rig.call("slow"))
    async with asyncio.timeout(60):
        while not rig.server._calls:
            await asyncio.sleep(0.01)
    await rig.server.stop(grace=0.05)
    with pytest.raises(PodwatchError):
        await pending
    assert not rig.path.exists()
    with pytest.raises(NotRunning):
        await rig.call("status")
    await rig.server.stop()


async def test_a_stale_socket_is_replaced(tmp_path):
    path = tmp_path / "control" / "control.sock"
    path.parent.mkdir(mode=0o700)
    old = socket.socket(socket.AF_UNIX)
    old.bind(str(path))
    old.close()
    rig = Rig(path)
    await rig.server.start()
    assert await rig.call("status")
    await rig.server.stop()


async def test_a_path_longer_than_a_socket_address(tmp_path):
    path = tmp_path / ("d" * 90) / ("e" * 60) / "control.sock"
    rig = Rig(path)
    await rig.server.start()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert await rig.call("echo", {"long": True}) == {"long": True}
    await rig.server.stop()


async def test_a_directory_of_someone_else_is_refused(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root to make a directory of another user")
    directory = tmp_path / "control"
    directory.mkdir()
    os.chown(directory, 65534, 65534)
    with pytest.raises(PermissionDenied, match="another user"):
        await Rig(directory / "control.sock").server.start()
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(PermissionDenied):
        await Rig(link / "control.sock").server.start()


AS_NOBODY = """
import json, os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for method in ("status", "echo"):
    s = socket.socket(socket.AF_UNIX); s.connect("\\0" + sys.argv[1] if sys.argv[1][0] != "/" else sys.argv[1])
    s.sendall(json.dumps({"id": 1, "method": method}).encode() + b"\\n")
    print(s.makefile().readline(), end="")
    s.close()
"""


async def test_another_user_may_only_ask_for_the_status():
    """Even when the directory and the socket were opened up by hand: the kernel says who calls."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    import shutil
    import tempfile

    base = Path(tempfile.mkdtemp(prefix="podwatch-test-"))
    try:
        rig = Rig(base / "control" / "control.sock")
        await rig.server.start()
        for path, mode in ((base, 0o755), (rig.path.parent, 0o755), (rig.path, 0o666)):
            path.chmod(mode)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", AS_NOBODY, str(rig.path), stdout=subprocess.PIPE
        )
        output, _ = await asyncio.wait_for(process.communicate(), 30)
        status, echo = (json.loads(line) for line in output.splitlines())
        assert status["ok"] is True
        assert echo["ok"] is False
        assert echo["error"]["exit_code"] == 77
        assert "uid 65534" in echo["error"]["where"]
        await rig.server.stop()
    finally:
        shutil.rmtree(base)


async def test_the_client_tells_its_failures_apart(tmp_path):
    with pytest.raises(NotRunning):
        call(tmp_path / "none.sock", "status")
    path = tmp_path / "mute.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)
    with pytest.raises(Busy):
        await asyncio.to_thread(call, path, "status", timeout=0.1)
    listener.close()
    with pytest.raises(NotRunning):
        call(path, "status")

    async def answer(data: bytes) -> None:
        async def serve(reader, writer):
            await reader.readline()
            writer.write(data)
            writer.close()

        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(serve, str(path))
        try:
            await asyncio.to_thread(call, path, "status")
        finally:
            server.close()

    for data in (b"nonsense\n", b"{}\n", b'{"ok": true, "result": 5}\n', b'{"ok": false}\n'):
        with pytest.raises(InternalError):
            await answer(data)
    with pytest.raises(PodwatchError, match="without an answer"):
        await answer(b"")


async def test_only_root_and_podwatchs_user_are_trusted():
    server = ControlServer(Path("/nowhere"), {})
    with pytest.raises(UsageError):
        await server._call("x", {}, os.geteuid())
    with pytest.raises(PermissionDenied):
        await server._call("x", {}, 4321)
    with pytest.raises(PermissionDenied):
        await server._call("x", {}, None)
