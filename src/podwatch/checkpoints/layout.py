"""The ``Layout`` protocol: what podwatch must know about the checkpoints of one trainer."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from podwatch.checkpoints.table import SaveEnd
from podwatch.config.settings import CustomLayoutSettings
from podwatch.domain.checkpoint import FileEntry, SymlinkEntry
from podwatch.domain.process import NO_PROCESSES, ProcessNames
from podwatch.domain.trainer_log import NO_LINES, TrainerLog


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
class Judgement:
    """A layout's judgement of one step. ``whole`` = the completeness rule holds; ``damaged`` = a file is structurally
    broken; ``reason`` is exactly what is missing or broken; ``ends`` = the evidence that the save has ended, which
    decides the settle time; ``save_token`` identifies this save from inside (the DCP save id)."""

    whole: bool
    reason: str = ""
    damaged: bool = False
    ends: SaveEnd = SaveEnd.NONE
    save_token: str = ""
    world_size: int | None = None
    pending: bool = False
    """The main part was not started: the present files belong to a later save, and nothing is being written."""
    unreadable: bool = False
    """Something could not be observed (permission, I/O error): no evidence about the checkpoint, which must not be
    removed."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Part name -> its problem, for the parts that have one."""
    leftovers: tuple[str, ...] = ()
    """``<part>/<path>`` of files that are there but do not belong to this save; never uploaded."""
    deleted: bool = False
    """The directory that the trainer (or an operator) deletes with a checkpoint is not there: if the checkpoint was
    complete, its other parts are what is left of it, and not damage."""
    remainder: bool = False
    """Set by podwatch's own rules, not by a layout: ``deleted``, and it was complete."""
    lacks: bool = False
    """It is whole by its own files, and lacks a kind of file that the saves around it have."""
    hole: str = ""
    """The first large file with a range that was never written: suspicious, but no proof of damage."""
    unsized: str = ""
    """The first file whose format does not show whether its end is there."""
    faults: tuple[str, ...] = ()
    """Everything that is wrong; ``reason`` is the first of it."""
    checked: int = 0
    """Number of files whose structure was checked."""
    unchecked: int = 0
    rests_on: tuple[Path, ...] = ()
    """Files outside the parts (a tracker in the parent) that the rule read: when one of them changes, the step must be
    judged again although its own files did not change."""


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


Known = Mapping[int, Mapping[str, tuple[int, int]]]
"""Step -> ``part/path`` -> (size, mtime_ns) of the files that it had when it was found complete."""


