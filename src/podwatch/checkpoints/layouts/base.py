"""What podwatch must know about one trainer's way of keeping checkpoints."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from podwatch.config.settings import CustomLayoutSettings
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
    names: tuple[str, ...] = ()
    """Only these entries of ``path``, files or directories, belong to the part: the directory is shared by many steps.
    Empty: all of it."""
    export: bool = False
    """Not needed for a resume, but worth keeping: travels with milestones and with the final set."""


@dataclass(frozen=True, slots=True)
class PartFiles:
    """One part with what was found in it. ``present`` is false when its directory does not exist."""

    part: PartDir
    present: bool
    files: tuple[FileEntry, ...] = ()
    symlinks: tuple[SymlinkEntry, ...] = ()


class Marker(StrEnum):
    """How strongly a layout says that a save is over; decides how long a set must be quiet (facts/checkpoints.md 5)."""

    COMMIT = "commit"
    """A rename of the whole, a commit file, DCP's ``.metadata`` with its mtime rule."""
    LAST_FILE = "last-file"
    """A small file written last, or a tracker in the parent."""
    NONE = "none"
    """Nothing: a learned file set and a long quiet time have to do."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A layout's word on one step. ``whole`` = the completeness rule holds; ``damaged`` = a piece is structurally
    broken; ``reason`` says exactly what is missing or broken; ``marker`` = what says that the save is over, so how long
    it must be quiet; ``save_token`` = what identifies this very save from inside (the DCP save id)."""

    whole: bool
    reason: str = ""
    damaged: bool = False
    marker: Marker = Marker.COMMIT
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
    rests_on: tuple[Path, ...] = ()
    """Files outside the parts (a tracker in the parent) that were looked at: when one of them changes, the step has to
    be judged anew although nothing of its own changed."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a rule was read: project, file, commit (or version)."""

    project: str
    file: str
    commit: str


@dataclass(frozen=True, slots=True)
class Tracker:
    """A file or symlink by which the trainer finds its newest checkpoint, and what it must say for a resume from one
    step. Repaired atomically before a start (facts/checkpoints.md 2.4): exactly one of ``content`` and ``target``."""

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

    def trackers(self, step: int | None) -> tuple[Tracker, ...]:
        """What the trainer's own "latest" files and links must say for a start from ``step`` (None: a fresh start, for
        which they are set aside by ``ahead_of``). Only trackers that exist, or that a resume needs."""
        ...

    def pinned(self) -> Mapping[int, str]:
        """Steps that something of the trainer names, and what: ``latest_checkpointed_iteration.txt``, ``best``. They
        are never removed. An empty or garbled tracker names nothing: it is being written."""
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

    def processes(self, command: Sequence[str]) -> int | None:
        """How many processes the command starts to train; None: it does not say so for sure, nothing is judged."""
        ...

    def target_step(self, command: Sequence[str]) -> int | None:
        """The step at which training is done, as far as the command or its config file tells."""
        ...

    def wandb_variables(self) -> tuple[str, ...]:
        """Environment variables by which the trainer takes the id of its one W&B run, if the owner sets it there."""
        ...

    def wandb_identity(self) -> Mapping[str, str]:
        """W&B ids of the run as found on disk, by the names ``resume_command`` understands."""
        ...

    @property
    def finish_lines(self) -> tuple[str, ...]:
        """The trainer's own words for "I am done"; all of them must have been seen after the start."""
        ...

    def log_globs(self) -> tuple[str, ...]:
        """Default globs, relative to output_dir, of log files that carry step lines."""
        ...

    chosen_because: str
    """Why ``layout = "auto"`` took this one; empty if the configuration named it."""
    shared_parts: frozenset[str]
    """Parts whose directory many steps share (``PartDir.names``): a restore puts their entries into it one by one."""
    sources: tuple[Source, ...]
    """Where this layout's rules were read."""
    reshards: bool
    """Can the trainer load a set with another world size? If not, one that is surely another blocks a resume."""
    counts_all: bool
    """``Judgement.world_size`` counts every process, not only the data-parallel ranks among them."""
    saves_block: bool
    """Training waits for each save: when the next one begins, nothing of the one before is written any more. False
    where the trainer can save asynchronously, or that is not known."""


def counts_saves(layout: Layout) -> bool:
    """True where the numbers of checkpoints count saves (accelerate's automatic naming): they can be compared with each
    other, but with no step in a log. A layout that does not say so numbers training steps. Never blocks."""
    return bool(getattr(layout, "counts_saves", False))


@dataclass(frozen=True, slots=True)
class Site:
    """What a layout may look at: the configured directories and the command of a fresh start."""

    output_dir: Path
    checkpoint_dir: Path | None = None
    """Where checkpoints lie if not at their usual place below output_dir."""
    cwd: Path | None = None
    command: tuple[str, ...] = ()
    custom: CustomLayoutSettings | None = None

    @property
    def working_directory(self) -> Path:
        return self.cwd or self.output_dir.parent


PATTERN = "step_dir"
"""Subject of a concern about a pattern that matches nothing; no longer true once a checkpoint is found."""
SAVES = "saves"
"""Subject of a concern about a command that saves nothing."""


@dataclass(frozen=True, slots=True)
class Concern:
    """Something in a command or a directory that makes a restart fail or lose steps. ``certain``: a restart cannot work
    this way; otherwise it is a warning. ``fix`` says what to change."""

    subject: str
    what: str
    fix: str
    certain: bool = False


def no_concerns(_site: "Site") -> tuple[Concern, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Kind:
    """One entry of the registry: how a layout is made, and how ``auto`` knows it. ``recognise`` looks at the command
    and at a few directory names only; None: nothing speaks for this layout."""

    name: str
    make: Callable[[Site], Layout]
    recognise: Callable[[Site], Recognition | None]
    concerns: Callable[[Site], tuple[Concern, ...]] = no_concerns
    """What the command or the directory has that a restart would fail on. Reads small files; may block."""
