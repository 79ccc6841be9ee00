"""The daemon's side of a supervisor: its program in the state directory, its locks, and the files that it writes."""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import marshal
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from podwatch.domain.process import ExitStatus, ProcessIdentity
from podwatch.system import procfs
from podwatch.system.files import atomic_write, fsync_dir, read_small
from podwatch.system.procfs import boot_id, pid_namespace
from podwatch.trainer import supervise

DIRECTORY: Final = "supervisor"
"""Below the run's state directory."""

# -- program of a supervisor ------------------------------------------------------------------------------------------
# Written completely, verified before use, replaced only by a complete one.
#
# An upgrade of podwatch must not pull the supervisor's code away, so each start runs a copy. The interpreter reads a
# program once, at its start. So if the disk has no room for a copy, it runs from the installed file: an upgrade in the
# milliseconds before the interpreter has read it fails that start, which is retried; afterwards nothing depends on the
# file.
#
# The copy is compiled, because parsing the source would cost the supervisor 2 MiB for as long as training lives. Not by
# ``py_compile``: on a full disk it wrote half a file and reported success.

PROGRAM: Final = Path(__file__).absolute().with_name("supervise.py")
_UNCHECKED_HASH = 1
"""Flags of PEP 552: named by a hash of the source, which Python does not compare."""
_SEAL = b"podwatch supervisor sha256 "
"""Python ignores what follows the code object. Here it is a checksum of everything before it."""


def place(directory: Path, *, compiled: bool) -> tuple[Path, str]:
    """Return the program to run, and why it is not the usual one (empty if it is). Blocks.

    ``compiled``: the supervisor runs under the same interpreter as this process. Raises OSError only if the installed
    source cannot be read, as in the middle of an upgrade, and no complete copy of an earlier start exists.
    """
    try:
        source = read_small(PROGRAM)
    except OSError as error:
        copy = directory / f"{PROGRAM.stem}.pyc"
        if compiled and is_whole(read_small(copy)):
            return copy, f"cannot read {PROGRAM}: {error.strerror}"
        raise
    problems: list[str] = []
    for target in [directory / f"{PROGRAM.stem}.pyc"] * compiled + [directory / PROGRAM.name]:
        if not _holds(target, source):
            try:
                atomic_write(target, sealed(source) if target.suffix == ".pyc" else source)
            except OSError as error:
                problems.append(f"cannot write {target}: {error.strerror}")
                continue
            if not _holds(target, source):
                problems.append(f"{target} does not hold what was written to it")
                continue
        return target, "; ".join(problems)
    return PROGRAM, "; ".join(problems)


def remove_unfinished(directory: Path) -> None:
    """Delete the partial files of a podwatch that was killed while writing: on a full disk their space is needed."""
    for pattern in (f".{PROGRAM.stem}.py*.tmp", ".wanted.*.tmp", ".start-*.tmp"):
        for path in directory.glob(pattern):
            with contextlib.suppress(OSError):
                path.unlink()


def sealed(source: bytes) -> bytes:
    """Return the compiled program, with its checksum."""
    code = compile(source, PROGRAM.name, "exec", dont_inherit=True, optimize=0)
    data = _header(source) + marshal.dumps(code)
    return data + _SEAL + hashlib.sha256(data).digest()


def is_whole(data: bytes, source: bytes | None = None) -> bool:
    """Return whether ``data`` is the complete compiled form of ``source`` (None: of any version) for this
    interpreter."""
    header = importlib.util.MAGIC_NUMBER if source is None else _header(source)
    end = len(data) - len(_SEAL) - hashlib.sha256().digest_size
    return (
        end > 0
        and data.startswith(header)
        and data[end : end + len(_SEAL)] == _SEAL
        and data[end + len(_SEAL) :] == hashlib.sha256(data[:end]).digest()
    )


def _header(source: bytes) -> bytes:
    return importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH.to_bytes(4, "little") + importlib.util.source_hash(source)


