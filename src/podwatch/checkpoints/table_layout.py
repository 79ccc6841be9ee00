"""One trainer's checkpoints, by its table: steps, parts, verdicts, trackers, what is ahead of a start.

Everything blocks on the file system and follows no link below the roots. What vanishes meanwhile is no error.
"""

import hashlib
import heapq
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from podwatch.checkpoints import special
from podwatch.checkpoints.command_line import launched, max_steps_flag
from podwatch.checkpoints.inspector import INSPECTOR, Inspector, Surroundings
from podwatch.checkpoints.layout import (
    Judgement,
    PartDir,
    PartFiles,
    ResumeCommand,
    Site,
    StepSeen,
    Tracker,
)
from podwatch.checkpoints.records import RecordedFile
from podwatch.checkpoints.resume_flags import Preset, resume_command
from podwatch.checkpoints.rules import CheckpointInspection, InspectionOutcome, missing_form
from podwatch.checkpoints.scan import is_temporary, scan_part
from podwatch.checkpoints.step_names import is_absent, is_plain_dir
from podwatch.checkpoints.structures import UNFINISHED_INDEX
from podwatch.checkpoints.table import TrackerRule, TrainerTable, all_tables
from podwatch.checkpoints.templates import forms_of, has_step, name_of, number_in, pattern_of
from podwatch.domain.errors import ConfigurationError
from podwatch.system.files import read_small

_STATE_LIMIT = 64 << 20
_TRACKER_LIMIT = 4096
_NEIGHBOURS = 3
"""So many saves before a step, and after it, are tried until one is found to compare with."""
_SLOW = 5.0
"""Seconds. An inspection that took longer and gave no answer is repeated..."""
_PATIENCE = 10.0
"""...after so many times as long."""


@dataclass(frozen=True, slots=True)
class _Template:
    """``<root>/<name>/<below>``, where only ``name`` holds the step."""

    root: Path
    name: str
    below: str

    @property
    def accepts_files(self) -> bool:
        return not self.below and self.name.rpartition("}")[2].rpartition("*")[2].startswith(".")


@dataclass(frozen=True, slots=True)
class _Entry:
    template: _Template
    name: str

    @property
    def top(self) -> Path:
        return self.template.root / self.name

    @property
    def path(self) -> Path:
        return self.top / self.template.below if self.template.below else self.top


_Entries = Mapping[int, Sequence[_Entry]]


@dataclass(frozen=True, slots=True)
class _Listing:
    """One look at the directories: part -> step -> its entries, the one that counts first."""

    table: TrainerTable
    entries: Mapping[str, _Entries]
    steps: tuple[int, ...]

    @property
    def existing(self) -> frozenset[str]:
        """The parts of ``if_any`` that any step has."""
        return frozenset(part for part in self.table.if_any if self.entries[part])


@dataclass(frozen=True, slots=True)
class _Inspected:
    """``files``: a digest of their list. ``forms``: those of its own files. ``again``: monotonic seconds before which
    it is not inspected again."""

    files: bytes
    forms: frozenset[str]
    found: CheckpointInspection
    again: float = 0.0


@dataclass(frozen=True, slots=True)
class Trainer:
    """What podwatch knows of a trainer's command; its table says the rest."""

    name: str
    preset: Callable[[Site, Sequence[str]], Preset]
    """The resume arguments for a given command."""
    target: Callable[[Site, Sequence[str]], int | None] = max_steps_flag
    """The step at which training is done."""
    processes: Callable[[Sequence[str]], int | None] = launched
    place: Callable[[Site], Path | None] = lambda site: site.checkpoint_dir
    """The directory of the checkpoints, where the command or the configuration moves it."""
    table: Callable[[Site], TrainerTable] | None = None
    """The table, where the command chooses between several."""


