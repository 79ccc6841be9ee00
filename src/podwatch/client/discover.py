"""Find the daemon of a run from its runtime directory. Parses no configuration beyond two plain keys.

Order: ``$PODWATCH_RUNTIME_DIR``, ``$RUNTIME_DIRECTORY``, what ``-c`` names, /run/podwatch, $XDG_RUNTIME_DIR/podwatch,
/var/lib/podwatch/run, ~/.local/state/podwatch/run. Each holds one directory per run.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.client.endpoint import CONTROL, SNAPSHOT, Endpoint, read_document, read_endpoint
from podwatch.client.trusted import read_trusted_bytes
from podwatch.domain.errors import ConfigurationError, UsageError


@dataclass(frozen=True, slots=True)
class Found:
    """One run's runtime directory and what its endpoint file says."""

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


@dataclass(frozen=True, slots=True)
class Hints:
    """What a configuration file says about where to look; empty where it says nothing."""

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
    """Where is really looked: $PODWATCH_RUNTIME_DIR alone where it is set."""
    explicit = environ.get("PODWATCH_RUNTIME_DIR")
    return [Path(explicit)] if explicit else runtime_roots(environ, hints)


def find_runs(environ: Mapping[str, str] = os.environ, hints: Hints = NO_HINTS) -> list[Found]:
    """Every run with an endpoint file, living ones first; the first directory wins for a run seen twice."""
    found: dict[str, Found] = {}
    for root in searched(environ, hints):
        try:
            directories = sorted(d for d in root.iterdir() if d.is_dir())
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


def choose(runs: list[Found], run: str) -> Found | None:
    """The run that is meant, or None when there is none at all.

    UsageError when ``run`` is not among them, or when several are alive (or none is, of several) and none was named.
    """
    if run:
        named = [f for f in runs if f.endpoint.run_id == run]
        if not named and runs:
            raise UsageError(f"no run {run!r} on this machine", fix=f"known: {', '.join(_names(runs))}")
        return named[0] if named else None
    living = [f for f in runs if f.alive]
    pool = living or runs
    if len(pool) > 1:
        raise UsageError("several runs on this machine", fix=f"say which: --run NAME, one of {', '.join(_names(pool))}")
    return pool[0] if pool else None


def locate(run: str = "", config: str = "", environ: Mapping[str, str] = os.environ) -> Found | None:
    """The run that is meant, or None: by ``config`` (or $PODWATCH_CONFIG) and the usual directories; if that finds
    nothing, by what the configuration files in their usual places say. Raises as ``choose`` and ``read_hints``."""
    hints = read_hints(config, environ)
    found = choose(find_runs(environ, hints), run or hints.run_id)
    if found is not None or hints is not NO_HINTS:
        return found
    for usual in USUAL_CONFIGS:
        try:
            hints = read_hints(usual, environ)
        except ConfigurationError:
            continue
        found = choose(find_runs(environ, hints), run or hints.run_id)
        if found is not None:
            return found
    return None


def read_hints(config: str, environ: Mapping[str, str] = os.environ) -> Hints:
    """run_id and state_dir from the file that ``-c`` or ``$PODWATCH_CONFIG`` names, and nothing else from it.

    ConfigurationError when the named file cannot be read as TOML, or must not be trusted: it names the directory in
    which the daemon's socket is looked for.
    """
    name = config or environ.get("PODWATCH_CONFIG", "")
    if not name:
        return NO_HINTS
    import tomllib

    raw = read_trusted_bytes(Path(name))
    try:
        document = tomllib.loads(raw.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        # podwatch itself continues with its last good copy: those two lines are mostly still whole, and say where
        document = _two_lines(raw.decode(errors="replace"))
        if not document:
            raise ConfigurationError(
                f"not valid TOML: {error}", where=name, fix="run `podwatch config validate`"
            ) from error
    run_id, state_dir = document.get("run_id", ""), document.get("state_dir", "")
    return Hints(
        run_id=run_id if isinstance(run_id, str) else "",
        state_dir=Path(state_dir) if isinstance(state_dir, str) and state_dir else None,
    )


def _two_lines(text: str) -> dict[str, str]:
    """run_id and state_dir from a text that is not TOML as a whole."""
    import re

    return {name: value for name, _, value in re.findall(r"""(?m)^\s*(state_dir|run_id)\s*=\s*(["'])(.*?)\2""", text)}


def _names(runs: list[Found]) -> list[str]:
    return [f.endpoint.run_id for f in runs]
