"""What podwatch knows of one trainer: the type of a table in ``layouts.toml``; ``custom`` in podwatch.toml is one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from podwatch.domain.document import Document
from podwatch.domain.errors import ConfigurationError, IntegrityError

Globs = tuple[str, ...]
"""They match paths below a part, or ``part:path``. ``*`` matches ``/`` too; one that begins with ``!`` excludes."""


class SaveEnd(StrEnum):
    """How strong the evidence is that a save has ended. It decides for how long nothing may change."""

    COMMIT = "commit"
    """A rename of the whole, a commit file, the index of a DCP directory."""
    LAST = "last"
    """A small file that is written last, or a tracker in the parent."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class TrackerRule:
    """A file or a link by which the trainer finds its newest checkpoint, relative to output_dir as ``parts`` are.
    ``content``, or ``target`` of a link, holds ``{step}``. ``others``: more forms of it that name a step. ``part``: the
    part that it is about. ``covers``: files that must not be newer than the tracker. ``free``: a script can write
    another text, which then proves nothing. ``proves``: a save is complete only once the tracker names it, or a later
    one."""

    file: str
    content: str = ""
    target: str = ""
    others: tuple[str, ...] = ()
    part: str = ""
    covers: Globs = ()
    free: bool = False
    proves: bool = True


@dataclass(frozen=True, slots=True)
class TrainerTable(Document):
    """``parts``: part -> its places, relative to output_dir; ``{step}`` is the number (``{step:07d}``: padded),
    ``{number}`` the same with any zeros before it, ``{name}`` any words before a number. A place is a directory or a
    file; of several, the first that has steps counts, or all (``all_places``)."""

    FILE: ClassVar[str] = "layouts.toml"
    ONLY_KNOWN: ClassVar[bool] = True

    parts: Mapping[str, tuple[str, ...]]
    require: tuple[Globs, ...] = ()
    """Of each list one must match."""
    ends: SaveEnd = SaveEnd.NONE
    checked_against: tuple[str, ...] = ()
    """``project version`` of the source from which the rules were taken, and its files."""
    # -- where things are
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Parts that a resume does not need: deleted with the step."""
    by_products: tuple[str, ...] = ()
    """Those of them that stay when their step is gone."""
    exports: tuple[str, ...] = ()
    """Those that are stored with milestones and the final checkpoint."""
    if_any: tuple[str, ...] = ()
    """Parts that are needed only if any step has them."""
    identity: tuple[str, ...] = ()
    """The parts that make the save: others can be written again by a resume. Empty: all of ``parts``."""
    moved: tuple[str, ...] = ()
    """The parts that ``trainer.checkpoint_dir`` moves. Empty: all."""
    checkpoint_dir_is_root: bool = False
    """``trainer.checkpoint_dir`` contains the steps themselves, without the directories that ``parts`` names before."""
    all_places: bool = False
    either: bool = False
    """The parts are places of the same thing: the first that has steps is the checkpoint."""
    counts_saves: tuple[str, ...] = ()
    """The parts whose numbers count saves: they can be compared with each other, not with steps in a log."""
    deleted_with: str = ""
    """The part with which the trainer deletes a checkpoint, and without which nothing of it was begun."""
    not_names: Globs = ()
    belongs: Globs = ()
    """Where names are not enough: a step contains a file that matches, at most one directory deep."""
    prefer: Globs = ()
    alone: bool = False
    """Two directories of one step are refused: only one could be stored, and both would be removed."""
    also_ahead: tuple[str, ...] = ()
    """More to move to quarantine before a start below it."""
    ahead_all: tuple[str, ...] = ()
    """What every start moves away."""
    ahead_equal: tuple[str, ...] = ()
    """Optional parts of which the step of the start itself is moved away, too."""
    fresh_ahead: tuple[str, ...] = ()
    """What a fresh start moves away besides."""
    # -- what a complete checkpoint is
    absent: Globs = ()
    absent_beside: tuple[str, ...] = ()
    """Names beside the step's directory, which is ``{directory}``, that must not exist."""
    needs: Mapping[str, Globs] = field(default_factory=dict)
    """If a file matches the glob, each of these must match one."""
    usual: Mapping[str, Globs] = field(default_factory=dict)
    """The same, until a second save of this run does without."""
    last: Mapping[str, Globs] = field(default_factory=dict)
    """Marker -> what must not be newer. ``./`` at the begin of what it covers: below the marker's own directory."""
    step_in: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """File -> the keys of which the first that exists must be the step."""
    step_if_in: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The same, if it has one."""
    text: Mapping[str, str] = field(default_factory=dict)
    """File -> its whole text."""
    lists: Mapping[str, str] = field(default_factory=dict)
    """JSON file -> the key whose entries name directories beside it."""
    values: Mapping[str, Globs] = field(default_factory=dict)
    """Value of a torch file -> the values that it needs beside it."""
    index_holds: tuple[str, ...] = ()
    """An index of DCP with none of these is an export, no resume point."""
    dcp_config: Globs = ()
    """Directories in which Megatron's ``metadata.json`` follows the index."""
    not_part: Globs = ()
    """Files that are deleted with the step and never stored."""
    unchecked: Globs = ()
    """Files that no resume reads: stored, but neither their content nor their absence matters."""
    trackers: tuple[TrackerRule, ...] = ()
    weak_if: Globs = ()
    """Nothing shows the end of a save that has such a file..."""
    weak_unless: Globs = ()
    """...unless it has such a one."""
    last_if: Globs = ()
    """The end of a save with such a file is shown by a file that is written last, not by a commit."""
    hook: str = ""
    # -- the trainer
    pin_in: Mapping[str, str] = field(default_factory=dict)
    """JSON file of the newest checkpoint (``*``: the checkpoint, a torch file) -> the key that names a checkpoint which
    the trainer will read again."""
    pin_links: Globs = ()
    target_in: Mapping[str, str] = field(default_factory=dict)
    """JSON file of the newest checkpoint -> the key with the step at which training is done."""
    time_from: str = ""
    """The file whose time is the time of the save, below the step's own entry; empty: the entry's."""
    progress: Mapping[str, str] = field(default_factory=dict)
    """Role -> ``part`` or ``part:file``: the newest step of it is progress. Empty: the newest save."""
    first_step_after: int = 0
    """A resume from N first shows N + this. 0 also where that is uncertain."""
    reshards: bool = False
    world_size_is_total: bool = False
    finish_lines: tuple[str, ...] = ()
    logs: Globs = ("*.log", "logs/*.log")


def table_from(name: str, values: Mapping[str, Any], where: str = "") -> TrainerTable:
    """A table as TOML has it. A single text stands for a list of one. Raises ConfigurationError."""
    try:
        return TrainerTable.from_json(_lists(values), where=where or name)
    except IntegrityError as error:
        raise ConfigurationError(f"layout {name}: {error.what}", where=where or name, fix=error.fix) from error


_OF_LISTS = frozenset({"parts", "optional", "needs", "usual", "last", "step_in", "step_if_in", "values"})


def _lists(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: {k: [v] if isinstance(v, str) else v for k, v in value.items()}
        if key in _OF_LISTS and isinstance(value, Mapping)
        else value
        for key, value in values.items()
    }