class TableLayout:
    """One trainer's checkpoints below one output directory."""

    def __init__(self, trainer: Trainer, site: Site, *, inspector: Inspector = INSPECTOR) -> None:
        self.name = trainer.name
        self.output_dir = site.output_dir
        self.chosen_because = ""
        self.inspector = inspector
        self._trainer, self._site = trainer, site
        self._place = trainer.place(site)
        self._listing: _Listing | None = None
        self._belonging: set[tuple[Path, int]] = set()
        self._steps_inside: dict[Path, tuple[tuple[int, int, int], int | None]] = {}
        self._inspected: dict[int, _Inspected] = {}
        self._forms: dict[frozenset[str], frozenset[str]] = {}
        """Equal checkpoints share one."""
        self._compared: dict[tuple[int, int], _Inspected] = {}
        self._last_values: tuple[object, Mapping[str, object]] = (None, {})

    @contextmanager
    def reading(self) -> Iterator[None]:
        self._compared.clear()
        with self.inspector:
            yield
        self._compared.clear()

    # -- the table ----------------------------------------------------------------------------------------------------

    @property
    def table(self) -> TrainerTable:
        choose = self._trainer.table
        return choose(self._site) if choose is not None else all_tables()[self.name]

    @property
    def variant(self) -> str:
        return ""

    @property
    def reshards(self) -> bool:
        return self.table.reshards

    @property
    def counts_all(self) -> bool:
        return self.table.world_size_is_total

    @property
    def saves_block(self) -> bool:
        return self.table.saves_block

    @property
    def finish_lines(self) -> tuple[str, ...]:
        return self.table.finish_lines

    @property
    def shared_parts(self) -> frozenset[str]:
        table = self.table
        return frozenset(part for part in table.parts if _is_shared(table, part))

    @property
    def counts_saves(self) -> bool:
        listing = self._listing
        return listing is not None and any(listing.entries.get(part) for part in listing.table.counts_saves)

    def log_globs(self) -> tuple[str, ...]:
        return self.table.logs

    def first_step_after(self, step: int) -> int:
        table = self.table
        if any(self._entries(table, part) for part in table.counts_saves):
            return 0
        return step + table.first_step_after

    def expect_parts(self, parts: Collection[str]) -> None:
        """Nothing to do: there is only one table."""

    # -- where things are ---------------------------------------------------------------------------------------------

    def steps(self) -> Mapping[int, tuple[PartDir, ...]]:
        """Each directory is listed once; the parts of a step are made when it is asked for."""
        listing = self._listing = self._look()
        existing = frozenset(listing.steps)
        self._inspected = {step: seen for step, seen in self._inspected.items() if step in existing}
        return _OnDemand(listing.steps, lambda step: self._parts(listing, step))

    def _look(self) -> _Listing:
        table = self.table
        entries = {part: self._entries(table, part) for part in (*table.parts, *table.optional)}
        if table.either:
            used = next((part for part in table.parts if entries[part]), "")
            entries = {part: found if part == used else {} for part, found in entries.items()}
        self._steps_inside = {p: v for p, v in self._steps_inside.items() if p.parent.is_dir()}
        makers = (*(table.identity or table.parts), *table.exports)
        return _Listing(table, entries, tuple(sorted({step for part in makers for step in entries[part]})))

    def _parts(self, listing: _Listing, step: int) -> tuple[PartDir, ...]:
        table = listing.table
        wanted = [p for p in table.parts if listing.entries[p].get(step)] if table.either else table.parts
        return tuple(self._part(listing, part, step) for part in (*wanted, *table.optional))

    def _part(self, listing: _Listing, part: str, step: int) -> PartDir:
        table, entries = listing.table, listing.entries[part].get(step)
        entry = entries[0] if entries else self._fresh(listing, part, step)
        own = part in table.parts
        return PartDir(
            part,
            entry.template.root if _is_shared(table, part) else entry.path,
            own and (part not in table.if_any or part in listing.existing),
            own,
            (entry.name,) if _is_shared(table, part) else (),
            part in table.exports,
        )

    def _fresh(self, listing: _Listing, part: str, step: int) -> _Entry:
        """Where a part of a step belongs that does not exist, named as the newest other one is."""
        entries, table = listing.entries[part], listing.table
        like = entries[max(entries)][0] if entries else None
        texts = table.parts.get(part) or table.optional[part]
        template = like.template if like else self._template(table, texts[0], part)
        return _Entry(template, name_of(template.name, step, like.name if like else ""))

    def part_dir(self, part: str, step: int) -> Path:
        listing = self._look()
        if part not in listing.entries:
            raise ConfigurationError(
                f"layout {self.name} has no part {part!r}",
                where=str(self.output_dir),
                fix="another layout saved this checkpoint: restore it to another directory with --to",
            )
        entries = listing.entries[part].get(step)
        if not _is_shared(listing.table, part):
            return (entries[0] if entries else self._fresh(listing, part, step)).path
        if entries:
            return entries[0].template.root
        return self._home(listing.table, part)

    def _home(self, table: TrainerTable, part: str) -> Path:
        """Where a restore puts a file or directory that brings its own name: no wildcard leads there."""
        templates = [self._template(table, text, part) for text in table.parts[part]]
        return [t.root for t in templates if not self._is_wild(t.root)][-1]

    def step_paths(self, step: int) -> tuple[Path, ...]:
        found = (entries.get(step, ()) for entries in self._look().entries.values())
        return tuple(dict.fromkeys(entry.top for entries in found for entry in entries))

    def watch_roots(self) -> tuple[Path, ...]:
        table = self.table
        roots: dict[Path, None] = {}
        for part, texts in table.parts.items():
            for root in (self._template(table, text, part).root for text in texts):
                roots.update(dict.fromkeys(self._on_the_way(root) if self._is_wild(root) else (root,)))
        if table.hook == "lightning":  # a file whose step cannot be read yet grows without changing its directory
            self._look()
        roots.update((path, None) for path, (_, step) in self._steps_inside.items() if step is None)
        return tuple(roots)

    def _on_the_way(self, root: Path) -> Iterator[Path]:
        """The directories that match, those above them, and the newest in which one can appear."""
        base = self._place or self.output_dir
        for path in self._matching(root):
            yield path
            yield from (above for above in path.parents if base in above.parents)
        newest = [base]
        for segment in root.relative_to(base).parts:
            below = [p for place in newest for p in place.glob(segment) if is_plain_dir(p)]
            newest = heapq.nlargest(1, below, key=lambda p: p.lstat().st_mtime_ns)
            yield from newest

    def _is_wild(self, root: Path) -> bool:
        return "*" in str(root)[len(str(self._place or self.output_dir)) :]

    def _matching(self, root: Path) -> list[Path]:
        base = self._place or self.output_dir
        return [p for p in sorted(base.glob(str(root.relative_to(base)))) if is_plain_dir(p)]

    def spare_paths(self, below: int) -> tuple[tuple[int, Path], ...]:
        listing = self._look()
        found = {
            (step, entry.top)
            for part in listing.table.by_products
            for step, entries in listing.entries[part].items()
            for entry in entries
            if step < below and step not in listing.steps
        }
        return tuple(sorted(found))

    def _template(self, table: TrainerTable, text: str, part: str) -> _Template:
        segments = text.split("/")
        number = next((i for i, s in enumerate(segments) if has_step(s)), len(segments) - 1)
        lead = segments[:number]
        moved = not table.moved or part in table.moved
        base = self._place if self._place is not None and moved else self.output_dir
        inside = table.checkpoint_dir_is_root and (
            base == self._place or (lead[:1] == [base.name] and not (base / lead[0]).exists())
        )
        root = base if inside else base.joinpath(*lead)
        return _Template(root, segments[number], "/".join(segments[number + 1 :]))

    def _templates(self, table: TrainerTable, part: str) -> Iterator[_Template]:
        for text in table.parts.get(part) or table.optional.get(part, ()):
            template = self._template(table, text, part)
            if self._is_wild(template.root):
                yield from (replace(template, root=root) for root in self._matching(template.root))
            else:
                yield template

    def _entries(self, table: TrainerTable, part: str) -> _Entries:
        found: dict[int, list[_Entry]] = {}
        seen: set[Path] = set()
        with self.inspector:
            for template in self._templates(table, part):
                if found and not table.all_places:
                    break
                for name in _listed(template.root, files_too=template.accepts_files):
                    entry = _Entry(template, name)
                    if entry.top in seen or any(fnmatchcase(name, glob) for glob in table.not_names):
                        continue
                    step = self._step_of(table, entry)
                    if step is not None and self._belongs(table, entry):
                        seen.add(entry.top)
                        found.setdefault(step, []).append(entry)
        return {
            step: sorted(few, key=lambda e: _rank(table, e)) if len(few) > 1 else few for step, few in found.items()
        }

    def _step_of(self, table: TrainerTable, entry: _Entry) -> int | None:
        if table.hook != "lightning":
            return number_in(entry.template.name, entry.name)
        if pattern_of(entry.template.name).fullmatch(entry.name) is None:
            return None
        file = entry.top
        if file.is_dir():
            candidates = (file / "meta.pt", *sorted((file / "checkpoint").glob("*_model_states.pt"))[:1])
            file = next((c for c in candidates if c.is_file()), file)
        status = _status(file)
        if status is None:
            return None
        stamp = status.st_ino, status.st_size, status.st_mtime_ns
        if self._steps_inside.get(entry.top, (None, None))[0] != stamp:
            values = self.inspector.values(file) if stat.S_ISREG(status.st_mode) else {}
            if values is None:  # nobody knows yet: asked again
                return special.lightning_step(entry.name, {})
            self._steps_inside[entry.top] = stamp, special.lightning_step(entry.name, values)
        return self._steps_inside[entry.top][1]

    def _belongs(self, table: TrainerTable, entry: _Entry) -> bool:
        """Whether it contains such a checkpoint, where names are not enough: one directory deep at most. A yes holds as
        long as the directory exists."""
        if not table.belongs:
            return True
        status = _status(entry.top)
        key = (entry.top, status.st_ino if status else 0)
        if key in self._belonging:
            return True
        names = _listed(entry.top, files_too=True)
        folders = [entry.top / name for name in names] if table.hook != "orbax" else []
        deeper = [n for folder in folders if folder.is_dir() for n in _listed(folder, files_too=True)]
        found = any(fnmatchcase(n, glob) for n in (*names, *deeper) for glob in table.belongs)
        if found:
            self._belonging.add(key)
        return found

    # -- judging ------------------------------------------------------------------------------------------------------

    def judge(
        self, step: int, parts: Sequence[PartFiles], known: Mapping[int, Collection[str]] | None = None
    ) -> Judgement:
        listing = self._listing or self._look()
        table = listing.table
        own = [p for p in parts if p.part.name in table.parts]
        outside = (*self._tracker_paths(table).values(), *self._beside(listing, step))
        deleted = self._is_deleted(listing, step)
        main = next((p for p in own if p.part.name == table.deleted_with), None)
        if main is not None and not main.files and len(own) > 1:
            others = any(p.present for p in own)
            reason = f"waiting for the {main.part.name}: step {step} has only other parts" if others else "it is empty"
            problems = {main.part.name: reason}
            return Judgement(False, reason, pending=others, problems=problems, rests_on=outside, deleted=deleted)
        seen = self._inspect(listing, step, own, known or {})
        found = seen.found
        verdict = Judgement(
            found.whole,
            found.reason,
            damaged=found.outcome is InspectionOutcome.DAMAGED,
            unreadable=found.outcome is InspectionOutcome.UNKNOWN,
            ends=found.end,
            save_token=found.token,
            world_size=found.world_size,
            problems=found.problems,
            leftovers=_leftovers(own, found),
            rests_on=outside,
            deleted=deleted and not found.whole,
            hole=found.hole,
            unsized=found.unsized,
            faults=found.faults,
            checked=found.checked,
            unchecked=found.unchecked,
        )
        required = self._required_forms(listing, step, known or {}) if found.whole else frozenset[str]()
        lacking = missing_form(table, required, seen.forms)
        if not lacking:
            return verdict
        reason = f"{lacking} is missing, which the saves around it have"
        return replace(verdict, whole=False, lacks=True, reason=reason)

    def _is_deleted(self, listing: _Listing, step: int) -> bool:
        part = listing.table.deleted_with
        return bool(part) and step not in listing.entries[part] and is_absent(self._fresh(listing, part, step).top)

    def _inspect(
        self, listing: _Listing, step: int, own: Sequence[PartFiles], known: Mapping[int, Collection[str]]
    ) -> _Inspected:
        """Always a new inspection, except of a save that this thread has just read to compare another one with it, and
        of one whose last inspection took long and gave no answer."""
        files, ready = _digest(own), self._compared.pop((threading.get_ident(), step), None)
        if ready is not None and ready.files == files:
            return ready
        before = self._inspected.get(step)
        if before is not None and before.files == files and before.again > time.monotonic():
            return before
        return self._ask(listing, step, own, known)

    def _ask(
        self, listing: _Listing, step: int, own: Sequence[PartFiles], known: Mapping[int, Collection[str]]
    ) -> _Inspected:
        table, began = listing.table, time.monotonic()
        places = {p.part.name: _place_of(p) for p in own}
        twins = listing.entries[own[0].part.name].get(step, ()) if table.alone else ()
        about = Surroundings(
            self._tracker_paths(table),
            listing.existing,
            frozenset(table.if_any) - listing.existing,
            later=bool(listing.steps) and listing.steps[-1] > step,
            other_forms=self._other_forms(listing, step, known) if table.usual else (),
            beside=self._beside(listing, step),
            twin=f"{twins[1].name}, beside {twins[0].name}," if len(twins) > 1 else "",
        )
        found = self.inspector.inspect(table, step, places, _recorded(own), about)
        forms = forms_of(set(_names(own)) - set(found.unlisted))
        now = time.monotonic()
        slow = found.outcome is InspectionOutcome.UNKNOWN and now - began > _SLOW
        again = now + (now - began) * _PATIENCE if slow else 0.0
        forms = self._forms.setdefault(forms, forms)
        seen = self._inspected[step] = _Inspected(_digest(own), forms, found, again)
        return seen

    def _beside(self, listing: _Listing, step: int) -> tuple[Path, ...]:
        """Paths beside a step that must not exist."""
        entries = listing.entries[next(iter(listing.table.parts))].get(step, ())
        return tuple(
            entry.top.parent / name.format(directory=entry.top.name)
            for entry in entries[:1]
            for name in listing.table.absent_beside
        )

    # -- comparing with the saves around it ---------------------------------------------------------------------------
    # A save has every form of file that both the save before it and the save after it have. Two saves that agree are
    # the new form; one alone that differs was interrupted, or it waits for the next one.

    def _required_forms(self, listing: _Listing, step: int, known: Mapping[int, Collection[str]]) -> frozenset[str]:
        before = [s for s in reversed(listing.steps) if s < step][:_NEIGHBOURS]
        after = [s for s in listing.steps if s > step][:_NEIGHBOURS]
        found = [self._forms_of_first(listing, few, known) for few in (before, after)]
        usable = [forms for forms in found if forms is not None]
        return frozenset.intersection(*usable) if usable else frozenset()

    def _forms_of_first(
        self, listing: _Listing, steps: Sequence[int], known: Mapping[int, Collection[str]]
    ) -> frozenset[str] | None:
        """Of the first save that is whole but for this comparison; None if none is."""
        for other in steps:
            if other in known:
                return _forms_known(listing.table, known[other])
            own = self._scanned(listing, other)
            seen = self._inspected.get(other)
            if seen is None or seen.files != _digest(own):
                seen = self._ask(listing, other, own, known)
                if self.inspector.is_open:
                    self._compared[threading.get_ident(), other] = seen
            if seen.found.whole:
                return seen.forms
        return None

    def _other_forms(self, listing: _Listing, step: int, known: Mapping[int, Collection[str]]) -> frozenset[str]:
        """Forms that any of the newest other saves has."""
        found: set[str] = set()
        for other in [s for s in reversed(listing.steps) if s != step][:_NEIGHBOURS]:
            if other in known:
                found |= _forms_known(listing.table, known[other])
            else:
                found |= forms_of(_names(self._scanned(listing, other)))
        return frozenset(found)

    def _scanned(self, listing: _Listing, step: int) -> list[PartFiles]:
        return [scan_part(part).found for part in self._parts(listing, step) if part.name in listing.table.parts]

    # -- before a start -----------------------------------------------------------------------------------------------

    def ahead_of(self, step: int | None) -> tuple[Path, ...]:
        listing = self._look()
        table, limit = listing.table, -1 if step is None else step
        found: dict[Path, None] = {}
        for part, entries in listing.entries.items():
            first = limit if part in table.ahead_equal and step is not None else limit + 1
            found.update(dict.fromkeys(e.top for n in sorted(entries) if n >= first for e in entries[n]))
        for text in table.also_ahead:
            template = self._template(table, text, "")
            for name in _listed(template.root, files_too=True):
                number = number_in(template.name, name)
                if number is not None and number > limit:
                    found[_Entry(template, name).path] = None
        always = [self.output_dir / name for name in table.ahead_all]
        if step is None:
            always += [*(self.output_dir / name for name in table.fresh_ahead), *self._links(table)]
            always += [self._tracker_path(table, rule) for rule in table.trackers]
            always = [p for p in always if _status(p) is not None]
        else:
            always = [p for p in always if (s := _status(p)) is not None and stat.S_ISDIR(s.st_mode)]
        found.update(dict.fromkeys(always))
        return tuple(p for p in found if _status(p) is not None and not any(above in found for above in p.parents))

    def trackers(self, step: int | None) -> tuple[Tracker, ...]:
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
        own = self._entries(table, _main(table)).get(step, ()) if table.pin_links else ()
        found += [Tracker(p, target=own[0].name) for p in self._links(table) if own and p.parent == own[0].top.parent]
        return tuple(found)

    def _tracker_paths(self, table: TrainerTable) -> Mapping[str, Path]:
        """Tracker by the name that rules use -> its path. Those that are links are read by no rule."""
        return {rule.file: self._tracker_path(table, rule) for rule in table.trackers if not rule.target}

    def _tracker_path(self, table: TrainerTable, rule: TrackerRule) -> Path:
        template = self._template(table, rule.file, next(iter(table.parts)))
        return template.root / template.name

    def _links(self, table: TrainerTable) -> list[Path]:
        places = dict.fromkeys(t.root for t in self._templates(table, _main(table))) if table.pin_links else ()
        found = [p for root in places for glob in table.pin_links for p in sorted(root.glob(glob))]
        return [p for p in found if p.is_symlink()]

    def pinned(self) -> Mapping[int, str]:
        listing = self._look()
        table, pins = listing.table, dict[int, str]()
        for rule in table.trackers:
            path = self._tracker_path(table, rule)
            try:
                text = path.readlink().name if rule.target else read_small(path, _TRACKER_LIMIT).decode().strip()
            except (OSError, UnicodeDecodeError):
                continue
            step = number_in(rule.target or rule.content, text)
            if step is not None:
                pins.setdefault(step, f"named by {rule.file}")
        entries = listing.entries[_main(table)]
        by_path = {entry.top: step for step, few in entries.items() for entry in few}
        for link in self._links(table):
            if (step := by_path.get(link.parent / os.readlink(link))) is not None:  # noqa: PTH115 - the text
                pins[step] = link.name
        for newest in heapq.nlargest(1, entries):
            pins.update(self._named_by(listing, newest, by_path))
        return pins

    def _named_by(self, listing: _Listing, newest: int, by_path: Mapping[Path, int]) -> Iterator[tuple[int, str]]:
        """What the newest checkpoint itself names; and an export, which is no interrupted save."""
        table = listing.table
        entry = listing.entries[_main(table)][newest][0]
        for file, key in table.pin_in.items():
            if file == "*":  # the checkpoint is a file itself
                values = self._values(entry.top)
                named = {Path(str(v)).name for k, v in values.items() if k.endswith(f".{key}") and v}
            else:
                named = {_named_in(entry.top / file, key)}
            what = key if file == "*" else f"{key} in {file}"
            yield from ((step, what) for path, step in by_path.items() if path.name in named)
        if table.index_holds:
            own = self._scanned(listing, newest)
            seen = self._inspected.get(newest)
            if seen is None or seen.files != _digest(own):
                seen = self._ask(listing, newest, own, {})
            if seen.found.is_export:
                yield newest, "the export at the end of the run"

    def _values(self, file: Path) -> Mapping[str, object]:
        """Small values in the newest file, read once."""
        status = _status(file)
        if status is None or not stat.S_ISREG(status.st_mode):
            return {}
        stamp = (file, status.st_ino, status.st_size, status.st_mtime_ns)
        if self._last_values[0] != stamp:
            self._last_values = stamp, self.inspector.values(file) or {}
        return self._last_values[1]

    # -- progress and the command -------------------------------------------------------------------------------------

    def progress(self) -> tuple[StepSeen, ...]:
        listing = self._look()
        table, main = listing.table, _main(listing.table)
        used = next((p for p in table.parts if listing.entries[p]), main)
        sources = table.progress or {"checkpoint": f"{used}:{table.time_from}"}
        seen = (_newest(role, listing.entries.get(text.partition(":")[0], {}), text) for role, text in sources.items())
        return tuple(found for found in seen if found is not None)

    def resume_command(
        self, command: Sequence[str], step: int | None, override: str | Sequence[str], wandb: Mapping[str, str]
    ) -> ResumeCommand:
        return resume_command(
            self._trainer.preset(self._site, command),
            self._site,
            command,
            step,
            override,
            wandb,
            checkpoint=None if step is None else self._checkpoint(step),
        )

    def _checkpoint(self, step: int) -> Path:
        """The file or directory that is passed to the trainer: that of the first part."""
        listing = self._look()
        for part in listing.table.parts:
            if entries := listing.entries[part].get(step):
                return entries[0].top
        return self._fresh(listing, _main(listing.table), step).top

    def processes(self, command: Sequence[str]) -> int | None:
        return self._trainer.processes(command)

    def target_step(self, command: Sequence[str]) -> int | None:
        return self._trainer.target(self._site, command)

    def wandb_variables(self) -> tuple[str, ...]:
        return ("WANDB_RUN_ID",) if self._trainer.preset(self._site, self._site.command).wandb else ()

    def wandb_identity(self) -> Mapping[str, str]:
        """Empty: W&B writes into the working directory, where other runs can write as well. podwatch names the W&B run
        at every start."""
        return {}


