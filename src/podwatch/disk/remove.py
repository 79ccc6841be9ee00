"""Carries out a removal plan: rename into the trash, then delete slowly (docs/disk.md; promises 2, 8, 9, 10).

The rename is itself the record of the removal: it needs neither a new directory nor space, so it works on a disk that
is 100 % full, and what is in the trash is deleted by the next podwatch. The part that decides completeness is renamed
first: a crash at any point leaves a checkpoint either whole under its own name or incomplete, and what is left of it
goes like every incomplete checkpoint.
"""

import errno
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.disk.leftovers import trash_entries
from podwatch.disk.plan import Removal, RemovalKind, RemovalPlan
from podwatch.domain.errors import HostError, PodwatchError
from podwatch.domain.event import Emit, Event, EventName
from podwatch.domain.finding import Severity
from podwatch.domain.run import Mutation, MutationGuard
from podwatch.domain.times import size
from podwatch.system.clock import Clock
from podwatch.system.files import Removed
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import Identity, PinnedTree
from podwatch.system.rename_places import corners, corners_of

YIELD_EVERY_ENTRIES = 32
YIELD_SECONDS = 0.002
"""Unlinks between pauses, which let the trainer's own writes through; 100,000 files then take about 6 s longer."""
_LOWEST_PRIORITY = 19
_REPORTED_TOGETHER = {
    RemovalKind.BY_PRODUCT: "broadcasts and rollouts that belong to no checkpoint",
    RemovalKind.OPTIONAL_PART: "parts that a resume does not need",
}

PathsOf = Callable[[int], Sequence[Path]]
"""Returns every path of a step's checkpoint, **the part that decides completeness first**."""
Veto = Callable[[Removal], str]
"""Returns why a removal must not happen now; empty if it may. A reason keeps the checkpoint."""


@dataclass(frozen=True, slots=True)
class RemovalReport:
    """``done`` are the removals that left their place; ``freed_bytes`` is the space that the disk really regained."""

    done: tuple[Removal, ...] = ()
    freed_bytes: int = 0
    problems: tuple[str, ...] = ()


class Remover:
    """All methods block: call them on a thread of their own, never on the event loop, and one at a time.

    podwatch removes only from the workspace's roots and its own quarantine and trash. While one of them is replaced
    nothing is removed, not even from the trash.
    """

    def __init__(self, workspace: Workspace, clock: Clock, emit: Emit, guard: MutationGuard | None = None) -> None:
        """``guard`` says whether anything may be removed now; without one everything may."""
        self._workspace, self._clock, self._emit = workspace, clock, emit
        self._guard = guard or MutationGuard()
        self._removed = 0
        self._more: dict[Path, None] = {}
        """Trashes on other file systems."""

    def carry_out(self, plan: RemovalPlan, paths_of: PathsOf, veto: Veto = lambda _: "") -> RemovalReport:
        """Do the removals in order. ``veto`` is called just before each one, from this thread: a large plan takes
        minutes, and training may have been started from a checkpoint meanwhile (promise 2).

        Continues after a removal that fails; one ``prune-stuck`` event reports the problems.
        """
        if why := self._blocked_reason():
            return RemovalReport(problems=(why,))
        problems: list[str] = []
        done: list[Removal] = []
        freed = 0
        if problem := self._workspace.problem():
            problems.append(problem)
        else:
            freed = self._empty_trash(problems)
            for removal in plan.removals:
                if removal.kind is RemovalKind.TRASH:
                    done.append(removal)
                    continue
                moved = self._remove(removal, paths_of, veto, problems)
                freed += self._empty_trash(problems)
                if moved:
                    done.append(removal)
                    if removal.kind not in _REPORTED_TOGETHER:
                        self._report_one(removal)
        self._report(done, problems)
        return RemovalReport(tuple(done), freed, tuple(problems))

    def sweep_trash(self) -> RemovalReport:
        """Delete everything in the trash: an interrupted removal. Also creates the missing trash of each volume,
        because mkdir fails once the volume is full."""
        if why := self._blocked_reason() or self._workspace.problem():
            return RemovalReport(problems=(why,))
        problems: list[str] = []
        self._more.update(dict.fromkeys(p for p in corners_of(self._workspace, "trash") if p != self._workspace.trash))
        for root in self._workspace.roots:
            self._prepare(root)
        return RemovalReport((), self._empty_trash(problems), tuple(problems))

    def _blocked_reason(self) -> str:
        return self._guard.blocked_reason(Mutation.DELETE)

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

    # -- rename --------------------------------------------------------------------------------------------------------

    def _remove(self, removal: Removal, paths_of: PathsOf, veto: Veto, problems: list[str]) -> bool:
        """Whether anything was moved into the trash; False where another process removed it already."""
        moved = False
        if veto(removal) or self._blocked_reason():
            return moved
        self._removed += 1
        prefix = f"{int(self._clock.wall())}-{self._removed}.{'x' if removal.step is None else removal.step}"
        try:
            paths = [Path(removal.path)] if removal.path else paths_of(removal.step or 0)
            found = [(path, self._workspace.tree.lstat(removable(path, self._workspace))) for path in paths]
            for n, (path, status) in enumerate(found):
                if status is not None:
                    moved |= self._move(path, f"{prefix}.{n}", Identity.of(status))
        except (OSError, PodwatchError) as error:
            problems.append(_explain(removal, error, self._workspace))
        return moved

    def _move(self, path: Path, name: str, expected: Identity) -> bool:
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

    # -- delete --------------------------------------------------------------------------------------------------------

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

    # -- report --------------------------------------------------------------------------------------------------------

    def _report(self, done: Sequence[Removal], problems: Sequence[str]) -> None:
        """One event for many small removals, one for all problems."""
        for kind, what in _REPORTED_TOGETHER.items():
            self._report_together(kind, what, [r for r in done if r.kind is kind])
        if problems:
            message = f"podwatch could not remove everything: {problems[0]}"
            fields: dict[str, str | int] = {"problems": len(problems), "first": problems[0]}
            self._emit(Event(EventName.PRUNE_STUCK, self._clock.wall(), message, Severity.WARNING, fields))

    def _report_one(self, removal: Removal) -> None:
        message = f"removed {_name(removal)}{f' ({removal.part})' if removal.part else ''}: {removal.reason}"
        severity = Severity.WARNING if removal.kind is RemovalKind.UNSTORED else Severity.INFO
        fields = {"step": removal.step, "kind": str(removal.kind), "bytes": removal.bytes, "reason": removal.reason}
        self._emit(Event(EventName.PRUNED, self._clock.wall(), message, severity, fields))

    def _report_together(self, kind: RemovalKind, what: str, removals: Sequence[Removal]) -> None:
        if not removals:
            return
        steps = sorted({r.step for r in removals if r.step is not None})
        of = f" of step {steps[0]}" if len(steps) == 1 else f" of steps {steps[0]} to {steps[-1]}" if steps else ""
        freed = sum(r.bytes for r in removals)
        message = f"removed {len(removals)} {what}{of}: {size(freed)}"
        fields = {"step": None, "kind": str(kind), "bytes": freed, "count": len(removals)}
        self._emit(Event(EventName.PRUNED, self._clock.wall(), message, fields=fields))


