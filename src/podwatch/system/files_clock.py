"""The clock of the file system that the checkpoints are on: their times are compared with no other."""

from collections.abc import Iterator
from pathlib import Path

from podwatch.domain.errors import HostError
from podwatch.system.clock import Clock
from podwatch.system.own_directories import Workspace
from podwatch.system.rename_places import corners

NAME = "file-system-time"


class FilesClock:
    """Reads it from a file that podwatch writes there. ``directory``: where the checkpoints are."""

    def __init__(self, workspace: Workspace, directory: Path, clock: Clock) -> None:
        self._workspace, self._directory, self._clock = workspace, directory, clock

    def now(self) -> float:
        """Epoch seconds; those of this machine where nothing can be written. Blocks."""
        times = list(self._written())
        device = self._device()
        same = next((time for time, on in times if device in (None, on)), None)
        if same is not None:
            return same
        return times[0][0] if times else self._clock.wall()

    def _written(self) -> Iterator[tuple[float, int]]:
        """(time, device) of the file at each place where it can be written, until one is on the right device. Only for
        another device it is anywhere but in podwatch's own directory."""
        tree, device = self._workspace.tree, self._device()
        own, *others = corners(self._directory / "any", self._workspace, NAME)
        for path in (own, *others):
            try:
                tree.make(path.parent)
                tree.overwrite(path, b"\n")
                status = tree.lstat(path)
            except (OSError, HostError):
                if path == own:
                    return
                continue
            if status is not None:
                yield status.st_mtime_ns / 1e9, status.st_dev
                if device in (None, status.st_dev):
                    return

    def _device(self) -> int | None:
        """None while no directory of the checkpoints exists: podwatch's own is then on the same file system."""
        for directory in (self._directory, self._workspace.output_dir):
            try:
                return directory.stat().st_dev
            except OSError:
                continue
        return None
