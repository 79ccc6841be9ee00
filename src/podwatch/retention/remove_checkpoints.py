"""Carries out a removal plan: journal, rename into the trash, then delete (docs/disk.md; promises 2, 9, 10).

A crash at any point leaves a checkpoint either whole under its own name or never complete again: the part that decides
completeness is renamed first. The next start removes the rest, if it is still what the intent names.
"""

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.config.units import format_size
from podwatch.domain.document import of
from podwatch.domain.errors import HostError, PodwatchError
from podwatch.domain.event import Emit, Event, EventName
from podwatch.domain.finding import Severity, counted
from podwatch.domain.intents import PathToRemove, RemovalIntent
from podwatch.domain.run import Intent, IntentKind, IntentState, Mutation, MutationGuard
from podwatch.journal.journal import Journal
from podwatch.policy.local_retention import Removal, RemovalKind, RemovalPlan
from podwatch.retention.list_trash_and_quarantine import Moved, move_to_trash, other_trashes, removable, trash_entries
from podwatch.system.clock import Clock
from podwatch.system.files import Removed
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import Identity, PinnedTree
from podwatch.system.rename_places import corners_of

YIELD_EVERY_ENTRIES = 32
YIELD_SECONDS = 0.002
"""Unlinks between pauses, which let the trainer's own writes through; 100,000 files then take about 6 s longer."""
_LOWEST_PRIORITY = 19
_TOLD_TOGETHER = {
    RemovalKind.SPARE: "broadcasts and rollouts that belong to no checkpoint",
    RemovalKind.OPTIONAL_PART: "parts that a resume does not need",
}

PathsOf = Callable[[int], Sequence[Path]]
"""Returns every path of a step's checkpoint, **the part that decides completeness first**."""
Veto = Callable[[Removal], str]
"""Returns why a removal must not happen now; empty if it may. A reason keeps the checkpoint."""


@dataclass(frozen=True, slots=True)
class RemovalReport:
    """``done`` are the removals that left their place; ``freed_bytes`` is the space that the disk really regained."""

    done: tuple[Removal, ...]
    freed_bytes: int
    problems: tuple[str, ...]


