"""Finds the inference servers in the trainer's process tree. Used where ``[inference] urls`` is empty.

A server's port is on its command line, or among the sockets its process listens on. Only processes with the role of an
inference server are examined, and an address counts only after ``/health`` there answered 200: so another program is
never taken for a dead server. Sockets that podwatch cannot read are reported.
"""

import asyncio
from typing import Protocol

import psutil

from podwatch.domain.process import ProcessRole, ProcessSample
from podwatch.domain.snapshot import Health, Reading, ServerKind, TrainerSample
from podwatch.sensors.base import end_task
from podwatch.sensors.inference import Discovery, probe
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock
from podwatch.trainer.process_roles import is_router, port_of

TRIES = 30
"""Requests to one address without an answer before podwatch gives up on it, one per ``poll``: with 10 s five minutes
..."""
TRIES_TOLD = 600
"""... and where the command line names the port, longer than any start-up."""
MAX_PORTS = 8
"""Listening ports of one process that are tried: a server has one or two."""


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


class WatchedTree(Protocol):
    """The trainer's process tree (``sensors.processes``)."""

    def latest(self) -> Reading[TrainerSample]: ...


class ServerFinder:
    """Searches every ``poll`` seconds; ``latest`` never blocks. Found servers are kept until the start ends."""

    def __init__(
        self,
        clock: Clock,
        trainer: WatchedTree,
        *,
        poll: float = 10.0,
        timeout: float = 2.0,
        known: tuple[str, tuple[str, ...]] = ("", ()),
    ) -> None:
        """``known``: addresses that an earlier podwatch found, and the start of training they belong to. A server that
        has died since would never be found again."""
        self._clock, self._trainer, self._poll, self._timeout = clock, trainer, poll, timeout
        self._worker = Worker("find servers")
        self._task: asyncio.Task[None] | None = None
        self._known = known
        self._start_id = ""
        self._servers: dict[str, ServerKind | None] = {}
        self._tried: dict[str, int] = {}
        self._detail = "searching for inference servers in the trainer's process tree"

    def latest(self) -> Discovery:
        return Discovery(self._start_id, tuple(self._servers.items()), self._detail)

    async def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="sensor servers")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await end_task(task)
        self._worker.close()

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception as error:  # any error must be visible, and the search must continue
                self._detail = f"cannot search for inference servers: {error or type(error).__name__}"
            await self._clock.sleep(self._poll)

    async def look(self) -> None:
        """Search the newest tree once."""
        sample = self._trainer.latest().value
        if sample is None or not sample.alive:
            return
        if sample.start_id != self._start_id:
            self._start_id = sample.start_id
            self._servers.clear()
            self._tried.clear()
            if sample.start_id == self._known[0]:
                self._servers.update(dict.fromkeys(self._known[1]))
        servers = [p for p in sample.descendants if p.role is ProcessRole.INFERENCE]
        if not servers:
            self._detail = "no inference server found in the trainer's process tree; set [inference] urls"
            return
        denied = 0
        for process in servers:
            port = port_of(process.command)
            found = await self._worker.call(listening, process.identity.pid, timeout=5.0) if port is None else ()
            denied += found is None
            for url in _urls(port, found or ()):
                await self._knock(process, url, TRIES if port is None else TRIES_TOLD)
        if not self._servers:
            why = f"; cannot read the sockets of {denied} of its processes" if denied else ""
            self._detail = f"no inference server answers yet{why}; if that does not change, set [inference] urls"

    async def _knock(self, process: ProcessSample, url: str, most: int) -> None:
        if url in self._servers or self._tried.get(url, 0) >= most:
            return
        self._tried[url] = self._tried.get(url, 0) + 1
        answer = await self._worker.call(probe, url, self._timeout, timeout=6 * self._timeout + 1.0)
        if answer.sample is not None and answer.sample.health is Health.OK:
            self._servers[url] = ServerKind.ROUTER if is_router(process.command) else None


def _urls(port: int | None, found: tuple[tuple[str, int], ...]) -> list[str]:
    addresses = found[:MAX_PORTS] if port is None else (("127.0.0.1", port),)
    return [f"http://{host}:{number}" for host, number in addresses]
