"""The common base of most layouts, so that each trainer is one small file: step directories below a root that match an
expression, one or more parts in each, a rule that judges them, and small facts about the trainer.

A layout is ``StepDirs(site, rules)``; ``Rules`` contains the differences.
"""

import heapq
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from re import Pattern
from typing import TypeVar

from podwatch.checkpoints.formats import dcp
from podwatch.checkpoints.layouts import command_line
from podwatch.checkpoints.layouts.base import (
    Judgement,
    PartDir,
    PartFiles,
    ResumeCommand,
    Site,
    Source,
    StepSeen,
    Tracker,
)
from podwatch.checkpoints.layouts.command_line import launched
from podwatch.checkpoints.layouts.resume_flags import Preset, resume_command
from podwatch.checkpoints.layouts.shared_rules import Inside, Rule, StepView, judged
from podwatch.domain.errors import ConfigurationError

# -- step directories by name ----------------------------------------------------------------------------------------
# Names that are not exactly a step (``step_5.bad``, a ``step_latest`` link) are ignored.

STEP = re.compile(r"^step_(0|[1-9][0-9]{0,17})$")


def step_names(root: Path, pattern: re.Pattern[str] = STEP) -> dict[int, str]:
    """Step -> directory name below ``root``. Empty if root is absent; symlinks are never steps. OSError: unreadable."""
    found: dict[int, str] = {}
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                match = pattern.fullmatch(entry.name)
                if match is not None and entry.is_dir(follow_symlinks=False):
                    found[int(match.group(1))] = entry.name
    except (FileNotFoundError, NotADirectoryError):
        pass
    return found


def all_step_names(root: Path, pattern: re.Pattern[str]) -> Mapping[int, list[str]]:
    """Step -> every directory name with it, where the name contains more than the step. Otherwise as ``step_names``.

    Rules ask for each checkpoint. As long as the directory did not change, the answer is the last one: with thousands
    of checkpoints a start would otherwise read the directory as often."""
    return _LISTED.names(root, pattern)


