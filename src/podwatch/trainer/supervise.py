# ruff: noqa: PTH104, PTH108, PTH109, PTH110, PTH116, PTH118, PTH120, PTH123, PTH208
# pathlib would cost this process memory for as long as training lives.
"""The supervisor: the small, long-lived process above the trainer, and the one above podwatch's daemon.

One file of more than 600 lines, standard library only, no podwatch import: each start copies it into the run's state
directory and runs the copy with ``python -I -S -E``, so that an upgrade of podwatch cannot pull its code away. A
running supervisor outlives upgrades: its interface is files with a version, and signals.

  supervise.py keep DIRECTORY START_ID          above one trainer, from its start to the end of its last process
  supervise.py init OPTIONS -- COMMAND          above the daemon: PID 1 of a container, ``--detached`` or ``--job``

Contents: processes · files and locks · survivors · log · from the fork to the exec · end of the launcher · tree ·
TrainerSupervisor · DaemonSupervisor · main.

The supervisor of a trainer
---------------------------
Files in DIRECTORY (mode 0700), all of them small:
  wanted               the only start id that can start now; a late supervisor of an older start gives up
  start-START_ID.json  what to start, environment included; deleted as soon as it is read
  lock                 locked (flock) while anything of the tree lives; so is ``lock`` in each directory of
                       ``lock_also``, and the output directory itself, which can have several names (nodes of
                       one run share it). The files have a copy of the record, without the command
  record.json          who runs: durable before the trainer can execute
  executed-START_ID    exists once the command was executed
  exit-START_ID.json   how the launcher ended
  ended-START_ID       exists once nothing of the tree lives
  state-START_ID.json  after the start: warnings, ends of other processes; read it again if torn
  result-START_ID.json the answer to the start request

The space of exit, ended, executed and state is reserved before the trainer runs, so a full disk cannot lose them. A new
version of these files only adds fields; a reader ignores what it does not know.

Start: take the locks; refuse while a process of an earlier start may live; fork a child that blocks on a pipe; write
the record; release the child with one byte. If the supervisor dies before that, the child reads end of file and exits
without executing anything. So whoever takes the locks and reads the record knows every trainer.

SIGTERM ends the tree: SIGTERM to each of its processes, SIGKILL after ``grace`` seconds. The daemon usually signals the
tree itself. The supervisor ends once the tree has ended and that is recorded. In job mode (the request has a "job") it
holds the read end of a pipe of which podwatch's init alone has the other end: end of file ends the tree.

It reads only ``stat`` of processes, and its own files: reading the command, the environment or the descriptors of a
process that is stuck in the kernel can block for hours.

The trainer itself appends to its log file (O_APPEND) and the supervisor rotates by copying and truncating. With a pipe
through the supervisor, a killed supervisor would take training with it (SIGPIPE). The cost: a rotation can lose a few
lines. Space is reserved ahead of the end of the file, so that a full disk does not fail the trainer's prints.

The supervisor of the daemon
----------------------------
* reaps orphans: supervisors whose daemon ended, and other processes of a container;
* restarts the daemon when it ends unexpectedly, with a growing backoff; not on 0, 64 (usage), 65 (the training command
  is at fault), 77 (permission), 78 (configuration) or 86 (gave up), as the systemd unit;
* is the daemon's watchdog, by systemd's protocol: no ``WATCHDOG=1`` within WATCHDOG_USEC means SIGABRT, then SIGKILL;
* forwards signals: SIGHUP (reload), SIGTERM and SIGINT.

As PID 1, SIGTERM means that the container is being stopped: SIGTERM to the daemon, ``--grace`` seconds for it (or as
long as it asks for), SIGTERM to every process (which a supervisor passes on to training), ``--last`` seconds, exit.
Detached, SIGTERM means that podwatch exits: training continues. When the daemon must not be restarted and PID 1 has
children, init stays until they have ended: its exit would kill training because of, say, a wrong configuration.

With ``--job`` init is an engine's job, and nothing outlives it: it closes the pipe at the end, or the kernel does when
init is killed. A daemon that ends unexpectedly is restarted; its verdict (``PODWATCH_END=`` and its exit code) ends
the job with that code. SIGTERM and SIGINT are a preemption: the daemon gets SIGTERM, the pipe is closed at once, and
after ``--grace`` seconds everything is killed.
"""

from __future__ import annotations

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
import struct
import sys
import time
import warnings  # noqa: F401 - os.execvpe imports it: in the child, perhaps after the library was upgraded away

TYPE_CHECKING = False
if TYPE_CHECKING:  # the real typing module would cost memory for as long as training lives
    from argparse import Namespace
    from collections.abc import Iterable
    from typing import Any, NoReturn

VERSION = 1
"""Of the files. A supervisor runs as long as its trainer, so a newer podwatch reads what an older supervisor wrote."""
PROC = "/proc"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
FALLOC_FL_KEEP_SIZE = 1
ENDED = "ZXx"
"""States of a process that has ended and is not reaped yet."""
EXIT_BYTES, STATE_BYTES = 4096, 32_768
ENDS_SHOWN = 128
TICK = 1.0

_libc = ctypes.CDLL(None, use_errno=True)


class StartRefusedError(Exception):
    """The start did not happen. ``kind`` decides which error podwatch raises."""

    def __init__(self, kind: str, text: str, code: int = 0, where: str = "") -> None:
        super().__init__(text)
        self.kind, self.text, self.code, self.where = kind, text, code, where


# --- processes --------------------------------------------------------------------------------------------------------


class StatLine:
    """``/proc/PID/stat``, which can be read whatever the process is stuck in. The name can contain spaces and
    parentheses. ``ticks``: its start, in clock ticks since boot."""

    __slots__ = ("foreground", "group", "name", "parent", "session", "state", "ticks", "tty")

    def __init__(self, text: str) -> None:
        end = text.rindex(")")
        words = text[end + 2 :].split()
        self.name, self.state = text[text.index("(") + 1 : end], words[0]
        self.parent, self.group, self.session, self.tty, self.foreground = map(int, words[1:6])
        self.ticks = int(words[19])


def stat_of(pid: int) -> StatLine | None:
    """None when there is no such process."""
    try:
        return StatLine((read_file(f"{PROC}/{pid}/stat", 4096) or b"").decode("utf-8", "replace"))
    except (ValueError, IndexError):
        return None


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir(PROC) if name.isdigit()]


