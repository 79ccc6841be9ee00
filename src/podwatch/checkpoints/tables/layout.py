"""Where a trainer's checkpoints are, by its table: steps, parts, files, trackers, what is ahead of a start.

Everything blocks on the file system and follows no link below the roots. What vanishes meanwhile is no error.
"""

import heapq
import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from podwatch.checkpoints.tables import special
from podwatch.checkpoints.tables.inspector import Inspector
from podwatch.checkpoints.tables.records import RecordedFile
from podwatch.checkpoints.tables.table import TrackerRule, TrainerTable
from podwatch.checkpoints.tables.templates import has_step, name_of, number_in
from podwatch.domain.errors import ConfigurationError
from podwatch.system.files import read_small

_DEEPEST = 32
_UNFINISHED = re.compile(r"\.tmp\w{6}|.*\.tmp")
"""A writer's unfinished file never belongs to a checkpoint: safetensors 0.8 leaves ``.tmpXXXXXX`` when killed."""
_FOREIGN = re.compile(r"\.nfs[0-9a-f]{16,}|events\.out\.tfevents\..*|\.podwatch.*")
_STATE_LIMIT = 64 << 20
_TRACKER_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class PartPlace:
    """One part of one step: a directory or a file that can be absent. ``top`` is the step's own entry."""

    name: str
    path: Path
    top: Path
    required: bool = True


@dataclass(frozen=True, slots=True)
class StepPlaces:
    """``needed_parts`` and ``doubtful_parts``: parts that are needed only if any step has them. ``twin``: another
    entry of the same step, where that is refused."""

    step: int
    parts: tuple[PartPlace, ...]
    needed_parts: frozenset[str] = frozenset()
    doubtful_parts: frozenset[str] = frozenset()
    twin: str = ""


@dataclass(frozen=True, slots=True)
class TrackerContent:
    """What a tracker must hold before a start: exactly one of ``content`` and the ``target`` of a link."""

    path: Path
    content: bytes | None = None
    target: str | None = None


@dataclass(frozen=True, slots=True)
class _Template:
    """``<root>/<name>/<below>``, where only ``name`` holds the step."""

    root: Path
    name: str
    below: str

    @property
    def accepts_files(self) -> bool:
        return (not self.below and self.name.rpartition("}")[2].startswith(".")) or self.name.endswith(".ckpt")


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


