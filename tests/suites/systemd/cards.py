"""Runs inside the machine, beside podwatch: GPU memory follows the fake trainer's processes (tests/support/rig.py)."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.support.nvml import NvmlWorld
from tests.support.rig import Cards

if __name__ == "__main__":
    Cards(NvmlWorld(Path(sys.argv[1]), devices=2), Path(sys.argv[2])).start()
    while True:
        time.sleep(60)
