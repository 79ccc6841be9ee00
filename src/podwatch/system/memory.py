"""Keeping the daemon small: with glibc's defaults each of its threads keeps an arena of its own, and what the start
needed is never given back."""

import contextlib
import ctypes
import gc

_M_ARENA_MAX = -8
ARENAS = 2
"""The threads mostly wait; two arenas are enough for those that do not."""


def few_arenas() -> None:
    """For this process, from now on. Does nothing where the C library is not glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, ARENAS)


def give_back() -> None:
    """Return freed memory to the system, after something that needed much once. Milliseconds."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def settle() -> None:
    """Once everything is loaded: what there is now stays, so the garbage collector need not look at it ever again."""
    gc.collect()
    gc.freeze()
    give_back()
