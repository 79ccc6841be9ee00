"""The learned file sets of one run: connects the pure rule (``learned_sets``) and the journal."""

import hashlib
from collections.abc import Callable, Sequence

from podwatch.checkpoints import learned_sets
from podwatch.checkpoints.after_reboot import Memory
from podwatch.checkpoints.layouts.base import PartFiles
from podwatch.checkpoints.learned_sets import FileSet
from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.errors import HostError

KEY = "checkpoints.files"
Own = Sequence[tuple[PartFiles, FileEntry]]


class Expected:
    """``whose`` identifies the layout and the trainer's command: when it changes, all is forgotten."""

    def __init__(self, memory: Memory, whose: Callable[[], str]) -> None:
        self._memory, self._whose = memory, whose
        self._for: str | None = None
        self._sets: tuple[FileSet, ...] = ()
        self._refused: FileSet | None = None
        self._again: list[int] = []
        self._dirty = False

    def lacks(self, step: int, own: Own, *, settled: bool) -> str:
        """What this checkpoint lacks compared with earlier saves. ``settled``: it has not changed for so long that no
        more files are expected; two such checkpoints in a row that agree become the new rule."""
        self._load()
        new = _file_set(step, own)
        reason = learned_sets.lacking(new, self._sets)
        if not reason or not settled:
            return reason
        other, self._refused = self._refused, new
        if other is None or other.step == step or not learned_sets.agree(new, other):
            if other is not None and other.step == step:
                self._refused = other
            return reason
        self._sets, self._refused, self._dirty = tuple(sorted((other, new), key=lambda s: s.step)), None, True
        self._again.append(other.step)
        return ""

    def note(self, step: int, own: Own) -> None:
        """Record the files of a complete checkpoint."""
        self._load()
        sets = learned_sets.remember(self._sets, _file_set(step, own))
        self._dirty = self._dirty or sets != self._sets
        self._sets = sets

    def save(self) -> tuple[int, ...]:
        """Save what is new. Returns the steps that were refused by a rule that no longer holds."""
        again, self._again = tuple(self._again), []
        if self._dirty:
            self._memory.learn(KEY, learned_sets.to_plain(self._sets, self._for or ""))
            self._dirty = False
        return again

    def _load(self) -> None:
        whose = self._whose()
        if whose != self._for:
            self._for, self._refused, self._dirty = whose, None, False
            try:
                kept = self._memory.learned(KEY, None)
            except HostError:
                kept = None  # learning again only costs a save
            self._sets = learned_sets.from_plain(kept, whose)


def _file_set(step: int, own: Own) -> FileSet:
    return FileSet(step, {f"{f.part}/{f.path}": f.size for _, f in own})


def command_digest(command: Sequence[str]) -> str:
    """A digest that identifies a trainer's command: another command can save other files."""
    return hashlib.sha256("\0".join(command).encode("utf-8", "surrogateescape")).hexdigest()[:16]
