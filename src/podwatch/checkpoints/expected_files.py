"""The files that a save of this run must have, learned from the last complete checkpoints; and those that each complete
checkpoint had: one that is gone or smaller later is damage, in every layout (``Ledger``).

For trainers without a marker for the end of a save, and for files whose truncation cannot be seen (the old torch
format): a save is complete only when it has every file that the last two had, about as large. The rule is pure: data
in, data out; ``Expected`` connects it to the journal.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from podwatch.checkpoints.layout import PartFiles
from podwatch.checkpoints.reboot_check import Memory
from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.errors import HostError

KEPT = 2
"""Number of complete checkpoints compared. A file that only one of them has (an export, a best model) is not
required."""
TOLERANCE = 0.01
"""A file can be this much smaller: buffers and states of data loaders vary a little."""
SMALL = 64 * 1024
"""Bytes. Smaller files hold text and counters of varying length; they only must not be empty."""
_PLACES = 5
"""Maximum occurrences of the step number in a path that are considered."""
MOST_FILES = 20_000
"""Maximum number of files that are learned: more are too many for the journal."""


@dataclass(frozen=True, slots=True)
class FileSet:
    """The files of one complete checkpoint: ``<part>/<path>`` -> bytes."""

    step: int
    files: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Asked:
    """One file that a save must have: ``path`` as in the checkpoint of ``step``, with about ``size`` bytes or more."""

    path: str
    step: int
    size: int


def counterpart(path: str, step: int, files: Mapping[str, int], other: int) -> str | None:
    """The file of checkpoint ``other`` that corresponds to ``path`` of checkpoint ``step``: the same path, or the one
    with the step number replaced in some or all places, because a number in a name can also be a rank
    (``checkpoint_0/random_states_0.pkl``)."""
    if path in files:
        return path
    places = list(re.finditer(rf"(?<!\d)(0*){step}(?!\d)", path))[:_PLACES]
    for chosen in range(1, 1 << len(places)):
        renamed, end = "", 0
        for place, match in enumerate(places):
            number = _number(other, len(match.group(0)), match.group(1)) if chosen >> place & 1 else match.group(0)
            renamed, end = renamed + path[end : match.start()] + number, match.end()
        if renamed + path[end:] in files:
            return renamed + path[end:]
    return None


def _number(step: int, width: int, zeros: str) -> str:
    return f"{step:0{width}d}" if zeros else str(step)


def asked(known: Sequence[FileSet]) -> tuple[Asked, ...]:
    """The files that both the newest of ``known`` and the one before it have, each with the smaller of its sizes."""
    if not known:
        return ()
    newest, before = known[-1], known[-2] if len(known) > 1 else None
    found = []
    for path, size in sorted(newest.files.items()):
        same = path if before is None else counterpart(path, newest.step, before.files, before.step)
        if same is not None:
            found.append(Asked(path, newest.step, size if before is None else min(size, before.files[same])))
    return tuple(found)


def lacking(new: FileSet, known: Sequence[FileSet]) -> str:
    """What ``new`` lacks compared with the checkpoints saved before it; empty if nothing.

    Against checkpoints of later steps (podwatch was restarted and reads an old one) only names are compared: buffers
    grow.
    """
    before = [k for k in known if k.step < new.step]
    others = before or [k for k in known if k.step > new.step]
    missing, smaller = [], []
    for want in asked(others):
        path = counterpart(want.path, want.step, new.files, new.step)
        if path is None:
            missing.append(want)
        elif before and _too_small(new.files[path], want.size):
            smaller.append((path, new.files[path], want))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"{missing[0].path} of step {missing[0].step} has no counterpart in this checkpoint{more}"
    if smaller:
        path, size, want = smaller[0]
        more = f", and {len(smaller) - 1} more are too small" if len(smaller) > 1 else ""
        return f"{path} has {size} bytes, in step {want.step} it had {want.size}{more}"
    return ""


def _too_small(size: int, want: int) -> bool:
    return size == 0 < want if want < SMALL else size < want * (1 - TOLERANCE)


def agree(one: FileSet, other: FileSet) -> bool:
    """Whether both have the same files, about as large. Two saves that agree are not both interrupted: the trainer now
    saves other files."""
    if len(one.files) != len(other.files):
        return False
    for path, size in one.files.items():
        same = counterpart(path, one.step, other.files, other.step)
        if same is None or _too_small(other.files[same], size) or _too_small(size, other.files[same]):
            return False
    return True


def remember(known: Sequence[FileSet], new: FileSet) -> tuple[FileSet, ...]:
    """The list with ``new`` added as the latest; the one before it stays."""
    if len(new.files) > MOST_FILES:
        return tuple(known)
    return (*(k for k in known if k.step != new.step), new)[-KEPT:]


def to_plain(known: Sequence[FileSet], whose: str) -> dict[str, Any]:
    """JSON form for the journal. ``whose`` identifies run, layout and lineage."""
    return {"whose": whose, "sets": [{"step": k.step, "files": dict(k.files)} for k in known]}


def from_plain(data: object, whose: str) -> tuple[FileSet, ...]:
    """The inverse. Entries that are invalid or not of ``whose`` are dropped: learning again only costs a save."""
    try:
        if not isinstance(data, dict) or data["whose"] != whose:
            return ()
        found = tuple(
            FileSet(int(s["step"]), {str(p): int(n) for p, n in s["files"].items()}) for s in data["sets"][-KEPT:]
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return ()
    return found


# -- file sets of one run, kept in the journal -----------------------------------------------------------------------

KEY = "checkpoints.files"
Own = Sequence[tuple[PartFiles, FileEntry]]


class Expected:
    """``whose`` identifies the layout and the trainer's command: when it changes, all is forgotten."""

    def __init__(self, memory: Memory, whose: str) -> None:
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
        reason = lacking(new, self._sets)
        if not reason or not settled:
            return reason
        other, self._refused = self._refused, new
        if other is None or other.step == step or not agree(new, other):
            if other is not None and other.step == step:
                self._refused = other
            return reason
        self._sets, self._refused, self._dirty = tuple(sorted((other, new), key=lambda s: s.step)), None, True
        self._again.append(other.step)
        return ""

    def note(self, step: int, own: Own) -> None:
        """Record the files of a complete checkpoint."""
        self._load()
        sets = remember(self._sets, _file_set(step, own))
        self._dirty = self._dirty or sets != self._sets
        self._sets = sets

    def save(self) -> tuple[int, ...]:
        """Save what is new. Returns the steps that were refused by a rule that no longer holds."""
        again, self._again = tuple(self._again), []
        if self._dirty:
            self._memory.learn(KEY, to_plain(self._sets, self._for or ""))
            self._dirty = False
        return again

    def _load(self) -> None:
        whose = self._whose
        if whose != self._for:
            self._for, self._refused, self._dirty = whose, None, False
            try:
                kept = self._memory.learned(KEY, None)
            except HostError:
                kept = None  # learning again only costs a save
            self._sets = from_plain(kept, whose)


