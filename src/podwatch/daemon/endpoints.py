"""The daemon's endpoints: HTTP, the control socket, the endpoint file and the status file.

A failure of one is reported and does not stop the daemon.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from podwatch import __version__
from podwatch.api.control import ControlServer, Handler
from podwatch.api.http import HttpServer, Source
from podwatch.client.discover import SNAPSHOT, Endpoint, own_endpoint, write_document, write_endpoint
from podwatch.daemon.events import EventBus
from podwatch.daemon.wiring import Components
from podwatch.domain.errors import PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.reporting.status import build_status
from podwatch.system.workers import Worker

WRITE_SECONDS = 10.0


class Endpoints:
    def __init__(
        self, parts: Components, source: Source, handlers: Mapping[str, Handler], emit: EventBus, config_path: str
    ) -> None:
        self._parts, self._source, self._emit = parts, source, emit
        self._disk = Worker("outlets")
        http = parts.settings.http
        self._http = HttpServer(http.host, http.port, source, parts.training.environment.token)
        self._control = ControlServer(
            parts.run.paths.control_socket,
            handlers,
            on_error=lambda method, error: self._complain(f"internal error in the command {method}: {error!r}"),
        )
        self._endpoint = own_endpoint(
            parts.settings.run_id,
            started_wall=parts.run.clock.wall(),
            control=str(parts.run.paths.control_socket),
            config_path=config_path,
            version=__version__,
        )

    @property
    def url(self) -> str:
        """``http://host:port``, empty while HTTP is off or could not start."""
        return self._http.url

    async def open(self) -> None:
        openings = (
            [self._control.start]
            if not self._parts.settings.http.enabled
            else [
                self._control.start,
                self._http.start,
            ]
        )
        for start in openings:
            try:
                await start()
            except PodwatchError as error:
                self._complain(str(error))
        self._parts.training.environment.heartbeat_url = self.url
        await self._write_endpoint(replace(self._endpoint, http_url=self.url))

    async def close(self) -> None:
        await self.refresh()
        await self._write_endpoint(replace(self._endpoint, stopped_wall=self._parts.run.clock.wall()))
        await self._control.stop()
        await self._http.stop()
        self._parts.training.environment.heartbeat_url = ""
        self._disk.close()

    async def refresh(self) -> None:
        """Write status.json, which clients read when no daemon runs."""
        document = build_status(self._source.view())
        path = self._parts.run.paths.runtime / SNAPSHOT
        await self._write(partial(write_document, path, document))

    def _complain(self, text: str) -> None:
        self._emit.say(EventName.SENSOR_CHANGED, text, Severity.WARNING)

    async def _write_endpoint(self, endpoint: Endpoint) -> None:
        await self._write(partial(write_endpoint, self._parts.run.paths.runtime, endpoint))

    async def _write(self, write: "partial[None]") -> None:
        try:
            await self._disk.call(write, timeout=WRITE_SECONDS)
        except OSError as error:  # TimeoutError included
            self._complain(f"{error.filename or self._parts.run.paths.runtime}: {error.strerror or error}")
