"""Helpers for completeness rules: each reads one fact about one part of one step; and reads the tracker files that name
a trainer's newest checkpoint (write_trackers.py writes them).

A rule raises ``Fault`` with the exact reason; ``judged`` converts it into a ``Judgement``. Nothing here reads a whole
file, only markers, headers and tails.
"""

import errno
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from podwatch.checkpoints.formats import dcp, safetensors, torch_zip
from podwatch.checkpoints.formats.files import check_file, has_hole
from podwatch.checkpoints.layouts.base import Judgement, PartFiles, Tracker
from podwatch.checkpoints.scan import is_temporary
from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.finding import counted
from podwatch.system.files import read_file

_TEXT_LIMIT = 1 << 20
"""Maximum bytes of markers and small JSON files."""


class Fault(Exception):  # noqa: N818 - internal, never shown as an error
    """Why a step is not complete. ``damaged``: nothing is missing, but a file is broken. ``pending``: not started
    yet."""

    def __init__(
        self, reason: str, *, damaged: bool = False, unreadable: bool = False, pending: bool = False, part: str = ""
    ) -> None:
        self.reason, self.damaged, self.unreadable = reason, damaged, unreadable
        self.pending, self.part = pending, part
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Inside:
    """Files below ``path``; names are POSIX and relative to it. Temporary files are not among them."""

    path: Path
    files: Mapping[str, FileEntry]
    part: str = ""
    present: bool = True
    prefix: str = ""
    """Prefix for names in messages."""

    @classmethod
    def of(cls, part: PartFiles) -> "Inside":
        files = {f.path: f for f in part.files if not is_temporary(f.path)}
        return cls(part.part.path, files, part.part.name, part.present)

    def fault(self, reason: str, *, damaged: bool = False, unreadable: bool = False, pending: bool = False) -> Fault:
        """A ``Fault`` with the place of the problem."""
        where = self.prefix.rstrip("/")
        return Fault(
            f"{where}: {reason}" if where else reason,
            damaged=damaged,
            unreadable=unreadable,
            pending=pending,
            part=self.part,
        )

    # -- what is there ------------------------------------------------------------------------------------------------

    def below(self, folder: str) -> "Inside":
        """The same for a directory inside; empty if there is none."""
        lead = folder + "/"
        files = {n.removeprefix(lead): f for n, f in self.files.items() if n.startswith(lead)}
        return Inside(self.path / folder, files, self.part, bool(files), self.prefix + lead)

    def folders(self, pattern: str | re.Pattern[str] = "") -> tuple[str, ...]:
        """Names of the directories directly inside that contain files and match from their start."""
        tops = {n.split("/", 1)[0] for n in self.files if "/" in n}
        return tuple(sorted(t for t in tops if re.match(pattern, t)))

    def names(self, pattern: str | re.Pattern[str]) -> tuple[str, ...]:
        """File names, whole relative paths, that the expression matches fully."""
        return tuple(sorted(n for n in self.files if re.fullmatch(pattern, n)))

    def matches(self, pattern: str | re.Pattern[str]) -> list[re.Match[str]]:
        return [m for n in sorted(self.files) if (m := re.fullmatch(pattern, n)) is not None]

    def require(self, *names: str, why: str = "") -> None:
        for name in names:
            if name not in self.files:
                raise self.fault(f"{name} is missing" + (f": {why}" if why else ""))

    def text(self, name: str) -> str:
        """The content of a small text file, stripped. ``Fault`` if it is missing, too large or not text."""
        self.require(name)
        try:
            if self.files[name].size > _TEXT_LIMIT:
                raise self.fault(f"{name} is larger than any such file", damaged=True)
            return read_file(self.path / name, _TEXT_LIMIT).decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise self.fault(f"{name} is not text: it is being written or was truncated", damaged=True) from error

    def json(self, name: str) -> Any:
        self.require(name)
        if self.files[name].size > 64 * _TEXT_LIMIT:
            raise self.fault(f"{name} is larger than any such file", damaged=True)
        try:
            return json.loads(read_file(self.path / name, 64 * _TEXT_LIMIT))
        except (ValueError, RecursionError) as error:
            raise self.fault(f"{name} cannot be parsed: it is being written or was truncated", damaged=True) from error

    def values(self, name: str) -> Mapping[str, object]:
        """Small values in a torch file (``{"a.b": 5}``), read without any import; empty if it has none."""
        self.require(name)
        return torch_zip.read_values(self.path / name) or {}

    def number(self, name: str, *keys: str) -> int | None:
        """The first of ``keys`` that is a whole number in a torch file."""
        found = self.values(name)
        for key in keys:
            value = found.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None

    # -- rules --------------------------------------------------------------------------------------------------------

    def written_last(self, name: str, data: str | re.Pattern[str] = r".*") -> None:
        """Require that ``name`` exists and is not older than the files that ``data`` matches: an old marker survives a
        save over an existing directory, and a kill during it."""
        self.require(name, why="it is written last")
        limit = self.files[name].mtime_ns + dcp.MTIME_TOLERANCE_NS
        newer = [n for n, f in self.files.items() if f.mtime_ns > limit and re.fullmatch(data, n)]
        if newer:
            raise self.fault(f"{min(newer)} is newer than {name}: being overwritten, or an overwrite was interrupted")

    def dcp(self) -> dcp.DcpVerdict:
        """Apply the DCP rule to this directory; ``Fault`` unless it is complete."""
        verdict = dcp.check(self.path, {n: dcp.Shard(f.size, f.mtime_ns) for n, f in self.files.items()})
        if not verdict.whole:
            raise self.fault(verdict.reason, damaged=verdict.damaged, unreadable=verdict.unreadable)
        return verdict

    def ranks(self, pattern: str | re.Pattern[str], size: int | None, what: str) -> int:
        """Require one file per rank 0..size-1, the rank being the expression's first group; without ``size``, no gap
        below the highest. Returns the number of files."""
        found = {int(m.group(1)) for m in self.matches(pattern)}
        if not found:
            raise self.fault(f"no {what}")
        missing = set(range(size if size is not None else max(found) + 1)) - found
        if missing:
            raise self.fault(f"{what} of rank {min(missing)} is missing")
        return size if size is not None else max(found) + 1

    def hf_weights(self) -> bool:
        """Require that weights in the Hugging Face form are complete; False if there are none at all."""
        for name in (*SINGLE_WEIGHTS, *WEIGHT_INDEXES):
            if name in self.files:
                if name in WEIGHT_INDEXES:
                    self._sharded(name)
                return True
        if self.names(_WEIGHT_SHARD):
            raise self.fault("the weights' index is missing")
        return False

    def _sharded(self, name: str) -> None:
        index = safetensors.read_index(self.path / name)
        if index.problem:
            raise self.fault(f"{name} {index.problem}", damaged=True)
        self.require(*sorted(index.shards))
        if name.endswith(".safetensors.index.json"):
            headers = [safetensors.read_header(self.path / s) for s in sorted(index.shards)]
            missing = safetensors.missing_tensors(index, headers)
            if missing and not any(h.problem for h in headers):
                raise self.fault(
                    f"{counted(len(missing), 'tensor')} of {name} not found in any shard (a stale index?)", damaged=True
                )

    def problem_of(self, name: str) -> str:
        """What is wrong with header or tail of a file of a known kind; empty if nothing is."""
        return check_file(self.path / name)

    def sound(self, but: str | re.Pattern[str] = r"(?!)") -> None:
        """Check header and tail of every file of a known kind, except those that ``but`` matches. DCP shards are
        checked by their index."""
        for name in sorted(self.files):
            if name.endswith(".distcp") or re.fullmatch(but, name):
                continue
            if problem := self.problem_of(name):
                raise self.fault(f"{name} {problem}", damaged=True)

    def has_holes(self) -> bool:
        """Whether a file has ranges that were never written: the header of a preallocated file looks complete."""
        named = (n for n in self.files if n.endswith((".safetensors", ".bin", ".pt")))
        return any(has_hole(self.path / name) for name in named)