class Remover:
    """All methods block: call them on a thread of their own, never on the event loop, and one at a time.

    podwatch removes only from the workspace's roots and its own quarantine and trash. While one of them is replaced
    nothing is removed, not even from the trash.
    """

    def __init__(
        self,
        workspace: Workspace,
        journal: Journal,
        clock: Clock,
        emit: Emit,
        guard: MutationGuard | None = None,
    ) -> None:
        """``guard`` says whether anything may be removed now; without one everything may."""
        self._guard = guard or MutationGuard()
        self._workspace = workspace
        self._journal = journal
        self._clock = clock
        self._emit = emit
        self._unjournaled = 0
        self._more: dict[Path, None] = {}
        """Trashes on other file systems."""

    def carry_out(
        self,
        plan: RemovalPlan,
        paths_of: PathsOf,
        veto: Veto = lambda _: "",
    ) -> RemovalReport:
        """Do the removals in order. ``veto`` is called just before each one, from this thread: a large plan takes
        minutes, and training may have been started from a checkpoint meanwhile (promise 2).

        Continues after a removal that fails; one ``prune-stuck`` event reports the problems.
        """
        done: list[Removal] = []
        problems: list[str] = []
        if why := self._blocked_reason():
            return RemovalReport((), 0, (why,))
        if self._refused(problems):
            self._stuck(problems)
            return RemovalReport((), 0, tuple(problems))
        self._finish_all(problems)
        freed = self._empty_trash(problems)
        for removal in plan.removals:
            if removal.kind is RemovalKind.TRASH:
                done.append(removal)
                continue
            if veto(removal) or self._blocked_reason():
                continue
            try:
                moved = self._set_aside(removal, paths_of)
            except (OSError, PodwatchError) as error:
                problems.append(_explain(removal, error, self._workspace))
                freed += self._empty_trash(problems)
                continue
            if not moved:
                continue  # another process removed it already
            freed += self._empty_trash(problems)
            done.append(removal)
            if removal.kind not in _TOLD_TOGETHER:
                self._tell(removal)
        for kind, what in _TOLD_TOGETHER.items():
            self._tell_together(kind, what, [r for r in done if r.kind is kind])
        self._stuck(problems)
        return RemovalReport(tuple(done), freed, tuple(problems))

    def _blocked_reason(self) -> str:
        return self._guard.blocked_reason(Mutation.DELETE)

    def _refused(self, problems: list[str]) -> bool:
        if problem := self._workspace.problem():
            problems.append(problem)
        return bool(problem)

    def _stuck(self, problems: Sequence[str]) -> None:
        if problems:
            self._emit(
                Event(
                    EventName.PRUNE_STUCK,
                    self._clock.wall(),
                    f"podwatch could not remove everything: {problems[0]}",
                    Severity.WARNING,
                    {"problems": len(problems), "first": problems[0]},
                )
            )

    def sweep_trash(self) -> RemovalReport:
        """Finish an interrupted removal: half-moved checkpoints, then everything in the trash. Also creates the missing
        trash of each volume, because mkdir fails once the volume is full."""
        problems: list[str] = []
        if why := self._blocked_reason():
            return RemovalReport((), 0, (why,))
        if self._refused(problems):
            return RemovalReport((), 0, tuple(problems))
        self._more.update(dict.fromkeys(p for p in corners_of(self._workspace, "trash") if p != self._workspace.trash))
        for root in self._workspace.roots:
            self._prepare(root)
        self._finish_all(problems)
        return RemovalReport((), self._empty_trash(problems), tuple(problems))

    def _prepare(self, root: Path) -> None:
        """Find out by trying. A missing root, or one that podwatch cannot write to, is left for later."""
        tree = self._workspace.tree
        try:
            if not tree.is_directory(root) or tree.can_rename(root, self._workspace.trash):
                return
            for candidate in other_trashes(root / "any", self._workspace)[:2]:
                tree.make(candidate)
                if tree.can_rename(root, candidate):
                    self._more[candidate] = None
                    return
                tree.rmdir(candidate)
        except (OSError, HostError):
            return

    def _move(self, path: Path, name: str, expected: Identity) -> Moved | None:
        """Move it into our trash, or into one on its own filesystem where the rename across two is refused."""
        workspace = self._workspace
        try:
            return move_to_trash(path, workspace, workspace.trash, name, expected=expected)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            across = error
        for trash in other_trashes(path, workspace):
            try:
                workspace.tree.make(trash)
                moved = move_to_trash(path, workspace, trash, name, expected=expected)
            except OSError:
                continue
            self._more[trash] = None
            return moved
        raise across

    def _finish_all(self, problems: list[str]) -> None:
        try:
            intents = self._journal.open_intents(IntentKind.PRUNE)
        except Exception as error:  # as in _open_intent: freeing the disk does not depend on the journal
            problems.append(f"the journal cannot be read: {error}")
            return
        for intent in intents:
            try:
                self._finish(intent)
            except (OSError, ValueError, TypeError, PodwatchError) as error:
                problems.append(f"removal {intent.id}: {error}")

    def _set_aside(self, removal: Removal, paths_of: PathsOf) -> list[Moved]:
        if removal.path:
            paths: Sequence[Path] = (Path(removal.path),)
        elif removal.step is not None:
            paths = paths_of(removal.step)
        else:
            raise HostError("a removal names neither step nor path", where=removal.reason, fix="please report it")
        seen = [(path, self._workspace.tree.lstat(removable(path, self._workspace))) for path in paths]
        wanted = [(path, status) for path, status in seen if status is not None]
        if not wanted:
            return []
        intent = self._open_intent(removal, wanted)
        prefix = (
            f"{intent.id if intent is not None else self._name()}.{removal.step if removal.step is not None else 'x'}"
        )
        moved: list[Moved] = []
        try:
            for n, (path, status) in enumerate(wanted):
                one = self._move(path, f"{prefix}.{n}", Identity.of(status))
                if one is not None:
                    moved.append(one)
        except (OSError, PodwatchError):
            if not moved:  # else it stays open, and the next run finishes it
                self._settle(intent, IntentState.FAILED, "the rename was refused")
            raise
        self._settle(intent, IntentState.DONE, f"{counted(len(moved), 'path')} in the trash")
        return moved

    def _finish(self, intent: Intent) -> None:
        """Finish a half-moved checkpoint. A path that is no longer the same directory was written again: it stays."""
        known, tree = RemovalIntent.from_json(intent.data, where=f"intent {intent.id}"), self._workspace.tree
        found = [tree.lstat(removable(Path(one.path), self._workspace)) for one in known.paths]
        if not found or found[0] is not None:
            self._settle(intent, IntentState.UNDONE, "nothing had been moved; planned again")
            return
        prefix = f"{intent.id}.{known.step if known.step is not None else 'x'}"
        for n, (one, status) in enumerate(zip(known.paths, found, strict=True)):
            if status is not None and _is_still(one, status):
                self._move(Path(one.path), f"{prefix}.{n}", Identity.of(status))
        self._settle(intent, IntentState.DONE, "finished after a restart")

    def _empty_trash(self, problems: list[str]) -> int:
        """Delete everything in the trash on a thread of the lowest priority; returns the bytes that the disk
        regained."""
        freed: list[int] = []
        tree = self._workspace.tree
        for trash in (self._workspace.trash, *self._more):
            try:
                names = trash_entries(tree, trash)
            except (OSError, HostError) as error:
                problems.append(f"{trash}: {error}")
                continue
            if names:
                worker = threading.Thread(
                    target=_delete, args=(tree, trash, names, freed, problems), name="podwatch-trash", daemon=True
                )
                worker.start()
                worker.join()
        return sum(freed)

    def _open_intent(self, removal: Removal, wanted: Iterable[tuple[Path, os.stat_result]]) -> Intent | None:
        paths = tuple(PathToRemove(str(path), *_identity(status)) for path, status in wanted)
        intent = of(RemovalIntent, removal, kind=str(removal.kind), paths=paths)
        try:
            return self._journal.open_intent(IntentKind.PRUNE, intent.to_json())
        except Exception as error:  # a full or broken state disk must not block this: the rename is the intent
            if why := self._blocked_reason():  # without a journal nothing is judged or removed
                raise HostError(f"podwatch removes nothing now: {why}") from error
            self._emit(
                Event(
                    EventName.PRUNE_STUCK,
                    self._clock.wall(),
                    f"the journal cannot record a removal, podwatch continues it anyway: {error}",
                    Severity.WARNING,
                    {"step": removal.step},
                )
            )
            return None

    def _settle(self, intent: Intent | None, state: IntentState, note: str) -> None:
        if intent is None:
            return
        try:
            self._journal.settle(intent.id, state, note)
        except Exception as error:  # as above; the next sweep finds it open with nothing left to do
            self._emit(
                Event(
                    EventName.PRUNE_STUCK,
                    self._clock.wall(),
                    f"the journal cannot settle removal {intent.id}: {error}",
                    Severity.WARNING,
                )
            )

    def _name(self) -> str:
        self._unjournaled += 1
        return f"n{int(self._clock.wall())}-{self._unjournaled}"

    def _tell(self, removal: Removal) -> None:
        what = f"step {removal.step}" if removal.step is not None else removal.path
        part = f" ({removal.part})" if removal.part else ""
        self._emit(
            Event(
                EventName.PRUNED,
                self._clock.wall(),
                f"removed {what}{part}: {removal.reason}",
                Severity.WARNING if removal.kind is RemovalKind.UNSTORED_SET else Severity.INFO,
                {"step": removal.step, "kind": str(removal.kind), "bytes": removal.bytes, "reason": removal.reason},
            )
        )

    def _tell_together(self, kind: RemovalKind, what: str, removals: Sequence[Removal]) -> None:
        """One event for many small removals; each has its own intent in the journal."""
        if not removals:
            return
        steps = sorted({r.step for r in removals if r.step is not None})
        of = f" of step {steps[0]}" if len(steps) == 1 else f" of steps {steps[0]} to {steps[-1]}" if steps else ""
        size = sum(r.bytes for r in removals)
        self._emit(
            Event(
                EventName.PRUNED,
                self._clock.wall(),
                f"removed {len(removals)} {what}{of}: {format_size(size)}",
                fields={"step": None, "kind": str(kind), "bytes": size, "count": len(removals)},
            )
        )


