"""Where one run's state and runtime files lie."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from podwatch.domain.errors import HostError, PermissionDenied

RECORDING = "recording"
"""Directory of the recording below a run's state."""


@dataclass(frozen=True, slots=True)
class RunPaths:
    """``state`` is durable (database, keeper, incidents), ``runtime`` lasts as long as the machine is up."""

    state: Path
    runtime: Path

    @property
    def journal(self) -> Path:
        return self.state / "journal.sqlite"

    @property
    def lock(self) -> Path:
        return self.state / "lock"

    @property
    def incidents(self) -> Path:
        return self.state / "incidents"

    @property
    def recording(self) -> Path:
        return self.state / RECORDING

    @property
    def control_socket(self) -> Path:
        return self.runtime / "control" / "control.sock"


def run_paths(state_dir: Path, run_id: str, environ: Mapping[str, str]) -> RunPaths:
    """Make and return the directories. Raises PermissionDenied or HostError naming what to do."""
    state = state_dir / run_id
    _make(state, 0o700, "set state_dir to a directory on local disk that podwatch may write")
    for root in _runtime_roots(state_dir, environ):
        runtime = root / run_id
        try:
            _make(runtime, 0o755, "")
            if os.access(runtime, os.W_OK):
                return RunPaths(state, runtime)
        except HostError:
            continue
    raise HostError("no runtime directory can be written", where=f"/run/podwatch, {state_dir}", fix="set state_dir")


def guard_paths(state_dir: Path, run_id: str, environ: Mapping[str, str]) -> RunPaths:
    """The same for the daemon, which guards also where a directory cannot be made: never raises. Blocks."""
    try:
        return run_paths(state_dir, run_id, environ)
    except HostError:
        return unmade_paths(state_dir, run_id, environ, usable=_writable)


def unmade_paths(
    state_dir: Path, run_id: str, environ: Mapping[str, str], usable: Callable[[Path], bool] = lambda path: True
) -> RunPaths:
    """Where they would be, with the first runtime directory that is ``usable``. Nothing is looked at by itself."""
    runtimes = [root / run_id for root in _runtime_roots(state_dir, environ)]
    return RunPaths(state_dir / run_id, next((path for path in runtimes if usable(path)), runtimes[0]))


def _writable(path: Path) -> bool:
    try:
        _make(path, 0o755, "")
        return os.access(path, os.W_OK)
    except (HostError, OSError):
        return False


def _runtime_roots(state_dir: Path, environ: Mapping[str, str]) -> list[Path]:
    explicit = environ.get("PODWATCH_RUNTIME_DIR")
    if explicit:
        return [Path(explicit)]
    by_systemd = environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    return [Path(p) for p in (by_systemd, "/run/podwatch") if p] + [state_dir / "run"]


def _make(path: Path, mode: int, fix: str) -> None:
    try:
        if not path.is_dir():  # raises PermissionError where its parent may not be searched
            path.mkdir(mode=mode, parents=True, exist_ok=True)
            path.chmod(mode)  # whatever the umask: under systemd it is 0077, and status needs no privilege
    except PermissionError as error:
        raise PermissionDenied("cannot create the directory", where=str(path), fix=fix) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise HostError(f"cannot create the directory, {reason}", where=str(path), fix=fix) from error