class Layout(Protocol):
    """One trainer's layout below one output directory. All methods can block on the file system: never call them on the
    event loop. A directory that vanishes meanwhile is normal and never an error."""

    name: str
    output_dir: Path

    @property
    def variant(self) -> str:
        """``A`` or ``B`` for prime-rl, else empty. Sometimes unknown until the trainer has written something."""
        ...

    def watch_roots(self) -> tuple[Path, ...]:
        """Directories whose entries are step directories: watch these for events."""
        ...

    def steps(self) -> Mapping[int, tuple[PartDir, ...]]:
        """Every step of which at least one part exists, with all parts of a complete checkpoint."""
        ...

    def part_dir(self, part: str, step: int) -> Path:
        """Where ``part`` of ``step`` belongs; used by restore, so it must work in an empty output_dir.

        ConfigurationError for a part this layout does not have.
        """
        ...

    def expect_parts(self, parts: Collection[str]) -> None:
        """Set the parts of a checkpoint to restore, so that the layout knows its variant in an empty output_dir."""
        ...

    def step_paths(self, step: int) -> tuple[Path, ...]:
        """The topmost existing directories of ``step``: these are renamed when the checkpoint is removed."""
        ...

    def spare_paths(self, below: int) -> tuple[tuple[int, Path], ...]:
        """(step, directory) of by-products of steps lower than ``below`` that belong to no checkpoint: prime-rl's old
        broadcasts and rollouts, which prime-rl never removes. Oldest first."""
        ...

    def judge(self, step: int, parts: Sequence[PartFiles], known: Known | None = None) -> Judgement:
        """Apply the completeness rule. Reads markers and headers, never whole files. ``known``: of the saves that were
        found complete: what was added to them later is not asked of other saves."""
        ...

    def reading(self) -> AbstractContextManager[None]:
        """One child reads for this thread as long as it lasts: starting one takes a fifth of a second."""
        ...

    def ahead_of(self, step: int | None) -> tuple[Path, ...]:
        """Everything that must be moved to quarantine before a start from ``step`` (None: a fresh start)."""
        ...

    def trackers(self, step: int | None) -> tuple[Tracker, ...]:
        """The required content of the trainer's own "latest" files and links for a start from ``step`` (None: a fresh
        start, for which ``ahead_of`` moves them away). Only trackers that exist, or that a resume needs."""
        ...

    def pinned(self) -> Mapping[int, str]:
        """Steps that a file or link of the trainer names, and its name: ``latest_checkpointed_iteration.txt``,
        ``best``. They are never removed. An empty or garbled tracker names nothing: it is being written."""
        ...

    def progress(self) -> tuple[StepSeen, ...]:
        """The highest step per role as the files show it (``broadcasts/step_N/STABLE``...), and after it the one that
        was written last, where that is another."""
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
        """The number of training processes that the command starts; None: not certain, so nothing is compared."""
        ...

    def target_step(self, command: Sequence[str]) -> int | None:
        """The step at which training is done, as far as the command or its config file shows."""
        ...

    def save_interval(self, command: Sequence[str]) -> int | None:
        """Steps from one save to the next, as far as the command or its configuration file sets them."""
        ...

    def wandb_variables(self) -> tuple[str, ...]:
        """Environment variables from which the trainer takes the id of its single W&B run."""
        ...

    def wandb_identity(self) -> Mapping[str, str]:
        """W&B ids of the run as found on disk, by the names that ``resume_command`` accepts."""
        ...

    @property
    def finish_lines(self) -> tuple[str, ...]:
        """Lines that the trainer prints when training is finished; all of them must have been seen after the start."""
        ...

    def log_globs(self) -> tuple[str, ...]:
        """Default globs, relative to output_dir, of log files that carry step lines."""
        ...

    chosen_because: str
    """Why ``layout = "auto"`` chose this one; empty if the configuration named it."""

    @property
    def shared_parts(self) -> frozenset[str]:
        """Parts whose directory many steps share (``PartDir.names``): a restore puts their entries into it one by
        one."""
        ...

    @property
    def reshards(self) -> bool:
        """Whether the trainer can load a checkpoint with another world size. If not, a certain difference blocks a
        resume."""
        ...

    @property
    def counts_all(self) -> bool:
        """``Judgement.world_size`` counts every process, not only the data-parallel ranks among them."""
        ...

    @property
    def saves_block(self) -> bool:
        """Training waits for each save: when the next save starts, the one before has ended. False where the trainer
        can save asynchronously, or where that is unknown."""
        ...


def counts_saves(layout: Layout) -> bool:
    """True where checkpoint numbers count saves (accelerate's automatic naming): they can be compared with each other,
    but not with steps in a log. By default a layout numbers training steps. Never blocks."""
    return bool(getattr(layout, "counts_saves", False))


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


PATTERN = "step_dir"
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


def no_concerns(_site: "Site") -> tuple[Concern, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Weights:
    """Where vLLM and transformers can load the model of a checkpoint.

    ``places``: directories with Hugging Face files, relative to the step's directory ("." is that directory, "{step}"
    the step); the first that exists counts. ``when``: the condition for them. ``convert``: a command that makes such
    files in a new directory TARGET from the checkpoint directory CHECKPOINT; empty: none is known that fits every
    model. ``note``: what else is needed."""

    places: tuple[str, ...] = ()
    when: str = ""
    convert: str = ""
    note: str = ""


NO_WEIGHTS = Weights()

MakeLayout = Callable[[Site], Layout]
Recognise = Callable[[Site], Recognition | None]
FindConcerns = Callable[[Site], tuple[Concern, ...]]


@dataclass(frozen=True, slots=True)
class Kind:
    """One entry of the registry: all that is known of one trainer. ``make`` creates its layout. ``recognise`` reads
    only the command and a few directory names; None: no evidence for this layout."""

    name: str
    make: MakeLayout
    recognise: Recognise
    concerns: FindConcerns = no_concerns
    """Problems of the command or the directory that would make a restart fail. Reads small files; can block."""
    log: TrainerLog = NO_LINES
    """The lines of the trainer's log."""
    processes: ProcessNames = NO_PROCESSES
    """The names of its processes."""
    weights: Weights = NO_WEIGHTS
    """The model for inference."""
