"""The daemon's side of a keeper: its program in the state directory, the files that it writes, and its control socket
(one short connection per request: nothing to keep alive, nothing to leak).
"""

import asyncio
import contextlib
import hashlib
import importlib.util
import json
import marshal
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from podwatch.domain.process import ExitStatus, ProcessIdentity, ProcessSample
from podwatch.system import procfs
from podwatch.system.files import atomic_write, fsync_dir, read_small
from podwatch.system.procfs import boot_id, pid_namespace
from podwatch.trainer.process_roles import Roles

# -- program of a keeper ---------------------------------------------------------------------------------------------
# Written completely, verified before use, replaced only by a complete one.
#
# An upgrade of podwatch must not pull the keeper's code away, so each start runs a copy. The interpreter reads a
# program once, at its start. So if the disk has no room for a copy, the keeper runs from the installed file: an upgrade
# in the milliseconds before the interpreter has read it fails that start, which is retried; afterwards nothing depends
# on the file.
#
# The copy is compiled, because parsing the source would cost the keeper 2 MiB for as long as training lives. Not by
# ``py_compile``: on a full disk it wrote half a file and reported success.

SOURCE = Path(__file__).with_name("keeper.py")
_UNCHECKED_HASH = 1
"""Flags of PEP 552: named by a hash of the source, which Python does not compare."""
_SEAL = b"podwatch keeper sha256 "
"""Python ignores what follows the code object. Here it is a checksum of everything before it."""


def place(directory: Path, *, compiled: bool) -> tuple[Path, str]:
    """Return the program to run, and why it is not the usual one (empty if it is). Blocks.

    ``compiled``: the keeper runs under the same interpreter as this process. Raises OSError only if the installed
    source cannot be read, as in the middle of an upgrade, and no complete copy of an earlier start exists.
    """
    try:
        source = read_small(SOURCE)
    except OSError as error:
        copy = directory / f"{SOURCE.stem}.pyc"
        if compiled and is_whole(read_small(copy)):
            return copy, f"cannot read {SOURCE}: {error.strerror}"
        raise
    problems: list[str] = []
    for target in [directory / f"{SOURCE.stem}.pyc"] * compiled + [directory / SOURCE.name]:
        if not _holds(target, source):
            try:
                atomic_write(target, sealed(source) if target.suffix == ".pyc" else source)
            except OSError as error:
                problems.append(f"cannot write {target}: {error.strerror}")
                continue
            if not _holds(target, source):
                problems.append(f"{target} does not hold what was written to it")
                continue
        return target, "; ".join(problems)
    return SOURCE, "; ".join(problems)


def remove_unfinished(directory: Path) -> None:
    """Delete the partial files of a podwatch that was killed while writing: on a full disk their space is needed."""
    for pattern in (f".{SOURCE.stem}.py*.tmp", ".wanted.*.tmp", ".spec-*.tmp"):
        for path in directory.glob(pattern):
            with contextlib.suppress(OSError):
                path.unlink()


def sealed(source: bytes) -> bytes:
    """Return the compiled program, with its checksum."""
    code = compile(source, SOURCE.name, "exec", dont_inherit=True, optimize=0)
    data = _header(source) + marshal.dumps(code)
    return data + _SEAL + hashlib.sha256(data).digest()


def is_whole(data: bytes, source: bytes | None = None) -> bool:
    """Return whether ``data`` is the complete compiled form of ``source`` (None: of any version) for this
    interpreter."""
    header = importlib.util.MAGIC_NUMBER if source is None else _header(source)
    end = len(data) - len(_SEAL) - hashlib.sha256().digest_size
    return (
        end > 0
        and data.startswith(header)
        and data[end : end + len(_SEAL)] == _SEAL
        and data[end + len(_SEAL) :] == hashlib.sha256(data[:end]).digest()
    )


def _header(source: bytes) -> bytes:
    return importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH.to_bytes(4, "little") + importlib.util.source_hash(source)


def _holds(path: Path, source: bytes) -> bool:
    try:
        found = read_small(path)
    except OSError:
        return False
    return is_whole(found, source) if path.suffix == ".pyc" else found == source


# -- files of a keeper -----------------------------------------------------------------------------------------------
# The format is in keeper.py, "Files in DIRECTORY".


@dataclass(frozen=True, slots=True)
class KeeperRecord:
    """``record.json``: the started trainer and its keeper. ``directory`` is the keeper's. ``job_owner``: in job mode,
    the init with which the keeper ends."""

    directory: Path
    run_id: str
    start_id: str
    keeper: ProcessIdentity
    launcher: ProcessIdentity
    argv: tuple[str, ...]
    started_wall: float
    log: str
    warnings: tuple[str, ...] = ()
    job_owner: ProcessIdentity | None = None

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
        argv, warnings, job = value["argv"], value.get("warnings", []), value.get("job")
        if not isinstance(argv, list) or not isinstance(warnings, list):
            return None
        owner = (int(str(job["owner"])), int(str(job["owner_ticks"]))) if isinstance(job, dict) else None
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
            job_owner=None if owner is None else ProcessIdentity(*owner, boot, namespace),
        )
    except (KeyError, ValueError):
        return None


