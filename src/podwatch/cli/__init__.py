# ruff: noqa: PTH100, PTH109, PTH117, PTH120
# Built-in modules only at the top: an import before main() can come from the current directory.
"""The ``podwatch`` command: one file per command, heavy imports inside the command."""

import gc
import os
import sys


def main() -> None:
    """Entry point of the console script."""
    leave_out_current_directory()
    gc.disable()  # modules are no garbage: looking for it there took a quarter of the time of `status`
    from podwatch.cli.root import cli, run

    gc.freeze()  # nor at the exit
    gc.enable()
    run(cli)


def leave_out_current_directory() -> None:
    """Remove the current directory from ``sys.path``: it can belong to another user.

    ``python -m`` puts it first, and so does an empty or relative entry of PYTHONPATH, often by accident
    (``PYTHONPATH=$PYTHONPATH:/x`` with an unset variable). Absolute entries, and podwatch's own directory, are kept."""
    listed = os.environ.get("PYTHONPATH", "")
    entries = listed.split(os.pathsep) if listed else []
    kept = {entry for entry in entries if os.path.isabs(entry)} | {_home()}
    try:
        loose = {os.path.abspath(entry) for entry in entries if not os.path.isabs(entry)}
        first = {os.getcwd(), ""} if not sys.flags.safe_path else set()
    except FileNotFoundError:  # the current directory was deleted
        return
    sys.path[:] = [
        entry
        for position, entry in enumerate(sys.path)
        if entry in kept or not (entry in loose or (position == 0 and entry in first))
    ]


def _home() -> str:
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
