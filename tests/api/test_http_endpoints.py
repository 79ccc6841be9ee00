"""The HTTP server over real loopback sockets: answers, refusals, clients that misbehave."""

import asyncio
import base64
import contextlib
import http.client
import json
import signal
import socket

import pytest

from podwatch.api import http_server as serving
from podwatch.api.http_endpoints import HttpServer
from podwatch.api.http_server import bind
from podwatch.domain.errors import HostError, PermissionDenied
from podwatch.domain.event import Event, EventName
from podwatch.domain.secrets import register
from podwatch.system.endpoint import fetch_status
from tests.report import views

TOKEN = "abcdef0123456789"


class Rig:
    def __init__(self, **options) -> None:
        self.drawn = 0
        self.shown = views.healthy()
        self.alive: tuple[bool, str] = (True, "")
        self.usable: tuple[bool, list[str]] = (True, [])
        self.pings: list[str] = []
        self.events_asked: list[tuple[int, int]] = []
        self.lines: tuple[str, ...] = ()
        self.server = HttpServer(options.pop("host", "127.0.0.1"), options.pop("port", 0), self, TOKEN, **options)

    def view(self):
        if self.shown is None:
            raise RuntimeError("no view: secret-detail")
        return self.shown

    def live(self) -> tuple[bool, str]:
        return self.alive

    def ready(self) -> tuple[bool, list[str]]:
        return self.usable

    async def history(self):
        self.drawn += 1
        return ()

    def log_lines(self):
        return self.lines

    def ping(self, role: str) -> None:
        self.pings.append(role)

    async def events(self, after_id: int, limit: int) -> list[Event]:
        self.events_asked.append((after_id, limit))
        return [Event(EventName.PUBLISHED, views.WALL, "step 80", id=after_id + 1)]

    async def ask(self, method: str, path: str, *, body: bytes | None = None, **headers: str):
        def request():
            connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
            try:
                connection.request(
                    method, path, body=body, headers={k.replace("_", "-"): v for k, v in headers.items()}
                )
                response = connection.getresponse()
                return response.status, response.read(), response.headers
            finally:
                connection.close()

        return await asyncio.to_thread(request)

    async def get(self, path: str, **headers: str):
        return await self.ask("GET", path, **headers)


@pytest.fixture
async def rig():
    made = Rig(seconds=60.0)
    await made.server.start()
    yield made
    await made.server.stop()


@pytest.fixture
async def hasty():
    """One that drops who is slow: also us, now and then, on a busy machine."""
    made = Rig(seconds=1.0)
    await made.server.start()
    yield made
    await made.server.stop()


async def still_serves(rig) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                assert (await rig.get("/livez"))[0] == 200
                return
            except (OSError, http.client.HTTPException):
                continue


async def test_health(rig):
    assert (await rig.get("/livez"))[:2] == (200, b"ok\n")
    rig.alive = (False, "no turn for 31 s")
    assert (await rig.get("/livez"))[:2] == (503, b"not ok\nno turn for 31 s\n")
    assert (await rig.get("/readyz"))[:2] == (200, b"ok\n")
    rig.usable = (False, ["gpu is blind", "store refuses the key"])
    assert (await rig.get("/readyz"))[:2] == (503, b"not ok\ngpu is blind\nstore refuses the key\n")


@pytest.mark.parametrize(
    ("state", "code", "word"),
    [
        ("running", 200, b"ok\n"),
        ("not-backed-up", 200, b"warning\n"),
        ("gave-up", 503, b"critical\n"),
        ("blind", 503, b"unknown\n"),
    ],
)
async def test_healthz_is_the_run_itself(rig, state, code, word):
    rig.shown = views.ALL[state]()
    status, body, _ = await rig.get("/healthz")
    assert status == code
    assert body.startswith(word)
    if state != "running":
        assert body.count(b"\n") > 1


async def test_status_and_metrics(rig):
    status, body, headers = await rig.get("/status")
    assert (status, headers["content-type"], headers["cache-control"]) == (200, "application/json", "no-store")
    assert json.loads(body)["training"]["step"] == 85
    status, body, headers = await rig.get("/metrics")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b"\npodwatch_step 85.0\n" in body
    assert "server" not in headers


async def test_the_client_room_can_read_it(rig):
    document = await asyncio.to_thread(fetch_status, rig.server.url)
    assert document["run_id"] == "bs4-qwen3-8b"
    assert fetch_status("ftp://127.0.0.1") is None


async def test_events(rig):
    _, body, _ = await rig.get("/events?after_id=5&limit=99999")
    assert [e["id"] for e in json.loads(body)["events"]] == [6]
    assert rig.events_asked == [(5, 1000)]
    assert (await rig.get("/events?limit=x"))[0] == 400


