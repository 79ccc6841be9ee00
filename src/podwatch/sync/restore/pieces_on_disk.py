"""The files of a restore on this disk, piece by piece, and what a worker does with a piece. Nothing found on disk is
trusted: every piece is hashed before it counts."""

import contextlib
import errno
import os
import stat
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from podwatch.domain.errors import HostError, IntegrityError, RemoteError, SaveGone
from podwatch.domain.manifest import ManifestFile, ManifestSymlink
from podwatch.stores.base import ObjectStore, OpenStore, Take
from podwatch.stores.part_reader import new_hash, part_spans
from podwatch.sync.restore.child_job import FetchJob
from podwatch.sync.restore.worker_processes import Order, Report
from podwatch.system.files import open_below, open_dir_below, release, reserve, start_writeback
from podwatch.system.pinned_directories import Pin, open_pinned, open_regular

# -- one file ---------------------------------------------------------------------------------------------------------

_BLOCK = 1 << 20
_ZEROS = bytes(_BLOCK)


class StagedFile:
    """Used by one thread; other threads and processes may have the same file open for other pieces.

    ``seed`` opens the same file of a local checkpoint that may share pieces with this one (a damaged copy); -1 if there
    is none."""

    def __init__(self, file: ManifestFile, root: int, part_size: int, seed: Callable[[], int] = lambda: -1) -> None:
        self.file, self._root, self._open_seed = file, root, seed
        self.spans = part_spans(file.size, part_size)
        self._fd = -1
        self._seed = -1

    def __enter__(self) -> "StagedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self) -> list[bool]:
        """Create or open the file at its full size, and return for each piece whether anything was written there
        before: if not, it is a hole, which costs neither reading nor writing zeros. Call it before any piece is
        written: neighbours share a block of the disk."""
        folder = self.file.path.rpartition("/")[0]
        os.close(open_dir_below(self._root, folder, create=True))
        had = self._open(os.O_CREAT)
        touched = [self._touched(*span, had) for span in self.spans]
        os.ftruncate(self._fd, self.file.size)
        return touched

    def open(self) -> None:
        """Open the file after ``prepare``, possibly by another process."""
        self._open(0)

    def _open(self, create: int) -> int:
        """Returns the file's size."""
        self._fd = open_below(self._root, self.file.path, os.O_RDWR | create | os.O_NONBLOCK, 0o600)
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise OSError(errno.EINVAL, "not a plain file of ours", self.file.path)
        self._seed = self._open_seed()
        return found.st_size

    def close(self) -> None:
        for descriptor in (self._fd, self._seed):
            if descriptor >= 0:
                os.close(descriptor)
        self._fd = self._seed = -1

    def _touched(self, offset: int, length: int, had: int) -> bool:
        if had <= offset:
            return False
        try:
            return os.lseek(self._fd, offset, os.SEEK_DATA) < offset + length
        except OSError as error:
            return error.errno != errno.ENXIO

    def good(self, number: int) -> bool:
        """Does this piece match the manifest already?"""
        return self._same(self._fd, number, None)

    @property
    def seeded(self) -> bool:
        """A wrong piece may have been copied half: no piece is certainly a hole any more."""
        return self._seed >= 0

    def taken_from_seed(self, number: int) -> bool:
        """Does the checkpoint at the target have this piece? Then it is copied from there."""
        if self._seed < 0:
            return False
        write = self.writer(number, fresh=True)
        return self._same(self._seed, number, write)

    def _same(self, descriptor: int, number: int, also: Take | None) -> bool:
        position, left = self.spans[number]
        name, expected = self.file.recorded(number)
        digest = new_hash(name)
        while left and (data := os.pread(descriptor, min(_BLOCK, left), position)):
            digest.update(data)
            if also is not None:
                also(memoryview(data))
            position, left = position + len(data), left - len(data)
        return not left and digest.hexdigest() == expected

    def writer(self, number: int, *, fresh: bool) -> Take:
        """A function that writes blocks one after the other. In a fresh piece, blocks of zeros stay holes, and the rest
        is reserved at the first other block."""
        position, length = self.spans[number]
        end, reserved = position + length, False

        def write(data: memoryview) -> None:
            nonlocal position, reserved
            if fresh and _is_zero(data):
                if reserved:
                    release(self._fd, position, len(data))
            else:
                if fresh and not reserved and end - position > _BLOCK:
                    reserved = reserve(self._fd, position, end - position)
                done = 0
                while done < len(data):
                    done += os.pwrite(self._fd, data[done:] if done else data, position + done)
            position += len(data)

        return write

    def written(self, number: int) -> None:
        """Start writing the piece to disk now, so that the final sync is short."""
        start_writeback(self._fd, *self.spans[number])

    def complete(self, owner: tuple[int, int] | None) -> None:
        """Call when every piece is right. Sets mode, owner and time as recorded, without setuid, setgid or
        capabilities."""
        os.fchmod(self._fd, self.file.mode & 0o777)
        if owner is not None:
            os.fchown(self._fd, *owner)
        os.utime(self._fd, ns=(self.file.mtime_ns, self.file.mtime_ns))
        if self.file.size > _BLOCK:
            os.fsync(self._fd)  # small ones are synced together at the end


def open_there(pins: Sequence[Pin], root: str, file: ManifestFile) -> int:
    """The file at its place below ``root``, opened without following a link. -1 if it is not there, or is no regular
    file."""
    try:
        with _folder(pins, root, file.path) as (directory, name):
            return open_regular(directory, name)
    except (OSError, HostError):
        return -1


def link_there(pins: Sequence[Pin], root: str, link: ManifestSymlink) -> bool:
    """Is the link below ``root`` as the manifest has it?"""
    try:
        with _folder(pins, root, link.path) as (directory, name):
            return os.readlink(name, dir_fd=directory) == link.target
    except (OSError, HostError):
        return False