def own_ticks(pid: int) -> int:
    """Return the start ticks of this process or of a child that is not reaped."""
    found = stat_of(pid)
    if found is None:
        raise StartRefusedError("io", "/proc cannot be read", errno.ENOENT, f"{PROC}/{pid}/stat")
    return found.ticks


def boot_id() -> str:
    return (read_file("/proc/sys/kernel/random/boot_id") or b"").decode().strip()


def pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def users_of(pid: int) -> tuple[int, ...]:
    """Real and effective user id; empty when it is gone."""
    for line in (read_file(f"{PROC}/{pid}/status") or b"").splitlines():
        if line.startswith(b"Uid:"):
            return tuple(int(word) for word in line.split()[1:3])
    return ()


def tree_below(pid: int) -> dict[int, StatLine]:
    """Return what runs below this process, parents before their children. From one listing of all processes: the
    kernel's own list of a process's children leaves some out while their siblings end, and an operator's shell that is
    left out would be signalled."""
    lines = {other: line for other in all_pids() if (line := stat_of(other)) is not None}
    below: dict[int, list[int]] = {}
    for other, line in lines.items():
        below.setdefault(line.parent, []).append(other)
    return {other: lines[other] for other in below_of(pid, below) if lines[other].state not in ENDED}


def send_signal(pid: int, ticks: int, number: int) -> bool:
    """Send by pidfd, after comparing the ticks: the pid may be another process's by now. Return whether it was sent."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        found = stat_of(pid)
        if found is None or found.ticks != ticks:
            return False
        signal.pidfd_send_signal(fd, number)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


TERMINAL_SERVERS = frozenset(
    {"tmux", "tmate", "screen", "zellij", "dtach", "abduco", "sshd", "sshd-session", "dropbear", "mosh-server", "ttyd"}
)
NOTEBOOK_SERVERS = frozenset({"jupyter", "jupyter-lab", "jupyter-noteboo", "jupyter-server", "code-server", "marimo"})
"""By the kernel's names, which it cuts to 15 characters."""
SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "fish", "csh", "tcsh", "nu"})


def operators(tree: dict[int, StatLine]) -> set[int]:
    """Return those of a tree that belong to an operator's terminal, if the training command started the server of one:
    below a notebook server everything; below a terminal server each shell with job control, and everything in it; and
    the servers above them. They are never signalled and do not keep the tree alive."""
    below: dict[int, list[int]] = {}
    for pid, line in tree.items():
        below.setdefault(line.parent, []).append(pid)
    found: set[int] = set()
    for server, line in tree.items():
        name = line.name.split(":")[0].lower()
        inside = below_of(server, below)
        if name in NOTEBOOK_SERVERS:
            found.update((server, *inside))
        elif name in TERMINAL_SERVERS:
            shells = [pid for pid in inside if controls_jobs(tree[pid], [tree[child] for child in below.get(pid, ())])]
            for shell in shells:
                found.update((server, shell, *below_of(shell, below)))
    return found


def controls_jobs(line: StatLine, children: list[StatLine]) -> bool:
    """Return whether it is a shell at which an operator types: one on a terminal that gives each command a process
    group of its own. A shell that runs a script keeps its commands in its own group."""
    return line.name.lstrip("-") in SHELLS and line.tty != 0 and all(child.group != line.group for child in children)


def below_of(pid: int, below: dict[int, list[int]]) -> list[int]:
    found = list(below.get(pid, ()))
    for child in found:  # it grows while it is read
        found.extend(below.get(child, ()))
    return found


# --- files and locks --------------------------------------------------------------------------------------------------


def read_file(path: str, limit: int = 1 << 20) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        chunks = []
        while limit > 0 and (chunk := os.read(fd, min(limit, 65_536))):
            chunks.append(chunk)
            limit -= len(chunk)
        return b"".join(chunks)
    except OSError:
        return None
    finally:
        os.close(fd)


