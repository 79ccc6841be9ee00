"""How a process of ours gives way to others."""

import os
import subprocess
import sys

from podwatch.system.child import give_way

CODE = """
import os, sys, threading
from podwatch.system.child import give_way
os.setsid()
give_way(int(sys.argv[1]))
found = []
thread = threading.Thread(target=lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
thread.start()
thread.join()
print(os.getpriority(os.PRIO_PROCESS, 0), found[0])
try:
    print(open("/proc/self/autogroup").read().rsplit(" ", 1)[1])
except OSError:
    print("none")
"""


def values(nice: int) -> list[str]:
    """Nice values of a child's first and second thread after ``give_way``, and its autogroup's."""
    return subprocess.run(
        [sys.executable, "-c", CODE, str(nice)], capture_output=True, text=True, check=True
    ).stdout.split()


def test_the_process_its_threads_and_its_session_give_way() -> None:
    nice, thread, session = values(15)
    assert (nice, thread) == ("15", "15")
    assert session in ("15", "none")


def test_zero_changes_nothing() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert values(0)[:2] == [str(own), str(own)]
    give_way(0)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
