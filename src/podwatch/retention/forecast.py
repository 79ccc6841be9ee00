"""Predicts size and time of the next save from the saves so far; kept over restarts and deletions."""

from collections.abc import Callable, Iterable
from typing import Any

from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.policy import DiskPolicy
from podwatch.policy.disk_forecast import NextSave, Saves, predict

SAVES = "disk.saves"
"""Journal key."""
LEAST_REMOVED_BYTES = 1 << 30
"""Removals of fewer bytes are too short to measure the speed."""
ANSWER_SECONDS = 5.0
"""Lifetime of a cached prediction; saves are minutes apart."""

Keep = Callable[[dict[str, Any]], None]
"""Writes what is known to the journal, under ``SAVES``."""
SaveSeconds = Callable[[], float | None]
"""Returns the median duration of a save as the detectors learned it; None before the first."""


class Forecast:
    """``kept`` is the last value given to ``keep``. For the event loop; nothing blocks."""

    def __init__(
        self,
        kept: object = None,
        *,
        keep: Keep = lambda _: None,
        save_seconds: SaveSeconds = lambda: None,
    ) -> None:
        known = kept if isinstance(kept, dict) else {}
        speed = known.get("bytes_per_second")
        self.saves = Saves.from_list(known.get("saves"))
        self.bytes_per_second = float(speed) if isinstance(speed, int | float) and speed > 0 else 0.0
        self._keep = keep
        self._seen: object = None
        self._told: tuple[float, tuple[Saves, DiskPolicy, float, float], NextSave] | None = None
        self.save_seconds = save_seconds

    def see(self, sets: Iterable[CheckpointSet]) -> None:
        """Record the checkpoints of a rescan. Free while the catalogue returns the same object."""
        if sets is self._seen:
            return
        self._seen = sets
        saves = self.saves.seeing(sets)
        if saves is not self.saves:
            self.saves = saves
            self._remember()

    def removed(self, freed_bytes: int, seconds: float) -> None:
        """Record a removal. The speed is the slowest measured one; each faster removal raises it by a tenth."""
        if freed_bytes < LEAST_REMOVED_BYTES or seconds <= 0:
            return
        speed = freed_bytes / seconds
        self.bytes_per_second = min(speed, 1.1 * self.bytes_per_second) if self.bytes_per_second else speed
        self._remember()

    def next_save(self, wall: float, policy: DiskPolicy) -> NextSave:
        """The predicted next save, at most ``ANSWER_SECONDS`` old: it is called at every turn."""
        about = (self.saves, policy, self.bytes_per_second, self.save_seconds() or 0.0)
        if self._told is not None and self._told[1] == about and 0 <= wall - self._told[0] < ANSWER_SECONDS:
            return self._told[2]
        _, _, speed, save_seconds = about
        found = predict(self.saves, wall=wall, policy=policy, bytes_per_second=speed, save_seconds=save_seconds)
        self._told = (wall, about, found)
        return found

    def _remember(self) -> None:
        self._keep({"saves": self.saves.to_list(), "bytes_per_second": self.bytes_per_second})
