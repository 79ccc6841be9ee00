"""The HTTP server under a user of the pod who wants it to fall silent: real sockets, hundreds of connections."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podwatch.api import http_server as serving
from podwatch.api.http_endpoints import MAX_EVENTS, MAX_NUMBER, whole_number
from tests.api.test_http_endpoints import TOKEN, Rig

pytestmark = pytest.mark.slow

PROBE_SECONDS = 10.0
"""A probe's deadline on a machine that does other things as well; shut out, it would never be answered."""


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """Its deadlines are so long that none of them lets a probe in."""
    made = Rig(seconds=600.0)
    await made.server.start()
    yield made
    await made.server.stop()


async def talk(rig: Rig, data: bytes, seconds: float = 20.0) -> bytes:
    """Everything that is answered until the server hangs up or has nothing more to say."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
    answer = b""
    try:
        writer.write(data)
        async with asyncio.timeout(seconds):
            while chunk := await reader.read(1 << 16):
                answer += chunk
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return answer


async def probe(rig: Rig) -> None:
    async with asyncio.timeout(PROBE_SECONDS):
        assert (await talk(rig, b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")).startswith(
            b"HTTP/1.1 200"
        )


HALF = b"GET /status HTTP/1.1\r\nHost: localhost\r\nX: "
ATTACKS = {
    "silent": b"",
    "half a head": HALF,
    "answered, then silent": b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a body that never comes": b"GET /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n",
    "a ping's body that never comes": (
        f"POST /heartbeat/{TOKEN}/trainer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n".encode()
    ),
    "chunks that never end": b"GET /livez HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
}


@pytest.mark.parametrize("data", ATTACKS.values(), ids=ATTACKS.keys())
async def test_hundreds_of_connections_do_not_shut_out_a_probe(rig: Rig, data: bytes) -> None:
    crowd = []
    try:
        for n in range(400):
            crowd.append(await asyncio.open_connection("127.0.0.1", rig.server.port))
            crowd[-1][1].write(data)
            if n % 50 == 49:
                await probe(rig)
        for _ in range(5):
            await probe(rig)
        server = rig.server._server
        assert server is not None
        assert len(server.server_state.connections) <= serving.MAX_CONNECTIONS + 1
    finally:
        for _, writer in crowd:
            writer.transport.abort()


async def test_a_flood_of_connections_during_the_probes(rig: Rig) -> None:
    over = asyncio.Event()

    async def flood() -> None:
        """Opens and leaves open, byte by byte, as fast as it gets in."""
        kept: list[asyncio.StreamWriter] = []
        while not over.is_set():
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
                writer.write(HALF)
                kept.append(writer)
            for one in kept[-3:]:
                one.write(b"x")
            while len(kept) > 60:
                kept.pop(0).transport.abort()
        for one in kept:
            one.transport.abort()

    flooding = [asyncio.create_task(flood()) for _ in range(8)]
    try:
        for _ in range(15):
            await probe(rig)
    finally:
        over.set()
        await asyncio.gather(*flooding)


async def test_a_slow_second_request_is_dropped_as_the_first_would_be() -> None:
    rig = Rig(seconds=0.5)
    await rig.server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
    writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200")
    began = time.monotonic()
    try:
        async with asyncio.timeout(30):
            while not (reader.at_eof() or writer.is_closing()):  # a reset that a write meets is no end of the stream
                writer.write(b"G" if time.monotonic() - began < 0.1 else b"E")
                await asyncio.sleep(0.05)
    except ConnectionError:
        pass
    writer.transport.abort()
    await rig.server.stop()


def request(*headers: str, line: str = "GET /livez HTTP/1.1") -> bytes:
    return "\r\n".join([line, "Host: localhost", "Connection: close", *headers, "", ""]).encode()


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (request("X: " + "y" * 1_000_000), {400}),
        (request("X: " + " " * 1_000_000 + "y"), {400}),
        (request(line="GET /livez?" + "a" * 1_000_000), {400}),
        (request("Content-Length: 10000000"), {413}),
        (request("Content-Length: " + "9" * 400), {413, 400}),
        (request("Content-Length: -5"), {400}),
        (request("Host: localhost"), {400}),
        (b"GET /livez HTTP/1.1\r\n\r\n", {400}),
        (b"\0\1\2\3\r\n\r\n", {400}),
        (b"GET\r\n\r\n", {400}),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", {400}),
        (request(line="BREW /livez HTTP/1.1"), {405}),
        (request(line="GET http://evil/livez HTTP/1.1"), {404}),
    ],
)
async def test_limits_of_a_request_are_hard(rig: Rig, data: bytes, statuses: set[int]) -> None:
    answer = await talk(rig, data)
    assert int(answer.split(b" ", 2)[1]) in statuses
    await probe(rig)


async def test_of_two_requests_at_once_the_first_is_answered(rig: Rig) -> None:
    first = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = await talk(rig, first + request(*(f"X-{n}: {'y' * 1000}" for n in range(30))))
    assert answer.count(b"HTTP/1.1 ") == answer.count(b"HTTP/1.1 200") == 1
    assert b"\r\nconnection: close\r\n" in answer


async def test_what_is_unusual_and_allowed(rig: Rig) -> None:
    assert (await talk(rig, b"GET /livez HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200")
    body = await talk(rig, request("Content-Length: 5") + b"hello")
    assert body.startswith(b"HTTP/1.1 200")
    head = await talk(rig, request(line="HEAD /status HTTP/1.1"))
    assert head.startswith(b"HTTP/1.1 200")
    assert head.endswith(b"\r\n\r\n")


async def test_thousands_of_requests_at_once_end_with_the_connection(rig: Rig) -> None:
    one = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert (await talk(rig, one * 3000)).count(b"HTTP/1.1 ") <= 1
    await probe(rig)


async def test_an_answer_waits_for_the_body_that_nobody_reads(rig: Rig) -> None:
    """Who still sends it meets a closed connection, and never comes to read the answer."""

    def ping() -> bytes:
        head = f"POST /heartbeat/{TOKEN}/trainer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000\r\n\r\n"
        with socket.create_connection(("127.0.0.1", rig.server.port), timeout=30) as connection:
            connection.sendall(head.encode())
            for _ in range(3):
                time.sleep(0.1)
                connection.sendall(b"x" * 3000)
            return connection.recv(1 << 16)

    assert (await asyncio.to_thread(ping)).startswith(b"HTTP/1.1 204")


async def test_a_body_without_end_is_cut_off(rig: Rig) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
    writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
    sent = 0
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(30):
            while not reader.at_eof():
                writer.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")
                await writer.drain()
                sent += 4096
                await asyncio.sleep(0)
    assert sent < 16 << 20
    writer.transport.abort()
    await probe(rig)


async def test_attackers_do_not_fill_the_log(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(20):
        await talk(rig, b"nonsense\r\n\r\n")
    assert caplog.records == []


# -- parameters -------------------------------------------------------------------------------------------------------

GOOD = st.integers(0, MAX_NUMBER).map(str)
BAD = st.one_of(
    st.integers(MAX_NUMBER + 1, 10**40).map(str),
    st.integers(-(10**40), -1).map(str),
    st.text(max_size=20).filter(lambda s: not (s.isascii() and s.isdigit())),
    st.sampled_from(["1e3", "0x10", "1_000", " 5", "5 ", "+5", "٣", "²", "NaN", "inf", "1.0", "", "9" * 5000]),
)


@given(GOOD)
def test_whole_numbers_are_taken(text: str) -> None:
    assert whole_number([text], "limit", 1) == int(text)
    assert whole_number([], "limit", 7) == 7


@given(BAD, GOOD)
def test_everything_else_is_refused(bad: str, good: str) -> None:
    for given_values in ([bad], [good, good], [good, bad]):
        with pytest.raises(ValueError, match="Invalid value for limit"):
            whole_number(given_values, "limit", 1)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.sampled_from(["after_id", "limit"]), st.one_of(BAD, GOOD))
def test_parameters_over_a_socket(name: str, value: str) -> None:
    from urllib.parse import quote

    async def ask() -> tuple[bytes, list[tuple[int, int]]]:
        rig = Rig()
        await rig.server.start()
        try:
            path = f"/events?{name}={quote(value, safe='')}"
            return await talk(rig, request(line=f"GET {path} HTTP/1.1")), rig.events_asked
        finally:
            await rig.server.stop()

    answer, asked = asyncio.run(ask())
    good = value.isascii() and value.isdigit() and len(value) <= 19 and int(value) <= MAX_NUMBER
    status = int(answer.split(b" ", 2)[1])
    assert status == (200 if good else 400)
    if good:
        ((after, limit),) = asked
        assert 0 <= after <= MAX_NUMBER
        assert 1 <= limit <= MAX_EVENTS
    else:
        assert asked == []
        assert f"Invalid value for {name}" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