def _holds(path: Path, source: bytes) -> bool:
    try:
        found = read_small(path)
    except OSError:
        return False
    return is_whole(found, source) if path.suffix == ".pyc" else found == source


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
    argv: tuple[str, ...]
    started_wall: float
    log: str
    job_owner: ProcessIdentity | None = None

    @property
    def executed(self) -> bool:
        """Whether the command was executed; False if the supervisor died before that."""
        return (self.directory / f"executed-{self.start_id}").exists()


def read_record(directory: Path) -> SupervisorRecord | None:
    """Return the record; None if there is none, or it is malformed."""
    value = _read(directory / "record.json")
    if value is None:
        return None
    try:
        boot, namespace = str(value["boot_id"]), int(str(value["pid_namespace"]))
        argv, job = value["argv"], value.get("job")
        if not isinstance(argv, list):
            return None
        supervisor = int(str(value["supervisor"])), int(str(value["supervisor_ticks"]))
        owner = (int(str(job["owner"])), int(str(job["owner_ticks"]))) if isinstance(job, dict) else None
        return SupervisorRecord(
            directory=directory,
            run_id=str(value["run_id"]),
            start_id=str(value["start_id"]),
            supervisor=ProcessIdentity(*supervisor, boot, namespace),
            launcher=ProcessIdentity(int(str(value["pid"])), int(str(value["ticks"])), boot, namespace),
            argv=tuple(str(word) for word in argv),
            started_wall=float(str(value["started_wall"])),
            log=str(value["log"]),
            job_owner=None if owner is None else ProcessIdentity(*owner, boot, namespace),
        )
    except (KeyError, ValueError):
        return None


_PROGRAMS: Final = frozenset({"supervise.py", "supervise.pyc"})


def record_by_processes(directory: Path) -> SupervisorRecord | None:
    """Return what ``record.json`` says, as far as the living supervisor of this directory shows it: for a state
    directory that cannot be read now (its disk failed, its owner changed). Only a supervisor of our user counts.
    Blocks: reads all of /proc once."""
    supervisors: dict[int, str] = {}
    children: dict[int, list[tuple[int, int]]] = {}
    for pid in procfs.all_pids():
        status = procfs.read_stat(pid)
        if status is None or status.state in "ZXx":
            continue
        children.setdefault(status.parent_pid, []).append((status.start_ticks, pid))
        if (start_id := _start_supervised_by(pid, directory)) is not None:
            supervisors[pid] = start_id
    for supervisor, start_id in supervisors.items():
        if supervisor not in children or (identity := _identity(supervisor)) is None:
            continue
        ticks, launcher = min(children[supervisor])  # orphans of the tree are younger
        argv = procfs.command(launcher)
        found = ProcessIdentity(launcher, ticks, boot_id(), pid_namespace())
        return SupervisorRecord(directory, "", start_id, identity, found, argv, started_wall=0.0, log="")
    return None


def _start_supervised_by(pid: int, directory: Path) -> str | None:
    """Return the start id if this process is the supervisor of ``directory``."""
    argv = procfs.command(pid)
    if len(argv) < 4 or argv[-3:-1] != ("keep", str(directory)) or argv[-4].rpartition("/")[2] not in _PROGRAMS:
        return None
    try:
        return argv[-1] if Path(f"/proc/{pid}").stat().st_uid == os.geteuid() else None
    except OSError:
        return None


def _identity(pid: int) -> ProcessIdentity | None:
    status = procfs.read_stat(pid)
    return None if status is None else ProcessIdentity(pid, status.start_ticks, boot_id(), pid_namespace())


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
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            descriptor = os.open(directory / "lock", flags)
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
    try:
        value = json.loads(os.pread(descriptor, 8192, 0))
        holder = f"process {value['supervisor']} (run {value['run_id']})"
    except (OSError, ValueError, KeyError, TypeError):
        holder = "another supervisor"
    return f"training in this output directory is supervised by {holder}"


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
