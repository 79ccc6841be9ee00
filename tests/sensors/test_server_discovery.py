"""Servers found in a tree of real processes, by their command line or by the sockets they listen on."""

import asyncio
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace

import psutil
import pytest

from podwatch.detection.learned import Learned
from podwatch.domain.process import ProcessIdentity, ProcessRole, ProcessSample
from podwatch.domain.snapshot import Health, Reading, SensorState, TrainerSample, observed
from podwatch.sensors.inference import InferenceSensor, listening
from podwatch.system import procfs
from podwatch.system.clock import SystemClock
from podwatch.trainer.process_roles import port_of
from podwatch.trainer.process_tree import sample
from tests.sensors.waiting import until
from tests.support.known_trainers import ROLES

SERVER = """
    import http.server, socket, sys
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()
        def log_message(self, *args): pass
    noise = socket.create_server(("127.0.0.1", 0))  # a port of the same process that is no HTTP
    server = http.server.HTTPServer((sys.argv[1], 0), Handler)
    print(server.server_port, noise.getsockname()[1], flush=True)
    server.serve_forever()
"""


class Process:
    def __init__(self, host: str = "127.0.0.1") -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-S", "-c", textwrap.dedent(SERVER), host], stdout=subprocess.PIPE, text=True
        )
        assert self.popen.stdout is not None
        self.port, self.noise = (int(word) for word in self.popen.stdout.readline().split())

    def seen(self, command: str) -> ProcessSample:
        status = procfs.read_stat(self.popen.pid)
        assert status is not None
        found = sample(status, ROLES)
        return replace(found, role=ProcessRole.INFERENCE, command=command)

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    yield process
    process.end()


LAUNCHER = ProcessSample(ProcessIdentity(1, 1), 0, "rl", "rl", ProcessRole.LAUNCHER)


def tree(*servers: ProcessSample, start_id: str = "s1") -> Reading[TrainerSample]:
    return observed(TrainerSample(start_id, alive=True, descendants=(LAUNCHER, *servers)), 1.0)


@dataclass
class Trainer:
    """Its newest reading."""

    reading: Reading[TrainerSample]

    name = "processes"

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def latest(self) -> Reading[TrainerSample]:
        return self.reading


def finder(reading: Reading[TrainerSample], known: tuple[str, tuple[str, ...]] = ("", ())) -> InferenceSensor:
    return InferenceSensor((), SystemClock(), 0.3, 60.0, trainer=Trainer(reading), known=known)


def refuse(self: psutil.Process, kind: str = "inet") -> None:
    raise psutil.AccessDenied(self.pid)


async def look_until_found(found: InferenceSensor, reading: Reading[TrainerSample]) -> None:
    """The server may need longer for its answer than it is given."""
    async with asyncio.timeout(60):
        while not found.urls:
            await found.look(reading.value)


async def test_by_the_sockets_it_listens_on(process: Process) -> None:
    reading = tree(process.seen("inference @ x.toml"))
    found = finder(reading)
    await look_until_found(found, reading)
    assert found.urls == (f"http://127.0.0.1:{process.port}",)
    assert found.ports() == (process.port,)
    await found.stop()


async def test_a_port_on_the_command_line_needs_no_sockets(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "net_connections", refuse)
    command = f"/venv/bin/vllm-router --host 0.0.0.0 --port {process.port} --worker-urls http://127.0.0.1:8100"
    reading = tree(process.seen(command))
    found = finder(reading)
    await look_until_found(found, reading)
    assert found.urls == (f"http://127.0.0.1:{process.port}",)
    await found.stop()


async def test_what_nobody_may_read_is_said(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "net_connections", refuse)
    reading = tree(process.seen("PRIME-RL::Inference"))
    found = finder(reading)
    await found.look(reading.value)
    assert found.urls == ()
    assert "cannot read the sockets" in found.latest().detail
    await found.stop()


async def test_any_address_is_asked_by_loopback() -> None:
    process = Process("0.0.0.0")
    try:
        reading = tree(process.seen("inference"))
        found = finder(reading)
        await look_until_found(found, reading)
        assert found.urls == (f"http://127.0.0.1:{process.port}",)
        await found.stop()
    finally:
        process.end()


async def test_a_server_that_was_found_is_asked_until_the_next_start(process: Process) -> None:
    """That it is gone is what we want to hear."""
    trainer = Trainer(tree(process.seen("inference")))
    sensor = InferenceSensor((), SystemClock(), 0.5, 0.05, trainer=trainer, search=0.05)
    assert sensor.latest().state is SensorState.ABSENT
    await sensor.start()
    try:
        health = lambda: [(s.health, s.discovered) for s in sensor.latest().value or ()]  # noqa: E731
        await until(lambda: health() == [(Health.OK, True)])
        process.end()
        trainer.reading = tree()
        await until(lambda: health() == [(Health.REFUSED, True)])
        assert sensor.urls == (f"http://127.0.0.1:{process.port}",), "its port has to be free before the next start"
        trainer.reading = tree(start_id="s2")
        await until(lambda: sensor.latest().state is SensorState.ABSENT)
    finally:
        await sensor.stop()


@pytest.mark.parametrize("same", [True, False])
async def test_one_that_died_while_podwatch_was_away_is_remembered_by_its_start(same: bool) -> None:
    """It would never answer again, and so never be found."""
    learned = Learned(start_id="s1").saw("health", "health:http://127.0.0.1:8123", "tokens:http://127.0.0.1:8123")
    kept = (learned.start_id, learned.servers)
    reading = tree(start_id="s1" if same else "s2")
    found = finder(reading, kept)
    await found.look(reading.value)
    assert found.urls == (("http://127.0.0.1:8123",) if same else ())
    await found.stop()


@pytest.mark.parametrize(
    ("command", "port"),
    [
        ("vllm serve m --port 8100", 8100),
        ("python -m vllm.entrypoints.openai.api_server --port=8001 --model m", 8001),
        ("inference @ x.toml --server.port 8000", 8000),
        ("vllm serve m --port", None),
        ("vllm serve m --port 99999", None),
        ("inference @ x.toml", None),
    ],
)
def test_ports_on_command_lines(command: str, port: int | None) -> None:
    assert port_of(command) == port


def test_the_addresses_to_connect_to() -> None:
    sockets = [socket.create_server((host, 0), family=family) for family, host in (
        (socket.AF_INET, "127.0.0.1"), (socket.AF_INET, ""), (socket.AF_INET6, "::1"), (socket.AF_INET6, "::"),
    )]  # fmt: skip
    try:
        one, any4, six, any6 = (s.getsockname()[1] for s in sockets)
        found = listening(os.getpid())
        assert found is not None
        assert {("127.0.0.1", one), ("127.0.0.1", any4), ("[::1]", six), ("127.0.0.1", any6)} <= set(found)
    finally:
        for s in sockets:
            s.close()
    assert listening(2**22 + 1) == (), "gone meanwhile"
