"""How much of a busy machine one process of ours gets, and how long it waits for a CPU.

Two values count, and which one depends on the machine. Between sessions in the root CPU group, that of the session's
autogroup; within one CPU group (a container, a service) each thread's nice value. Whoever owns the process may raise
the nice value, which gives it less; giving it more takes CAP_SYS_NICE. An autogroup can be given more, down to 0,
without it (sched(7)).
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Given:
    """Which of the two values are as they were asked for now. ``autogroup`` is also True where the kernel has none."""

    autogroup: bool
    nice: bool


def give(pid: int, value: int) -> Given:
    """Set autogroup and nice value (0 to 19) of a process of ours, all threads of it. Never raises: without the right,
    or where the process has ended, the answer says so. The kernel refuses autogroup changes of an unprivileged caller
    that come within 0.1 s of each other; ask again then. A few microseconds per thread."""
    return Given(_give_autogroup(pid, value), _give_nice(pid, value))


def autogroup_of(pid: int) -> int | None:
    """Its nice value; None where the kernel has no autogroups or the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/autogroup").read_text().rsplit(" ", 1)[1])
    except (OSError, ValueError, IndexError):
        return None


def cpu_waits(pid: int) -> Mapping[int, int] | None:
    """Thread -> nanoseconds that it has waited for a CPU while it could have run (/proc/PID/task/*/schedstat). None
    where the kernel does not count, or the process is gone."""
    found: dict[int, int] = {}
    ran = False
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - cheaper than Path.iterdir
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                run, wait, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
                found[int(thread)] = int(wait)
                ran = ran or int(run) > 0
    except (OSError, ValueError):
        return None
    return found if ran else None


def waited_share(before: Mapping[int, int], now: Mapping[int, int], seconds: float) -> float:
    """How long the threads of one process waited for a CPU between two answers of ``cpu_waits``, as a share of the
    time, at most 1: several may wait at once. A thread that ended in between is not counted."""
    if seconds <= 0:
        return 0.0
    waited = sum(max(0, wait - before.get(thread, 0)) for thread, wait in now.items())
    return min(1.0, waited / 1e9 / seconds)


def _give_autogroup(pid: int, value: int) -> bool:
    before = autogroup_of(pid)
    if before is None or before == value:
        return True
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(value))
    except OSError:
        return False
    return True


def _give_nice(pid: int, value: int) -> bool:
    """A thread that starts meanwhile has the value of the one that started it: looked at until there is no other."""
    seen: set[int] = set()
    while True:
        try:
            threads = {int(t) for t in os.listdir(f"/proc/{pid}/task")} - seen  # noqa: PTH208
        except OSError:
            return False
        if not threads:
            return bool(seen)
        for thread in threads:
            seen.add(thread)
            try:
                if os.getpriority(os.PRIO_PROCESS, thread) != value:
                    os.setpriority(os.PRIO_PROCESS, thread, value)
            except ProcessLookupError:
                continue
            except OSError:
                return False
