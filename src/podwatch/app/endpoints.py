"""The daemon's endpoints: HTTP, the control socket, the endpoint file and the status file. A failure of one is reported
and does not stop the daemon."""

import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from podwatch import __version__
from podwatch.api.control_socket import ControlServer, Handler
from podwatch.api.http_endpoints import HttpServer, Source
from podwatch.app.settings_in_force import http_password
from podwatch.domain.errors import PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.report.status import build_status
from podwatch.system.blocking_calls import Worker
from podwatch.system.endpoint import SNAPSHOT, Endpoint, own_endpoint, write_document, write_endpoint

if TYPE_CHECKING:
    from podwatch.app.build import Components

WRITE_SECONDS = READ_SECONDS = 10.0


class Endpoints:
    def __init__(self, parts: "Components", source: Source, handlers: Mapping[str, Handler], config_path: str) -> None:
        self._parts, self._source = parts, source
        self._disk = Worker("endpoints")
        self._http: HttpServer | None = None
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
        return self._http.url if self._http is not None else ""

    async def open(self) -> None:
        openings: list[Callable[[], Awaitable[object]]] = [self._control.start]
        if self._parts.settings.http.enabled:
            openings.append(self._serve)
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
        if self._http is not None:
            await self._http.stop()
        self._parts.training.environment.heartbeat_url = ""
        self._disk.close()

    async def _serve(self) -> None:
        """With a password that cannot be used HTTP answers only probes and progress pings: a random one stands in."""
        http = self._parts.settings.http
        try:
            password = await self._disk.call(partial(http_password, http), timeout=READ_SECONDS)
        except (PodwatchError, OSError) as error:
            self._complain(f"{error}; HTTP answers only probes and progress pings until podwatch restarts")
            password = secrets.token_hex(32)
        self._http = HttpServer(
            http.host, http.port, self._source, self._parts.training.environment.token, password=password
        )
        await self._http.start()

    async def refresh(self) -> None:
        """Write status.json, which clients read when no daemon runs."""
        document = build_status(self._source.view())
        path = self._parts.run.paths.runtime / SNAPSHOT
        await self._write(partial(write_document, path, document))

    def _complain(self, text: str) -> None:
        self._parts.bus.say(EventName.SENSOR_CHANGED, text, Severity.WARNING)

    async def _write_endpoint(self, endpoint: Endpoint) -> None:
        await self._write(partial(write_endpoint, self._parts.run.paths.runtime, endpoint, self._parts.run.paths.state))

    async def _write(self, write: "partial[None]") -> None:
        try:
            await self._disk.call(write, timeout=WRITE_SECONDS)
        except OSError as error:  # TimeoutError included
            self._complain(f"{error.filename or self._parts.run.paths.runtime}: {error.strerror or error}")
