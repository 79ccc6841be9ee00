# ruff: noqa: PTH108, PTH116, PTH123, PTH208
"""podwatch's own init: PID 1 of a container, or the small parent that ``--detach`` leaves behind.

Standard library only, and run as a file (entry.py: ``python -I -S -E init.py ... -- COMMAND``), so that it stays
small and works where the rest of podwatch cannot be loaded any more. It does four things:

* reaps orphans: keepers whose daemon ended, and other processes of a container;
* restarts the daemon when it ends unexpectedly, with a growing backoff; not on 0, 64 (usage), 65 (the training command
  is at fault), 77 (permission), 78 (configuration) or 86 (gave up), as the systemd unit;
* is the daemon's watchdog, by systemd's protocol: no ``WATCHDOG=1`` within WATCHDOG_USEC means SIGABRT, then SIGKILL;
* forwards signals: SIGHUP (reload), SIGTERM and SIGINT.

init signals a keeper in one case only. As PID 1, SIGTERM means that the container is being stopped (preemption,
docs/maintenance.md): init sends SIGTERM to the daemon, waits ``--grace`` seconds (or as long as the daemon requests:
``[recovery] preempt_grace``), sends SIGTERM to every process (keepers forward it to training), and exits, which ends
the container, once they have ended, or once that time is over and ``--last`` seconds have passed. Detached, SIGTERM
means that podwatch exits: training continues under its keeper. When the daemon must not be restarted and PID 1 still
has children, init stays until they have ended: exiting would kill training because of, for instance, an invalid
configuration.

With ``--job`` (docs/jobs.md) init is an engine's job, as PID 1 or not, and nothing outlives it. It alone holds the
write end of a pipe; keepers hold the other end, and end training when it is closed: by init at the end, or by the
kernel if init is killed. A daemon that ends unexpectedly is restarted; its verdict (``PODWATCH_END=1`` and its exit
code) ends the job with that code. SIGTERM and SIGINT are a preemption: the daemon gets SIGTERM, the pipe is closed at
once, and after ``--grace`` seconds everything is killed.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import sys
import time

NO_RESTART = frozenset({0, 64, 65, 77, 78, 86})
AGAIN = 86
"""Exit code of a job that was not decided: run it again, preferably on another machine."""
JOB_PERMANENT = frozenset({64, 65, 77, 78})
"""Exit codes that end a job without a verdict: every attempt would end in the same way."""
UNDER_INIT, JOB_PIPE = "PODWATCH_UNDER_INIT", "PODWATCH_JOB_PIPE"
JOB_PROCESS, SILENT_SECONDS = "PODWATCH_JOB_PROCESS", "PODWATCH_SILENT_SECONDS"
"""variables_of_own_processes.py explains them; this file cannot import it."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
HEALTHY_AFTER = 300.0
MOST_FAREWELL = 620.0
"""Seconds: a little more than the longest grace that can be configured. A container runtime can allow much less."""
LAST_KILL_SECONDS = 10.0
"""Seconds that killed processes get to end; one that is stuck in the kernel does not keep a job from ending."""
LOG_LIMIT = 16 << 20
_UCRED = struct.Struct("3i")


