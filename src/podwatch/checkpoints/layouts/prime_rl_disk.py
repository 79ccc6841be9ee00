"""prime-rl's other files: what is ahead of a step, the progress that files show, and how a run is recognized."""

import heapq
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from podwatch.checkpoints.layouts.base import Recognition, Site, StepSeen
from podwatch.checkpoints.layouts.command_line import program
from podwatch.checkpoints.layouts.step_dirs import is_plain_dir, newest_steps, step_names

ENTRIES = ("rl", "sft")
"""prime-rl's training programs."""
_FRESH = (
    "checkpoints",
    "weights",
    "broadcasts",
    "rollouts",
    "run_default",
    "logs",
    "wandb",
    "torchrun",
    "evals",
    "metrics.jsonl",
)
"""The entries that prime-rl creates in output_dir. Newer versions refuse a fresh start beside any of them, even an
empty directory; the launcher's own files (configs, rl.sbatch, job_*.log) are exempt there (pathing.py,
LAUNCHER_ARTIFACTS)."""


def ahead(roots: Mapping[str, Path], step: int | None, *, newer: bool, output_dir: Path) -> tuple[Path, ...]:
    """Entire ``step_M`` directories. Before 2026-08 all rollouts are included; since then (``newer``) also the
    broadcast of N, because the trainer rewrites it in place at start-up while the orchestrator can already read it."""
    found: dict[Path, None] = {}
    for kind, root in roots.items():
        if not newer and kind in ("rollouts", "batches"):
            if is_plain_dir(root):
                found[root] = None
            continue
        first = -1 if step is None else step if newer and kind == "broadcasts" else step + 1
        for number, name in sorted(step_names(root).items()):
            if number >= first:
                found[root / name] = None
    if step is None:
        for path in (roots["checkpoints"], *(output_dir / name for name in _FRESH)):
            if not path.is_symlink() and path.exists():
                found[path] = None
    return tuple(p for p in found if not any(parent in found for parent in p.parents))


def progress(broadcasts: Path, rollouts: Path, checkpoints: Path) -> tuple[StepSeen, ...]:
    """Newest broadcast with STABLE (written every step), newest rollouts, newest trainer checkpoint."""
    sources = (
        ("trainer", broadcasts, "STABLE"),
        ("orchestrator", rollouts, ""),
        ("checkpoint", checkpoints, "trainer/.metadata"),
    )
    seen = []
    for role, root, marker in sources:
        for step in sorted(step_names(root), reverse=True)[:5]:
            try:
                status = (root / f"step_{step}" / marker).stat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            seen.append(StepSeen(role, step, status.st_mtime))
            break
    return tuple(seen)


def looks_like_run(directory: Path) -> bool:
    """Whether it is a run directory as prime-rl creates it since 2026-08: each launch creates ``logs/attempt_N``, and a
    step directory below ``checkpoints/`` has the orchestrator's half or, for SFT, the trainer's."""
    if has_attempts(directory):
        return True
    checkpoints = directory / "checkpoints"
    return any(
        is_plain_dir(checkpoints / f"step_{step}" / half)
        for step in newest_steps(checkpoints)
        for half in ("orchestrator", "trainer")
    )


def has_attempts(directory: Path) -> bool:
    """Whether it has ``logs/attempt_N`` or ``logs/latest``, which each launch makes since 2026-08-13."""
    return is_plain_dir(directory / "logs" / "attempt_1") or os.path.islink(directory / "logs" / "latest")  # noqa: PTH114


def holds_sft(output_dir: Path, checkpoints: Path) -> bool:
    """Whether the newest steps were saved by supervised fine-tuning: a data loader's state, and no orchestrator."""
    if is_plain_dir(output_dir / "run_default"):
        return False
    newest = [checkpoints / f"step_{step}" for step in newest_steps(checkpoints)]
    if any(is_plain_dir(step / "orchestrator") for step in newest):
        return False
    return any(is_plain_dir(step / "trainer" / "dataloader") for step in newest)


def command_runs(command: Sequence[str], cwd: Path) -> str:
    """The prime-rl program that the command runs, as written there; else empty. ``rl`` or ``sft`` counts only with
    arguments: other programs can have such short names."""
    seen = program(command, cwd)
    module = seen.runs("prime_rl")
    if module:
        return module
    if seen.name in ENTRIES and any(a == "@" or a.startswith(("--", "@")) for a in seen.arguments):
        return seen.name
    match = re.search(r"\b(rl|sft)\s+(?:@|--)", seen.shell)
    return f"{match[1]} ({seen.name})" if match else ""


def runs_sft(command: Sequence[str], cwd: Path) -> bool:
    """Whether the command is prime-rl's supervised fine-tuning, which has no orchestrator."""
    runs = command_runs(command, cwd)
    return runs.split(" ")[0] == "sft" or ".sft" in runs


def recognise(site: Site) -> Recognition | None:
    runs = command_runs(site.command, site.working_directory)
    if runs:
        return Recognition("prime-rl", f"the command runs {runs}", certain=True)
    checkpoints = (site.checkpoint_dir or site.output_dir) / "checkpoints"
    for step in heapq.nlargest(3, step_names(checkpoints)):
        for half in ("orchestrator", "trainer"):
            if is_plain_dir(checkpoints / f"step_{step}" / half):
                return Recognition("prime-rl", f"checkpoints/step_{step} contains {half}/", certain=True)
    if is_plain_dir(site.output_dir / "run_default"):
        return Recognition("prime-rl", "run_default/ exists", certain=True)
    return None
