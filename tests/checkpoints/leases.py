"""Read leases, asked with patience."""

from collections.abc import Iterable
from pathlib import Path

from podwatch.checkpoints.settle_time import Held, held_open


def told(paths: Iterable[Path]) -> tuple[Held, str]:
    """What the helper answers once it has the time: on a busy machine it may not."""
    paths = list(paths)
    for _ in range(30):
        if (found := held_open(paths))[0] is not Held.UNKNOWN:
            break
    return found
