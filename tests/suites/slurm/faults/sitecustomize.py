"""Loaded by every Python of a run under Slurm (PYTHONPATH): the audit of the chaos suite, and what a test orders by
files in the control directory.

``slow``: the trainer makes a step in 0.8 s at least, so that the run does not end before something happened to it.
``fault.NODE``: the trainer on that node ends as after an uncorrectable memory error of its GPU.
"""

import os
import runpy
import sys
import threading
import time
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[2] / "chaos" / "audit" / "sitecustomize.py"))
SLOW_SECONDS = 0.8


def fail_when_told(order: Path) -> None:
    while not order.exists():
        sleep(0.05)
    print("RuntimeError: CUDA error: uncorrectable ECC error encountered", file=sys.stderr, flush=True)
    os._exit(1)


if any(word.endswith("trainer.py") for word in sys.orig_argv) and "CHAOS_CONTROL" in os.environ:
    control, sleep = Path(os.environ["CHAOS_CONTROL"]), time.sleep
    time.sleep = lambda seconds: sleep(max(seconds, SLOW_SECONDS if (control / "slow").exists() else 0))
    here = control / f"fault.{os.environ.get('SLURMD_NODENAME', '')}"
    threading.Thread(target=fail_when_told, args=(here,), daemon=True).start()
