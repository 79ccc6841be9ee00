"""The training metrics of the last steps, from the trainer's ``metrics.jsonl``, its metrics endpoint, or its step
lines."""

import http.client
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from podwatch.domain.reading import Reading, SensorState, observed, unobserved
from podwatch.domain.snapshot import TrainingMetrics
from podwatch.sensors import logs
from podwatch.sensors.figures import Figures, from_endpoint, from_line, from_row, merge
from podwatch.sensors.loglines import clean
from podwatch.sensors.polling import Poller
from podwatch.system.clock import Clock

POLL = 10.0
"""Seconds. A step takes minutes, and only several bad steps in a row matter."""
DEADLINE = 10.0
TIMEOUT = 3.0
MAX_BODY = 256 << 10
STEPS_KEPT = 8
"""Steps in a reading: prime-rl's orchestrator is up to two ahead of its trainer, and writes several rows per step."""
FIGURES_GLOBS = ("metrics.jsonl", "*/metrics.jsonl")
"""prime-rl v0.8 writes it into the output directory, its HEAD below the run's name."""


@dataclass(frozen=True, slots=True)
class _Look:
    boundary: int
    news: tuple[logs.FileNews, ...] = ()
    rows: tuple[tuple[int, dict[str, float]], ...] = ()
    endpoint: Figures | None = None
    problem: str = ""


@dataclass(slots=True)
class _Source:
    """One source's steps since the start; ``at`` is when each was first seen."""

    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    at: dict[int, float] = field(default_factory=dict)

    def take(self, rows: Sequence[tuple[int, dict[str, float]]], now: float) -> None:
        merge(self.steps, rows, STEPS_KEPT)
        self.at = {step: self.at.get(step, now) for step in self.steps}


class TrainingSensor:
    """Reads the file and the endpoint, and receives step lines from the sensor that follows the logs (a tap). The first
    source that has values counts: file, endpoint, step line."""

    name = "training"
    _ORDER = ("metrics.jsonl", "endpoint", "step-line")

    def __init__(
        self,
        clock: Clock,
        output_dir: Path,
        *,
        metrics_file: str = "",
        metrics_url: str = "",
        poll: float = POLL,
        deadline: float = DEADLINE,
    ) -> None:
        """``metrics_file`` can be relative to ``output_dir``; empty: where prime-rl writes it. ``metrics_url`` is the
        trainer's metrics server, for example ``http://127.0.0.1:9090``; empty: none."""
        self._clock = clock
        self._files = logs.Sources(output_dir, (metrics_file,) if metrics_file else FIGURES_GLOBS)
        self._url = metrics_url
        self._positions: dict[str, logs.Position] = {}
        self._scanned = False
        self._poller: Poller[_Look, None] = Poller(
            self.name, clock, poll=poll, deadline=deadline, prepare=self._prepare, absorb=self._absorb
        )
        self._boundary = 0
        self._problem = ""
        self.reset()

    async def start(self) -> None:
        self._poller.start()

    async def stop(self) -> None:
        await self._poller.stop()

    def reset(self) -> None:
        """Forget all values: training was started."""
        self._boundary += 1
        self._first = True
        self._began_wall = self._clock.wall()
        self._sources = {name: _Source() for name in self._ORDER}

    # -- the tap on the logs

    def look(self, news: Sequence[logs.FileNews]) -> tuple[Figures, ...]:
        found: list[Figures] = []
        for item in news:
            for raw in item.lines:
                # Cheap test first: most lines have no metrics.
                if b"Step " in raw or b"step:" in raw or (b"loss" in raw and b"{" in raw):
                    figures = from_line(clean(raw))
                    if figures is not None:
                        found.append(figures)
        return tuple(found)

    def take(self, found: Sequence[Figures], now: float) -> None:
        source = self._sources["step-line"]
        rows: list[tuple[int, dict[str, float]]] = []
        newest = max(source.steps, default=0)
        for step, values in found:
            newest = step if step is not None else newest + 1
            rows.append((newest, values))
        source.take(rows, now)

    def looked(self, now: float) -> None:
        """Nothing to do."""

    # -- file and endpoint

    def latest(self) -> Reading[tuple[TrainingMetrics, ...]]:
        now = self._clock.monotonic()
        for name in self._ORDER:
            source = self._sources[name]
            if source.steps:
                newest = tuple(
                    TrainingMetrics(step, source.at[step], tuple(sorted(source.steps[step].items())), name)
                    for step in sorted(source.steps)
                )
                return observed(newest, max(source.at.values()))
        state = self._poller.latest().state
        if state is SensorState.BLIND:
            return unobserved(state, now, self._poller.latest().detail)
        return unobserved(SensorState.ABSENT, now, self._problem or "no training metrics seen since this start")

    def _prepare(self) -> Callable[[], _Look]:
        boundary, first, positions = self._boundary, self._first, dict(self._positions)
        since = self._began_wall if self._scanned else None

        def look() -> _Look:
            news = logs.look(self._files, positions, from_end=first, since_wall=since)
            rows = [row for item in news for raw in item.lines if (row := from_row(raw)) is not None]
            endpoint, problem = self._ask() if self._url else (None, "")
            return _Look(boundary, news, tuple((s, v) for s, v in rows if s is not None), endpoint, problem)

        return look

    def _absorb(self, look: _Look) -> Reading[None]:
        now = self._clock.monotonic()
        self._positions, self._scanned = logs.known(look.news), True
        self._problem = look.problem
        if look.boundary == self._boundary:
            self._first = False
            self._sources["metrics.jsonl"].take(look.rows, now)
            if look.endpoint is not None and look.endpoint[0] is not None:
                self._sources["endpoint"].take([(look.endpoint[0], look.endpoint[1])], now)
        return Reading(SensorState.OK, now)

    def _ask(self) -> tuple[Figures | None, str]:
        """The endpoint's values, or the reason why there are none. Blocks for some seconds at most."""
        try:
            parts = urlsplit(self._url.rstrip("/"))
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT)
            try:
                connection.request(
                    "GET", parts.path.removesuffix("/metrics") + "/metrics", headers={"Connection": "close"}
                )
                answer = connection.getresponse()
                body = answer.read(MAX_BODY)
            finally:
                connection.close()
        except (OSError, ValueError, http.client.HTTPException) as error:
            return None, f"cannot connect to {self._url}: {error}"
        if answer.status != 200:
            return None, f"{self._url}/metrics answered {answer.status}"
        return from_endpoint(body.decode("utf-8", "replace")), ""
