"""What job mode (`podwatch run --job`, docs/jobs.md) is to the daemon: podwatch's init is the engine's process."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from podwatch.app.variables_of_own_processes import JOB_PIPE, UNDER_INIT
from podwatch.config.settings import RecoverySettings
from podwatch.domain.engine_and_attempt import grace_seconds
from podwatch.domain.errors import Busy, HostError
from podwatch.system import procfs
from podwatch.trainer.start_and_adopt import SupervisorJob
from podwatch.trainer.supervisor_files import read_record, retire_record, was_stopped

OF_GRACE: Final = 0.85
"""Share of the engine's grace that podwatch uses: the rest is for its own exit."""
OF_SUPERVISOR: Final = 0.8
"""Share of podwatch's own grace that training gets before SIGKILL: the rest is for the last writes to the store."""


def in_job(environ: Mapping[str, str]) -> bool:
    """Whether this daemon runs under an init in job mode."""
    return environ.get(UNDER_INIT) == "job"


def end_grace(settings: RecoverySettings, environ: Mapping[str, str]) -> float:
    """Seconds from the engine's signal until podwatch kills everything: as configured, else by the engine's default."""
    return settings.end_grace if settings.end_grace is not None else OF_GRACE * grace_seconds(environ)


def supervisor_job(settings: RecoverySettings, environ: Mapping[str, str]) -> SupervisorJob | None:
    """What supervisors need in job mode; None without it. Raises HostError if init's pipe is not there."""
    if not in_job(environ):
        return None
    owner = procfs.identify(os.getppid())
    try:
        pipe = int(environ.get(JOB_PIPE, ""))
        os.set_inheritable(pipe, False)
    except (OSError, ValueError) as error:
        raise HostError(
            "job mode without the pipe of podwatch's init", fix="start it with `podwatch run --job`"
        ) from error
    if owner is None:
        raise HostError("podwatch's init has ended")
    return SupervisorJob(pipe, OF_SUPERVISOR * end_grace(settings, environ), owner)


def refuse_during_earlier_attempt(supervisor_directory: Path, job: SupervisorJob) -> None:
    """Raise Busy while the supervisor of an earlier attempt ends its training: podwatch must not take that over. (With
    another state directory, the run lock says the same at the start.) Of a start that was told to end, nothing is left
    to judge: its exit is no failure of training. Blocks."""
    record = read_record(supervisor_directory)
    if record is None or record.job_owner in (None, job.owner) or not procfs.from_here(record.supervisor):
        return
    if procfs.is_alive(record.supervisor):
        raise Busy(
            f"training of an earlier attempt is still ending here (supervisor {record.supervisor.pid})",
            fix="wait until it has ended",
        )
    if was_stopped(supervisor_directory, record.start_id):
        retire_record(supervisor_directory)
