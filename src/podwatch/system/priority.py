"""How much of a busy machine one process of ours gets, and how long it waits for a CPU.

Two values count, depending on the machine. Between sessions in the root CPU group the session's autogroup counts;
within one CPU group (a container, a service) each thread's nice value. The process's owner may raise the nice value,
which gives it less CPU; lowering it takes CAP_SYS_NICE. An autogroup's value can be lowered down to 0 without it
(sched(7)).
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Given:
    """Which of the two values are now as requested. ``autogroup`` is also True where the kernel has none."""

    autogroup: bool
    nice: bool


def give(pid: int, value: int) -> Given:
    """Set autogroup and nice value (0 to 19) of all threads of a process of ours. Never raises: the answer shows a
    missing right or an ended process. The kernel refuses autogroup changes of an unprivileged caller within 0.1 s of
    each other; call again then. A few microseconds per thread."""
    return Given(_give_autogroup(pid, value), _give_nice(pid, value))


def autogroup_of(pid: int) -> int | None:
    """Its nice value; None where the kernel has no autogroups or the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/autogroup").read_text().rsplit(" ", 1)[1])
    except (OSError, ValueError, IndexError):
        return None


def cpu_waits(pid: int) -> Mapping[int, int] | None:
    """Thread -> nanoseconds that it was runnable but waited for a CPU (/proc/PID/task/*/schedstat). None where the
    kernel does not count, or the process is gone."""
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
    """How long the threads of one process waited for a CPU between two results of ``cpu_waits``, as a share of the
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
    """A new thread inherits the value of the thread that started it: repeat until no new thread appears."""
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