async def test_the_page_has_a_strict_policy_and_no_secret(rig):
    register("hunter2hunter2hunter2")
    rig.lines = ("epoch 1", "key is hunter2hunter2hunter2 <script>")
    status, body, headers = await rig.get("/")
    assert (status, headers["content-type"], headers["cache-control"]) == (200, "text/html; charset=utf-8", "no-store")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert b"TRAINING IS RUNNING at step 85" in body
    assert b"epoch 1\nkey is [removed] &lt;script&gt;" in body


async def test_the_last_day_is_a_document_and_only_read_on_request(rig):
    await rig.get("/")
    assert rig.drawn == 0
    status, body, headers = await rig.get("/history")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body)["moments"] == [moment.to_json() for moment in await rig.history()]


SHOWING = ("/", "/status", "/events", "/metrics", "/nothing")
PASSWORD = "a long pass:word with ü"


def basic(password: str, user: str = "me") -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@contextlib.asynccontextmanager
async def served(**options):
    made = Rig(seconds=60.0, **options)
    await made.server.start()
    try:
        yield made
    finally:
        await made.server.stop()


async def test_beyond_loopback_without_a_password_only_probes_and_pings_are_answered():
    async with served(host="0.0.0.0") as rig:
        for path in SHOWING:
            status, body, headers = await rig.get(path, Authorization=basic(""))
            assert (status, headers["www-authenticate"]) == (403, None)
            assert b"password_file" in body
            assert b"ssh -L" in body
        assert (await rig.get(f"/heartbeat/{TOKEN}/trainer"))[0] == 200
        assert (await rig.get("/heartbeat/wrong/trainer"))[0] == 404


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
async def test_a_password_is_needed_for_everything_that_shows_the_run(host):
    async with served(host=host, password=PASSWORD) as rig:
        for path in SHOWING:
            status, body, headers = await rig.get(path)
            assert status == 401
            assert headers["www-authenticate"] == 'Basic realm="podwatch", charset="UTF-8"'
            assert b"step" not in body
            assert (await rig.ask("POST", path))[0] == 401
        for wrong in (
            basic("wrong"), basic(PASSWORD + "x"), basic(PASSWORD[:-1]), basic(""), "Basic", "Basic !", "Basic YQ==",
            f"Bearer {PASSWORD}", basic(PASSWORD).removeprefix("Basic "),
        ):  # fmt: skip
            assert (await rig.get("/status", Authorization=wrong))[0] == 401, wrong
        for right in (basic(PASSWORD), basic(PASSWORD, user=""), basic(PASSWORD).replace("Basic", "basic")):
            assert (await rig.get("/", Authorization=right))[0] == 200
            assert (await rig.get("/status", Authorization=right))[0] == 200


async def test_probes_without_the_password_say_one_word():
    async with served(host="0.0.0.0", password=PASSWORD) as rig:
        rig.shown, rig.alive, rig.usable = views.gave_up(), (False, "a detail"), (False, ["another detail"])
        for path, word in (("/livez", b"not ok\n"), ("/readyz", b"not ok\n"), ("/healthz", b"critical\n")):
            assert (await rig.get(path))[:2] == (503, word)
            status, told, _ = await rig.get(path, Authorization=basic(PASSWORD))
            assert status == 503
            assert told.startswith(word)
            assert len(told) > len(word)


async def test_the_password_admits_under_any_name_and_nothing_else_does():
    """A reverse proxy passes the public name on; a web page of another name cannot send the password."""
    async with served(password=PASSWORD) as rig:
        foreign = {"Host": "pod.example.com"}
        assert (await rig.get("/", **foreign, Authorization=basic(PASSWORD)))[0] == 200
        assert (await rig.get("/", **foreign))[0] == 401
        assert (await rig.get("/livez", **foreign))[0] == 421


async def test_two_authorizations_are_none():
    async with served(password=PASSWORD) as rig:

        def request() -> int:
            connection = http.client.HTTPConnection("127.0.0.1", rig.server.port, timeout=60)
            try:
                connection.putrequest("GET", "/status")
                connection.putheader("Authorization", basic("wrong"))
                connection.putheader("Authorization", basic(PASSWORD))
                connection.endheaders()
                return connection.getresponse().status
            finally:
                connection.close()

        assert await asyncio.to_thread(request) == 401


async def test_the_client_says_that_the_status_needs_the_password():
    async with served(password=PASSWORD) as rig:
        with pytest.raises(PermissionDenied, match="root"):
            await asyncio.to_thread(fetch_status, rig.server.url)


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/healthz", "/status", "/metrics", "/events", "/"])
async def test_head_is_get_without_a_body(rig, path):
    get, head = await rig.get(path), await rig.ask("HEAD", path)
    assert head[0] == get[0]
    assert head[1] == b""
    assert int(head[2]["content-length"]) == len(get[1])
    assert (await rig.ask("POST", path))[0] == 405


