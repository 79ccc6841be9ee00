"""Goes to a path name by name, through every link, as the kernel does; with each directory held open, so that nothing
changes between a look at what is on the way and its use. For paths on which other users can put something."""

import errno
import os
import stat
from collections.abc import Generator
from dataclasses import dataclass

_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
"""Needs no permission to list a directory, and opens no device."""
_MOST_LINKS = 40
"""The kernel's own limit."""


@dataclass(frozen=True, slots=True)
class Step:
    """``name`` was looked up in ``directory``, and ``place`` is what it names, of ``status``: both are O_PATH
    descriptors that are open until the next step. ``last``: no name follows, other than those of this link."""

    directory: int
    name: str
    place: int
    status: os.stat_result
    last: bool

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.status.st_mode)


def follow(path: str) -> Generator[Step, None, None]:
    """Each step of the way to an absolute path; none for ``/``. The last one is no link. Raises OSError. Close it
    (``contextlib.closing``) where it is not used up."""
    pending = _names(path)
    directory, links = os.open("/", _LOOK), 0
    try:
        while pending:
            name = pending.pop()
            place = os.open(name, _LOOK, dir_fd=directory)
            try:
                step = Step(directory, name, place, os.fstat(place), last=not pending)
                yield step
                if step.is_link:
                    links += 1
                    if links > _MOST_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                    target = os.readlink("", dir_fd=place)
                    pending += _names(target)
                    if target.startswith("/"):
                        before, directory = directory, os.open("/", _LOOK)
                        os.close(before)
                elif pending and not stat.S_ISDIR(step.status.st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
                else:
                    directory, place = place, directory
            finally:
                os.close(place)
    finally:
        os.close(directory)


def _names(path: str) -> list[str]:
    """The names in it, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]
