"""Find the daemon of a run by its runtime directory, else by the run's lock. Reads only two keys of the configuration.

Order: ``$PODWATCH_RUNTIME_DIR``, ``$RUNTIME_DIRECTORY``, the state_dir of ``-c``, /run/podwatch,
$XDG_RUNTIME_DIR/podwatch, /var/lib/podwatch/run, ~/.local/state/podwatch/run. Each has one directory per run.
"""

import contextlib
import json
import os
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from podwatch.client.trusted_configuration import check_trusted, read_trusted_bytes
from podwatch.domain.errors import ConfigurationError, UsageError

# -- endpoint.json ---------------------------------------------------------------------------------------------------
# The addresses of a daemon. A run's runtime directory holds ``endpoint.json`` and ``status.json`` (without secrets,
# readable by all users), and the control socket in a subdirectory that only the daemon's user can enter.

ENDPOINT = "endpoint.json"
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


def write_endpoint(directory: Path, endpoint: Endpoint) -> None:
    """Replace ``endpoint.json`` atomically, mode 0644. Raises OSError."""
    write_document(directory / ENDPOINT, asdict(endpoint))


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


# -- runtime directories ---------------------------------------------------------------------------------------------

FORGOTTEN_AFTER = 14 * 86400.0
"""Seconds after podwatch's last write until a run is no longer listed: longer than a holiday."""


@dataclass(frozen=True, slots=True)
class Found:
    """A run's runtime directory and its endpoint."""

    directory: Path
    endpoint: Endpoint
    alive: bool

    @property
    def control_path(self) -> Path:
        return Path(self.endpoint.control) if self.endpoint.control else self.directory / CONTROL

    def snapshot(self) -> tuple[dict[str, Any], float] | None:
        """The last ``status.json`` and its mtime in epoch seconds, or None."""
        path = self.directory / SNAPSHOT
        try:
            written = path.stat().st_mtime
        except OSError:
            return None
        document = read_document(path)
        return None if document is None else (document, written)

    def last_word(self) -> float:
        """Epoch second of podwatch's last write in this directory; 0 if it cannot be read."""
        times = [self.endpoint.stopped_wall or 0.0]
        for name in (ENDPOINT, SNAPSHOT):
            try:
                times.append((self.directory / name).stat().st_mtime)
            except OSError:
                continue
        return max(times)

    def remembered(self, now: float) -> bool:
        """Whether the run is listed, and can be chosen without a name: its podwatch or its training is alive, or its
        state exists and podwatch wrote here within ``FORGOTTEN_AFTER``. ``now`` in epoch seconds."""
        if self.alive or self.training_lives():
            return True
        return not self.state_gone() and now - self.last_word() <= FORGOTTEN_AFTER

    def training_lives(self) -> bool:
        found = self.snapshot()
        return found is not None and bool(training_lives(found[0]))

    def state_gone(self) -> bool:
        """Whether the directory with the run's state was removed. False if unknown."""
        found = self.snapshot()
        daemon = found[0].get("daemon") if found is not None else None
        place = daemon.get("state_dir") if isinstance(daemon, dict) else None
        if not isinstance(place, str) or not place:
            return False
        try:
            Path(place).stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except (OSError, ValueError):
            return False
        return False


def training_lives(document: Mapping[str, Any]) -> bool | None:
    """Whether the launcher in a status document, or the one that the supervisor recorded since, is alive; None if
    neither is known."""
    training, daemon = (document.get(key) for key in ("training", "daemon"))
    launchers = [training] if isinstance(training, dict) else []
    if isinstance(daemon, dict) and isinstance(daemon.get("state_dir"), str):
        record = read_document(Path(daemon["state_dir"]) / "supervisor" / "record.json")
        if record is not None and record.get("boot_id") == boot_id():
            launchers.append({"pid": record.get("pid"), "start_ticks": record.get("ticks")})
    known = [(one["pid"], one.get("start_ticks") or 0) for one in launchers if isinstance(one.get("pid"), int)]
    return any(isinstance(ticks, int) and process_alive(pid, ticks) for pid, ticks in known) if known else None


@dataclass(frozen=True, slots=True)
class Hints:
    """The keys of a configuration file that locate the daemon; empty if the file does not set them."""

    run_id: str = ""
    state_dir: Path | None = None


NO_HINTS = Hints()
USUAL_CONFIGS = ("podwatch.toml", "/etc/podwatch/podwatch.toml")


