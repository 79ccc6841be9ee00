"""The one way into directories that another user can change while podwatch works in them (promise 9).

podwatch often runs as root while training runs as another user, who owns the output directory and usually its parent.
A path that was safe when it was judged can lead elsewhere when it is used. So nothing here follows a path twice:

- Each configured root is opened once and pinned by its descriptor. Before every use the name is compared with the
  descriptor. A directory that its owner deleted and recreated is pinned again; a link, or another owner, stops every
  mutation (``RootReplaced``).
- Everything below a root is reached segment by segment with ``O_NOFOLLOW``. No link is followed, in any segment.
- In a root of the trainer's, and in the ``user`` directory of podwatch's, all work is done with the rights of the
  trainer's user (``rights.py``): the kernel refuses what that user cannot do, and what is made belongs to that user.
- podwatch's own directory beside a root must belong to podwatch, and no other user may have write access to it.

Opening segment by segment is as safe as ``openat2(RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS)``, works on every kernel and
under every seccomp profile, and can check the owner of each directory on the way.

Device numbers are compared within one process only: those of NFS and FUSE change with each mount.

All functions block: never call them on the event loop. They may be called from several threads.
"""

import contextlib
import errno
import functools
import os
import secrets
import stat
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from podwatch.domain.errors import HostError
from podwatch.system.files import (
    Removed,
    Tick,
    overwrite_at,
    read_descriptor,
    remove_entry,
    rename_at,
    sync_descriptor,
    write_at,
)
from podwatch.system.open_by_descriptor import (
    HIDDEN,
    OTHERS_WRITE,
    STAGING,
    USER,
    Identity,
    RootReplaced,
    check_made_by_us,
    check_ours,
    check_owner,
    check_users,
    lstat_at,
    make_root,
    measure,
    open_or_make,
    open_path,
    open_regular,
    own_segments,
    walk,
)
from podwatch.system.rights import Rights, applied, own_rights, rights_of

__all__ = [
    "HIDDEN",
    "STAGING",
    "USER",
    "Identity",
    "PinnedTree",
    "RootReplaced",
    "open_regular",
]

_DEEPEST = 64
"""Limit of nesting: no trainer nests so deep."""


