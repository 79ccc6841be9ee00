"""Talking to a keeper over its socket. One short connection per request: nothing to keep alive, nothing to leak."""

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any

from podwatch.domain.process import ProcessIdentity, ProcessSample
from podwatch.system.identity import boot_id, pid_namespace
from podwatch.trainer.roles import classify

PROTOCOLS = (1,)
"""What this podwatch speaks: the present version and the one before (there is none yet)."""

_ANSWER_LIMIT = 32 << 20


class KeeperSilent(Exception):  # noqa: N818
    """The keeper did not answer, or not in a way we understand."""


class KeeperClient:
    """``directory`` is the keeper's. Raises KeeperSilent from every method."""

    def __init__(self, directory: Path, *, timeout: float = 3.0) -> None:
        self._directory = directory
        self._timeout = timeout

    async def request(self, do: str, **fields: object) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._exchange({"v": PROTOCOLS[0], "do": do, **fields})
        except (OSError, TimeoutError, ValueError) as error:
            raise KeeperSilent(f"keeper in {self._directory}: {error or type(error).__name__}") from error
        if answer.get("ok") is not True:
            raise KeeperSilent(f"keeper in {self._directory}: {answer.get('error', 'no reason given')}")
        return answer

    async def _exchange(self, question: dict[str, object]) -> dict[str, Any]:
        # The path may be longer than the 108 bytes of a socket address; through the descriptor it is short.
        directory = os.open(self._directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            reader, writer = await asyncio.open_unix_connection(
                f"/proc/self/fd/{directory}/k.sock", limit=_ANSWER_LIMIT
            )
        finally:
            os.close(directory)
        try:
            writer.write(json.dumps(question).encode() + b"\n")
            await writer.drain()
            line = await reader.readline()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        answer = json.loads(line) if line else None
        if not isinstance(answer, dict):
            raise ValueError("closed the connection")
        return answer

    async def hello(self) -> dict[str, Any]:
        """Who it is. KeeperSilent also when it speaks only versions we do not know."""
        answer = await self.request("hello")
        if not set(answer.get("protocols", ())) & set(PROTOCOLS):
            raise KeeperSilent(f"keeper in {self._directory}: speaks protocol {answer.get('protocols')}")
        return answer

    async def tree(self) -> tuple[ProcessSample, ...]:
        """Every living process of the tree, in the order of the keeper: its direct children first."""
        answer = await self.request("tree")
        try:
            return tuple(_sample(item) for item in answer["processes"])
        except (KeyError, TypeError, ValueError) as error:
            raise KeeperSilent(f"keeper in {self._directory}: a tree we cannot read: {error}") from error

    async def signal(self, number: int, targets: list[ProcessIdentity]) -> int:
        answer = await self.request("signal", sig=int(number), targets=[[t.pid, t.start_ticks] for t in targets])
        return int(answer.get("sent", 0))


def _sample(item: dict[str, Any]) -> ProcessSample:
    argv = [str(word) for word in item["cmdline"]]
    return ProcessSample(
        identity=ProcessIdentity(int(item["pid"]), int(item["ticks"]), boot_id(), pid_namespace()),
        parent_pid=int(item["ppid"]),
        name=str(item["comm"]),
        command=" ".join(argv),
        role=classify(str(item["comm"]), argv),
        state=str(item["state"]),
        cuda=item["cuda"] if isinstance(item["cuda"], bool) else None,
        gpus=frozenset(int(minor) for minor in item["gpus"]),
    )
