"""What keeps a command of the operator from harming training: the lowest priority. Standard library only."""

import ctypes
import os
from contextlib import suppress

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IDLE = 3 << 13


def give_way() -> None:
    """Lowest priority for CPU and disk, first choice of the kernel when memory runs out. Each where it is allowed."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 19)
    for name, value in (("autogroup", "19"), ("oom_score_adj", "1000")):
        with suppress(OSError), open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
            file.write(value)
    with suppress(OSError, AttributeError):
        if number := _IOPRIO_SET.get(os.uname().machine):
            ctypes.CDLL(None).syscall(number, 1, 0, _IDLE)
