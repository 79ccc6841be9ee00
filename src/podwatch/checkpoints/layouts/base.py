"""What podwatch must know about one trainer's way of keeping checkpoints."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from podwatch.domain.checkpoint import FileEntry, SymlinkEntry


@dataclass(frozen=True, slots=True)
class PartDir:
    """Where one part of one step lies. The directory itself may be absent (the part is then missing)."""

    name: str
    path: Path
    required: bool
    """Needed for a resume."""
    uploaded: bool = True
    """Travels to the store with the set (optional parts such as prime-rl's ``weights`` do not)."""


@dataclass(frozen=True, slots=True)
class PartFiles:
    """One part with what was found in it. ``present`` is false when its directory does not exist."""

    part: PartDir
    present: bool
    files: tuple[FileEntry, ...] = ()
    symlinks: tuple[SymlinkEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class Judgement:
    """A layout's word on one step. ``whole`` = the completeness rule holds; ``damaged`` = a piece is structurally
    broken; ``reason`` says exactly what is missing or broken; ``strong`` = the layout has an explicit commit marker, so
    the short settle time suffices; ``save_token`` = what identifies this very save from inside (the DCP save id)."""

    whole: bool
    reason: str = ""
    damaged: bool = False
    strong: bool = True
    save_token: str = ""
    world_size: int | None = None
    pending: bool = False
    """The main part has not been begun: what is there belongs to a save that comes later, nothing is in flight."""
    unreadable: bool = False
    """Something could not be observed (permission, I/O error): says nothing about the set, and nobody may remove it."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Part name -> what is wrong with it, for the parts that are not in order."""
    leftovers: tuple[str, ...] = ()
    """``<part>/<path>`` of files that lie there but do not belong to this save; never uploaded."""


@dataclass(frozen=True, slots=True)
class StepSeen:
    """Progress found in files: role, step and the epoch second the file system recorded."""

    role: str
    step: int
    wall: float


@dataclass(frozen=True, slots=True)
class ResumeCommand:
    """argv and environment of a start. ``removed`` are resume flags that stood in the command already."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


class Layout(Protocol):
    """One trainer's layout below one output directory. All methods may block on the file system: never call them on
    the event loop. A directory that vanishes meanwhile is normal and never an error."""

    name: str
    output_dir: Path

    @property
    def variant(self) -> str:
        """``A`` or ``B`` for prime-rl, else empty. May become known only when the trainer has written something."""
        ...

    def watch_roots(self) -> tuple[Path, ...]:
        """Directories whose entries are step directories: where events are worth listening to."""
        ...

    def steps(self) -> Mapping[int, tuple[PartDir, ...]]:
        """Every step of which at least one part exists, with all parts a whole set has."""
        ...

    def part_dir(self, part: str, step: int) -> Path:
        """Where ``part`` of ``step`` belongs; used by restore, so it must work in an empty output_dir.

        ConfigurationError for a part this layout does not have.
        """
        ...

    def expect_parts(self, parts: Collection[str]) -> None:
        """Tell the layout which parts a set to be restored has, so that it knows its variant in an empty output_dir."""
        ...

    def step_paths(self, step: int) -> tuple[Path, ...]:
        """The topmost directories that belong to ``step`` and exist: what is renamed when the whole set goes."""
        ...

    def spare_paths(self, below: int) -> tuple[tuple[int, Path], ...]:
        """(step, directory) of by-products of steps lower than ``below`` that belong to no checkpoint: prime-rl's old
        broadcasts and rollouts, which it never removes itself. Oldest first."""
        ...

    def judge(self, step: int, parts: Sequence[PartFiles]) -> Judgement:
        """Apply the completeness rule (facts/checkpoints.md). Reads markers and headers, never whole files."""
        ...

    def ahead_of(self, step: int | None) -> tuple[Path, ...]:
        """Everything that must be set aside before a start from ``step`` (None: a fresh start)."""
        ...

    def progress(self) -> tuple[StepSeen, ...]:
        """Newest step per role as the files show it (``broadcasts/step_N/STABLE``...)."""
        ...

    def resume_command(
        self, command: Sequence[str], step: int | None, override: str | Sequence[str], wandb: Mapping[str, str]
    ) -> ResumeCommand:
        """argv for a start from ``step`` (None: fresh), by the preset or ``override`` ("auto", "none" or a list).

        Placeholders ``{step}``, ``{checkpoint}``, ``{output_dir}`` and ``{resume_args}`` in the command are replaced.
        """
        ...

    def first_step_after(self, step: int) -> int:
        """The lowest step number a correct resume from ``step`` can show first."""
        ...

    def target_step(self, command: Sequence[str]) -> int | None:
        """The step at which training is done, as far as the command or its config file tells."""
        ...

    def wandb_identity(self) -> Mapping[str, str]:
        """W&B ids of the run as found on disk, by the names ``resume_command`` understands."""
        ...

    def log_globs(self) -> tuple[str, ...]:
        """Default globs, relative to output_dir, of log files that carry step lines."""
        ...

    finish_lines: tuple[str, ...]
    """The trainer's own words for "I am done"; all of them must have been seen after the start."""
