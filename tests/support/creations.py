"""Which names below a directory a Python program made: noted by the program itself, while it makes them.

With the notes of the trainers and of the test, whatever else lies in the trainer's directory was put there by podwatch
(promise 8). What Python makes in this process and in those it forks is seen (its audit events); what other programs
make is not.
"""

import os
import sys
from pathlib import Path
from typing import Any


class Creations:
    """Notes, in the file ``notes``, each name that this process makes below ``directory``."""

    def __init__(self, directory: Path, notes: Path) -> None:
        self._below = f"{directory}/"
        self._seen: set[str] = set()
        self._notes = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        sys.addaudithook(self._hear)

    def stop(self) -> None:
        """Python has no way to take an audit hook away: it does nothing from now on."""
        if self._below:
            self._below = ""
            os.close(self._notes)

    def _hear(self, event: str, given: tuple[Any, ...]) -> None:
        place = _NAMES.get(event)
        if place is None or not self._below or not isinstance(given[place], (str, os.PathLike)):
            return
        if event == "open" and not given[2] & os.O_CREAT:
            return
        name = os.path.abspath(given[place])  # noqa: PTH100 - no link is followed
        if name.startswith(self._below):
            self._note(name)
        if event == "os.rename" and f"{name}/".startswith(self._below):
            self._note_tree(os.fspath(given[0]), name)

    def _note(self, path: str) -> None:
        """With every directory above it: another process may have made that a moment before ``mkdir -p``."""
        while path.startswith(self._below) and path not in self._seen:
            self._seen.add(path)
            os.write(self._notes, f"{path.removeprefix(self._below)}\n".encode())
            path = os.path.dirname(path)  # noqa: PTH120

    def _note_tree(self, before: str, after: str) -> None:
        """What a directory that is renamed brings along."""
        for name in names_below(Path(before)):
            self._note(f"{after}/{name}")


_NAMES = {"open": 0, "os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1}
"""Audit events of what can make a name, and which argument it is."""


def noted(notes: Path) -> set[str]:
    return set(notes.read_text().splitlines()) if notes.exists() else set()


def names_below(directory: Path) -> set[str]:
    """Relative to it; links are not followed."""
    found = set()
    for folder, folders, files in os.walk(directory):
        found |= {os.path.relpath(os.path.join(folder, name), directory) for name in (*folders, *files)}  # noqa: PTH118
    return found
