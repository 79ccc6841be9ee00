"""Steps that a symlink beside them names: an operator's ``best -> step_40`` pins step 40."""

import os
from collections.abc import Mapping
from pathlib import Path

from podwatch.checkpoints.layouts.base import Layout


def linked_steps(layout: Layout) -> Mapping[int, str]:
    """Step -> the link that names it. Links directly in the layout's roots and in the output directory count. Blocks;
    links that vanish meanwhile, dangle or lead elsewhere are ignored."""
    targets: dict[str, str] = {}
    for root in dict.fromkeys((*layout.watch_roots(), layout.output_dir)):
        try:
            with os.scandir(root) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        targets[os.path.realpath(entry.path)] = entry.name
        except OSError:
            continue
    if not targets:
        return {}
    found: dict[int, str] = {}
    for step in layout.steps():
        for path in layout.step_paths(step):
            # the link can name the step, or something in it
            real = Path(os.path.realpath(path))
            for target, name in targets.items():
                if Path(target) == real or real in Path(target).parents:
                    found[step] = f"the symlink {name}"
    return found
