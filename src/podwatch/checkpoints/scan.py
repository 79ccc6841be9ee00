"""Reads checkpoint directories: the files of one part, its harmless symlinks, when it last changed. Follows no
symlink.
"""

import os
import posixpath
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from podwatch.checkpoints.shapes import PartDir, PartFiles
from podwatch.domain.checkpoint import FileEntry, SymlinkEntry
from podwatch.system.pinned_directories import PinnedTree, RootReplaced

if TYPE_CHECKING:
    from podwatch.checkpoints.layout import Layout

# -- the path to a checkpoint ------------------------------------------------------------------------------------------
# From its configured root down, no segment may be a symbolic link (promise 9): the target of a link can belong to
# another user or another run. To keep checkpoints on another volume, configure that volume as
# ``trainer.checkpoint_dir`` instead of linking it.


def first_link(path: Path, roots: Sequence[Path]) -> Path | None:
    """The first symbolic link on the way from the innermost root to ``path``, including ``path``. None also where
    ``path`` is in no root or does not exist."""
    inside = [root for root in roots if root in path.parents]
    if not inside:
        return None
    here = max(inside, key=lambda root: len(root.parts))
    for name in path.relative_to(here).parts:
        here = here / name
        try:
            if stat.S_ISLNK(os.lstat(here).st_mode):
                return here
        except OSError:
            return None
    return None


def without_linked(
    layout: "Layout", roots: Sequence[Path], steps: Mapping[int, tuple[PartDir, ...]]
) -> tuple[Mapping[int, tuple[PartDir, ...]], tuple[Path, ...], frozenset[int]]:
    """``steps`` without those that have a required part behind a link; all links; and the steps left out."""
    links = tuple(dict.fromkeys(x for x in (first_link(r, roots) for r in layout.watch_roots()) if x is not None))
    if not links:
        return steps, (), frozenset()
    behind = frozenset(s for s in steps for p in steps[s] if p.required and any(_under(p.path, link) for link in links))
    return {s: steps[s] for s in steps if s not in behind}, links, behind


_STEP_NAMED = re.compile(
    r"(?i)(?:.*[^a-z])?(?:step|checkpoint|ckpt|iter|iteration|epoch|state)s?[-_=.]?([0-9]{1,18})(?:[-_.][^0-9]*)?"
    r"|([0-9]{1,18})"
)
"""A name that is a step's in some layout."""


def linked_out(layout: "Layout", roots: Sequence[Path]) -> Mapping[int, Path]:
    """Step -> a link with a step's name that leads out of the roots, or nowhere: a checkpoint that was moved to another
    disk. Blocks."""
    real = [Path(os.path.realpath(root)) for root in roots]
    found: dict[int, Path] = {}
    for place in dict.fromkeys(layout.watch_roots()):
        try:
            with os.scandir(place) as entries:
                links = [(m, e.path) for e in entries if (m := _STEP_NAMED.fullmatch(e.name)) and e.is_symlink()]
        except OSError:
            continue
        for match, path in links:
            if not any(_under(Path(os.path.realpath(path)), root) for root in real):
                found[int(match[1] or match[2])] = Path(path)
    return found


def _under(path: Path, link: Path) -> bool:
    return path == link or link in path.parents


def replaced(tree: PinnedTree | None) -> str:
    """The reason why the configured directories are not the pinned ones; empty if they are, or do not exist yet."""
    for root in tree.roots if tree is not None else ():
        try:
            with tree.directory(root):  # type: ignore[union-attr]
                continue
        except RootReplaced as error:
            return str(error)
        except OSError:
            continue
    return ""


# -- the files of one part ---------------------------------------------------------------------------------------------

MAX_DEPTH = 32
"""Maximum depth. No trainer nests deeper; a scan that reaches it is incomplete."""
_TEMPORARY = re.compile(r"^\.tmp\w{6}$|\.tmp$")
"""safetensors 0.8 leaves ``.tmpXXXXXX`` files of full size behind when killed."""
_BESIDE = re.compile(r"^\.nfs[0-9a-f]{16,}$|^events\.out\.tfevents\.")
"""Never part of a save: files that NFS keeps while a removed file is still open, and TensorBoard's logs, which grow as
long as training runs: a checkpoint that contains them would never settle."""


@dataclass(frozen=True, slots=True)
class Scan:
    """``directories`` are (path, mtime_ns, inode) of every scanned directory: while these stay the same, no entry was
    added, removed or renamed. ``changed_ns`` is the newest ctime, which copies cannot set back. ``error``: not
    everything could be read. ``outside``: a link on the way to it, or one in it that leads out, which podwatch does not
    follow."""

    found: PartFiles
    directories: tuple[tuple[str, int, int], ...] = ()
    changed_ns: int = 0
    error: str = ""
    outside: str = ""


def is_temporary(path: str) -> bool:
    """Whether this is a writer's unfinished file: it shows that a save is under way, and never belongs to a
    checkpoint."""
    return _TEMPORARY.search(posixpath.basename(path)) is not None


