# ruff: noqa: PTH100, PTH109, PTH117, PTH120
# Built-in modules only at the top: what is imported before main() may come from the current directory.
"""The ``podwatch`` command: one file per command, heavy imports inside the command."""

import os
import sys


def main() -> None:
    """Entry point of the console script."""
    leave_out_current_directory()
    from podwatch.cli.failing import run
    from podwatch.cli.root import cli

    run(cli)


def leave_out_current_directory() -> None:
    """Import nothing from where the command is typed, which may be another user's directory.

    ``python -m`` puts it first. An empty or relative entry of PYTHONPATH means it as well, often by accident
    (``PYTHONPATH=$PYTHONPATH:/x`` where it was not set). Absolute entries are the caller's choice and stay, and so does
    where podwatch itself is."""
    listed = os.environ.get("PYTHONPATH", "")
    entries = listed.split(os.pathsep) if listed else []
    kept = {entry for entry in entries if os.path.isabs(entry)} | {_home()}
    try:
        loose = {os.path.abspath(entry) for entry in entries if not os.path.isabs(entry)}
        first = {os.getcwd(), ""} if not sys.flags.safe_path else set()
    except FileNotFoundError:  # there is no current directory any more
        return
    sys.path[:] = [
        entry
        for position, entry in enumerate(sys.path)
        if entry in kept or not (entry in loose or (position == 0 and entry in first))
    ]


def _home() -> str:
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
