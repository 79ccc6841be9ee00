"""Bringing one save's files into a staging directory: every byte hashed, every name distrusted, a kill survived.

What is already staged is read again and kept as far as its parts match, so an interrupted restore goes on where it was.
"""

import contextlib
import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.domain.remote import ManifestFile, ManifestSymlink
from podwatch.stores.base import ObjectStore
from podwatch.sync.publish import SaveGone
from podwatch.system.files import fsync_dir, open_below, open_dir_below, open_root

_BLOCK = 1 << 20
MARKERS = frozenset(
    {".metadata", "STABLE", "COMPLETED", "trainer_state.json", "latest", "model.safetensors.index.json"}
)
"""Files by which a layout knows a set as whole (facts/checkpoints.md): fetched last."""


def is_marker(path: str) -> bool:
    return path.rpartition("/")[2] in MARKERS


class VerifyingTarget(io.RawIOBase):
    """Takes a file's bytes from a part boundary on, writes them to ``descriptor``, and refuses the first part whose
    hash is not the manifest's, and any byte too many."""

    def __init__(
        self, descriptor: int, file: ManifestFile, part_size: int, first_part: int, tell: Callable[[int], None]
    ):
        super().__init__()
        self._fd, self._file, self._part_size, self._tell = descriptor, file, part_size, tell
        self._part = first_part
        self._position = first_part * part_size
        self._hash = hashlib.sha1(usedforsecurity=False)

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        view = memoryview(data)
        while view:
            end = min((self._part + 1) * self._part_size, self._file.size)
            piece = view[: end - self._position]
            if not piece:
                raise IntegrityError("object is longer than recorded", where=self._file.path)
            self._hash.update(piece)
            rest = piece
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            self._position += len(piece)
            self._tell(len(piece))
            view = view[len(piece) :]
            if self._position == end:
                self._close_part()
        return len(data)

    def _close_part(self) -> None:
        if self._hash.hexdigest() != self._file.parts_sha1[self._part]:
            raise IntegrityError(
                "object differs from its recorded hash", where=f"{self._file.path} part {self._part + 1}"
            )
        self._part += 1
        self._hash = hashlib.sha1(usedforsecurity=False)

    def finished(self) -> None:
        if self._position != self._file.size:
            raise IntegrityError("object is shorter than recorded", where=self._file.path)