class _OnDemand(Mapping[int, tuple[PartDir, ...]]):
    """Step -> its parts, made when asked for: a thousand steps with all their paths are megabytes."""

    def __init__(self, steps: Collection[int], make: Callable[[int], tuple[PartDir, ...]]) -> None:
        self._steps, self._make = dict.fromkeys(steps), make

    def __getitem__(self, step: int) -> tuple[PartDir, ...]:
        if step not in self._steps:
            raise KeyError(step)
        return self._make(step)

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


# -- tables ------------------------------------------------------------------------------------------------------------


def _main(table: TrainerTable) -> str:
    return next(iter(table.parts))


def _is_shared(table: TrainerTable, part: str) -> bool:
    """Whether the name of an entry says more than the step: it is stored with the checkpoint, and a restore puts it
    back into the directory that many steps share."""
    texts = table.parts.get(part, ())
    return len(texts) > 1 or any(
        "*" in text or _Template(Path(), text.rpartition("/")[2], "").accepts_files for text in texts
    )


def _rank(table: TrainerTable, entry: _Entry) -> tuple[bool, int, str]:
    preferred = any(fnmatchcase(entry.name, glob) for glob in table.prefer)
    if table.hook != "lightning":
        return not preferred, 0, entry.name
    status = _status(entry.top)
    return entry.name.startswith("last"), -status.st_mtime_ns if status else 0, entry.name


