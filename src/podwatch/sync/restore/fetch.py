"""Fetches one checkpoint's files into staging: every byte is hashed, no name is trusted, and a kill costs little.

One queue of pieces (the manifest's parts) over all files. Staged bytes are hashed and kept where they are right, so an
interrupted restore loses at most the pieces in flight; intact pieces of a damaged local checkpoint are copied from
there. Runs in a child process (child_main.py).
"""

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from podwatch.client.times_and_sizes import size as in_words
from podwatch.domain.errors import HostError, IntegrityError
from podwatch.domain.manifest import ManifestFile, ManifestSymlink
from podwatch.domain.safe_links import check_links
from podwatch.stores.base import OpenStore
from podwatch.stores.part_reader import part_spans
from podwatch.sync.restore.child_job import Fetched, FetchJob
from podwatch.sync.restore.pieces_on_disk import (
    COMPLETE,
    DIFFERS,
    LOOK,
    PIECE,
    WHOLE,
    Pieces,
    link_there,
    same_on_disk,
    staged_file,
)
from podwatch.sync.restore.stage_and_put_in_place import allocated, give_away, open_staging, strip
from podwatch.sync.restore.worker_processes import Order, Workers, how_many
from podwatch.system.files import open_dir_below, sync_filesystem

MARKERS = frozenset(
    {".metadata", "STABLE", "COMPLETED", "trainer_state.json", "latest", "model.safetensors.index.json"}
)
"""Files by which a layout recognizes a complete checkpoint (docs/checkpoints.md): fetched last."""
READINGS = 2
"""Reads of a piece before it counts as damaged in the store: a bit may flip in transit, hardly ever twice."""

Progress = Callable[[int, int], None]
"""(bytes that are verified or in flight, bytes that came over the line)."""


def is_marker(path: str) -> bool:
    return path.rpartition("/")[2] in MARKERS


