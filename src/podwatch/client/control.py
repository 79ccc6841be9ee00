"""Call a method of the daemon over its control socket: one JSON line per request, one per answer."""

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podwatch.domain.errors import Busy, ExitCode, HostError, InternalError, PermissionDenied, PodwatchError

MAX_ANSWER = 64 << 20
"""Bytes, far above the size of a status or a long list of events."""
_SAFE_PATH = 100
"""Bytes. ``sun_path`` holds 108; a longer path is opened through a directory descriptor."""


class NotRunning(HostError):  # noqa: N818 - it is the state, not a fault
    """No process listens on the control socket."""

    exit_code = ExitCode.UNAVAILABLE


class RemoteRefusal(PodwatchError):  # noqa: N818
    """The daemon answered with an error and its exit code."""

    def __init__(self, what: str, *, where: str, fix: str, exit_code: int) -> None:
        super().__init__(what, where=where, fix=fix)
        try:
            self.exit_code = ExitCode(exit_code)
        except ValueError:
            self.exit_code = ExitCode.FAILED


def call(
    path: Path, method: str, params: Mapping[str, Any] | None = None, *, timeout: float | None = 10.0
) -> dict[str, Any]:
    """The method's result. ``timeout``: seconds per read; None waits forever (``sync --wait``).

    Raises NotRunning, PermissionDenied, Busy (no answer in time), or RemoteRefusal with the daemon's message.
    """
    request = json.dumps({"id": 1, "method": method, "params": dict(params or {})}).encode() + b"\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(5.0 if timeout is None else min(timeout, 5.0))
        try:
            _connect(connection, path)
            connection.sendall(request)
            connection.settimeout(timeout)
            line = _read_line(connection)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
            raise NotRunning("podwatch is not running here", where=str(path), fix="start it: podwatch run") from error
        except PermissionError as error:
            raise PermissionDenied(
                "Permission denied: cannot open the control socket",
                where=str(path),
                fix="run the command as the user of podwatch, or as root",
            ) from error
        except TimeoutError as error:
            raise Busy(
                f"podwatch did not answer {method!r} in time", where=str(path), fix="try again; see `podwatch status`"
            ) from error
        except OSError as error:
            raise HostError(f"the control connection failed: {error}", where=str(path), fix="try again") from error
    return _result(line, path)


def _connect(connection: socket.socket, path: Path) -> None:
    if len(os.fsencode(path)) <= _SAFE_PATH:
        connection.connect(str(path))
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        connection.connect(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


def _read_line(connection: socket.socket) -> bytes:
    pieces = bytearray()
    while not pieces.endswith(b"\n"):
        chunk = connection.recv(1 << 16)
        if not chunk:
            break
        pieces += chunk
        if len(pieces) > MAX_ANSWER:
            break
    return bytes(pieces)


def _result(line: bytes, path: Path) -> dict[str, Any]:
    if not line:
        raise HostError("podwatch closed the connection without an answer", where=str(path), fix="read its log")
    try:
        answer = json.loads(line)
        if answer["ok"]:
            result = answer["result"]
            if isinstance(result, dict):
                return result
            raise TypeError("result is not an object")
        error = answer["error"]
        refusal = RemoteRefusal(
            str(error["what"]),
            where=str(error.get("where", "")),
            fix=str(error.get("fix", "")),
            exit_code=int(error.get("exit_code", 1)),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InternalError("podwatch sent an invalid answer", where=str(path)) from error
    raise refusal
