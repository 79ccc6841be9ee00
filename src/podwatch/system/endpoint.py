"""Where a daemon can be reached: its endpoint file, its last status on disk, and its status over HTTP. Imports the
standard library only, so that `podwatch status` starts fast.

A run's runtime directory holds ``endpoint.json`` and ``status.json`` (without secrets, readable by all users), and the
control socket in a subdirectory that only the daemon's user can enter.
"""

import contextlib
import json
import os
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from podwatch.domain.errors import PermissionDenied

ENDPOINT = "endpoint.json"
RUNTIME_LINK = "runtime"
"""In a run's state directory: where its runtime directory is."""
SNAPSHOT = "status.json"
CONTROL = Path("control") / "control.sock"
"""Below the run's runtime directory, unless endpoint.json names another path."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One daemon. ``stopped_wall`` is set at an ordered stop; a missing process without it means that it died."""

    run_id: str
    pid: int
    start_ticks: int = 0
    boot_id: str = ""
    started_wall: float = 0.0
    stopped_wall: float | None = None
    http_url: str = ""
    control: str = ""
    config_path: str = ""
    version: str = ""

    def alive(self) -> bool:
        """Whether that process is alive, by pid and start time (by pid alone if the start time is unknown)."""
        if self.stopped_wall is not None or (self.boot_id and self.boot_id != boot_id()):
            return False
        return process_alive(self.pid, self.start_ticks)


def own_endpoint(run_id: str, *, started_wall: float, **fields: Any) -> Endpoint:
    """An endpoint for the calling process."""
    return Endpoint(
        run_id=run_id,
        pid=os.getpid(),
        start_ticks=start_ticks(os.getpid()) or 0,
        boot_id=boot_id(),
        started_wall=started_wall,
        **fields,
    )


def write_endpoint(directory: Path, endpoint: Endpoint, state: Path | None = None) -> None:
    """Replace ``endpoint.json`` atomically, mode 0644. The run's directory ``state`` then links to ``directory``, so
    that a command finds it whatever its environment says. Raises OSError."""
    write_document(directory / ENDPOINT, asdict(endpoint))
    if state is None:
        return
    link = state / RUNTIME_LINK
    with contextlib.suppress(OSError):  # a state directory that cannot be written is a finding of its own
        if not link.is_symlink() or link.readlink() != directory:
            link.unlink(missing_ok=True)
            link.symlink_to(directory)


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Replace a JSON file atomically by rename. Not fsynced: it describes a living process."""
    staged = path.with_name(f".{path.name}.{os.getpid()}-{time.monotonic_ns()}")
    text = json.dumps(document)  # json.dump() is ten times slower
    try:
        with staged.open("w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o644)
        staged.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            staged.unlink()
        raise


def read_document(path: Path, *, limit: int = 16 << 20) -> dict[str, Any] | None:
    """A JSON object from a file; None if it is absent, unreadable, larger than ``limit`` bytes, or broken."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would block
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(limit + 1) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
        document = json.loads(data) if len(data) <= limit else None
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def read_endpoint(directory: Path) -> Endpoint | None:
    """The endpoint in a runtime directory, or None. Ignores unknown fields, which a newer daemon can write."""
    document = read_document(directory / ENDPOINT)
    if document is None:
        return None
    known = {k: document[k] for k in Endpoint.__slots__ if k in document}
    try:
        endpoint = Endpoint(**known)
    except TypeError:
        return None
    sane = isinstance(endpoint.run_id, str) and isinstance(endpoint.pid, int) and isinstance(endpoint.control, str)
    return endpoint if sane and endpoint.run_id else None


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_ticks(pid: int) -> int | None:
    """Field 22 of ``/proc/PID/stat``; None if there is no such process or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def process_alive(pid: int, ticks: int) -> bool:
    """Whether process ``pid`` with that start time is alive. ``ticks`` 0: start time unknown, the pid alone decides."""
    now = start_ticks(pid)
    return now is not None and (ticks == 0 or now == ticks)


# -- status over HTTP ------------------------------------------------------------------------------------------------
# For users who cannot open the control socket.

MAX_STATUS = 16 << 20


def fetch_status(url: str, *, timeout: float = 2.0) -> dict[str, Any] | None:
    """The status document from ``http://host:port``; None after any failure but a refusal, which raises
    PermissionDenied. ``timeout``: seconds per read."""
    import http.client
    import json
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        return None
    connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout)
    try:
        connection.request("GET", "/status", headers={"Accept": "application/json"})
        response = connection.getresponse()
        data = response.read(MAX_STATUS)
        document = json.loads(data) if response.status == 200 else None
        refused = response.status in (401, 403)
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    if refused:
        raise PermissionDenied(
            "Permission denied: this podwatch shows its status over HTTP only with its password",
            where=url,
            fix="run this command as root or as podwatch's user",
        )
    return document if isinstance(document, dict) else None
