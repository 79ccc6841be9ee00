"""``/health`` and ``/metrics`` of vLLM servers, and with a slower poller the routes that query the engine itself:
``/liveness`` and ``/is_sleeping``."""

import asyncio
import http.client
import json
import math
import re
import time
from dataclasses import dataclass, replace
from urllib.parse import SplitResult, urlsplit

import psutil

from podwatch.domain.process import ProcessRole
from podwatch.domain.snapshot import (
    Health,
    InferenceSample,
    Liveness,
    Reading,
    SensorState,
    TrainerSample,
    observed,
    unobserved,
)
from podwatch.sensors.base import PolledSensor, Read, Sensor, end_task
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock
from podwatch.trainer.process_roles import port_of

MAX_BODY = 4 << 20
"""Maximum bytes read of an answer; vLLM's /metrics with all histograms is about 100 KB per engine."""

LIVENESS_POLL = 30.0
LIVENESS_TIMEOUT = 35.0
"""Seconds. prime-rl's route times out after 30 s and answers 503; a little longer, so that podwatch receives that
answer."""
SLEEPING_TIMEOUT = 5.0

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_TOKENS = "vllm:generation_tokens_total"
_SERIES = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^\n]*\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*$")


def sum_series(text: str, name: str) -> float | None:
    """The sum of one metric over its label sets in the Prometheus text format; None when it is absent or not finite.

    vLLM has one series per engine (``engine="0"``...), so the sum is the server's value.
    """
    total: float | None = None
    for line in text.splitlines():
        if not line.startswith(name):
            continue
        match = _SERIES.match(line)
        if match is None or match[1] != name:
            continue
        try:
            value = float(match[2])
        except ValueError:
            return None
        total = value if total is None else total + value
    return total if total is not None and math.isfinite(total) else None


def _get(parts: SplitResult, path: str, timeout: float) -> tuple[int, bytes]:
    """Status and body of one GET. Blocks; the connect can take ``timeout`` seconds and the answer as long again."""
    until = time.monotonic() + timeout
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout)
    try:
        connection.request("GET", parts.path + path, headers={"Connection": "close", "Accept": "*/*"})
        response = connection.getresponse()
        body = bytearray()
        while len(body) < MAX_BODY:
            if time.monotonic() > until:  # each receive has the timeout; a server that drips must not have it each time
                raise TimeoutError(f"no complete answer within {timeout:g} s")
            block = response.read1(min(65536, MAX_BODY - len(body)))
            if not block:
                break
            body += block
        return response.status, bytes(body)
    finally:
        connection.close()


def probe(url: str, timeout: float) -> InferenceSample | str:
    """Query one server; a text says why nothing is known of the engine. Blocks up to about 2 x ``timeout`` seconds;
    does not raise network errors."""
    try:
        parts = _address(url)
        status, _ = _get(parts, "/health", timeout)
    except TimeoutError:
        return InferenceSample(url, Health.TIMEOUT)
    except ConnectionRefusedError:
        return InferenceSample(url, Health.REFUSED)
    except ConnectionError:  # reset or closed without an answer: perhaps ending; the next poll shows it
        return InferenceSample(url, Health.TIMEOUT)
    except http.client.HTTPException as error:
        return f"{url} does not speak HTTP ({type(error).__name__})"
    except (OSError, ValueError) as error:
        return f"cannot connect to {url}: {error}"
    if status >= 500:
        return _with_counters(InferenceSample(url, Health.UNHEALTHY, status), parts, timeout)
    if not 200 <= status < 300:
        return f"{url}/health answered {status}: check that this is the address of a vLLM server"
    return _with_counters(InferenceSample(url, Health.OK, status), parts, timeout)


