"""A layout as far as the disk is concerned: by-products and checkpoints at fixed places."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class FixedPaths:
    """``by_products``: (step, directory). ``steps``: every path of a step's checkpoint."""

    by_products: Sequence[tuple[int, Path]] = ()
    steps: Mapping[int, Sequence[Path]] = field(default_factory=dict)

    def spare_paths(self, below: int) -> tuple[tuple[int, Path], ...]:
        return tuple(found for found in self.by_products if found[0] < below)

    def step_paths(self, step: int) -> Sequence[Path]:
        return self.steps.get(step, ())
