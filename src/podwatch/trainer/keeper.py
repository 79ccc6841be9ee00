# ruff: noqa: PTH101, PTH102, PTH103, PTH104, PTH108, PTH109, PTH115, PTH116, PTH118, PTH120, PTH123, PTH208
# pathlib would cost this process memory for as long as training lives.
"""The keeper: the small, long-lived parent process of one training run.

One long file, standard library only, no podwatch import: each start copies it into the run's state directory and runs
the copy as ``python -I -S -E keeper.py DIRECTORY START_ID``, so that an upgrade of podwatch cannot pull its code away.
Everything it needs is imported at the start. podwatch can crash, stop or be upgraded at any moment; training does not
notice.

Contents:
  constants
  procfs                     single processes, their signals, trees and terminals
  bounded reads              reads of processes that may be stuck in the kernel
  files and locks            small files, the run locks: RunLocks
  survivors                  no start beside what an earlier keeper left running
  log                        the trainer's output file: Log
  child                      from the fork to the exec of the command
  exit record                ExitRecord: how the launcher ended
  tree                       TreeReaper: lists, signals, stops and reaps the process tree
  control socket             ControlSocket: requests of podwatch
  keeper                     Keeper: owns these; start, loop, answers
  main

Files in DIRECTORY (mode 0700), all of them small:
  wanted                     the only start_id that can start now; a late keeper of an older start gives up
  spec-START_ID.json         what to start, environment included; deleted as soon as it is read
  record.json                who runs: fsynced before the trainer can execute; "record.last.json" once released
  executed-START_ID          exists once the command was executed
  exit-START_ID.json         how the launcher ended; its space is reserved at the start, so a full disk cannot lose it
  result-START_ID.json       the answer to the start request
  k.sock                     JSON lines, see ``Keeper.answer``

Start: take the locks; refuse if a trainer of an earlier keeper still lives; fork a child that blocks on a pipe; write
the record and fsync it; release the child with one byte. If the keeper dies before that, the child reads end of file
and exits without executing anything. So a process that holds the locks and reads the record knows every trainer.

In job mode (the start request has a "job"; docs/jobs.md) the keeper ends with its owner, podwatch's init: it holds the
read end of a pipe of which init alone holds the other end. End of file means that the job is over, or that init was
killed: SIGTERM to the tree, SIGKILL after the job's grace. The record names the owner.

Output: the trainer itself appends to its log file (O_APPEND) and the keeper rotates by copying and truncating. With a
pipe through the keeper, a killed keeper would take training with it (SIGPIPE), and a stuck one would block it. The
cost: a rotation can lose a few lines. The keeper reserves space ahead of the end of the file, so that a full disk does
not fail the trainer's prints, and truncates the file when even that space is used up.
"""

from __future__ import annotations

import _thread
import ctypes
import errno
import fcntl
import json
import os
import pwd
import resource
import select
import signal
import socket
import stat
import sys
import time
import warnings  # noqa: F401 - os.execvpe imports it: in the child, perhaps after the library was upgraded away

# --- constants --------------------------------------------------------------------------------------------------------

PROTOCOL = 1
PR_SET_CHILD_SUBREAPER = 36
FALLOC_FL_KEEP_SIZE = 1
EXIT_SPACE = 4096
MAX_CLIENTS = 16
MAX_LINE = 65_536
MAX_ENDED = 256
TICK = 1.0
PROC = "/proc"
READ_PATIENCE = 0.25
READ_DEADLINE = 2.0
"""Seconds for one read of a process, and for all reads of one answer: podwatch waits 3 s for the answer."""
EXEC_LOOKS, EXEC_PAUSE = 8, 0.01
KTHREADD = 2
"""Pid of the parent of all kernel threads. In a container, where those are invisible, it is at worst one process."""
MAX_HUNG = 16
"""Reads that can hang at the same time, each in its own thread; beyond that no process is read."""
SWEEP_DEADLINE = 5.0
SURVIVOR_DEADLINE = 20.0
"""Seconds that a start waits for processes that cannot be read; podwatch waits 30 s for the start."""

TYPE_CHECKING = False
if TYPE_CHECKING:  # the real typing module would cost memory for as long as training lives
    from collections.abc import Callable, Iterable
    from typing import Any, NoReturn, Protocol

    Look = Callable[[int], Any]
    """A read of one process, which can hang."""

    class Answers(Protocol):
        def answer(self, request: dict[str, Any]) -> dict[str, Any]: ...


_libc = ctypes.CDLL(None, use_errno=True)


class StartError(Exception):
    """The start did not happen. ``kind`` tells podwatch which error to raise."""

    def __init__(self, kind: str, text: str, code: int = 0, where: str = "") -> None:
        super().__init__(text)
        self.kind, self.text, self.code, self.where = kind, text, code, where


class Warnings:
    """The texts that podwatch shows of this start, each of them once."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def add(self, text: str) -> None:
        if text not in self.texts:
            self.texts.append(text)


# --- procfs -----------------------------------------------------------------------------------------------------------


def stat_of(pid: int) -> tuple[str, str, int, int, int] | None:
    """Return (name, state, parent pid, start ticks, session) or None. The name can contain spaces and parentheses.
    Never blocks, whatever the process is stuck in."""
    raw = read_file(f"{PROC}/{pid}/stat")
    if not raw:
        return None
    text = raw.decode("utf-8", "replace")
    rest = text[text.rindex(")") + 2 :].split()
    return text[text.index("(") + 1 : text.rindex(")")], rest[0], int(rest[1]), int(rest[19]), int(rest[3])


def ticks_of(pid: int) -> int:
    """Return the start ticks of this process or its child, which must exist."""
    found = stat_of(pid)
    if found is None:
        raise StartError("io", "/proc cannot be read", errno.ENOENT, f"{PROC}/{pid}/stat")
    return found[3]


def boot_id() -> str:
    return (read_file("/proc/sys/kernel/random/boot_id") or b"").decode().strip()


def pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def is_alive(pid: int, ticks: int) -> bool:
    found = stat_of(pid)
    return found is not None and found[3] == ticks and found[1] not in "ZXx"


def send_signal(pid: int, ticks: int, number: int) -> bool:
    """Send by pidfd, after comparing the ticks. Return whether the signal was sent."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        found = stat_of(pid)
        if found is None or found[3] != ticks:
            return False
        signal.pidfd_send_signal(fd, number)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    try:
        threads = os.listdir(f"{PROC}/{pid}/task")
    except OSError:
        return found
    known = False
    for thread in threads:
        raw = read_file(f"{PROC}/{pid}/task/{thread}/children")
        if raw is not None:
            known = True
            found.extend(int(word) for word in raw.split())
    if known or not threads:
        return found
    for name in os.listdir(PROC):  # a kernel without CONFIG_PROC_CHILDREN
        if name.isdigit():
            status = stat_of(int(name))
            if status is not None and status[2] == pid:
                found.append(int(name))
    return found


