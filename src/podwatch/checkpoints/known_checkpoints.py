"""Which checkpoints this pod has, and which of them can be trusted.

A rescan is the truth; events only trigger it earlier. Its cost depends on what changed, not on what exists: while
nothing changed and nothing is being written, it reads only the times of the directories and of two files of each
checkpoint, and lists no directory. ``completeness`` judges a single checkpoint; this module handles all of them.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from podwatch.checkpoints import checkpoint_identity
from podwatch.checkpoints.checkpoint_identity import stamp
from podwatch.checkpoints.completeness_check import CUT_OFF_FACTOR, CompletenessChecker, Known
from podwatch.checkpoints.held_back import NOTHING_HELD, HeldBack
from podwatch.checkpoints.inspection import Inspection
from podwatch.checkpoints.inspector import INSPECTOR
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.records import CheckpointRecords, RecordSource
from podwatch.checkpoints.scan import linked_out, replaced, without_linked
from podwatch.checkpoints.settle_time import SettleTimes, slow_to_show
from podwatch.checkpoints.shapes import PartDir, PartFiles
from podwatch.domain.checkpoint import CheckpointSet, Completeness, FileEntry, HeldAs, SymlinkEntry, newest_complete
from podwatch.domain.errors import HostError
from podwatch.domain.starts import NOT_RECORDED
from podwatch.system.clock import Clock
from podwatch.system.pinned_directories import PinnedTree

_NEWEST = 4
"""When anything changed, so many of the newest checkpoints are read file by file: these are written or rewritten. So
many unsettled ones are watched for events."""
LOOK_AROUND = 600.0
"""Seconds between two rescans that read every checkpoint file by file, even if nothing seems to have changed: a safety
net. What starts or stores a checkpoint reads all its files again."""
_FRESH_NS = 2_000_000_000
"""Seconds. A directory that changed this recently can change again with the same time: file systems round times."""
_PENDING_LIMIT = 2 * 3600.0
"""Seconds. The orchestrator saves up to two steps before the trainer, and no step takes an hour."""
CHANGED = "changed since it was found complete"


class InspectionUnanswered(HostError):  # noqa: N818
    """The files could not be read, or the inspection gave no answer: this is no evidence of damage."""


@dataclass(frozen=True, slots=True)
class SetContents:
    """One checkpoint with its files. ``files`` and ``symlinks`` are uploaded to the store: no by-products, no temporary
    files, no leftovers of an earlier save; ``parts`` has everything that is there. ``FileEntry.path`` is relative to
    the part's directory. ``set.complete`` is true only if the files are still those of the complete checkpoint."""

    set: CheckpointSet
    files: tuple[FileEntry, ...]
    symlinks: tuple[SymlinkEntry, ...]
    parts: tuple[PartFiles, ...]
    world_size: int | None = None


