"""podwatch's own directories: the one beside the output directory (record, quarantine, trash, staging; promise 8), and
those that no other user can write to, or even enter.
"""

import contextlib
import os
import secrets
import shlex
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from podwatch.domain.errors import HostError, PermissionDenied
from podwatch.system.open_by_descriptor import NODES
from podwatch.system.pinned_directories import HIDDEN, USER, PinnedTree, RootReplaced

_NAMED = 20
"""Paths in one command."""


@dataclass(slots=True)
class Workspace:
    """``<parent>/.podwatch/<name of output_dir>/``: outside the trainer's directory, on the same filesystem.

    ``use_inside``: quarantine, trash and staging are in ``output_dir/.podwatch`` instead, because a rename to
    ``outside`` fails (output_dir is a mount of its own, or an overlay's lower layer): found out by trying, never by
    comparing devices. ``beside`` are the trainer's other configured directories (``trainer.checkpoint_dir``).
    ``owner`` is the uid that training runs as; None: podwatch's own, or unknown. ``node``: the rank of this node where
    several share output_dir; each but rank 0 has directories of its own in it.

    ``tree`` is the only way to change anything in these directories. One for each process and run.
    """

    output_dir: Path
    use_inside: bool = False
    beside: tuple[Path, ...] = ()
    owner: int | None = None
    node: int = 0
    tree: PinnedTree = field(default=None, compare=False, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if getattr(self, "tree", None) is None:
            self.tree = PinnedTree(self.roots, owner=self.owner)

    @property
    def roots(self) -> tuple[Path, ...]:
        """The trainer's directories."""
        return tuple(dict.fromkeys((self.output_dir, *self.beside)))

    def root_of(self, path: Path) -> Path | None:
        """The trainer's directory that contains ``path``, as written; the innermost one."""
        if not path.is_absolute():
            return None
        found = [r for r in self.roots if r in path.parents and ".." not in path.relative_to(r).parts]
        return max(found, key=lambda r: len(r.parts), default=None)

    def holds(self, path: Path) -> bool:
        """Below one of the trainer's directories, and in none of podwatch's: nothing else is ever moved (promise 9)."""
        root = self.root_of(path)
        return root is not None and HIDDEN not in path.relative_to(root).parts

    @property
    def shared(self) -> Path:
        """The directory of all nodes of this run."""
        return self.output_dir.parent / HIDDEN / self.output_dir.name

    @property
    def outside(self) -> Path:
        return self.shared / NODES / f"node-{self.node}" if self.node else self.shared

    @property
    def inside(self) -> Path:
        own = self.output_dir / HIDDEN
        return own / NODES / f"node-{self.node}" if self.node else own

    @property
    def movable(self) -> Path:
        """The one directory of the trainer's user: what podwatch moves out of the way, or makes for its place."""
        return self.inside if self.use_inside else self.outside / USER

    @property
    def run_copy(self) -> Path:
        """The copy of run.json."""
        return self.outside / "run.json"

    @property
    def records_copy(self) -> Path:
        """The copy of the records of checkpoints."""
        return self.outside / "records"

    @property
    def quarantine(self) -> Path:
        return self.movable / "quarantine"

    @property
    def trash(self) -> Path:
        return self.movable / "trash"

    @property
    def staging(self) -> Path:
        return self.movable / "staging"

    # -- permission to change -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises RootReplaced where podwatch must not change anything in these directories. Blocks."""
        self.tree.check()
        with contextlib.suppress(OSError), self.tree.directory(self.movable):
            return  # missing or unreachable: its user reports that

    def problem(self) -> str:
        """The same as text; empty where podwatch may change files. Blocks."""
        try:
            self.check()
        except RootReplaced as error:
            return str(error)
        return ""

    def foreign_owners(self, paths: Iterable[Path]) -> tuple[str, str]:
        """Which of these paths (and directories above them in a root) belong to a user other than the one with whose
        rights podwatch works there, as text, and the command that repairs it; both empty where none does. Blocks.

        Where no user is configured, training runs as podwatch's user: what is that user's is right, and the root's
        owner is not."""
        rights = self.tree.rights
        if rights is None:
            return "", ""
        found: dict[Path, int] = {}
        for path in paths:
            root = self.root_of(path)
            for one in (path, *path.parents) if root is not None else ():
                if one == root:
                    break
                with contextlib.suppress(OSError, HostError):
                    status = self.tree.lstat(one)
                    if status is not None and status.st_uid != rights.uid:
                        found[one] = status.st_uid
        if not found:
            return "", ""
        first = min(found, key=lambda p: (len(p.parts), p))
        text = (
            f"{first}{f' and {len(found) - 1} more' if len(found) > 1 else ''} belongs to user {found[first]}, and"
            f" podwatch works in {self.output_dir} as user {rights.uid}: it can neither read all of it nor move it"
        )
        if self.owner is None and found[first] == os.geteuid():
            return text, f"chown -R {os.geteuid()} {shlex.join(map(str, (*self.roots, self.movable)))}"
        tops = [p for p in found if not found.keys() & set(p.parents)]
        return text, f"chown -R {rights.uid} {shlex.join(map(str, sorted(tops)[:_NAMED]))}"

    def exposed(self) -> str:
        """Users who can move podwatch's own directory away, and the fix, as text; empty where only root or podwatch
        can. Normal where the training user owns the parent of output_dir. Blocks."""
        found = []
        for parent in dict.fromkeys(root.parent for root in self.roots):
            try:
                status = parent.stat()
            except OSError:
                continue
            sticky = status.st_mode & 0o1000
            if status.st_uid not in (0, os.geteuid()):
                found.append(f"user {status.st_uid} owns {parent}")
            elif status.st_mode & 0o022 and not sticky:
                found.append(f"other users can write to {parent}")
        if not found:
            return ""
        return (
            f"{' and '.join(found)}, so they can move podwatch's directory {HIDDEN} away. podwatch notices that,"
            " reports it as critical and changes nothing until it is back. To prevent it, put output_dir into a"
            " directory that root owns and no other user can write to"
        )

    # -- creating it --------------------------------------------------------------------------------------------------

    def probe(self) -> "Workspace":
        """Create the directories and find out whether a rename out of output_dir works; returns this workspace.

        Blocks. Where podwatch itself can create nothing beside output_dir and the trainer's user can in it (NFS gives
        root no rights), they are inside it, too. Where output_dir does not exist yet, its nearest existing ancestor is
        tried: a directory created below it is on the same filesystem, unless a volume is mounted there later, which the
        next probe sees. Everything is created now because mkdir fails on a full disk when rename and unlink still work.
        A replaced directory is left alone: ``problem`` has the reason, and nothing is changed. Raises HostError or
        PermissionDenied where the record's own directory cannot be created.
        """
        self.use_inside = False
        try:
            self.tree.make(self.outside, 0o755)
        except RootReplaced:
            return self
        except PermissionError as error:
            if self._makes_inside():
                return self
            raise PermissionDenied(
                "cannot create podwatch's directory beside the output directory",
                where=str(self.outside),
                fix="run podwatch as the owner of the parent directory, or create it for podwatch's user",
            ) from error
        except OSError as error:
            raise HostError(
                f"cannot create podwatch's directory beside the output directory: {error.strerror}",
                where=str(self.outside),
                fix="make the parent of output_dir writable (systemd: add it to ReadWritePaths)",
            ) from error
        try:
            self._make_users()
            self.use_inside = not self.tree.can_rename(self.output_dir, self.movable)
            self._make_users()
        except RootReplaced:
            return self
        except OSError:
            # No output_dir yet: below its parent, as podwatch's is, unless a mount is between. Or it cannot be written:
            # then "inside" could not work either.
            self.use_inside = False
        return self

    def _makes_inside(self) -> bool:
        self.use_inside = True
        try:
            self._make_users()
        except (OSError, HostError):
            self.use_inside = False
        return self.use_inside

    def _make_users(self) -> None:
        for directory in (self.quarantine, self.trash, self.staging):
            try:
                self.tree.make(directory)
            except OSError as error:
                raise HostError(
                    f"cannot create podwatch's trash, quarantine or staging directory: {error.strerror}",
                    where=str(directory),
                    fix="free some space or make it writable",
                ) from error


# -- directories of podwatch's own -----------------------------------------------------------------------------------
# No other user can write to them, or even enter. All functions block.


def own_directory(path: Path, mode: int, *, fix: str = "") -> None:
    """Create ``path`` with this mode, or remove all other permissions from an existing one.

    Raises PermissionDenied where it belongs to a user other than root and us, who could put anything there, and
    HostError where it cannot be made. A file system that shows one owner for everything (CIFS, some FUSE) is accepted.
    """
    try:
        if not path.is_dir():
            _make(path, mode)
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if found.st_uid not in (0, os.geteuid()) and not _shows_this_owner(descriptor, found.st_uid):
                raise PermissionDenied(
                    f"the directory belongs to uid {found.st_uid}, who could replace podwatch's files there",
                    where=str(path),
                    fix=f"run podwatch as that user, or: chown -R {os.geteuid()} {path}",
                )
            if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & ~mode & 0o077:
                with contextlib.suppress(OSError):  # a file system without modes
                    os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & (mode | ~0o077))
        finally:
            os.close(descriptor)
    except PermissionError as error:
        raise PermissionDenied("cannot create the directory", where=str(path), fix=fix) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise HostError(f"cannot create the directory, {reason}", where=str(path), fix=fix) from error


def _make(path: Path, mode: int) -> None:
    """Whatever the umask is: 0077 under systemd, where status needs no privilege; 0 in some containers."""
    if not path.parent.exists():
        _make(path.parent, 0o755)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode)
        path.chmod(mode)


def _shows_this_owner(directory: int, owner: int) -> bool:
    """Whether a file that we create in it belongs to ``owner`` too."""
    name = f".owner-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
    except OSError:
        return False
    try:
        return os.fstat(descriptor).st_uid == owner
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)