def descendants_of(pid: int) -> list[int]:
    order, queue, seen = [], [pid], {pid}
    while queue:
        for child in children_of(queue.pop(0)):
            if child not in seen:
                seen.add(child)
                order.append(child)
                queue.append(child)
    return order


TERMINAL_SERVERS = frozenset(
    {"tmux", "tmate", "screen", "zellij", "dtach", "abduco", "sshd", "sshd-session", "dropbear", "mosh-server", "ttyd",
     "gotty", "code-server", "jupyter", "jupyter-lab", "jupyter-noteboo", "jupyter-server", "jupyterhub",
     "jupyterhub-sing", "marimo"}
)  # fmt: skip
"""By the kernel's names, which it cuts to 15 characters."""
SHELLS = frozenset(
    {"sh", "bash", "rbash", "dash", "ash", "zsh", "ksh", "mksh", "fish", "csh", "tcsh", "nu", "pwsh", "xonsh", "elvish"}
)
SHELL_VALUES = frozenset({"--rcfile", "--init-file", "--config", "--init-command", "-o", "+o", "-O", "+O", "-C"})


def operators(pids: list[int]) -> set[int]:
    """Return those of ``pids`` that belong to an operator's terminal: a terminal server, and below it each shell that
    waits for commands and each notebook kernel, with everything in them. They are never signalled and do not block a
    start, even though the training command started the server. Costs one read each if there is no server. The daemon
    judges more finely (``operator_shells.served``)."""
    seen = {pid: found for pid in pids if (found := stat_of(pid)) is not None and found[1] not in "ZXx"}
    servers = {pid for pid, found in seen.items() if found[0].split(":")[0].lower() in TERMINAL_SERVERS}
    apart: set[int] = set()
    for pid in seen if servers else ():
        chain = [pid]
        while chain[-1] in seen and seen[chain[-1]][2] not in chain:
            chain.append(seen[chain[-1]][2])
        top = next((n for n, above in enumerate(chain) if above in servers), 0)
        if any(awaits_commands(above) for above in chain[:top]):
            apart.update((pid, *(above for above in chain if above in servers)))
    return apart


def awaits_commands(pid: int) -> bool:
    """Return whether it is a shell on a terminal without a script and without ``-c``, or a notebook's kernel."""
    words = (read_file(f"{PROC}/{pid}/cmdline") or b"").decode("utf-8", "replace").rstrip("\0").split("\0")
    if any("ipykernel" in word for word in words[:4]):
        return True
    raw = (read_file(f"{PROC}/{pid}/stat") or b"").decode("utf-8", "replace")
    if words[0].lstrip("-").rpartition("/")[2] not in SHELLS or raw[raw.rfind(")") + 2 :].split()[4:5] in ([], ["0"]):
        return False
    rest = [word for n, word in enumerate(words) if n and words[n - 1] not in SHELL_VALUES]
    plain = all(word.startswith(("-", "+")) for word in rest)
    return plain and not any("c" in word[1:] for word in rest if not word.startswith("--"))


# --- bounded reads ----------------------------------------------------------------------------------------------------


class Reader:
    """Reads processes that may be stuck in the kernel.

    Reading /proc/PID/cmdline and environ waits for the lock of the process's memory, which a process in state D (a dead
    network volume, a driver) can hold for hours. So a thread reads; if it hangs, it is abandoned, and that process is
    not read again until the thread returns. A process that is missing from the result is not known to be harmless.
    """

    def __init__(self) -> None:
        self.hung: set[tuple[int, int]] = set()  # (pid, start ticks)

    def each(self, processes: list[tuple[int, int]], look: Look) -> dict[int, Any]:
        """Return pid -> look(pid) for those (pid, start ticks) that answer in time."""
        found: dict[int, Any] = {}
        until = time.monotonic() + READ_DEADLINE
        left = [process for process in processes if process not in self.hung]
        while left and len(self.hung) < MAX_HUNG and time.monotonic() < until:
            try:
                round_ = Round(self, left, look)
            except (RuntimeError, MemoryError):  # no thread available (a process limit): they stay unknown
                break
            stuck = round_.wait(until)
            found.update(round_.found)
            left = left[left.index(stuck) + 1 :] if stuck is not None else []
        return found


class Round:
    """One thread that reads one process after the other, until it is done or abandoned."""

    def __init__(self, reader: Reader, processes: list[tuple[int, int]], look: Look) -> None:
        self.reader, self.processes, self.look = reader, processes, look
        self.found: dict[int, Any] = {}
        self.at: tuple[int, int] | None = None
        self.left_behind = False
        self.state = _thread.allocate_lock()
        self.over = _thread.allocate_lock()
        self.over.acquire()
        _thread.start_new_thread(self.work, ())

    def work(self) -> None:
        for process in self.processes:
            self.at = process
            try:
                result = self.look(process[0])
            except Exception:  # denied or malformed: unknown
                result = None
            with self.state:
                if self.left_behind:
                    self.reader.hung.discard(process)
                    return
                self.at = None
                if result is not None:
                    self.found[process[0]] = result
        self.over.release()

    def wait(self, until: float) -> tuple[int, int] | None:
        """Return the process at which the thread hangs and was abandoned; None when all have answered."""
        before = None
        while not self.over.acquire(True, READ_PATIENCE):
            with self.state:
                at = self.at
                if at is not None and (at == before or time.monotonic() >= until):
                    self.left_behind = True
                    self.reader.hung.add(at)
                    return at
            before = at
        return None


READER = Reader()


def environ_of(pid: int) -> bytes:
    """Return the environment; empty if it cannot be read. A process in the middle of an exec shows neither environment
    nor command (up to 13 ms on two busy cores, measured), so it is read again. A kernel thread never shows any."""
    raw = b""
    for _ in range(EXEC_LOOKS):
        raw = read_file(f"{PROC}/{pid}/environ") or b""
        if raw:
            break
        status = stat_of(pid)
        if read_file(f"{PROC}/{pid}/cmdline") or status is None or status[1] in "ZXx" or KTHREADD in (pid, status[2]):
            raw = read_file(f"{PROC}/{pid}/environ") or b""  # the exec may have just finished
            break
        time.sleep(EXEC_PAUSE)
    return raw