def _with_counters(sample: InferenceSample, parts: SplitResult, timeout: float) -> InferenceSample:
    try:
        status, body = _get(parts, "/metrics", timeout)
    except (OSError, ValueError, http.client.HTTPException):
        return sample
    if status != 200 or len(body) >= MAX_BODY:  # a truncated answer would give a sum that is too low
        return sample
    text = body.decode("utf-8", errors="replace")
    return replace(
        sample,
        requests_running=sum_series(text, _RUNNING),
        requests_waiting=sum_series(text, _WAITING),
        generation_tokens_total=sum_series(text, _TOKENS),
    )


@dataclass(frozen=True, slots=True)
class Inside:
    """The engine's own answers at ``at``; None where the server has no such route or does not listen."""

    at: float
    liveness: Liveness | None = None
    asleep: bool | None = None


def ask_inside(url: str, *, liveness: bool, sleeping: bool, clock: Clock) -> tuple[Inside, frozenset[str]]:
    """Query both slow routes; also returns the routes the server does not have. Blocks for LIVENESS_TIMEOUT or
    longer."""
    parts = _address(url)
    alive, asleep, missing = None, None, set()
    if liveness:
        try:
            status, _ = _get(parts, "/liveness", LIVENESS_TIMEOUT)
        except TimeoutError:
            alive = Liveness.TIMEOUT
        except (OSError, ValueError, http.client.HTTPException):
            alive = None  # refused or interrupted: /health reports that
        else:
            if status in (404, 405):
                missing.add("/liveness")
            alive = Liveness.OK if 200 <= status < 300 else Liveness.UNRESPONSIVE if status >= 500 else None
    if sleeping and alive is not Liveness.TIMEOUT:
        try:
            status, body = _get(parts, "/is_sleeping", SLEEPING_TIMEOUT)
            if status in (404, 405):
                missing.add("/is_sleeping")
            answer = json.loads(body).get("is_sleeping") if status == 200 else None
            asleep = answer if isinstance(answer, bool) else None
        except (OSError, ValueError, AttributeError, http.client.HTTPException):
            asleep = None
    return Inside(clock.monotonic(), alive, asleep), frozenset(missing)


def _address(url: str) -> SplitResult:
    return urlsplit(url.rstrip("/").removesuffix("/v1"))


class PolledServer(PolledSensor[InferenceSample | str, InferenceSample]):
    """One server: this polls the routes that answer at once, ``inside`` those that go through the engine, each with its
    own thread. So neither a hung engine nor a hung server delays anything else."""

    def __init__(self, url: str, clock: Clock, *, timeout: float, poll: float, discovered: bool = False) -> None:
        # Two requests, each a connect and an answer within the timeout; beyond that, name resolution hangs.
        super().__init__(clock, poll=poll, deadline=4 * timeout + 1.0)
        self.name, self.url = f"inference {url}", url
        self._timeout, self._discovered = timeout, discovered
        self._slow = SlowRoutes(self, clock)

    def begin(self) -> None:
        super().begin()
        self._slow.begin()

    async def stop(self) -> None:
        await super().stop()
        await self._slow.stop()

    def latest(self) -> Reading[InferenceSample]:
        reading = super().latest()
        if reading.value is None:
            return reading
        inside = self._slow.latest().value
        if inside is None or self._clock.monotonic() - inside.at > LIVENESS_POLL + 2 * LIVENESS_TIMEOUT:
            inside = Inside(0.0)
        sample = replace(
            reading.value, discovered=self._discovered, liveness=inside.liveness, asleep=inside.asleep
        )  # fmt: skip
        return replace(reading, value=sample)

    def prepare(self) -> Read[InferenceSample | str]:
        url, timeout = self.url, self._timeout
        return lambda: probe(url, timeout)

    def absorb(self, result: InferenceSample | str) -> Reading[InferenceSample]:
        now = self._clock.monotonic()
        return unobserved(SensorState.BLIND, now, result) if isinstance(result, str) else observed(result, now)

    @property
    def answers(self) -> bool:
        """Whether it answered its last request, even if too late."""
        newest = super().latest().value
        return newest is not None and newest.health in (Health.OK, Health.TIMEOUT)