def runtime_roots(environ: Mapping[str, str], hints: Hints = NO_HINTS) -> list[Path]:
    """Directories that may hold runs, most specific first, without duplicates."""
    home = environ.get("HOME", "")
    state = hints.state_dir or (Path(environ["PODWATCH_STATE_DIR"]) if environ.get("PODWATCH_STATE_DIR") else None)
    candidates = [
        environ.get("PODWATCH_RUNTIME_DIR", ""),
        *environ.get("RUNTIME_DIRECTORY", "").split(":"),
        str(state / "run") if state else "",
        "/run/podwatch",
        f"{environ['XDG_RUNTIME_DIR']}/podwatch" if environ.get("XDG_RUNTIME_DIR") else "",
        "/var/lib/podwatch/run",
        f"{home}/.local/state/podwatch/run" if home else "",
    ]
    return [Path(c) for c in dict.fromkeys(candidates) if c]


def searched(environ: Mapping[str, str], hints: Hints = NO_HINTS) -> list[Path]:
    """The directories that are searched: only $PODWATCH_RUNTIME_DIR if it is set."""
    explicit = environ.get("PODWATCH_RUNTIME_DIR")
    return [Path(explicit)] if explicit else runtime_roots(environ, hints)


def find_runs(environ: Mapping[str, str] = os.environ, hints: Hints = NO_HINTS) -> list[Found]:
    """Every run with an endpoint file, running ones first. For a run found twice: the living one, else the first."""
    found: dict[str, Found] = {}
    for root in searched(environ, hints):
        try:
            directories = sorted(d for d in root.iterdir() if d.is_dir() and _is_believed(d))
        except OSError:
            continue
        for directory in directories:
            endpoint = read_endpoint(directory)
            if endpoint is None:
                continue
            candidate = Found(directory, endpoint, endpoint.alive())
            known = found.get(endpoint.run_id)
            if known is None or (candidate.alive and not known.alive):
                found[endpoint.run_id] = candidate
    return sorted(found.values(), key=lambda f: (not f.alive, f.endpoint.run_id))


def _is_believed(directory: Path) -> bool:
    """Whether this command may act on what the directory says: what root believes, only root has written."""
    if os.geteuid() != 0:
        return True
    try:
        check_trusted(directory, "the runtime directory")
    except (ConfigurationError, OSError):
        return False
    return directory.stat().st_uid == 0


def choose(runs: Sequence[Found], run: str) -> Found | None:
    """The run to use, or None if there is none.

    Without a name: the running one; else the remembered one; else the latest forgotten one whose state exists.
    UsageError if ``run`` is not among them, or if several match.
    """
    now = time.time()
    if run:
        named = [f for f in runs if f.endpoint.run_id == run]
        if not named and runs:
            names = _names([f for f in runs if f.remembered(now)])
            raise UsageError(f"run {run!r} not found on this machine", fix=f"known runs: {', '.join(names) or 'none'}")
        return named[0] if named else None
    pool = [f for f in runs if f.alive] or [f for f in runs if f.remembered(now)]
    if not pool:
        left = [f for f in runs if not f.state_gone()]
        return max(left, key=Found.last_word, default=None)
    if len(pool) > 1:
        raise UsageError("several runs on this machine", fix=f"choose one with --run: {', '.join(_names(pool))}")
    return pool[0]


def locate(run: str = "", config: str = "", environ: Mapping[str, str] = os.environ) -> Found | None:
    """The run to use, or None: by ``config`` (or $PODWATCH_CONFIG), else by a configuration file in its default place
    if it names a run that is known here, else by the default directories. Raises like ``choose`` and ``read_hints``."""
    hints = read_hints(config, environ)
    if hints is not NO_HINTS:
        return choose(find_runs(environ, hints), run or hints.run_id)
    usual = [known for known in map(_usual_hints, USUAL_CONFIGS) if known is not NO_HINTS]
    for known in usual:
        runs = find_runs(environ, known)
        meant = [f for f in runs if f.endpoint.run_id == (run or known.run_id)]
        if meant and (run or meant[0].remembered(time.time()) or not any(f.alive for f in runs)):
            return meant[0]
    found = choose(find_runs(environ), run)
    if found is not None:
        return found
    for known in usual:
        found = choose(find_runs(environ, known), run or known.run_id)
        if found is not None:
            return found
    return None