def marked(start_ids: Iterable[str]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the living processes whose environment has the PODWATCH_START_ID of one of these starts, as far as it can
    be read; and those (pid, start ticks) that did not answer."""
    wanted = [f"PODWATCH_START_ID={start_id}".encode() for start_id in start_ids if start_id]
    living = []
    for name in os.listdir(PROC) if wanted else ():
        status = stat_of(int(name)) if name.isdigit() and int(name) != os.getpid() else None
        if status is not None and status[1] not in "ZXx":
            living.append((int(name), status[3]))
    read = READER.each(living, environ_of)
    found = [pid for pid, raw in read.items() if any(item in wanted for item in raw.split(b"\0"))]
    return found, [process for process in living if process[0] not in read]


def in_the_way(silent: list[tuple[int, int]], since: int) -> list[int]:
    """Return those of the ``silent`` processes that may be left from a start at or after ``since`` (ticks) and could
    disturb a new one: stuck in the kernel, or with a CUDA context. Others do not block a start."""
    found = []
    for pid, ticks in silent:
        status = stat_of(pid)
        if status is None or status[3] != ticks or status[1] in "ZXx" or ticks < since:
            continue
        if status[1] == "D" or cuda_of(pid)[0]:
            found.append(pid)
    return found


def in_session(pid: int, ticks: int, ended: int | None = None) -> list[int]:
    """Return the living processes of the session that trainer ``pid`` opened, which no outside process can join. Finds
    those that have neither its environment nor it as an ancestor any more. Empty once the pid is another process's.

    ``ended``: the ticks at which it ended, if known. The kernel does not reuse a session's number while a process of
    it lives; so if all of them started after that end, a process in between may have had the number, and they are not
    the trainer's."""
    leader = stat_of(pid)
    if leader is not None and leader[3] != ticks:
        return []
    found, began = [], []
    for name in os.listdir(PROC):
        status = stat_of(int(name)) if name.isdigit() else None
        if status is not None and status[4] == pid and status[3] >= ticks:
            began.append(status[3])
            if status[1] not in "ZXx":
                found.append(int(name))
    another = leader is None and ended is not None and all(start > ended for start in began)
    return [] if another else found


def end_of(record: dict[str, Any]) -> int | None:
    """Return the ticks since boot at which the launcher of this start ended, as its keeper recorded them; rounded up,
    because it may have started another process in that very tick."""
    said = read_json(os.path.join(record.get("directory", "."), f"exit-{record['start_id']}.json")) or {}
    at = said.get("at_boot")
    return int(at * os.sysconf("SC_CLK_TCK")) + 1 if isinstance(at, float) else None


def cuda_of(pid: int) -> tuple[bool | None, list[int]]:
    """Return (context open, GPU minors), or (None, []) if it cannot be read."""
    try:
        names = os.listdir(f"{PROC}/{pid}/fd")
    except OSError:
        return None, []
    context, minors, denied, read = False, set(), False, False
    for name in names:
        try:
            target = os.readlink(f"{PROC}/{pid}/fd/{name}")
        except PermissionError:
            denied = True
            continue
        except OSError:
            continue
        read = True
        if target == "/dev/nvidia-uvm":
            context = True
        elif target.startswith("/dev/nvidia") and target[11:].isdigit():
            minors.add(int(target[11:]))
    return (None, []) if denied and not read else (context, sorted(minors))


def look_into(pid: int) -> tuple[list[str], bool | None, list[int]]:
    """Return (command line, CUDA context open, GPU minors)."""
    line = (read_file(f"{PROC}/{pid}/cmdline", 16_384) or b"").rstrip(b"\0").split(b"\0")
    return ([part.decode("utf-8", "replace") for part in line if part or len(line) > 1], *cuda_of(pid))


def sockets_of(pid: int) -> list[int] | None:
    """Return the inode numbers of its open sockets, or None if they cannot be read."""
    try:
        names = os.listdir(f"{PROC}/{pid}/fd")
    except OSError:
        return None
    found, denied = [], False
    for name in names:
        try:
            target = os.readlink(f"{PROC}/{pid}/fd/{name}")
        except PermissionError:
            denied = True
            continue
        except OSError:
            continue
        if target.startswith("socket:[") and target[8:-1].isdigit():
            found.append(int(target[8:-1]))
    return None if denied and not found else found


# --- files and locks --------------------------------------------------------------------------------------------------


def read_file(path: str, limit: int = 1 << 20) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        chunks = []
        while limit > 0:
            chunk = os.read(fd, min(limit, 65_536))
            if not chunk:
                break
            chunks.append(chunk)
            limit -= len(chunk)
        return b"".join(chunks)
    except OSError:
        return None
    finally:
        os.close(fd)


def read_json(path: str) -> dict[str, Any] | None:
    raw = read_file(path)
    try:
        value = json.loads(raw) if raw else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def sync_dir(path: str = ".") -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``. On a nearly full disk a write takes what fits without an error; the next one raises it."""
    while data:
        data = data[os.write(fd, data) :]


def reserve(name: str, size: int) -> None:
    """Create the file and give it its space on the disk."""
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        write_all(fd, b" " * size)
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(name: str, value: dict[str, Any]) -> None:
    tmp = f".{name}.{os.getpid()}.tmp"
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        write_all(fd, json.dumps(value).encode())
        os.fsync(fd)
    except OSError:
        os.unlink(tmp)
        raise
    finally:
        os.close(fd)
    os.rename(tmp, name)
    sync_dir()


class LockHeldError(Exception):
    """Another keeper holds the lock, or may hold it. ``holder``: the content of the lock file."""

    def __init__(self, path: str, holder: dict[str, Any]) -> None:
        super().__init__(path)
        self.path, self.holder = path, holder

    def __str__(self) -> str:
        who = f"keeper {self.holder.get('keeper')} (run {self.holder.get('run_id')})" if self.holder else "a keeper"
        return f"training for this output directory is already kept by {who}"


def take_lock(path: str) -> int:
    """Return a descriptor that holds the lock file ``path``. Raises LockHeldError, and OSError where it cannot be
    opened, or is not a file that only root or we can have written.

    It is never removed: otherwise two keepers could lock two files of one name.
    """
    try:
        fd = open_lock(path, os.O_RDWR | os.O_CREAT)
    except PermissionError:
        fd = open_lock(path, os.O_RDONLY)  # root's: reading is enough to lock
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.lstat(path), os.fstat(fd)):
            raise OSError(errno.ESTALE, "the lock file was replaced", path)
    except BlockingIOError:
        holder = lock_info(fd)
        os.close(fd)
        raise LockHeldError(path, holder) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_lock(path: str, how: int) -> int:
    fd = os.open(path, how | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o600)
    try:
        found = os.fstat(fd)
        # A file with a second name may be some other file of ours.
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid not in (0, os.geteuid()):
            raise OSError(errno.EPERM, f"it is not podwatch's file (uid {found.st_uid})", path)
        if found.st_uid == os.geteuid() and found.st_mode & 0o077:
            os.fchmod(fd, 0o600)  # who can read a file can lock it
    except BaseException:
        os.close(fd)
        raise
    return fd


def refuse_held(path: str) -> None:
    """Raise LockHeldError while a keeper holds this lock; another that only asks is none. Takes and makes nothing."""
    try:
        fd = open_lock(path, os.O_RDONLY)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LockHeldError(path, lock_info(fd)) from None
    except OSError:
        return  # a start warns of it
    finally:
        os.close(fd)


def lock_info(fd: int) -> dict[str, Any]:
    try:
        value = json.loads(os.pread(fd, 4096, 0) or b"{}")
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def names_a_trainer(record: dict[str, Any]) -> bool:
    numbers = record.get("pid"), record.get("ticks")
    return all(isinstance(number, int) for number in numbers) and isinstance(record.get("start_id"), str)


MACHINE = ("/run", "/run/lock", "/tmp")
"""Parents of our lock directory of this machine. A keeper locks in the first that it can write in, which a sandbox
changes, and looks for other keepers in all of them."""


def machine_locks() -> str:
    """Return our directory for locks of this machine. Raises OSError if there is none, or another user made each."""
    problem = OSError(errno.EACCES, "no directory there can be written", MACHINE[-1])
    for parent in MACHINE:
        path, uid = f"{parent}/podwatch-locks-{os.geteuid()}", os.geteuid()
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
        except OSError:
            continue
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid:
            problem = OSError(errno.EPERM, f"it belongs to uid {found.st_uid}; remove it", path)
        elif os.access(path, os.W_OK | os.X_OK):
            if found.st_mode & 0o077:
                os.chmod(path, 0o700)
            return path
    raise problem


def machine_places() -> list[str]:
    """Return each of our directories for locks of this machine that exists. Makes nothing."""
    found = []
    for parent in MACHINE:
        path = f"{parent}/podwatch-locks-{os.geteuid()}"
        try:
            status = os.lstat(path)
        except OSError:
            continue
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            found.append(path)
    return found


def lock_paths(state: str, beside: str) -> list[str]:
    return [os.path.join(directory, "lock") for directory in (state, beside) if directory]


def machine_paths(locks: str, output_dir: str) -> list[str]:
    """Return the files in which all links and bind mounts of a directory meet: of its inode, once it exists, and of its
    place in the directory above it."""
    found = []
    above, _, name = output_dir.rpartition("/")
    for path, suffix in ((output_dir, ""), (above or "/", "-" + os.fsdecode(os.fsencode(name)[-200:]))):
        try:
            status = os.stat(path)
        except OSError:
            continue
        found.append(os.path.join(locks, f"dir-{status.st_dev:x}-{status.st_ino:x}{suffix}.lock"))
    return found


def refuse_beside_a_keeper(state: str, beside: str, output_dir: str) -> None:
    """Raise LockHeldError while a keeper holds one of these locks: a start would end there. Blocks."""
    for path in lock_paths(state, beside):
        refuse_held(path)
    for place in machine_places():
        for path in machine_paths(place, output_dir):
            refuse_held(path)


class RunLocks:
    """The locks of one start: in the state directory, and beside the output directory, where podwatches with different
    state directories meet. Two names of one output directory (a link, a bind mount) have different places beside it:
    they meet in a directory of this machine. All are held until this process ends, which is after the last one of its
    tree."""

    def __init__(self, shown: Warnings) -> None:
        self.warnings = shown
        self.held: dict[str, int] = {}
        self.output_dir = self.machine = ""
        self.info: dict[str, Any] = {}

    def take(self, spec: dict[str, Any]) -> None:
        """Raises StartError if one of them is held, or the one in the state directory cannot be taken."""
        own, *beside = lock_paths(os.path.dirname(os.getcwd()), spec["beside"])
        try:
            self.take_one(own)
        except OSError as error:
            text = f"cannot take the run lock: {error.strerror}"
            raise StartError("permission", text, error.errno or 0, own) from error
        self.output_dir = spec["output_dir"]
        try:
            self.machine = machine_locks()
        except OSError as error:
            self.warnings.add(f"cannot lock output_dir on this machine: {error.filename}: {error.strerror}")
        self.refuse_elsewhere()
        for path in beside + self.missing():
            self.try_one(path)

    def refuse_elsewhere(self) -> None:
        """Raises StartError if a keeper that could not write in our place holds this output directory in another."""
        for place in machine_places():
            if place != self.machine:
                for path in machine_paths(place, self.output_dir):
                    try:
                        refuse_held(path)
                    except LockHeldError as error:
                        raise StartError("busy", str(error), 0, error.path) from error

    def missing(self) -> list[str]:
        """Return the locks of this machine that are not held yet."""
        paths = machine_paths(self.machine, self.output_dir) if self.machine else []
        return [path for path in paths if path not in self.held]

    def try_one(self, path: str) -> None:
        try:
            self.take_one(path)
        except OSError as error:
            self.held[path] = -1
            self.warnings.add(f"cannot lock {path}: {error.strerror}")

    def take_one(self, path: str) -> None:
        try:
            self.held[path] = take_lock(path)
        except LockHeldError as held:
            raise StartError("busy", str(held), 0, held.path) from held

    def records(self) -> list[dict[str, Any]]:
        """Return what the record and the lock files say of earlier keepers."""
        return [read_json("record.json") or {}, *map(lock_info, self.held.values())]

    def write(self, info: dict[str, Any]) -> None:
        """Write ``info`` into the lock files, and into those that are taken later."""
        self.info = info
        for fd in self.held.values():
            self.write_one(fd)

    def write_one(self, fd: int) -> None:
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(self.info).encode(), 0)
            os.fsync(fd)
        except OSError:
            pass  # not taken, root's, or a full disk: the record in our directory counts

    def tend(self) -> None:
        """Take the lock of an output directory that the trainer has created. Once it is held nothing is read there: a
        volume that hangs must not stop this process."""
        if sum(path.startswith(self.machine) for path in self.held) >= 2:
            return
        for path in self.missing():
            try:
                self.try_one(path)
                self.write_one(self.held[path])
            except StartError as error:
                self.held[path] = -1
                self.warnings.add(error.text)


# --- survivors --------------------------------------------------------------------------------------------------------


def refuse_beside_survivors(records: list[dict[str, Any]]) -> None:
    """Raise StartError while a trainer of an earlier keeper lives. A killed keeper frees its locks, but the record and
    the lock files still name its trainer."""
    here = (boot_id(), pid_namespace())
    start_ids, since = set(), 0
    left = []
    for record in records:
        if (record.get("boot_id"), record.get("pid_namespace")) != here or not names_a_trainer(record):
            continue
        start_ids.add(record["start_id"])
        since = min(since or record["ticks"], record["ticks"])
        left += in_session(record["pid"], record["ticks"], end_of(record))
        if is_alive(record["pid"], record["ticks"]):
            text = f"process {record['pid']} of start {record['start_id']} is still running"
            raise StartError("busy", text, 0, record.get("directory", ""))
    until = time.monotonic() + SURVIVOR_DEADLINE
    while True:
        known_by_mark, silent = marked(start_ids)
        left = sorted({*left, *known_by_mark})
        left = sorted(set(left) - operators(left))
        if left:
            text = "processes of an earlier start are still running: "
            raise StartError("busy", text + ", ".join(map(str, left)))
        stuck = in_the_way(silent, since)
        if not stuck:
            return
        if time.monotonic() >= until:
            text = "may be left of an earlier start, and cannot be looked into (stuck in the kernel): process "
            raise StartError("busy", text + ", ".join(map(str, stuck)))
        time.sleep(READ_PATIENCE)


# --- log --------------------------------------------------------------------------------------------------------------


class Log:
    """The trainer's output file: bounded by rotation, with space reserved ahead of its end."""

    def __init__(self, path: str, limit: int, count: int, owner: tuple[int, int] | None) -> None:
        self.path, self.limit, self.count = path, limit, count
        self.ahead = min(8 << 20, limit)
        self.reserved = 0
        self.can_reserve = True
        self.dropped = 0  # bytes that were truncated away without a copy
        self.rotations = 0
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        self.fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
        if owner is not None:
            os.fchown(self.fd, owner[0], owner[1])  # so that the trainer may reopen /dev/stdout
        self.tend()

    def tend(self) -> None:
        """Rotate if the limit is reached, and reserve space. Called about once a second."""
        size = os.fstat(self.fd).st_size
        if size >= self.limit:
            self.rotate(size)
            size = os.fstat(self.fd).st_size
        if self.can_reserve and self.reserved - size < self.ahead // 2:
            self.reserve(size)

    def reserve(self, size: int) -> None:
        done = _libc.fallocate(self.fd, FALLOC_FL_KEEP_SIZE, ctypes.c_int64(size), ctypes.c_int64(self.ahead))
        if done == 0:
            self.reserved = size + self.ahead
            return
        code = ctypes.get_errno()
        if code != errno.ENOSPC:
            self.can_reserve = False  # a filesystem that cannot
        elif size > self.reserved - 65_536 and not self.drop_oldest():
            # The disk is full and the reserve used up: lose old output rather than fail the trainer's next print.
            self.truncate(size)

    def rotate(self, size: int) -> None:
        for n in range(self.count - 1, 0, -1):
            try:
                os.rename(f"{self.path}.{n}", f"{self.path}.{n + 1}")
            except FileNotFoundError:
                continue
        if self.count > 0 and not self.copy(f"{self.path}.1"):
            self.dropped += size
        self.truncate(0)
        self.rotations += 1
        try:
            os.unlink(f"{self.path}.{self.count + 1}")
        except OSError:
            pass

    def copy(self, target: str) -> bool:
        offset = 0
        try:
            out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
            try:
                while True:  # to the end as it is then: the trainer continues to write
                    chunk = os.pread(self.fd, 1 << 20, offset)
                    if not chunk:
                        return True
                    offset += len(chunk)
                    while chunk:
                        chunk = chunk[os.write(out, chunk) :]
            finally:
                os.close(out)
        except OSError:
            try:
                os.unlink(target)
            except OSError:
                pass
            return False

    def truncate(self, lost: int) -> None:
        self.dropped += lost
        os.ftruncate(self.fd, 0)
        self.reserved = 0

    def drop_oldest(self) -> bool:
        for n in range(self.count, 0, -1):
            try:
                size = os.stat(f"{self.path}.{n}").st_size
                os.unlink(f"{self.path}.{n}")
            except OSError:
                continue
            self.dropped += size
            return True
        return False


# --- child ------------------------------------------------------------------------------------------------------------


def become_trainer(
    spec: dict[str, Any], owner: tuple[int, int] | None, go_r: int, fail_w: int, log_fd: int
) -> NoReturn:
    """In the child: wait for the byte, then become the trainer. Never returns."""
    os.setsid()
    if os.read(go_r, 1) != b"g":
        os._exit(125)  # the keeper died before the record was safe: nothing has been started
    step, where = "setup", ""
    try:
        for number in range(1, signal.NSIG):
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError):
                continue
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.umask(0o022)
        try:
            with open("/proc/self/oom_score_adj", "w") as stream:
                stream.write("0")
        except OSError:
            pass  # not ours to change: podwatch's own, lower value stays
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        if fail_w != 3:
            os.dup2(fail_w, 3, inheritable=False)
        os.closerange(4, 1 << 30)
        fail_w = 3
        if owner is not None:
            step, where = "user", spec["user"]
            if os.geteuid() == 0:
                os.initgroups(spec["user"], owner[1])
            if os.getgid() != owner[1]:
                os.setgid(owner[1])
            if os.getuid() != owner[0]:
                os.setuid(owner[0])
        step, where = "cwd", spec["cwd"]
        os.chdir(spec["cwd"])
        for command in spec["before"]:
            step, where = "before", " ".join(command)[:200]
            run_before(command, spec["env"], spec["before_deadline"])
        step, where = "exec", spec["argv"][0]
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])  # noqa: S606 - argv by design, never a shell
    except OSError as error:
        said = {"step": step, "text": error.strerror or str(error), "errno": error.errno or 0, "where": where}
        os.write(fail_w, json.dumps(said).encode())
    except BaseException as error:  # whatever it is, podwatch must get a report
        os.write(fail_w, json.dumps({"step": step, "text": repr(error), "errno": 0, "where": where}).encode())
    os._exit(127)


