"""The entry point of ``podwatch run``: loads the settings, then runs the daemon, or init where one is needed."""

import asyncio
import math
import os
import secrets
import sys
from collections.abc import Mapping, MutableMapping
from functools import partial
from pathlib import Path

from podwatch.config.directory import move_to_root
from podwatch.config.loading import load_or_last_good, load_settings, named_file
from podwatch.daemon.paths import RunPaths, guard_paths
from podwatch.system.workers import few_arenas

UNDER_INIT = "PODWATCH_UNDER_INIT"
"""Set by init for the daemon it starts, so that the daemon does not start another init."""


TAKE_OVER = "PODWATCH_TAKE_OVER"
"""Id of an operator's `--take-over`, for the daemon under init: executed once, although init restarts the daemon."""


FRESH = "PODWATCH_FRESH"
"""Id of an operator's `--fresh`, likewise."""


BY_HAND = "PODWATCH_BY_HAND"
"""Id of a `podwatch run` that was typed on a terminal: the daemon then skips a running backoff."""


SILENT_SECONDS = "PODWATCH_SILENT_SECONDS"
"""Set by init where the previous daemon missed its watchdog: seconds without a response."""


def silent_seconds(environ: MutableMapping[str, str]) -> float:
    """Seconds without a responding daemon before init started this one; 0 without init or if no watchdog was missed.
    Removes the variable from ``environ``, so that it is reported once."""
    text = environ.pop(SILENT_SECONDS, "")
    try:
        seconds = float(text) if UNDER_INIT in environ else 0.0
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) else 0.0


def run_daemon(
    config_path: Path | None,
    run_name: str,
    overrides: Mapping[str, object],
    *,
    adopt_existing: bool = False,
    detach: bool = False,
    take_over: bool = False,
    fresh: bool = False,
) -> int:
    """Run until stopped; returns the exit code. Raises PodwatchError if it cannot start.

    Changes the working directory to ``/``; relative paths keep their meaning (config/directory.py)."""
    few_arenas()
    if UNDER_INIT not in os.environ:  # the typed process; init restarts the daemon with the same id
        os.environ.pop(BY_HAND, None)
        if typed():
            os.environ[BY_HAND] = secrets.token_hex(8)
    config_path = named_file(config_path, os.environ) if config_path is not None else None
    move_to_root(os.environ)
    loaded = load_or_last_good(config_path, environ=os.environ, overrides=overrides, run=run_name)
    if (detach or os.getpid() == 1) and UNDER_INIT not in os.environ:
        from podwatch.daemon import init

        if take_over:
            os.environ[TAKE_OVER] = secrets.token_hex(8)
        if fresh:
            os.environ[FRESH] = secrets.token_hex(8)
        paths = guard_paths(loaded.settings.state_dir, loaded.settings.run_id, os.environ)
        return init.main(
            _own_command(config_path, run_name, overrides, adopt_existing),
            detach=detach,
            log_path=_log_path(paths),
            run_dir=paths.runtime,
        )
    from podwatch.daemon.daemon import Start, serve

    start = Start(
        adopt_existing=adopt_existing,
        take_over=secrets.token_hex(8) if take_over else os.environ.get(TAKE_OVER, ""),
        fresh=secrets.token_hex(8) if fresh else os.environ.get(FRESH, ""),
    )
    again = partial(load_settings, loaded.path, environ=os.environ, overrides=overrides, run=run_name)
    return asyncio.run(serve(loaded, start, load_again=again))


def _log_path(paths: RunPaths) -> Path:
    """The log file: in the state directory, else beside the endpoint file, else /dev/null (podwatch needs no log)."""
    for path in (paths.state / "podwatch.log", paths.runtime / "podwatch.log"):
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        except OSError:
            continue
        return path
    return Path(os.devnull)


def typed() -> bool:
    """Whether an operator's terminal is this process's standard input."""
    try:
        return os.isatty(0)
    except OSError:
        return False


def _own_command(
    config_path: Path | None, run_name: str, overrides: Mapping[str, object], adopt_existing: bool
) -> list[str]:
    command = [sys.executable, "-P", "-m", "podwatch"]
    if config_path is not None:
        command += ["--config", str(config_path)]
    if run_name:
        command += ["--run", run_name]
    command.append("run")
    if adopt_existing:
        command.append("--adopt-existing")
    for key, value in overrides.items():
        command += ["--set", f"{key}={value}"]
    return command
