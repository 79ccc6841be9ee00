"""podwatch's own directories and the trainer's, driven from outside: everything by which it changes them.

``Guard`` is podwatch over one output directory. ``OPERATIONS`` is the table of all that it does to paths which a
training user controls: attacks go through it, so that an operation which is added here is attacked.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import podwatch.system.files
import podwatch.system.pinned_directories
from podwatch.app.backup.outbox import Outbox, OutgoingSave, outgoing_files
from podwatch.checkpoints.known_checkpoints import SetContents
from podwatch.checkpoints.shapes import PartDir, PartFiles, Tracker
from podwatch.checkpoints.trackers import repair_trackers
from podwatch.cli.checkpoints import quarantine_line
from podwatch.disk.leftovers import Measurements, quarantine_entries
from podwatch.disk.plan import Removal, RemovalKind, RemovalPlan
from podwatch.disk.remove import Remover
from podwatch.domain.checkpoint import CheckpointSet, Completeness, FileEntry, PartState
from podwatch.domain.errors import HostError, PodwatchError
from podwatch.domain.event import Event
from podwatch.domain.quarantine_index import QuarantineIndex
from podwatch.journal.journal import Journal
from podwatch.recovery import quarantine
from podwatch.recovery.run_file import RunFile
from podwatch.store.restore import staging
from podwatch.store.restore.staging import StagingArea
from podwatch.store.transfer.send import SourceForeign
from podwatch.system.clock import SystemClock
from podwatch.system.own_directories import Workspace
from podwatch.system.pinned_directories import HIDDEN, RootReplaced
from podwatch.system.rights import rights_of
from tests.support.fixed_paths import FixedPaths
from tests.support.starts import guarded

__all__ = [
    "HIDDEN", "OPERATIONS", "Guard", "HostError", "Operation", "PodwatchError", "RootReplaced", "as_user",
    "renames_by_descriptor", "without_waiting",
]  # fmt: skip


@dataclass
class Guard:
    """podwatch over ``out``, which is ``user``'s and lies in ``home``. ``base`` holds its database. ``inside``: its own
    directory is in output_dir, and not beside it."""

    base: Path
    home: Path
    out: Path
    user: int | None
    inside: bool = False
    events: list[Event] = field(default_factory=list)
    workspace: Workspace = field(init=False)
    _journal: list[Journal] = field(default_factory=list)
    _judged: SetContents | None = None

    def __post_init__(self) -> None:
        self.workspace = Workspace(self.out, use_inside=self.inside, owner=self.user)

    @property
    def journal(self) -> Journal:
        if not self._journal:
            self._journal.append(Journal.open(self.base / "journal.sqlite"))
        return self._journal[0]

    def close(self) -> None:
        self.forget()
        for journal in self._journal:
            journal.close()

    def forget(self) -> None:
        """It holds no directory open any more, as one that starts."""
        self.workspace.tree.close()

    def probed(self) -> "Guard":
        """The same after it has made and checked its own directories."""
        other = Guard(self.base, self.home, self.out, self.user, self.inside, self.events, self._journal)
        other.workspace = self.workspace.probe()
        return other

    # -- its own directories

    @property
    def quarantine(self) -> Path:
        return self.workspace.quarantine

    @property
    def trash(self) -> Path:
        return self.workspace.trash

    @property
    def staging(self) -> Path:
        return self.workspace.staging

    @property
    def record(self) -> Path:
        """The copy of run.json beside output_dir."""
        return self.workspace.run_copy

    @property
    def own_directory_inside(self) -> Path:
        """Where it would be in output_dir."""
        return self.workspace.inside

    def problem(self) -> str:
        """Why it may not use these directories; empty: it may."""
        return self.workspace.problem()

    def exposed(self) -> str:
        """Who else can move its own directory away; empty: nobody."""
        return self.workspace.exposed()

    def save_record(self) -> None:
        file = self._run_file()
        file.other_run = ""
        file.edit_now(lambda run: replace(run, starts=guarded()))
        file.close()

    def has_record(self) -> bool:
        """Whether the record that ``save_record`` wrote is read."""
        found = self._run_file().load()
        assert found is None or found.starts == guarded()
        return found is not None

    def _run_file(self) -> RunFile:
        """With a state directory that is lost: only the copy is there."""
        return RunFile(Path(tempfile.mkdtemp(dir=self.base)), self.workspace, "run", SystemClock())

    # -- quarantine

    def set_aside(self, *paths: Path, number: int = 7) -> int:
        """Move these into quarantine entry ``number``; returns how many."""
        moves = [(str(path), f"{n}-{path.name}") for n, path in enumerate(paths)]
        return quarantine.carry_out(self.workspace, QuarantineIndex(number, 1.0, 5, moves=tuple(moves)))

    def finish_quarantines(self) -> int:
        """Finish the moves that were interrupted; returns how many were left."""
        return sum(quarantine.carry_out(self.workspace, index) for index in quarantine.unfinished(self.workspace))

    def give_back(self, number: int) -> tuple[Path, ...]:
        """Move an entry's directories back; returns where they are."""
        return quarantine.give_back(self.workspace, number)

    def entries(self) -> list[str]:
        """A line for each entry, as ``podwatch checkpoints`` shows it."""
        return [quarantine_line(entry, 1e9) for entry in quarantine.listing(self.workspace)]

    def free_number(self) -> int:
        """Of the next entry."""
        return quarantine.free_number(self.workspace)

    def make_spare(self) -> None:
        """What a full disk needs for an entry."""
        quarantine.make_spare(self.workspace)

    def entries_to_delete(self, *, verified: int) -> list[bool]:
        """For each entry that is old enough: whether it is needed all the same."""
        found = quarantine_entries(self.workspace, now_wall=9e9, keep_seconds=1.0, verified=verified)
        return [entry.needed for entry in found]

    # -- removal

    def remover(self) -> Remover:
        return Remover(self.workspace, SystemClock(), self.events.append)

    def remove(self, step: int, *paths: Path) -> None:
        plan = RemovalPlan((Removal(RemovalKind.STORED, 1, "test", step),))
        self.remover().carry_out(plan, lambda _: paths)

    def was_killed_while_removing(self, step: int, path: Path) -> None:
        """After its first rename."""
        path.rename(self.trash / f"1700000000-1.{step}.0")

    def sweep_trash(self) -> None:
        self.remover().sweep_trash()

    # -- restore and trackers

    def restore_homes(self, target: Path) -> Path:
        """The staging directory in which a checkpoint for ``target`` would be put together."""
        (part,) = StagingArea(self.workspace, None, "5-save").prepare({"checkpoint": target}, frozenset())
        return part.staging.parent

    def repair(self, files: Mapping[Path, bytes], links: Mapping[Path, str]) -> tuple[Path, ...]:
        """Write these tracker files and links where they differ; returns those that it wrote."""
        wanted = [Tracker(path, content=content) for path, content in files.items()]
        wanted += [Tracker(path, target=target) for path, target in links.items()]
        return repair_trackers(wanted, self.workspace.tree)


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """Something by which podwatch changes the trainer's directories, or its own beside them."""

    act: Callable[[Guard], object]
    before: Callable[[Guard], object] = lambda _: None
    """What must have happened already, without an attack."""


