"""Step directories by name, for recognizing a trainer by what is on disk."""

import heapq
import os
import stat
from pathlib import Path

from podwatch.checkpoints.layout import Site
from podwatch.checkpoints.templates import number_in

STEP = "step_{step}"


def step_names(root: Path, template: str = STEP) -> dict[int, str]:
    """Step -> directory name below ``root``. Empty if root is absent; symlinks are never steps. OSError: unreadable."""
    found: dict[int, str] = {}
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                step = number_in(template, entry.name)
                if step is not None and entry.is_dir(follow_symlinks=False):
                    found[step] = entry.name
    except (FileNotFoundError, NotADirectoryError):
        pass
    return found


def newest_steps(root: Path, count: int = 3, template: str = STEP) -> list[int]:
    """The highest steps below ``root``: empty if it cannot be read."""
    try:
        return heapq.nlargest(count, step_names(root, template))
    except OSError:
        return []


def newest_names(root: Path, template: str) -> list[str]:
    """The directories of the highest steps."""
    found = step_names(root, template)
    return [found[step] for step in heapq.nlargest(3, found)]


def is_absent(path: Path) -> bool:
    """Whether nothing has this name. False where that cannot be observed."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def is_plain_dir(path: Path) -> bool:
    """Whether it is a real directory, no symlink. False also if it cannot be read."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def named_place(site: Site, text: str | None) -> Path | None:
    """The directory that a command names, if it is output_dir or below it; else None. ``checkpoint_dir`` takes
    precedence."""
    if site.checkpoint_dir is not None or not text or "$" in text:
        return site.checkpoint_dir
    named = Path(os.path.normpath(site.working_directory / text))
    return named if named == site.output_dir or site.output_dir in named.parents else None
