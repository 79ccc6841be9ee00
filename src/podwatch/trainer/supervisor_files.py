"""The daemon's side of a supervisor: its program in the state directory, its locks, and the files that it writes."""

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from podwatch.domain.process import ExitStatus, ProcessIdentity
from podwatch.system import procfs
from podwatch.system.files import atomic_write, fsync_dir, read_small
from podwatch.trainer import supervise

DIRECTORY: Final = "supervisor"
"""Below the run's state directory."""
_LOCK_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

# -- program of a supervisor ------------------------------------------------------------------------------------------

PROGRAM: Final = Path(__file__).absolute().with_name("supervise.py")


def place(directory: Path) -> tuple[Path, str]:
    """Return the program to run, and why it is not the usual one (empty if it is). Blocks.

    Each start runs a copy in ``directory``, so that an upgrade of podwatch does not pull the supervisor's code away.
    Without room for a copy it runs from the installed file, which the interpreter reads once, at its start. Raises
    OSError if neither can be read.
    """
    copy = directory / PROGRAM.name
    try:
        source = read_small(PROGRAM)
    except OSError as error:  # in the middle of an upgrade
        return (copy, f"cannot read {PROGRAM}: {error.strerror}") if read_small(copy) else (PROGRAM, "")
    try:
        if not _holds(copy, source):
            atomic_write(copy, source)
    except OSError as error:
        return PROGRAM, f"cannot write {copy}: {error.strerror}"
    return (copy, "") if _holds(copy, source) else (PROGRAM, f"{copy} does not hold what was written to it")


def _holds(path: Path, source: bytes) -> bool:
    try:
        return read_small(path) == source
    except OSError:
        return False


def remove_unfinished(directory: Path) -> None:
    """Delete the partial files of a podwatch that was killed while writing: on a full disk their space is needed."""
    for pattern in (f".{PROGRAM.name}.*.tmp", ".wanted.*.tmp", ".start-*.tmp"):
        for path in directory.glob(pattern):
            with contextlib.suppress(OSError):
                path.unlink()


# -- files of a supervisor -------------------------------------------------------------------------------------------
# The format is in supervise.py, "Files in DIRECTORY".


@dataclass(frozen=True, slots=True)
class SupervisorRecord:
    """``record.json``: the started trainer and its supervisor. ``directory`` is the supervisor's. ``job_owner``: in job
    mode, podwatch's init, with which the supervisor ends."""

    directory: Path
    run_id: str
    start_id: str
    supervisor: ProcessIdentity
    launcher: ProcessIdentity
    job_owner: ProcessIdentity | None = None

    @property
    def executed(self) -> bool:
        """Whether the command was executed; False if the supervisor died before that."""
        return (self.directory / f"executed-{self.start_id}").exists()

    @property
    def over(self) -> bool:
        """Whether it was recorded that nothing of the tree lives."""
        return os.path.exists(self.directory / f"ended-{self.start_id}")  # noqa: PTH110 - False where it cannot be read


def read_record(directory: Path) -> SupervisorRecord | None:
    """Return the record; None if there is none, or it is malformed. Raises OSError if it cannot be read, which proves
    nothing."""
    return _record_of(_read(directory / "record.json"), directory)


def record_in_lock(directory: Path) -> SupervisorRecord | None:
    """Return the copy of the record that the last holder of the lock file in ``directory`` wrote into it; None if there
    is none, or another user can have made the file."""
    try:
        descriptor = os.open(directory / "lock", _LOCK_FLAGS)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid not in (0, os.geteuid()):
            return None
        return _record_of(supervise.lock_owner(descriptor), None)
    finally:
        os.close(descriptor)


def _record_of(value: Mapping[str, object] | None, directory: Path | None) -> SupervisorRecord | None:
    """``directory``: of the supervisor; None: where the record says."""
    if value is None:
        return None
    try:
        boot, namespace = str(value["boot_id"]), int(str(value["pid_namespace"]))
        job = value.get("job")
        supervisor = int(str(value["supervisor"])), int(str(value["supervisor_ticks"]))
        owner = (int(str(job["owner"])), int(str(job["owner_ticks"]))) if isinstance(job, dict) else None
        return SupervisorRecord(
            directory=Path(str(value["directory"])) if directory is None else directory,
            run_id=str(value["run_id"]),
            start_id=str(value["start_id"]),
            supervisor=ProcessIdentity(*supervisor, boot, namespace),
            launcher=ProcessIdentity(int(str(value["pid"])), int(str(value["ticks"])), boot, namespace),
            job_owner=None if owner is None else ProcessIdentity(*owner, boot, namespace),
        )
    except (KeyError, ValueError):
        return None