def _usual_hints(config: str) -> Hints:
    """The hints of this file, if it exists and is trusted."""
    if not Path(config).exists():
        return NO_HINTS
    try:
        return read_hints(config, {})
    except ConfigurationError:
        return NO_HINTS


def read_hints(config: str, environ: Mapping[str, str] = os.environ) -> Hints:
    """run_id and state_dir from the file that ``-c`` or ``$PODWATCH_CONFIG`` names.

    ConfigurationError if the file is not valid TOML, or not trusted: it decides which control socket is used.
    """
    name = config or environ.get("PODWATCH_CONFIG", "")
    if not name:
        return NO_HINTS
    import tomllib

    raw = read_trusted_bytes(Path(name))
    try:
        document = tomllib.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a huge number, thousands of brackets
        # A running daemon continues with its last good copy, and these two lines are usually intact.
        document = _two_lines(raw.decode(errors="replace"))
        if not document:
            raise ConfigurationError(
                f"not valid TOML: {error}", where=name, fix="run `podwatch config validate`"
            ) from error
    run_id, state_dir = (
        value if isinstance(value, str) and "\0" not in value else ""
        for value in (document.get("run_id", ""), document.get("state_dir", ""))
    )
    return Hints(run_id=run_id, state_dir=Path(state_dir) if state_dir else None)


def _two_lines(text: str) -> dict[str, str]:
    """run_id and state_dir from invalid TOML."""
    import re

    return {name: value for name, _, value in re.findall(r"""(?m)^\s*(state_dir|run_id)\s*=\s*(["'])(.*?)\2""", text)}


def _names(runs: list[Found]) -> list[str]:
    return [f.endpoint.run_id for f in runs]


# -- holder of the run's lock ----------------------------------------------------------------------------------------
# Finds a podwatch that was started with another PODWATCH_RUNTIME_DIR or as another user, which would otherwise be
# reported as "not running".


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a run's lock. ``runtime``: its runtime directory; empty if it cannot be read."""

    pid: int
    lock: Path
    runtime: str = ""


def holder(run: str, environ: Mapping[str, str], hints: Hints, locks: Path = Path("/proc/locks")) -> Holder | None:
    """The process that holds the lock of ``run`` (empty: of any run in the default state directories). Reads
    /proc/locks and takes no lock: even a short one could prevent podwatch from starting."""
    held = _held(locks)
    for path in _lock_files(run, environ, hints):
        try:
            status = path.stat()
        except (OSError, ValueError):  # a name that the file system's encoding does not have
            continue
        pid = held.get(status.st_ino, 0)
        if pid > 0 and _user_of(pid) in (0, os.geteuid(), status.st_uid):
            return Holder(pid, path, _runtime_of(pid))
    return None


def _lock_files(run: str, environ: Mapping[str, str], hints: Hints) -> Iterable[Path]:
    named = [hints.state_dir] if hints.state_dir else []
    home = environ.get("HOME", "")
    usual = (
        environ.get("PODWATCH_STATE_DIR", ""),
        "/var/lib/podwatch",
        f"{home}/.local/state/podwatch" if home else "",
    )
    for root in named or [Path(place) for place in usual if place]:
        if run or hints.run_id:
            yield root / (run or hints.run_id) / "guard.lock"
            continue
        try:
            yield from sorted(root.glob("*/guard.lock"))
        except OSError:
            continue


def _held(locks: Path) -> dict[int, int]:
    """Inode -> pid of the process that holds a flock on it. Devices are not compared: overlays show another device."""
    try:
        lines = locks.read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for words in map(str.split, lines):  # 1: FLOCK  ADVISORY  WRITE 708 00:1a:123 0 EOF
        if len(words) >= 6 and words[1] == "FLOCK" and words[3] == "WRITE" and words[4].isdigit():
            inode = words[5].rpartition(":")[2]
            if inode.isdigit():
                found[int(inode)] = int(words[4])
    return found


def _user_of(pid: int) -> int:
    """Real user id; -1 without such a process. It is compared because inode numbers repeat across file systems."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("Uid:")))
    except (OSError, ValueError, StopIteration):
        return -1


def _runtime_of(pid: int) -> str:
    try:
        items = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    values = dict(item.split(b"=", 1) for item in items if b"=" in item)
    found = values.get(b"PODWATCH_RUNTIME_DIR") or values.get(b"RUNTIME_DIRECTORY", b"").split(b":")[0]
    return os.fsdecode(found)
