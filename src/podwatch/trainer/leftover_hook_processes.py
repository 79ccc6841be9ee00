"""Processes of hooks and evaluations that lost their worker process: found by a mark, and ended.

A worker (hooks/child_main.py) ends everything below it, and the process above it does so if the worker is killed. If
both are, the worker's grandchildren live on. So each run of a command has a random token: in the environment of all its
processes (``NAME``), and as a record in the worker's lock file for as long as the run has not ended completely. A
process belongs to a run only if token, user, boot and start time agree with that record. Terminals never do, nor
anything that runs below or on one: an operator who repeats an evaluation by hand has its environment, too.

``left`` is pure. Everything else here reads /proc and blocks.
"""

import contextlib
import json
import os
import signal
import stat
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from podwatch.domain.errors import PermissionDenied
from podwatch.domain.process import ProcessIdentity
from podwatch.system import procfs
from podwatch.trainer.operator_shells import children_of, find_interactive, of_users, terminal_server
from podwatch.trainer.process_roles import Roles
from podwatch.trainer.process_tree import Process, read

NAME: Final = "PODWATCH_CHILD"
"""Variable of each process of a hook or an evaluation: ``TOKEN:PATH`` of the lock file with the record."""
START: Final = "PODWATCH_START_ID"
"""Variable of each process of a keeper's tree."""
WORKER_SECONDS: Final = 3.0
"""A worker whose podwatch has ended ends its command within about a second; one that takes longer is killed."""
END_SECONDS: Final = 10.0
"""For processes that SIGKILL does not end at once."""
POLL: Final = 0.02
_RECORD_BYTES: Final = 4096
_ALWAYS: Final = frozenset({"PATH", "HOME"})


@dataclass(frozen=True, slots=True)
class Record:
    """A run of a command that has not ended completely. ``owner`` is the podwatch process that started it, ``command``
    the first process of the command, None if it had not started yet. ``users``: whose processes it can consist of."""

    token: str
    owner: ProcessIdentity
    worker: ProcessIdentity
    command: ProcessIdentity | None
    users: frozenset[int]

    @property
    def since(self) -> int:
        """Start ticks of its oldest possible process."""
        return self.worker.start_ticks


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look at all processes found: ``own`` belong to the run, ``spared`` only have its mark."""

    own: tuple[ProcessIdentity, ...] = ()
    spared: tuple[ProcessIdentity, ...] = ()


def lock_files(state: Path) -> list[Path]:
    """The lock files of the hooks and evaluations in a run's state directory."""
    return [state / "evaluation.lock", *sorted((state / "hooks").glob("*.lock"))]


def read_record(path: Path) -> Record | None:
    """The record in this lock file; None if the last run ended completely, if it is of another boot or container, or if
    the file is not ours."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
            return None
        return _record(json.loads(os.read(descriptor, _RECORD_BYTES)))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    finally:
        os.close(descriptor)


def _record(said: Mapping[str, object]) -> Record | None:
    boot, namespace = said["boot_id"], said["pid_namespace"]
    if not isinstance(boot, str) or not isinstance(namespace, int):
        return None

    def identity(key: str) -> ProcessIdentity | None:
        value = said.get(key)
        if not isinstance(value, list) or [type(one) for one in value] != [int, int]:
            return None
        return ProcessIdentity(value[0], value[1], boot, namespace)

    owner, worker, token, users = identity("owner"), identity("worker"), said["token"], said["users"]
    if owner is None or worker is None or not isinstance(token, str) or len(token) < 16 or not isinstance(users, list):
        return None
    found = Record(token, owner, worker, identity("command"), frozenset(int(user) for user in users))
    return found if procfs.from_here(worker) else None


def left(processes: Collection[Process], record: Record, marked: Mapping[int, int]) -> Seen:
    """Which of these processes belong to the run. ``marked``: pid -> start ticks of those that have its mark.

    With a marked process those below it count, because a program can drop its environment. A process on a terminal, an
    interactive one and a terminal's server are never part of it, nor is anything below them, nor a keeper's tree
    (``ours``). PID 1 and podwatch's own ancestors say nothing about those below them, because they adopt orphans; nor
    does anything above the run's own worker."""
    by_pid = {p.pid: p for p in processes}
    below = children_of(processes)
    interactive = find_interactive(processes)

    def above(process: Process) -> list[Process]:
        found = [process]
        parent = by_pid.get(process.parent_pid)
        while parent is not None and parent.pid != 1 and not parent.above_us and parent not in found:
            if parent.identity == record.worker:
                break
            found.append(parent)
            parent = by_pid.get(parent.parent_pid)
        return found

    def spares(process: Process) -> bool:
        if process.pid == 1 or process.above_us or process.tty != 0:
            return True
        return any(p.ours or p.pid in interactive or terminal_server(p) for p in above(process))

    def fits(process: Process) -> bool:
        return process.identity.start_ticks >= record.since and of_users(process, record.users)

    own: dict[int, ProcessIdentity] = {}
    spared: dict[int, ProcessIdentity] = {}
    queue = [
        by_pid[pid] for pid, ticks in marked.items() if pid in by_pid and by_pid[pid].identity.start_ticks == ticks
    ]
    while queue:
        process = queue.pop()
        if process.pid in own or process.pid in spared:
            continue
        if not fits(process) or spares(process):
            spared[process.pid] = process.identity
            continue
        own[process.pid] = process.identity
        queue.extend(below.get(process.pid, ()))
    return Seen(tuple(own[pid] for pid in sorted(own)), tuple(spared[pid] for pid in sorted(spared)))