class SlowRoutes(PolledSensor[tuple[Inside, frozenset[str]], Inside]):
    """The routes that go through the engine, as far as the server has them."""

    def __init__(self, server: PolledServer, clock: Clock) -> None:
        super().__init__(clock, poll=LIVENESS_POLL, deadline=2 * (LIVENESS_TIMEOUT + SLEEPING_TIMEOUT) + 5.0)
        self.name = f"inside {server.url}"
        self._server = server
        self._missing: dict[str, float] = {}  # route -> when to request it again

    def prepare(self) -> Read[tuple[Inside, frozenset[str]]]:
        now, up = self._clock.monotonic(), self._server.answers
        wanted = {r for r in ("/liveness", "/is_sleeping") if up and self._missing.get(r, 0.0) <= now}
        return lambda: ask_inside(
            self._server.url, liveness="/liveness" in wanted, sleeping="/is_sleeping" in wanted, clock=self._clock
        )

    def absorb(self, result: tuple[Inside, frozenset[str]]) -> Reading[Inside]:
        inside, missing = result
        for route in missing:
            self._missing[route] = inside.at + 600.0  # the server may be upgraded
        return observed(inside, inside.at)


# -- sensor ----------------------------------------------------------------------------------------------------------

NO_URL = "no inference URL configured ([inference] urls)"
TRIES = 30
"""Requests to one address without an answer before podwatch gives up on it, one per search: five minutes ..."""
TRIES_NAMED = 600
"""... and where the command line names the port, longer than any start-up."""


