"""Detects ranges of a file that were never written.

safetensors 0.8.0rc0 and downloaders preallocate a file at full size and fill it later, so size and header look right
mid-write. A hit means "suspect", never "bad": sparse copies and compressing filesystems have holes too, and some FUSE
filesystems always answer "no hole".
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
    """Within it, this thread checks copies without their data, whose originals are complete: holes do not count."""
    token = _ON_PURPOSE.set(True)
    try:
        yield
    finally:
        _ON_PURPOSE.reset(token)


def has_hole(path: Path) -> bool:
    """True if the kernel reports an unwritten range; False also where it cannot. OSError: cannot be opened."""
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
