"""Has a file ranges that nobody ever wrote?

safetensors 0.8.0rc0 and downloaders preallocate a file at full size and fill it later, so size and header look right
mid-write (facts/checkpoints.md sections 0.8 and 2.6). A hit means "suspect", never "bad": sparse copies and compressing
filesystems have holes too, and some FUSE filesystems always answer "no hole".
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from podwatch.system.reading import open_file

_ON_PURPOSE = ContextVar("sparse on purpose", default=False)


@contextmanager
def sparse_on_purpose() -> Iterator[None]:
    """What is looked at meanwhile, in this thread, is a skeleton of files that lie elsewhere, whole."""
    token = _ON_PURPOSE.set(True)
    try:
        yield
    finally:
        _ON_PURPOSE.reset(token)


def has_hole(path: Path) -> bool:
    """True if the kernel knows of an unwritten range, False also where it cannot tell. OSError: cannot be opened."""
    if _ON_PURPOSE.get():
        return False
    fd = open_file(path)
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            return False
        try:
            return os.lseek(fd, 0, os.SEEK_HOLE) < size
        except OSError:
            return False
    finally:
        os.close(fd)
