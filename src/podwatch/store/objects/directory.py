"""``file://``: a directory as a store, for a second disk or a network mount.

An object is a file under its key, written beside it first and then renamed, with the mode that it had on the pod. Every
path is opened segment by segment; a link in it is an error, and nothing outside the directory is touched.
"""

import errno
import fcntl
import hashlib
import math
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.domain.safe_names import check_relative_path
from podwatch.store.objects.base import (
    DOCUMENT,
    MOST_LISTED,
    Checked,
    ObjectInfo,
    Slice,
    Source,
    Take,
)
from podwatch.store.objects.errors import (
    ObjectMissing,
    ObjectTooLarge,
    StoreOutage,
    StoreRefused,
    damaged_in_transit,
    too_late,
)
from podwatch.store.objects.transport import BLOCK, boottime
from podwatch.system.files import open_dir_below
from podwatch.system.open_by_descriptor import open_regular

SCRATCH = ".podwatch-writing"
_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DirectoryObjects:
    hashes: tuple[str, ...] = ("sha256",)
    skew: float | None = None

    def __init__(self, root: Path) -> None:
        self.root, self.url = root, f"file://{root}"
        self.calls: Counter[str] = Counter()
        self._inode: int | None = None
        self._swept = False
        self._durable: set[str] = {""}
        """Folders whose names survive a crash of the machine."""

    def make_root(self) -> None:
        """Make the directory for a new store; only where its parent exists: what is missing above it can be a volume
        that is not mounted. Nothing is raised: the first request says what is wrong."""
        with suppress(OSError):
            self.root.mkdir()

    def put(
        self, key: str, source: Source, hashes: Mapping[str, str] | None = None, *, until: float = math.inf
    ) -> None:
        check_relative_path(key)
        with self._errors(key), self._scratch() as (scratch, folder, name):
            digest, done = hashlib.sha256(), 0
            if isinstance(source, Slice):
                source.seek(0)
            while done < len(source):
                block = source[done : done + BLOCK] if isinstance(source, bytes) else source.read(BLOCK)
                digest.update(block)
                done += len(block)
                view = memoryview(block)
                while view:
                    view = view[os.write(scratch, view) :]
            if hashes and hashes.get("sha256", digest.hexdigest()) != digest.hexdigest():
                raise damaged_in_transit(self._where(key))
            mode = os.fstat(source.descriptor).st_mode & 0o777 if isinstance(source, Slice) else 0o644
            os.fchmod(scratch, mode)
            os.fsync(scratch)
            self._rename(folder, name, key, until)

    def get(self, key: str, take: Take, *, length: int, hash_name: str = "sha256") -> str:
        digest, done = hashlib.new(hash_name, usedforsecurity=False), 0
        with self._errors(key):
            descriptor = self._open(key)
        try:
            if os.fstat(descriptor).st_size != length:
                raise IntegrityError("the object's size differs from the recorded one", where=self._where(key))
            while done < length:
                with self._errors(key):  # not around ``take``: it writes to another disk
                    block = os.pread(descriptor, min(BLOCK, length - done), done)
                if not block:
                    raise IntegrityError("the object became shorter", where=self._where(key))
                digest.update(block)
                take(memoryview(block))
                done += len(block)
        finally:
            os.close(descriptor)
        return digest.hexdigest()

    def read(self, key: str, limit: int = DOCUMENT) -> bytes:
        with self._errors(key), os.fdopen(self._open(key), "rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise ObjectTooLarge(self._where(key))
        return data

    def list(self, prefix: str, limit: int = MOST_LISTED) -> Iterator[ObjectInfo]:
        """Names that could not be keys of ours, and links, are left out; a folder that cannot be read is an error: what
        is missing would count as absent."""
        base = prefix.rpartition("/")[0]
        found: list[ObjectInfo] = []
        with self._errors(prefix):
            try:
                top = self._folder(check_relative_path(base) if base else "")
            except (FileNotFoundError, NotADirectoryError):
                return
            try:
                for item in self._walk(top, base):
                    if item.key.startswith(prefix):
                        found.append(item)
                        if len(found) > limit:
                            raise ObjectTooLarge(self._where(prefix))
            finally:
                os.close(top)
        yield from sorted(found, key=lambda item: item.key)

    def _walk(self, directory: int, path: str) -> Iterator[ObjectInfo]:
        with os.scandir(directory) as entries:
            for entry in entries:
                key = f"{path}/{entry.name}" if path else entry.name
                try:
                    check_relative_path(key)
                    if entry.is_dir(follow_symlinks=False):
                        if key == SCRATCH:
                            continue
                        below = open_dir_below(directory, entry.name)
                        try:
                            yield from self._walk(below, key)
                        finally:
                            os.close(below)
                    elif entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        yield ObjectInfo(key, status.st_size, status.st_mtime)
                except (IntegrityError, FileNotFoundError, NotADirectoryError):
                    continue  # no name of ours, or deleted meanwhile

    def delete(self, keys: Sequence[str], *, older: bool = False, until: float = math.inf) -> None:
        for key in () if older else keys:  # a file has one version
            folder, _, name = check_relative_path(key).rpartition("/")
            with self._errors(key):
                try:
                    directory = self._folder(folder)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                try:
                    self._check_time(until)
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=directory)
                    os.fsync(directory)
                finally:
                    os.close(directory)
                self._drop_empty(folder)

    def check(self, prefix: str) -> Checked:
        with self._errors(prefix):
            self.make_root()
        key = f"{prefix}tmp/check-{secrets.token_hex(6)}"
        self.put(key, b"podwatch")
        if self.read(key) != b"podwatch" or key not in {item.key for item in self.list(key)}:
            raise IntegrityError("the store returns different bytes than podwatch wrote", where=self.url)
        try:
            self.delete([key])
        except RemoteError:
            return Checked("sha256", False, None, ("files cannot be deleted: old checkpoints stay in the store",))
        return Checked("sha256", True, None)

    def close(self) -> None:
        pass

    # -- below ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _scratch(self) -> Iterator[tuple[int, int, str]]:
        """(file, its folder, its name): locked, so that a later process removes what a killed writer left."""
        folder = self._folder(SCRATCH, create=True)
        try:
            if not self._swept:
                self._sweep(folder)
            file, name = self._locked(folder)
            try:
                yield file, folder, name
            finally:
                os.close(file)
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)

    def _locked(self, folder: int) -> tuple[int, str]:
        """A new file and its name. A sweep of another process can take it between its creation and its lock: one that
        has no name any more is left for the next."""
        while True:
            name = secrets.token_hex(8)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(name, flags, 0o600, dir_fd=folder)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                if os.fstat(file).st_nlink:
                    return file, name
            except BaseException:
                os.close(file)
                raise
            os.close(file)

    def _sweep(self, folder: int) -> None:
        self._swept = True
        for name in os.listdir(folder):
            with suppress(OSError):
                file = open_regular(folder, name)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(name, dir_fd=folder)
                finally:
                    os.close(file)

    def _rename(self, folder: int, name: str, key: str, until: float) -> None:
        target, _, last = key.rpartition("/")
        for attempt in range(3):  # a deletion may remove an empty folder before the rename
            directory = self._folder(target, create=True)
            try:
                self._sync_above(target)
                self._check_time(until)
                os.rename(name, last, src_dir_fd=folder, dst_dir_fd=directory)
                os.fsync(directory)
                return
            except FileNotFoundError:
                if attempt == 2:
                    raise
            finally:
                os.close(directory)

    def _sync_above(self, folder: str) -> None:
        """A folder that was just made has its name in the one above."""
        while folder not in self._durable:
            self._durable.add(folder)
            folder = folder.rpartition("/")[0]
            above = self._folder(folder)
            try:
                os.fsync(above)
            finally:
                os.close(above)

    def _check_time(self, until: float) -> None:
        if boottime() > until:
            raise too_late(self.url)

    def _drop_empty(self, folder: str) -> None:
        while folder:
            above, _, name = folder.rpartition("/")
            try:
                directory = self._folder(above)
            except OSError:
                return
            try:
                os.rmdir(name, dir_fd=directory)
            except OSError:
                return
            finally:
                os.close(directory)
            self._durable.discard(folder)
            folder = above

    def _open(self, key: str) -> int:
        folder, _, name = check_relative_path(key).rpartition("/")
        try:
            directory = self._folder(folder)
            try:
                return open_regular(directory, name)
            finally:
                os.close(directory)
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectMissing(self._where(key)) from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EINVAL):  # a link, a pipe
                raise ObjectMissing(self._where(key)) from None
            raise

    def _folder(self, folder: str, *, create: bool = False) -> int:
        """Walks down from the root, which has to be the one that was there before: a file system that is not mounted
        any more leaves an empty directory, and what is written there is no backup."""
        if create and self._inode is None:
            self.make_root()
        try:
            root = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise OSError(errno.ENODEV, "its directory does not exist") from None
        try:
            inode = os.fstat(root).st_ino  # a remount can change the device
            self._inode = self._inode or inode
            if inode != self._inode:
                raise OSError(errno.ENODEV, "its file system is not mounted any more, or the directory was replaced")
            return open_dir_below(root, folder, create=create)
        finally:
            os.close(root)

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except PermissionError as error:
            what = f"Permission denied: {error.strerror}"
            raise StoreRefused(
                "permission", what, where=self._where(key), fix="let podwatch's user read and write there"
            ) from error
        except OSError as error:
            if error.errno in _SPACE:
                fix = "free space there"
                raise StoreRefused("cap", "the store's disk is full", where=self._where(key), fix=fix) from error
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                fix = "remove it: podwatch follows no link below the store"
                raise StoreRefused(
                    "request", "a link or a file is in the way of the store", where=self._where(key), fix=fix
                ) from error
            fix = "check that the directory is mounted and writable"
            what = f"the store cannot be used: {error.strerror or error}"
            raise StoreOutage(what, where=self._where(key), fix=fix) from error


def is_on_file_system_of(url: str, path: Path) -> bool:
    """Whether the directory of ``file://`` is, or would be made, on the file system of ``path``: then it is no
    backup."""
    return _device(Path(unquote(urlsplit(url).path))) == _device(path)


def _device(path: Path) -> int:
    for candidate in (path, *path.parents):
        with suppress(OSError):
            return candidate.stat().st_dev
    return -1