def _newest(role: str, entries: _Entries, text: str) -> StepSeen | None:
    """The newest of the last steps of which the file (or the entry itself) exists."""
    file = text.partition(":")[2]
    for step in heapq.nlargest(5, entries):
        try:
            return StepSeen(role, step, (entries[step][0].top / file).stat().st_mtime)
        except (FileNotFoundError, NotADirectoryError):
            continue
    return None


# -- files of a part ---------------------------------------------------------------------------------------------------


def _below(part: PartFiles, path: str) -> str:
    """A path as rules know it: below the entry, where the directory is shared by many."""
    return path.removeprefix(part.part.names[0] + "/") if part.part.names else path


def _is_file(part: PartFiles) -> bool:
    return bool(part.part.names) and any(f.path == part.part.names[0] for f in part.files)


def _place_of(part: PartFiles) -> Path:
    return part.part.path / part.part.names[0] if part.part.names and not _is_file(part) else part.part.path


def _recorded(own: Sequence[PartFiles]) -> tuple[RecordedFile, ...]:
    """Without what a writer has not finished."""
    return tuple(
        RecordedFile(p.part.name, _below(p, f.path), f.size, f.mtime_ns, f.inode)
        for p in own
        for f in p.files
        if not is_temporary(f.path) or f.path.endswith(UNFINISHED_INDEX)
    )


