"""A layout as far as measurements of the disk are concerned: by-products at fixed places."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass
class FixedPaths:
    """``by_products``: (step, directory)."""

    by_products: Sequence[tuple[int, Path]] = ()

    def spare_paths(self, below: int) -> tuple[tuple[int, Path], ...]:
        return tuple(found for found in self.by_products if found[0] < below)
