"""Real servers on loopback: vLLM's answers, refusal, silence, dripping, and things that are no vLLM."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.domain.snapshot import Health, InferenceSample, Liveness, SensorState
from podwatch.sensors.inference import InferenceSensor, sum_series
from podwatch.system.clock import SystemClock
from tests.sensors.waiting import until
from tests.support.examples import examples

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b} 7"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_running_other{engine="0"} 100.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1.5e+06 1700000000000
vllm:generation_tokens_total{engine="1",model_name="m"} 500000.0
vllm:generation_tokens_created{engine="0"} 1.7e+09
"""


class Server:
    """A vLLM-like server whose answers a test changes."""

    def __init__(self) -> None:
        self.health = 200
        self.metrics = METRICS.encode()
        self.metrics_status = 200
        self.routes: dict[str, tuple[int, bytes]] = {}
        self.asked: list[str] = []
        self.gate = threading.Event()  # while cleared, /liveness does not answer
        self.gate.set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = {"/health": (server.health, b""), "/metrics": (server.metrics_status, server.metrics)}
                status, body = (known | server.routes).get(self.path, (404, b"{}"))
                server.asked.append(self.path)
                if self.path == "/liveness":
                    server.gate.wait(10)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.gate.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@contextmanager
def raw_server(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something that listens and talks as it likes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    peer, _ = listening.accept()
                except OSError:
                    return
                with peer:
                    try:
                        talk(peer)
                    except OSError:
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(60)


async def first(urls: tuple[str, ...], timeout: float = 2.0):  # type: ignore[no-untyped-def]
    sensor = InferenceSensor(urls, SystemClock(), timeout, 60.0)
    await sensor.start()
    try:
        await until(lambda: all(s.latest().state is not SensorState.PENDING for s in sensor._servers.values()))
        return sensor.latest()
    finally:
        await sensor.stop()


async def test_a_healthy_server_and_its_counters(server: Server) -> None:
    (sample,) = (await first((server.url,))).value
    assert (sample.url, sample.health, sample.http_status) == (server.url, Health.OK, 200)
    assert (sample.requests_running, sample.generation_tokens_total) == (7.0, 2_000_000.0)
    assert (sample.requests_waiting, sample.liveness) == (2.0, None)


async def test_an_address_with_v1_means_the_same_server(server: Server) -> None:
    (sample,) = (await first((server.url + "/v1/",))).value
    assert sample.health is Health.OK


async def test_a_dead_engine_then_nobody_then_back(server: Server) -> None:
    sensor = InferenceSensor((server.url,), SystemClock(), 2.0, 0.02)
    await sensor.start()
    seen = lambda: [s.health for s in sensor.latest().value or ()]  # noqa: E731
    await until(lambda: seen() == [Health.OK])
    server.health = 503
    await until(lambda: seen() == [Health.UNHEALTHY])
    assert sensor.latest().value[0].http_status == 503
    server.close()
    await until(lambda: seen() == [Health.REFUSED])
    assert sensor.latest().value[0].generation_tokens_total is None
    await sensor.stop()


async def test_counters_that_cannot_be_read_are_none(server: Server) -> None:
    server.metrics_status = 500
    (sample,) = (await first((server.url,))).value
    assert (sample.health, sample.requests_running) == (Health.OK, None)


async def test_a_body_beyond_the_bound_gives_no_counters(server: Server) -> None:
    server.metrics = METRICS.encode() + b"# padding\n" * 500_000
    (sample,) = (await first((server.url,), timeout=10.0)).value
    assert (sample.health, sample.generation_tokens_total) == (Health.OK, None)


async def test_silence_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        (sample,) = (await first((f"http://127.0.0.1:{listening.getsockname()[1]}",), timeout=0.2)).value
        assert (sample.health, sample.http_status) == (Health.TIMEOUT, None)


async def test_a_connection_closed_without_an_answer_is_no_answer() -> None:
    with raw_server(lambda peer: None) as url:
        (sample,) = (await first((url,))).value
        assert sample.health is Health.TIMEOUT


async def test_dripping_does_not_last() -> None:
    def drip(peer: socket.socket) -> None:
        peer.recv(4096)
        peer.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
        for _ in range(2000):
            peer.sendall(b"x")
            time.sleep(0.02)

    with raw_server(drip) as url:
        began = time.monotonic()
        (sample,) = (await first((url,), timeout=0.2)).value
        assert sample.health is Health.TIMEOUT
        assert time.monotonic() - began < 20


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9\r\n", b"\x00\xff" * 50 + b"\r\n", b"HTTP/1.1 999999 x\r\n\r\n"])
async def test_what_is_no_http_is_no_evidence(answer: bytes) -> None:
    def talk(peer: socket.socket) -> None:
        peer.recv(4096)
        peer.sendall(answer)

    with raw_server(talk) as url:
        reading = await first((url,))
        assert reading.state is SensorState.BLIND
        assert url in reading.detail


async def test_a_wrong_address_is_no_evidence(server: Server) -> None:
    server.health = 404
    reading = await first((server.url,))
    assert reading.state is SensorState.BLIND
    assert "404" in reading.detail


@pytest.mark.parametrize("url", ["http://", "nonsense", "http://127.0.0.1:99999", "http://no-such-host.invalid:1"])
async def test_an_impossible_url_is_blind_not_an_error(url: str) -> None:
    reading = await first((url,))
    assert reading.state in (SensorState.BLIND, SensorState.OK)
    if reading.state is SensorState.OK:
        assert reading.value[0].health is Health.REFUSED  # an empty host is this host: port 80, nobody there


async def test_one_server_of_two_unobservable(server: Server) -> None:
    with raw_server(lambda peer: peer.sendall(b"220 smtp\r\n")) as other:
        reading = await first((server.url, other))
        assert [s.url for s in reading.value] == [server.url]
        assert other in reading.detail


async def test_without_urls_it_is_absent() -> None:
    sensor = InferenceSensor((), SystemClock())
    await sensor.start()
    assert sensor.latest().state is SensorState.ABSENT
    await sensor.stop()


@settings(deadline=None, max_examples=examples(100))
@given(st.text(), st.sampled_from(["vllm:generation_tokens_total", "x"]))
def test_any_text_is_survived(text: str, name: str) -> None:
    sum_series(text, name)
    sum_series(f'{name} {text}\n{name}{{a="b"}} {text}', name)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "abc"])
