"""The directory in which the user typed the command. Relative paths are resolved against it, also in a daemon, whose
working directory is ``/`` so that it imports nothing from a directory that other users can write to."""

import os
from pathlib import Path

from podwatch.domain.errors import HostError

TYPED_IN = "PODWATCH_DIRECTORY"
"""Environment variable with that directory. A daemon sets it for itself and for the daemon that its init starts."""


def current_directory() -> Path:
    """The current directory. HostError where it was deleted or cannot be reached."""
    try:
        return Path.cwd()
    except OSError as error:
        raise HostError(
            "the current directory was deleted or cannot be reached",
            fix="change to another directory with `cd DIR` and run the command again",
        ) from error


def absolute(path: Path) -> Path:
    """``path`` made absolute by the current directory. Does not resolve links. HostError as ``current_directory``."""
    return path if path.is_absolute() else current_directory() / path


def resolved(path: Path, directory: str = "") -> Path:
    """``path`` made absolute by ``directory``, else by the current directory. Does not resolve links. ValueError if
    there is no current directory."""
    if path.is_absolute():
        return path
    try:
        return Path(directory or current_directory()) / path
    except HostError as error:
        raise ValueError("is a relative path, and the current directory was deleted or cannot be reached") from error


def move_to_root(environ: "os._Environ[str]") -> None:
    """Change the working directory to ``/`` and save the previous one in ``environ``, for relative paths."""
    if TYPED_IN not in environ:
        try:
            environ[TYPED_IN] = str(Path.cwd())
        except FileNotFoundError:
            pass
    os.chdir("/")
