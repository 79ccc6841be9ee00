"""Checkpoints that are spread over the disks of several nodes (docs/nodes.md): each node lists its own disk
(``NodeLister``), and node 0 judges the files of all nodes together (``joined``).
"""

import errno
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from podwatch.checkpoints.checkpoint_identity import fingerprint
from podwatch.checkpoints.formats import dcp, sandbox, torch_zip
from podwatch.checkpoints.formats.files import HOLE_FROM, check_file, has_hole
from podwatch.checkpoints.layouts.base import Layout, PartDir
from podwatch.checkpoints.scan import Scan, is_temporary, scan_part, without_linked
from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.node_files import MOST_FILES, NodeStep
from podwatch.system.clock import Clock

# -- node 0: the files of all nodes together ---------------------------------------------------------------------------


class OtherNodes(Protocol):
    """What node 0 knows of the checkpoints on the other nodes' disks. Asked in any thread."""

    def unknown(self) -> str:
        """Why not every node's disk is known; empty if it is."""
        ...

    def steps(self, step: int) -> Sequence[NodeStep]:
        """What each other node has of this step, by rank."""
        ...

    def mark(self) -> int:
        """A look at a disk that begins from now on carries a higher number."""
        ...

    def looked(self) -> int:
        """The number that the lists of all other nodes carry at least."""
        ...


def joined(scans: Sequence[Scan], others: Sequence[NodeStep]) -> tuple[list[Scan], str]:
    """The scans of one step with the files of the other nodes added, and why they do not fit together (empty if they
    do). A file that several nodes have with the same size and time is one file: a restore puts it on each."""
    known = {(f.part, f.path): f for scan in scans for f in scan.found.files}
    parts = {scan.found.part.name for scan in scans}
    added: dict[str, list[FileEntry]] = {}
    problem = ""
    for file in (f for other in others for f in other.files):
        where = f"{file.part}/{file.path}"
        same = known.get((file.part, file.path))
        if file.part not in parts:
            problem = problem or f"node {file.node} has {where}, which is no part of this checkpoint here"
        elif same is None:
            known[file.part, file.path] = file
            added.setdefault(file.part, []).append(file)
        elif (same.size, same.mtime_ns) != (file.size, file.mtime_ns):
            problem = problem or f"{where} differs between node {same.node or 0} and node {file.node}"
    return [_with(scan, added.get(scan.found.part.name, ())) for scan in scans], problem


def _with(scan: Scan, added: Collection[FileEntry]) -> Scan:
    if not added:
        return scan
    files = tuple(sorted((*scan.found.files, *added), key=lambda f: f.path))
    return replace(scan, found=replace(scan.found, present=True, files=files))


def alike(before: Sequence[NodeStep], now: Sequence[NodeStep]) -> bool:
    """Whether the nodes have found nothing else wrong with the same files: a node that is started again checks them
    again."""
    return [s.problems for s in before] == [s.problems for s in now] or any(not s.settled for s in now)


def still_written(others: Sequence[NodeStep], nodes: Sequence[int]) -> str:
    """Which node's files have not settled; empty if all have. ``nodes``: the rank of each."""
    busy = next((rank for rank, other in zip(nodes, others, strict=True) if not other.settled), None)
    return "" if busy is None else f"node {busy} is writing files of it, or has not checked them yet"


# -- each other node: its own disk -------------------------------------------------------------------------------------

CHECK_SECONDS = 10.0
"""Spent on checks of files in one look: a look that lasts longer shows node 0 a disk that does not answer."""


@dataclass(slots=True)
class _Tracked:
    fingerprint: bytes
    since: float
    polls: int = 1
    checked: dict[FileEntry, FileEntry] = field(default_factory=dict)
    """With what is wrong with each, once nothing changed for ``settle``."""
    step: NodeStep | None = None
    """Once all of them are checked."""
    odd: bool = False
    """Its files look sound, but one has ranges that were never written, or no end to check."""


class NodeLister:
    """Lists the checkpoints on this node's disk. Blocks; one thread at a time. ``settle``: seconds without a change
    after which a step has settled; ``settle_weak``: the same where a file looks as if it were still being written."""

    def __init__(self, layout: Layout, roots: Sequence[Path], clock: Clock, settle: float, settle_weak: float) -> None:
        self._layout, self._roots, self._clock = layout, roots, clock
        self._settle, self._settle_weak = settle, settle_weak
        self._tracked: dict[int, _Tracked] = {}
        self._until = 0.0
        """When this look stops to check files; the next one continues."""

    def look(self) -> tuple[NodeStep, ...]:
        """Raises OSError where the disk cannot be read whole."""
        self._until = self._clock.monotonic() + CHECK_SECONDS
        steps, _, _ = without_linked(self._layout, self._roots, self._layout.steps())
        found = {step: self._step(step, steps[step]) for step in sorted(steps)}
        self._tracked = {step: tracked for step, tracked in self._tracked.items() if step in found}
        if sum(len(one.files) for one in found.values()) > MOST_FILES:
            raise OSError(errno.EFBIG, f"more than {MOST_FILES} files", str(self._layout.output_dir))
        return tuple(found.values())

    def _step(self, step: int, parts: Sequence[PartDir]) -> NodeStep:
        scans = [scan_part(p, self._roots) for p in parts if p.required or p.uploaded]
        if error := next((s.error for s in scans if s.error), ""):
            raise OSError(errno.EIO, error, str(self._layout.output_dir))
        now, mark = self._clock.monotonic(), fingerprint([s.found for s in scans])
        tracked = self._tracked.get(step)
        if tracked is None or tracked.fingerprint != mark:
            tracked = self._tracked[step] = _Tracked(mark, now)
        else:
            tracked.polls += 1
        changed = max((s.changed_ns for s in scans), default=0) / 1e9
        quiet = max(now - tracked.since, self._clock.wall() - changed)
        if tracked.step is None:
            files = tuple(sorted(f for s in scans for f in s.found.files if not is_temporary(f.path)))
            if tracked.polls < 2 or quiet < self._settle:
                return NodeStep(step, files)
            roots = {s.found.part.name: s.found.part.path for s in scans}
            if not self._check(files, roots, tracked.checked):
                return NodeStep(step, files)
            tracked.step = NodeStep(step, tuple(tracked.checked[f] for f in files), settled=True)
            sound = not any(f.problem for f in tracked.step.files)
            tracked.odd = sound and any(_odd(f, roots[f.part] / f.path) for f in files)
        if tracked.odd and quiet < self._settle_weak:
            return replace(tracked.step, settled=False)
        return tracked.step

    def _check(self, files: Sequence[FileEntry], roots: Mapping[str, Path], known: dict[FileEntry, FileEntry]) -> bool:
        """Check the files that are not in ``known``, and add them; false if this look has no time left for all."""
        with sandbox.session():
            for file in files:
                if file in known:
                    continue
                if self._clock.monotonic() > self._until:
                    return False
                known[file] = _checked(file, roots[file.part])
        return True


def _odd(file: FileEntry, path: Path) -> bool:
    """As ``completeness_check.find_odd`` does for the files of node 0."""
    try:
        hole = file.size >= HOLE_FROM and has_hole(path)
        return hole or (torch_zip.is_torch_name(path.name) and torch_zip.is_legacy(path))
    except OSError:
        return False  # its check says why


def _checked(file: FileEntry, root: Path) -> FileEntry:
    path = root / file.path
    try:
        return replace(file, problem=dcp.check_shard(path) if dcp.is_shard(path.name) else check_file(path))
    except OSError as error:
        return replace(file, problem=f"cannot be read: {error.strerror}")
