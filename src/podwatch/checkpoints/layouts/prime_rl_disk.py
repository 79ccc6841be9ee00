"""What prime-rl leaves on disk beside its checkpoints: what is ahead of a step, how far it got, how it is recognised
(facts/prime-rl.md sections 1, 3 and 4)."""

import heapq
import re
from collections.abc import Mapping
from pathlib import Path

from podwatch.checkpoints.layouts.base import Recognition, Site, StepSeen
from podwatch.checkpoints.layouts.names import is_plain_dir, step_names
from podwatch.checkpoints.layouts.program import program

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
"""What prime-rl writes into output_dir. Newer versions refuse a fresh start beside any of it, even an empty directory;
the launcher's own files (configs, rl.sbatch, job_*.log) are exempt there (pathing.py, LAUNCHER_ARTIFACTS)."""


def ahead(roots: Mapping[str, Path], step: int | None, *, newer: bool, output_dir: Path) -> tuple[Path, ...]:
    """Whole ``step_M`` directories. Before 2026-08 rollouts go wholly; since then (``newer``) the broadcast of N itself
    goes too, because the trainer rewrites it in place at start-up while the orchestrator may read it already."""
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


def recognise(site: Site) -> Recognition | None:
    """Only ``rl`` with arguments counts: the name is short, and others may have it."""
    seen = program(site.command, site.working_directory)
    module = seen.runs("prime_rl")
    if module:
        return Recognition("prime-rl", f"the command runs {module}", certain=True)
    if seen.name == "rl" and any(a == "@" or a.startswith(("--", "@")) for a in seen.arguments):
        return Recognition("prime-rl", "the command runs rl", certain=True)
    if re.search(r"\brl\s+(?:@|--)", seen.shell):
        return Recognition("prime-rl", f"{seen.name} runs rl", certain=True)
    checkpoints = (site.checkpoint_dir or site.output_dir) / "checkpoints"
    for step in heapq.nlargest(3, step_names(checkpoints)):
        for half in ("orchestrator", "trainer"):
            if is_plain_dir(checkpoints / f"step_{step}" / half):
                return Recognition("prime-rl", f"checkpoints/step_{step} holds {half}/", certain=True)
    if is_plain_dir(site.output_dir / "run_default"):
        return Recognition("prime-rl", "there is run_default/", certain=True)
    return None