def good_parts(descriptor: int, file: ManifestFile, part_size: int) -> int:
    """How many whole parts from the start on already are as the manifest says."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    for number, expected in enumerate(file.parts_sha1):
        left = min(part_size, file.size - number * part_size)
        digest = hashlib.sha1(usedforsecurity=False)
        while left and (data := os.read(descriptor, min(_BLOCK, left))):
            digest.update(data)
            left -= len(data)
        if left or digest.hexdigest() != expected:
            return number
    return len(file.parts_sha1)


def same_file(root: Path, inside: str, file: ManifestFile, part_size: int) -> bool:
    """Is the file below ``root`` exactly this one, bytes and mtime? Never follows a symlink."""
    try:
        root_fd = open_root(root)
    except OSError:
        return False
    try:
        descriptor = open_below(root_fd, inside, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    finally:
        os.close(root_fd)
    try:
        found = os.fstat(descriptor)
        if (found.st_size, found.st_mtime_ns) != (file.size, file.mtime_ns):
            return False
        return good_parts(descriptor, file, part_size) == len(file.parts_sha1)
    finally:
        os.close(descriptor)


class Stager:
    """Fills ``staging/<part>/...`` for the files given. Thread-safe inside; ``fetch`` blocks."""

    def __init__(
        self,
        store: ObjectStore,
        staging: Path,
        *,
        part_size: int,
        owner: tuple[int, int] | None,
        progress: Callable[[int], None],
    ) -> None:
        self._store, self._staging, self._part_size, self._owner = store, staging, part_size, owner
        self._progress = progress
        self._lock = threading.Lock()
        self._root = -1
        self.downloaded = 0
        self.kept = 0

    def fetch(self, files: Iterable[ManifestFile], symlinks: Iterable[ManifestSymlink], *, connections: int) -> None:
        """Raises IntegrityError (damaged), SaveGone (no longer there), RemoteError or OSError."""
        self._staging.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._root = open_root(self._staging)
        links = tuple(symlinks)
        wanted = tuple(files)
        try:
            self._strip({f.path for f in wanted})
            plain = [f for f in wanted if not is_marker(f.path)]
            self._fetch_many(sorted(plain, key=lambda f: -f.size), connections)
            for file in sorted((f for f in wanted if is_marker(f.path)), key=lambda f: f.path):
                self._fetch_one(file)
            for link in links:
                self._link(link)
            self._settle()
        finally:
            os.close(self._root)

    def _fetch_many(self, files: list[ManifestFile], connections: int) -> None:
        if not files:
            return
        with ThreadPoolExecutor(min(connections, len(files)), "podwatch-restore") as pool:
            running = [pool.submit(self._fetch_one, file) for file in files]
            finished, _ = wait(running, return_when=FIRST_EXCEPTION)
            for future in running:
                future.cancel()
            for future in finished:
                future.result()

    def _fetch_one(self, file: ManifestFile) -> None:
        folder = file.path.rpartition("/")[0]
        os.close(open_dir_below(self._root, folder, create=True))
        descriptor = open_below(self._root, file.path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
        try:
            first = good_parts(descriptor, file, self._part_size)
            kept = min(first * self._part_size, file.size)
            self._count(kept, kept=True)
            os.ftruncate(descriptor, kept)
            os.lseek(descriptor, kept, os.SEEK_SET)
            self._check_there(file)
            if kept < file.size:
                self._download(descriptor, file, first, kept)
            os.fchmod(descriptor, file.mode & 0o777)
            if self._owner is not None:
                os.fchown(descriptor, *self._owner)
            os.utime(descriptor, ns=(file.mtime_ns, file.mtime_ns))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _check_there(self, file: ManifestFile) -> None:
        found = self._store.stat(file.key, file.file_id)
        if found is None:
            raise SaveGone("object is not in the store any more", where=f"{self._store.url}/{file.key}")
        if found.size != file.size:
            raise IntegrityError("object has another size than recorded", where=f"{self._store.url}/{file.key}")

    def _download(self, descriptor: int, file: ManifestFile, first: int, offset: int) -> None:
        target = VerifyingTarget(descriptor, file, self._part_size, first, self._count)
        try:
            self._store.get_file(file.key, target, file_id=file.file_id, offset=offset)  # type: ignore[arg-type]
        except RemoteError as error:
            if not error.transient and not isinstance(error, IntegrityError):
                self._check_there(file)  # removed in the middle? then say so
            raise
        target.finished()

    def _count(self, count: int, *, kept: bool = False) -> None:
        with self._lock:
            if kept:
                self.kept += count
            else:
                self.downloaded += count
            total = self.kept + self.downloaded
        self._progress(total)

    def _link(self, link: ManifestSymlink) -> None:
        folder, _, name = link.path.rpartition("/")
        check_link(link)
        directory = open_dir_below(self._root, folder, create=True)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)
            os.symlink(link.target, name, dir_fd=directory)
            if self._owner is not None:
                os.chown(name, *self._owner, dir_fd=directory, follow_symlinks=False)
        finally:
            os.close(directory)

    def _strip(self, wanted: set[str]) -> None:
        """Nothing may lie in the staging directory that the manifest does not name."""
        for directory, _, names in os.walk(self._staging, followlinks=False):
            for name in names:
                path = Path(directory) / name
                if path.relative_to(self._staging).as_posix() not in wanted or path.is_symlink():
                    path.unlink()
            for child in list(os.scandir(directory)):
                if child.is_symlink():
                    Path(child.path).unlink()

    def _settle(self) -> None:
        for directory, _, _ in os.walk(self._staging, topdown=False):
            if self._owner is not None:
                os.chown(directory, *self._owner, follow_symlinks=False)
            fsync_dir(Path(directory))


def check_link(link: ManifestSymlink) -> None:
    """A link must be relative and stay inside its own part (promise 9)."""
    depth = link.path.count("/") - 1  # directories between the part's own and the link
    target = link.target
    bad = not target or target.startswith("/") or "\0" in target or "\\" in target
    for segment in target.split("/"):
        if segment == "..":
            depth -= 1
        elif segment not in ("", "."):
            depth += 1
        bad = bad or depth < 0
    if bad:
        raise IntegrityError("manifest holds a link out of its set", where=repr(link.path)[:120])


def by_part(files: Iterable[ManifestFile]) -> dict[str, list[ManifestFile]]:
    parts: dict[str, list[ManifestFile]] = {}
    for file in files:
        parts.setdefault(file.part, []).append(file)
    return parts