class InferenceSensor:
    """Reads all configured servers, or if none is configured, those in the process tree of ``trainer``.

    A server's port is on its command line, or among the sockets its process listens on. Only processes with the role of
    an inference server are examined, and an address counts only after ``/health`` there answered 200: so another
    program is never taken for a dead server. Found servers are polled until the start of training ends: podwatch must
    notice when one is gone.

    A server that cannot be observed (no HTTP, wrong address, name not found) is left out of the value and named in
    ``detail``; if no server can be observed, the reading is BLIND. An answer that takes longer than ``timeout`` is
    Health.TIMEOUT, the weakest observation.
    """

    name = "inference"

    def __init__(
        self,
        urls: tuple[str, ...],
        clock: Clock,
        timeout: float = 2.0,
        poll: float = 5.0,
        *,
        trainer: Sensor[TrainerSample] | None = None,
        known: tuple[str, tuple[str, ...]] = ("", ()),
        search: float = 10.0,
    ) -> None:
        """``known``: addresses that an earlier podwatch found, and the start of training they belong to. A server that
        has died since would never be found again."""
        self._clock, self._timeout, self._poll, self._search = clock, timeout, poll, search
        self._trainer = trainer if not urls else None
        self._known = known
        self._start_id = ""
        self._tried: dict[str, int] = {}
        self._servers: dict[str, PolledServer] = {url: self._server(url) for url in urls}
        self._detail = "searching for inference servers in the trainer's process tree" if self._trainer else NO_URL
        self._worker = Worker("find servers")
        self._task: asyncio.Task[None] | None = None

    def _server(self, url: str, *, discovered: bool = False) -> PolledServer:
        return PolledServer(url, self._clock, timeout=self._timeout, poll=self._poll, discovered=discovered)

    async def start(self) -> None:
        for server in self._servers.values():
            server.begin()
        if self._trainer is not None and self._task is None:
            self._task = asyncio.create_task(self._run(self._trainer), name="sensor inference: search")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await end_task(task)
        for server in self._servers.values():
            await server.stop()
        self._worker.close()

    def wake(self) -> None:
        """Query the health of every server now; the routes that go through the engine keep their interval."""
        for server in self._servers.values():
            server.wake()

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers that are polled now: between two starts of training, those of the last start."""
        return tuple(self._servers)

    def ports(self) -> tuple[int, ...]:
        """Ports on this machine that must be free before a start."""
        addresses = map(urlsplit, self.urls or self._known[1])
        return tuple(a.port for a in addresses if a.hostname in ("127.0.0.1", "localhost", "::1") and a.port)

    def latest(self) -> Reading[tuple[InferenceSample, ...]]:
        if not self._servers:
            return unobserved(SensorState.ABSENT, self._clock.monotonic(), self._detail)
        readings = [server.latest() for server in self._servers.values()]
        seen = [(reading.value, reading.at) for reading in readings if reading.value is not None]
        missing = "; ".join(reading.detail for reading in readings if not reading.ok)
        if seen:
            oldest = min(at for _, at in seen)
            return Reading(SensorState.OK, oldest, tuple(value for value, _ in seen), missing)
        state = SensorState.BLIND if any(r.state is SensorState.BLIND for r in readings) else SensorState.PENDING
        return unobserved(state, max(r.at for r in readings), missing)

    # -- search in the process tree

    async def _run(self, trainer: Sensor[TrainerSample]) -> None:
        while True:
            try:
                await self.look(trainer.latest().value)
            except Exception as error:  # any error must be visible, and the search must continue
                self._detail = f"cannot search for inference servers: {error or type(error).__name__}"
            await self._clock.sleep(self._search)

    async def look(self, sample: TrainerSample | None) -> None:
        """Search one reading of the tree."""
        if sample is None or not sample.alive:
            return
        if sample.start_id != self._start_id:
            await self._new_start(sample.start_id)
        processes = [p for p in sample.descendants if p.role is ProcessRole.INFERENCE]
        if not processes:
            self._detail = "no inference server found in the trainer's process tree; set [inference] urls"
            return
        denied = 0
        for process in processes:
            port = port_of(process.command)
            if port is not None:
                await self._knock(f"http://127.0.0.1:{port}", TRIES_NAMED)
                continue
            found = await self._worker.call(listening, process.identity.pid, timeout=5.0)
            denied += found is None
            for host, number in (found or ())[:8]:  # a server has one or two
                await self._knock(f"http://{host}:{number}", TRIES)
        why = f"; cannot read the sockets of {denied} of its processes" if denied else ""
        self._detail = f"no inference server answers yet{why}; if that does not change, set [inference] urls"

    async def _new_start(self, start_id: str) -> None:
        self._start_id = start_id
        self._tried.clear()
        old, self._servers = self._servers, {}
        for server in old.values():
            await server.stop()
        if start_id == self._known[0]:
            for url in self._known[1]:
                self._add(url)

    def _add(self, url: str) -> None:
        self._servers[url] = server = self._server(url, discovered=True)
        server.begin()

    async def _knock(self, url: str, most: int) -> None:
        if url in self._servers or self._tried.get(url, 0) >= most:
            return
        self._tried[url] = self._tried.get(url, 0) + 1
        answer = await self._worker.call(probe, url, self._timeout, timeout=4 * self._timeout + 1.0)
        if isinstance(answer, InferenceSample) and answer.health is Health.OK:
            self._add(url)


def listening(pid: int) -> tuple[tuple[str, int], ...] | None:
    """(host to connect to, port) of the sockets that a process listens on; None if it may not be read. Blocks."""
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return ()
    except (psutil.Error, OSError):
        return None
    found = {(_host(c.laddr.ip), int(c.laddr.port)) for c in connections if c.status == psutil.CONN_LISTEN}
    return tuple(sorted(found))


def _host(address: str) -> str:
    """The address to connect to, as part of a URL. "Any" becomes loopback: every relevant server with "::" is dual
    stack."""
    if address in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return "127.0.0.1"
    address = address.removeprefix("::ffff:") if "." in address else address
    return f"[{address}]" if ":" in address else address
