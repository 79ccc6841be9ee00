"""``/health`` and ``/metrics`` of vLLM servers (facts/prime-rl.md section 5)."""

import http.client
import math
import re
import time
from dataclasses import dataclass, replace
from urllib.parse import SplitResult, urlsplit

from podwatch.domain.reading import Reading, SensorState, observed, unobserved
from podwatch.domain.snapshot import Health, InferenceSample
from podwatch.sensors.polling import Poller
from podwatch.system.clock import Clock

MAX_BODY = 4 << 20
"""Bytes read of an answer; vLLM's /metrics with all histograms is about 100 KB per engine."""

_RUNNING = "vllm:num_requests_running"
_TOKENS = "vllm:generation_tokens_total"
_SERIES = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^\n]*\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*$")


def sum_series(text: str, name: str) -> float | None:
    """The sum of one metric over its label sets in Prometheus' text format; None when it is not there or not finite.

    vLLM has one series per engine (``engine="0"``...), so the sum is the server's figure.
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


@dataclass(frozen=True, slots=True)
class _Answer:
    """A sample, or why there is none: ``problem`` is no evidence about the engine."""

    sample: InferenceSample | None
    problem: str = ""


def _get(parts: SplitResult, path: str, timeout: float) -> tuple[int, bytes]:
    """Status and body of one GET. Blocks; the connect may take ``timeout`` seconds and the answer as long again."""
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


def probe(url: str, timeout: float) -> _Answer:
    """Ask one server. Blocks up to about 2 x ``timeout`` seconds; raises nothing that a network can cause."""
    try:
        parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
        status, _ = _get(parts, "/health", timeout)
    except TimeoutError:
        return _Answer(InferenceSample(url, Health.TIMEOUT))
    except ConnectionRefusedError:
        return _Answer(InferenceSample(url, Health.REFUSED))
    except ConnectionError:  # reset or closed without an answer: on its way down perhaps; the next look will tell
        return _Answer(InferenceSample(url, Health.TIMEOUT))
    except http.client.HTTPException as error:
        return _Answer(None, f"{url} does not speak HTTP ({type(error).__name__})")
    except (OSError, ValueError) as error:
        return _Answer(None, f"{url} cannot be asked: {error}")
    if status >= 500:
        return _Answer(_with_counters(InferenceSample(url, Health.UNHEALTHY, status), parts, timeout))
    if not 200 <= status < 300:
        return _Answer(None, f"{url}/health answered {status}: is this a vLLM server's own address?")
    return _Answer(_with_counters(InferenceSample(url, Health.OK, status), parts, timeout))


def _with_counters(sample: InferenceSample, parts: SplitResult, timeout: float) -> InferenceSample:
    try:
        status, body = _get(parts, "/metrics", timeout)
    except (OSError, ValueError, http.client.HTTPException):
        return sample
    if status != 200 or len(body) >= MAX_BODY:  # a cut-off answer would give a sum that is too low
        return sample
    text = body.decode("utf-8", errors="replace")
    return replace(
        sample, requests_running=sum_series(text, _RUNNING), generation_tokens_total=sum_series(text, _TOKENS)
    )


class InferenceSensor:
    """One thread per server, so that one that hangs does not delay the others.

    A server that could not be observed (no HTTP, wrong address, name not found) is left out of the value and named in
    ``detail``; when that holds for all, the reading is BLIND. An answer that takes longer than ``timeout`` is
    Health.TIMEOUT, which is an observation, but the weakest.
    """

    name = "inference"

    def __init__(self, urls: tuple[str, ...], clock: Clock, timeout: float = 2.0, poll: float = 5.0) -> None:
        self._clock = clock
        self._pollers = tuple(self._poller(url, timeout, poll) for url in urls)
        self._absent: Reading[tuple[InferenceSample, ...]] = unobserved(
            SensorState.ABSENT, clock.monotonic(), "no inference URL configured ([inference] urls)"
        )

    def _poller(self, url: str, timeout: float, poll: float) -> Poller[_Answer, InferenceSample]:
        def absorb(answer: _Answer) -> Reading[InferenceSample]:
            now = self._clock.monotonic()
            if answer.sample is None:
                return unobserved(SensorState.BLIND, now, answer.problem)
            return observed(answer.sample, now)

        # Two requests, each a connect and an answer within the timeout; beyond that, name resolution hangs.
        return Poller(
            f"{self.name} {url}",
            self._clock,
            poll=poll,
            deadline=4 * timeout + 1.0,
            prepare=lambda: lambda: probe(url, timeout),
            absorb=absorb,
        )

    async def start(self) -> None:
        for poller in self._pollers:
            poller.start()

    async def stop(self) -> None:
        for poller in self._pollers:
            await poller.stop()

    def latest(self) -> Reading[tuple[InferenceSample, ...]]:
        if not self._pollers:
            return self._absent
        readings = [poller.latest() for poller in self._pollers]
        seen = [(reading.value, reading.at) for reading in readings if reading.value is not None]
        missing = "; ".join(reading.detail for reading in readings if not reading.ok)
        if seen:
            oldest = min(at for _, at in seen)
            return Reading(SensorState.OK, oldest, tuple(value for value, _ in seen), missing)
        state = SensorState.BLIND if any(r.state is SensorState.BLIND for r in readings) else SensorState.PENDING
        return unobserved(state, max(r.at for r in readings), missing)
