"""The daemon's side of a keeper: the files that it writes, and its control socket (one short connection per request:
nothing to keep alive, nothing to leak).
"""

import asyncio
import contextlib
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.domain.process import ExitStatus, ProcessIdentity, ProcessSample
from podwatch.system.files import fsync_dir, read_small
from podwatch.system.procfs import boot_id, pid_namespace
from podwatch.trainer.roles import classify

# -- files of a keeper -----------------------------------------------------------------------------------------------
# The format is in keeper.py, "Files in DIRECTORY".


@dataclass(frozen=True, slots=True)
class KeeperRecord:
    """``record.json``: the started trainer and its keeper. ``directory`` is the keeper's."""

    directory: Path
    run_id: str
    start_id: str
    keeper: ProcessIdentity
    launcher: ProcessIdentity
    argv: tuple[str, ...]
    started_wall: float
    log: str
    warnings: tuple[str, ...] = ()

    @property
    def executed(self) -> bool:
        """Whether the command was executed; False if the keeper died before that."""
        return (self.directory / f"executed-{self.start_id}").exists()


def read_record(directory: Path) -> KeeperRecord | None:
    """Return the record; None if there is none, or it is malformed."""
    value = _read(directory / "record.json")
    if value is None:
        return None
    try:
        boot, namespace = str(value["boot_id"]), int(str(value["pid_namespace"]))
        argv, warnings = value["argv"], value.get("warnings", [])
        if not isinstance(argv, list) or not isinstance(warnings, list):
            return None
        return KeeperRecord(
            directory=directory,
            run_id=str(value["run_id"]),
            start_id=str(value["start_id"]),
            keeper=ProcessIdentity(int(str(value["keeper"])), int(str(value["keeper_ticks"])), boot, namespace),
            launcher=ProcessIdentity(int(str(value["pid"])), int(str(value["ticks"])), boot, namespace),
            argv=tuple(str(word) for word in argv),
            started_wall=float(str(value["started_wall"])),
            log=str(value["log"]),
            warnings=tuple(str(word) for word in warnings),
        )
    except (KeyError, ValueError):
        return None


def read_exit(directory: Path, start_id: str) -> ExitStatus | None:
    """Return how the launcher of this start ended; None if no keeper recorded it."""
    value = _read(directory / f"exit-{start_id}.json")
    if value is None:
        return None
    code, number, at = value.get("code"), value.get("signal"), value.get("at_wall")
    return ExitStatus(
        code=code if isinstance(code, int) else None,
        signal=number if isinstance(number, int) else None,
        at_wall=at if isinstance(at, float) else 0.0,
    )


def read_end(directory: Path, start_id: str) -> float | None:
    """Return the seconds since boot at which the launcher of this start ended; None if no keeper recorded it."""
    at = (_read(directory / f"exit-{start_id}.json") or {}).get("at_boot")
    return at if isinstance(at, float) else None


def read_result(directory: Path, start_id: str) -> dict[str, object] | None:
    """Return the keeper's answer to a start; None before there is one."""
    return _read(directory / f"result-{start_id}.json")


def retire_record(directory: Path) -> None:
    """Move the record away after its trainer has ended and that was noted. A rename needs no space."""
    with contextlib.suppress(FileNotFoundError):
        (directory / "record.json").rename(directory / "record.last.json")
        fsync_dir(directory)


def _read(path: Path) -> dict[str, object] | None:
    """Return the JSON object; None if the file is missing or malformed. Raises OSError if it cannot be read, which
    proves nothing about the content."""
    try:
        value = json.loads(read_small(path))
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


# -- control socket --------------------------------------------------------------------------------------------------

PROTOCOLS = (1,)
"""Protocol versions that this podwatch speaks: the current one and the one before (none yet)."""

_ANSWER_LIMIT = 32 << 20
_CHUNK = 1 << 18
"""Bytes read at once: four times the answer about 200 processes."""


class KeeperSilent(Exception):  # noqa: N818
    """The keeper did not answer, or not in a way we understand."""


class KeeperClient:
    """``directory`` is the keeper's. Raises KeeperSilent from every method."""

    def __init__(self, directory: Path, *, timeout: float = 3.0) -> None:
        self._directory = directory
        self._timeout = timeout
        self.ended: dict[tuple[int, int], ExitStatus] = {}
        """How processes ended that the keeper itself reaped, by (pid, start ticks); as of the last ``tree``."""
        self._known: dict[int, tuple[dict[str, Any], ProcessSample]] = {}

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
        # Without asyncio's streams: this runs at every poll, and streams cost several times as much as the answer.
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.setblocking(False)
            # The path may be longer than the 108 bytes of a socket address; through the descriptor it is short.
            directory = os.open(self._directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                await loop.sock_connect(line, f"/proc/self/fd/{directory}/k.sock")
            finally:
                os.close(directory)
            await loop.sock_sendall(line, json.dumps(question).encode() + b"\n")
            received = bytearray()
            while not received.endswith(b"\n"):
                if not (chunk := await loop.sock_recv(line, _CHUNK)):
                    raise ValueError("it closed the connection")
                received += chunk
                if len(received) > _ANSWER_LIMIT:
                    raise ValueError("its answer is too large")
        answer = json.loads(received)
        if not isinstance(answer, dict):
            raise ValueError("its answer is not a JSON object")
        return answer

    async def hello(self) -> dict[str, Any]:
        """Return the keeper's identity. KeeperSilent also if it speaks no protocol version that we know."""
        answer = await self.request("hello")
        if not set(answer.get("protocols", ())) & set(PROTOCOLS):
            raise KeeperSilent(f"keeper in {self._directory}: it speaks only protocol {answer.get('protocols')}")
        return answer

    async def tree(self) -> tuple[ProcessSample, ...]:
        """Return every living process of the tree, in the keeper's order: its direct children first."""
        answer = await self.request("tree")
        try:
            self.ended = {(int(e["pid"]), int(e["ticks"])): _ended(e) for e in answer.get("ended", ())}
            fresh = [(item, self._sample(item)) for item in answer["processes"]]
        except (KeyError, TypeError, ValueError) as error:
            raise KeeperSilent(f"keeper in {self._directory}: unreadable tree: {error}") from error
        self._known = {int(item["pid"]): (item, sample) for item, sample in fresh}
        return tuple(sample for _, sample in fresh)

    def _sample(self, item: dict[str, Any]) -> ProcessSample:
        """Return the same object as long as nothing changed: cheaper, and callers can compare by identity."""
        known = self._known.get(item["pid"])
        return known[1] if known is not None and known[0] == item else _sample(item)

    async def sockets(self, pids: list[int]) -> dict[int, frozenset[int] | None]:
        """Return the socket inodes of these processes; None where even the keeper cannot read them. KeeperSilent from
        an older keeper, which does not know this request."""
        answer = await self.request("sockets", pids=pids)
        try:
            return {
                int(pid): None if inodes is None else frozenset(int(i) for i in inodes)
                for pid, inodes in answer["sockets"].items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise KeeperSilent(f"keeper in {self._directory}: unreadable sockets: {error}") from error

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


def _ended(item: dict[str, Any]) -> ExitStatus:
    code, number = item["code"], item["signal"]
    return ExitStatus(
        None if code is None else int(code), None if number is None else int(number), float(item["at_wall"])
    )
