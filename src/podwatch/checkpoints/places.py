"""Where a trainer's checkpoints are, by its table: entries, parts, paths, trackers, what is ahead of a start.

Everything blocks on the file system and follows no link below the roots. What vanishes meanwhile is no error.
"""

import contextlib
import heapq
import os
import re
import stat
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from podwatch.checkpoints import special
from podwatch.checkpoints.command_table import CommandTable, command_of
from podwatch.checkpoints.inspector import INSPECTOR, Inspector
from podwatch.checkpoints.shapes import PartDir, Site, StepSeen, Tracker
from podwatch.checkpoints.table import TrackerRule, TrainerTable
from podwatch.checkpoints.templates import has_step, name_of, number_in, pattern_of
from podwatch.checkpoints.trainer import Trainer
from podwatch.domain.errors import ConfigurationError

STEPS_ASKED = 64
"""So many of the highest steps are asked when their file was written: on a network volume each costs a round trip."""


@dataclass(frozen=True, slots=True)
class Template:
    """``<root>/<name>/<below>``, where only ``name`` holds the step."""

    root: Path
    name: str
    below: str

    @property
    def accepts_files(self) -> bool:
        return not self.below and self.name.rpartition("}")[2].rpartition("*")[2].startswith(".")


@dataclass(frozen=True, slots=True)
class Entry:
    template: Template
    name: str

    @property
    def top(self) -> Path:
        return self.template.root / self.name

    @property
    def path(self) -> Path:
        return self.top / self.template.below if self.template.below else self.top


Entries = Mapping[int, Sequence[Entry]]


@dataclass(frozen=True, slots=True)
class Listing:
    """One look at the directories: part -> step -> its entries, the one that counts first."""

    table: TrainerTable
    entries: Mapping[str, Entries]
    steps: tuple[int, ...]

    @property
    def existing(self) -> frozenset[str]:
        """The parts of ``if_any`` that any step has."""
        return frozenset(part for part in self.table.if_any if self.entries[part])


_FIELD = re.compile(r"\{([\w.]+)\}")


def place_of(command_table: CommandTable, site: Site) -> Path | None:
    """The directory of the checkpoints, where the command or the configuration moves it: output_dir or below it."""
    text = "" if site.checkpoint_dir is not None or not site.command else _place_named(command_table, site)
    if not text or "$" in text:
        return site.checkpoint_dir
    named = Path(os.path.normpath(site.working_directory / text))
    return named if named == site.output_dir or site.output_dir in named.parents else None


def _place_named(table: CommandTable, site: Site) -> str:
    command = command_of(site)
    named = command.value(*table.place) if table.place else None
    if named is not None:
        return named
    text = table.place_of.replace("{output_dir}", str(site.output_dir))
    for name in _FIELD.findall(text):
        if (value := command.value(name)) is None:
            return ""
        text = text.replace(f"{{{name}}}", value)
    return text