def run_before(command: list[str], env: dict[str, str], seconds: float) -> None:
    """Run one command of ``trainer.start_before`` to its end. Processes that it leaves running belong to this
    start. Raises OSError when it cannot run, fails, or takes too long."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            os.execvpe(command[0], command, env)  # noqa: S606 - argv by design, never a shell
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)
    try:
        os.setpgid(pid, pid)  # in parent and child: whichever is first
    except OSError:
        pass  # it runs its command already
    until = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() >= until:
            try:
                os.killpg(pid, signal.SIGKILL)
            except OSError:
                pass
            os.waitpid(pid, 0)
            raise OSError(errno.ETIMEDOUT, f"was not done after {seconds:.0f} s")
        time.sleep(0.02)
    code = os.waitstatus_to_exitcode(status)
    if code == 127:
        raise OSError(0, "could not be run (127)")
    if code != 0:
        raise OSError(0, f"ended with exit code {code}" if code > 0 else f"was ended by signal {-code}")


# --- exit record ------------------------------------------------------------------------------------------------------


class ExitRecord:
    """How the launcher ended: exit-START_ID.json, written into space that is reserved before the trainer runs."""

    def __init__(self, start_id: str, shown: Warnings) -> None:
        self.start_id, self.warnings = start_id, shown
        self.value: dict[str, Any] | None = None
        self.durable = True  # False once it could not be written

    def reserve(self) -> None:
        reserve(f".exit-{self.start_id}.tmp", EXIT_SPACE)

    def write(self, code: int | None, number: int | None, stopped: bool) -> None:
        """Record the exit code or signal; durable before it is reported. ``stopped``: a stop was requested before."""
        value = {"start_id": self.start_id, "code": code, "signal": number, "at_wall": time.time()}
        value["stopped"] = stopped
        value["at_boot"] = time.clock_gettime(time.CLOCK_BOOTTIME)
        tmp = f".exit-{self.start_id}.tmp"
        try:
            fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                write_all(fd, json.dumps(value).encode().ljust(EXIT_SPACE))
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(tmp, f"exit-{self.start_id}.json")
            sync_dir()
        except OSError as error:
            self.durable = False
            self.warnings.add(f"the exit status could not be recorded: {error.strerror}")
        self.value = value


# --- tree -------------------------------------------------------------------------------------------------------------


class TreeReaper:
    """The process tree below this process: lists it, signals it, ends it when asked to stop, and reaps it.

    A stop sends SIGTERM to all of it, and SIGKILL once the grace is over, again and again until nothing of it is left.
    An operator's terminals inside the tree are never signalled.
    """

    def __init__(self, exit_record: ExitRecord) -> None:
        self.exit_record = exit_record
        self.launcher, self.launcher_ticks = 0, 0
        self.ended: dict[int, dict[str, Any]] = {}  # the last ones reaped, the launcher left out
        self.lines: dict[tuple[int, int], list[str]] = {}  # the commands as last read, by (pid, start ticks)
        self.stop_at: float | None = None  # monotonic second at which a stop by SIGTERM turns into SIGKILL
        self.empty_since: float | None = None

    # -- signals

    def signal_all(self, number: int) -> int:
        """Signal the whole tree. Return how many processes it was sent to."""
        sent = 0
        living = descendants_of(os.getpid())
        apart = operators(living)
        for pid in living:
            found = stat_of(pid) if pid not in apart else None
            if found is not None and found[1] not in "ZXx":
                sent += send_signal(pid, found[3], number)
        return sent

    def signal_some(self, targets: list[list[int]], number: int) -> int:
        """Signal those of ``targets`` (pid, start ticks) that belong to the tree."""
        living = descendants_of(os.getpid())
        ours = set(living) - operators(living)
        return sum(send_signal(pid, ticks, number) for pid, ticks in targets if pid in ours)

    def stop(self, grace: float) -> None:
        until = time.monotonic() + grace
        if self.stop_at is None:
            self.stop_at = until
            self.signal_all(signal.SIGTERM)
        self.stop_at = min(self.stop_at, until)

    def follow_stop(self) -> None:
        if self.stop_at is not None and time.monotonic() >= self.stop_at:
            self.signal_all(signal.SIGKILL)
            self.leave_operators()

    def leave_operators(self) -> None:
        """Treat the tree as ended if only an operator's terminals are left: they live on without a keeper."""
        living = [pid for pid in descendants_of(os.getpid()) if (found := stat_of(pid)) and found[1] not in "ZXx"]
        if living and self.exit_record.value is not None and operators(living).issuperset(living):
            self.empty_since = self.empty_since or time.monotonic()

    def sweep(self) -> None:
        """Kill what the ``start_before`` commands of a failed start left running: nothing else would end it."""
        until = time.monotonic() + SWEEP_DEADLINE
        while descendants_of(os.getpid()) and time.monotonic() < until:
            self.signal_all(signal.SIGKILL)
            time.sleep(0.02)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return

    # -- ends

    def reap(self) -> None:
        """Reap everything that has ended. The launcher's end is recorded while it is still a zombie."""
        while True:
            try:
                gone = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                gone = None
                self.empty_since = self.empty_since or time.monotonic()
            if gone is None:
                return
            pid = gone.si_pid
            found = stat_of(pid)
            code = gone.si_status if gone.si_code == os.CLD_EXITED else None
            number = None if gone.si_code == os.CLD_EXITED else gone.si_status
            if pid == self.launcher and self.exit_record.value is None:
                self.exit_record.write(code, number, self.stop_at is not None)
            else:
                while len(self.ended) >= MAX_ENDED:
                    del self.ended[next(iter(self.ended))]
                self.ended[pid] = {
                    "pid": pid,
                    "ticks": found[3] if found else 0,
                    "comm": found[0] if found else "",
                    "code": code,
                    "signal": number,
                    "at_wall": time.time(),
                }
            os.waitpid(pid, 0)

    # -- views

    def processes(self) -> list[dict[str, Any]]:
        """Return every living process. One that cannot be read is listed too, with "cuda" unknown."""
        living = {}
        for pid in descendants_of(os.getpid()):
            found = stat_of(pid)
            if found is not None and found[1] not in "ZXx":
                living[pid] = found
        read = READER.each([(pid, found[3]) for pid, found in living.items()], look_into)
        processes: list[dict[str, Any]] = []
        for pid, (comm, state, parent, ticks, _) in living.items():
            line, cuda, gpus = read.get(pid) or (self.lines.get((pid, ticks), [comm]), None, [])
            processes.append(
                {
                    "pid": pid,
                    "ppid": parent,
                    "ticks": ticks,
                    "comm": comm,
                    "state": state,
                    "cmdline": line,
                    "cuda": cuda,
                    "gpus": gpus,
                }
            )
        self.lines = {(process["pid"], process["ticks"]): process["cmdline"] for process in processes}
        return processes

    def sockets(self, pids: list[int]) -> dict[str, list[int] | None]:
        """Return the inode numbers of the open sockets of those of ``pids`` that belong to the tree."""
        ours = set(descendants_of(os.getpid()))
        asked = [(pid, found[3]) for pid in pids if pid in ours and (found := stat_of(pid)) is not None]
        read = READER.each(asked, sockets_of)
        return {str(pid): read.get(pid) for pid, _ in asked}