SINGLE_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
WEIGHT_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHT_SHARD = re.compile(r"(?:model|pytorch_model)-\d{5}-of-\d{5}\.(?:safetensors|bin)")

Siblings = Callable[[], Sequence[Path]]


@dataclass(frozen=True, slots=True)
class StepView:
    """One step as the input of its rule. ``root`` contains the step directories."""

    step: int
    root: Path
    parts: Mapping[str, Inside]
    siblings: Siblings = tuple
    """A few other steps' directories, newest first: this step should have the same files."""

    @property
    def only(self) -> Inside:
        """The single part of layouts that have one part."""
        return next(iter(self.parts.values()))

    def alone(self, others: Iterable[str]) -> None:
        """``Fault`` if ``others``, names of the same step, exist: only one could be stored, and both would be removed
        with the step."""
        name = self.only.prefix.rstrip("/") or self.only.path.name
        twins = sorted(n for n in others if n != name)
        if twins:
            raise Fault(
                f"{twins[0]} is step {self.step} too, beside {name}: move one of them away, or use layout custom",
                unreadable=True,
            )

    def begun(self) -> None:
        if not any(p.files for p in self.parts.values()):
            raise Fault("the directory is empty", part=next(iter(self.parts)))


Rule = Callable[[StepView], Judgement]
"""A completeness rule; can raise ``Fault``."""


