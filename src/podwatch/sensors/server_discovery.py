"""Finds the inference servers in the trainer's process tree. Used where ``[inference] urls`` is empty.

A server's port is on its command line, or among the sockets its process listens on. Only processes with the role of an
inference server are examined, and an address counts only after ``/health`` there answered 200: so another program is
never taken for a dead server. Sockets that podwatch cannot read are reported.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

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
_LISTEN = "0A"


def listening(table: str) -> dict[int, tuple[str, int]]:
    """Inode -> (host to connect to, port) of the listening sockets in the text of ``/proc/net/tcp`` or ``tcp6``. Lines
    that cannot be parsed are left out."""
    found: dict[int, tuple[str, int]] = {}
    for line in table.splitlines()[1:]:
        words = line.split()
        if len(words) < 10 or words[3] != _LISTEN:
            continue
        address, _, port = words[1].partition(":")
        try:
            found[int(words[9])] = (_host(address), int(port, 16))
        except ValueError:
            continue
    return found


def _host(address: str) -> str:
    """The address as text. The kernel prints it in host byte order, 32 bits at a time. "Any" becomes loopback."""
    raw = b"".join(bytes.fromhex(address[n : n + 8])[::-1] for n in range(0, len(address), 8))
    if len(raw) == 4:
        return "127.0.0.1" if not any(raw) else ".".join(str(byte) for byte in raw)
    if len(raw) != 16:
        raise ValueError("neither IPv4 nor IPv6")
    if not any(raw):
        return "127.0.0.1"  # dual stack, as every relevant server
    if raw[:12] == b"\0" * 10 + b"\xff\xff":
        return ".".join(str(byte) for byte in raw[12:])
    groups = [f"{raw[n] << 8 | raw[n + 1]:x}" for n in range(0, 16, 2)]
    return f"[{':'.join(groups)}]"


def _tables() -> dict[int, tuple[str, int]]:
    found: dict[int, tuple[str, int]] = {}
    for name in ("tcp", "tcp6"):
        try:
            found |= listening(Path("/proc/net", name).read_text())
        except OSError:
            continue
    return found


class WatchedTree(Protocol):
    """The trainer's process tree (``sensors.processes``)."""

    def latest(self) -> Reading[TrainerSample]: ...

    async def sockets(self, pids: list[int]) -> Mapping[int, frozenset[int] | None]:
        """Inodes of the sockets that these processes hold; None, or no entry, where unknown."""
        ...


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
        told = {p.identity.pid: port for p in servers if (port := port_of(p.command)) is not None}
        unknown = [p.identity.pid for p in servers if p.identity.pid not in told]
        held = await self._trainer.sockets(unknown) if unknown else {}
        table = await self._worker.call(_tables, timeout=self._timeout + 5.0) if any(held.values()) else {}
        denied = [pid for pid in unknown if held.get(pid) is None]
        for process in servers:
            await self._knock(process, told, held.get(process.identity.pid) or frozenset(), table)
        if not self._servers:
            why = f"; cannot read the sockets of {len(denied)} of its processes" if denied else ""
            self._detail = f"no inference server answers yet{why}; if that does not change, set [inference] urls"

    async def _knock(
        self,
        process: ProcessSample,
        told: Mapping[int, int],
        inodes: frozenset[int],
        table: Mapping[int, tuple[str, int]],
    ) -> None:
        port = told.get(process.identity.pid)
        addresses = [("127.0.0.1", port)] if port is not None else sorted({table[i] for i in inodes if i in table})
        for host, number in addresses[:MAX_PORTS]:
            url = f"http://{host}:{number}"
            if url in self._servers or self._tried.get(url, 0) >= (TRIES_TOLD if port is not None else TRIES):
                continue
            self._tried[url] = self._tried.get(url, 0) + 1
            answer = await self._worker.call(probe, url, self._timeout, timeout=6 * self._timeout + 1.0)
            if answer.sample is not None and answer.sample.health is Health.OK:
                self._servers[url] = ServerKind.ROUTER if is_router(process.command) else None
