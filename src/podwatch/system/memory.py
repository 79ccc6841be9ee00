"""Keeps the daemon small: with glibc's defaults each of its threads keeps an arena, and memory that only the start
needed is never returned."""

import contextlib
import ctypes
import gc

_M_ARENA_MAX = -8
ARENAS = 2
"""The threads mostly wait; two arenas are enough for the others."""


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
