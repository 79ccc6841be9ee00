"""The memory that a process keeps: with glibc's defaults each thread keeps an arena, and memory that only the start
needed is never returned. Imports no event loop: the children that move data start without one.
"""

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator
from typing import Any

_M_ARENA_MAX = -8
ARENAS = 2
"""The threads mostly wait; two arenas are enough for the others."""


@contextlib.contextmanager
def importing_without(*names: str) -> Iterator[None]:
    """What is imported inside finds these modules not installed, unless they are loaded already. For libraries that try
    an optional module which podwatch does not use; measured in a daemon of 70 MiB: structlog's rich (50 modules) 4 MiB,
    requests' charset_normalizer 3 MiB, b2sdk's pydantic 3 MiB and a tenth of the start of a child."""
    modules: dict[str, Any] = sys.modules
    hidden = [name for name in names if name not in modules]
    for name in hidden:
        modules[name] = None  # importing it now raises ImportError
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]


def few_arenas() -> None:
    """Limit the arenas of this process from now on. Does nothing where the C library is not glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, ARENAS)


def give_back() -> None:
    """Return freed memory to the system, after one large use. Takes milliseconds."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def settle() -> None:
    """Call once everything is loaded: the garbage collector then never scans the present objects again."""
    gc.collect()
    gc.freeze()
    give_back()