def read_json(path: str) -> dict[str, Any]:
    """Empty if there is no such file, or it is malformed."""
    try:
        value = json.loads(read_file(path) or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


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


def write_file(name: str, data: bytes) -> None:
    """Write a file under a temporary name, make it durable, and rename it."""
    tmp = f".{name}.tmp"
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        write_all(fd, data)
        os.fsync(fd)
    except OSError:
        os.unlink(tmp)
        raise
    finally:
        os.close(fd)
    os.rename(tmp, name)
    sync_dir()


def reserve(name: str, size: int) -> None:
    """Give the file ``name`` its space on the disk now, under its temporary name: ``fill_reserved`` needs none."""
    fd = os.open(f".{name}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        write_all(fd, b" " * size)
        os.fsync(fd)
    finally:
        os.close(fd)


def fill_reserved(name: str, data: bytes = b"") -> None:
    """Write into the space that was reserved, and rename it to ``name``."""
    if data:
        overwrite(f".{name}.tmp", data)
    os.rename(f".{name}.tmp", name)
    sync_dir()


def overwrite(path: str, data: bytes, *, durable: bool = True) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        write_all(fd, data)
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)


def take_lock(directory: str) -> int:
    """Return a descriptor that holds the file ``lock`` in ``directory``. Raises StartRefusedError while another
    supervisor holds it; OSError where it cannot be locked, or is not a file that only root or we can have written. It
    is never removed: otherwise two supervisors could lock two files of one name."""
    path = os.path.join(directory, "lock")
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid not in (0, os.geteuid()):
            raise OSError(errno.EPERM, f"it is not podwatch's file (uid {found.st_uid})", path)
        if found.st_uid == os.geteuid() and found.st_mode & 0o077:
            os.fchmod(fd, 0o600)  # who can read a file can lock it
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.lstat(path), found):
            raise OSError(errno.ESTALE, "the lock file was replaced", path)
    except BlockingIOError:
        owner = lock_owner(fd)
        os.close(fd)
        by = f"process {owner.get('supervisor')} (run {owner.get('run_id')})" if owner else "another supervisor"
        raise StartRefusedError("busy", f"training in this output directory is supervised by {by}", 0, path) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def lock_output(path: str, how: int = fcntl.LOCK_EX) -> int:
    """Return a descriptor that holds the output directory itself: links and bind mounts are other names of one inode.
    Nothing is written. ``how``: LOCK_SH for one of several nodes that train in it. Raises StartRefusedError while
    another supervisor holds it; OSError where it cannot be locked, or a process of another user, who can read it, holds
    it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        owners = flock_owners(os.fstat(fd).st_ino)
        os.close(fd)
        if owners and all(users_of(pid) and not {0, os.geteuid()}.issuperset(users_of(pid)) for pid in owners):
            raise OSError(errno.EPERM, f"another user's process {owners[0]} holds it", path) from None
        by = f"process {owners[0]}" if owners else "another supervisor"
        raise StartRefusedError("busy", f"training in this output directory is supervised by {by}", 0, path) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def flock_owners(inode: int) -> list[int]:
    """Return the processes of this PID namespace that hold a flock on this inode. Its device is not compared: overlays
    show another one."""
    lines = [line.split() for line in (read_file("/proc/locks") or b"").decode("ascii", "replace").splitlines()]
    held = [words for words in lines if len(words) > 5 and words[1] == "FLOCK" and words[5].endswith(f":{inode}")]
    return [int(words[4]) for words in held if words[4].isdigit() and words[4] != "0"]


def lock_owner(fd: int) -> dict[str, Any]:
    """Return the record that the last owner of the lock wrote into it."""
    try:
        value = json.loads(os.pread(fd, 8192, 0) or b"{}")
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


# --- survivors --------------------------------------------------------------------------------------------------------
# A killed supervisor frees its locks, and what it supervised lives on. The record and the lock files still name it.


def refuse_unsearched(records: list[dict[str, Any]], searched: list[str]) -> None:
    """Raise StartRefusedError if the end of an earlier start was not recorded, unless podwatch ``searched`` for its
    processes and found none. podwatch searches without the locks; a start that took them in between, and whose
    supervisor was killed, is not among those."""
    machine = (boot_id(), pid_namespace())
    for record in records:
        if not names_a_trainer(record) or (record.get("boot_id"), record.get("pid_namespace")) != machine:
            continue
        start_id, directory = record["start_id"], str(record.get("directory", "."))
        if start_id not in searched and not os.path.exists(os.path.join(directory, f"ended-{start_id}")):
            raise StartRefusedError("busy", f"processes of an earlier start may still be running: {start_id}")


def names_a_trainer(record: dict[str, Any]) -> bool:
    numbers = record.get("pid"), record.get("ticks")
    return all(isinstance(number, int) for number in numbers) and isinstance(record.get("start_id"), str)


# --- log --------------------------------------------------------------------------------------------------------------


class OutputLog:
    """A file that others append to: bounded by rotation, with space reserved ahead of its end."""

    def __init__(self, path: str, limit: int, count: int, *, ahead: int = 0, mode: int = 0o600) -> None:
        self.path, self.limit, self.count, self.ahead = path, limit, count, ahead
        self.reserved = 0
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self.fd = os.open(path, flags, mode)

    def maintain(self) -> None:
        """Rotate if the limit is reached, and reserve space. Called about once a second."""
        size = os.fstat(self.fd).st_size
        if size >= self.limit:
            self.rotate()
            size = os.fstat(self.fd).st_size
        if self.ahead and self.reserved - size < self.ahead // 2:
            self.reserve(size)

    def reserve(self, size: int) -> None:
        done = _libc.fallocate(self.fd, FALLOC_FL_KEEP_SIZE, ctypes.c_int64(size), ctypes.c_int64(self.ahead))
        if done == 0:
            self.reserved = size + self.ahead
        elif ctypes.get_errno() != errno.ENOSPC:
            self.ahead = 0  # a file system that cannot
        elif size > self.reserved - 65_536 and not self.drop_oldest():
            # The disk is full and the reserve used up: lose old output rather than fail the trainer's next print.
            self.truncate()

    def rotate(self) -> None:
        for n in range(self.count - 1, 0, -1):
            try:
                os.rename(f"{self.path}.{n}", f"{self.path}.{n + 1}")
            except FileNotFoundError:
                continue
        if self.count > 0:
            self.copy(f"{self.path}.1")
        self.truncate()

    def copy(self, target: str) -> None:
        """Copy the output to ``target``; a full disk loses it."""
        offset = 0
        try:
            out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
            try:
                while chunk := os.pread(self.fd, 1 << 20, offset):  # to the end as it is then: writing continues
                    offset += len(chunk)
                    write_all(out, chunk)
            finally:
                os.close(out)
        except OSError:
            try:
                os.unlink(target)
            except OSError:
                pass

    def truncate(self) -> None:
        os.ftruncate(self.fd, 0)
        self.reserved = 0

    def drop_oldest(self) -> bool:
        for n in range(self.count, 0, -1):
            try:
                os.unlink(f"{self.path}.{n}")
            except OSError:
                continue
            return True
        return False


# --- from the fork to the exec ----------------------------------------------------------------------------------------


def default_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in range(1, signal.NSIG):
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            continue


def become_trainer(
    request: dict[str, Any], owner: tuple[int, int] | None, go: int, failed: int, log_fd: int
) -> NoReturn:
    """In the child: wait for the byte, then become the trainer. Never returns."""
    os.setsid()
    if os.read(go, 1) != b"g":
        os._exit(125)  # the supervisor died before the record was durable: nothing has been started
    step, where = "setup", ""
    try:
        default_signals()
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.umask(0o022)
        try:
            with open("/proc/self/oom_score_adj", "w") as stream:
                stream.write("0")
        except OSError:
            pass  # not allowed to: podwatch's own, lower value stays
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        if failed != 3:
            os.dup2(failed, 3, inheritable=False)
        os.closerange(4, 1 << 30)
        failed = 3
        if owner is not None:
            step, where = "user", request["user"]
            become_user(request["user"], *owner)
        step, where = "cwd", request["cwd"]
        os.chdir(request["cwd"])
        for command in request["before"]:
            step, where = "before", " ".join(command)[:200]
            run_before(command, request["env"], request["before_deadline"])
        step, where = "exec", request["argv"][0]
        os.execvpe(request["argv"][0], request["argv"], request["env"])  # noqa: S606 - argv by design, never a shell
    except OSError as error:
        report = {"step": step, "text": error.strerror or str(error), "errno": error.errno or 0, "where": where}
        os.write(failed, json.dumps(report).encode())
    except BaseException as error:  # whatever it is, podwatch must get a report
        os.write(failed, json.dumps({"step": step, "text": repr(error), "errno": 0, "where": where}).encode())
    os._exit(127)


def become_user(name: str, uid: int, gid: int) -> None:
    if os.geteuid() == 0:
        os.initgroups(name, gid)
    if os.getgid() != gid:
        os.setgid(gid)
    if os.getuid() != uid:
        os.setuid(uid)


def run_before(command: list[str], env: dict[str, str], seconds: float) -> None:
    """Run one command of ``trainer.start_before`` to its end. Processes that it leaves running belong to this start.
    Raises OSError when it cannot run, fails, or takes too long."""
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
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() >= until:
            try:
                os.killpg(pid, signal.SIGKILL)
            except OSError:
                pass
            os.waitpid(pid, 0)
            raise OSError(errno.ETIMEDOUT, f"was not done after {seconds:.0f} s")
        time.sleep(0.02)
    code = os.waitstatus_to_exitcode(ended[1])
    if code == 127:
        raise OSError(0, "could not be run (127)")
    if code != 0:
        raise OSError(0, f"ended with exit code {code}" if code > 0 else f"was ended by signal {-code}")


def owner_of(user: str) -> tuple[int, int] | None:
    """Return (uid, gid) of the user that training runs as; None for our own. Raises StartRefusedError."""
    if not user:
        return None
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise StartRefusedError("user", f"user {user!r} not found") from None
    return entry.pw_uid, entry.pw_gid


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


# --- end of the launcher, and the tree --------------------------------------------------------------------------------


class SupervisedTree:
    """Everything below this process: signals it, ends it when asked to, reaps it, and records how the launcher ended.

    A stop sends SIGTERM to all of it, and SIGKILL once the grace is over, again and again until nothing of it is left.
    An operator's terminals inside the tree are never signalled.
    """

    def __init__(self, start_id: str) -> None:
        self.start_id = start_id
        self.launcher, self.ticks = 0, 0
        self.end: dict[str, Any] = {}
        """How the launcher ended; empty while it lives."""
        self.recorded = False
        self.ends: list[dict[str, Any]] = []
        """How other processes ended, the last ones. Only those that this process reaps: direct children and orphans."""
        self.kill_at: float | None = None
        """Monotonic second at which a stop turns into SIGKILL; None without a stop."""
        self.empty = False

    def signal_all(self, number: int) -> None:
        tree = tree_below(os.getpid())
        for pid in tree.keys() - operators(tree):
            send_signal(pid, tree[pid].ticks, number)

    def only_operators(self) -> bool:
        tree = tree_below(os.getpid())
        return bool(tree) and operators(tree).issuperset(tree)

    def stop(self, grace: float) -> None:
        until = time.monotonic() + grace
        if self.kill_at is None:
            self.kill_at = until
            self.signal_all(signal.SIGTERM)
            self.signal_all(signal.SIGCONT)  # a stopped process does not see SIGTERM
        self.kill_at = min(self.kill_at, until)

    def follow(self) -> None:
        """One turn: reap, continue a stop, and see whether anything is left."""
        none_left = self.reap()
        if self.kill_at is not None and time.monotonic() >= self.kill_at:
            self.signal_all(signal.SIGKILL)
        self.empty = none_left or (bool(self.end) and self.only_operators())
        if self.end and not self.recorded:
            self.record_end()

    def reap(self) -> bool:
        """Reap what has ended. Return whether no child is left. The launcher's end is recorded while it is a zombie: if
        this process is killed in between, nobody takes the launcher for one that ended without a record."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return True
            if ended is None:
                return False
            by_exit = ended.si_code == os.CLD_EXITED
            how: dict[str, Any] = {"code": ended.si_status if by_exit else None}
            how |= {
                "signal": None if by_exit else ended.si_status,
                "at_wall": time.time(),
                "at_boot": time.clock_gettime(time.CLOCK_BOOTTIME),
            }
            if ended.si_pid == self.launcher and not self.end:
                self.end = how | {"version": VERSION, "start_id": self.start_id, "stopped": self.kill_at is not None}
                self.record_end()
            elif (line := stat_of(ended.si_pid)) is not None:
                self.ends = [*self.ends[1 - ENDS_SHOWN :], {"pid": ended.si_pid, "ticks": line.ticks} | how]
            os.waitpid(ended.si_pid, 0)

    def record_end(self) -> None:
        try:
            fill_reserved(f"exit-{self.start_id}.json", json.dumps(self.end).encode().ljust(EXIT_BYTES))
            self.recorded = True
        except OSError:
            self.recorded = False  # tried again in each turn

    def sweep(self) -> bool:
        """Kill what the commands before a failed start left running: nothing else would end it. Return whether nothing
        is left."""
        until = time.monotonic() + 5.0
        while not (none_left := self.reap()) and time.monotonic() < until:
            self.signal_all(signal.SIGKILL)
            time.sleep(0.02)
        return none_left


