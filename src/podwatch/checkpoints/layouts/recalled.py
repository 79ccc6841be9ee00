"""Caches which directories contain a checkpoint, where names alone are not enough.

A yes is valid as long as the directory exists. A no is valid while the directory and those directly below it are
unchanged: a writer that adds files changes one of them.
"""

import os
from collections.abc import Callable
from pathlib import Path

_NEWEST = 16
"""How many of the most recently changed foreign directories are checked again each time: file systems round times, so a
change right after the last check can be invisible."""
_MOST_BELOW = 8
"""Maximum number of directories below a foreign one; with more, a new check is as cheap as comparing all times."""
_Stamps = tuple[tuple[str, int, int], ...]
"""(path, mtime in ns, inode) of a directory and those directly below it."""


class Recalled:
    """``belongs`` reads a directory and one level below it, no deeper."""

    def __init__(self, belongs: Callable[[Path], bool]) -> None:
        self._belongs = belongs
        self._ours: dict[Path, frozenset[str]] = {}
        self._foreign: dict[Path, dict[str, _Stamps]] = {}

    def ours(self, root: Path, found: dict[int, list[str]]) -> dict[int, list[str]]:
        """Those of ``found`` (step -> names below ``root``) that contain a checkpoint."""
        before, foreign = self._foreign.get(root, {}), dict[str, _Stamps]()
        recent = set(sorted(before, key=lambda n: max(m for _, m, _ in before[n]))[-_NEWEST:])
        known = self._ours.get(root, frozenset())
        answer: dict[int, list[str]] = {}
        for step, names in found.items():
            for name in names:
                if name in known:
                    answer.setdefault(step, []).append(name)
                    continue
                old = before.get(name)
                if old is not None and name not in recent and all(_stamp(p) == (m, i) for p, m, i in old):
                    foreign[name] = old
                    continue
                stamps = _stamps(f"{root}/{name}")
                if self._belongs(root / name):
                    answer.setdefault(step, []).append(name)
                elif stamps:
                    foreign[name] = stamps
        self._ours[root] = frozenset(name for names in answer.values() for name in names)
        self._foreign[root] = foreign
        return answer


def _stamps(path: str) -> _Stamps:
    """Stamps, taken before the check, and the directory's own before its entries are listed, so that a change meanwhile
    is visible. Empty: do not cache."""
    found = [(path, *_stamp(path))]
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    found.append((entry.path, *_stamp(entry.path)))
                    if len(found) > _MOST_BELOW + 1:
                        return ()
    except OSError:
        return ()
    return tuple(found)


def _stamp(path: str) -> tuple[int, int]:
    try:
        status = os.lstat(path)
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_ino