def scan_part(part: PartDir, roots: Sequence[Path] = ()) -> Scan:
    """Read one part's tree. A directory that is absent or vanishes gives ``present=False``; so does a link, or one
    behind a link."""
    link = first_link(part.path.parent if part.names else part.path, roots)
    if link is not None:
        return Scan(PartFiles(part, present=False), outside=str(link))
    try:
        # A directory shared by many steps is the output directory or inside it, and that can be a link.
        status = (part.path.stat if part.names else part.path.lstat)()
    except (FileNotFoundError, NotADirectoryError):
        return Scan(PartFiles(part, present=False))
    except OSError as error:
        return Scan(PartFiles(part, present=False), error=f"{part.name}: {error.strerror}")
    if not stat.S_ISDIR(status.st_mode):
        return Scan(PartFiles(part, present=False))
    walk = _Walk(part.name)
    if part.names:
        walk.pick(part.path, part.names)
    else:
        walk.enter(str(part.path), "", status, 0)
    present = bool(not part.names or walk.files or walk.directories)
    found = PartFiles(part, present, tuple(sorted(walk.files, key=_by_path)), tuple(sorted(walk.symlinks)))
    return Scan(found, tuple(walk.directories), walk.changed_ns, walk.error, walk.outside)


def _by_path(file: FileEntry) -> str:
    return file.path


class _Walk:
    def __init__(self, part: str) -> None:
        self.part = part
        self.files: list[FileEntry] = []
        self.symlinks: list[SymlinkEntry] = []
        self.directories: list[tuple[str, int, int]] = []
        self.changed_ns = 0
        self.error = self.outside = ""

    def enter(self, path: str, inside: str, status: os.stat_result, depth: int) -> None:
        self.directories.append((path, status.st_mtime_ns, status.st_ino))
        self.changed_ns = max(self.changed_ns, status.st_ctime_ns)
        try:
            with os.scandir(path) as entries:
                listed = list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self.error = self.error or f"{self.part}: {error.strerror}"
            return
        for entry in listed:
            try:
                self._look(entry, inside + entry.name, depth)
            except (FileNotFoundError, NotADirectoryError):
                continue  # gone since it was listed: the next rescan reads the rest
            except OSError as error:
                self.error = self.error or f"{self.part}: {error.strerror}"

    def pick(self, root: Path, names: Sequence[str]) -> None:
        """Scan only these entries. The directory around them changes with every other step, so its times are
        ignored."""
        for name in names:
            path = root / name
            try:
                status = os.lstat(path)
                if stat.S_ISDIR(status.st_mode):
                    self.enter(str(path), name + "/", status, 1)
                elif stat.S_ISREG(status.st_mode):
                    self._file(name, status)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                self.error = self.error or f"{self.part}: {error.strerror}"

    def _file(self, relative: str, status: os.stat_result) -> None:
        self.changed_ns = max(self.changed_ns, status.st_ctime_ns)
        self.files.append(
            FileEntry(
                relative,
                self.part,
                status.st_size,
                status.st_mtime_ns,
                status.st_mode & 0o7777,
                status.st_ino,
                status.st_dev,
            )
        )

    def _look(self, entry: "os.DirEntry[str]", relative: str, depth: int) -> None:
        if _BESIDE.match(entry.name):
            return
        if entry.is_symlink():
            target = Path(entry.path).readlink().as_posix()
            resolved = posixpath.normpath(posixpath.join(posixpath.dirname(relative), target))
            if not target.startswith("/") and resolved != ".." and not resolved.startswith("../"):
                self.symlinks.append(SymlinkEntry(relative, self.part, target))
            else:
                self.outside = self.outside or f"{self.part}/{relative}"
            return
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            if depth < MAX_DEPTH:
                self.enter(entry.path, relative + "/", status, depth + 1)
            else:
                self.error = self.error or f"{self.part}: directories are nested more than {MAX_DEPTH} deep"
        elif stat.S_ISREG(status.st_mode):
            self._file(relative, status)


# -- links beside the steps --------------------------------------------------------------------------------------------


def linked_steps(layout: "Layout") -> Mapping[int, str]:
    """Step -> the link that names it. Links directly in the layout's roots and in the output directory count. Blocks;
    links that vanish meanwhile, dangle or lead elsewhere are ignored."""
    targets: dict[str, str] = {}
    for root in dict.fromkeys((*layout.watch_roots(), layout.output_dir)):
        try:
            with os.scandir(root) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        targets[os.path.realpath(entry.path)] = entry.name
        except OSError:
            continue
    if not targets:
        return {}
    places: dict[Path, set[int]] = {}
    for step, parts in layout.steps().items():
        for part in parts:
            real = Path(os.path.realpath(part.path / part.names[0] if part.names else part.path))
            for path in (real, real.parent):  # of a step with several parts this is its own directory
                places.setdefault(path, set()).add(step)
    roots = {Path(os.path.realpath(root)) for root in (*layout.watch_roots(), layout.output_dir)}
    own = {path: min(steps) for path, steps in places.items() if len(steps) == 1 and path not in roots}
    found: dict[int, str] = {}
    for target, name in targets.items():
        # the link can name the step, or something in it
        step_of = next((own[path] for path in (Path(target), *Path(target).parents) if path in own), None)
        if step_of is not None:
            found[step_of] = f"the symlink {name}"
    return found
