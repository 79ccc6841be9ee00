"""The entry point of ``podwatch run``: loads the settings, then runs the daemon, or init where one is needed."""

import asyncio
import json
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from podwatch.app.paths_and_run_lock import RunPaths, guard_paths
from podwatch.app.variables_of_own_processes import BY_HAND, FLAGS, SILENT_SECONDS, UNDER_INIT
from podwatch.config.command_directory import move_to_root
from podwatch.config.last_good import load_or_last_good
from podwatch.config.loading import LoadedSettings, load_settings, named_file
from podwatch.config.settings import RecoverySettings, Settings
from podwatch.domain.engine_and_attempt import place_of
from podwatch.domain.errors import ConfigurationError
from podwatch.system.child import few_arenas
from podwatch.trainer.supervisor_files import PROGRAM


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
    job: bool = False,
    retry: bool = False,
) -> int:
    """Run until stopped; returns the exit code. Raises PodwatchError if it cannot start. ``job``: run as an engine's
    job (docs/jobs.md).

    Changes the working directory to ``/``; relative paths keep their meaning (config/command_directory.py)."""
    few_arenas()
    if UNDER_INIT not in os.environ:  # the typed process; init restarts the daemon with the same id
        os.environ.pop(BY_HAND, None)
        if typed():
            os.environ[BY_HAND] = secrets.token_hex(8)
    if job:
        overrides = {**overrides, "recovery.on_give_up": "exit", "recovery.on_finished": "exit"}
    config_path = named_file(config_path, os.environ) if config_path is not None else None
    move_to_root(os.environ)
    loaded = seated(load_or_last_good(config_path, environ=os.environ, overrides=overrides, run=run_name), job=job)
    given = {"adopt_existing": adopt_existing, "take_over": take_over, "fresh": fresh, "retry": retry}
    os.environ.update({FLAGS[flag]: secrets.token_hex(8) for flag, is_given in given.items() if is_given})
    if (detach or job or os.getpid() == 1) and UNDER_INIT not in os.environ:
        paths = guard_paths(loaded.settings.state_dir, loaded.settings.run_id, os.environ)
        return start_init(
            _own_command(config_path, run_name, overrides, job),
            detach=detach,
            log_path=_log_path(paths),
            run_dir=paths.runtime,
            job=_job_options(loaded.settings.recovery) if job else (),
        )
    from podwatch.app.build import StartOptions
    from podwatch.app.main import serve

    ids = {flag: os.environ.get(variable, "") for flag, variable in FLAGS.items()}
    start = StartOptions(ids["adopt_existing"], ids["take_over"], ids["fresh"], ids["retry"])
    if loaded.settings.nodes.rank:
        start = StartOptions()  # rank 0 carries these out
    load = partial(load_settings, loaded.path, environ=os.environ, overrides=overrides, run=run_name)
    return asyncio.run(serve(loaded, start, load_again=lambda: seated(load(), job=job)))


def seated(loaded: LoadedSettings, *, job: bool) -> LoadedSettings:
    """The settings with the rank and count of this node, and a state directory of its own; unchanged for a run on one
    node (docs/nodes.md). Raises ConfigurationError for what several nodes do not support."""
    settings = loaded.settings
    rank, count = settings.nodes.rank, settings.nodes.count
    if not job:
        if (count or 1) > 1:
            raise ConfigurationError(
                f"a run over {count} nodes needs an engine that starts and ends them together",
                where="[nodes]",
                fix="use `podwatch run --job` under an engine, or remove [nodes]",
            )
        return loaded
    place = place_of(os.environ, rank, count)
    if place is None:
        return loaded
    if refused := unsupported(settings):
        raise ConfigurationError(f"a run over several nodes {refused[0]}", where=refused[1], fix=refused[2])
    nodes = settings.nodes.model_copy(update={"rank": place.rank, "count": place.count})
    state = settings.state_dir / f"node-{place.rank}" if place.rank else settings.state_dir
    return replace(loaded, settings=settings.model_copy(update={"nodes": nodes, "state_dir": state}))