class Catalogue:
    """All checkpoints of one layout. ``settle``, ``settle_tracker`` and ``settle_weak`` are settle times in seconds:
    with a commit marker, with a file written last or a tracker (default: ``settle``), and without any marker; all are
    doubled on network filesystems, which show changes late.

    ``records``: of the checkpoints that were complete; without them nothing is known from before. ``held_back`` marks
    checkpoints that are held back. ``tree``: the pinned directories; where one of them was
    replaced, nothing in it is a checkpoint.

    ``rescan``, ``contents``, ``verify`` and ``inspect`` block: call them in a worker thread. The properties never
    block.
    """

    def __init__(
        self,
        layout: Layout,
        clock: Clock,
        *,
        settle: float,
        settle_weak: float,
        settle_tracker: float | None = None,
        records: CheckpointRecords | None = None,
        held_back: HeldBack = NOTHING_HELD,
        tree: PinnedTree | None = None,
    ) -> None:
        self.layout = layout
        self._tree = INSPECTOR.tree = tree
        self._roots_known = tree.roots if tree is not None else (layout.output_dir,)
        self._linked: tuple[Path, ...] = ()
        self._out_of_reach: frozenset[int] = frozenset()
        self._clock = clock
        self._windows = SettleTimes(settle, settle if settle_tracker is None else settle_tracker, settle_weak)
        self.records = CheckpointRecords() if records is None else records
        self._settling = CompletenessChecker(layout, clock, self._windows, self.records, roots=self._roots_known)
        self._known: dict[int, Known] = {}
        self._complete: frozenset[tuple[int, str]] = frozenset()
        self._all_read = float("-inf")
        self._roots: tuple[tuple[str, int, int], ...] = ()
        self._listed: float | None = None
        self._lock = threading.Lock()
        self._sets: tuple[CheckpointSet, ...] = ()
        self._saving = False
        self._open: tuple[Path, ...] = ()
        self._problem = ""
        self._unlisted = ""
        self._held_back = held_back
        self._marked: tuple[tuple[object, ...], tuple[CheckpointSet, ...]] = ((), ())

    @property
    def sets(self) -> tuple[CheckpointSet, ...]:
        """Result of the last rescan, lowest step first."""
        found, decided, version = self._sets, self.records.decided, self._held_back.version
        of, marked = self._marked
        if len(of) != 3 or of[0] is not found or of[1] is not decided or of[2] != version:
            marked = self._held_back.mark(found, self.records)
            self._marked = ((found, decided, version), marked)
        return marked

    @property
    def saving(self) -> bool:
        """Whether a required part of any step was being written at the last rescan."""
        return self._saving

    @property
    def problem(self) -> str:
        """The reason why the last rescan could not read everything; empty if it could."""
        return self._problem

    @property
    def unlisted(self) -> str:
        """The reason why the last rescan could not list the checkpoints; empty if it could. ``sets`` is then that of
        the rescan before: what was saved since is missing in it."""
        return self._unlisted

    @property
    def linked(self) -> tuple[Path, ...]:
        """Symbolic links in the place of step directories. podwatch does not list, use or remove what they point to."""
        return self._linked

    @property
    def out_of_reach(self) -> frozenset[int]:
        """Steps that seem to be behind these links."""
        return self._out_of_reach

    def watch_dirs(self) -> tuple[Path, ...]:
        """Directories to watch for events now: the layout's roots and the steps that are not settled."""
        return (*self.layout.watch_roots(), *self._open)

    def rescan(self, *, writers_ended: bool = False, list_again: bool = False) -> tuple[CheckpointSet, ...]:
        """Read everything that can have changed. Never raises for changes on disk meanwhile. ``list_again``: list the
        directories whatever their times show, before a decision that moves what it does not know.

        ``writers_ended``: every process that could write here was seen to end. On a local filesystem a checkpoint is
        then complete after two equal scans, without a settle time; later rescans need not say it again.
        """
        with self._lock:
            if not list_again and self._nothing_new():
                return self.sets
            if problem := replaced(self._tree):
                return self._believe_nothing(problem)
            now, wall_ns = self._clock.monotonic(), int(self._clock.wall() * 1e9)
            try:
                roots = tuple((path, *stamp(path)) for path in self._watched())
                found = without_linked(self.layout, self._roots_known, self.layout.steps())
                steps, linked, behind = found
                alone = {s: path for s, path in linked_out(self.layout, self._roots_known).items() if s not in steps}
                self._linked, self._out_of_reach = (*linked, *alone.values()), behind | alone.keys()
            except OSError as error:
                self._problem = self._unlisted = f"{error.filename or self.layout.output_dir}: {error.strerror}"
                self._listed = None
                return self.sets
            self._unlisted = ""
            settling = self._settling
            settling.begin(slow=slow_to_show(self.layout.watch_roots()), writers_ended=writers_ended)
            every = len(steps) <= _NEWEST or now - self._all_read >= LOOK_AROUND
            self._all_read = now if every else self._all_read
            close = set(sorted(steps)[0 if every else -_NEWEST :])
            fresh: dict[int, Known] = {}
            with self.layout.reading():
                for step in sorted(steps):
                    known = self._known.get(step)
                    if known is not None and known.settled and step not in close and known.as_before():
                        fresh[step] = known
                    else:
                        fresh[step] = settling.examine(step, steps[step], known)
                self._known = fresh
            self._problem = settling.problem
            self._name_states()
            self._compare_again(fresh)
            self._remember()
            aged = all(0 <= mtime < wall_ns - _FRESH_NS for _, mtime, _ in roots)
            calm = not self._problem and not settling.slow and all(k.settled for k in fresh.values())
            # What is watched only from now on was read before its time was.
            calm = aged and calm and self._watched() <= {path for path, _, _ in roots}
            self._roots, self._listed = roots, now if calm else None
            return self.sets

    def contents(self, step: int) -> SetContents:
        """All files of one step as they are now. HostError if there is no such step."""
        found = tuple(s.found for s in self._settling.scan(self._parts_of(step)))
        with self._lock:
            known = self._known.get(step)
        if known is None:
            judgement = self._judge(step, found)
            now = checkpoint_identity.describe(step, self.layout.name, found, judgement)
        else:
            judgement, now = known.judgement, known.set
            if now.complete and now.save_id != checkpoint_identity.save_id(found, judgement):
                now = replace(now, completeness=Completeness.WRITING, save_id="", reason=CHANGED)
        others = [s for s in self._sets if s.step != step]
        now = next(s for s in self._held_back.mark((*others, now), self.records) if s.step == step)
        travels = [p for p in found if p.part.uploaded]
        leftovers = frozenset(judgement.leftovers)
        files = tuple(f for p in travels for f in p.files if checkpoint_identity.belongs(f, leftovers))
        return SetContents(now, files, tuple(x for p in travels for x in p.symlinks), found, judgement.world_size)

    def inspect(self, step: int) -> Inspection:
        """Check the structure of every file of one step. HostError: there is no such step."""
        found = [s.found for s in self._settling.scan(self._parts_of(step))]
        with self.layout.reading():
            return self._judge(step, found)

    def verify(self, step: int) -> tuple[str, ...]:
        """Reasons not to start from this checkpoint, with all its files read again: damage that ``inspect`` finds, and
        CHANGED: it is no longer the save that was found complete (the next rescan then judges it again). HostError:
        there is no such step. InspectionUnanswered: it may be whole."""
        found = [s.found for s in self._settling.scan(self._parts_of(step))]
        with self.layout.reading():
            judgement = self._judge(step, found)
        if judgement.unreadable:
            raise InspectionUnanswered(judgement.reason, where=f"step {step}")
        problems = judgement.reasons
        with self._lock:
            known = self._known.get(step)
            if known is None or not known.set.complete:
                return problems
            if checkpoint_identity.save_id(found, judgement) == known.set.save_id:
                return problems
            known.settled, self._listed = False, None
        return (*problems, CHANGED)

    def release(self, found: CheckpointSet) -> None:
        """Hold this checkpoint back no more: the operator named it. In the thread of the rescans."""
        self.records.change((found.step, found.save_id), released=True)

    def record_starts(self) -> None:
        """Record of each complete checkpoint which start wrote it, as its times show it now: no clock that is set later
        changes that. Call it when a start begins: what exists then is of those before. Blocks."""
        with self._lock:
            for found in self.sets:
                key = found.step, found.save_id
                if found.complete and found.start_id and not self.records.origins.get(key, NOT_RECORDED).start_id:
                    self.records.change(key, start_id=found.start_id)

    def recognise(self, found: CheckpointSet, start_id: str, branch: str) -> None:
        """The store has exactly this checkpoint, and says that this start wrote it, on this branch. Blocks."""
        key, stored = (found.step, found.save_id), RecordSource.RESTORED
        with self._lock:
            self.records.change(key, source=stored, start_id=start_id, branch=branch)

    # -- inside -------------------------------------------------------------------------------------------------

    def _nothing_new(self) -> bool:
        """Whether everything is as at the last listing, and settled. Reads only the guards, lists no directory."""
        if self._listed is None or self._clock.monotonic() - self._all_read >= LOOK_AROUND:
            return False
        if any(stamp(path) != (mtime_ns, inode) for path, mtime_ns, inode in self._roots):
            return False
        return all(known.as_before() for known in self._known.values())

    def _watched(self) -> set[str]:
        """Where a step can appear."""
        return {str(path) for path in (*self.layout.watch_roots(), self.layout.output_dir)}

    def _compare_again(self, states: Mapping[int, Known]) -> None:
        """A save that lacks what the saves before it have is judged again when another one is complete."""
        complete = frozenset((step, k.was) for step, k in states.items() if k.set.complete)
        if complete != self._complete:
            self._complete = complete
            for known in states.values():
                lacks = known.judgement.lacks or (known.judgement.whole and not known.set.complete)
                known.settled = known.settled and not lacks

    def _believe_nothing(self, problem: str) -> tuple[CheckpointSet, ...]:
        """The checkpoints stay listed, but podwatch neither uses nor removes them."""
        self._problem = self._unlisted = problem
        self._listed = None
        for known in self._known.values():
            known.set = replace(known.set, completeness=Completeness.WRITING, save_id="", reason=problem)
            known.settled = False
        self._sets = tuple(self._known[s].set for s in sorted(self._known))
        return self._sets

    def _parts_of(self, step: int) -> tuple[PartDir, ...]:
        try:
            steps, _, _ = without_linked(self.layout, self._roots_known, self.layout.steps())
            parts = steps.get(step)
        except OSError as error:
            raise HostError(
                f"cannot read the checkpoints: {error.strerror}",
                where=str(error.filename or self.layout.output_dir),
                fix="check that the disk is mounted and readable",
            ) from error
        if parts is None:
            raise HostError(
                f"checkpoint of step {step} not found",
                where=str(self.layout.output_dir),
                fix="`podwatch checkpoints` lists the checkpoints",
            )
        return parts

    def _judge(self, step: int, found: Sequence[PartFiles]) -> Inspection:
        return self._settling.judge(step, found)

    def _name_states(self) -> None:
        """Set the states that depend on other checkpoints: one ahead of the newest complete one can still be being
        written."""
        newest = newest_complete(self._held_back.mark([k.set for k in self._known.values()], self.records))
        limit = self._windows.longest(slow=self._settling.slow) * CUT_OFF_FACTOR
        for step, known in self._known.items():
            if known.settled or known.set.completeness in (Completeness.WRITING, Completeness.COMPLETE):
                continue
            enough = _PENDING_LIMIT if known.judgement.pending else limit
            ahead = newest is None or step > newest.step
            if ahead and known.quiet < enough and not known.judgement.damaged:
                known.set = replace(known.set, completeness=Completeness.WRITING)
            else:
                known.settled = True
        self._sets = tuple(self._known[s].set for s in sorted(self._known))
        self._saving = any(k.moving for k in self._known.values())
        unsettled = [k for k in self._known.values() if k.set.completeness is Completeness.WRITING][-_NEWEST:]
        self._open = tuple(
            Path(p.path) for k in unsettled for p in k.set.parts if p.required and (p.size_bytes or p.complete)
        )

    def _remember(self) -> None:
        """Once per rescan: what grew, and what is gone."""
        if self._problem:
            return
        for found in self._sets:
            if found.complete:
                parts = {p.name: p.size_bytes for p in found.parts if p.size_bytes}
                self.records.grow((found.step, found.save_id), parts, found.file_count)
        for found in self.sets:
            key = found.step, found.save_id
            if found.held_as is HeldAs.TWO_WRITERS and key not in self.records.decided:
                self.records.change(key, held=found.held)
            if found.complete:
                self.records.change(key, doubted=found.held_as is HeldAs.IMPLAUSIBLE)
        self.records.keep_only({s.step for s in self._sets})
