"""The path to a checkpoint: from its configured root down, no segment may be a symbolic link (promise 9).

The target of a link can belong to another user or another run. To keep checkpoints on another volume, configure that
volume as ``trainer.checkpoint_dir`` instead of linking it.
"""

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from podwatch.checkpoints.layouts.base import Layout, PartDir
from podwatch.system.pinned import PinnedTree, RootReplaced


def first_link(path: Path, roots: Sequence[Path]) -> Path | None:
    """The first symbolic link on the way from the innermost root to ``path``, including ``path``. None also where
    ``path`` is in no root or does not exist."""
    inside = [root for root in roots if root in path.parents]
    if not inside:
        return None
    here = max(inside, key=lambda root: len(root.parts))
    for name in path.relative_to(here).parts:
        here = here / name
        try:
            if stat.S_ISLNK(os.lstat(here).st_mode):
                return here
        except OSError:
            return None
    return None


def without_linked(
    layout: Layout, roots: Sequence[Path], steps: Mapping[int, tuple[PartDir, ...]]
) -> tuple[Mapping[int, tuple[PartDir, ...]], tuple[Path, ...], frozenset[int]]:
    """``steps`` without those that have a required part behind a link; all links; and the steps left out."""
    links = tuple(dict.fromkeys(x for x in (first_link(r, roots) for r in layout.watch_roots()) if x is not None))
    if not links:
        return steps, (), frozenset()
    behind = frozenset(s for s in steps for p in steps[s] if p.required and any(_under(p.path, link) for link in links))
    return {s: steps[s] for s in steps if s not in behind}, links, behind


def _under(path: Path, link: Path) -> bool:
    return path == link or link in path.parents


def replaced(tree: PinnedTree | None) -> str:
    """The reason why the configured directories are not the pinned ones; empty if they are, or do not exist yet."""
    for root in tree.roots if tree is not None else ():
        try:
            with tree.directory(root):  # type: ignore[union-attr]
                continue
        except RootReplaced as error:
            return str(error)
        except OSError:
            continue
    return ""