# --- the supervisor of a trainer --------------------------------------------------------------------------------------


class TrainerSupervisor:
    """One start, from the request to the end of its last process."""

    def __init__(self, start_id: str) -> None:
        self.start_id = start_id
        self.request: dict[str, Any] = {}
        self.warnings: list[str] = []
        self.tree = SupervisedTree(start_id)
        self.log: OutputLog
        self.locks: list[int] = []
        self.output_lock = -1
        self.job: dict[str, Any] = {}
        """In job mode: "pipe" (a descriptor), "grace" (seconds), and what identifies the job's owner."""
        self.next_tick = 0.0
        self.gave_up_at: float | None = None
        self.state = b""
        self.wake_r, self.wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    # -- start

    def start(self) -> None:
        """Return once the command was executed. Raises StartRefusedError or OSError if it was not."""
        name = f"start-{self.start_id}.json"
        request = self.request = read_json(name)
        if not request:
            raise StartRefusedError("superseded", "the start was withdrawn", 0, name)
        os.unlink(name)
        self.job = request.get("job") or {}
        if self.job:
            os.set_inheritable(self.job["pipe"], False)
        self.take_locks(request["lock_also"], request["output_dir"], shared=request["output_shared"])
        if (read_file("wanted") or b"").decode().strip() != self.start_id:
            raise StartRefusedError("superseded", "a newer start took its place")
        if time.clock_gettime(time.CLOCK_BOOTTIME) > request["expires"]:
            raise StartRefusedError("superseded", "the start came too late")
        owner = owner_of(request["user"])
        refuse_unsearched([read_json("record.json"), *map(lock_owner, self.locks)], request["searched"])
        self.remove_older()
        self.open_log(owner)
        if (got := raise_nofile(request["nofile"])) < request["nofile"]:
            self.warn(f"open-file limit is {got}, wanted {request['nofile']}")
        failure = self.launch(owner)
        if failure:
            if self.tree.sweep():
                fill_reserved(f"ended-{self.start_id}")
            os.unlink("record.json")
            report = json.loads(failure)
            raise StartRefusedError(report["step"], report["text"], report["errno"], report["where"])
        self.request = {key: request[key] for key in ("grace", "linger")}  # the environment has secrets
        try:
            fill_reserved(f"executed-{self.start_id}")
            self.show_state()
            self.answer({"ok": True, "pid": self.tree.launcher, "warnings": self.warnings})
        except OSError as error:  # training runs: from now on this process must not end before it
            self.warn(f"cannot write to the state directory: {error.strerror}")

    def take_locks(self, also: list[str], output_dir: str, *, shared: bool) -> None:
        try:
            self.locks.append(take_lock("."))
        except OSError as error:
            raise StartRefusedError("permission", f"cannot lock: {error.strerror}", error.errno or 0, "lock") from error
        for directory in also:
            try:
                self.locks.append(take_lock(directory))
            except OSError as error:
                self.warn(f"cannot lock {directory}: {error.strerror}")
        try:
            self.output_lock = lock_output(output_dir, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        except OSError as error:  # the trainer makes it, or its file system locks no directories
            if error.errno not in (errno.ENOENT, errno.EBADF):
                self.warn(f"cannot lock {output_dir}: {error.strerror}")

    def remove_older(self) -> None:
        """Delete the small files of earlier starts."""
        kinds = tuple(f"{dot}{kind}-" for dot in ("", ".") for kind in ("exit", "executed", "ended", "state", "result"))
        for name in os.listdir("."):
            if name.startswith(kinds) and self.start_id not in name:
                try:
                    os.unlink(name)
                except OSError:
                    pass

    def open_log(self, owner: tuple[int, int] | None) -> None:
        path, limit = self.request["log"], self.request["log_limit"]
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)  # noqa: PTH103
        self.log = OutputLog(path, limit, self.request["log_count"], ahead=min(8 << 20, limit), mode=0o640)
        if owner is not None:
            os.fchown(self.log.fd, *owner)  # so that the trainer can reopen /dev/stdout
        self.log.maintain()

    def launch(self, owner: tuple[int, int] | None) -> bytes:
        """Fork the child, make the record durable, and only then let the child execute the command. Return the child's
        report of its failure; empty once the command runs."""
        go_r, go_w = os.pipe2(os.O_CLOEXEC)
        failed_r, failed_w = os.pipe2(os.O_CLOEXEC)
        self.reserve()
        self.tree.launcher = os.fork()
        if self.tree.launcher == 0:
            try:
                os.close(go_w)
                os.close(failed_r)
                become_trainer(self.request, owner, go_r, failed_w, self.log.fd)
            finally:
                os._exit(126)
        os.close(go_r)
        os.close(failed_w)
        self.tree.ticks = own_ticks(self.tree.launcher)
        self.write_record()
        os.write(go_w, b"g")
        os.close(go_w)
        failure = b""
        while True:
            self.kill_if_unwanted(failed_r)
            chunk = os.read(failed_r, 4096)
            if not chunk:
                os.close(failed_r)
                return failure
            failure += chunk

    def kill_if_unwanted(self, failed_r: int) -> None:
        """Wait for the child's report. Kill it if the job ends or SIGTERM comes first: its commands before the start
        can take minutes."""
        watched = [failed_r, self.wake_r, *([self.job["pipe"]] if self.job else [])]
        while failed_r not in (ready := select.select(watched, [], [])[0]):
            if self.wake_r not in ready or signal.SIGTERM in self.signals():
                self.tree.signal_all(signal.SIGKILL)
                watched = [failed_r]

    def reserve(self) -> None:
        for name, size in (
            (f"exit-{self.start_id}.json", EXIT_BYTES),
            (f"result-{self.start_id}.json", EXIT_BYTES),
            (f"executed-{self.start_id}", 0),
            (f"ended-{self.start_id}", 0),
            (f"state-{self.start_id}.json", STATE_BYTES),
        ):
            reserve(name, size)
        fill_reserved(f"state-{self.start_id}.json")

    def write_record(self) -> None:
        record = {
            "version": VERSION,
            "start_id": self.start_id,
            "boot_id": boot_id(),
            "pid_namespace": pid_namespace(),
            "supervisor": os.getpid(),
            "supervisor_ticks": own_ticks(os.getpid()),
            "pid": self.tree.launcher,
            "ticks": self.tree.ticks,
            "directory": os.getcwd(),
            "started_wall": time.time(),
        }
        record |= {key: self.request[key] for key in ("run_id", "argv", "cwd", "user", "output_dir", "log", "step")}
        if self.job:
            record["job"] = {key: value for key, value in self.job.items() if key not in ("pipe", "grace")}
        write_file("record.json", json.dumps(record).encode())
        short = {key: value for key, value in record.items() if key not in ("argv", "cwd", "log")}
        for fd in self.locks:
            try:
                os.ftruncate(fd, 0)
                os.pwrite(fd, json.dumps(short).encode(), 0)
                os.fsync(fd)
            except OSError:
                pass  # a full disk: the record counts

    def answer(self, result: dict[str, Any]) -> None:
        name, data = f"result-{self.start_id}.json", json.dumps({"version": VERSION} | result).encode()
        try:
            fill_reserved(name, data.ljust(EXIT_BYTES))
        except OSError:
            write_file(name, data)

    # -- loop

    def run(self) -> None:
        poll = select.poll()
        poll.register(self.wake_r, select.POLLIN)
        if self.job:
            poll.register(self.job["pipe"], 0)  # an end of file is always reported
        while True:
            self.tree.follow()
            if time.monotonic() >= self.next_tick:
                self.next_tick = time.monotonic() + TICK
                self.maintain_log()
            self.show_state()
            if self.finished():
                return
            for fd, _ in poll.poll(100 if self.tree.kill_at is not None else int(TICK * 1000)):
                if fd != self.wake_r:
                    poll.unregister(fd)
                    self.tree.stop(self.job["grace"])
                elif signal.SIGTERM in self.signals():
                    self.tree.stop(self.request["grace"])

    def signals(self) -> bytes:
        try:
            return os.read(self.wake_r, 4096)
        except BlockingIOError:
            return b""

    def maintain_log(self) -> None:
        try:
            self.log.maintain()
        except OSError as error:
            self.warn(f"cannot rotate the log: {error.strerror}")

    def show_state(self) -> None:
        """Rewrite the state file, if it changed, within its reserved space."""
        state = {"version": VERSION, "warnings": self.warnings[-20:], "ends": self.tree.ends}
        data = json.dumps(state).encode().ljust(STATE_BYTES)
        if data != self.state and len(data) == STATE_BYTES:
            self.state = data
            try:
                overwrite(f"state-{self.start_id}.json", data, durable=False)
            except OSError as error:
                self.warn(f"cannot write to the state directory: {error.strerror}")

    def finished(self) -> bool:
        """Return whether nothing of the tree lives and that is recorded, or could not be for ``linger`` seconds."""
        if not (self.tree.empty and self.tree.end):
            return False
        self.gave_up_at = self.gave_up_at or time.monotonic() + self.request["linger"]
        if self.tree.recorded:
            try:
                fill_reserved(f"ended-{self.start_id}")
                return True
            except OSError:
                pass
        return self.tree.kill_at is not None or time.monotonic() >= self.gave_up_at