async def test_pings(rig):
    assert (await rig.get(f"/heartbeat/{TOKEN}/trainer"))[0] == 200
    assert (await rig.ask("POST", f"/heartbeat/{TOKEN}/orchestrator", body=b"{}"))[0] == 204
    wrong = (
        f"/heartbeat/{TOKEN}x/trainer",
        "/heartbeat//trainer",
        f"/heartbeat/{TOKEN}/Trainer",
        f"/heartbeat/{TOKEN}/{'a' * 33}",
        f"/heartbeat/{TOKEN}/a%2fb",
        "/heartbeat/%C3%A4/trainer",
    )
    for path in wrong:
        assert (await rig.get(path))[0] == 404
    assert rig.pings == ["trainer", "orchestrator"]


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1", "localhost.evil:9477", "[::2]", "@"]
)
async def test_a_name_that_is_not_ours_is_refused(rig, host):
    for path in ("/status", f"/heartbeat/{TOKEN}/trainer"):
        assert (await rig.get(path, Host=host))[0] == 421
    assert rig.pings == []


@pytest.mark.parametrize("host", ["localhost:9477", "LOCALHOST", "127.0.0.1", "[::1]:9477", "127.0.0.1:80"])
async def test_loopback_names_are_ours(rig, host):
    assert (await rig.get("/livez", Host=host))[0] == 200


async def test_configured_names_are_ours():
    rig = Rig(allowed_hosts=["pod-7.example"])
    await rig.server.start()
    assert (await rig.get("/livez", Host="pod-7.example:1"))[0] == 200
    await rig.server.stop()


async def test_an_error_inside_says_nothing_of_itself(rig):
    rig.shown = None
    status, body, _ = await rig.get("/status")
    assert status == 500
    assert b"secret-detail" not in body
    assert (await rig.get("/livez"))[0] == 200


async def test_a_port_that_is_taken_moves_on_to_the_next():
    taken = bind("127.0.0.1", 0)
    port = taken.getsockname()[1]
    rig = Rig(port=port)
    url = await rig.server.start()
    assert port < rig.server.port <= port + serving.PORT_TRIES
    assert url == f"http://127.0.0.1:{rig.server.port}"
    assert (await rig.get("/livez"))[0] == 200
    await rig.server.stop()
    taken.close()


async def test_no_port_at_all_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(serving, "PORT_TRIES", 0)
    taken = bind("127.0.0.1", 0)
    with pytest.raises(HostError, match="all in use"):
        await Rig(port=taken.getsockname()[1]).server.start()
    taken.close()
    with pytest.raises(HostError):
        bind("203.0.113.1", 0)


async def slow_client(port: int, data: bytes, *, dribble: bool = False) -> float:
    """Seconds until the server hangs up."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        async with asyncio.timeout(10):
            while True:
                try:
                    async with asyncio.timeout(0.05):
                        if not await reader.read(100):
                            break
                except TimeoutError:
                    if dribble:
                        writer.write(b"x")
    except ConnectionError:
        pass
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except OSError:
            pass
    return loop.time() - begin


async def test_a_client_that_never_finishes_its_request_is_dropped(hasty):
    took = await asyncio.gather(
        slow_client(hasty.server.port, b""),
        slow_client(hasty.server.port, b"GET /status HTTP/1.1\r\nHost: localhost\r\nX: "),
        slow_client(hasty.server.port, b"GET /status HTTP/1.1\r\nX: ", dribble=True),
    )
    assert all(0.25 < t < 9 for t in took), "dropped long before the client gives up"
    await still_serves(hasty)


async def test_a_body_that_never_ends_is_dropped(hasty):
    head = f"POST /heartbeat/{TOKEN}/trainer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n".encode()
    assert await slow_client(hasty.server.port, head, dribble=True) < 9
    await still_serves(hasty)


async def test_a_head_that_is_too_long_is_refused(rig):
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
    writer.write(b"GET /status HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * (serving.MAX_HEAD_BYTES + 10))
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 400")
    writer.close()


async def test_it_leaves_the_daemons_signal_handlers_alone():
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    rig = Rig()
    await rig.server.start()
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    await rig.server.stop()


async def test_stop_frees_the_port_and_can_be_repeated():
    rig = Rig()
    await rig.server.start()
    port = rig.server.port
    await rig.server.stop()
    await rig.server.stop()
    assert rig.server.url == ""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=2)
    bind("127.0.0.1", port).close()


async def test_an_idle_server_does_not_wake_the_loop(rig):
    """uvicorn's own main loop ticks ten times a second, for ever."""
    await asyncio.sleep(0.2)
    loop = asyncio.get_running_loop()
    turns = 0
    original = loop._run_once

    def counted():
        nonlocal turns
        turns += 1
        original()

    loop._run_once = counted
    try:
        await asyncio.sleep(0.6)
    finally:
        loop._run_once = original
    assert turns <= 4


async def test_no_text_answer_shows_a_secret(rig):
    register("planted-value-1")
    rig.alive = (False, "no turn since planted-value-1")
    rig.usable = (False, ["store refuses the key", "https://me:planted2@h refuses"])
    for path in ("/livez", "/readyz"):
        assert b"planted" not in (await rig.get(path))[1]
