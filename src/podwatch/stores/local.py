"""``file://``: a directory as object store, for a second disk or a network mount.

Objects are files under their key. Our writer tag is separate, in ``<root>/.podwatch-store/info/<key>.json``, because
not every filesystem has extended attributes: it has the last two versions that we wrote, each identified by size and
mtime (which survive ``cp -a`` and ``rsync -a``). So after a crash between tag and object the object is recognized
either way, and a file that another program put there does not count as ours. A copy of the store without these times,
or without the tags, is readable: a listing leaves open whose a file is, as one of S3 does, and readers trust the hashes
in pointer and manifest. podwatch deletes nothing in it. Unfinished writes are in
``.podwatch-store/tmp``, each locked by its writer, so that the remains of a killed writer are recognized and removed.
"""

import fcntl
import json
import os
import secrets
import stat as stat_module
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.domain.manifest import WRITER_TAG, Proof
from podwatch.domain.safe_names import check_relative_path, valid_run_id
from podwatch.stores.base import AccessDenied, Progress, StoredObject, StoredPart, Take, Unfinished, Upload, not_ours
from podwatch.stores.local_large import DOCUMENT_MODE, LargeUploads, mode_of
from podwatch.stores.part_reader import PartStream, Source, StreamSource

# -- store -----------------------------------------------------------------------------------------------------------