def keep(directory: str, start_id: str) -> int:
    os.umask(0o077)
    os.chdir(directory)
    try:
        os.setsid()
    except PermissionError:
        pass  # a session leader already
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisor = TrainerSupervisor(start_id)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    wake_on((signal.SIGTERM, signal.SIGCHLD), supervisor.wake_w)
    try:
        supervisor.start()
    except (StartRefusedError, OSError) as error:
        if isinstance(error, OSError):
            where = str(error.filename or directory)
            error = StartRefusedError("io", error.strerror or str(error), error.errno or 0, where)
        refusal = {"ok": False, "kind": error.kind, "text": error.text, "errno": error.code, "where": error.where}
        try:
            supervisor.answer(refusal)
        except OSError:
            sys.stderr.write(f"{error.kind}: {error.text} ({error.where})\n")
        return 75 if error.kind in ("busy", "superseded") else 1
    supervisor.run()
    return 0


def wake_on(numbers: Iterable[int], fd: int) -> None:
    """Write the number of each of these signals into ``fd``."""
    signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)


# --- the supervisor of the daemon -------------------------------------------------------------------------------------

NO_RESTART = frozenset({0, 64, 65, 77, 78, 86})
AGAIN = 86
"""Exit code of a job that was not decided: run it again, preferably on another machine."""
JOB_PERMANENT = frozenset({64, 65, 77, 78})
"""Exit codes that end a job without a verdict: every attempt would end in the same way."""
UNDER_INIT, JOB_PIPE = "PODWATCH_UNDER_INIT", "PODWATCH_JOB_PIPE"
JOB_PROCESS, SILENT_SECONDS = "PODWATCH_JOB_PROCESS", "PODWATCH_SILENT_SECONDS"
"""variables_of_own_processes.py explains them; this file cannot import it."""
HEALTHY_AFTER = 300.0
LONGEST_GRACE = 620.0
"""Seconds: a little more than the longest grace that can be configured. A container runtime can allow much less."""
LAST_KILL_SECONDS = 10.0
"""Seconds that killed processes get to end; one that is stuck in the kernel does not keep a job from ending."""
LOG_LIMIT = 16 << 20
_UCRED = struct.Struct("3i")