def open_starts(directories: Iterable[Path]) -> tuple[SupervisorRecord, ...]:
    """Return the starts of this boot that a record or a lock in these directories names, whose supervisor was killed
    before it recorded their end: processes of them may live. Blocks."""
    found = {}
    for directory in directories:
        for record in (record_in_lock(directory), _readable_record(directory)):
            if record is None or not procfs.from_here(record.launcher) or procfs.is_alive(record.supervisor):
                continue  # a living one holds the locks
            if not record.over:
                found[record.start_id] = record
    return tuple(found.values())


def _readable_record(directory: Path) -> SupervisorRecord | None:
    try:
        return read_record(directory)
    except OSError:
        return None


def read_exit(directory: Path, start_id: str) -> ExitStatus | None:
    """Return how the launcher of this start ended; None if no supervisor recorded it."""
    value = _read(directory / f"exit-{start_id}.json")
    return None if value is None else _exit_status(value)


def was_stopped(directory: Path, start_id: str) -> bool:
    """Return whether the supervisor had been asked to stop the tree before its launcher ended."""
    return (_read(directory / f"exit-{start_id}.json") or {}).get("stopped") is True


def read_end(directory: Path, start_id: str) -> float | None:
    """Return the seconds since boot at which the launcher of this start ended; None if no supervisor recorded it."""
    at = (_read(directory / f"exit-{start_id}.json") or {}).get("at_boot")
    return at if isinstance(at, float) else None


def read_result(directory: Path, start_id: str) -> dict[str, object] | None:
    """Return the supervisor's answer to a start; None before there is one."""
    return _read(directory / f"result-{start_id}.json")


@dataclass(frozen=True, slots=True)
class SupervisorState:
    """``state-START_ID.json``. ``warnings``: problems that did not prevent the start. ``ended``: how processes ended
    that the supervisor itself reaped, by (pid, start ticks): their own parent had ended before."""

    warnings: tuple[str, ...] = ()
    ended: Mapping[tuple[int, int], ExitStatus] = field(default_factory=dict)


def read_state(directory: Path, start_id: str) -> SupervisorState | None:
    """Return what the supervisor shows of this start; None if it is missing, or torn: it is rewritten in place."""
    value = _read(directory / f"state-{start_id}.json")
    if value is None:
        return None
    try:
        warnings, ends = value.get("warnings", []), value.get("ends", [])
        if not isinstance(warnings, list) or not isinstance(ends, list):
            return None
        ended = {(int(end["pid"]), int(end["ticks"])): _exit_status(end) for end in ends}
    except (KeyError, TypeError, ValueError):
        return None
    return SupervisorState(tuple(str(text) for text in warnings), ended)


def _exit_status(value: Mapping[str, object]) -> ExitStatus:
    code, number, at = value.get("code"), value.get("signal"), value.get("at_wall")
    return ExitStatus(
        code=code if isinstance(code, int) else None,
        signal=number if isinstance(number, int) else None,
        at_wall=at if isinstance(at, float) else 0.0,
    )


def lock_holder(directories: Iterable[Path], output_dir: Path | None = None, *, shared: bool = False) -> str:
    """Return who holds the lock of a supervisor in one of these directories, or on output_dir itself, as a sentence;
    empty if nobody does. ``shared``: other nodes of the run may hold the latter. Neither keeps nor creates anything.
    Blocks."""
    if output_dir is not None and (held := _output_holder(output_dir, shared=shared)):
        return held
    for directory in directories:
        try:
            descriptor = os.open(directory / "lock", _LOCK_FLAGS)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _held_by(descriptor)
        except OSError:
            continue  # where it cannot be locked, a start warns
        finally:
            os.close(descriptor)
    return ""


def _output_holder(output_dir: Path, *, shared: bool) -> str:
    try:
        os.close(supervise.lock_output(str(output_dir), fcntl.LOCK_SH if shared else fcntl.LOCK_EX))
    except supervise.StartRefusedError as held:
        return held.text
    except OSError:
        pass  # a start warns
    return ""


def _held_by(descriptor: int) -> str:
    value = supervise.lock_owner(descriptor)
    by = f"process {value.get('supervisor')} (run {value.get('run_id')})" if value else "another supervisor"
    return f"training in this output directory is supervised by {by}"


def retire_record(directory: Path) -> None:
    """Move the record away after its trainer has ended and that was noted. A rename needs no space."""
    with contextlib.suppress(FileNotFoundError):
        (directory / "record.json").rename(directory / "record.last.json")
        fsync_dir(directory)


def _read(path: Path) -> dict[str, object] | None:
    """Return the JSON object; None if the file is missing or malformed. Raises OSError if it cannot be read, which
    proves nothing about the content."""
    try:
        value = json.loads(read_small(path))
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None