def _read_names(root: Path, pattern: re.Pattern[str]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                match = pattern.fullmatch(entry.name)
                if match is not None and entry.is_dir(follow_symlinks=False):
                    found.setdefault(int(match.group(1)), []).append(entry.name)
    except (FileNotFoundError, NotADirectoryError):
        pass
    return found


_RECENT_NS = 2_000_000_000
"""A directory that changed this recently can change again with the same time: file systems round times."""
_MOST_LISTED = 4


class _Listed:
    """The last listings of a few directories, each valid while the directory did not change. Safe for threads: an
    entry is only ever replaced."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, str], tuple[tuple[int, int], dict[int, list[str]]]] = {}

    def names(self, root: Path, pattern: re.Pattern[str]) -> Mapping[int, list[str]]:
        key, now = (root, pattern.pattern), time.time_ns()
        before = _changed(root)
        known = self._known.get(key)
        if known is not None and known[0] == before:
            return known[1]
        found = _read_names(root, pattern)
        if before[1] and abs(now - before[0]) > _RECENT_NS and _changed(root) == before:
            for old in list(self._known)[: max(0, len(self._known) - _MOST_LISTED + 1)]:
                self._known.pop(old, None)
            self._known[key] = (before, found)
        else:
            self._known.pop(key, None)
        return found


def _changed(root: Path) -> tuple[int, int]:
    """(time of the last change in ns, inode) of the directory, behind a link too; zeros where it cannot be read. Not
    the modification time: programs that copy set it back."""
    try:
        status = os.stat(root)  # noqa: PTH116
    except OSError:
        return 0, 0
    return status.st_ctime_ns, status.st_ino


_LISTED = _Listed()


def newest_steps(root: Path, count: int = 3) -> list[int]:
    """The highest steps below ``root``, for recognizing a trainer: empty if it cannot be read."""
    try:
        return heapq.nlargest(count, step_names(root))
    except OSError:
        return []


def not_there(path: Path) -> bool:
    """Whether nothing has this name. False where that cannot be observed."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def is_plain_dir(path: Path) -> bool:
    """Whether it is a real directory, no symlink. False also if it cannot be read."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


# -- DCP directories inside a step -----------------------------------------------------------------------------------


def dcp_folders(inside: Inside, below: str = "") -> Iterator[Inside]:
    """Every directory that contains an index or shards; ``below`` limits it to names with this prefix."""
    folders = set()
    for name in inside.files:
        folder, _, base = name.rpartition("/")
        if name.startswith(below) and (base in (dcp.INDEX, dcp.INDEX_TMP) or dcp.is_shard(base)):
            folders.add(folder)
    for folder in sorted(folders):
        yield inside.below(folder) if folder else inside


def check(inside: Inside, below: str = "") -> tuple[str, tuple[str, ...]]:
    """Require that all of them are complete (``Fault`` if not): (their save ids, files in them that no index lists)."""
    tokens, leftovers = [], list[str]()
    for folder in dcp_folders(inside, below):
        verdict = folder.dcp()
        tokens.append(verdict.save_id)
        leftovers.extend(f"{folder.part}/{folder.prefix}{n}" for n in verdict.leftovers)
    return "-".join(tokens), tuple(leftovers)


def gap(inside: Inside, pattern: re.Pattern[str], what: str) -> int:
    """Require numbered files 0, 1, 2... without a gap; returns how many, zero if none. ``Fault`` at a gap."""
    found = {int(m.group(1)) for m in inside.matches(pattern)}
    missing = set(range(max(found, default=-1) + 1)) - found
    if missing:
        raise inside.fault(f"{what} {min(missing)} is missing")
    return len(found)


# -- steps computed on access ----------------------------------------------------------------------------------------
# A thousand steps with all their paths are megabytes, and a rescan needs a few of them.

T = TypeVar("T")
MakeStep = Callable[[int], T]


class OnDemand(Mapping[int, T]):
    """Step -> ``make(step)``, in the order of ``steps``; values are not kept."""

    def __init__(self, steps: Collection[int], make: MakeStep[T]) -> None:
        self._steps = dict.fromkeys(steps)
        self._make = make

    def __getitem__(self, step: int) -> T:
        if step not in self._steps:
            raise KeyError(step)
        return self._make(step)

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


# -- cache of the directories that contain a checkpoint --------------------------------------------------------------
# For layouts where names alone are not enough. A yes is valid as long as the directory exists. A no is valid while
# the directory and those directly below it are unchanged: a writer that adds files changes one of them.

_NEWEST = 16
"""How many of the most recently changed foreign directories are checked again each time: file systems round times, so a
change right after the last check can be invisible."""
_MOST_BELOW = 8
"""Maximum number of directories below a foreign one; with more, a new check is as cheap as comparing all times."""
_Stamps = tuple[tuple[str, int, int], ...]
"""(path, mtime in ns, inode) of a directory and those directly below it."""

Belongs = Callable[[Path], bool]


class Recalled:
    """``belongs`` reads a directory and one level below it, no deeper."""

    def __init__(self, belongs: Belongs) -> None:
        self._belongs = belongs
        self._ours: dict[Path, frozenset[str]] = {}
        self._foreign: dict[Path, dict[str, _Stamps]] = {}

    def ours(self, root: Path, found: Mapping[int, list[str]]) -> dict[int, list[str]]:
        """Those of ``found`` (step -> names below ``root``) that contain a checkpoint."""
        before, foreign = self._foreign.get(root, {}), dict[str, _Stamps]()
        recent = set(sorted(before, key=lambda n: max(m for _, m, _ in before[n]))[-_NEWEST:])
        known = self._ours.get(root, frozenset())
        answer: dict[int, list[str]] = {}
        for step, names in found.items():
            for name in names:
                if name in known:
                    answer.setdefault(step, []).append(name)
                    continue
                old = before.get(name)
                if old is not None and name not in recent and all(_stamp(p) == (m, i) for p, m, i in old):
                    foreign[name] = old
                    continue
                stamps = _stamps(f"{root}/{name}")
                if self._belongs(root / name):
                    answer.setdefault(step, []).append(name)
                elif stamps:
                    foreign[name] = stamps
        self._ours[root] = frozenset(name for names in answer.values() for name in names)
        self._foreign[root] = foreign
        return answer


def _stamps(path: str) -> _Stamps:
    """Stamps, taken before the check, and the directory's own before its entries are listed, so that a change meanwhile
    is visible. Empty: do not cache."""
    found = [(path, *_stamp(path))]
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    found.append((entry.path, *_stamp(entry.path)))
                    if len(found) > _MOST_BELOW + 1:
                        return ()
    except OSError:
        return ()
    return tuple(found)


def _stamp(path: str) -> tuple[int, int]:
    try:
        status = os.lstat(path)
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_ino


# -- layout made of rules --------------------------------------------------------------------------------------------

_Listing = dict[Path, Mapping[int, list[str]]]
"""Root -> step -> names of directories."""
_SIBLINGS = 3
"""Number of other steps that a rule can compare with."""
_NEWEST_KEPT = 16
"""Newest steps that are remembered for this, because some of them can be deleted meanwhile."""


@dataclass(frozen=True, slots=True)
class Part:
    """The place of one part of a step: ``<root>/<beside>/<step directory>/<below>``."""

    name: str = "checkpoint"
    below: str = ""
    beside: str = ""
    required: bool = True
    uploaded: bool = True
    if_any: bool = False
    """Required only if this step or another one has it: a critic, the dataset state."""


def no_trackers_read(_root: Path) -> tuple[Path, ...]:
    return ()


def no_markers_read(_view: StepView) -> tuple[Path, ...]:
    return ()


def no_trackers(_root: Path, _step: int | None) -> tuple[Tracker, ...]:
    return ()


def no_pins(_root: Path) -> Mapping[int, str]:
    return {}


def no_paths(_root: Path, _step: int | None) -> tuple[Path, ...]:
    return ()


def first_sorted(names: Sequence[str]) -> str:
    return min(names)


def root_is_output(site: Site) -> Path:
    return site.checkpoint_dir or site.output_dir


def inside_output(site: Site, text: str | None, otherwise: str = "") -> Path:
    """The directory that a command names, if it is output_dir or below it; else ``output_dir/otherwise``.
    ``checkpoint_dir`` takes precedence."""
    if site.checkpoint_dir is not None:
        return site.checkpoint_dir
    if text:
        named = Path(os.path.normpath(site.working_directory / text))
        if named == site.output_dir or site.output_dir in named.parents:
            return named
    return site.output_dir / otherwise if otherwise else site.output_dir


def max_steps_flag(site: Site, command: Sequence[str], _root: Path) -> int | None:
    return command_line.positive(command_line.flag_value(command, ("--max-steps",)))


# The functions of a layout. ``Path`` is the root, the directory that contains the step directories; ``int | None`` the
# step of a start, None for a fresh one; ``Sequence[str]`` a command, or the names of one step's directories.
NameOf = Callable[[Path, int], str]
PresetOf = Callable[[Site, Sequence[str]], Preset]
RootOf = Callable[[Site], Path]
Prefer = Callable[[Sequence[str]], str]
TrackersRead = Callable[[Path], tuple[Path, ...]]
MarkersRead = Callable[[StepView], tuple[Path, ...]]
TrackersFor = Callable[[Path, int | None], tuple[Tracker, ...]]
PinnedBy = Callable[[Path], Mapping[int, str]]
AheadOf = Callable[[Path, int | None], tuple[Path, ...]]
CountProcesses = Callable[[Sequence[str]], int | None]
TargetOf = Callable[[Site, Sequence[str], Path], int | None]


@dataclass(frozen=True, slots=True)
class Rules:
    """The differences between trainers. Only ``Rules`` knows them; ``StepDirs`` applies them."""

    name: str
    step: Pattern[str]
    """Matches a step directory's whole name; the first group is the step."""
    directory: str | NameOf
    """The name of a step that does not exist yet, for a restore: ``global_step_{step}``, ``iter_{step:07d}``; or a
    function of root and step."""
    judge: Rule
    """The completeness rule; can raise ``Fault``."""
    preset: PresetOf
    """The resume arguments for a given command."""
    sources: tuple[Source, ...]
    reshards: bool
    parts: tuple[Part, ...] = (Part(),)
    root: RootOf = root_is_output
    belongs: Belongs | None = None
    """Where names alone are not enough: whether this directory contains such a checkpoint. Others are never touched."""
    prefer: Prefer = first_sorted
    """Chooses the directory that counts where several have the same step."""
    rests_on: TrackersRead = no_trackers_read
    """Trackers that the rule reads."""
    rests_on_beside: MarkersRead = no_markers_read
    """Other files outside the step directory that the rule reads: a marker beside it."""
    trackers: TrackersFor = no_trackers
    pinned: PinnedBy = no_pins
    also_ahead: AheadOf = no_paths
    """More to move to quarantine than the step directories ahead of the step, and at a fresh start the trackers; only
    existing paths."""
    first_after: int = 0
    """The first step after a resume from N is N + this. 0 where the trainer's numbering is uncertain."""
    processes: CountProcesses = launched
    counts_all: bool = False
    saves_block: bool = False
    target: TargetOf = max_steps_flag
    told_by: str = ""
    """File in the step directory whose time is the time of the save; empty: the time of the directory."""
    finish_lines: tuple[str, ...] = ()
    log_globs: tuple[str, ...] = ("*.log", "logs/*.log")


class StepDirs:
    """A layout made of ``Rules``."""

    variant = ""
    shared_parts: frozenset[str] = frozenset()

    def __init__(self, site: Site, rules: Rules) -> None:
        self.name = rules.name
        self.output_dir = site.output_dir
        self.chosen_because = ""
        self.sources, self.reshards, self.finish_lines = rules.sources, rules.reshards, rules.finish_lines
        self.counts_all = rules.counts_all
        self.saves_block = rules.saves_block
        self._site, self._rules = site, rules
        self._root = rules.root(site)
        self._recalled = Recalled(rules.belongs) if rules.belongs is not None else None
        self._newest: tuple[tuple[int, str], ...] = ()
        """(step, name) of the newest steps at the last ``steps``: listing them all for each checkpoint takes time in
        proportion to the square of their number."""

    # -- where things lie ---------------------------------------------------------------------------------------------

    def _roots(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(self._root / p.beside for p in self._rules.parts))

    def watch_roots(self) -> tuple[Path, ...]:
        return self._roots()

    def _listing(self) -> _Listing:
        return {root: self._names(root) for root in self._roots()}

    def _names(self, root: Path) -> Mapping[int, list[str]]:
        found = all_step_names(root, self._rules.step)
        return found if self._recalled is None else self._recalled.ours(root, found)

    def part_dir(self, part: str, step: int) -> Path:
        for candidate in self._rules.parts:
            if candidate.name == part:
                root = self._root / candidate.beside
                names = self._names(root).get(step)
                return self._place(candidate, root, self._rules.prefer(names) if names else self._fresh_name(step))
        raise ConfigurationError(
            f"layout {self.name} has no part {part!r}",
            where=str(self.output_dir),
            fix="another layout saved this checkpoint: restore it to another directory with --to",
        )

    def _fresh_name(self, step: int) -> str:
        rule = self._rules.directory
        return rule.format(step=step) if isinstance(rule, str) else rule(self._root, step)

    @staticmethod
    def _place(part: Part, root: Path, name: str) -> Path:
        return root / name / part.below if part.below else root / name

    def expect_parts(self, parts: Collection[str]) -> None:
        """Nothing to do: there is only one variant."""

    def steps(self) -> Mapping[int, tuple[PartDir, ...]]:
        listing = self._listing()
        self._newest = self._newest_of(listing[self._roots()[0]])
        found = sorted({step for names in listing.values() for step in names})
        wanted = frozenset(
            p.name
            for p in self._rules.parts
            if p.if_any and any(is_plain_dir(self._placed(p, step, listing)) for step in found)
        )
        return OnDemand(found, lambda step: self._parts(step, listing, wanted))

    def _parts(self, step: int, listing: _Listing, wanted: Collection[str]) -> tuple[PartDir, ...]:
        return tuple(
            PartDir(
                p.name,
                self._placed(p, step, listing),
                p.required and (not p.if_any or p.name in wanted),
                p.uploaded,
            )
            for p in self._rules.parts
        )

    def _placed(self, part: Part, step: int, listing: _Listing) -> Path:
        root = self._root / part.beside
        names = listing[root].get(step)
        return self._place(part, root, self._rules.prefer(names) if names else self._fresh_name(step))

    def step_paths(self, step: int) -> tuple[Path, ...]:
        listing = self._listing()
        return tuple(root / name for root, names in listing.items() for name in sorted(names.get(step, ())))

    def spare_paths(self, below: int) -> tuple[tuple[int, Path], ...]:
        return ()

    # -- judging ------------------------------------------------------------------------------------------------------

    def _newest_of(self, names: Mapping[int, list[str]]) -> tuple[tuple[int, str], ...]:
        newest = heapq.nlargest(_NEWEST_KEPT, names)
        return tuple((step, self._rules.prefer(names[step])) for step in newest)

    def judge(self, step: int, parts: Sequence[PartFiles]) -> Judgement:
        def siblings() -> Sequence[Path]:
            root = self._roots()[0]
            there = [(n, root / name) for n, name in self._newest if is_plain_dir(root / name)]
            if len(there) <= _SIBLINGS:
                there = [(n, root / name) for n, name in self._newest_of(self._names(root))]
            return [path for n, path in there[: _SIBLINGS + 1] if n != step]

        view = StepView(step, self._root, {p.part.name: Inside.of(p) for p in parts}, siblings)
        outside = (*self._rules.rests_on(self._root), *self._rules.rests_on_beside(view))
        return judged(self._rules.judge, view, outside)

    # -- before a start -----------------------------------------------------------------------------------------------

    def ahead_of(self, step: int | None) -> tuple[Path, ...]:
        """Step directories ahead of ``step``, and the paths that the rules add. At a fresh start also the trackers."""
        limit = -1 if step is None else step
        found: dict[Path, None] = {}
        for root, names in self._listing().items():
            for number in sorted(names):
                if number > limit:
                    found.update(dict.fromkeys(root / name for name in sorted(names[number])))
        found.update(dict.fromkeys(self._rules.also_ahead(self._root, step)))
        if step is None:
            for path in (t.path for t in self._rules.trackers(self._root, 0)):
                if path.is_symlink() or path.exists():
                    found[path] = None
        return tuple(p for p in found if not any(parent in found for parent in p.parents))

    def trackers(self, step: int | None) -> tuple[Tracker, ...]:
        return self._rules.trackers(self._root, step)

    def pinned(self) -> Mapping[int, str]:
        return self._rules.pinned(self._root)

    def resume_command(
        self, command: Sequence[str], step: int | None, override: str | Sequence[str], wandb: Mapping[str, str]
    ) -> ResumeCommand:
        return resume_command(
            self._rules.preset(self._site, command),
            self._site,
            command,
            step,
            override,
            wandb,
            checkpoint=None if step is None else self._checkpoint(step),
        )

    def _checkpoint(self, step: int) -> Path:
        """The step directory itself, which contains the first part."""
        part = self._rules.parts[0]
        inside = self.part_dir(part.name, step)
        return inside.parents[len(Path(part.below).parts) - 1] if part.below else inside

    # -- progress -----------------------------------------------------------------------------------------------------

    def progress(self) -> tuple[StepSeen, ...]:
        """The newest save; between saves only logs and heartbeats show more."""
        root = self._roots()[0]
        for step, names in sorted(self._names(root).items(), reverse=True)[:5]:
            try:
                status = (root / self._rules.prefer(names) / self._rules.told_by).stat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            return (StepSeen("checkpoint", step, status.st_mtime),)
        return ()

    def first_step_after(self, step: int) -> int:
        return step + self._rules.first_after

    def processes(self, command: Sequence[str]) -> int | None:
        return self._rules.processes(command)

    def target_step(self, command: Sequence[str]) -> int | None:
        return self._rules.target(self._site, command, self._root)

    def wandb_variables(self) -> tuple[str, ...]:
        return ("WANDB_RUN_ID",) if self._rules.preset(self._site, self._site.command).wandb else ()

    def wandb_identity(self) -> Mapping[str, str]:
        """Empty: W&B writes into the working directory, where other runs can write as well. podwatch names the W&B run
        at every start."""
        return {}

    def log_globs(self) -> tuple[str, ...]:
        return self._rules.log_globs