def _ahead(guard: Guard) -> tuple[Path, ...]:
    return (guard.out / "checkpoints" / "step_9", guard.out / "rollouts" / "step_9")


def _move(guard: Guard) -> None:
    guard.set_aside(*_ahead(guard))


def _remove(guard: Guard) -> None:
    guard.remove(9, *_ahead(guard))


def _half_removed(guard: Guard) -> None:
    """A podwatch that was killed between two renames, and a full trash."""
    guard.probed().was_killed_while_removing(9, _ahead(guard)[0])


def _restore(step: int, to: str = "", below: str = "checkpoints") -> Callable[[Guard], None]:
    def act(guard: Guard) -> None:
        area = StagingArea(guard.workspace, guard.home / to if to else None, f"{step}-save")
        target = guard.home / to / "checkpoint" if to else guard.out / below / f"step_{step}"
        with area.alone():
            (part,) = area.prepare({"checkpoint": target}, frozenset())
            area.tree.make(part.path)
            area.tree.write(part.path / "model.bin", b"restored", 0o644)
            area.place(step, "line")

    return act


def _trackers(guard: Guard) -> None:
    guard.repair({guard.out / "latest": b"5"}, {guard.out / "checkpoints" / "step_latest": "step_5"})


def _judge(guard: Guard) -> None:
    path = guard.out / "checkpoints" / "step_9"
    files = []
    for name in ("DONE", "model.bin"):
        s = (path / name).stat()
        files.append(FileEntry(name, "checkpoint", s.st_size, s.st_mtime_ns, s.st_mode, s.st_ino, s.st_dev))
    found = CheckpointSet(9, "custom", Completeness.COMPLETE, (), 1, 2, 1.0, "save")
    part = PartFiles(PartDir("checkpoint", path, True), True, tuple(files))
    guard._judged = SetContents(found, tuple(files), (), (part,))


