"""Processes on the GPUs that do not belong to this run's training, for ``podwatch check`` and ``podwatch clean --gpu``.

Found by /proc alone: a process with a CUDA context (``/dev/nvidia-uvm`` open) or a device file. In a container NVML
reports the host's pids, so only its byte counts are used.
"""

import contextlib
import os
import pwd
import select
import signal
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podwatch.checkpoints.trainers import process_names
from podwatch.config.settings import Settings
from podwatch.domain.errors import PermissionDenied
from podwatch.domain.process import ProcessIdentity
from podwatch.domain.secrets import scrub_argv
from podwatch.domain.times import ago, gib
from podwatch.system import procfs
from podwatch.system.clock import SystemClock
from podwatch.system.procfs import boot_id, from_here, is_alive, open_pidfd, pid_namespace, send_signal
from podwatch.trainer import process_tree
from podwatch.trainer.find import read_process, users_of
from podwatch.trainer.process_roles import Roles
from podwatch.trainer.rules import is_operators
from podwatch.trainer.supervisor_files import SupervisorRecord, read_end, read_record

TERM_SECONDS, KILL_SECONDS = 10.0, 5.0
STUCK = "still running after SIGKILL: stuck in the kernel; reboot the machine"
_SERVICES = frozenset({"nvidia-persiste", "nvidia-cuda-mps", "dcgm-exporter", "nv-hostengine", "dcgmi", "Xorg"})
"""Services of the machine: they hold device files, and hardly any memory."""


@dataclass(frozen=True, slots=True)
class Stray:
    """A process on a GPU. ``context``: it has a CUDA context, so memory. ``whose``: its owner as text. ``leftover``: it
    belongs to an earlier start of this run."""

    identity: ProcessIdentity
    user: str
    started_wall: float
    command: str
    gpus: tuple[int, ...]
    context: bool
    whose: str
    leftover: bool
    interactive: bool = False
    """A notebook, a REPL or a shell: listed, never ended."""

    def __str__(self) -> str:
        return f"pid {self.identity.pid}"


@dataclass(frozen=True, slots=True)
class Found:
    """``unseen``: number of processes that podwatch has no permission to read. ``devices``: used bytes by NVML index;
    ``blind``: the reason if there are none."""

    strays: tuple[Stray, ...]
    unseen: int = 0
    devices: Mapping[int, int] | None = None
    blind: str = ""

    def to_dict(self, ended: Mapping[Stray, str]) -> dict[str, Any]:
        from podwatch.domain.times import rfc3339

        return {
            "processes": [
                {
                    "pid": s.identity.pid, "user": s.user, "started_at": rfc3339(s.started_wall), "command": s.command,
                    "gpus": list(s.gpus), "context": s.context, "whose": s.whose, "leftover": s.leftover,
                    "ended": ended.get(s), "interactive": s.interactive,
                }
                for s in self.strays
            ],
            "unseen": self.unseen,
            "devices": {str(index): used for index, used in (self.devices or {}).items()},
        }  # fmt: skip


def look(settings: Settings, *, attached: int = 0) -> Found:
    """All strays. ``attached``: the pid of a trainer that a daemon watches but did not start; 0 for none. Blocks."""
    record = read_record(settings.state_dir / settings.run_id / "supervisor")
    record = record if record is not None and from_here(record.supervisor) else None
    ours = _tree(record, attached)
    left = _left_in_session(record)
    users = users_of(settings.trainer.user)
    persons = _interactive()
    strays, unseen = [], 0
    wanted = {*settings.gpu.inference, *settings.gpu.trainer}
    for pid in procfs.all_pids():
        status = procfs.read_stat(pid)
        argv = procfs.command(pid)
        if pid in ours or pid == os.getpid() or status is None or status.state in "ZXx" or not argv:
            continue
        use = procfs.cuda_use(pid)
        if use is None:
            unseen += 1
            continue
        if status.name in _SERVICES or not (use.context or use.gpus):
            continue
        if wanted and use.gpus and not use.gpus & wanted:
            continue
        identity = ProcessIdentity(pid, status.start_ticks, boot_id(), pid_namespace())
        whose, leftover = _whose(identity, left, record, settings.run_id)
        mine = users.issuperset(procfs.users(pid) or (-1,))
        if identity in persons:
            whose = f"interactive (podwatch never ends it), {whose}"
        elif leftover and not mine:
            whose = f"{whose}, but of another user"
        leftover = leftover and mine and identity not in persons
        strays.append(
            Stray(identity, _user(pid), _started(identity), " ".join(scrub_argv(argv))[:500],
                  tuple(sorted(use.gpus)), use.context, whose, leftover, identity in persons)
        )  # fmt: skip
    return Found(tuple(sorted(strays, key=lambda s: s.identity.pid)), unseen, *_devices(wanted))


def _tree(record: SupervisorRecord | None, attached: int) -> set[int]:
    """The pids of running training: all processes below a living supervisor and trainer, or below the attached
    trainer."""
    roots = [attached] if attached else []
    if record is not None and is_alive(record.launcher):
        roots.append(record.launcher.pid)
        if is_alive(record.supervisor):
            roots.append(record.supervisor.pid)
    return {pid for root in roots for pid in (root, *procfs.descendants(root))}


