"""Requests over TLS, against a real TLS server that does what a test wants. ``localhost.pem``: a certificate for
127.0.0.1 that was made for these tests, with its key."""

import contextlib
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.stores.http_transfer import IDLE_CHECK, Body, Bytes, Wire, WireBroken, WireTimeout

pytestmark = pytest.mark.slow

CERTIFICATE = Path(__file__).parent.parent / "support" / "localhost.pem"
TIMEOUTS = (5.0, 5.0)
BOTH = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3


class Server:
    """Gives each connection to ``script``; ``accepted`` counts them, ``problems`` are what TLS said here."""

    def __init__(self, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> None:
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(CERTIFICATE)
        self._tls.minimum_version = self._tls.maximum_version = version
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"https://127.0.0.1:{self.port}/x"
        self.script: Callable[[ssl.SSLSocket], None] = lambda line: None
        self.accepted = 0
        self.problems: list[str] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            threading.Thread(target=self._one, args=(line,), daemon=True).start()

    def _one(self, line: socket.socket) -> None:
        try:
            with line, self._tls.wrap_socket(line, server_side=True) as secure:
                self.script(secure)
        except OSError as error:
            self.problems.append(str(error))

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(params=BOTH, ids=["1.2", "1.3"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(request.param)
    yield made
    made.close()


def wire(ca: Path = CERTIFICATE) -> Wire:
    return Wire(2, ca=str(ca))


def request(line: ssl.SSLSocket) -> tuple[bytes, bytes] | None:
    """Head and body of the next request; None at the end."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = line.recv(65536)
        if not piece:
            return None
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(x[15:]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        if not (piece := line.recv(65536)):
            raise ConnectionResetError("the other side has closed the connection")
        body += piece
    return head, body


def goodbye(line: ssl.SSLSocket) -> None:
    """Say that nothing more comes, and wait for no answer."""
    line.settimeout(0.1)
    with contextlib.suppress(OSError):
        line.unwrap()


def ok(length: int) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % length


def everything(found: Body, got: bytearray, block: int = 1 << 16) -> bytearray:
    """Append the whole body to ``got``, read through a buffer of ``block`` bytes."""
    buffer = memoryview(bytearray(block))
    while found.left:
        got += buffer[: found.read_into(buffer)]
    found.close()
    return got


@given(seed=st.integers(0, 2**32), size=st.integers(0, 3 << 20), block=st.integers(1, 1 << 21))
@settings(max_examples=10)
def test_what_is_sent_comes_back_on_one_connection(seed: int, size: int, block: int) -> None:
    """In records of any size, cut anywhere, for a reader with any buffer."""
    block = max(block, size // 200 + 1)
    chance = random.Random(seed)
    server, sent = Server(chance.choice(BOTH)), chance.randbytes(size)

    def echo(line: ssl.SSLSocket) -> None:
        while (got := request(line)) is not None:
            answer = memoryview(ok(len(got[1])) + got[1])
            while answer:
                piece = chance.randint(1, 1 << chance.randint(4, 20))
                line.sendall(answer[:piece])
                answer = answer[piece:]

    server.script = echo
    one = wire()
    try:
        for _ in range(2):
            answer = one.send("POST", server.url, {"Content-Length": str(size)}, Bytes(sent), TIMEOUTS)
            assert answer.content == sent
        got = one.get(server.url, {"Content-Length": "0"}, TIMEOUTS)
        assert everything(got, bytearray(), block) == b""
        assert server.accepted == 1
    finally:
        one.close()
        server.close()


@given(seed=st.integers(0, 2**32), size=st.integers(1, 4 << 20), block=st.integers(1, 1 << 21))
@settings(max_examples=10)
def test_a_download_of_any_size_arrives_whole(seed: int, size: int, block: int) -> None:
    block = max(block, size // 200 + 1)
    sent = random.Random(seed).randbytes(size)
    server = Server()

    def script(line: ssl.SSLSocket) -> None:
        while request(line) is not None:
            line.sendall(ok(size) + sent)

    server.script = script
    one = wire()
    try:
        assert everything(one.get(server.url, {}, TIMEOUTS), bytearray(), block) == sent
        assert everything(one.get(server.url, {}, TIMEOUTS), bytearray(), block) == sent
        assert server.accepted == 1
    finally:
        one.close()
        server.close()


@pytest.mark.parametrize("polite", [False, True])
@pytest.mark.parametrize("size", [1000, 2 << 20])
def test_a_body_that_ends_early_is_an_error(server: Server, polite: bool, size: int) -> None:
    """Whether the peer says goodbye in TLS or only closes its socket."""
    half = os.urandom(size // 2)

    def script(line: ssl.SSLSocket) -> None:
        request(line)
        line.sendall(ok(size) + half)
        if polite:
            goodbye(line)

    server.script = script
    found = wire().get(server.url, {}, TIMEOUTS)
    got = bytearray()
    with pytest.raises(WireBroken):
        everything(found, got)
    assert got == half


def test_a_peer_that_falls_silent_is_late(server: Server) -> None:
    done = threading.Event()

    def script(line: ssl.SSLSocket) -> None:
        request(line)
        line.sendall(ok(1 << 20) + b"x")
        done.wait(10)

    server.script = script
    found = wire().get(server.url, {}, (5.0, 0.2))
    with pytest.raises(WireTimeout):
        everything(found, bytearray())
    done.set()


def test_a_peer_that_is_silent_in_the_handshake_is_late() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(WireTimeout):
        wire().get(f"https://127.0.0.1:{listener.getsockname()[1]}/x", {}, (0.2, 0.2))


def test_a_peer_that_speaks_no_tls_is_broken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def script() -> None:
            line, _ = listener.accept()
            with line:
                line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=script, daemon=True).start()
        with pytest.raises(WireBroken):
            wire().get(f"https://127.0.0.1:{listener.getsockname()[1]}/x", {}, TIMEOUTS)


def test_a_certificate_that_nobody_vouches_for_is_refused(server: Server) -> None:
    """The error names the certificate, and the peer learns why."""
    one = Wire(2, ca="")
    with pytest.raises(WireBroken, match="certificate"):
        one.send("GET", server.url, {}, None, TIMEOUTS)
    end = time.monotonic() + 10
    while not server.problems and time.monotonic() < end:
        time.sleep(0.01)
    assert "unknown ca" in " ".join(server.problems).lower()


def test_a_certificate_for_another_host_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    found = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest: found("127.0.0.1", *rest))
    with pytest.raises(WireBroken, match=r"certificate|Hostname"):
        wire().send("GET", f"https://store.example:{server.port}/x", {}, None, TIMEOUTS)


@pytest.mark.parametrize("polite", [False, True])
def test_a_kept_connection_that_the_peer_ended_is_replaced(server: Server, polite: bool) -> None:
    ended = threading.Event()

    def script(line: ssl.SSLSocket) -> None:
        if request(line) is not None:
            line.sendall(ok(2) + b"ok")
            if polite:
                goodbye(line)
            line.close()
            ended.set()

    server.script = script
    one = wire()
    for _ in range(2):
        ended.clear()
        assert one.send("GET", server.url, {}, None, TIMEOUTS).content == b"ok"
        ended.wait(5)
        time.sleep(2 * IDLE_CHECK)  # a younger connection is not looked at
    assert server.accepted == 2


def test_a_kept_connection_is_used_again_after_idleness(server: Server) -> None:
    """What TLS itself sends meanwhile (session tickets) is no answer."""

    def script(line: ssl.SSLSocket) -> None:
        while request(line) is not None:
            line.sendall(ok(2) + b"ok")

    server.script = script
    one = wire()
    for _ in range(3):
        assert one.send("GET", server.url, {}, None, TIMEOUTS).content == b"ok"
        time.sleep(2 * IDLE_CHECK)
    assert server.accepted == 1