def _hold(guard: Guard) -> None:
    assert guard._judged is not None
    judged = guard._judged
    roots = {part.part.name: str(part.part.path) for part in judged.parts}
    save = OutgoingSave("run", 9, "save", "stored", "custom", 1 << 20, outgoing_files(judged.files), roots)
    outbox = Outbox(guard.home / "sent", guard.workspace, 0.0)
    try:
        taken = outbox.take(save, judged)
        outbox.is_unchanged(taken)
        outbox.is_cramped(taken)
        outbox.release(taken)
        outbox.found()
    except SourceForeign:
        return


def _record(guard: Guard) -> None:
    guard.save_record()
    guard.has_record()


def _begin(guard: Guard) -> None:
    """What a podwatch does before its first look."""
    found = guard.workspace.probe()
    quarantine.make_spare(found)
    found.exposed()


def _look(guard: Guard) -> None:
    ahead = _ahead(guard)
    parts = tuple(PartState(path.parent.name, str(path), True, True, 1) for path in ahead)
    found = CheckpointSet(9, "x", Completeness.COMPLETE, parts, 1, 1, 0.0)
    layout = FixedPaths([(9, path) for path in ahead])
    Measurements(guard.workspace, layout, keep_seconds=1.0).measure(0.0, verified=99, checkpoints=[found])
    quarantine.listing(guard.workspace)
    quarantine.free_number(guard.workspace)


OPERATIONS = {
    "begin": Operation(_begin),
    "record": Operation(_record),
    "quarantine": Operation(_move),
    "return": Operation(lambda guard: guard.give_back(7), before=_move),
    "remove": Operation(_remove),
    "sweep": Operation(Guard.sweep_trash, before=_half_removed),
    "restore": Operation(_restore(7)),
    "restore deep": Operation(_restore(7, below="run/default/checkpoints")),
    "restore over": Operation(_restore(9)),
    "restore to": Operation(_restore(9, to="to")),
    "trackers": Operation(_trackers),
    "hold": Operation(_hold, before=_judge),
    "look": Operation(_look, before=_move),
}


def as_user(uid: int) -> AbstractContextManager[None]:
    """This thread has the rights of a user meanwhile."""
    return rights_of(uid, uid).applied()


# -- seams -------------------------------------------------------------------------------------------------------------


def renames_by_descriptor() -> list[tuple[Any, str]]:
    """(module, name) of calls on paths that do not go through ``os``."""
    system = podwatch.system
    modules = (system.files, system.pinned_directories)
    return [(module, "rename_at") for module in modules if hasattr(module, "rename_at")]


@contextmanager
def without_waiting() -> Iterator[None]:
    """A lock that a user keeps exchanging is not waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "LOCK_SECONDS", 0.0)
        yield