def _interactive() -> frozenset[ProcessIdentity]:
    """All interactive processes on this pod, and the servers of their terminals."""
    roles = Roles(process_names())
    seen = (read_process(pid, roles) for pid in procfs.all_pids())
    return frozenset(process.identity for process in seen if process is not None and is_operators(process))


def _left_in_session(record: SupervisorRecord | None) -> frozenset[ProcessIdentity]:
    """The processes in the sessions of this run's last start. Compares identities: session numbers are reused."""
    if record is None:
        return frozenset()
    ended = read_end(record.directory, record.start_id)
    return frozenset(
        (*process_tree.in_session(record.launcher, ended), *process_tree.in_session(record.supervisor, ended))
    )


def _whose(
    identity: ProcessIdentity, left: Container[ProcessIdentity], record: SupervisorRecord | None, run_id: str
) -> tuple[str, bool]:
    """The owner as text, and whether it is a leftover. An environment marker outranks the session. A re-parented
    process of living training is not a leftover."""
    pid = identity.pid
    start = procfs.environment_value(pid, "PODWATCH_START_ID")
    run = procfs.environment_value(pid, "PODWATCH_RUN")
    living = record is not None and is_alive(record.launcher)
    if start is not None:
        if run not in (None, run_id):
            return f"belongs to run {run}, which podwatch also started", False
        if living and record is not None and start == record.start_id:
            return "belongs to the running training", False
        return "leftover of an earlier start of this run", True
    if record is not None and identity in left:
        if living:
            return "belongs to the running training", False
        return "leftover of this run's last start (same session)", True
    return "does not belong to this run", False


def _user(pid: int) -> str:
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return "?"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _started(identity: ProcessIdentity) -> float:
    return time.time() - identity.age(SystemClock().boottime())


def _devices(wanted: Iterable[int]) -> tuple[dict[int, int] | None, str]:
    """Bytes in use by GPU, or None and the reason."""
    from podwatch.cli.detect_machine import read_gpus

    chosen = set(wanted)
    try:
        found = read_gpus(10.0)
    except Exception as error:
        return None, str(error)
    known = {gpu.index: gpu.memory_used_bytes for gpu in found if not gpu.detail}
    return {n: used for n, used in known.items() if used is not None and (not chosen or n in chosen)}, ""


def line(stray: Stray) -> str:
    where = ", ".join(f"GPU {index}" for index in stray.gpus) or "a GPU"
    what = "has a CUDA context on" if stray.context else "holds the device file of"
    since = ago(time.time() - stray.started_wall)
    return f"{stray}, user {stray.user}, started {since}, {what} {where}; {stray.whose}: {stray.command[:120]}"


def describe(found: Found) -> list[str]:
    lines = [line(stray) for stray in found.strays] or ["no other process uses this run's GPUs"]
    lines += [f"GPU {index}: {gib(used)} used" for index, used in sorted((found.devices or {}).items())]
    if found.blind:
        lines.append(f"cannot read the GPUs' memory: {found.blind}")
    if found.unseen:
        some = f"{found.unseen} process" + ("" if found.unseen == 1 else "es")
        lines.append(
            f"Permission denied: cannot inspect {some}; to see all, run as root, in a container with CAP_SYS_PTRACE"
        )
    return lines


def end(strays: Sequence[Stray], *, term: float = TERM_SECONDS, kill: float = KILL_SECONDS) -> dict[Stray, str]:
    """Send SIGTERM to these processes, SIGKILL after ``term`` seconds. Returns how each ended, as text. Uses pidfds, so
    that a reused pid is never signalled."""
    result: dict[Stray, str] = {}
    waiting: dict[Stray, int] = {}
    try:
        persons = _interactive()
        for stray in strays:
            if stray.identity in persons:
                result[stray] = "not ended: it is interactive"
                continue
            descriptor = open_pidfd(stray.identity)
            if descriptor is None:
                result[stray] = "had already ended"
                continue
            waiting[stray] = descriptor
            try:
                send_signal(stray.identity, signal.SIGTERM)
            except PermissionDenied as error:
                result[stray] = str(error)
                os.close(waiting.pop(stray))
        for number, seconds, said in ((0, term, "ended"), (signal.SIGKILL, kill, "killed")):
            for stray in waiting if number else ():
                with contextlib.suppress(PermissionDenied):
                    send_signal(stray.identity, number)
            _await(waiting, result, seconds, said)
        result.update(dict.fromkeys(waiting, STUCK))
    finally:
        for descriptor in waiting.values():
            os.close(descriptor)
    return {stray: result[stray] for stray in strays if stray in result}


def _await(waiting: dict[Stray, int], result: dict[Stray, str], seconds: float, said: str) -> None:
    deadline = time.monotonic() + seconds
    while waiting and (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select(list(waiting.values()), [], [], left)
        for stray in [s for s, descriptor in waiting.items() if descriptor in ready]:
            os.close(waiting.pop(stray))
            result[stray] = said
