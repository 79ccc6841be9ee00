"""The directory in which the user typed the command. Relative paths are resolved against it, wherever we work now: a
daemon works in ``/``, so that it imports nothing from a directory that other users can write to."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

TYPED_IN = "PODWATCH_DIRECTORY"
"""Set by a daemon for itself, and by that for the one that its init starts; a command resolves against its own."""
_RELATIVE_TO: ContextVar[str] = ContextVar("podwatch_relative_to", default="")


@contextmanager
def relative_to(environ: Mapping[str, str]) -> Iterator[None]:
    """While settings are made: what their relative paths mean."""
    token = _RELATIVE_TO.set(environ.get(TYPED_IN, ""))
    try:
        yield
    finally:
        _RELATIVE_TO.reset(token)


def resolved(path: Path, directory: str = "") -> Path:
    """Absolute, by ``directory`` or else the current one. Links stay. Raises ValueError where there is none."""
    if path.is_absolute():
        return path
    try:
        return Path(directory or _RELATIVE_TO.get() or Path.cwd()) / path
    except FileNotFoundError as error:
        raise ValueError("is a relative path, and the current directory was deleted or cannot be reached") from error


def move_to_root(environ: "os._Environ[str]") -> None:
    """Work in ``/`` from now on, and keep in ``environ`` what relative paths mean. Nothing is lost without a current
    directory: then only absolute paths were usable before."""
    if TYPED_IN not in environ:
        try:
            environ[TYPED_IN] = str(Path.cwd())
        except FileNotFoundError:
            pass
    os.chdir("/")