@contextlib.contextmanager
def _folder(pins: Sequence[Pin], root: str, path: str) -> Iterator[tuple[int, str]]:
    """``path`` starts with the part's name, which is not in ``root``."""
    folder, _, name = path.partition("/")[2].rpartition("/")
    top = open_pinned(pins, root)
    try:
        directory = open_dir_below(top, folder)
    finally:
        os.close(top)
    try:
        yield directory, name
    finally:
        os.close(directory)


def same_on_disk(pins: Sequence[Pin], root: str, file: ManifestFile) -> bool:
    """Does the file below ``root`` have this size and mtime? Cheap; its bytes are not checked."""
    descriptor = open_there(pins, root, file)
    if descriptor < 0:
        return False
    try:
        found = os.fstat(descriptor)
        return (found.st_size, found.st_mtime_ns) == (file.size, file.mtime_ns)
    finally:
        os.close(descriptor)


def hash_in_place(pins: Sequence[Pin], root: str, file: ManifestFile, part_size: int, number: int) -> str:
    """The recorded kind of hash of one piece of the file below ``root``; empty where it cannot be read whole."""
    descriptor = open_there(pins, root, file)
    if descriptor < 0:
        return ""
    try:
        position, left = part_spans(file.size, part_size)[number]
        digest = new_hash(file.recorded(number)[0])
        while left and (data := os.pread(descriptor, min(_BLOCK, left), position)):
            digest.update(data)
            position, left = position + len(data), left - len(data)
        return "" if left else digest.hexdigest()
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _is_zero(data: memoryview) -> bool:
    return not data[0] and not data[-1] and bytes(data) == _ZEROS[: len(data)]


# -- one piece --------------------------------------------------------------------------------------------------------
# What a worker does with it: check whether it is there, fetch, hash and write it, complete a file. Each of these can be
# repeated after an interruption. Used by several threads at once.

LOOK, PIECE, WHOLE, COMPLETE = "look", "piece", "whole", "complete"
"""Hash a piece at its target; fetch one piece of a file; fetch a file of at most one piece and complete it; complete a
file of several pieces."""
THERE, CAME, DIFFERS = "there", "came", "differs"
"""Result for a piece: it was on this disk already, it was fetched, or the fetched bytes do not match the hash."""


class Pieces:
    """``roots`` are the open staging directories by part (none for only checking). Calling it raises IntegrityError,
    SaveGone, RemoteError or OSError."""

    def __init__(self, job: FetchJob, roots: Mapping[str, int], open_store: OpenStore) -> None:
        self._job, self._roots, self._open_store = job, roots, open_store
        self._store: ObjectStore | None = None
        self._opening = threading.Lock()
        self._turns: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        """By file: one thread writes to a file at a time. In the kernel they would wait for the file's lock, too, but
        spinning: a fifth of the CPU of a restore of large files (benchmarks/transfers.md)."""

    def __call__(self, order: Order, report: Report) -> str:
        file = self._job.files[order.file]
        if order.kind == LOOK:
            return hash_in_place(self._job.pins, self._job.targets[file.part], file, self._job.part_size, order.number)
        with staged_file(self._job, self._roots, order.file) as state:
            if order.kind == COMPLETE:
                state.open()
                state.complete(self._job.owner)
                return THERE
            touched = order.touched
            if order.kind == PIECE:
                state.open()
            elif any(state.prepare()):
                touched = True
            end = self._bring(state, order, report, touched=touched) if state.spans else THERE
            if order.kind == WHOLE and end != DIFFERS:
                state.complete(self._job.owner)
            return end

    def _bring(self, state: StagedFile, order: Order, report: Report, *, touched: bool) -> str:
        number = order.number
        end = THERE
        if order.reading or not (state.good(number) if touched else state.taken_from_seed(number)):
            end = self._download(state, order, report, fresh=not touched and not state.seeded)
        state.written(number)
        return end

    def _download(self, state: StagedFile, order: Order, report: Report, *, fresh: bool) -> str:
        file, number = state.file, order.number
        offset, length = state.spans[number]
        # The second reading is judged by SHA-1, so that one wrong record does not condemn good bytes.
        name, expected = file.recorded(number, slow=order.reading > 0)
        digest = new_hash(name)
        write = state.writer(number, fresh=fresh)
        turn = self._turns[order.file]

        def take(data: memoryview) -> None:
            digest.update(data)
            with turn:
                write(data)
            report(len(data))

        if self._ask(file, offset, length, take) != file.size:
            raise IntegrityError("the object's size differs from the recorded one", where=self._place(file))
        return CAME if digest.hexdigest() == expected else DIFFERS

    def _ask(self, file: ManifestFile, offset: int, length: int, take: Take) -> int:
        store = self._opened()
        try:
            return store.get_range(file.key, offset, length, take, file_id=file.file_id)
        except IntegrityError:
            raise
        except RemoteError as error:
            if not error.transient and store.stat(file.key, file.file_id) is None:
                raise SaveGone("the object is not in the store any more", where=self._place(file)) from error
            raise

    def _place(self, file: ManifestFile) -> str:
        return f"{self._opened().url}/{file.key}"

    def _opened(self) -> ObjectStore:
        with self._opening:
            if self._store is None:
                self._store = self._open_store()
            return self._store


def staged_file(job: FetchJob, roots: Mapping[str, int], number: int) -> StagedFile:
    """File ``number`` of the job in its staging directory."""
    file = job.files[number]
    return StagedFile(
        file, roots[file.part], job.part_size, partial(open_there, job.pins, job.targets[file.part], file)
    )