def judged(rule: Rule, view: StepView, rests_on: Iterable[Path] = ()) -> Judgement:
    """Apply a rule; every ``Fault`` and disk error becomes a ``Judgement``."""
    outside = tuple(rests_on)
    try:
        view.begun()
        verdict = rule(view)
    except Fault as fault:
        return Judgement(
            False,
            fault.reason,
            damaged=fault.damaged,
            unreadable=fault.unreadable,
            pending=fault.pending,
            problems={fault.part: fault.reason} if fault.part else {},
            rests_on=outside,
        )
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            return Judgement(False, "a file vanished while podwatch read it", rests_on=outside)
        return Judgement(False, f"cannot be read: {error.strerror}", unreadable=True, rests_on=outside)
    return replace(verdict, rests_on=outside) if outside else verdict


# -- tracker files ---------------------------------------------------------------------------------------------------
# Small files in the parent by which a trainer finds its newest checkpoint. Most trainers write them by a plain open
# and write, so an empty or garbled tracker is being written: it never means step 0.

TRACKER_LIMIT = 4096
_NUMBER = re.compile(r"(?:0|[1-9][0-9]{0,17})")


def text(path: Path) -> str:
    """The content without white space of ASCII around it (``str.strip`` takes control characters for white space, too);
    empty if the file is absent, empty, too large or not text (being written). OSError: it cannot be read."""
    try:
        return read_file(path, TRACKER_LIMIT).strip().decode()
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return ""
    except OSError as error:
        if error.errno in (errno.EFBIG, errno.EINVAL, errno.ELOOP):
            return ""
        raise


def number(path: Path, pattern: re.Pattern[str] = _NUMBER) -> int | None:
    """The step that the tracker names; None if it names none."""
    match = pattern.fullmatch(text(path))
    if match is None:
        return None
    return int(match.group(match.lastindex or 0))


def has_later(view: StepView, pattern: re.Pattern[str]) -> bool:
    """Whether a later step exists. ``pattern`` is that of the step directories."""
    found = (pattern.fullmatch(p.name) for p in view.siblings())
    return any(int(m.group(1)) > view.step for m in found if m is not None)


def reached(
    tracker: Path,
    step: int,
    part: Inside,
    pattern: re.Pattern[str] = _NUMBER,
    data: str | re.Pattern[str] = r"(?!)",
    *,
    later: bool = False,
) -> None:
    """Require that the tracker shows ``step`` as done; ``Fault`` while it does not. Files that ``data`` matches must
    not be newer than a tracker that names this step: an old tracker remains while the step is written again.

    A tracker that names a lower step but was written after this checkpoint (by a repair, or by a run that went back) is
    no evidence about it: then only the checkpoint's own files count.

    ``later``: a later step exists, so this save ended long before the tracker was opened again. If that left it empty,
    garbled or missing (a kill at the wrong moment), the later step is in doubt, not this one.
    """
    try:
        status = tracker.stat()
    except (FileNotFoundError, NotADirectoryError):
        if later:
            return
        raise Fault(f"{tracker.name} is missing: it is written last", part=part.part) from None
    said = number(tracker, pattern)
    if said is None:
        if later:
            return
        raise Fault(f"{tracker.name} is empty or garbled: it is being written", part=part.part)
    newest = max((f.mtime_ns for n, f in part.files.items() if said < step or re.fullmatch(data, n)), default=0)
    if said >= step:
        if said == step and newest > status.st_mtime_ns + dcp.MTIME_TOLERANCE_NS:
            raise Fault(
                f"files are newer than {tracker.name}: being overwritten, or an overwrite was interrupted",
                part=part.part,
            )
        return
    if status.st_mtime_ns <= newest + dcp.MTIME_TOLERANCE_NS:
        raise Fault(f"{tracker.name} names step {said}: the save of step {step} has not finished", part=part.part)


def as_number(path: Path, step: int | None) -> tuple[Tracker, ...]:
    """The tracker for a start from ``step``: its number as text, as all trainers write it."""
    return () if step is None else (Tracker(path, content=str(step).encode()),)


def pinned(path: Path, pattern: re.Pattern[str] = _NUMBER) -> Mapping[int, str]:
    """The step a tracker names, with its name as the reason."""
    try:
        step = number(path, pattern)
    except OSError:
        return {}
    return {} if step is None else {step: f"named by {path.name}"}


def link_target(path: Path) -> str:
    """The last segment of a symlink's target; empty if it is no symlink. Only a hint: replacing a link leaves a gap."""
    try:
        return os.path.basename(os.readlink(path))  # noqa: PTH115, PTH119 - the text, not a resolved path
    except OSError:
        return ""