class Places:
    """The directories of one trainer's checkpoints below one output directory."""

    def __init__(self, trainer: Trainer, site: Site, *, inspector: Inspector = INSPECTOR) -> None:
        self.name = trainer.name
        self.output_dir = site.output_dir
        self.inspector = inspector
        self.trainer, self.site = trainer, site
        self._place = place_of(trainer.command, site)
        self._belonging: set[tuple[Path, int]] = set()
        self._undecided: set[Path] = set()
        """Directories with the name of a step that contain no checkpoint yet, and those in them."""
        self._steps_inside: dict[Path, tuple[tuple[int, int, int], int | None]] = {}

    @property
    def table(self) -> TrainerTable:
        """The table of files that applies."""
        return self._own_table

    @cached_property
    def _own_table(self) -> TrainerTable:
        return self.trainer.tables[self.trainer.command.table_of(command_of(self.site)) or self.name]

    # -- where things are ---------------------------------------------------------------------------------------------

    def _look(self) -> Listing:
        table = self.table
        entries = {part: self._entries(table, part) for part in (*table.parts, *table.optional)}
        if table.either:
            used = next((part for part in table.parts if entries[part]), "")
            entries = {part: found if part == used else {} for part, found in entries.items()}
        self._steps_inside = {p: v for p, v in self._steps_inside.items() if status_of(p) is not None}
        self._undecided = {path for path in set(self._undecided) if status_of(path) is not None}
        makers = (*(table.identity or table.parts), *table.exports)
        return Listing(table, entries, tuple(sorted({step for part in makers for step in entries[part]})))

    def _parts(self, listing: Listing, step: int) -> tuple[PartDir, ...]:
        table = listing.table
        wanted = [p for p in table.parts if listing.entries[p].get(step)] if table.either else table.parts
        return tuple(self._part(listing, part, step) for part in (*wanted, *table.optional))

    def _part(self, listing: Listing, part: str, step: int) -> PartDir:
        table, entries = listing.table, listing.entries[part].get(step)
        entry = entries[0] if entries else self._fresh(listing, part, step)
        own = part in table.parts
        return PartDir(
            part,
            entry.template.root if is_shared(table, part) else entry.path,
            own and (part not in table.if_any or part in listing.existing),
            own,
            (entry.name,) if is_shared(table, part) else (),
            part in table.exports,
        )

    def _fresh(self, listing: Listing, part: str, step: int) -> Entry:
        """Where a part of a step belongs that does not exist, named as the newest other one is."""
        entries, table = listing.entries[part], listing.table
        like = entries[max(entries)][0] if entries else None
        texts = table.parts.get(part) or table.optional[part]
        template = like.template if like else self._template(table, texts[0], part)
        return Entry(template, name_of(template.name, step, like.name if like else ""))

    def part_dir(self, part: str, step: int) -> Path:
        """Where ``part`` of ``step`` belongs; used by restore, so it must work in an empty output_dir. Raises
        ConfigurationError for a part that this layout does not have."""
        listing = self._look()
        if part not in listing.entries:
            raise ConfigurationError(
                f"layout {self.name} has no part {part!r}",
                where=str(self.output_dir),
                fix="another layout saved this checkpoint: restore it to another directory with --to",
            )
        entries = listing.entries[part].get(step)
        if not is_shared(listing.table, part):
            return (entries[0] if entries else self._fresh(listing, part, step)).path
        if entries:
            return entries[0].template.root
        return self._home(listing.table, part)

    def _home(self, table: TrainerTable, part: str) -> Path:
        """Where a restore puts a file or directory that brings its own name: no wildcard leads there."""
        templates = [self._template(table, text, part) for text in table.parts[part]]
        return [t.root for t in templates if not self._is_wild(t.root)][-1]

    def step_paths(self, step: int) -> tuple[Path, ...]:
        """The topmost existing directories of ``step``: these are renamed when the checkpoint is removed."""
        found = (entries.get(step, ()) for entries in self._look().entries.values())
        return tuple(dict.fromkeys(entry.top for entries in found for entry in entries))

    def watch_roots(self) -> tuple[Path, ...]:
        """Directories whose entries are step directories: watch these for events."""
        table = self.table
        wanted = [self._template(table, text, part).root for part, texts in table.parts.items() for text in texts]
        steps: set[Path] = set()
        if table.hook == "lightning" or any(map(self._is_wild, wanted)):
            steps = {entry.top for found in self._look().entries.values() for few in found.values() for entry in few}
        roots: dict[Path, None] = {}
        for root in wanted:
            roots.update(dict.fromkeys(self._on_the_way(root, steps) if self._is_wild(root) else (root,)))
        # A file whose step cannot be read yet grows without changing its directory, and an empty directory is filled.
        roots.update((path, None) for path, (_, step) in self._steps_inside.items() if step is None)
        roots.update(dict.fromkeys(sorted(self._undecided)))
        return tuple(roots)

    def _on_the_way(self, root: Path, steps: Container[Path]) -> Iterator[Path]:
        """The directories that match, those above them, and the newest in which one can appear: that is no step."""
        base = self._place or self.output_dir
        for path in self._matching(root):
            yield path
            yield from (above for above in path.parents if base in above.parents)
        newest = [base]
        for segment in root.relative_to(base).parts:
            below = [p for place in newest for p in place.glob(segment) if p not in steps and is_plain_dir(p)]
            newest = heapq.nlargest(1, below, key=lambda p: p.lstat().st_mtime_ns)
            yield from newest

    def _is_wild(self, root: Path) -> bool:
        return "*" in str(root)[len(str(self._place or self.output_dir)) :]

    def _matching(self, root: Path) -> list[Path]:
        base = self._place or self.output_dir
        return [p for p in sorted(base.glob(str(root.relative_to(base)))) if is_plain_dir(p)]

    def spare_paths(self, below: int) -> tuple[tuple[int, Path], ...]:
        """(step, directory) of by-products of steps lower than ``below`` that belong to no checkpoint: prime-rl's old
        broadcasts and rollouts, which prime-rl never removes. Oldest first."""
        listing = self._look()
        existing = frozenset(listing.steps)
        found = {
            (step, entry.top)
            for part in listing.table.by_products
            for step, entries in listing.entries[part].items()
            for entry in entries
            if step < below and step not in existing
        }
        return tuple(sorted(found))

    def _template(self, table: TrainerTable, text: str, part: str) -> Template:
        segments = text.split("/")
        number = next((i for i, s in enumerate(segments) if has_step(s)), len(segments) - 1)
        lead = segments[:number]
        moved = not table.moved or part in table.moved
        base = self._place if self._place is not None and moved else self.output_dir
        inside = table.checkpoint_dir_is_root and (
            base == self._place or (lead[:1] == [base.name] and not (base / lead[0]).exists())
        )
        root = base if inside else base.joinpath(*lead)
        return Template(root, segments[number], "/".join(segments[number + 1 :]))

    def _templates(self, table: TrainerTable, part: str) -> Iterator[Template]:
        for text in table.parts.get(part) or table.optional.get(part, ()):
            template = self._template(table, text, part)
            if self._is_wild(template.root):
                yield from (replace(template, root=root) for root in self._matching(template.root))
            else:
                yield template

    def _entries(self, table: TrainerTable, part: str) -> Entries:
        found: dict[int, list[Entry]] = {}
        seen: set[Path] = set()
        with self.inspector:
            for template in self._templates(table, part):
                if found and not table.all_places:
                    break
                for name in listed(template.root, files_too=template.accepts_files):
                    entry = Entry(template, name)
                    if entry.top in seen or any(fnmatchcase(name, glob) for glob in table.not_names):
                        continue
                    step = self._step_of(table, entry)
                    if step is not None and self._belongs(table, entry):
                        seen.add(entry.top)
                        found.setdefault(step, []).append(entry)
        return {
            step: sorted(few, key=lambda e: _rank(table, e)) if len(few) > 1 else few for step, few in found.items()
        }

    def _step_of(self, table: TrainerTable, entry: Entry) -> int | None:
        if table.hook != "lightning":
            return number_in(entry.template.name, entry.name)
        if pattern_of(entry.template.name).fullmatch(entry.name) is None:
            return None
        file = entry.top
        if file.is_dir():
            candidates = (file / "meta.pt", *sorted((file / "checkpoint").glob("*_model_states.pt"))[:1])
            file = next((c for c in candidates if c.is_file()), file)
        status = status_of(file)
        if status is None:
            return None
        stamp = status.st_ino, status.st_size, status.st_mtime_ns
        if self._steps_inside.get(entry.top, (None, None))[0] != stamp:
            values = self.inspector.values(file) if stat.S_ISREG(status.st_mode) else {}
            if values is None:  # nobody knows yet: asked again
                return special.lightning_step(entry.name, {})
            self._steps_inside[entry.top] = stamp, special.lightning_step(entry.name, values)
        return self._steps_inside[entry.top][1]

    def _belongs(self, table: TrainerTable, entry: Entry) -> bool:
        """Whether it contains such a checkpoint, where names are not enough: one directory deep at most. A yes holds as
        long as the directory exists."""
        if not table.belongs:
            return True
        status = status_of(entry.top)
        key = (entry.top, status.st_ino if status else 0)
        if key in self._belonging:
            return True
        names = listed(entry.top, files_too=True)
        folders = [entry.top / name for name in names if table.hook != "orbax" and (entry.top / name).is_dir()]
        deeper = [n for folder in folders for n in listed(folder, files_too=True)]
        found = any(fnmatchcase(n, glob) for n in (*names, *deeper) for glob in table.belongs)
        if found:
            self._belonging.add(key)
            self._undecided.difference_update((entry.top, *folders))
        else:
            self._undecided.update((entry.top, *folders))
        return found

    def _beside(self, listing: Listing, step: int) -> tuple[Path, ...]:
        """Paths beside a step that must not exist."""
        entries = listing.entries[next(iter(listing.table.parts))].get(step, ())
        return tuple(
            entry.top.parent / name.format(directory=entry.top.name)
            for entry in entries[:1]
            for name in listing.table.absent_beside
        )

    # -- before a start -----------------------------------------------------------------------------------------------

    def ahead_of(self, step: int | None) -> tuple[Path, ...]:
        """Everything that must be moved to quarantine before a start from ``step`` (None: a fresh start)."""
        listing = self._look()
        table, limit = listing.table, -1 if step is None else step
        found: dict[Path, None] = {}
        for part, entries in listing.entries.items():
            first = limit if part in table.ahead_equal and step is not None else limit + 1
            found.update(dict.fromkeys(e.top for n in sorted(entries) if n >= first for e in entries[n]))
        for text in table.also_ahead:
            template = self._template(table, text, "")
            for name in listed(template.root, files_too=True):
                number = number_in(template.name, name)
                if number is not None and number > limit:
                    found[Entry(template, name).path] = None
        always = [self.output_dir / name for name in table.ahead_all]
        if step is None:
            always += [*(self.output_dir / name for name in table.fresh_ahead), *self._links(table)]
            always += [self._tracker_path(table, rule) for rule in table.trackers]
            always = [p for p in always if status_of(p) is not None]
        else:
            always = [p for p in always if (s := status_of(p)) is not None and stat.S_ISDIR(s.st_mode)]
        found.update(dict.fromkeys(always))
        return tuple(p for p in found if status_of(p) is not None and not any(above in found for above in p.parents))

    def trackers(self, step: int | None) -> tuple[Tracker, ...]:
        """The required content of the trainer's own "latest" files and links for a start from ``step`` (None: a fresh
        start, for which ``ahead_of`` moves them away). Only trackers that exist, or that a resume needs."""
        if step is None:
            return ()
        table = self.table
        found = [
            Tracker(
                self._tracker_path(table, rule),
                None if rule.target else rule.content.format(step=step).encode(),
                rule.target.format(step=step) if rule.target else None,
            )
            for rule in table.trackers
            if not rule.part or self._tracker_path(table, rule).parent.is_dir()
        ]
        own = self._entries(table, main_part(table)).get(step, ()) if table.pin_links else ()
        found += [Tracker(p, target=own[0].name) for p in self._links(table) if own and p.parent == own[0].top.parent]
        return tuple(found)

    def _tracker_path(self, table: TrainerTable, rule: TrackerRule) -> Path:
        template = self._template(table, rule.file, next(iter(table.parts)))
        return template.root / template.name

    def _links(self, table: TrainerTable) -> list[Path]:
        places = dict.fromkeys(t.root for t in self._templates(table, main_part(table))) if table.pin_links else ()
        found = [p for root in places for glob in table.pin_links for p in sorted(root.glob(glob))]
        return [p for p in found if p.is_symlink()]

    # -- progress ---------------------------------------------------------------------------------------------------

    def progress(self) -> tuple[StepSeen, ...]:
        """The highest step per role as the files show it (``broadcasts/step_N/STABLE``...), and after it the one that
        was written last, where that is another."""
        listing = self._look()
        table, main = listing.table, main_part(listing.table)
        used = next((p for p in table.parts if listing.entries[p]), main)
        sources = table.progress or {"checkpoint": f"{used}:{table.time_from}"}
        found: list[StepSeen] = []
        for role, text in sources.items():
            part, _, file = text.partition(":")
            found += _shown(role, listing.entries.get(part, {}), file)
        return tuple(found)

    def _checkpoint(self, step: int) -> Path:
        """The file or directory that is passed to the trainer: that of the first part."""
        listing = self._look()
        for part in listing.table.parts:
            if entries := listing.entries[part].get(step):
                return entries[0].top
        main = main_part(listing.table)
        fresh = self._fresh(listing, main, step)
        return self._home(listing.table, main) / fresh.name if is_shared(listing.table, main) else fresh.top