def _digest(own: Sequence[PartFiles]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in own:
        for f in part.files:
            digest.update(f"\0{f.part}/{f.path}\0{f.size}\0{f.mtime_ns}\0{f.inode}".encode("utf-8", "surrogateescape"))
    return digest.digest()


def _names(own: Sequence[PartFiles]) -> list[str]:
    """Names of files as rules know them. A checkpoint that is one file has nothing to compare."""
    several = len(own) > 1
    return [] if any(map(_is_file, own)) else [f.named(several=several) for f in _recorded(own)]


def _leftovers(own: Sequence[PartFiles], found: CheckpointInspection) -> tuple[str, ...]:
    names = frozenset(found.unlisted)
    lead = {p.part.name: f"{p.part.name}:" if len(own) > 1 else "" for p in own}
    return tuple(
        f"{p.part.name}/{f.path}"
        for p in own
        for f in (p.files if names else ())
        if f"{lead[p.part.name]}{_below(p, f.path)}" in names
    )


def _forms_known(table: TrainerTable, names: Iterable[str]) -> frozenset[str]:
    """Forms of ``part/path``."""
    found = []
    for name in names:
        part, _, path = name.partition("/")
        if _is_shared(table, part):
            path = path.partition("/")[2]
        if path:
            found.append(f"{part}:{path}" if len(table.parts) > 1 and not table.either else path)
    return forms_of(found)


# -- the file system ---------------------------------------------------------------------------------------------------


def _named_in(path: Path, key: str) -> str:
    """The last segment of a path that a JSON file names; empty if there is none."""
    try:
        found = json.loads(read_small(path, _STATE_LIMIT))
    except (OSError, ValueError, RecursionError):
        return ""
    value = found.get(key) if isinstance(found, dict) else None
    return Path(value).name if isinstance(value, str) else ""


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:
        return None


def _listed(root: Path, *, files_too: bool) -> list[str]:
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