def test_nonsense_is_none(value: str) -> None:
    assert sum_series(f'm 1\nm{{a="b"}} {value}\n', "m") is None


@contextmanager
def quick_inside(monkeypatch: pytest.MonkeyPatch, timeout: float = 5.0) -> Iterator[None]:
    monkeypatch.setattr("podwatch.sensors.inference.LIVENESS_POLL", 0.03)
    monkeypatch.setattr("podwatch.sensors.inference.LIVENESS_TIMEOUT", timeout)
    yield


def only(sensor: InferenceSensor) -> InferenceSample | None:
    return next(iter(sensor.latest().value or ()), None)


async def test_liveness_tells_a_hung_engine_and_a_server_without_the_route_is_left_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with quick_inside(monkeypatch):
        sensor = InferenceSensor((server.url,), SystemClock(), 2.0, 0.02)
        await sensor.start()
        await until(lambda: server.asked.count("/liveness") == 1 and server.asked.count("/health") > 10)
        assert only(sensor).liveness is None
        assert server.asked.count("/liveness") == 1, "404: not asked again for a while"
        await sensor.stop()
        server.routes = {"/liveness": (200, b""), "/is_sleeping": (200, b'{"is_sleeping": true}')}
        sensor = InferenceSensor((server.url,), SystemClock(), 2.0, 0.02)
        await sensor.start()
        await until(lambda: (s := only(sensor)) and (s.liveness, s.asleep) == (Liveness.OK, True))
        server.routes = {"/liveness": (503, b"{}"), "/is_sleeping": (200, b'{"is_sleeping": false}')}
        await until(lambda: (s := only(sensor)) and (s.liveness, s.asleep) == (Liveness.UNRESPONSIVE, False))
        assert only(sensor).health is Health.OK
        await sensor.stop()


async def test_a_liveness_that_hangs_delays_nothing_else(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with quick_inside(monkeypatch, timeout=3.0):
        server.routes = {"/liveness": (200, b"")}
        sensor = InferenceSensor((server.url,), SystemClock(), 2.0, 0.02)
        await sensor.start()
        await until(lambda: (s := only(sensor)) and s.liveness is Liveness.OK)
        server.gate.clear()
        asked = server.asked.count("/liveness")
        await until(lambda: server.asked.count("/liveness") > asked)
        before = server.asked.count("/health")
        await until(lambda: server.asked.count("/health") > before + 5, 2.9)
        await until(lambda: (s := only(sensor)) and s.liveness is Liveness.TIMEOUT)
        await sensor.stop()
