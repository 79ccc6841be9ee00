"""The trainer's W&B ids as they are on disk now, for manifests: the run record gets them at the next start only."""

from collections.abc import Mapping

from podwatch.checkpoints.layouts.base import Layout
from podwatch.domain.errors import PodwatchError
from podwatch.domain.run import identity
from podwatch.system.workers import Worker

LOOK_SECONDS = 30.0
"""Interval; reads two links. The first checkpoint comes minutes after the trainer has its W&B run."""
PATIENCE_SECONDS = 10.0


class WandbIds:
    """The constructor reads the disk and blocks. Call ``look`` periodically; ``now`` never blocks."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._found: Mapping[str, str] = {}
        self._worker: Worker | None = None
        self._look()

    def now(self, known: Mapping[str, str]) -> dict[str, str]:
        """The newest known ids. ``known``: those in the run record."""
        return identity(known, self._found)

    async def look(self) -> None:
        self._worker = self._worker or Worker("wandb ids")
        try:
            await self._worker.call(self._look, timeout=PATIENCE_SECONDS)
        except TimeoutError:
            return  # the sensors report a hung disk

    def _look(self) -> None:
        try:
            self._found = self._layout.wandb_identity()
        except (PodwatchError, OSError):
            return