def _delete(tree: PinnedTree, trash: Path, names: Iterable[str], freed: list[int], problems: list[str]) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)  # Linux: this thread only
    except OSError:
        pass
    entries = 0

    def tick(_: Removed) -> None:
        nonlocal entries
        entries += 1
        if entries % YIELD_EVERY_ENTRIES == 0:
            time.sleep(YIELD_SECONDS)

    for name in names:
        try:
            removed = tree.remove_tree(trash / name, tick=tick)
        except (OSError, HostError) as error:
            problems.append(f"{trash / name}: {error}")
            continue
        freed.append(removed.bytes)
        problems.extend(f"{trash}/{problem}" for problem in removed.problems)


def _is_still(known: PathToRemove, status: os.stat_result) -> bool:
    """A new directory of the same name may have the same inode number, but it is younger."""
    return (known.inode, known.kind, known.mtime) == _identity(status)


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, stat.S_IFMT(status.st_mode), int(status.st_mtime)


def _explain(removal: Removal, error: Exception, workspace: Workspace) -> str:
    what = f"step {removal.step}" if removal.step is not None else removal.path
    if isinstance(error, OSError) and error.errno == errno.EXDEV:
        return (
            f"{what}: cannot be renamed into the trash (another filesystem). Move output_dir off the image's own layer"
        )
    if isinstance(error, PermissionError) and error.filename:
        found, fix = workspace.foreign_owners([Path(error.filename)])
        return f"{what}: {found}. Repair it: {fix}" if fix else f"{what}: {error}"
    return f"{what}: {error}"
