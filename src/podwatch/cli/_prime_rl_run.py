"""The directory that a running prime-rl writes to, for ``podwatch config init``.

The command does not always name it: versions with run directories generate a name. Open files of the process tree
decide; the fallbacks are the command and the newest run below output_dir.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.layouts.prime_rl_command import hints
from podwatch.checkpoints.layouts.prime_rl_run import RunDirectory, run_directory, runs_below

_OLD_TREE = frozenset(
    {"logs", "run_default", "checkpoints", "weights", "rollouts", "broadcasts", "wandb", "torchrun", "configs", "evals"}
)
"""The entries that a version without run directories writes directly below output_dir."""


@dataclass(frozen=True, slots=True)
class OwnRun:
    """``how``: how the directory was found. ``added``: words that the command needs to use it again."""

    path: Path
    how: str
    added: tuple[str, ...] = ()


def run_of(pid: int, command: Sequence[str], cwd: Path) -> OwnRun | None:
    """The run directory of process ``pid``. None if it writes to output_dir itself, or if there is no sign of a run
    directory. Blocks."""
    says = run_directory(command, cwd)
    written = _written_below(pid, says.base)
    if written:
        return _own(says, says.base / written, f"pid {pid} has files open in it")
    if not hints(command, cwd, "").new_flags and not runs_below(says.base):
        return None
    if says.path is not None:
        return _own(says, says.path, "from run.name in the command or its configuration")
    newest = runs_below(says.base)
    return _own(says, newest[0], f"the newest run below {says.base}") if newest else None


def _own(says: RunDirectory, path: Path, how: str) -> OwnRun:
    added = () if says.path is not None else ("--run.name", path.name)
    return OwnRun(path, how, added)


def _written_below(pid: int, base: Path) -> str:
    """The name of the run directory with most open files of the process tree; empty if there are none."""
    import psutil

    root = os.path.realpath(base) + "/"
    try:
        parent = psutil.Process(pid)
        processes = [parent, *parent.children(recursive=True)]
    except psutil.Error:
        return ""
    seen: Counter[str] = Counter()
    for process in processes:
        for target in _open_files(process.pid):
            if target.startswith(root):
                first, _, rest = target[len(root) :].partition("/")
                if rest and first not in _OLD_TREE:
                    seen[first] += 1
    return seen.most_common(1)[0][0] if seen else ""


def _open_files(pid: int) -> list[str]:
    found = []
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            names = [entry.path for entry in entries]
    except OSError:
        return []
    for name in names:
        try:
            found.append(os.readlink(name))  # noqa: PTH115
        except OSError:
            continue
    return found
