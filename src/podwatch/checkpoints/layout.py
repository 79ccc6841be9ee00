"""One trainer's checkpoints, by its table: their steps, the verdict on each, and the command of a start.

Everything blocks on the file system. Files are read by the child that inspects.
"""

import hashlib
import heapq
import json
import os
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from podwatch.checkpoints.command import Command, positive
from podwatch.checkpoints.inspection import Inspection, InspectionOutcome
from podwatch.checkpoints.inspector import INSPECTOR, Inspector
from podwatch.checkpoints.places import Listing, Places, is_shared, main_part, status_of
from podwatch.checkpoints.records import RecordedFile
from podwatch.checkpoints.resume import StartPoint, resume_command, resume_settings_in_script
from podwatch.checkpoints.rules import Surroundings
from podwatch.checkpoints.scan import is_temporary, scan_part
from podwatch.checkpoints.shapes import PartDir, PartFiles, ResumeCommand, Site
from podwatch.checkpoints.structures import UNFINISHED_INDEX, matching
from podwatch.checkpoints.templates import number_in
from podwatch.checkpoints.trainer import Trainer
from podwatch.domain.run import valid_ids
from podwatch.system.files import read_small

_NOWHERE = Path("/nonexistent")
_STATE_LIMIT = 64 << 20
_TRACKER_LIMIT = 4096
_NEWEST = 3
"""So many of the newest saves are asked for the step at which training is done."""
_SLOW = 5.0
"""Seconds. An inspection that took longer and gave no answer is repeated..."""
_PATIENCE = 10.0
"""...after so many times as long."""


@dataclass(frozen=True, slots=True)
class _Inspected:
    """``files``: a digest of their list. ``again``: monotonic seconds before which it is not inspected again."""

    files: bytes
    found: Inspection
    again: float = 0.0