class _Root:
    """One pinned directory. ``ours``: podwatch's own, which no other user may write to or replace."""

    def __init__(self, path: Path, *, ours: bool, owner: int | None) -> None:
        self.path, self.ours, self._owner = path, ours, owner
        self._fd = -1
        self._pinned: os.stat_result | None = None  # without a descriptor: of the trainer's root that was here last
        self._lock = threading.Lock()

    def open(self) -> int:
        """A new descriptor of the pinned directory. Raises RootReplaced, FileNotFoundError or OSError."""
        with self._lock:
            try:
                now: os.stat_result | None = self.path.stat()
            except FileNotFoundError:
                now = None
            if self._fd < 0 or self._pinned is None or now is None or _whose(now) != _whose(self._pinned):
                self._pin()
            return os.dup(self._fd)

    @property
    def status(self) -> os.stat_result | None:
        """Of the directory as it was pinned last; None before."""
        if self._pinned is None:
            with contextlib.suppress(OSError, RootReplaced):
                os.close(self.open())
        return self._pinned

    def _pin(self) -> None:
        try:
            fd, links = open_path(self.path)
        except FileNotFoundError:
            self._gone()
            raise
        try:
            status = os.fstat(fd)
            self._judge(status, links, fd)
        except BaseException:
            os.close(fd)
            raise
        old, self._fd, self._pinned = self._fd, fd, status
        if old >= 0:
            os.close(old)

    def _gone(self) -> None:
        """A deleted root is normal: it can be created again. A moved one is normal only for the trainer's directory."""
        if self.ours and self._pinned is not None and os.fstat(self._fd).st_nlink > 0:
            raise RootReplaced(
                "podwatch's own directory was moved away",
                where=str(self.path),
                fix="move it back. podwatch changes nothing here until then",
            )
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._pinned = -1, None if self.ours else self._pinned

    def _judge(self, status: os.stat_result, links: frozenset[int], fd: int) -> None:
        if self.ours:
            if (
                self._pinned is not None and os.fstat(self._fd).st_nlink > 0
            ):  # else it was empty, removed and made again
                raise RootReplaced(
                    "podwatch's own directory was replaced while podwatch ran",
                    where=str(self.path),
                    fix="find out which user replaced it, restore the original, then restart podwatch",
                )
            check_made_by_us(fd, self.path)
            return
        owner = self._owner if self._pinned is None else self._pinned.st_uid
        if self._pinned is not None and status.st_uid not in (owner, self._owner):
            raise RootReplaced(
                f"this directory belonged to user {owner} and was replaced by one of user {status.st_uid}",
                where=str(self.path),
                fix="find out which user replaced it, restore the original, then restart podwatch",
            )
        if owner is not None and status.st_uid not in (owner, os.geteuid()):
            raise RootReplaced(
                f"this directory belongs to user {status.st_uid}, not to the training user {owner}",
                where=str(self.path),
                fix="chown it to trainer.user, or correct output_dir, checkpoint_dir or trainer.user",
            )
        if owner not in (None, status.st_uid) and not _meant_for_others(status, fd):
            raise RootReplaced(
                f"this directory belongs to user {status.st_uid}, the training user {owner} cannot write to it, and "
                "other users can rename it",
                where=str(self.path),
                fix="find out which user put it there; if it is right, chown it to trainer.user",
            )
        if foreign := links - {status.st_uid}:
            raise RootReplaced(
                f"a symbolic link of user {min(foreign)} on this path leads to a directory of user {status.st_uid}",
                where=str(self.path),
                fix="remove the link, or configure its target directory",
            )

    def remove(self) -> None:
        """Remove our directory if it is empty; it is created again when needed. Raises OSError, RootReplaced."""
        os.close(self.open())
        with self._lock:
            above, _ = open_path(self.path.parent)
            try:
                now = lstat_at(above, self.path.name)
                if self._pinned is not None and Identity.of(now) == Identity.of(self._pinned):
                    os.rmdir(self.path.name, dir_fd=above)
                    os.close(self._fd)
                    self._fd, self._pinned = -1, None
            finally:
                os.close(above)

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._pinned = -1, None


