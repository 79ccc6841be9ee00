"""How busy the cores of this machine are, by all processes."""

import os
from pathlib import Path

_STAT = Path("/proc/stat")


def busy_seconds() -> tuple[float, float]:
    """(CPU seconds in which the machine's cores were not idle, and in all) since boot; (0, 0) where the kernel does not
    report them. Waiting for a disk is idle; time that a hypervisor gave to others is not (proc_stat(5))."""
    try:
        name, *words = _STAT.read_text().split("\n", 1)[0].split()
        ticks = [int(word) for word in words[:8]]  # guest time, which comes after, is part of user time
        idle = ticks[3] + ticks[4]
        if name != "cpu":
            return 0.0, 0.0
    except (OSError, ValueError, IndexError):
        return 0.0, 0.0
    hertz = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - idle) / hertz, sum(ticks) / hertz