class Layout(Places):
    """One trainer's layout below one output directory. All methods can block on the file system: never call them on the
    event loop. A directory that vanishes meanwhile is normal and never an error."""

    def __init__(self, trainer: Trainer, site: Site, *, inspector: Inspector = INSPECTOR) -> None:
        super().__init__(trainer, site, inspector=inspector)
        self.chosen_because = ""
        """Why ``layout = "auto"`` chose this one; empty if the configuration named it."""
        self._listing: Listing | None = None
        self._inspected: dict[int, _Inspected] = {}
        self._last_values: tuple[object, Mapping[str, object]] = (None, {})

    @contextmanager
    def reading(self) -> Iterator[None]:
        """One child reads for this thread as long as it lasts: starting one takes a fifth of a second."""
        with self.inspector:
            yield

    # -- the table ----------------------------------------------------------------------------------------------------

    @property
    def variant(self) -> str:
        """``A`` or ``B`` for prime-rl, else empty. Sometimes unknown until the trainer has written something."""
        return ""

    @property
    def reshards(self) -> bool:
        """Whether the trainer can load a checkpoint with another world size. If not, a certain difference blocks a
        resume."""
        return self.trainer.facts.reshards

    @property
    def counts_all(self) -> bool:
        """``Inspection.world_size`` counts every process, not only the data-parallel ranks among them."""
        return self.trainer.facts.world_size_is_total

    @property
    def finish_lines(self) -> tuple[str, ...]:
        """Lines that the trainer prints when training is finished; all must have been seen after the start."""
        return self.table.finish_lines

    @property
    def shared_parts(self) -> frozenset[str]:
        """Parts whose directory many steps share (``PartDir.names``): a restore puts their entries into it one by
        one."""
        table = self.table
        return frozenset(part for part in table.parts if is_shared(table, part))

    @property
    def counts_saves(self) -> bool:
        """True where checkpoint numbers count saves (accelerate's automatic naming): they can be compared with each
        other, but not with steps in a log."""
        listing = self._listing
        return listing is not None and any(listing.entries.get(part) for part in listing.table.counts_saves)

    def log_globs(self) -> tuple[str, ...]:
        """Default globs, relative to output_dir, of log files that carry step lines."""
        return self.trainer.facts.logs

    def first_step_after(self, step: int) -> int:
        """The lowest step number a correct resume from ``step`` can show first."""
        table = self.table
        if any(self._entries(table, part) for part in table.counts_saves):
            return 0
        return step + table.first_step_after

    def expect_parts(self, parts: Collection[str]) -> None:
        """Set the parts of a checkpoint to restore, which show the trainer's version in an empty output_dir."""

    def steps(self) -> Mapping[int, tuple[PartDir, ...]]:
        """Every step of which at least one part exists, with all parts of a complete checkpoint. Each directory is
        listed once."""
        listing = self._listing = self._look()
        existing = frozenset(listing.steps)
        self._inspected = {step: seen for step, seen in self._inspected.items() if step in existing}
        return {step: self._parts(listing, step) for step in listing.steps}

    # -- judging ------------------------------------------------------------------------------------------------------

    def judge(self, step: int, parts: Sequence[PartFiles]) -> Inspection:
        """Apply the completeness rule. Reads markers and headers, never whole files. Always a new inspection, except
        of a save whose last inspection took long and gave no answer."""
        listing = self._listing or self._look()
        table = listing.table
        own = [p for p in parts if p.part.name in table.parts]
        trackers = [self._tracker_path(table, rule) for rule in table.trackers if not rule.target]
        outside = (*trackers, *self._beside(listing, step))
        deleted = self._is_deleted(listing, step)
        main = next((p for p in own if p.part.name == table.deleted_with), None)
        if main is not None and not main.files and len(own) > 1:
            others = any(p.present for p in own)
            waits = f"waiting for the {main.part.name}: step {step} has only other parts"
            reason = waits if others else "it is empty"
            problems = {main.part.name: reason}
            return Inspection(
                InspectionOutcome.NOT_COMPLETE,
                reason,
                pending=others,
                problems=problems,
                rests_on=outside,
                deleted=deleted,
            )
        before = self._inspected.get(step)
        unanswered = before is not None and before.files == _digest(own) and before.again > time.monotonic()
        found = before.found if before is not None and unanswered else self._ask(listing, step, own).found
        leftovers = _leftovers(own, found)
        return replace(found, leftovers=leftovers, rests_on=outside, deleted=deleted and not found.whole)

    def compared(self, files: Sequence[RecordedFile]) -> tuple[RecordedFile, ...]:
        """The files as they are compared with those of other saves: named below the step's own entry, without those
        that no resume reads."""
        table = self.table
        several = len(table.parts) > 1 and not table.either
        named = [
            replace(
                f,
                part=main_part(table) if table.either else f.part,
                path=f.path.partition("/")[2] if is_shared(table, f.part) else f.path,
            )
            for f in files
        ]
        names = [f.named(several=several) for f in named]
        ignored = set(matching(names, (*table.unchecked, *table.not_part)))
        return tuple(f for f in named if f.named(several=several) not in ignored)

    def inspect_staged(self, step: int, parts: Sequence[PartDir]) -> tuple[tuple[PartFiles, ...], Inspection]:
        """A save that was stored whole, as it lies in these directories. Nothing around its place says anything about
        it, and its trackers are written once it is there."""
        table, given = replace(self.table, trackers=()), {part.name: part for part in parts}
        names = [name for name in table.parts if name in given or not table.either]
        dirs = [given.get(name) or PartDir(name, _NOWHERE, name not in table.if_any) for name in names]
        own = [scan_part(part).found for part in dirs]
        about = Surroundings(needed_parts=tuple(given))
        places = {p.part.name: _place_of(p) for p in own}
        found = self.inspector.inspect(table, step, places, _recorded(own), about).accepted()
        return tuple(own), replace(found, leftovers=_leftovers(own, found))

    def _is_deleted(self, listing: Listing, step: int) -> bool:
        part = listing.table.deleted_with
        return bool(part) and step not in listing.entries[part] and _is_absent(self._fresh(listing, part, step).top)

    def _ask(self, listing: Listing, step: int, own: Sequence[PartFiles]) -> _Inspected:
        table, began = listing.table, time.monotonic()
        places = {p.part.name: _place_of(p) for p in own}
        twins = listing.entries[own[0].part.name].get(step, ()) if table.alone else ()
        about = Surroundings(
            {rule.file: str(self._tracker_path(table, rule)) for rule in table.trackers if not rule.target},
            sorted(listing.existing),
            sorted(frozenset(table.if_any) - listing.existing),
            later=bool(listing.steps) and listing.steps[-1] > step,
            beside=[str(path) for path in self._beside(listing, step)],
            twin=f"{twins[1].name}, beside {twins[0].name}," if len(twins) > 1 else "",
        )
        found = self.inspector.inspect(table, step, places, _recorded(own), about)
        now = time.monotonic()
        slow = found.outcome is InspectionOutcome.UNKNOWN and now - began > _SLOW
        again = now + (now - began) * _PATIENCE if slow else 0.0
        seen = self._inspected[step] = _Inspected(_digest(own), found, again)
        return seen

    def _scanned(self, listing: Listing, step: int) -> list[PartFiles]:
        return [scan_part(part).found for part in self._parts(listing, step) if part.name in listing.table.parts]

    def pinned(self) -> Mapping[int, str]:
        """Steps that a file or link of the trainer names, and its name: ``latest_checkpointed_iteration.txt``,
        ``best``. They are never removed. An empty or garbled tracker names nothing: it is being written."""
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
        entries = listing.entries[main_part(table)]
        by_path = {entry.top: step for step, few in entries.items() for entry in few}
        for link in self._links(table):
            if (step := by_path.get(link.parent / os.readlink(link))) is not None:  # noqa: PTH115 - the text
                pins[step] = link.name
        for newest in heapq.nlargest(1, entries):
            pins.update(self._named_by(listing, newest, by_path))
        return pins

    def _named_by(self, listing: Listing, newest: int, by_path: Mapping[Path, int]) -> Iterator[tuple[int, str]]:
        """What the newest checkpoint itself names; and an export, which is no interrupted save."""
        table = listing.table
        entry = listing.entries[main_part(table)][newest][0]
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
                seen = self._ask(listing, newest, own)
            if seen.found.is_export:
                yield newest, "the export at the end of the run"

    def _values(self, file: Path) -> Mapping[str, object]:
        """Small values in the newest file, read once."""
        status = status_of(file)
        if status is None or not stat.S_ISREG(status.st_mode):
            return {}
        stamp = (file, status.st_ino, status.st_size, status.st_mtime_ns)
        if self._last_values[0] != stamp:
            self._last_values = stamp, self.inspector.values(file) or {}
        return self._last_values[1]

    # -- the command -------------------------------------------------------------------------------------

    def resume_command(
        self, command: Sequence[str], step: int | None, override: str | Sequence[str], wandb: Mapping[str, str]
    ) -> ResumeCommand:
        """argv for a start from ``step`` (None: fresh), by the preset or ``override`` ("auto", "none" or a list).

        Placeholders ``{step}``, ``{checkpoint}``, ``{output_dir}`` and ``{resume_args}`` in the command are replaced.
        ``wandb``: the W&B ids to continue."""
        asked = self._command(command)
        rule = self.trainer.command.rule_of(asked)
        run = valid_ids(wandb).get("shared", "") if rule.wandb else ""
        environment = {"WANDB_RUN_ID": run, "WANDB_RESUME": "allow"} if run else {}
        return resume_command(rule, asked, self._start_point(step), override, environment=environment)

    def _command(self, command: Sequence[str]) -> Command:
        return Command(command, self.site.working_directory)

    def _start_point(self, step: int | None) -> StartPoint:
        checkpoint = None if step is None else self._checkpoint(step)
        return StartPoint(step, checkpoint, self.output_dir, self._place or self.output_dir)

    def resumes_in_script(self, command: Sequence[str]) -> tuple[str, ...]:
        """Resume arguments in the text of the command's shell script: a fresh start resumes by them, too."""
        asked = self._command(command)
        return resume_settings_in_script(self.trainer.command.rule_of(asked), asked)

    def processes(self, command: Sequence[str]) -> int | None:
        """The number of training processes that the command starts; None: not certain, so nothing is compared."""
        return self.trainer.command.processes_of(self._command(command))

    def target_step(self, command: Sequence[str]) -> int | None:
        """The step at which training is done, as far as the command, its files or the newest checkpoint show it."""
        direct = self._command(command).number(*self.trainer.command.target)
        return direct if direct is not None else self._target_on_disk()

    def _target_on_disk(self) -> int | None:
        """What the newest readable checkpoint says."""
        listing = self._look() if self.trainer.facts.target_in else None
        for step in heapq.nlargest(_NEWEST, listing.steps if listing is not None else ()):
            for path in self.step_paths(step):
                for file, key in self.trainer.facts.target_in.items():
                    if (value := positive(_value_in(path / file, key))) is not None:
                        return value
        return None

    def save_interval(self, command: Sequence[str]) -> int | None:
        """Steps from one save to the next, as far as the command or its configuration file sets them."""
        return self.trainer.command.save_interval(self._command(command))

    def wandb_variables(self) -> tuple[str, ...]:
        """Environment variables from which the trainer takes the id of its single W&B run."""
        return ("WANDB_RUN_ID",) if self.trainer.command.resume.wandb else ()

    def wandb_identity(self) -> Mapping[str, str]:
        """W&B ids of the run as found on disk, by the names that ``resume_command`` accepts. Empty: W&B writes into the
        working directory, where other runs can write as well. podwatch names the W&B run at every start."""
        return {}


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


def _leftovers(own: Sequence[PartFiles], found: Inspection) -> tuple[str, ...]:
    names = frozenset(found.leftovers)
    lead = {p.part.name: f"{p.part.name}:" if len(own) > 1 else "" for p in own}
    return tuple(
        f"{p.part.name}/{f.path}"
        for p in own
        for f in (p.files if names else ())
        if f"{lead[p.part.name]}{_below(p, f.path)}" in names
    )


def _value_in(path: Path, key: str) -> object:
    """What a JSON file has under a key; None if it has nothing there, or cannot be read."""
    try:
        found = json.loads(read_small(path, _STATE_LIMIT))
    except (OSError, ValueError, RecursionError):
        return None
    return found.get(key) if isinstance(found, dict) else None


def _named_in(path: Path, key: str) -> str:
    """The last segment of a path that a JSON file names; empty if there is none."""
    value = _value_in(path, key)
    return Path(value).name if isinstance(value, str) else ""


def _is_absent(path: Path) -> bool:
    """Whether nothing has this name. False where that cannot be observed."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False
