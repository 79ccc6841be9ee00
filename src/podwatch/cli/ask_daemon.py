"""Read a run's status (from the control socket, else by HTTP, else from the last snapshot on disk), and call the
daemon's methods over its control socket.
"""

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podwatch.cli.find_daemon import Found, locate, read_hints, searched
from podwatch.cli.status_without_daemon import nothing, stale
from podwatch.domain.errors import Busy, ExitCode, HostError, InternalError, PermissionDenied, PodwatchError
from podwatch.system.endpoint import fetch_status

# -- control socket --------------------------------------------------------------------------------------------------
# One JSON line per request, one per answer.

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


# -- status of a run, from any source --------------------------------------------------------------------------------

EXIT_CODES = {"ok": 0, "warning": 1, "critical": 2}
"""Everything else is 3: unknown, or podwatch is not running (the convention of monitoring plugins)."""


def exit_code(document: Mapping[str, Any]) -> int:
    if not document.get("running"):
        return 3
    return EXIT_CODES.get(str(document.get("overall")), 3)


def ask_status(
    run: str = "", config: str = "", environ: Mapping[str, str] = os.environ, *, timeout: float = 3.0
) -> dict[str, Any]:
    """The status document. Without a living daemon: ``running`` false, ``overall`` unknown, and the values of the last
    snapshot if there is one. UsageError if several runs match."""
    found = locate(run, config, environ)
    if found is None:
        hints = read_hints(config, environ)
        return nothing(run or hints.run_id, searched(environ), config)
    if found.alive:
        document = live_status(found, timeout)
        if document is not None:
            return document
    return stale(found)


def ask_live(
    run: str = "", config: str = "", environ: Mapping[str, str] = os.environ, *, timeout: float = 3.0
) -> tuple[bool, str]:
    """Whether podwatch's sensing loop turned within its deadline, and why not. For exec probes: quick, and never an
    error of this function's own. UsageError if several runs match."""
    found = locate(run, config, environ)
    if found is None or not found.alive:
        return False, "podwatch is not running here"
    try:
        daemon = (live_status(found, timeout) or {}).get("daemon")
    except PodwatchError as error:
        return False, str(error)
    live = isinstance(daemon, dict) and daemon.get("live") is True
    return live, "" if live else "the sensing loop does not turn"


def live_status(found: Found, timeout: float = 3.0) -> dict[str, Any] | None:
    """The status document of a living daemon; None if it does not answer. Raises PermissionDenied."""
    try:
        return call(found.control_path, "status", timeout=timeout)
    except Busy:
        return None  # the event loop is stuck, and HTTP uses the same one
    except HostError:
        pass  # no socket, or another user's: HTTP needs no privilege
    return fetch_status(found.endpoint.http_url, timeout=timeout) if found.endpoint.http_url else None