class TableLayout:
    """One trainer's checkpoints below one output directory. ``inspector`` reads steps that are in files only."""

    def __init__(
        self,
        name: str,
        table: TrainerTable,
        output_dir: Path,
        *,
        checkpoint_dir: Path | None = None,
        inspector: Inspector | None = None,
    ) -> None:
        self.name, self.table = name, table
        self._output_dir, self._checkpoint_dir, self._inspector = output_dir, checkpoint_dir, inspector
        self._steps_inside: dict[Path, tuple[tuple[int, int, int], int | None]] = {}

    # -- where things are ---------------------------------------------------------------------------------------------

    def steps(self) -> Mapping[int, StepPlaces]:
        """Every step of which a part exists. Each directory is listed once."""
        found = {part: self._entries(part) for part in self.table.parts}
        numbers = sorted({step for part in self._makers for step in found[part]})
        existing = {p for p in self.table.if_any if found[p]}
        return {step: self._places(step, found, existing) for step in numbers}

    @property
    def _makers(self) -> Collection[str]:
        """The parts whose existence makes a step: others exist for steps that were never saved."""
        return self.table.identity or tuple(self.table.parts)

    def _places(self, step: int, found: Mapping[str, _Entries], existing: Collection[str]) -> StepPlaces:
        parts, twin = [], ""
        for part in self.table.parts:
            entries = found[part].get(step, ())
            if entries:
                parts.append(PartPlace(part, entries[0].path, entries[0].top))
                twin = entries[1].name if len(entries) > 1 and self.table.alone else twin
            else:
                parts.append(self.place(part, step))
        return StepPlaces(
            step, tuple(parts), frozenset(existing), frozenset(self.table.if_any) - frozenset(existing), twin
        )

    def place(self, part: str, step: int) -> PartPlace:
        """Where a part belongs that does not exist, also in an empty output_dir. ConfigurationError: no such part."""
        templates = self.table.parts.get(part) or self.table.optional.get(part)
        if templates is None:
            raise ConfigurationError(
                f"layout {self.name} has no part {part!r}",
                where=str(self._output_dir),
                fix="another layout saved this checkpoint: restore it to another directory with --to",
            )
        entries = self._entries(part)
        like = entries[max(entries)][0] if entries else None
        template = like.template if like else self._template(templates[0], part)
        own = _Entry(template, name_of(template.name, step, like.name if like else ""))
        return PartPlace(part, own.path, own.top, part in self.table.parts)

    def step_paths(self, step: int) -> tuple[Path, ...]:
        """The topmost existing entries of a step: they are renamed when it is removed."""
        found = (self._entries(part).get(step, ()) for part in (*self.table.parts, *self.table.optional))
        return tuple(dict.fromkeys(entry.top for entries in found for entry in entries))

    def roots(self) -> tuple[Path, ...]:
        """The directories that contain steps."""
        return tuple(dict.fromkeys(t.root for part in self.table.parts for t in self._templates(part)))

    def by_products(self, below: int) -> tuple[tuple[int, Path], ...]:
        """(step, path) of by-products of lower steps that have no checkpoint, oldest first."""
        existing = {step for part in self._makers for step in self._entries(part)}
        found = {
            (step, entry.top)
            for part in self.table.by_products
            for step, entries in self._entries(part).items()
            for entry in entries
            if step < below and step not in existing
        }
        return tuple(sorted(found))

    def _template(self, text: str, part: str) -> _Template:
        segments = text.split("/")
        number = next((i for i, s in enumerate(segments) if has_step(s)), len(segments) - 1)
        lead = segments[:number]
        base = self._base(part)
        inside = self.table.checkpoint_dir_is_root and (
            base == self._checkpoint_dir or (lead[:1] == [base.name] and not (base / lead[0]).exists())
        )
        root = base if inside else base.joinpath(*lead)
        return _Template(root, segments[number], "/".join(segments[number + 1 :]))

    def _base(self, part: str) -> Path:
        moved = not self.table.moved or part in self.table.moved
        return self._checkpoint_dir if self._checkpoint_dir is not None and moved else self._output_dir

    def _templates(self, part: str) -> Iterator[_Template]:
        for text in self.table.parts.get(part) or self.table.optional.get(part, ()):
            template = self._template(text, part)
            if "*" not in str(template.root)[len(str(self._output_dir)) :]:
                yield template
                continue
            for root in sorted(self._output_dir.glob(str(template.root.relative_to(self._output_dir)))):
                if root.is_dir() and not root.is_symlink():
                    yield _Template(root, template.name, template.below)

    def _entries(self, part: str) -> _Entries:
        """Step -> entries, the one that counts first."""
        found: dict[int, list[_Entry]] = {}
        seen: set[Path] = set()
        for template in self._templates(part):
            if found and not self.table.all_places:
                break
            for name in _listed(template.root, files_too=template.accepts_files):
                entry = _Entry(template, name)
                if entry.top in seen or any(fnmatchcase(name, glob) for glob in self.table.not_names):
                    continue
                step = self._step_of(entry)
                if step is not None and self._belongs(entry):
                    seen.add(entry.top)
                    found.setdefault(step, []).append(entry)
        return {step: sorted(entries, key=self._rank) for step, entries in found.items()}

    def _rank(self, entry: _Entry) -> tuple[bool, int, str]:
        preferred = any(fnmatchcase(entry.name, glob) for glob in self.table.prefer)
        if self.table.hook != "lightning":
            return not preferred, 0, entry.name
        status = _status(entry.top)
        return entry.name.startswith("last"), -status.st_mtime_ns if status else 0, entry.name

    def _step_of(self, entry: _Entry) -> int | None:
        if self.table.hook != "lightning":
            return number_in(entry.template.name, entry.name)
        if not entry.name.endswith(".ckpt"):
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
            readable = self._inspector is not None and stat.S_ISREG(status.st_mode)
            values = self._inspector.values(file) if readable and self._inspector is not None else {}
            self._steps_inside[entry.top] = stamp, special.lightning_step(entry.name, values)
        return self._steps_inside[entry.top][1]

    def _belongs(self, entry: _Entry) -> bool:
        """Whether it contains such a checkpoint, where names are not enough: one directory deep at most."""
        if not self.table.belongs:
            return True
        names = _listed(entry.top, files_too=True)
        folders = [entry.top / name for name in names] if self.table.hook != "orbax" else []
        deeper = [n for folder in folders if folder.is_dir() for n in _listed(folder, files_too=True)]
        return any(fnmatchcase(n, glob) for n in (*names, *deeper) for glob in self.table.belongs)

    # -- files --------------------------------------------------------------------------------------------------------

    def files_of(self, places: StepPlaces) -> tuple[RecordedFile, ...]:
        """Every regular file of the parts, without links and unfinished files. OSError: a directory that cannot be
        read."""
        return tuple(file for part in places.parts for file in _files_below(part))

    def names_of(self, files: Collection[RecordedFile]) -> tuple[str, ...]:
        """The names by which rules know them."""
        return tuple(f.named(several=len(self.table.parts) > 1) for f in files)

    # -- before a start -----------------------------------------------------------------------------------------------

    def newer_than(self, step: int | None) -> tuple[Path, ...]:
        """Everything that must be moved to quarantine before a start from ``step`` (None: a fresh start)."""
        limit = -1 if step is None else step
        found: dict[Path, None] = {}
        for part in (*self.table.parts, *self.table.optional):
            first = limit if part in self.table.ahead_equal and step is not None else limit + 1
            entries = self._entries(part)
            found.update(dict.fromkeys(e.top for n in sorted(entries) if n >= first for e in entries[n]))
        for text in self.table.also_ahead:
            template = self._template(text, "")
            names = _listed(template.root, files_too=True)
            found.update(
                dict.fromkeys(
                    _Entry(template, n).path
                    for n in names
                    if (number := number_in(template.name, n)) is not None and number > limit
                )
            )
        always = [self._output_dir / name for name in self.table.ahead_all]
        if step is None:
            always += [*(self._output_dir / name for name in self.table.fresh_ahead), *self._links()]
            always += [self._tracker_path(rule) for rule in self.table.trackers]
            always = [p for p in always if _status(p) is not None]
        else:
            always = [p for p in always if (s := _status(p)) is not None and stat.S_ISDIR(s.st_mode)]
        found.update(dict.fromkeys(always))
        return tuple(p for p in found if _status(p) is not None and not any(above in found for above in p.parents))

    def trackers(self, step: int | None) -> tuple[TrackerContent, ...]:
        """The content of the trainer's own "latest" files and links for a start from ``step``; none for a fresh one."""
        if step is None:
            return ()
        found = [
            TrackerContent(
                self._tracker_path(rule),
                None if rule.target else rule.content.format(step=step).encode(),
                rule.target.format(step=step) if rule.target else None,
            )
            for rule in self.table.trackers
            if not rule.part or self._tracker_path(rule).parent.is_dir()
        ]
        own = self._entries("checkpoint").get(step, ()) if self.table.pin_links else ()
        found += [TrackerContent(p, target=own[0].name) for p in self._links() if own and p.parent == own[0].top.parent]
        return tuple(found)

    def tracker_paths(self) -> Mapping[str, Path]:
        """Tracker by the name that rules use -> its path."""
        return {rule.file: self._tracker_path(rule) for rule in self.table.trackers if not rule.target}

    def _tracker_path(self, rule: TrackerRule) -> Path:
        template = self._template(rule.file, next(iter(self.table.parts)))
        return template.root / template.name

    def _links(self) -> list[Path]:
        places = dict.fromkeys(t.root for t in self._templates("checkpoint")) if self.table.pin_links else ()
        found = [p for root in places for glob in self.table.pin_links for p in sorted(root.glob(glob))]
        return [p for p in found if p.is_symlink()]

    def pinned(self) -> Mapping[int, str]:
        """Steps that a file or a link of the trainer names, and its name. They are never removed."""
        pins: dict[int, str] = {}
        for rule in self.table.trackers:
            path = self._tracker_path(rule)
            try:
                text = path.readlink().name if rule.target else read_small(path, _TRACKER_LIMIT).decode().strip()
            except (OSError, UnicodeDecodeError):
                continue
            step = number_in(rule.target or rule.content, text)
            if step is not None:
                pins.setdefault(step, rule.file)
        entries = self._entries("checkpoint") if self.table.pin_links or self.table.pin_in else {}
        by_path = {entry.top: step for step, few in entries.items() for entry in few}
        for link in self._links():
            if (step := by_path.get(link.parent / os.readlink(link))) is not None:  # noqa: PTH115 - the text
                pins[step] = link.name
        for file, key in self.table.pin_in.items():
            for newest in heapq.nlargest(1, entries):
                step = number_in(self.table.parts["checkpoint"][0], _named_in(entries[newest][0].top / file, key))
                if step is not None:
                    pins[step] = f"{key} in {file}"
        return pins

    def beside(self, place: PartPlace) -> tuple[Path, ...]:
        """Paths beside a step that must not exist."""
        return tuple(place.top.parent / n.format(directory=place.top.name) for n in self.table.absent_beside)


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


def _files_below(part: PartPlace) -> Iterator[RecordedFile]:
    status = _status(part.path)
    if status is not None and stat.S_ISREG(status.st_mode):
        yield RecordedFile(part.name, part.path.name, status.st_size, status.st_mtime_ns, status.st_ino)
        return
    folders = [(part.path, "", 0)] if status is not None and stat.S_ISDIR(status.st_mode) else []
    while folders:
        folder, lead, depth = folders.pop()
        try:
            with os.scandir(folder) as entries:
                listed = sorted(entries, key=lambda e: e.name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in listed:
            if _FOREIGN.fullmatch(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                if depth < _DEEPEST:
                    folders.append((Path(entry.path), f"{lead}{entry.name}/", depth + 1))
            elif entry.is_file(follow_symlinks=False) and not _UNFINISHED.fullmatch(entry.name):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield RecordedFile(part.name, lead + entry.name, status.st_size, status.st_mtime_ns, status.st_ino)
