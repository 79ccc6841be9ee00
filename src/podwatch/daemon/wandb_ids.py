"""The trainer's W&B ids as they lie on disk now: a manifest is published long before the next start records them."""

from collections.abc import Mapping

from podwatch.checkpoints.layouts.base import Layout
from podwatch.domain.errors import PodwatchError
from podwatch.domain.wandb import identity
from podwatch.system.threads import Worker

LOOK_SECONDS = 30.0
"""How often; two links are read. The first checkpoint comes minutes after a trainer has its W&B run."""
PATIENCE_SECONDS = 10.0


class WandbIds:
    """Making one looks, and blocks. ``look`` from time to time; ``now`` never touches the disk: it may be asked on the
    loop."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._found: Mapping[str, str] = {}
        self._worker: Worker | None = None
        self._look()

    def now(self, known: Mapping[str, str]) -> dict[str, str]:
        """``known`` are the ids in the run's record."""
        return identity(known, self._found)

    async def look(self) -> None:
        self._worker = self._worker or Worker("wandb ids")
        try:
            await self._worker.call(self._look, timeout=PATIENCE_SECONDS)
        except TimeoutError:
            return  # the sensors say that the disk hangs

    def _look(self) -> None:
        try:
            self._found = self._layout.wandb_identity()
        except (PodwatchError, OSError):
            return
