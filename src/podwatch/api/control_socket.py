"""The control socket: one JSON line and its answer per connection to a Unix socket, for the daemon's user and root.

Request ``{"id", "method", "params"}``; answer ``{"id", "ok": true, "result"}`` or ``{"id", "ok": false, "error":
{"what", "where", "fix", "exit_code"}}``. A request continues after its client disconnects.
"""

import asyncio
import contextlib
import json
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from podwatch.domain.errors import (
    ExitCode,
    HostError,
    InternalError,
    PermissionDenied,
    PodwatchError,
    UsageError,
)
from podwatch.domain.secrets import scrub_all

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
READ_ONLY = frozenset({"status"})
"""Methods for every local user who can reach the socket."""
MAX_LINE = 64 << 10
BACKLOG = 256
IDLE_SECONDS = 30.0
_SAFE_PATH = 100


class ControlServer:
    """Listens at ``path``. Its directory is created 0700, or must be owned by podwatch's user.

    Root and podwatch's user can call every method. ``on_error`` gets the exceptions of handlers that
    are no PodwatchErrors; the client gets only an internal error. A client has ``idle_seconds`` for its request. The
    number of clients has no limit: who can open the socket can also end podwatch.
    """

    def __init__(
        self,
        path: Path,
        handlers: Mapping[str, Handler],
        *,
        idle_seconds: float = IDLE_SECONDS,
        on_error: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._path = path
        self._handlers = dict(handlers)
        self._trusted = frozenset({0, os.geteuid()})
        self._idle_seconds = idle_seconds
        self._on_error = on_error
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._calls: set[asyncio.Task[dict[str, Any]]] = set()

    async def start(self) -> None:
        """Listen. Raises HostError or PermissionDenied if the socket cannot be created."""
        listener = _listen(self._path)
        self._server = await asyncio.start_unix_server(self._accept, sock=listener, limit=MAX_LINE, backlog=BACKLOG)

    async def stop(self, *, grace: float = 2.0) -> None:
        """Stop listening, wait ``grace`` seconds for calls in progress, then cancel them. Safe to call twice."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        with contextlib.suppress(OSError):
            self._path.unlink()
        me = asyncio.current_task()
        calls = {c for c in self._calls if c is not me}
        if calls:
            await asyncio.wait(calls, timeout=grace)
        for task in [*calls, *(c for c in self._connections if c is not me)]:
            task.cancel()
        await asyncio.gather(*calls, *self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
        try:
            await self._serve(reader, writer)
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request and its answer."""
        uid = _peer_uid(writer.get_extra_info("socket"))
        try:
            async with asyncio.timeout(self._idle_seconds):
                line = await reader.readline()
        except ValueError:
            refused = UsageError("the request line is too long", where="control socket")
            await _send(writer, _refusal(None, refused))
            return
        if line:
            await _send(writer, await self._answer(line, uid))

    async def _answer(self, line: bytes, uid: int | None) -> dict[str, Any]:
        request_id: object = None
        try:
            request = json.loads(line)
            if not isinstance(request, dict):
                raise TypeError("not an object")
            request_id, method, params = request.get("id"), request["method"], request.get("params") or {}
            if not isinstance(method, str) or not isinstance(params, dict):
                raise TypeError("method or params")
        except (ValueError, KeyError, TypeError, RecursionError):
            return _refusal(request_id, UsageError("the request cannot be parsed", where="control socket"))
        try:
            result = await self._call(method, params, uid)
        except PodwatchError as error:
            return _refusal(request_id, error)
        except asyncio.CancelledError:
            return _refusal(
                request_id, HostError("podwatch is shutting down", where=method, fix="retry when it runs again")
            )
        except Exception as error:
            if self._on_error is not None:
                self._on_error(method, error)
            what = f"internal error in {method}: {type(error).__name__}"
            return _refusal(
                request_id, InternalError(what, where="podwatch", fix="report this bug, with podwatch's log")
            )
        return {"id": request_id, "ok": True, "result": scrub_all(result)}

    async def _call(self, method: str, params: dict[str, Any], uid: int | None) -> dict[str, Any]:
        if uid not in self._trusted and method not in READ_ONLY:
            raise PermissionDenied(
                f"Permission denied: {method}", where=f"uid {uid}", fix="run the command as podwatch's user, or as root"
            )
        handler = self._handlers.get(method)
        if handler is None:
            raise UsageError(
                f"method {method!r} not found",
                where="control socket",
                fix="restart podwatch: its daemon is older than this command",
            )
        # A separate task: an operation must be completed after its client disconnects.
        call = asyncio.ensure_future(handler(params))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await asyncio.shield(call)


def _refusal(request_id: object, error: PodwatchError) -> dict[str, Any]:
    return {
        "id": request_id,
        "ok": False,
        "error": {
            "what": error.what,
            "where": error.where,
            "fix": error.fix,
            "exit_code": int(error.exit_code or ExitCode.FAILED),
        },
    }


async def _send(writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
    writer.write(json.dumps(answer).encode() + b"\n")
    async with asyncio.timeout(IDLE_SECONDS):
        await writer.drain()


def _peer_uid(connection: Any) -> int | None:
    """The caller's uid by SO_PEERCRED; None (not trusted) if the kernel does not report it."""
    try:
        data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except (OSError, AttributeError):
        return None
    return int(struct.unpack("3i", data)[1])


def _listen(path: Path) -> socket.socket:
    """A bound socket, mode 0600, in a private directory (0700)."""
    directory = path.parent
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionDenied(
                "another user owns the control directory",
                where=str(directory),
                fix="remove it, or run podwatch as that user",
            )
        directory.chmod(0o700)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return _bind(path)
    except PermissionError as error:
        raise PermissionDenied(
            f"cannot create the control socket: {error.strerror}", where=str(path), fix="check state_dir's owner"
        ) from error
    except OSError as error:
        raise HostError(
            f"cannot create the control socket: {error.strerror}", where=str(path), fix="check state_dir"
        ) from error


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        # By descriptor if the path is longer than sun_path's 108 bytes.
        short = len(os.fsencode(path)) <= _SAFE_PATH
        listener.bind(str(path) if short else f"/proc/self/fd/{directory}/{path.name}")
        # Safe because the directory is 0700; a umask would affect every thread of the process.
        path.chmod(0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(directory)
    return listener