def _file_set(step: int, own: Own) -> FileSet:
    return FileSet(step, {f"{f.part}/{f.path}": f.size for _, f in own})


def command_digest(command: Sequence[str]) -> str:
    """A digest that identifies a trainer's command: another command can save other files."""
    return hashlib.sha256("\0".join(command).encode("utf-8", "surrogateescape")).hexdigest()[:16]


# -- files that complete checkpoints had -------------------------------------------------------------------------------

LEDGER_KEY = "checkpoints.ledger"
"""Journal key: {step: {"part/path": [size, mtime_ns]}} of the checkpoints that were complete."""
LEDGER_KEPT = 32
"""Number of checkpoints kept, the highest steps: those that a resume or a publication can still use."""

Files = Mapping[str, tuple[int, int]]


class Ledger:
    """Loaded at the first use, written by ``save``."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._sets: dict[int, Files] | None = None
        self._dirty = False

    def lost(self, step: int, own: Own) -> str:
        """What the complete checkpoint of this step had and lacks now, in words; empty where nothing is lost.

        Another save of the same step is no loss: all its files differ.
        """
        before = self._load().get(step)
        if not before:
            return ""
        now = _files(own)
        if not any(now.get(name) == file for name, file in before.items()):
            return ""
        gone = sorted(name for name in before if name not in now)
        smaller = sorted(name for name, (size, _) in before.items() if name in now and now[name][0] < size)
        for names, what in ((gone, "is gone"), (smaller, "is smaller than it was")):
            if names:
                more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
                return f"was complete, but now {PurePosixPath(names[0]).name} {what}{more}"
        return ""

    def complete(self) -> Mapping[int, Files]:
        """Step -> ``part/path`` -> (size, mtime_ns) of the files that it had when it was complete."""
        return self._load()

    def left_of(self, step: int, own: Own) -> bool:
        """Whether ``own`` are some files, unchanged, of the checkpoint of this step that was complete, or none."""
        before = self._load().get(step)
        return bool(before) and _files(own).items() <= dict(before or {}).items()

    def note(self, step: int, own: Own) -> None:
        """Record that the checkpoint is complete as it is now."""
        sets, files = self._load(), _files(own)
        if sets.get(step) != files:
            sets[step] = files
            for old in sorted(sets)[:-LEDGER_KEPT]:
                del sets[old]
            self._dirty = True

    def save(self, there: Sequence[int]) -> None:
        """Save what is new, for the steps that are ``there``."""
        sets = self._load()
        for step in set(sets) - set(there):
            del sets[step]
            self._dirty = True
        if self._dirty:
            self._memory.learn(
                LEDGER_KEY, {str(s): {n: list(f) for n, f in files.items()} for s, files in sets.items()}
            )
            self._dirty = False

    def _load(self) -> dict[int, Files]:
        if self._sets is None:
            self._sets = _ledger_from_plain(self._memory.learned(LEDGER_KEY, {}))
        return self._sets


def _files(own: Own) -> Files:
    return {f"{file.part}/{file.path}": (file.size, file.mtime_ns) for _, file in own}


def _ledger_from_plain(kept: Any) -> dict[int, Files]:
    """The inverse of the saved form. Invalid entries are dropped: then only the layout's rule judges."""
    try:
        return {
            int(step): {str(name): (int(size), int(mtime)) for name, (size, mtime) in files.items()}
            for step, files in kept.items()
        }
    except (AttributeError, TypeError, ValueError):
        return {}