def parse(value: str) -> tuple[str, str]:
    """(token, path of the lock file) of a mark; both empty if it is none."""
    token, _, path = value.partition(":")
    return (token, path) if token and path.startswith("/") else ("", "")


def of_commands(processes: Sequence[Process], marks: Mapping[int, str], state: Path | None) -> set[int]:
    """The pids among ``processes`` that belong to a hook or an evaluation of any run, whose record proves it.
    ``marks``: pid -> value of ``NAME``. ``state``: this run's state directory."""
    records = {record.token: record for path in lock_files(state) if (record := read_record(path))} if state else {}
    for pid in marks:
        token, path = parse(marks[pid])
        if token and token not in records and (record := read_record(Path(path))) and record.token == token:
            records[token] = record
    found: set[int] = set()
    for record in records.values():
        marked = {
            p.pid: p.identity.start_ticks
            for p in processes
            if parse(marks.get(p.pid, ""))[0] == record.token or _titled_member(p, record)
        }
        found.update(one.pid for one in left(processes, record, marked).own)
    return found


def _titled_member(process: Process, record: Record) -> bool:
    """A member of the command's session that wrote its title over its environment, as vLLM's engine does."""
    leader = record.command
    if leader is None or process.session != leader.pid or process.identity.start_ticks < leader.start_ticks:
        return False
    if procfs.start_ticks(leader.pid) not in (None, leader.start_ticks):
        return False  # the number was given to another process: this is another session
    names = procfs.environment_names(process.pid)
    return names is not None and not _ALWAYS & names


def look(record: Record) -> Seen:
    """Look at all processes once."""
    own = os.getpid()
    above = _ancestors(own)
    roles = Roles(())
    found: list[Process] = []
    marked: dict[int, int] = {}
    for pid in procfs.all_pids():
        process = None if pid == own else read(pid, roles)
        if process is None:
            continue
        values = procfs.environment_values(pid, (NAME, START))
        process = replace(process, ours=START in values, above_us=pid in above)
        found.append(process)
        if parse(values.get(NAME, ""))[0] == record.token or _titled_member(process, record):
            marked[pid] = process.identity.start_ticks
    return left(found, record, marked)


def _ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    status = procfs.read_stat(pid)
    while status is not None and status.parent_pid not in (0, *found):
        found.add(status.parent_pid)
        status = procfs.read_stat(status.parent_pid)
    return found


def end_left(record: Record, within: float = END_SECONDS) -> Seen:
    """End what is left of this run with SIGKILL, for at most ``within`` seconds; returns what was signalled, and what
    was spared."""
    until = time.monotonic() + within
    ended: dict[int, ProcessIdentity] = {}
    while True:
        seen = look(record)
        if not seen.own or time.monotonic() >= until:
            return Seen(tuple(ended.values()), seen.spared)
        for one in seen.own:
            ended[one.pid] = one
            try:
                procfs.send_signal(one, signal.SIGKILL)
            except PermissionDenied:
                continue
        time.sleep(POLL)


def end_run(path: Path, record: Record) -> Seen:
    """End what is left of the run of this record, and then delete the record; returns what was ended and spared."""
    seen = end_left(record)
    if not any(procfs.is_alive(one) for one in seen.own) and read_record(path) == record:
        with contextlib.suppress(OSError):
            os.truncate(path, 0)
    return seen


def end_interrupted(state: Path) -> list[str]:
    """End what hooks and evaluations of an ended podwatch left; returns what was done, as text. ``state``: the run's
    state directory, whose lock the caller holds. A run whose podwatch process lives is left alone: `podwatch hooks
    run`."""
    done = []
    for path in lock_files(state):
        record = read_record(path)
        if record is None or procfs.is_alive(record.owner):
            continue
        _await_worker(record)
        seen = end_run(path, record)
        if seen.own:
            done.append(f"podwatch ended what an interrupted run of {path.stem} left: {_pids(seen.own)}")
        if seen.spared:
            text = f"an interrupted run of {path.stem} left terminals or processes on one: {_pids(seen.spared)}"
            done.append(f"{text}; podwatch never ends those. End those that you do not need")
    return done


def _pids(processes: Sequence[ProcessIdentity]) -> str:
    text = ", ".join(str(one.pid) for one in processes[:5])
    return f"processes {text}{' ...' if len(processes) > 5 else ''}"


def _await_worker(record: Record) -> None:
    until = time.monotonic() + WORKER_SECONDS
    while procfs.is_alive(record.worker):
        if time.monotonic() >= until:
            procfs.send_signal(record.worker, signal.SIGKILL)
            return
        time.sleep(POLL)
