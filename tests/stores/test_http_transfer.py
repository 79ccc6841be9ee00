"""The connections that bodies leave on, against a peer that says exactly what a test wants."""

import contextlib
import hashlib
import io
import select
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from podwatch.stores.b2_session import reached_directly
from podwatch.stores.http_transfer import BLOCK, Bytes, Wire, WireBroken, WireTimeout
from podwatch.stores.part_reader import PartStream, StreamSource

TIMEOUTS = (5.0, 5.0)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class Peer:
    """Serves each connection with the next of ``scripts``, which gets the connection and what was sent first."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/up?x=1"
        self.scripts: list[Callable[[socket.socket], None]] = []
        self.bodies: list[bytes] = []
        self.heads: list[bytes] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(ConnectionError):
                self.scripts.pop(0)(connection)

    def take(self, connection: socket.socket) -> None:
        """Read one whole request. Raises ConnectionError where it ends before: an end can be read without end, and this
        thread would use a whole core until pytest ends."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += received(connection)
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(next(x for x in head.split(b"\r\n") if x.lower().startswith(b"content-length")).split(b":")[1])
        while len(body) < length:
            body += received(connection)
        self.heads.append(head)
        self.bodies.append(body)

    def answers(self, *answers: bytes) -> Callable[[socket.socket], None]:
        def script(connection: socket.socket) -> None:
            for answer in answers:
                self.take(connection)
                connection.sendall(answer)

        return script


def received(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    if not data:
        raise ConnectionResetError("the other side has closed the connection")
    return data


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.listener.close()


def body(data: bytes) -> PartStream:
    return PartStream(StreamSource(io.BytesIO(data)), 0, len(data))


def post(wire: Wire, peer: Peer, data: bytes = b"abc") -> bytes:
    stream = body(data)
    answer = wire.post(peer.url, {"Content-Length": str(len(stream)), "X-A": "b"}, stream, TIMEOUTS)
    assert answer.status_code == 200
    return answer.content


@pytest.mark.parametrize("size", [0, 1, 65536, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_a_body_and_its_hash_arrive_as_they_are(peer: Peer, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    peer.scripts = [peer.answers(OK)]
    assert post(Wire(4), peer, data) == b"{}"
    assert peer.bodies == [data + hashlib.sha1(data).hexdigest().encode()]
    assert peer.heads[0].startswith(b"POST /up?x=1 HTTP/1.1\r\nHost: 127.0.0.1:")


def test_a_connection_is_kept_and_one_that_was_closed_meanwhile_is_not_used(peer: Peer) -> None:
    peer.scripts = [peer.answers(OK, OK), peer.answers(OK)]
    wire = Wire(4)
    post(wire, peer)
    post(wire, peer)  # on the same connection: the first script answers twice, then closes
    (line,) = next(iter(wire._kept.values()))
    line.used -= 1.0  # as after a pause
    assert select.select([line.socket], [], [], 10)[0], "the peer never closed it"
    post(wire, peer)
    assert len(peer.bodies) == 3
    assert peer.scripts == []


CHUNKS = b'3;x=y\r\n{ "\r\n4\r\na":1\r\n1\r\n}\r\n0\r\nT: x\r\n\r\n'


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS, 1),
        (b'HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n{ "a":1}', 1),
        (b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{ "a":1}', 0),
        (b'HTTP/1.0 200 OK\r\nContent-Length: 8\r\n\r\n{ "a":1}', 0),
    ],
)  # fmt: skip
def test_answers_of_every_shape(peer: Peer, answer: bytes, kept: int) -> None:
    peer.scripts = [peer.answers(answer)]
    wire = Wire(4)
    assert post(wire, peer) == b'{ "a":1}'
    assert sum(map(len, wire._kept.values())) == kept


def test_a_refusal_before_the_whole_body_was_read_is_heard(peer: Peer) -> None:
    """A store that refuses does not read on: the reason is in its answer, not in the broken connection."""

    def refuse(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: 2\r\n\r\n{}")
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 20):
            pass

    peer.scripts = [refuse]
    stream = body(bytes(8 * BLOCK))
    wire = Wire(4)
    answer = wire.post(peer.url, {"Content-Length": str(len(stream))}, stream, TIMEOUTS)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"220 mail\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffff\r\n",
    ],
)
def test_half_an_answer_is_a_broken_connection(peer: Peer, said: bytes) -> None:
    peer.scripts = [peer.answers(said)]
    wire = Wire(4)
    with pytest.raises(WireBroken):
        post(wire, peer)
    assert not any(wire._kept.values())


def test_a_peer_that_never_answers_is_a_timeout(peer: Peer) -> None:
    ended = threading.Event()

    def silent(connection: socket.socket) -> None:
        peer.take(connection)
        ended.wait(5)

    peer.scripts = [silent]
    stream = body(b"abc")
    with pytest.raises(WireTimeout):
        Wire(4).post(peer.url, {"Content-Length": str(len(stream))}, stream, (1.0, 0.2))
    ended.set()


def test_a_file_that_cannot_be_read_says_so(peer: Peer) -> None:
    peer.scripts = [peer.answers(OK)]
    stream = PartStream(StreamSource(io.BytesIO(b"short")), 0, 3 * BLOCK)
    with pytest.raises(WireBroken):
        Wire(4).post(peer.url, {"Content-Length": str(len(stream))}, stream, TIMEOUTS)
    assert "shorter" in str(stream.failure)


def test_what_goes_through_a_proxy_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    assert not reached_directly("https://pod.backblazeb2.com/x")
    assert reached_directly("http://127.0.0.1:9/x")
    assert reached_directly("https://inside.example/x")


def test_a_proxy_on_the_way(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """http:// with the whole URL and the proxy's login; https:// through a tunnel; NO_PROXY goes directly."""
    proxy = peer.url.removesuffix("/up?x=1").replace("http://", "http://user:pa%20ss@")
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, proxy)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    peer.scripts = [peer.answers(OK)]
    wire = Wire(4, proxies=True)
    wire.send("PUT", "http://s3.example/b/k?x", {"Content-Length": "3"}, Bytes(b"abc"), TIMEOUTS)
    assert peer.heads[0].startswith(b"PUT http://s3.example/b/k?x HTTP/1.1\r\nHost: s3.example\r\n")
    assert b"Proxy-Authorization: Basic dXNlcjpwYSBzcw==" in peer.heads[0]

    def refuses(connection: socket.socket) -> None:
        peer.heads.append(connection.recv(65536))
        connection.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")

    peer.scripts = [refuses]
    with pytest.raises(WireBroken, match="proxy refuses"):
        wire.send("GET", "https://s3.example/k", {}, None, TIMEOUTS)
    assert peer.heads[1].startswith(b"CONNECT s3.example:443 HTTP/1.1\r\nHost: s3.example:443\r\nProxy-Authorization")
    peer.scripts = [peer.answers(OK)]
    wire.send("PUT", peer.url, {"Content-Length": "3"}, Bytes(b"abc"), TIMEOUTS)
    assert peer.heads[2].startswith(b"PUT /up?x=1 HTTP/1.1")