def unsupported(settings: Settings) -> tuple[str, str, str] | None:
    """What a run over several nodes cannot have: in words, where it is configured, and the fix."""
    if not settings.sync.store:
        return (
            "needs a store, which decides which attempt holds the run",
            "[sync] store",
            'set it, for example "b2://my-bucket"',
        )
    if settings.trainer.supervise == "attach":
        text = "does not support it: podwatch starts the training of each node itself"
        return text, '[trainer] supervise = "attach"', 'set supervise = "auto"'
    if settings.mode != "act":
        return "does not support it: rank 0 prepares the files for all", f'mode = "{settings.mode}"', 'set mode = "act"'
    return None


def _job_options(recovery: RecoverySettings) -> tuple[str, ...]:
    from podwatch.app.job_mode import end_grace

    grace = end_grace(recovery, os.environ)
    return ("--job", "--grace", f"{grace:g}", "--standby", f"{recovery.standby:g}")


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


def _own_command(config_path: Path | None, run_name: str, overrides: Mapping[str, object], job: bool) -> list[str]:
    command = [sys.executable, "-P", "-m", "podwatch"]
    if config_path is not None:
        command += ["--config", str(config_path)]
    if run_name:
        command += ["--run", run_name]
    command.append("run")
    if job:
        command.append("--job")
    for key, value in overrides.items():
        text = json.dumps(value) if isinstance(value, (list, tuple)) else value
        command += ["--set", f"{key}={text}"]
    return command


# -- init -------------------------------------------------------------------------------------------------------------

READY_WAIT = 30.0


def start_init(argv: list[str], *, detach: bool, log_path: Path, run_dir: Path, job: tuple[str, ...] = ()) -> int:
    """Run init for the daemon ``argv``; creates the directories of both paths.

    ``job``: init's options in job mode. With ``detach``, starts init in the background and returns 0 once the daemon is
    ready, else the daemon's exit code, after at most 30 s, with a message on stderr. Otherwise this process becomes
    init and does not return.
    """
    for directory in (run_dir, log_path.parent):
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError:
            pass  # init works without init.pid and without a log
    command = [getattr(sys, "_base_executable", "") or sys.executable, "-I", "-S", "-E", str(PROGRAM), "init"]
    command += ["--run-dir", str(run_dir)]
    if not detach:
        sys.stdout.flush()
        sys.stderr.flush()
        if job:  # kept until init has its handlers: a signal in between must not end the job with its own code
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
        os.execv(command[0], [*command, *job, "--", *argv])  # noqa: S606 - argv by design
    report_r, report_w = os.pipe()
    child = subprocess.Popen(
        [*command, "--detached", "--log", str(log_path), "--report-fd", str(report_w), "--", *argv],
        stdin=subprocess.DEVNULL,
        pass_fds=(report_w,),
        start_new_session=True,
    )
    child.wait()  # forks and ends at once
    os.close(report_w)
    return _await_report(report_r, str(log_path))


def _await_report(fd: int, log_path: str) -> int:
    said = b""
    deadline = time.monotonic() + READY_WAIT
    try:
        while b"\n" not in said:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                print(f"podwatch is starting in the background, and is not ready yet; log: {log_path}", file=sys.stderr)
                return 0
            chunk = os.read(fd, 4096)
            if not chunk:
                print(f"podwatch cannot run in the background; log: {log_path}", file=sys.stderr)
                return 1
            said += chunk
    finally:
        os.close(fd)
    word, _, number = said.decode().strip().partition(" ")
    if word == "ready":
        print(f"podwatch runs in the background (init {number}); log: {log_path}", file=sys.stderr)
        return 0
    print(f"podwatch ended before it was ready (exit code {number}); log: {log_path}", file=sys.stderr)
    for line in _tail(log_path):
        print(f"  {line}", file=sys.stderr)
    return int(number)


def _tail(path: str, count: int = 5) -> list[str]:
    try:
        with Path(path).open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - 4096))
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    # A start-up error is plain text; JSON lines can be of another podwatch that runs with the same log.
    return ([line for line in lines if not line.startswith("{")] or lines)[-count:]
