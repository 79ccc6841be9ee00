"""Edits run.json again and again until it is killed: ``python edit_rounds.py STATE OUTPUT FIRST LAST``.

Prints each number once it is recorded.
"""

import sys
from dataclasses import replace
from pathlib import Path

from podwatch.recovery.run_file import RunFile
from podwatch.system.clock import SystemClock
from podwatch.system.own_directories import Workspace
from tests.support.starts import guarded


def main() -> None:
    state, output, first, last = sys.argv[1:]
    file = RunFile(Path(state), Workspace(Path(output)), "r", SystemClock())
    file.load()
    for number in range(int(first), int(last)):
        file.edit_now(lambda run, number=number: replace(run, starts=guarded(f"l{number}"), desired_wall=float(number)))
        print(number, flush=True)
    file.close()


if __name__ == "__main__":
    main()