class PinnedTree:
    """Every file operation of podwatch inside the run's directories. Paths are absolute and below a root.

    ``roots`` are output_dir and the trainer's other configured directories. Each has a podwatch directory beside it
    (``<parent>/.podwatch``), which is a root as well. ``owner`` is the uid that training runs as; None: podwatch's
    own, or unknown.
    """

    def __init__(self, roots: Sequence[Path], *, owner: int | None = None) -> None:
        self.roots = tuple(dict.fromkeys(roots))
        self.owner = owner if os.geteuid() == 0 else None
        found: dict[Path, _Root] = {}
        for root in self.roots:
            found[root] = _Root(root, ours=False, owner=self.owner)
        for root in self.roots:
            beside = root.parent / HIDDEN
            found.setdefault(beside, _Root(beside, ours=True, owner=None))
        # The innermost root first: checkpoint_dir may lie in output_dir.
        self._roots = tuple(sorted(found.values(), key=lambda r: -len(r.path.parts)))

    @property
    def rights(self) -> Rights | None:
        """Those with which the trainer's directories are worked on: of the user that training runs as, else of the
        first root's owner. None: podwatch's own."""
        if os.geteuid() != 0:
            return None
        status = next(r for r in self._roots if r.path == self.roots[0]).status
        if self.owner is not None:
            return _rights_of(self.owner, None if status is None else status.st_gid)
        return None if status is None or status.st_uid == 0 else _rights_of(status.st_uid, status.st_gid)

    # -- reaching a place ---------------------------------------------------------------------------------------------

    def problem(self) -> str:
        """Why podwatch must not change anything here; empty if it may. A root that does not exist yet is no problem."""
        try:
            self.check()
        except RootReplaced as error:
            return str(error)
        return ""

    def check(self) -> None:
        """Raises RootReplaced where podwatch must not change anything here."""
        for root in self._roots:
            try:
                os.close(root.open())
            except RootReplaced:
                raise
            except OSError:
                continue

    def contains(self, path: Path) -> bool:
        """Is the path below a root, as written?"""
        return path.is_absolute() and ".." not in path.parts and self._find(path) is not None

    @contextlib.contextmanager
    def directory(self, path: Path, *, create: bool = False, mode: int = 0o700) -> Iterator[int]:
        """A descriptor of the directory; while it is open, this thread has the rights that belong there. ``create``
        makes the missing segments: podwatch's with ``mode``, the trainer's with 0755. Raises RootReplaced, HostError
        (outside every root) or OSError (ELOOP or ENOTDIR: a link; EACCES: not that user's)."""
        root, parts = self._locate(path)
        rights = self.rights
        try:
            fd = root.open()
        except FileNotFoundError:
            if not create:
                raise
            _make_ours(root.path) if root.ours else make_root(root.path, rights)
            fd = root.open()
        own = own_segments(parts) if root.ours else 0
        theirs = not root.ours or USER in parts[1:]
        hidden = root.ours
        user = rights or own_rights()
        try:
            for number, name in enumerate(parts):
                hidden = hidden or name in (HIDDEN, STAGING)
                ours = number < own
                with applied(own_rights() if ours else user):
                    try:
                        below = open_or_make(fd, name, create, mode if hidden else 0o755)
                    except OSError as error:
                        error.filename = str(path)
                        raise
                os.close(fd)
                fd = below
                if ours:
                    (check_users if number and name == USER else check_ours)(
                        fd, root.path.joinpath(*parts[: number + 1]), rights
                    )
            with applied(user if theirs else own_rights()):
                yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def parent(self, path: Path, *, create: bool = False, mode: int = 0o700) -> Iterator[tuple[int, str]]:
        """The directory that holds ``path``, and the last segment: what every operation below works on."""
        root, parts = self._locate(path)
        if not parts:
            raise HostError("podwatch refuses to change a configured directory itself", where=str(path))
        above = root.path.joinpath(*parts[:-1])
        with self.directory(above, create=create, mode=mode) as fd:
            yield fd, parts[-1]

    def _find(self, path: Path) -> _Root | None:
        return next((r for r in self._roots if path == r.path or r.path in path.parents), None)

    def _locate(self, path: Path) -> tuple[_Root, tuple[str, ...]]:
        root = self._find(path)
        rest = path.parts if root is None else path.relative_to(root.path).parts
        if not path.is_absolute() or ".." in rest or "\0" in str(path):
            raise HostError("not a plain absolute path", where=repr(str(path))[:200], fix="this is a bug: report it")
        if root is None:
            raise HostError(
                "podwatch refuses to touch a path outside the configured directories",
                where=str(path),
                fix="configure its directory as output_dir or trainer.checkpoint_dir if it is the trainer's",
            )
        return root, rest

    # -- reading ------------------------------------------------------------------------------------------------------

    def lstat(self, path: Path) -> os.stat_result | None:
        """Status of ``path`` now, of a link itself and not its target; None if it does not exist. Raises OSError: ELOOP
        or ENOTDIR where a link is on the way, which shows nothing about the files behind it."""
        try:
            with self.parent(path) as (fd, name):
                return os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def identity(self, path: Path) -> Identity | None:
        """For comparison when ``path`` is changed later; None if it does not exist."""
        status = self.lstat(path)
        return None if status is None else Identity.of(status)

    def is_directory(self, path: Path) -> bool:
        """A directory, not a link to one."""
        try:
            with self.directory(path):
                return True
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            if error.errno == errno.ELOOP:
                return False
            raise

    def names(self, path: Path) -> tuple[str, ...]:
        """The entries of a directory, sorted. Raises OSError, FileNotFoundError included."""
        with self.directory(path) as fd:
            return tuple(sorted(os.listdir(fd)))  # noqa: PTH208 - a descriptor

    def open(self, path: Path) -> int:
        """A descriptor of a regular file, for reading. Never blocks on a FIFO. Raises OSError (EINVAL: not a file)."""
        with self.parent(path) as (fd, name):
            return open_regular(fd, name)

    def read(self, path: Path, limit: int = 1 << 20) -> bytes:
        """The whole of a regular file. Raises OSError; EFBIG where it holds more than ``limit`` bytes."""
        fd = self.open(path)
        try:
            return read_descriptor(fd, limit, str(path))
        finally:
            os.close(fd)

    def read_ours(self, path: Path, limit: int = 1 << 20) -> bytes:
        """``read`` for a file that only podwatch can have written. Raises RootReplaced where another user owns it."""
        with self.parent(path) as (directory, name):
            fd = open_regular(directory, name)
            try:
                check_owner(fd, directory, path)
                return read_descriptor(fd, limit, str(path))
            finally:
                os.close(fd)

    def open_own(self, path: Path) -> int:
        """A descriptor of a file that only podwatch can have written, for reading and writing; created if missing.
        Raises RootReplaced where another user owns it."""
        with self.parent(path) as (directory, name):
            fd = open_regular(directory, name, os.O_RDWR | os.O_CREAT)
            try:
                check_owner(fd, directory, path)
            except BaseException:
                os.close(fd)
                raise
            return fd

    def measure(self, path: Path, entries: int = 1 << 62) -> tuple[int, int]:
        """(bytes on disk, entries seen) of a file or tree, as far as ``entries`` reach; a link counts as itself."""
        seen = [0, 0]
        try:
            with self.parent(path) as (fd, name):
                measure(fd, name, seen, entries, _DEEPEST)
        except OSError:
            pass
        return seen[0], seen[1]

    def linked_bytes(self, paths: Iterable[Path]) -> int:
        """Bytes of the files below these paths that have a name outside them, too: to delete them frees nothing."""
        seen: dict[tuple[int, int], list[os.stat_result]] = defaultdict(list)
        for path in paths:
            with contextlib.suppress(OSError, HostError), self.parent(path) as (fd, name):
                for found in walk(fd, name, _DEEPEST):
                    if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
                        seen[found.st_dev, found.st_ino].append(found)
        return sum(same[0].st_size for same in seen.values() if same[0].st_nlink > len(same))

    # -- changing -----------------------------------------------------------------------------------------------------

    def make(self, path: Path, mode: int = 0o700) -> None:
        """Create the directory and missing ones above it, and check that it is podwatch's where it must be."""
        with self.directory(path, create=True, mode=mode):
            return

    def rename(self, source: Path, target: Path, *, expected: Identity | None = None) -> bool:
        """Move an entry (a link itself), never over an existing one (FileExistsError).

        False where ``source`` is gone or differs from ``expected``: the renamed entry is compared afterwards, in its
        new place, and is moved back if it differs. Raises OSError (EXDEV: another filesystem).
        """
        with self.parent(source) as (source_fd, name), self.parent(target) as (target_fd, new_name):
            try:
                if expected is not None and Identity.of(lstat_at(source_fd, name)) != expected:
                    return False
                rename_at(source_fd, name, target_fd, new_name)
            except FileNotFoundError:
                return False
            except OSError as error:
                error.filename, error.filename2 = str(source), str(target)
                raise
            if expected is not None and Identity.of(lstat_at(target_fd, new_name)) != expected:
                try:
                    rename_at(target_fd, new_name, source_fd, name)
                except FileExistsError:  # its old name is taken: it must not stay where it would be deleted
                    rename_at(target_fd, new_name, source_fd, f"{name}.{secrets.token_hex(4)}")
                return False
            return True

    def replace(self, source: Path, target: Path) -> None:
        """Rename over ``target``: for two files of podwatch."""
        with self.parent(source) as (source_fd, name), self.parent(target) as (target_fd, new_name):
            os.rename(name, new_name, src_dir_fd=source_fd, dst_dir_fd=target_fd)

    def remove_tree(self, path: Path, *, tick: Tick | None = None) -> Removed:
        """Remove a file or a tree, links themselves, never across a mount. As ``files.remove_entry``."""
        done = Removed()
        try:
            with self.parent(path) as (fd, name):
                remove_entry(fd, name, path.name, os.fstat(fd).st_dev, done, tick or (lambda _: None))
        except FileNotFoundError:
            pass
        return done

    def unlink(self, path: Path) -> None:
        with self.parent(path) as (fd, name):
            os.unlink(name, dir_fd=fd)

    def overwrite(self, path: Path, data: bytes, mode: int = 0o600) -> None:
        """Write a file of podwatch in place, into the blocks that ``reserve`` allocated, so that it works on a full
        disk. Durable when it returns; not atomic."""
        with self.parent(path) as (directory, name):
            overwrite_at(directory, name, data, mode)

    def reserve(self, path: Path, size: int, mode: int = 0o600) -> None:
        """Give a file of podwatch ``size`` bytes of allocated blocks."""
        with self.parent(path) as (directory, name):
            fd = open_regular(directory, name, os.O_WRONLY | os.O_CREAT, mode)
            try:
                os.posix_fallocate(fd, 0, size)
            finally:
                os.close(fd)

    def write_link(self, path: Path, target: str) -> None:
        """Replace a link of the trainer's by one rename, so that it always exists. Raises OSError."""
        fresh = f".{path.name}.{secrets.token_hex(4)}.tmp"
        with self.parent(path) as (fd, name):
            os.symlink(target, fresh, dir_fd=fd)
            try:
                os.rename(fresh, name, src_dir_fd=fd, dst_dir_fd=fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(fresh, dir_fd=fd)
                raise
            sync_descriptor(fd)

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory, also podwatch's beside a root. Raises OSError."""
        root, parts = self._locate(path)
        if root.ours and not parts:
            root.remove()
            return
        with self.parent(path) as (fd, name):
            os.rmdir(name, dir_fd=fd)

    def write(self, path: Path, data: bytes, mode: int = 0o600) -> None:
        """Replace a file by one atomic rename; durable when it returns. Its directory must exist. Raises OSError."""
        with self.parent(path) as (fd, name):
            write_at(fd, name, data, mode)

    def sync(self, path: Path) -> None:
        """Make renames and creations in a directory durable."""
        with self.directory(path) as fd:
            sync_descriptor(fd)

    def can_rename(self, source_dir: Path, target_dir: Path) -> bool:
        """Whether a directory can be renamed from one into the other, found out by trying: two directories of one
        device can still refuse (two ReadWritePaths of one unit). Raises OSError where the trial is impossible."""
        name = f".podwatch-probe-{os.getpid()}-{secrets.token_hex(4)}"
        with self.directory(source_dir) as source, self.directory(target_dir) as target:
            os.mkdir(name, 0o700, dir_fd=source)
            try:
                os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
            except OSError:
                return False
            finally:
                for fd in (target, source):
                    with contextlib.suppress(OSError):
                        os.rmdir(name, dir_fd=fd)
        return True

    def close(self) -> None:
        for root in self._roots:
            root.close()


# -- owners, and creation of directories -----------------------------------------------------------------------------


_rights_of = functools.cache(rights_of)


def _whose(status: os.stat_result) -> tuple[Identity, int]:
    return Identity.of(status), status.st_uid


def _meant_for_others(status: os.stat_result, fd: int) -> bool:
    """For a directory of root or podwatch in which another user trains: can that user write to it, or is no other user
    able to put it there? Otherwise a root-owned directory may have been renamed to the configured name."""
    if status.st_mode & OTHERS_WRITE:
        return True
    above = os.stat("..", dir_fd=fd)
    guarded = not above.st_mode & OTHERS_WRITE or bool(above.st_mode & stat.S_ISVTX)
    return guarded and above.st_uid in (0, os.geteuid())


def _make_ours(path: Path) -> None:
    """Create podwatch's directory beside a root. The parent is created as any program would create it."""
    try:
        fd, _ = open_path(path.parent)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, _ = open_path(path.parent)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path.name, 0o755, dir_fd=fd)
    finally:
        os.close(fd)