PRIVATE = ".podwatch-store"
_BLOCK = 1 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class LocalStore:
    """Every write: temporary file, fsync, rename, fsync of the directory. No symlink below the root is followed."""

    versioned = conditional = False
    exclusive = True
    features: Mapping[str, object] = MappingProxyType({})
    clock_skew: float | None = None
    """None: its times are this machine's, or those of a file server that podwatch does not ask."""

    def __init__(self, root: Path, *, writer_id: str, wall: Callable[[], float] = time.time) -> None:
        self.root = root
        self.url = f"file://{root}"
        self._writer_id = writer_id
        self._wall = wall
        self._swept = False
        self._own = 0
        self._around: int | None = None
        """Device of the file system that the store's is mounted on, its own where it is not a mount; None: the root was
        not seen yet."""
        self._large = LargeUploads(f"{PRIVATE}/large", self._open_directory)

    # -- writing ----------------------------------------------------------------------------------------------------

    def create(self, key: str, data: bytes) -> StoredObject | None:
        check_relative_path(key)
        with self._errors(key):
            self._sweep()
            scratch, name = self._scratch()
            source = self.root / PRIVATE / "tmp" / name
            folder, _, base = key.rpartition("/")
            directory = self._open_directory(folder, create=True)
            try:
                _write(scratch, data)
                os.fsync(scratch)
                if not name_if_free(source, directory, base, data):
                    return None
                self._tag(key, os.fstat(scratch), self._wall())
            finally:
                os.close(directory)
                os.close(scratch)
                with suppress(OSError):
                    source.unlink()
        return self.stat(key)

    def replace(self, key: str, source: Source, size: int, expected: StoredObject | None) -> StoredObject | None:
        raise RemoteError("a directory cannot replace conditionally", where=f"{self.url}/{key}", transient=False)

    def put_bytes(self, key: str, data: bytes) -> StoredObject:
        return self.put_small(key, StreamSource(BytesIO(data)), len(data))

    def put_small(self, key: str, source: Source, size: int, progress: Progress | None = None) -> StoredObject:
        def fill(out: int) -> PartStream:
            stream = PartStream(source, 0, size, progress, tail=False)
            left = size
            while left:
                data = stream.read(min(_BLOCK, left))
                _write(out, data)
                left -= len(data)
            return stream

        return self._put(key, fill, mode_of(source))

    def begin_large(self, key: str, size: int) -> Upload:
        check_relative_path(key)
        with self._errors(key):
            return Upload(key, self._large.begin(key, size, self._writer_id, self._wall()))

    def put_part(
        self, upload: Upload, number: int, source: Source, offset: int, length: int, progress: Progress | None = None
    ) -> StoredPart:
        with self._errors(upload.key):
            return self._large.put(upload.id, number, source, offset, length, progress)

    def parts_there(self, upload: Upload) -> Mapping[int, StoredPart] | None:
        with self._errors(upload.key):
            return self._large.parts(upload.id)

    def finish_large(self, upload: Upload, parts: Sequence[StoredPart], size: int) -> StoredObject:
        key, hashes = check_relative_path(upload.key), tuple(part.sha1 for part in parts)
        with self._errors(key):
            sealed = self._large.seal(upload.id, hashes, size)
            if sealed is not None:
                self._tag(key, (self.root / sealed).lstat(), self._wall())
                self._rename(sealed, key)
                self._large.drop(upload.id)
        found = self.stat(key)
        if found is None or not found.ours or found.size != size:
            raise IntegrityError("the store has no such upload, or a different one", where=f"{self.url}/{key}")
        return replace(found, parts_sha1=hashes, proof=Proof.FLUSHED)

    def finished(self, upload: Upload, parts: Sequence[StoredPart], size: int) -> StoredObject | None:
        return None  # the object does not show from which upload it came

    def cancel_large(self, upload: Upload) -> None:
        with self._errors(upload.key):
            self._large.drop(upload.id)

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        with self._errors(prefix):
            found = list(self._large.all(prefix))
        yield from found

    def _put(self, key: str, fill: Callable[[int], PartStream], mode: int) -> StoredObject:
        check_relative_path(key)
        with self._errors(key):
            self._sweep()
            scratch, name = self._scratch(mode)
            try:
                sent = fill(scratch)
                os.fsync(scratch)
                found = os.fstat(scratch)
                wall = self._wall()
                self._tag(key, found, wall)
                self._rename(f"{PRIVATE}/tmp/{name}", key)
            except BaseException:
                with suppress(OSError):
                    (self.root / PRIVATE / "tmp" / name).unlink()
                raise
            finally:
                os.close(scratch)
        info = {"mtime_ns": str(found.st_mtime_ns)}
        sha1 = (sent.sha1,) if len(sent) else ()
        return StoredObject(key, found.st_size, "", sha1, True, self._writer_id, wall, info, Proof.FLUSHED)

    def _scratch(self, mode: int = DOCUMENT_MODE) -> tuple[int, str]:
        """A new temporary file, locked by us. A sweep may catch it before it is locked: then take another."""
        directory = self._open_directory(f"{PRIVATE}/tmp", create=True)
        try:
            while True:
                name = secrets.token_hex(8)
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(name, flags, mode, dir_fd=directory)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(descriptor).st_nlink:
                        return descriptor, name
                except BlockingIOError:
                    pass
                os.close(descriptor)
        finally:
            os.close(directory)

    def _sweep(self) -> None:
        """Once per process: remove what dead writers left."""
        if self._swept:
            return
        self._swept = True
        with suppress(FileNotFoundError), os.scandir(self.root / PRIVATE / "tmp") as entries:
            for entry in entries:
                with suppress(OSError):
                    descriptor = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        Path(entry.path).unlink()
                    finally:
                        os.close(descriptor)

    def _tag(self, key: str, found: os.stat_result, wall: float) -> None:
        mine = {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "writer_id": self._writer_id, "wall": wall}
        document = json.dumps({"versions": [mine, *self._tags(key)[:1]]}).encode()
        scratch, name = self._scratch()
        try:
            _write(scratch, document)
            os.fsync(scratch)
            self._rename(f"{PRIVATE}/tmp/{name}", _info(key))
        finally:
            os.close(scratch)

    def _rename(self, source: str, target: str) -> None:
        for attempt in range(3):  # a delete may remove an empty directory between our mkdir and our rename
            directory = self._open_directory(os.path.dirname(target), create=True)  # noqa: PTH120 - a key, not a path
            try:
                os.rename(self.root / source, os.path.basename(target), dst_dir_fd=directory)  # noqa: PTH119
                os.fsync(directory)
                return
            except FileNotFoundError:
                if attempt == 2:
                    raise
            finally:
                os.close(directory)

    # -- reading ----------------------------------------------------------------------------------------------------

    def stat(self, key: str, file_id: str = "") -> StoredObject | None:
        with self._errors(key):
            try:
                descriptor = self._open(key)
            except (FileNotFoundError, NotADirectoryError):
                return None
            try:
                return self._describe(key, os.fstat(descriptor))
            finally:
                os.close(descriptor)

    def identify(self, objects: Iterable[StoredObject]) -> Iterator[StoredObject]:
        for item in objects:
            known = item if item.ours is not None else self.stat(item.key)
            if known is not None:
                yield known

    def prove(self, obj: StoredObject, parts_sha1: Sequence[str], part_size: int) -> Proof:
        return Proof.FLUSHED if obj.ours else Proof.NONE

    def read(self, key: str, *, limit: int = 64 << 20) -> tuple[StoredObject, bytes] | None:
        with self._errors(key):
            try:
                descriptor = self._open(key)
            except (FileNotFoundError, NotADirectoryError):
                return None
            with os.fdopen(descriptor, "rb") as file:
                found, data = self._describe(key, os.fstat(descriptor)), file.read(limit + 1)
        if len(data) > limit:
            raise IntegrityError("the object is larger than any valid one", where=f"{self.url}/{key}")
        return found, data

    def get_bytes(self, key: str, file_id: str = "", *, limit: int = 64 << 20) -> bytes | None:
        found = self.read(key, limit=limit)
        return None if found is None else found[1]

    def get_file(
        self, key: str, target: BinaryIO, *, file_id: str = "", offset: int = 0, progress: Progress | None = None
    ) -> None:
        with self._errors(key):
            try:
                descriptor = self._open(key)
            except (FileNotFoundError, NotADirectoryError):
                raise RemoteError("object not found", where=f"{self.url}/{key}", transient=False) from None
            with os.fdopen(descriptor, "rb") as file:
                file.seek(offset)
                while data := file.read(_BLOCK):
                    target.write(data)
                    if progress is not None:
                        progress(len(data))

    def get_range(self, key: str, offset: int, length: int, take: Take, *, file_id: str = "") -> int:
        with self._errors(key):
            try:
                descriptor = self._open(key)
            except (FileNotFoundError, NotADirectoryError):
                raise RemoteError("object not found", where=f"{self.url}/{key}", transient=False) from None
        try:
            buffer = memoryview(bytearray(min(_BLOCK, length)))
            while length:
                with self._errors(key):  # not around ``take``: it writes to another disk
                    count = os.preadv(descriptor, [buffer[:length]], offset)
                if not count:
                    raise IntegrityError("the object is shorter than recorded", where=f"{self.url}/{key}")
                take(buffer[:count])
                offset, length = offset + count, length - count
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """In key order. Names that could not be keys of ours are left out. ``ours`` is None without a fitting tag.
        After the last one it raises AccessDenied, if there is something that it cannot read."""
        base = prefix.rpartition("/")[0]
        found: list[str] = []
        denied: list[str] = []

        def failed(error: OSError) -> None:
            key = Path(error.filename).relative_to(self.root).as_posix()
            if isinstance(error, FileNotFoundError | NotADirectoryError):
                return  # nothing is there, or it was deleted meanwhile
            if not isinstance(error, PermissionError) or key == ".":
                raise error
            if f"{key}/".startswith(prefix) and valid_run_id(key.partition("/")[0]):  # lost+found is no run's
                denied.append(key)

        with self._errors(prefix):
            start = self.root / check_relative_path(base) if base else self.root
            for directory, names, files in os.walk(start, onerror=failed, followlinks=False):
                if Path(directory) == self.root and PRIVATE in names:
                    names.remove(PRIVATE)
                for name in files:
                    key = (Path(directory) / name).relative_to(self.root).as_posix()
                    if key.startswith(prefix):
                        found.append(key)
        for key in sorted(found):
            try:
                item = self.stat(key)
            except IntegrityError:
                continue
            except AccessDenied:
                denied.append(key)
                continue
            if item is not None:
                yield item if item.ours else replace(item, ours=None)

        if denied:
            more = f" and {len(denied) - 1} more" if len(denied) > 1 else ""
            raise AccessDenied(f"Permission denied: cannot read {denied[0]}{more}", where=self.url, keys=denied)

    def versions(self, prefix: str) -> Iterator[StoredObject]:
        return self.list(prefix)

    def delete(self, obj: StoredObject) -> None:
        current = self.stat(obj.key)
        if current is None:
            return
        if not current.ours:
            raise not_ours(self.url, obj.key)
        if obj.info.get("mtime_ns") not in (None, current.info["mtime_ns"]) or obj.size != current.size:
            return  # this version has been replaced, so it is gone
        with self._errors(obj.key):
            for name in (obj.key, _info(obj.key)):
                self._unlink(name)

    def _unlink(self, name: str) -> None:
        folder, _, base = name.rpartition("/")
        try:
            directory = self._open_directory(folder)
        except FileNotFoundError:
            return
        try:
            with suppress(FileNotFoundError):
                os.unlink(base, dir_fd=directory)
            os.fsync(directory)
        finally:
            os.close(directory)
        while folder:
            try:
                (self.root / folder).rmdir()
            except OSError:
                return
            folder = folder.rpartition("/")[0]

    def check(self) -> tuple[str, ...]:
        key = f"{PRIVATE}-check-{secrets.token_hex(4)}"
        with self._errors(key):
            self.root.mkdir(parents=True, exist_ok=True)
        probe = self.put_bytes(key, b"podwatch")
        if self.get_bytes(key) != b"podwatch":
            raise IntegrityError("the store returns different bytes than podwatch wrote", where=self.url)
        self.delete(probe)
        return ()

    def close(self) -> None:
        pass

    # -- below ------------------------------------------------------------------------------------------------------

    def _describe(self, key: str, found: os.stat_result) -> StoredObject:
        tags = [tag for tag in self._tags(key) if tag.get("size") == found.st_size]
        tag = next((tag for tag in tags if tag.get("mtime_ns") == found.st_mtime_ns), None)
        info = {"mtime_ns": str(found.st_mtime_ns)}
        if tag is None:  # perhaps a copy, whose own time is that of the copying
            wall = next((_wall(tag) for tag in tags), found.st_mtime)
            return StoredObject(key, found.st_size, uploaded_wall=wall, info=info)
        writer = str(tag.get("writer_id", ""))
        wall = _wall(tag)
        info[WRITER_TAG] = writer
        return StoredObject(key, found.st_size, ours=True, writer_id=writer, uploaded_wall=wall, info=info)

    def _tags(self, key: str) -> tuple[dict[str, Any], ...]:
        try:
            descriptor = self._open(_info(key))
        except OSError:
            return ()
        with os.fdopen(descriptor, "rb") as file:
            try:
                return tuple(t for t in json.load(file)["versions"] if isinstance(t, dict))
            except (ValueError, KeyError, TypeError):
                return ()

    def _open(self, key: str) -> int:
        check_relative_path(key)
        folder, _, base = key.rpartition("/")
        directory = self._open_directory(folder)
        try:
            descriptor = os.open(base, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        finally:
            os.close(directory)
        if not stat_module.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileNotFoundError(key)
        return descriptor

    def _open_directory(self, folder: str, *, create: bool = False) -> int:
        """Walk down from the root without following a symlink. The caller closes the descriptor."""
        if create:
            self._check_root()
            self.root.mkdir(parents=True, exist_ok=True)
            self._check_root()
        current = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for segment in folder.split("/") if folder else ():
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(segment, dir_fd=current)
                        os.fsync(current)
                below = os.open(segment, _DIRECTORY, dir_fd=current)
                os.close(current)
                current = below
        except BaseException:
            os.close(current)
            raise
        return current

    def _check_root(self) -> None:
        """Raise OSError if the root was there and is gone, or is not mounted any more: written to another disk, or into
        a directory made again, nothing would be a backup."""
        known = self._around is not None  # before the look: another thread may create it meanwhile
        try:
            found = self.root.stat()
        except (FileNotFoundError, NotADirectoryError):
            if not known:
                return  # the first write creates it
            raise OSError(None, "its directory is gone") from None
        if self._around is None:
            self._own, self._around = found.st_dev, _device_around(self.root, found.st_dev)
        elif found.st_dev == self._around != self._own:
            raise OSError(None, "its file system is not mounted any more")

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            self._check_root()
            yield
        except PermissionError as error:
            what = f"the store refuses access: {error.strerror}"
            raise AccessDenied(what, where=f"{self.url}/{key}", keys=(key,)) from error
        except OSError as error:
            raise RemoteError(
                f"the store cannot be used: {error.strerror or error}",
                where=f"{self.url}/{key}",
                fix="check that the directory is mounted, writable and has free space",
            ) from error


def _device_around(root: Path, own: int) -> int:
    """Device of the nearest directory above ``root`` that is on another file system; ``own`` if there is none."""
    for above in root.resolve().parents:
        try:
            device = above.stat().st_dev
        except OSError:
            continue
        if device != own:
            return device
    return own


def _info(key: str) -> str:
    return f"{PRIVATE}/info/{key}.json"


def _wall(tag: Mapping[str, Any]) -> float:
    wall = tag.get("wall")
    return float(wall) if isinstance(wall, int | float) and 0 <= wall < 2**53 else 0.0


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


# -- exclusive names -------------------------------------------------------------------------------------------------
# Creates a name in a directory for the first of several writers.


def name_if_free(source: Path, directory: int, name: str, data: bytes) -> bool:
    """Give the file ``source``, which holds ``data``, this name in ``directory`` (a descriptor), unless it is taken.

    By a link, so that it is whole at once; where a file system has none (SMB, exFAT), created exclusively and filled
    then, with the same times. Raises OSError.
    """
    try:
        os.link(source, name, dst_dir_fd=directory)
    except FileExistsError:
        return False
    except OSError:
        try:
            made = os.open(
                name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=directory
            )
        except FileExistsError:
            return False
        with os.fdopen(made, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(made)
            times = source.lstat()
            os.utime(made, ns=(times.st_atime_ns, times.st_mtime_ns))
    os.fsync(directory)
    return True