class JobTree:
    """Job mode: everything below init ends with it."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe2(os.O_CLOEXEC)
        self.told = False
        self.verdict = False
        """The daemon said that its exit code is the job's."""
        self.code = AGAIN
        """That code, should the daemon be killed while it exits."""
        self.killed_at: float | None = None

    def let_go(self) -> None:
        """Close the pipe, so that every keeper ends its tree; and ask what else was left below init to end."""
        if not self.told:
            self.told = True
            os.close(self.write)

    def ask(self) -> None:
        """SIGTERM for init's own children, once the daemon has ended; a keeper passes it on."""
        for pid in _children(os.getpid()):
            _signal_child(pid, os.getpid(), signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL for everything below init. Repeated, because a tree can grow meanwhile."""
        self.killed_at = self.killed_at or time.monotonic()
        queue = [os.getpid()]
        while queue:
            parent = queue.pop()
            for pid in _children(parent):
                queue.append(pid)
                _signal_child(pid, parent, signal.SIGKILL)

    @property
    def stuck(self) -> bool:
        return self.killed_at is not None and time.monotonic() - self.killed_at >= LAST_KILL_SECONDS


def _parent_of(pid: int) -> int:
    """0 if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as stream:
            return int(stream.read().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def _identity() -> str:
    """Of this process; empty fields where /proc cannot be read."""
    boot = namespace = ticks = ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as stream:
            boot = stream.read().strip()
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
        with open("/proc/self/stat", errors="replace") as stream:
            ticks = stream.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        pass
    return f"{boot}:{namespace}:{os.getpid()}:{ticks}"


def _signal_child(pid: int, parent: int, number: int) -> None:
    """Through a descriptor, after the parent was compared: the pid may have been reused."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if _parent_of(pid) == parent:
            signal.pidfd_send_signal(fd, number)
    except OSError:
        pass
    finally:
        os.close(fd)


def _children(pid: int) -> list[int]:
    """Zombies included."""
    found: list[int] = []
    known = False
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children") as stream:
                found += [int(word) for word in stream.read().split()]
            known = True
        except OSError:
            continue
    if known:
        return found
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _parent_of(int(name)) == pid]


class Init:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.command: list[str] = options.command
        self.parent = os.getpid()
        self.first = self.parent == 1
        self.job = JobTree() if options.job else None
        self.unready_since: float | None = None
        """Job mode: monotonic second since which no daemon has become ready."""
        self.ending_since: float | None = None
        """Job mode: monotonic second at which the daemon had ended for good."""
        self.log_fd: int | None = None
        self.daemon = 0
        self.started = 0.0
        self.ready = False
        self.stopping = False
        """The daemon sent STOPPING=1."""
        self.deadline = 0.0
        """Monotonic second until which the daemon must send its next heartbeat."""
        self.heard = 0.0
        """Monotonic second of the daemon's start or of its last message."""
        self.silent_since: float | None = None
        """``heard`` of the first daemon that missed its watchdog, until a later daemon is ready."""
        self.aborted_at: float | None = None
        self.restart_at: float | None = None
        self.pause = options.backoff
        self.told_to_end: float | None = None
        self.farewell_until = 0.0
        """Monotonic second until which the ending daemon requested time (its configured grace)."""
        self.killed_rest = False
        self.rest_until = 0.0
        """Monotonic second until which the other processes of the container get to end."""
        self.last_code = 0
        self.only_children = False
        """The daemon ended permanently; PID 1 stays for the remaining processes."""
        self.reported = options.report_fd is None
        if not self.reported:
            os.set_inheritable(options.report_fd, False)
        self.wake_r, self.wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        # Abstract: nothing to clean up, no 108-byte path. Senders are checked by their credentials instead.
        self.address = f"podwatch-init-{os.getpid()}-{os.urandom(8).hex()}"
        self.listener.bind("\0" + self.address)
        self.pid_file = os.path.join(options.run_dir, "init.pid")  # noqa: PTH118

    # -- the loop

    def run(self) -> int:
        os.chdir("/")  # the daemon imports nothing from the working directory, and keeps no mount busy
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.set_wakeup_fd(self.wake_w, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        for number in (signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        if self.job is not None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
        if self.options.log:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self.log_fd = os.open(self.options.log, flags, 0o600)
            os.dup2(self.log_fd, 1)
            os.dup2(self.log_fd, 2)
        self.write_pid()
        self.start()
        poll = select.poll()
        poll.register(self.wake_r, select.POLLIN)
        poll.register(self.listener, select.POLLIN)
        try:
            while True:
                code = self.turn()
                if code is not None:
                    # At its end the interpreter takes the handlers away: a signal then must not replace the code.
                    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
                    return code
                poll.poll(self.patience())
                self.hear()
                self.heed()
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
            os.close(fd)  # in the other case it stays open, and so locked, while this process lives

    def remove_pid(self) -> None:
        try:
            with open(self.pid_file, "rb") as stream:
                ours = stream.read() == f"{os.getpid()}\n".encode()
            if ours:
                os.unlink(self.pid_file)
        except OSError:
            pass

    def patience(self) -> int:
        """Milliseconds until the next deadline."""
        now = time.monotonic()
        due = [now + 30.0]  # the log's size
        if self.told_to_end is not None or self.aborted_at is not None or self.ending_since is not None:
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
        if self.job is not None and (self.told_to_end is not None or self.ending_since is not None):
            return self.end_job(self.job, now, none_left)
        if self.told_to_end is not None:
            return self.end(now, none_left)
        if self.only_children:
            return self.last_code if none_left else None
        if self.restart_at is not None and now >= self.restart_at:
            self.start()
        if self.daemon:
            self.guard(now)
        elif self.restart_at is None and self.job is not None:
            self.ending_since = now
        elif self.restart_at is None:
            self.report("ended", self.last_code)
            if not self.first or none_left or self.last_code == 86:
                return self.last_code
            self.say(f"podwatch exited with {self.last_code} and is not restarted; init stays for the other processes")
            self.only_children = True
        self.bound_log()
        return None

    # -- the daemon

    def start(self) -> None:
        environment = dict(os.environ)
        for name in ("WATCHDOG_PID", "WATCHDOG_USEC", "NOTIFY_SOCKET", SILENT_SECONDS):
            environment.pop(name, None)
        environment["NOTIFY_SOCKET"] = "@" + self.address
        environment["WATCHDOG_USEC"] = str(int(self.options.watchdog * 1_000_000))
        environment[UNDER_INIT] = "pid1" if self.first else "detached"
        for name in (JOB_PIPE, JOB_PROCESS):
            environment.pop(name, None)
        if self.job is not None:
            environment[UNDER_INIT], environment[JOB_PIPE] = "job", str(self.job.read)
            environment[JOB_PROCESS] = _identity()
        self.restart_at = self.aborted_at = None
        self.ready = self.stopping = False
        self.started = self.heard = time.monotonic()
        self.unready_since = self.unready_since or self.started
        if self.silent_since is not None:
            environment[SILENT_SECONDS] = f"{self.started - self.silent_since:.1f}"
        self.deadline = self.started + self.options.start_timeout
        # Until the child resets init's handlers, which only wake a loop, a forwarded SIGTERM
        # would be lost, and the daemon would not end. Blocked, it is delivered after the reset. Losing a SIGHUP is
        # harmless: the configuration is read later.
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

    def become_daemon(self, environment: dict[str, str], mask: set[int]) -> None:
        """In the child; does not return. ``mask`` is restored before the exec, which would keep the blocked signals."""
        try:
            os.setsid()
            if self.job is not None:  # the engine kills init: no daemon trains on, or publishes, without its job
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                os.set_inheritable(self.job.read, True)
                if os.getppid() != self.parent:
                    os._exit(AGAIN)
            signal.set_wakeup_fd(-1)
            for number in range(1, signal.NSIG):
                try:
                    signal.signal(number, signal.SIG_DFL)
                except (OSError, ValueError):
                    continue
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            environment["WATCHDOG_PID"] = str(os.getpid())
            os.execvpe(self.command[0], self.command, environment)  # noqa: S606 - argv by design
        except OSError as error:
            os.write(2, f"cannot execute {self.command[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(78)

    def guard(self, now: float) -> None:
        if self.aborted_at is not None:
            if now - self.aborted_at >= self.options.abort_wait:
                self.signal(signal.SIGKILL)
        elif now >= self.deadline and not self.stopping:
            what = "no heartbeat" if self.ready else "not ready in time"
            self.say(f"podwatch (process {self.daemon}): {what}; init kills and restarts it, training continues")
            self.aborted_at = now
            if self.silent_since is None:
                self.silent_since = self.heard
            self.signal(signal.SIGABRT)
            self.signal(signal.SIGCONT)

    def ended(self, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        lasted = time.monotonic() - self.started
        self.daemon = 0
        self.last_code = code if code >= 0 else 128 - code
        if code < 0 and self.job is not None and self.job.verdict:  # killed while it was exiting: it had decided
            self.last_code = self.job.code
        if self.told_to_end is not None:
            return
        if self.job is not None:
            self.ended_in_job(self.job, code, lasted)
            return
        if code in NO_RESTART and self.aborted_at is None:
            return
        self.pause = self.options.backoff if lasted >= HEALTHY_AFTER else self.pause
        self.again(f"podwatch ended ({_describe(code)})")

    def ended_in_job(self, job: JobTree, code: int, lasted: float) -> None:
        """The daemon's verdict ends the job, and so does an error that every attempt repeats. Anything else is retried
        for ``--standby`` seconds without a ready daemon; then the job has no verdict."""
        if job.verdict or code in JOB_PERMANENT:
            return
        self.last_code = AGAIN
        if self.unready_since is not None and time.monotonic() - self.unready_since >= self.options.standby:
            self.say(f"podwatch was not ready within {self.options.standby:g} s ({_describe(code)})")
            return
        self.pause = self.options.backoff if lasted >= HEALTHY_AFTER else self.pause
        self.again(f"podwatch ended ({_describe(code)})")

    def again(self, why: str) -> None:
        """Schedule a restart, with a growing backoff. Not while the detaching command waits: it shows the
        reason and ends."""
        if self.reported:
            self.restart_at = time.monotonic() + self.pause
            self.say(f"{why}; init starts it in {self.pause:g} s, training continues")
            self.pause = min(self.pause * 2, 60.0)

    def signal(self, number: int) -> None:
        if self.daemon:
            try:
                os.kill(self.daemon, number)  # our child, not reaped yet, so the pid is not reused
            except ProcessLookupError:
                pass

    # -- messages and signals

    def hear(self) -> None:
        while True:
            try:
                data, ancillary, _, _ = self.listener.recvmsg(4096, socket.CMSG_SPACE(_UCRED.size))
            except BlockingIOError:
                return
            except OSError:
                return
            sender = next((_UCRED.unpack(d[: _UCRED.size])[0] for _, kind, d in ancillary if kind == 2), 0)
            if not self.daemon or sender != self.daemon:
                continue
            for line in data.decode("utf-8", "replace").splitlines():
                self.hear_line(line)

    def hear_line(self, line: str) -> None:
        now = self.heard = time.monotonic()
        if line == "READY=1":
            if not self.ready:
                self.ready = True
                self.unready_since = None
                self.silent_since = None  # the daemon got it in its environment, and reports it
                self.deadline = now + self.options.watchdog
            self.report("ready", os.getpid())
        elif line == "WATCHDOG=1":
            if self.ready:
                self.deadline = now + self.options.watchdog
        elif line == "STOPPING=1":
            self.stopping = True
        elif line == "PODWATCH_END=1" and self.job is not None:
            self.job.verdict = True
        elif line.startswith("PODWATCH_END_CODE=") and line[18:].isdigit() and self.job is not None:
            self.job.code = int(line[18:])
        elif line.startswith("EXTEND_TIMEOUT_USEC=") and line[20:].isdigit():
            until = now + int(line[20:]) / 1_000_000
            self.deadline = max(self.deadline, until)
            if self.told_to_end is not None:
                self.farewell_until = min(until, self.told_to_end + MOST_FAREWELL)

    def heed(self) -> None:
        try:
            numbers = os.read(self.wake_r, 4096)
        except BlockingIOError:
            return
        if signal.SIGHUP in numbers and self.ready:  # before that the daemon has no handler, and SIGHUP would end it
            self.signal(signal.SIGHUP)
        if (signal.SIGTERM in numbers or signal.SIGINT in numbers) and self.told_to_end is None:
            self.told_to_end = time.monotonic()
            self.restart_at = None
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)
            if self.job is not None:
                self.say("stop requested by the engine: podwatch asks training to end now")
                self.job.let_go()

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
                self.hear()  # its last words, sent before it ended
                self.ended(status)

    # -- the end

    def end(self, now: float, none_left: bool) -> int | None:
        assert self.told_to_end is not None
        self.restart_at = None
        waited = now - self.told_to_end
        grace = self.grace
        if self.daemon and not self.killed_rest and (waited < grace or now < self.farewell_until):
            return None
        if not self.first:
            if self.daemon:
                self.signal(signal.SIGKILL)
                return None
            return self.last_code
        if not self.killed_rest:
            self.killed_rest = True
            # Training can save at SIGTERM: what the daemon has not used of the grace is for the remaining processes.
            self.rest_until = max(now + self.options.last, self.farewell_until)
            try:
                os.kill(-1, signal.SIGTERM)  # as PID 1: all other processes of this container
            except OSError:
                pass
            return None
        return self.last_code if none_left or now >= self.rest_until else None

    def end_job(self, job: JobTree, now: float, none_left: bool) -> int | None:
        """Training has ``--grace`` seconds from the signal, or from the daemon's end; then everything is killed."""
        job.let_go()
        self.restart_at = None
        began = min(t for t in (self.told_to_end, self.ending_since) if t is not None)
        if not self.daemon and self.ending_since is None:
            self.ending_since = now
        if not self.daemon and not self.killed_rest:
            self.killed_rest = True
            job.ask()
        if none_left or job.stuck:
            if not none_left:
                self.say(f"left behind, stuck in the kernel: {_children(os.getpid())}")
            return self.last_code if job.verdict or self.last_code in JOB_PERMANENT else AGAIN
        if now - began >= self.grace:
            job.kill()
        return None

    @property
    def grace(self) -> float:
        if self.options.grace is not None:
            return float(self.options.grace)
        return 5.0 if self.first else 60.0

    # -- reporting

    def report(self, word: str, number: int) -> None:
        if not self.reported:
            self.reported = True
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

    def bound_log(self) -> None:
        """Rotate the log, keeping one older file. By copying: the daemon keeps the file open and appends."""
        if self.log_fd is None or os.fstat(self.log_fd).st_size < LOG_LIMIT:
            return
        try:
            with open(f"{self.options.log}.1", "wb") as out:
                offset = 0
                while chunk := os.pread(self.log_fd, 1 << 20, offset):
                    out.write(chunk)
                    offset += len(chunk)
        except OSError:
            pass  # a full disk: truncate anyway
        os.ftruncate(self.log_fd, 0)


def _describe(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="podwatch-init")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--log", default="")
    parser.add_argument("--detached", action="store_true")
    parser.add_argument("--report-fd", type=int)
    parser.add_argument("--watchdog", type=float, default=60.0, help="seconds without a heartbeat of the daemon")
    parser.add_argument("--start-timeout", type=float, default=180.0)
    parser.add_argument("--abort-wait", type=float, default=10.0)
    parser.add_argument("--backoff", type=float, default=1.0)
    parser.add_argument(
        "--grace",
        type=float,
        help="default: 5 as PID 1 (docker stop allows 10 in total), 60 detached; the daemon can request more",
    )
    parser.add_argument("--last", type=float, default=3.0)
    parser.add_argument("--job", action="store_true")
    parser.add_argument("--standby", type=float, default=900.0, help="job: seconds without a ready daemon")
    parser.add_argument("command", nargs="+")
    return parser.parse_args(argv)


if __name__ == "__main__":
    _parsed = _options(sys.argv[1:])
    if _parsed.detached and os.fork() > 0:
        os._exit(0)  # no session leader, so that init never gets a controlling terminal
    sys.exit(Init(_parsed).run())
