"""Find the daemon of a run by its runtime directory. Reads only two keys of the configuration.

Order: ``$PODWATCH_RUNTIME_DIR``, else ``$RUNTIME_DIRECTORY`` and /run/podwatch, which have one directory per run; then
the link in each run's state directory, which every podwatch makes wherever its runtime directory is.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.config.trusted_files import check_trusted, read_trusted_bytes
from podwatch.domain.errors import ConfigurationError, UsageError
from podwatch.system.endpoint import (
    CONTROL,
    ENDPOINT,
    RUNTIME_LINK,
    SNAPSHOT,
    Endpoint,
    boot_id,
    process_alive,
    read_document,
    read_endpoint,
)

# -- runtime directories ---------------------------------------------------------------------------------------------


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

    def last_write(self) -> float:
        """Epoch second of podwatch's last write in this directory; 0 if it cannot be read."""
        times = [self.endpoint.stopped_wall or 0.0]
        for name in (ENDPOINT, SNAPSHOT):
            try:
                times.append((self.directory / name).stat().st_mtime)
            except OSError:
                continue
        return max(times)


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


def searched(environ: Mapping[str, str]) -> list[Path]:
    """The directories that may hold runs."""
    explicit = environ.get("PODWATCH_RUNTIME_DIR")
    usual = (*environ.get("RUNTIME_DIRECTORY", "").split(":"), "/run/podwatch")
    return [Path(explicit)] if explicit else [Path(place) for place in dict.fromkeys(usual) if place]


def _state_roots(environ: Mapping[str, str], hints: Hints) -> list[Path]:
    """State directories whose runs link to their runtime directories; with $PODWATCH_RUNTIME_DIR only the one that the
    configuration names."""
    if hints.state_dir or environ.get("PODWATCH_RUNTIME_DIR"):
        return [hints.state_dir] if hints.state_dir else []
    home, named = environ.get("HOME", ""), environ.get("PODWATCH_STATE_DIR", "")
    usual = (named, "/var/lib/podwatch", f"{home}/.local/state/podwatch" if home else "")
    return [Path(place) for place in usual if place]


def _directories(environ: Mapping[str, str], hints: Hints) -> Iterator[Path]:
    """The directory of each run that may be here."""
    for root in searched(environ):
        with contextlib.suppress(OSError):
            yield from sorted(root.iterdir())
    for root in _state_roots(environ, hints):
        with contextlib.suppress(OSError, RuntimeError):  # a loop of links
            yield from [link.resolve() for link in sorted(root.glob(f"*/{RUNTIME_LINK}"))]


def find_runs(environ: Mapping[str, str] = os.environ, hints: Hints = NO_HINTS) -> list[Found]:
    """Every run with an endpoint file, running ones first. For a run found twice: the living one, else the first."""
    found: dict[str, Found] = {}
    for directory in _directories(environ, hints):
        endpoint = None
        with contextlib.suppress(OSError):  # in a directory that this user cannot enter
            endpoint = read_endpoint(directory) if directory.is_dir() and _is_believed(directory) else None
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

    Without a name: the running one; where none runs, the one whose podwatch wrote last. UsageError if ``run`` is not
    among them, or if several run.
    """
    if run:
        named = [f for f in runs if f.endpoint.run_id == run]
        if not named and runs:
            raise UsageError(f"run {run!r} not found on this machine", fix=f"known runs: {_names(runs)}")
        return named[0] if named else None
    alive = [f for f in runs if f.alive]
    if len(alive) > 1:
        raise UsageError("several runs on this machine", fix=f"choose one with --run: {_names(alive)}")
    return alive[0] if alive else max(runs, key=Found.last_write, default=None)


def locate(run: str = "", config: str = "", environ: Mapping[str, str] = os.environ) -> Found | None:
    """The run to use, or None: by ``config`` (or $PODWATCH_CONFIG), else by a configuration file in its default place
    if it names a run that is known here, else by the default directories. Raises like ``choose`` and ``read_hints``."""
    hints = read_hints(config, environ)
    if hints is not NO_HINTS:
        return choose(find_runs(environ, hints), run or hints.run_id)
    for known in map(_usual_hints, USUAL_CONFIGS):
        runs = find_runs(environ, known) if known is not NO_HINTS else []
        meant = [f for f in runs if f.endpoint.run_id == (run or known.run_id)]
        if meant:
            return meant[0]
    return choose(find_runs(environ), run)


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
    from podwatch.config.toml_text import intact_lines, parse_toml

    text = read_trusted_bytes(Path(name)).decode("utf-8-sig", "replace")
    try:
        document = parse_toml(text, Path(name))
    except ConfigurationError:
        document = intact_lines(text)  # a running daemon continues with its last good copy
        if not document:
            raise
    run_id, state_dir = (
        value if isinstance(value, str) and "\0" not in value else ""
        for value in (document.get("run_id", ""), document.get("state_dir", ""))
    )
    return Hints(run_id=run_id, state_dir=Path(state_dir) if state_dir else None)


def _names(runs: Sequence[Found]) -> str:
    return ", ".join(f.endpoint.run_id for f in runs)