_PROGRAMS: Final = frozenset({"keeper.py", "keeper.pyc"})


def record_by_processes(directory: Path) -> KeeperRecord | None:
    """Return what ``record.json`` says, as far as the living keeper of this directory shows it: for a state directory
    that cannot be read now (its disk failed, its owner changed). Only a keeper of our user counts. Blocks: reads all
    of /proc once."""
    keepers: dict[int, str] = {}
    children: dict[int, list[tuple[int, int]]] = {}
    for pid in procfs.all_pids():
        status = procfs.read_stat(pid)
        if status is None or status.state in "ZXx":
            continue
        children.setdefault(status.parent_pid, []).append((status.start_ticks, pid))
        if (start_id := _start_kept_by(pid, directory)) is not None:
            keepers[pid] = start_id
    for keeper, start_id in keepers.items():
        if keeper not in children or (kept := _identity(keeper)) is None:
            continue
        ticks, launcher = min(children[keeper])  # orphans of the tree are younger
        argv = procfs.command(launcher)
        found = ProcessIdentity(launcher, ticks, boot_id(), pid_namespace())
        return KeeperRecord(directory, "", start_id, kept, found, argv, started_wall=0.0, log="")
    return None


def _start_kept_by(pid: int, directory: Path) -> str | None:
    """Return the start id if this process is the keeper of ``directory``."""
    argv = procfs.command(pid)
    if len(argv) < 3 or argv[-2] != str(directory) or argv[-3].rpartition("/")[2] not in _PROGRAMS:
        return None
    try:
        return argv[-1] if Path(f"/proc/{pid}").stat().st_uid == os.geteuid() else None
    except OSError:
        return None


def _identity(pid: int) -> ProcessIdentity | None:
    status = procfs.read_stat(pid)
    return None if status is None else ProcessIdentity(pid, status.start_ticks, boot_id(), pid_namespace())


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


def was_stopped(directory: Path, start_id: str) -> bool:
    """Return whether the keeper had been asked to stop the tree before its launcher ended."""
    return (_read(directory / f"exit-{start_id}.json") or {}).get("stopped") is True


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

PROTOCOL = 1
"""The protocol that this podwatch speaks."""

_ANSWER_LIMIT = 32 << 20
_CHUNK = 1 << 18
"""Bytes read at once: four times the answer about 200 processes."""


class KeeperSilent(Exception):  # noqa: N818
    """The keeper did not answer, or not in a way we understand."""


class KeeperClient:
    """``directory`` is the keeper's. Raises KeeperSilent from every method."""

    def __init__(self, directory: Path, roles: Roles, *, timeout: float = 3.0) -> None:
        self._directory, self._roles = directory, roles
        self._timeout = timeout
        self.ended: dict[tuple[int, int], ExitStatus] = {}
        """How processes ended that the keeper itself reaped, by (pid, start ticks); as of the last ``tree``."""
        self._known: dict[int, tuple[dict[str, Any], ProcessSample]] = {}

    async def request(self, do: str, **fields: object) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._exchange({"v": PROTOCOL, "do": do, **fields})
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
        """Return the keeper's identity. KeeperSilent also if it speaks another protocol."""
        answer = await self.request("hello")
        if answer.get("v") != PROTOCOL:
            raise KeeperSilent(f"keeper in {self._directory}: it speaks protocol {answer.get('v')}")
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
        return known[1] if known is not None and known[0] == item else _sample(item, self._roles)

    async def sockets(self, pids: list[int]) -> dict[int, frozenset[int] | None]:
        """Return the socket inodes of these processes; None where even the keeper cannot read them."""
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


def _sample(item: dict[str, Any], roles: Roles) -> ProcessSample:
    argv = [str(word) for word in item["cmdline"]]
    return ProcessSample(
        identity=ProcessIdentity(int(item["pid"]), int(item["ticks"]), boot_id(), pid_namespace()),
        parent_pid=int(item["ppid"]),
        name=str(item["comm"]),
        command=" ".join(argv),
        role=roles.classify(str(item["comm"]), argv),
        state=str(item["state"]),
        cuda=item["cuda"] if isinstance(item["cuda"], bool) else None,
        gpus=frozenset(int(minor) for minor in item["gpus"]),
    )


def _ended(item: dict[str, Any]) -> ExitStatus:
    code, number = item["code"], item["signal"]
    return ExitStatus(
        None if code is None else int(code), None if number is None else int(number), float(item["at_wall"])
    )
