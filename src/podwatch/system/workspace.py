"""podwatch's own corner beside the output directory: record, quarantine, trash, staging (promise 8)."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Workspace:
    """``<parent>/.podwatch/<name of output_dir>/``: outside the trainer's directory, on the same filesystem.

    ``inside`` is used for quarantine, trash and staging instead where a rename to ``outside`` fails (output_dir is a
    mount of its own, or an overlay's lower layer): found out by trying, never by comparing devices.
    """

    output_dir: Path
    use_inside: bool = False

    @property
    def outside(self) -> Path:
        return self.output_dir.parent / ".podwatch" / self.output_dir.name

    @property
    def inside(self) -> Path:
        return self.output_dir / ".podwatch"

    @property
    def movable(self) -> Path:
        return self.inside if self.use_inside else self.outside

    @property
    def record(self) -> Path:
        """The run record: small, replaced by rename."""
        return self.outside / "run.json"

    @property
    def quarantine(self) -> Path:
        return self.movable / "quarantine"

    @property
    def trash(self) -> Path:
        return self.movable / "trash"

    @property
    def staging(self) -> Path:
        return self.movable / "staging"
