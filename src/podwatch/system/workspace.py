"""podwatch's own corner beside the output directory: record, quarantine, trash, staging (promise 8)."""

from dataclasses import dataclass, replace
from pathlib import Path

from podwatch.domain.errors import HostError, PermissionDenied
from podwatch.system.files import can_rename
from podwatch.system.pinned import HIDDEN


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
        return self.output_dir.parent / HIDDEN / self.output_dir.name

    @property
    def inside(self) -> Path:
        return self.output_dir / HIDDEN

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

    def probe(self) -> "Workspace":
        """Create the directories and find out whether a rename out of output_dir works: the workspace to use.

        Blocks. Where output_dir does not exist yet, its nearest existing ancestor is tried: what is created below it is
        on the same filesystem, unless someone mounts something there later, which the next probe sees. Everything is
        made now because mkdir fails on a full disk when rename and unlink still work (facts/systemd.md, "SQLite at
        100 % full"). Raises HostError or PermissionDenied where the record's own directory cannot be made.
        """
        try:
            self.outside.mkdir(parents=True, exist_ok=True)
        except PermissionError as error:
            raise PermissionDenied(
                "may not create podwatch's directory beside the output directory",
                where=str(self.outside),
                fix="run podwatch as the owner of the parent directory, or create it for podwatch's user",
            ) from error
        except OSError as error:
            raise HostError(
                f"cannot create podwatch's directory beside the output directory: {error.strerror}",
                where=str(self.outside),
                fix="make the parent of output_dir writable (systemd: name the parent in ReadWritePaths)",
            ) from error
        source = self.output_dir
        while not source.is_dir() and source != source.parent:
            source = source.parent
        try:
            inside = not can_rename(source, self.outside)
        except OSError:
            inside = False  # output_dir cannot be written at all: "inside" could not work either
        chosen = replace(self, use_inside=inside)
        for directory in (chosen.quarantine, chosen.trash, chosen.staging):
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise HostError(
                    f"cannot create a directory for what is set aside: {error.strerror}",
                    where=str(directory),
                    fix="free some space or make it writable",
                ) from error
        return chosen