def removable(path: Path, workspace: Workspace) -> Path:
    """``path``, if it may be removed: it is below one of the trainer's directories, or an entry of our quarantine.
    Raises HostError."""
    home = path.parent
    in_quarantine = home.name == "quarantine" and path.name.isdecimal() and home in corners_of(workspace, "quarantine")
    if in_quarantine or workspace.holds(path):
        return path
    raise HostError(
        "podwatch refuses to remove a path outside the configured directories",
        where=str(path),
        fix="configure its directory as output_dir or trainer.checkpoint_dir if it is the trainer's",
    )


def move_to_trash(path: Path, workspace: Workspace, trash: Path, name: str, *, expected: Identity | None) -> bool:
    """Rename ``path`` into ``trash`` as ``name``. A symlink is moved itself, never what it points to.

    False when it is gone already, or is not what ``expected`` says. Raises OSError (EXDEV where output_dir cannot be
    renamed from; ELOOP or ENOTDIR where a symlink is on the way) and HostError.
    """
    tree = workspace.tree
    try:
        return tree.rename(path, trash / name, expected=expected)
    except FileExistsError:
        return tree.rename(path, trash / f"{name}.{secrets.token_hex(4)}", expected=expected)
    except FileNotFoundError:
        return False  # the directory it was in is gone


def other_trashes(path: Path, workspace: Workspace) -> tuple[Path, ...]:
    """Where ``path`` may be moved if a rename into podwatch's own trash fails (EXDEV): its root is another volume, or
    it is on a mount below it. In the order to try: beside the root, in it, beside ``path``."""
    if path.parent.name == "quarantine":
        return (path.parent.with_name("trash"),)  # our own, on whichever file system
    return tuple(p for p in corners(path, workspace, "trash") if p != workspace.trash)


def _delete(tree: PinnedTree, trash: Path, names: Iterable[str], freed: list[int], problems: list[str]) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)  # Linux: this thread only
    except OSError:
        pass
    entries = 0

    def pause(_: Removed) -> None:
        nonlocal entries
        entries += 1
        if entries % YIELD_EVERY_ENTRIES == 0:
            time.sleep(YIELD_SECONDS)

    for name in names:
        try:
            removed = tree.remove_tree(trash / name, tick=pause)
        except (OSError, HostError) as error:
            problems.append(f"{trash / name}: {error}")
            continue
        freed.append(removed.bytes)
        problems.extend(f"{trash}/{problem}" for problem in removed.problems)


def _name(removal: Removal) -> str:
    return f"step {removal.step}" if removal.step is not None else removal.path


def _explain(removal: Removal, error: Exception, workspace: Workspace) -> str:
    what = _name(removal)
    if isinstance(error, OSError) and error.errno == errno.EXDEV:
        return (
            f"{what}: cannot be renamed into the trash (another filesystem). Move output_dir off the image's own layer"
        )
    if isinstance(error, PermissionError) and error.filename:
        found, fix = workspace.foreign_owners([Path(error.filename)])
        return f"{what}: {found}. Repair it: {fix}" if fix else f"{what}: {error}"
    return f"{what}: {error}"