class JobPipe:
    """The pipe whose end of file ends every trainer of a job, and the job's verdict."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe2(os.O_CLOEXEC)
        self.open = True
        self.verdict: int | None = None
        """The exit code that the daemon declared to be the job's; it counts, too, if the daemon is killed while it
        exits."""

    def close(self) -> None:
        if self.open:
            self.open = False
            os.close(self.write)


class DaemonSupervisor:
    """From the first start of the daemon to the exit of this process."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.command: list[str] = options.command
        self.first = os.getpid() == 1
        self.pid = os.getpid()
        self.job = JobPipe() if options.job else None
        self.log: OutputLog | None = None
        self.wake_r, self.wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.pid_file = os.path.join(options.run_dir, "init.pid")
        self.reporting = options.report_fd is not None
        if self.reporting:
            os.set_inheritable(options.report_fd, False)
        # the daemon; all times are monotonic seconds
        self.daemon = 0
        self.started = 0.0
        self.ready = self.stopping = False
        self.deadline = 0.0
        """When its next heartbeat is due."""
        self.last_message = 0.0
        self.silent_since: float | None = None
        """The last message of the first daemon that missed its watchdog, until a later daemon is ready."""
        self.unready_since: float | None = None
        self.aborted_at: float | None = None
        self.restart_at: float | None = None
        self.backoff: float = options.backoff
        self.last_code = 0
        # the end
        self.asked_at: float | None = None
        """When a signal asked this process to end."""
        self.daemon_needs_until = 0.0
        """Until when the ending daemon asked for time (its configured grace)."""
        self.over_at: float | None = None
        """Job mode: when the daemon had ended for good."""
        self.rest_signalled = False
        self.rest_until = 0.0
        self.killed_at: float | None = None
        self.only_orphans = False
        """The daemon ended permanently; PID 1 stays for the other processes."""
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        # Abstract: nothing to clean up, no 108-byte path. Senders are checked by their credentials instead.
        self.address = f"podwatch-init-{os.getpid()}-{os.urandom(8).hex()}"
        self.listener.bind("\0" + self.address)

    # -- the loop

    def run(self) -> int:
        os.chdir("/")  # the daemon imports nothing from the working directory, and keeps no mount busy
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in (signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        wake_on((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD), self.wake_w)
        if self.job is not None:  # an engine can start its job with these blocked
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
        if self.options.log:
            self.log = OutputLog(self.options.log, LOG_LIMIT, 1)
            os.dup2(self.log.fd, 1)
            os.dup2(self.log.fd, 2)
        self.write_pid()
        self.start()
        poll = select.poll()
        poll.register(self.wake_r, select.POLLIN)
        poll.register(self.listener, select.POLLIN)
        try:
            while (code := self.turn()) is None:
                poll.poll(self.milliseconds_to_wait())
                self.read_messages()
                self.handle_signals()
            # At its end the interpreter takes the handlers away: a signal then must not replace the code.
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
            return code
        finally:
            self.remove_pid()

    def write_pid(self) -> None:
        """Write ``init.pid``, for operators. The writer keeps it locked: a second podwatch, which is refused, must not
        replace the file of the first. A failed write is ignored. Mode 0600: a user who can read it can lock it."""
        try:
            fd = os.open(self.pid_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError:
            return
        try:
            os.fchmod(fd, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.write(fd, f"{os.getpid()}\n".encode())
        except OSError:
            os.close(fd)  # otherwise it stays open, and so locked, while this process lives

    def remove_pid(self) -> None:
        if read_file(self.pid_file, 64) == f"{os.getpid()}\n".encode():
            try:
                os.unlink(self.pid_file)
            except OSError:
                pass

    def milliseconds_to_wait(self) -> int:
        now = time.monotonic()
        due = [now + 30.0]  # the log's size
        if any(at is not None for at in (self.asked_at, self.aborted_at, self.over_at)):
            due.append(now + 0.1)
        if self.restart_at is not None:
            due.append(self.restart_at)
        if self.daemon and not self.stopping:
            due.append(self.deadline)
        return max(0, int((min(due) - now) * 1000) + 1)

    def turn(self) -> int | None:
        """One iteration; returns the exit code at the end, else None."""
        none_left = self.reap()
        now = time.monotonic()
        if self.job is not None and (self.asked_at is not None or self.over_at is not None):
            return self.end_job(self.job, now, none_left)
        if self.asked_at is not None:
            return self.end(now, self.asked_at, none_left)
        if self.only_orphans:
            return self.last_code if none_left else None
        if self.restart_at is not None and now >= self.restart_at:
            self.start()
        if self.daemon:
            self.watch(now)
        elif self.restart_at is None and self.job is not None:
            self.over_at = now
        elif self.restart_at is None:
            self.report("ended", self.last_code)
            if not self.first or none_left or self.last_code == AGAIN:
                return self.last_code
            self.say(f"podwatch exited with {self.last_code} and is not restarted; init stays for the other processes")
            self.only_orphans = True
        if self.log is not None:
            self.log.maintain()
        return None

    # -- the daemon

    def start(self) -> None:
        self.restart_at = self.aborted_at = None
        self.ready = self.stopping = False
        self.started = self.last_message = time.monotonic()
        self.unready_since = self.unready_since or self.started
        self.deadline = self.started + self.options.start_timeout
        environment = self.environment()
        # Until the child resets init's handlers, which only wake a loop, a forwarded SIGTERM would be lost, and the
        # daemon would not end. Blocked, it is delivered after the reset. Losing a SIGHUP is harmless: the configuration
        # is read later.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
        try:
            self.daemon = os.fork()
            if self.daemon == 0:
                self.become_daemon(environment, before)
        except OSError as error:  # no process or memory left; an exit of PID 1 would end training
            self.daemon, self.last_code = 0, 75
            self.again(f"cannot start podwatch ({error.strerror})")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def environment(self) -> dict[str, str]:
        removed = ("WATCHDOG_PID", "WATCHDOG_USEC", "NOTIFY_SOCKET", SILENT_SECONDS, JOB_PIPE, JOB_PROCESS)
        environment = {name: value for name, value in os.environ.items() if name not in removed}
        environment["NOTIFY_SOCKET"] = "@" + self.address
        environment["WATCHDOG_USEC"] = str(int(self.options.watchdog * 1_000_000))
        environment[UNDER_INIT] = "job" if self.job is not None else "pid1" if self.first else "detached"
        if self.job is not None:
            environment[JOB_PIPE] = str(self.job.read)
            environment[JOB_PROCESS] = own_identity()
        if self.silent_since is not None:
            environment[SILENT_SECONDS] = f"{self.started - self.silent_since:.1f}"
        return environment

    def become_daemon(self, environment: dict[str, str], mask: set[int]) -> None:
        """In the child; does not return. ``mask`` is restored before the exec, which would keep the blocked signals."""
        try:
            os.setsid()
            if self.job is not None:  # the engine kills init: no daemon trains on, or publishes, without its job
                _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                os.set_inheritable(self.job.read, True)
                if os.getppid() != self.pid:
                    os._exit(AGAIN)
            default_signals()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            environment["WATCHDOG_PID"] = str(os.getpid())
            os.execvpe(self.command[0], self.command, environment)  # noqa: S606 - argv by design
        except OSError as error:
            os.write(2, f"cannot execute {self.command[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(78)

    def watch(self, now: float) -> None:
        if self.aborted_at is not None:
            if now - self.aborted_at >= self.options.abort_wait:
                self.signal_daemon(signal.SIGKILL)
        elif now >= self.deadline and not self.stopping:
            what = "no heartbeat" if self.ready else "not ready in time"
            self.say(f"podwatch (process {self.daemon}): {what}; init kills and restarts it, training continues")
            self.aborted_at = now
            self.silent_since = self.silent_since or self.last_message
            self.signal_daemon(signal.SIGABRT)
            self.signal_daemon(signal.SIGCONT)

    def daemon_ended(self, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        lasted = time.monotonic() - self.started
        self.daemon = 0
        self.last_code = code if code >= 0 else 128 - code
        if self.job is not None and self.job.verdict is not None and code < 0:  # it had decided
            self.last_code = self.job.verdict
        if self.asked_at is not None:
            return
        if self.job is not None:
            if self.job.verdict is not None or code in JOB_PERMANENT:
                return
            self.last_code = AGAIN
            if self.unready_since is not None and time.monotonic() - self.unready_since >= self.options.standby:
                self.say(f"podwatch was not ready within {self.options.standby:g} s ({describe(code)})")
                return
        elif code in NO_RESTART and self.aborted_at is None:
            return
        self.backoff = self.options.backoff if lasted >= HEALTHY_AFTER else self.backoff
        self.again(f"podwatch ended ({describe(code)})")

    def again(self, why: str) -> None:
        """Schedule a restart, with a growing backoff. Not while the detaching command waits: it shows the reason and
        ends."""
        if not self.reporting:
            self.restart_at = time.monotonic() + self.backoff
            self.say(f"{why}; init starts it in {self.backoff:g} s, training continues")
            self.backoff = min(self.backoff * 2, 60.0)

    def signal_daemon(self, number: int) -> None:
        if self.daemon:
            try:
                os.kill(self.daemon, number)  # a child that is not reaped yet, so the pid is not reused
            except ProcessLookupError:
                pass

    # -- messages and signals

    def read_messages(self) -> None:
        while True:
            try:
                data, ancillary, _, _ = self.listener.recvmsg(4096, socket.CMSG_SPACE(_UCRED.size))
            except OSError:
                return
            sender = next((_UCRED.unpack(d[: _UCRED.size])[0] for _, kind, d in ancillary if kind == 2), 0)
            if self.daemon and sender == self.daemon:
                for message in data.decode("utf-8", "replace").splitlines():
                    self.read_message(message)

    def read_message(self, message: str) -> None:
        now = self.last_message = time.monotonic()
        name, _, value = message.partition("=")
        if message == "READY=1":
            if not self.ready:
                self.ready = True
                self.unready_since = None
                self.silent_since = None  # the daemon got it in its environment, and reports it
                self.deadline = now + self.options.watchdog
            self.report("ready", os.getpid())
        elif message == "WATCHDOG=1" and self.ready:
            self.deadline = now + self.options.watchdog
        elif message == "STOPPING=1":
            self.stopping = True
        elif name == "PODWATCH_END" and value.isdigit() and self.job is not None:
            self.job.verdict = int(value)
        elif name == "EXTEND_TIMEOUT_USEC" and value.isdigit():
            until = now + int(value) / 1_000_000
            self.deadline = max(self.deadline, until)
            if self.asked_at is not None:
                self.daemon_needs_until = min(until, self.asked_at + LONGEST_GRACE)

    def handle_signals(self) -> None:
        try:
            numbers = os.read(self.wake_r, 4096)
        except BlockingIOError:
            return
        if signal.SIGHUP in numbers and self.ready:  # before that the daemon has no handler, and SIGHUP would end it
            self.signal_daemon(signal.SIGHUP)
        if (signal.SIGTERM in numbers or signal.SIGINT in numbers) and self.asked_at is None:
            self.asked_at = time.monotonic()
            self.restart_at = None
            self.signal_daemon(signal.SIGTERM)
            self.signal_daemon(signal.SIGCONT)
            if self.job is not None:
                self.say("stop requested by the engine: podwatch asks training to end now")
                self.job.close()

    def reap(self) -> bool:
        """True when no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self.daemon:
                self.read_messages()  # those that it sent before it ended
                self.daemon_ended(status)

    # -- the end

    @property
    def grace(self) -> float:
        if self.options.grace is not None:
            return float(self.options.grace)
        return 5.0 if self.first else 60.0

    def end(self, now: float, asked_at: float, none_left: bool) -> int | None:
        self.restart_at = None
        in_time = now - asked_at < self.grace or now < self.daemon_needs_until
        if self.daemon and not self.rest_signalled and in_time:
            return None
        if not self.first:
            if self.daemon:
                self.signal_daemon(signal.SIGKILL)
                return None
            return self.last_code
        if not self.rest_signalled:
            self.rest_signalled = True
            # Training can save at SIGTERM: what the daemon has not used of the grace is for the other processes.
            self.rest_until = max(now + self.options.last, self.daemon_needs_until)
            try:
                os.kill(-1, signal.SIGTERM)  # as PID 1: all other processes of this container
            except OSError:
                pass
            return None
        return self.last_code if none_left or now >= self.rest_until else None

    def end_job(self, job: JobPipe, now: float, none_left: bool) -> int | None:
        """Training has ``--grace`` seconds from the signal, or from the daemon's end; then everything is killed."""
        job.close()
        self.restart_at = None
        began = min(at for at in (self.asked_at, self.over_at) if at is not None)
        if not self.daemon and self.over_at is None:
            self.over_at = now
        if not self.daemon and not self.rest_signalled:
            self.rest_signalled = True
            for pid, line in tree_below(os.getpid()).items():
                if line.parent == os.getpid():  # a supervisor passes it on to its trainer
                    send_signal(pid, line.ticks, signal.SIGTERM)
        stuck = self.killed_at is not None and now - self.killed_at >= LAST_KILL_SECONDS
        if none_left or stuck:
            if not none_left:
                self.say(f"left behind, stuck in the kernel: {list(tree_below(os.getpid()))}")
            decided = job.verdict is not None or self.last_code in JOB_PERMANENT
            return self.last_code if decided else AGAIN
        if now - began >= self.grace:
            self.killed_at = self.killed_at or now
            for pid, line in tree_below(os.getpid()).items():  # in each turn, because a tree can grow meanwhile
                send_signal(pid, line.ticks, signal.SIGKILL)
        return None

    # -- reports

    def report(self, word: str, number: int) -> None:
        """Answer the command that detaches, once."""
        if self.reporting:
            self.reporting = False
            try:
                os.write(self.options.report_fd, f"{word} {number}\n".encode())
            except OSError:
                pass
            os.close(self.options.report_fd)

    def say(self, text: str) -> None:
        try:
            os.write(2, f"podwatch init: {text}\n".encode())
        except OSError:
            pass


def own_identity() -> str:
    """``BOOT:NAMESPACE:PID:TICKS`` of this process; empty fields where /proc cannot be read."""
    line = stat_of(os.getpid())
    return f"{boot_id()}:{pid_namespace() or ''}:{os.getpid()}:{line.ticks if line else ''}"


def describe(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


# --- main -------------------------------------------------------------------------------------------------------------


def init(argv: list[str]) -> int:
    import argparse  # not needed above a trainer, where it would cost memory

    parser = argparse.ArgumentParser(prog="podwatch-init")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--log", default="")
    parser.add_argument("--detached", action="store_true")
    parser.add_argument("--report-fd", type=int)
    parser.add_argument("--watchdog", type=float, default=60.0, help="seconds without a heartbeat of the daemon")
    parser.add_argument("--start-timeout", type=float, default=180.0)
    parser.add_argument("--abort-wait", type=float, default=10.0)
    parser.add_argument("--backoff", type=float, default=1.0)
    grace = "default: 5 as PID 1 (docker stop allows 10 in total), 60 detached; the daemon can request more"
    parser.add_argument("--grace", type=float, help=grace)
    parser.add_argument("--last", type=float, default=3.0)
    parser.add_argument("--job", action="store_true")
    parser.add_argument("--standby", type=float, default=900.0, help="job: seconds without a ready daemon")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    if options.detached and os.fork() > 0:
        os._exit(0)  # no session leader, so that init never gets a controlling terminal
    return DaemonSupervisor(options).run()


def main(argv: list[str]) -> int:
    return keep(argv[2], argv[3]) if argv[1] == "keep" else init(argv[2:])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