class Fetching:
    """``run`` fetches everything that is not in place already. Raises IntegrityError (damaged), SaveGone (no longer
    there), RemoteError, HostError (no space, no worker) or OSError.

    Its workers are forked from this process, which must have no threads and no connections yet; ``open_store`` is
    called in each of them. ``parent``: a descriptor whose end ends this process while they work (-1: none).
    ``settling`` is called when they have ended and only the disk is left to wait for."""

    def __init__(
        self,
        job: FetchJob,
        open_store: OpenStore,
        progress: Progress,
        *,
        parent: int = -1,
        settling: Callable[[], None] = lambda: None,
    ) -> None:
        self._job, self._open_store, self._progress = job, open_store, progress
        self._parent, self._settling = parent, settling
        self._number = {file: number for number, file in enumerate(job.files)}
        self._here = 0
        self._downloaded = 0
        self._coming: dict[tuple[str, int, int], int] = {}
        """Bytes of each piece in flight that count as here."""
        self._left: dict[int, int] = {}
        """Pieces per multi-piece file that are not right yet. The order that makes it zero completes the file."""
        self._wrong = False

    def run(self) -> Fetched:
        files = by_part(self._job.files)
        check_links(self._job.files, self._job.symlinks)
        staged = tuple(p for p in self._job.parts if not self._in_place(p, files.get(p, [])))
        for part in set(self._job.parts) - set(staged):
            self._count(sum(f.size for f in files[part]))
        homes = {part: Path(self._job.staging[part]) for part in staged}
        wanted = [f for part in staged for f in files.get(part, [])]
        links = [s for s in self._job.symlinks if s.part in staged]
        opened: dict[Path, int] = {}
        try:
            for home in set(homes.values()):
                opened[home] = open_staging(self._job.pins, home)
                strip(opened[home], {f.path for f in wanted if homes[f.part] == home})
            roots = {part: opened[home] for part, home in homes.items()}
            check_room([(roots[f.part], f.size) for f in wanted])
            plain = sorted((f for f in wanted if not is_marker(f.path)), key=lambda f: -f.size)
            with self._workers(wanted, roots) as workers:
                workers.run(self._orders(plain, roots), self)
                workers.run(self._orders([f for f in wanted if is_marker(f.path)], roots), self)
            self._settling()
            for link in links:
                self._link(roots[link.part], link)
            for descriptor in opened.values():
                give_away(descriptor, self._job.owner)
                sync_filesystem(descriptor)
        finally:
            for descriptor in opened.values():
                os.close(descriptor)
        return Fetched(staged, self._downloaded)

    @contextlib.contextmanager
    def _workers(self, files: Collection[ManifestFile], roots: Mapping[str, int]) -> Iterator[Workers]:
        """Workers for these files. None is left afterwards, however it ends."""
        cores = len(os.sched_getaffinity(0))
        first = self._job.connections
        count = how_many(cores, first, sum(max(1, len(f.parts_sha1)) for f in files))
        workers = Workers(
            count,
            first,
            lambda: Pieces(self._job, roots, self._open_store),
            self._parent,
        )
        try:
            yield workers
        finally:
            workers.close()

    # -- what is there ------------------------------------------------------------------------------------------------

    def _in_place(self, part: str, files: list[ManifestFile]) -> bool:
        """Is the part at its target, with every byte and mtime? Its links are made with its last file."""
        target, pins = self._job.targets[part], self._job.pins
        if not files or not all(same_on_disk(pins, target, f) for f in files):
            return False
        if not all(link_there(pins, target, s) for s in self._job.symlinks if s.part == part):
            return False
        self._wrong = False
        with self._workers(files, {}) as workers:
            workers.run(self._looks(files), self)
        return not self._wrong

    def _looks(self, files: Iterable[ManifestFile]) -> Iterator[Order]:
        for file in files:
            for number, (_, length) in enumerate(part_spans(file.size, self._job.part_size)):
                if self._wrong:
                    return
                yield Order(LOOK, self._number[file], number, length)

    # -- bringing it --------------------------------------------------------------------------------------------------

    def _orders(self, files: Iterable[ManifestFile], roots: Mapping[str, int]) -> Iterator[Order]:
        """Files of several pieces are created here, before any worker writes to them; single pieces by the worker."""
        for file in files:
            which = self._number[file]
            spans = part_spans(file.size, self._job.part_size)
            if len(spans) <= 1:
                yield Order(WHOLE, which, 0, file.size)
                continue
            with staged_file(self._job, roots, which) as state:
                touched = state.prepare()
            self._left[which] = len(spans)
            for number, (_, length) in enumerate(spans):
                yield Order(PIECE, which, number, length, touched[number])

    # Results of the workers' orders (worker_processes.Boss).

    def moved(self, order: Order, count: int) -> None:
        self._coming[order[:3]] = self._coming.get(order[:3], 0) + count
        self._count(count, downloaded=count)

    def finished(self, order: Order, result: str) -> tuple[Order, ...]:
        file = self._job.files[order.file]
        if order.kind == LOOK:
            self._wrong = self._wrong or result != file.recorded(order.number)[1]
            return ()
        if order.kind == COMPLETE:
            return ()
        if result == DIFFERS:
            again = self.lost(order)._replace(reading=order.reading + 1)
            if again.reading >= READINGS:
                where = f"{file.path} part {order.number + 1}"
                raise IntegrityError("the object does not match its recorded hash", where=where)
            return (again,)
        self._count(order.length - self._coming.pop(order[:3], 0))
        if order.kind == WHOLE:
            return ()
        self._left[order.file] -= 1
        return () if self._left[order.file] else (Order(COMPLETE, order.file, 0, 0),)

    def lost(self, order: Order) -> Order:
        """Bytes written for it count as nothing; the order is repeated, over what is there."""
        self._count(-self._coming.pop(order[:3], 0))
        return order._replace(touched=True)

    def _count(self, here: int, *, downloaded: int = 0) -> None:
        self._here += here
        self._downloaded += downloaded
        self._progress(self._here, self._downloaded)

    def _link(self, root: int, link: ManifestSymlink) -> None:
        folder, _, name = link.path.rpartition("/")
        directory = open_dir_below(root, folder, create=True)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)
            os.symlink(link.target, name, dir_fd=directory)
            if self._job.owner is not None:
                os.chown(name, *self._job.owner, dir_fd=directory, follow_symlinks=False)
        finally:
            os.close(directory)


def check_room(wanted: list[tuple[int, int]]) -> None:
    """(staging directory, bytes) of each file. Raises HostError where they do not fit. Bytes already staged need no
    space again."""
    needed: dict[int, int] = {}
    homes: dict[int, set[int]] = {}
    for home, size in wanted:
        device = os.fstat(home).st_dev
        needed[device] = needed.get(device, 0) + size
        homes.setdefault(device, set()).add(home)
    for device, size in needed.items():
        one = next(iter(homes[device]))
        room = os.fstatvfs(one)
        free = room.f_bavail * room.f_frsize
        staged = sum(allocated(home) for home in homes[device])
        if size > free + staged:
            raise HostError(
                f"not enough disk space to restore: {in_words(size)} needed, {in_words(free)} free",
                where=os.readlink(f"/proc/self/fd/{one}"),  # noqa: PTH115 - text is wanted
                fix="free space (`podwatch prune`), then restore again",
            )


def by_part(files: Iterable[ManifestFile]) -> dict[str, list[ManifestFile]]:
    parts: dict[str, list[ManifestFile]] = {}
    for file in files:
        parts.setdefault(file.part, []).append(file)
    return parts
