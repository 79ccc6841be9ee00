"""Step directories by name. Names that are not exactly a step (``step_5.bad``, a ``step_latest`` link) are ignored."""

import heapq
import os
import re
import stat
from pathlib import Path

STEP = re.compile(r"^step_(0|[1-9]\d{0,17})$")


def step_names(root: Path, pattern: re.Pattern[str] = STEP) -> dict[int, str]:
    """Step -> directory name below ``root``. Empty if root is absent; symlinks are never steps. OSError: unreadable."""
    found: dict[int, str] = {}
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                match = pattern.fullmatch(entry.name)
                if match is not None and entry.is_dir(follow_symlinks=False):
                    found[int(match.group(1))] = entry.name
    except (FileNotFoundError, NotADirectoryError):
        pass
    return found


def all_step_names(root: Path, pattern: re.Pattern[str]) -> dict[int, list[str]]:
    """Step -> every directory name with it, where the name contains more than the step. Otherwise as ``step_names``."""
    found: dict[int, list[str]] = {}
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                match = pattern.fullmatch(entry.name)
                if match is not None and entry.is_dir(follow_symlinks=False):
                    found.setdefault(int(match.group(1)), []).append(entry.name)
    except (FileNotFoundError, NotADirectoryError):
        pass
    return found


def newest_steps(root: Path, count: int = 3) -> list[int]:
    """The highest steps below ``root``, for recognizing a trainer: empty if it cannot be read."""
    try:
        return heapq.nlargest(count, step_names(root))
    except OSError:
        return []


def is_plain_dir(path: Path) -> bool:
    """Whether it is a real directory, no symlink. False also if it cannot be read."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False
