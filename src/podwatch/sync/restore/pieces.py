"""What one worker of a restore does with a piece: check whether it is there, fetch, hash and write it, complete a file.
Each of these can be repeated after an interruption. Used by several threads at once."""

import hashlib
import threading
from collections import defaultdict
from collections.abc import Mapping
from functools import partial

from podwatch.domain.errors import IntegrityError, RemoteError
from podwatch.domain.manifest import ManifestFile
from podwatch.stores.base import ObjectStore, OpenStore, Take
from podwatch.sync.connections import RateLimit
from podwatch.sync.errors import SaveGone
from podwatch.sync.restore.job import FetchJob
from podwatch.sync.restore.staged_files import StagedFile, hash_in_place, open_there
from podwatch.sync.restore.worker_processes import Order, Report

LOOK, PIECE, WHOLE, COMPLETE = "look", "piece", "whole", "complete"
"""Hash a piece at its target; fetch one piece of a file; fetch a file of at most one piece and complete it; complete a
file of several pieces."""
THERE, CAME, DIFFERS = "there", "came", "differs"
"""Result for a piece: it was on this disk already, it was fetched, or the fetched bytes do not match the hash."""


class Pieces:
    """``roots`` are the open staging directories by part (none for only checking). ``rate`` is this worker's share of
    the limit, in bytes per second; 0: none. Calling it raises IntegrityError, SaveGone, RemoteError or OSError."""

    def __init__(self, job: FetchJob, roots: Mapping[str, int], open_store: OpenStore, rate: float) -> None:
        self._job, self._roots, self._open_store = job, roots, open_store
        self._limit = RateLimit(rate)
        self._store: ObjectStore | None = None
        self._opening = threading.Lock()
        self._turns: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        """By file: one thread writes to a file at a time. In the kernel they would wait for the file's lock, too, but
        spinning: a fifth of the CPU of a restore of large files (docs/performance.md)."""

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
        digest = hashlib.sha1(usedforsecurity=False)
        write = state.writer(number, fresh=fresh)
        turn = self._turns[order.file]

        def take(data: memoryview) -> None:
            digest.update(data)
            with turn:
                write(data)
            report(len(data))
            self._limit.take(len(data))

        if self._ask(file, offset, length, take) != file.size:
            raise IntegrityError("the object's size differs from the recorded one", where=self._place(file))
        return CAME if digest.hexdigest() == file.parts_sha1[number] else DIFFERS

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
