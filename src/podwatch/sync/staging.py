"""The directory of ours in which a restore builds a checkpoint, accessed by descriptors only.

It belongs to podwatch and is closed to all others (0700) until everything in it is right and was given to the
training's user: nothing can be planted in it, and no name can change its meaning between a check and a use. Everything
here blocks.
"""

import contextlib
import os
import stat
from collections.abc import Collection, Sequence
from pathlib import Path

from podwatch.system.files import DIRECTORY_FLAGS, sync_descriptor
from podwatch.system.pinned import Pin, check_ours, open_pinned


def open_staging(pins: Sequence[Pin], path: Path) -> int:
    """A descriptor of the directory, made if it does not exist. Raises RootReplaced where it, or its parent, is not
    podwatch's own, HostError outside of ``pins``, OSError."""
    above = open_pinned(pins, str(path.parent))
    try:
        check_ours(above, path.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path.name, 0o700, dir_fd=above)
        staging = os.open(path.name, DIRECTORY_FLAGS, dir_fd=above)
    finally:
        os.close(above)
    try:
        check_ours(staging, path)
        if stat.S_IMODE(os.fstat(staging).st_mode) != 0o700:
            with contextlib.suppress(OSError):  # a filesystem without modes
                os.fchmod(staging, 0o700)
    except BaseException:
        os.close(staging)
        raise
    return staging


def strip(directory: int, wanted: Collection[str], inside: str = "") -> None:
    """Remove everything that is not ``wanted``, and everything except plain files with one name."""
    for name in os.listdir(directory):
        relative = inside + name
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            below = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
            try:
                strip(below, wanted, relative + "/")
            finally:
                os.close(below)
            if relative in wanted:
                os.rmdir(name, dir_fd=directory)  # a file belongs here; a non-empty directory stops the restore
        elif not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or relative not in wanted:
            os.unlink(name, dir_fd=directory)


def allocated(directory: int) -> int:
    """Bytes on disk of everything in it."""
    total = 0
    for name in os.listdir(directory):
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        total += found.st_blocks * 512
        if stat.S_ISDIR(found.st_mode):
            below = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
            try:
                total += allocated(below)
            finally:
                os.close(below)
    return total


def give_away(directory: int, owner: tuple[int, int] | None) -> None:
    """Give all directories below this one to ``owner``, innermost first, durably. This one stays ours."""
    for name in os.listdir(directory):
        if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            continue
        below = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
        try:
            give_away(below, owner)
            if owner is not None:
                os.fchown(below, *owner)
        finally:
            os.close(below)
    sync_descriptor(directory)
