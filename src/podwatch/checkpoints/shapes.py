"""What the modules of this room exchange about one output directory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from podwatch.config.settings import CustomLayoutSettings
from podwatch.domain.checkpoint import FileEntry, SymlinkEntry


@dataclass(frozen=True, slots=True)
class Site:
    """The input of a layout: the configured directories and the command of a fresh start."""

    output_dir: Path
    checkpoint_dir: Path | None = None
    """The directory of the checkpoints if it is not the usual place below output_dir."""
    cwd: Path | None = None
    command: tuple[str, ...] = ()
    custom: CustomLayoutSettings | None = None

    @property
    def working_directory(self) -> Path:
        return self.cwd or self.output_dir.parent


@dataclass(frozen=True, slots=True)
class PartDir:
    """The directory of one part of one step. It can be absent (the part is then missing)."""

    name: str
    path: Path
    required: bool
    """Needed for a resume."""
    uploaded: bool = True
    """Uploaded with the checkpoint (optional parts such as prime-rl's ``weights`` are not)."""
    names: tuple[str, ...] = ()
    """Only these entries of ``path``, files or directories, belong to the part: the directory is shared by many steps.
    Empty: all of it."""
    export: bool = False
    """Not needed for a resume, but worth keeping: uploaded with milestones and with the final checkpoint."""


@dataclass(frozen=True, slots=True)
class PartFiles:
    """One part with the files found in it. ``present`` is false when its directory does not exist."""

    part: PartDir
    present: bool
    files: tuple[FileEntry, ...] = ()
    symlinks: tuple[SymlinkEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class Tracker:
    """A file or symlink by which the trainer finds its newest checkpoint, and its required content for a resume from
    one step. Repaired atomically before a start: exactly one of ``content`` and ``target``."""

    path: Path
    content: bytes | None = None
    target: str | None = None


@dataclass(frozen=True, slots=True)
class Recognition:
    """Why an output directory or a command looks like a layout. ``certain``: no other trainer writes this."""

    layout: str
    why: str
    certain: bool = False


@dataclass(frozen=True, slots=True)
class StepSeen:
    """Progress found in files: role, step and the file time in epoch seconds."""

    role: str
    step: int
    wall: float


@dataclass(frozen=True, slots=True)
class ResumeCommand:
    """argv and environment of a start. ``removed`` are resume flags that the command contained already."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


PATTERN = "parts"
"""Subject of a concern about a pattern that matches nothing; no longer true once a checkpoint is found."""
SAVES = "saves"
"""Subject of a concern about a command that saves nothing."""


@dataclass(frozen=True, slots=True)
class Concern:
    """A problem of a command or a directory that makes a restart fail or lose steps. ``certain``: a restart cannot
    work; otherwise it is a warning. ``fix`` is what to change."""

    subject: str
    what: str
    fix: str
    certain: bool = False
