"""Who is on the GPUs and does not belong to this run's training: for ``podwatch check`` and ``podwatch clean --gpu``.

By /proc alone: a process with a CUDA context (``/dev/nvidia-uvm`` open) or a device file. NVML's pids are those of the
host inside a container, so only its bytes are used (facts/prime-rl.md section 5).
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

from podwatch.client.times import ago, gib
from podwatch.config.settings import Settings
from podwatch.domain.errors import PermissionDenied
from podwatch.domain.process import ProcessIdentity
from podwatch.domain.secrets import scrub_argv
from podwatch.system import procfs
from podwatch.system.clock import SystemClock
from podwatch.system.identity import boot_id, from_here, is_alive, open_pidfd, pid_namespace, send_signal
from podwatch.trainer import tree
from podwatch.trainer.find import users_of
from podwatch.trainer.interactive import find_interactive, terminal_server
from podwatch.trainer.processes import read
from podwatch.trainer.records import KeeperRecord, read_end, read_record

TERM_SECONDS, KILL_SECONDS = 10.0, 5.0
STUCK = "still there after SIGKILL: stuck in the kernel; only a reboot helps"
_SERVICES = frozenset({"nvidia-persiste", "nvidia-cuda-mps", "dcgm-exporter", "nv-hostengine", "dcgmi", "Xorg"})
"""They belong to the machine, hold device files and next to no memory."""


@dataclass(frozen=True, slots=True)
class Stray:
    """``context``: a CUDA context, so memory. ``whose`` in words; ``leftover``: of an earlier start of this run."""

    identity: ProcessIdentity
    user: str
    started_wall: float
    command: str
    gpus: tuple[int, ...]
    context: bool
    whose: str
    leftover: bool
    interactive: bool = False
    """A notebook, a REPL, a shell: listed, and never ended from here."""

    def __str__(self) -> str:
        return f"pid {self.identity.pid}"


@dataclass(frozen=True, slots=True)
class Found:
    """``unseen``: how many processes podwatch has no permission to read. ``devices``: used bytes by NVML index;
    ``blind``: why there are none."""

    strays: tuple[Stray, ...]
    unseen: int = 0
    devices: Mapping[int, int] | None = None
    blind: str = ""

    def to_dict(self, ended: Mapping[Stray, str]) -> dict[str, Any]:
        from podwatch.client.times import rfc3339

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
    """``attached``: the pid of a trainer that a daemon watches without having started it. Blocks."""
    record = read_record(settings.state_dir / settings.run_id / "keeper")
    record = record if record is not None and from_here(record.keeper) else None
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
            whose = f"interactive, so podwatch never ends it; {whose}"
        elif leftover and not mine:
            whose = f"{whose}, but of a user who does not train here"
        leftover = leftover and mine and identity not in persons
        strays.append(
            Stray(identity, _user(pid), _started(identity), " ".join(scrub_argv(argv))[:500],
                  tuple(sorted(use.gpus)), use.context, whose, leftover, identity in persons)
        )  # fmt: skip
    return Found(tuple(sorted(strays, key=lambda s: s.identity.pid)), unseen, *_devices(wanted))


def _tree(record: KeeperRecord | None, attached: int) -> set[int]:
    """What trains now: everything below a living keeper whose trainer lives, or below what a daemon is attached to."""
    roots = [attached] if attached else []
    if record is not None and is_alive(record.launcher):
        roots.append(record.launcher.pid)
        if is_alive(record.keeper):
            roots.append(record.keeper.pid)
    return {pid for root in roots for pid in (root, *procfs.descendants(root))}


def _interactive() -> frozenset[ProcessIdentity]:
    """Everything on this pod that an operator sits at, and the servers of their terminals."""
    seen = [found for pid in procfs.all_pids() if (found := read(pid)) is not None]
    pids = find_interactive(seen)
    return frozenset(p.identity for p in seen if p.pid in pids or terminal_server(p))


def _left_in_session(record: KeeperRecord | None) -> frozenset[ProcessIdentity]:
    """What is in the sessions of this run's last start. Their numbers may be another process's by now."""
    if record is None:
        return frozenset()
    ended = read_end(record.directory, record.start_id)
    return frozenset((*tree.in_session(record.launcher, ended), *tree.in_session(record.keeper, ended)))


def _whose(
    identity: ProcessIdentity, left: Container[ProcessIdentity], record: KeeperRecord | None, run_id: str
) -> tuple[str, bool]:
    """A marker that is there beats the session; a living trainer's own stray (re-parented) is no leftover."""
    pid = identity.pid
    start = procfs.environment_value(pid, "PODWATCH_START_ID")
    run = procfs.environment_value(pid, "PODWATCH_RUN")
    living = record is not None and is_alive(record.launcher)
    if start is not None:
        if run not in (None, run_id):
            return f"of run {run}, which podwatch started too", False
        if living and record is not None and start == record.start_id:
            return "of the training that runs", False
        return "left over from an earlier start of this run", True
    if record is not None and identity in left:
        if living:
            return "of the training that runs", False
        return "left over: it is in the session of this run's last start", True
    return "not of this run", False


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
    """Bytes in use by GPU; None and the reason where they cannot be read."""
    from podwatch.cli.doctoring.gpus import read_gpus

    chosen = set(wanted)
    try:
        found = read_gpus(10.0)
    except Exception as error:
        return None, str(error)
    return {gpu.index: gpu.used for gpu in found if not gpu.problem and (not chosen or gpu.index in chosen)}, ""


def line(stray: Stray) -> str:
    where = ", ".join(f"GPU {index}" for index in stray.gpus) or "a GPU"
    what = "has a CUDA context on" if stray.context else "holds the device file of"
    since = ago(time.time() - stray.started_wall)
    return f"{stray}, user {stray.user}, since {since}, {what} {where}; {stray.whose}: {stray.command[:120]}"


def describe(found: Found) -> list[str]:
    lines = [line(stray) for stray in found.strays] or ["nothing else is on this run's GPUs"]
    lines += [f"GPU {index}: {gib(used)} used" for index, used in sorted((found.devices or {}).items())]
    if found.blind:
        lines.append(f"the GPUs' memory cannot be read: {found.blind}")
    if found.unseen:
        some = f"{found.unseen} process" + ("" if found.unseen == 1 else "es")
        lines.append(f"{some} may not be looked into: run as root, in a container with CAP_SYS_PTRACE, to see all")
    return lines


def end(strays: Sequence[Stray], *, term: float = TERM_SECONDS, kill: float = KILL_SECONDS) -> dict[Stray, str]:
    """SIGTERM to exactly these, SIGKILL after ``term`` seconds; how each ended, in words. By pidfd: never a stranger
    that got the same pid."""
    result: dict[Stray, str] = {}
    waiting: dict[Stray, int] = {}
    try:
        persons = _interactive()
        for stray in strays:
            if stray.identity in persons:
                result[stray] = "is interactive: podwatch leaves it alone"
                continue
            descriptor = open_pidfd(stray.identity)
            if descriptor is None:
                result[stray] = "had ended already"
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