# --- control socket ---------------------------------------------------------------------------------------------------


class ControlSocket:
    """k.sock: one JSON object a line, each answered by one line. Never blocks; a client that misbehaves is closed."""

    def __init__(self, keeper: Answers) -> None:
        self.keeper = keeper
        self.listener: socket.socket
        self.clients: dict[int, tuple[socket.socket, bytes, bytes]] = {}  # fd -> socket, incoming, outgoing

    def listen(self) -> None:
        try:
            os.unlink("k.sock")
        except FileNotFoundError:
            pass
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self.listener.bind("k.sock")  # relative: the full path may be longer than the 108 bytes a socket may have
        os.chmod("k.sock", 0o600)
        self.listener.listen(MAX_CLIENTS)

    def handle(self, poll: select.poll, fd: int, event: int) -> None:
        if fd == self.listener.fileno():
            self.accept(poll)
        elif fd in self.clients:
            self.serve(poll, fd, event)

    def accept(self, poll: select.poll) -> None:
        try:
            client, _ = self.listener.accept()
        except OSError:
            return
        if len(self.clients) >= MAX_CLIENTS:
            client.close()
            return
        client.setblocking(False)
        self.clients[client.fileno()] = (client, b"", b"")
        poll.register(client, select.POLLIN)

    def serve(self, poll: select.poll, fd: int, event: int) -> None:
        client, incoming, outgoing = self.clients[fd]
        try:
            if event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                data = client.recv(MAX_LINE)
                if not data:
                    raise ConnectionError
                incoming += data
                *lines, incoming = incoming.split(b"\n")
                if len(incoming) > MAX_LINE:
                    raise ConnectionError
                for line in lines:
                    outgoing += json.dumps(self.reply(line)).encode() + b"\n"
            if outgoing:
                try:
                    outgoing = outgoing[client.send(outgoing) :]
                except BlockingIOError:
                    pass
            self.clients[fd] = (client, incoming, outgoing)
            poll.modify(fd, select.POLLIN | (select.POLLOUT if outgoing else 0))
        except BlockingIOError:
            return
        except OSError:
            poll.unregister(fd)
            client.close()
            del self.clients[fd]

    def reply(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            return {"v": PROTOCOL, "ok": True} | self.keeper.answer(request)
        except Exception as error:  # whatever it is, a request must not end the keeper
            return {"v": PROTOCOL, "ok": False, "error": f"cannot answer: {type(error).__name__}: {error}"}


# --- keeper -----------------------------------------------------------------------------------------------------------


def owner_of(user: str) -> tuple[int, int] | None:
    """Return (uid, gid) of the user that training runs as; None for our own. Raises StartError."""
    if not user:
        return None
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise StartError("user", f"user {user!r} not found") from None
    return entry.pw_uid, entry.pw_gid


def remove_older(start_id: str) -> None:
    """Delete the small files of earlier starts."""
    for name in os.listdir("."):
        if name.startswith(("exit-", ".exit-", "executed-", ".executed-", "result-")) and start_id not in name:
            try:
                os.unlink(name)
            except OSError:
                pass


def raise_nofile(wanted: int) -> int:
    """Return the limit of open files, raised as far as allowed."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for pair in ((wanted, max(hard, wanted)), (min(wanted, hard), hard)):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, pair)
            return pair[0]
        except (OSError, ValueError):
            continue
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Keeper:
    """One start, from the request to the end of its last process."""

    def __init__(self, start_id: str) -> None:
        self.start_id = start_id
        self.spec: dict[str, Any] = {}
        self.warnings = Warnings()
        self.locks = RunLocks(self.warnings)
        self.exit_record = ExitRecord(start_id, self.warnings)
        self.tree = TreeReaper(self.exit_record)
        self.socket = ControlSocket(self)
        self.log: Log
        self.next_tend = 0.0
        self.released = False
        self.job: dict[str, Any] = {}
        """In job mode: "pipe" (a descriptor), "grace" (seconds), and what identifies the job and its owner."""
        self.wake_r, self.wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    # -- start

    def start(self) -> None:
        spec_name = f"spec-{self.start_id}.json"
        spec = read_json(spec_name)
        if spec is None:
            raise StartError("superseded", "the start was withdrawn", 0, spec_name)
        os.unlink(spec_name)
        self.spec = spec
        self.job = spec.get("job") or {}
        if self.job:
            os.set_inheritable(self.job["pipe"], False)
        self.locks.take(spec)
        if (read_file("wanted") or b"").decode().strip() != self.start_id:
            raise StartError("superseded", "a newer start took its place")
        if time.clock_gettime(time.CLOCK_BOOTTIME) > spec["expires"]:
            raise StartError("superseded", "the start came too late")
        refuse_beside_survivors(self.locks.records())
        owner = owner_of(spec["user"])
        self.log = Log(spec["log"], spec["log_limit"], spec["log_count"], owner)
        remove_older(self.start_id)
        got = raise_nofile(spec["nofile"])
        if got < spec["nofile"]:
            self.warnings.add(f"open-file limit is {got}, wanted {spec['nofile']}")
        failure = self.launch(owner)
        if failure:
            os.waitpid(self.tree.launcher, 0)
            self.tree.sweep()
            os.rename("record.json", "record.last.json")
            said = json.loads(failure)
            raise StartError(said["step"], said["text"], said["errno"], said["where"])
        self.spec = {key: spec[key] for key in ("run_id", "argv", "cwd", "output_dir", "grace", "linger")}
        try:
            os.rename(f".executed-{self.start_id}.tmp", f"executed-{self.start_id}")
            sync_dir()
            self.say({"ok": True, "pid": self.tree.launcher, "warnings": self.warnings.texts})
        except OSError as error:  # training runs: from here on the keeper must not end before it
            self.warnings.add(f"cannot write to the state directory: {error.strerror}")

    def launch(self, owner: tuple[int, int] | None) -> bytes:
        """Fork the child, make the record durable, and only then let the child execute the command. Return what the
        child said of its failure; empty once the command runs."""
        go_r, go_w = os.pipe2(os.O_CLOEXEC)
        fail_r, fail_w = os.pipe2(os.O_CLOEXEC)
        self.tree.launcher = os.fork()
        if self.tree.launcher == 0:
            try:
                os.close(go_w)
                os.close(fail_r)
                become_trainer(self.spec, owner, go_r, fail_w, self.log.fd)
            finally:
                os._exit(126)
        os.close(go_r)
        os.close(fail_w)
        self.tree.launcher_ticks = ticks_of(self.tree.launcher)
        self.write_record()
        self.socket.listen()
        os.write(go_w, b"g")
        os.close(go_w)
        failure = b""
        while True:
            self.kill_unowned(fail_r)
            chunk = os.read(fail_r, 4096)
            if not chunk:
                break
            failure += chunk
        os.close(fail_r)
        return failure

    def kill_unowned(self, fail_r: int) -> None:
        """In job mode: until the child reports, kill it if the job ends. Its commands before the start can take
        minutes."""
        if self.job:
            ready = select.select([fail_r, self.job["pipe"]], [], [])[0]
            if fail_r not in ready:
                self.tree.signal_all(signal.SIGKILL)

    def write_record(self) -> None:
        """Write everything that must be durable before the trainer runs, and reserve the space for later records."""
        self.exit_record.reserve()
        reserve(f".executed-{self.start_id}.tmp", 0)
        record = {
            "version": PROTOCOL,
            "run_id": self.spec["run_id"],
            "start_id": self.start_id,
            "boot_id": boot_id(),
            "pid_namespace": pid_namespace(),
            "keeper": os.getpid(),
            "keeper_ticks": ticks_of(os.getpid()),
            "pid": self.tree.launcher,
            "ticks": self.tree.launcher_ticks,
            "argv": self.spec["argv"],
            "cwd": self.spec["cwd"],
            "user": self.spec["user"],
            "output_dir": self.spec["output_dir"],
            "log": self.spec["log"],
            "step": self.spec["step"],
            "started_wall": time.time(),
            "warnings": self.warnings.texts,
        }
        if self.job:
            record["job"] = {key: value for key, value in self.job.items() if key not in ("pipe", "grace")}
        write_atomic("record.json", record)
        names = ("run_id", "start_id", "boot_id", "pid_namespace", "keeper", "keeper_ticks", "pid")
        info = {key: record[key] for key in names}
        self.locks.write(info | {"ticks": self.tree.launcher_ticks, "directory": os.getcwd()})

    def say(self, result: dict[str, Any]) -> None:
        write_atomic(f"result-{self.start_id}.json", result)

    # -- loop

    def run(self) -> None:
        poll = select.poll()
        poll.register(self.wake_r, select.POLLIN)
        poll.register(self.socket.listener, select.POLLIN)
        if self.job:
            poll.register(self.job["pipe"], 0)  # an end of file is always reported
        while True:
            self.tree.reap()
            self.tree.follow_stop()
            if self.finished():
                return
            events = poll.poll(100 if self.tree.stop_at is not None else int(TICK * 1000))
            for fd, event in events:
                if fd == self.wake_r:
                    try:
                        if signal.SIGTERM in os.read(self.wake_r, 4096):
                            self.tree.stop(self.spec["grace"])
                    except BlockingIOError:
                        pass
                elif self.job and fd == self.job["pipe"]:
                    poll.unregister(fd)
                    self.tree.stop(self.job["grace"])
                else:
                    self.socket.handle(poll, fd, event)
            if time.monotonic() >= self.next_tend:
                self.next_tend = time.monotonic() + TICK
                self.tend()

    def tend(self) -> None:
        try:
            self.log.tend()
        except OSError as error:
            self.warnings.add(f"cannot rotate the log: {error.strerror}")
        self.locks.tend()

    def finished(self) -> bool:
        """Return whether the tree has ended and podwatch has noted it, or had ``linger`` seconds for that (the record
        is durable)."""
        if self.tree.empty_since is None or self.exit_record.value is None:
            return False
        if self.released or self.tree.stop_at is not None:
            return True
        return self.exit_record.durable and time.monotonic() - self.tree.empty_since >= self.spec["linger"]

    # -- requests

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one request, {"v": 1, "do": ...}: hello, status, tree, sockets {pids}, signal {sig, targets?},
        release."""
        what = request["do"]
        if what == "hello":
            return {"keeper": os.getpid(), "start_id": self.start_id} | {
                "run_id": self.spec["run_id"],
                "pid": self.tree.launcher,
                "ticks": self.tree.launcher_ticks,
            }
        if what == "status":
            return {
                "exit": self.exit_record.value,
                "tree_gone": self.tree.empty_since is not None,
                "warnings": self.warnings.texts,
                "log_rotations": self.log.rotations,
                "log_dropped_bytes": self.log.dropped,
                "stopping": self.tree.stop_at is not None,
            }
        if what == "tree":
            return {"processes": self.tree.processes(), "ended": list(self.tree.ended.values())}
        if what == "sockets":
            return {"sockets": self.tree.sockets(request["pids"])}
        if what == "signal":
            number, targets = int(request["sig"]), request.get("targets")
            return {"sent": self.tree.signal_all(number) if targets is None else self.tree.signal_some(targets, number)}
        if what == "release":
            return self.release()
        raise KeyError(what)

    def release(self) -> dict[str, Any]:
        """Podwatch has noted the end: the record no longer names this trainer, and the keeper can end."""
        self.tree.reap()
        self.tree.leave_operators()
        if self.tree.empty_since is None:
            return {"ok": False, "error": "processes of the tree are still running"}
        if not self.released:
            self.released = True
            os.rename("record.json", "record.last.json")
            sync_dir()
        return {}


# --- main -------------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    directory, start_id = argv[1], argv[2]
    os.umask(0o077)
    os.chdir(directory)
    try:
        os.setsid()
    except PermissionError:
        pass  # a session leader already
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _thread.stack_size(256 << 10)
    keeper = Keeper(start_id)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(keeper.wake_w, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    try:
        keeper.start()
    except (StartError, OSError) as error:
        if isinstance(error, OSError):
            error = StartError("io", error.strerror or str(error), error.errno or 0, str(error.filename or directory))
        try:
            keeper.say({"ok": False, "kind": error.kind, "text": error.text, "errno": error.code, "where": error.where})
        except OSError:
            sys.stderr.write(f"{error.kind}: {error.text} ({error.where})\n")
        return 75 if error.kind in ("busy", "superseded") else 1
    keeper.run()
    try:
        os.unlink("k.sock")
    except OSError:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