# -- tables ------------------------------------------------------------------------------------------------------------


def main_part(table: TrainerTable) -> str:
    return next(iter(table.parts))


def is_shared(table: TrainerTable, part: str) -> bool:
    """Whether the name of an entry says more than the step: it is stored with the checkpoint, and a restore puts it
    back into the directory that many steps share."""
    texts = table.parts.get(part, ())
    return len(texts) > 1 or any(
        "*" in text or Template(Path(), text.rpartition("/")[2], "").accepts_files for text in texts
    )


def _rank(table: TrainerTable, entry: Entry) -> tuple[bool, int, str]:
    preferred = any(fnmatchcase(entry.name, glob) for glob in table.prefer)
    if table.hook != "lightning":
        return not preferred, 0, entry.name
    status = status_of(entry.top)
    return entry.name.startswith("last"), -status.st_mtime_ns if status else 0, entry.name


def _shown(role: str, entries: Entries, file: str) -> Iterator[StepSeen]:
    """The highest step of which the file (or the entry itself) exists, and the one whose file was written last, where
    that is another: a trainer that begins again lower writes files of lower steps again. Without a file only the
    highest: a directory changes with all that is written into it."""
    found: list[StepSeen] = []
    for step in heapq.nlargest(STEPS_ASKED if file else 5, entries):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found.append(StepSeen(role, step, (entries[step][0].top / file).stat().st_mtime))
    yield from found[:1]
    last = max(found[1:] if file else (), key=lambda seen: seen.wall, default=None)
    if last is not None and last.wall > found[0].wall:
        yield last


# -- the file system ---------------------------------------------------------------------------------------------------


def status_of(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:
        return None


def listed(root: Path, *, files_too: bool) -> list[str]:
    """Names of directories, and of files on request; never of links. Empty where the directory is absent."""
    try:
        with os.scandir(root) as entries:
            return sorted(
                e.name
                for e in entries
                if e.is_dir(follow_symlinks=False) or (files_too and e.is_file(follow_symlinks=False))
            )
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_plain_dir(path: Path) -> bool:
    """Whether it is a real directory, no symlink. False also if it cannot be read."""
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)
