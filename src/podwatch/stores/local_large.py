"""Multi-part uploads into a directory: finished by a rename, continued after a kill.

``<store>/.podwatch-store/large/<id>/`` has ``meta.json``, the growing ``data`` and, for each part that is safely in it,
a small file ``<number>`` with its length and hash, written after the data was flushed.
"""

import hashlib
import json
import os
import secrets
import stat as stat_module
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.stores.base import Progress, StoredPart, Unfinished, Upload
from podwatch.stores.part_reader import FileSource, Source, became_shorter

_BLOCK = 1 << 20
DOCUMENT_MODE = 0o644
"""Of what podwatch itself writes: it has no secrets, and other users may watch the run."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def mode_of(source: Source) -> int:
    """The permissions of what is stored: those of a checkpoint's file, which must not become readable for more users.
    podwatch can always write what it has not finished."""
    if isinstance(source, FileSource):
        return os.fstat(source.descriptor).st_mode & 0o755 | 0o600
    return DOCUMENT_MODE


class LargeUploads:
    """``open_directory(folder, create)`` opens a directory below the store's root without following links; the caller
    closes it, and translates OSError."""

    def __init__(self, folder: str, open_directory: Callable[..., int]) -> None:
        self._folder, self._open_directory = folder, open_directory

    def begin(self, key: str, size: int, writer_id: str, wall: float) -> str:
        upload = secrets.token_hex(16)
        directory = self._open_directory(f"{self._folder}/{upload}", create=True)
        try:
            os.close(os.open("data", _NEW, 0o600, dir_fd=directory))
            _write_file(directory, "meta.json", {"key": key, "size": size, "writer_id": writer_id, "wall": wall})
        finally:
            os.close(directory)
        return upload

    def put(
        self, upload: str, number: int, source: Source, offset: int, length: int, progress: Progress | None
    ) -> StoredPart:
        directory = self._open(upload)
        if directory is None:
            raise RemoteError("no such unfinished upload", where=upload, fix="podwatch sends it again", transient=False)
        try:
            target = os.open("data", os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            try:
                os.fchmod(target, mode_of(source))
                sha1 = _copy(source, offset, length, target, progress)
                os.fsync(target)
            finally:
                os.close(target)
            _write_file(directory, str(number), {"size": length, "sha1": sha1})
        finally:
            os.close(directory)
        return StoredPart(length, sha1)

    def parts(self, upload: str) -> Mapping[int, StoredPart] | None:
        directory = self._open(upload)
        if directory is None:
            return None
        try:
            if _read_file(directory, "meta.json") is None or not _has_data(directory):
                return None  # never begun, or finished: the data has been renamed away
            found = {}
            for name in os.listdir(directory):  # noqa: PTH208 - by descriptor
                document = _read_file(directory, name) if name.isdigit() else None
                if document is not None:
                    found[int(name)] = StoredPart(int(document["size"]), str(document["sha1"]))
            return found
        finally:
            os.close(directory)

    def seal(self, upload: str, parts_sha1: tuple[str, ...], size: int) -> str | None:
        """The data's path relative to the store, whole and flushed; None if there is no such upload (any more)."""
        found = self.parts(upload)
        if found is None:
            return None
        hashes = tuple(found[n].sha1 for n in sorted(found))
        if sorted(found) != list(range(1, len(parts_sha1) + 1)) or hashes != parts_sha1:
            raise IntegrityError("the store has different parts than podwatch sent", where=upload)
        directory = self._open(upload)
        if directory is None:
            return None
        try:
            target = os.open("data", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            try:
                if os.fstat(target).st_size != size:
                    raise IntegrityError("the store has a different size than podwatch sent", where=upload)
                os.fsync(target)
            finally:
                os.close(target)
        finally:
            os.close(directory)
        return f"{self._folder}/{upload}/data"

    def drop(self, upload: str) -> None:
        directory = self._open(upload)
        if directory is None:
            return
        try:
            # meta.json last: until then a sweep finds what is left.
            for name in sorted(os.listdir(directory), key=lambda n: n == "meta.json"):  # noqa: PTH208
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)
        finally:
            os.close(directory)
        parent = self._open_directory(self._folder)
        try:
            with suppress(OSError):
                os.rmdir(upload, dir_fd=parent)
        finally:
            os.close(parent)

    def all(self, prefix: str) -> Iterator[Unfinished]:
        try:
            parent = self._open_directory(self._folder)
        except FileNotFoundError:
            return
        try:
            names = os.listdir(parent)  # noqa: PTH208
        finally:
            os.close(parent)
        found = []
        for name in names:
            directory = self._open(name)
            if directory is None:
                continue
            try:
                meta = _read_file(directory, "meta.json")
            finally:
                os.close(directory)
            if meta is not None and str(meta.get("key", "")).startswith(prefix):
                writer = str(meta.get("writer_id", ""))
                found.append(Unfinished(Upload(str(meta["key"]), name), float(meta.get("wall", 0.0)), True, writer))
        yield from sorted(found, key=lambda u: u.started_wall)

    def _open(self, upload: str) -> int | None:
        if not upload or "/" in upload or upload.startswith("."):
            return None
        try:
            return self._open_directory(f"{self._folder}/{upload}")
        except (FileNotFoundError, NotADirectoryError):
            return None


def _has_data(directory: int) -> bool:
    try:
        return stat_module.S_ISREG(os.stat("data", dir_fd=directory, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _copy(source: Source, offset: int, length: int, target: int, progress: Progress | None) -> str:
    """Returns the SHA-1."""
    sha1, done = hashlib.sha1(usedforsecurity=False), 0
    while done < length:
        data = source.read_at(offset + done, min(_BLOCK, length - done))
        if not data:
            raise became_shorter()
        sha1.update(data)
        view = memoryview(data)
        at = offset + done
        while view:
            written = os.pwrite(target, view, at)
            view, at = view[written:], at + written
        done += len(data)
        if progress is not None:
            progress(len(data))
    return sha1.hexdigest()


def _write_file(directory: int, name: str, document: Mapping[str, object]) -> None:
    """Whole or not at all, and durable."""
    scratch = f".{name}.{secrets.token_hex(4)}"
    descriptor = os.open(scratch, _NEW, 0o644, dir_fd=directory)
    try:
        os.write(descriptor, json.dumps(document).encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(scratch, name, src_dir_fd=directory, dst_dir_fd=directory)
    os.fsync(directory)


def _read_file(directory: int, name: str) -> dict[str, Any] | None:
    """None for what is not there or was not written by us."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not stat_module.S_ISREG(os.fstat(file.fileno()).st_mode):
            return None
        try:
            document = json.loads(file.read(1 << 16))
        except (OSError, ValueError):
            return None
    return document if isinstance(document, dict) else None
