"""A process in a PID and a mount namespace of its own: the system calls, without any of pytest.

Linux only. As root directly, else within a user namespace, where the kernel allows one.
"""

import contextlib
import ctypes
import os
import platform
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_PR_SET_PDEATHSIG = 1
_CAP_SYS_ADMIN = 21
_CLONE = {"x86_64": 56, "aarch64": 220}
"""The number of the system call."""
_libc = ctypes.CDLL(None, use_errno=True)


def why_impossible() -> str:
    """Why no PID namespace can be made here; empty if one can."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        try:
            _unshare()
            init = os.fork()
            if not init:
                os._exit(_exit_code(_mount_proc, write))
            os._exit(os.waitstatus_to_exitcode(os.waitpid(init, 0)[1]))
        except OSError as error:
            os.write(write, f"{error.strerror}: {error.filename or 'unshare'}".encode())
            os._exit(1)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read, "rb") as answer:
        return answer.read().decode()


def fork_into_namespace(work: Callable[[], int], private: Sequence[Path] = ()) -> int:
    """Fork a process that runs ``work`` and exits with its result; the pid of the process above it, to wait for.

    The process is alone with its descendants: it sees a /proc of its own, and empty directories in the place of those
    in ``private`` that exist. Whatever is left in the namespace is killed when ``work`` returns, when the pid returned
    here is killed, and when our own process ends in any way. Call it in the main thread.
    """
    if may_clone():
        pid = clone(_CLONE_NEWPID | _CLONE_NEWNS)
        if not pid:
            die_with_parent(0)
            os._exit(_init(work, private))
        return pid
    ours = os.getpid()
    pid = os.fork()
    if not pid:
        die_with_parent(ours)
        os._exit(_hold(work, private))
    return pid


def may_clone() -> bool:
    """Whether one call makes the namespaces. Otherwise fork(2) comes first, which a process with several threads needs
    for what libraries prepare before a fork (OpenBLAS hangs without), and a process in a user namespace for its rights.
    """
    alone = len(list(Path("/proc/self/task").iterdir())) == 1
    return alone and os.geteuid() == 0 and can_clone() and _has_sys_admin()


def _has_sys_admin() -> bool:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:")]
    return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)


def can_clone() -> bool:
    """Whether ``clone`` knows this processor."""
    return platform.machine() in _CLONE


def clone(flags: int) -> int:
    """As fork(2), with flags; without what libraries prepare for fork(2), so not while there are threads."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid: int = ctypes.PyDLL(None).syscall(_CLONE[platform.machine()], flags | signal.SIGCHLD, 0, 0, 0, 0)
    if pid:
        python.PyOS_AfterFork_Parent()
    else:
        python.PyOS_AfterFork_Child()
    if pid < 0:
        raise OSError("clone(2) failed")
    return pid


def die_with_parent(parent: int) -> None:
    """Our process gets SIGKILL when the thread that forked it ends. ``parent``: its pid, 0 from outside a namespace."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def others() -> set[int]:
    """Every living process that this /proc shows, but 1 and our own."""
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
    return {pid for pid in pids if pid not in (1, os.getpid()) and _lives(pid)}


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def _hold(work: Callable[[], int], private: Sequence[Path]) -> int:
    """In the first child: makes the namespace, and waits for its init."""
    _unshare()
    init = os.fork()
    if not init:
        die_with_parent(0)
        os._exit(_init(work, private))
    return os.waitstatus_to_exitcode(os.waitpid(init, 0)[1])


def _init(work: Callable[[], int], private: Sequence[Path]) -> int:
    """Process 1 of the namespace: reaps what nobody waits for until the worker ends. Its end ends all others."""
    os.setsid()
    _mount_proc()
    for directory in private:
        if directory.is_dir():
            _mount("tmpfs", directory, "tmpfs")
    os.posix_spawn("/bin/true", ["true"], {})  # pid 2, which podwatch takes for the parent of the kernel's threads
    worker = os.fork()
    if not worker:
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    while True:
        with contextlib.suppress(InterruptedError):
            pid, status = os.wait()
            if pid == worker:
                return os.waitstatus_to_exitcode(status) & 0xFF


def _unshare() -> None:
    """As root, else (and as root in a container without that right) within a user namespace."""
    try:
        _call(_libc.unshare(_CLONE_NEWPID | _CLONE_NEWNS), "PID and mount namespace")
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        _call(_libc.unshare(_CLONE_NEWUSER), "user namespace")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        _call(_libc.unshare(_CLONE_NEWPID | _CLONE_NEWNS), "PID and mount namespace")


def _mount_proc() -> None:
    _call(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "private mounts")
    _mount("proc", Path("/proc"), "proc")


def _mount(source: str, target: Path, kind: str) -> None:
    _call(_libc.mount(source.encode(), os.fsencode(target), kind.encode(), 0, None), f"mount {kind} on {target}")


def _call(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _exit_code(work: Callable[[], object], write: int) -> int:
    try:
        work()
    except OSError as error:
        os.write(write, f"{error.strerror}: {error.filename}".encode())
        return 1
    return 0
