"""Fetches one checkpoint's files into staging: every byte is hashed, no name is trusted, and a kill costs little.

One queue of pieces (the manifest's parts) over all files. Staged bytes are hashed and kept where they are right, so an
interrupted restore loses at most the pieces in flight. Runs in a child process (child_main.py).
"""

import contextlib
import hashlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from podwatch.client.times_and_sizes import size as in_words
from podwatch.domain.errors import HostError, IntegrityError, RemoteError, SaveGone
from podwatch.domain.manifest import ManifestFile, ManifestSymlink
from podwatch.domain.safe_links import check_links
from podwatch.stores.base import ObjectStore, Take
from podwatch.stores.part_reader import part_spans
from podwatch.sync.connections import Work, work_off
from podwatch.sync.restore.child_job import Fetched, FetchJob
from podwatch.sync.restore.pieces_on_disk import StagedFile, hash_in_place, link_there, same_on_disk
from podwatch.sync.restore.stage_and_put_in_place import allocated, open_staging, strip, sync_directories
from podwatch.system.files import open_dir_below, sync_filesystem
from podwatch.system.rights import applied, own_rights

MARKERS = frozenset(
    {".metadata", "STABLE", "COMPLETED", "trainer_state.json", "latest", "model.safetensors.index.json"}
)
"""Files by which a layout recognizes a complete checkpoint (docs/checkpoints.md): fetched last."""
READINGS = 2
"""Reads of a piece before it counts as damaged in the store: a bit may flip in transit, hardly ever twice."""

Progress = Callable[[int, int], None]
"""(bytes that are verified or in flight, bytes that came over the line). Called by several threads."""


def is_marker(path: str) -> bool:
    return path.rpartition("/")[2] in MARKERS


class Fetching:
    """``run`` fetches everything that is not in place already. Raises IntegrityError (damaged), SaveGone (no longer
    there), RemoteError, HostError (no space) or OSError; its threads may still be busy with their last piece then, so
    that the process should end."""

    def __init__(self, job: FetchJob, store: ObjectStore, progress: Progress) -> None:
        self._job, self._store, self._progress = job, store, progress
        self._lock = threading.Lock()
        self._here = self._downloaded = 0
        self._turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        """By file: one thread writes to a file at a time. In the kernel they would wait for the file's lock, too, but
        spinning: a fifth of the CPU of a restore of large files (benchmarks/transfers.md)."""

    def run(self) -> Fetched:
        """The threads that it starts have the same rights."""
        with applied(self._job.rights):
            return self._run()

    def _run(self) -> Fetched:
        files = by_part(self._job.files)
        check_links(self._job.files, self._job.symlinks)
        staged = tuple(p for p in self._job.parts if not self._in_place(p, files.get(p, [])))
        for part in set(self._job.parts) - set(staged):
            self._count(sum(f.size for f in files[part]))
        homes = {part: Path(self._job.staging[part]) for part in staged}
        wanted = [f for part in staged for f in files.get(part, [])]
        links = [s for s in self._job.symlinks if s.part in staged]
        opened: dict[Path, int] = {}
        for home in set(homes.values()):
            opened[home] = open_staging(self._job.pins, home, self._job.rights)
            strip(opened[home], {f.path for f in wanted if homes[f.part] == home})
        roots = {part: opened[home] for part, home in homes.items()}
        check_room([(roots[f.part], f.size) for f in wanted])
        plain = sorted((f for f in wanted if not is_marker(f.path)), key=lambda f: -f.size)
        for group in (plain, [f for f in wanted if is_marker(f.path)]):
            work_off([piece for file in group for piece in self._pieces(file, roots)], self._job.connections)
        for link in links:
            self._link(roots[link.part], link)
        for descriptor in opened.values():
            sync_directories(descriptor)
            sync_filesystem(descriptor)
            os.close(descriptor)
        return Fetched(staged, self._downloaded)

    def _in_place(self, part: str, files: list[ManifestFile]) -> bool:
        """Is the part at its target, with every byte and mtime? Its links are made with its last file."""
        target, pins, size = self._job.targets[part], self._job.pins, self._job.part_size
        if not files or not all(same_on_disk(pins, target, f) for f in files):
            return False
        if not all(link_there(pins, target, s) for s in self._job.symlinks if s.part == part):
            return False
        right = True

        def look(file: ManifestFile, number: int) -> None:
            nonlocal right
            if right and hash_in_place(pins, target, file, size, number) != file.parts_sha1[number]:
                right = False

        looks: list[Work] = [partial(look, f, n) for f in files for n in range(len(part_spans(f.size, size)))]
        work_off(looks, self._job.connections)
        return right

    def _pieces(self, file: ManifestFile, roots: Mapping[str, int]) -> Iterator[Work]:
        """A file of several pieces is created here, before any thread writes to it."""
        root, spans = roots[file.part], part_spans(file.size, self._job.part_size)
        if len(spans) <= 1:
            yield partial(self._whole, file, root)
            return
        with StagedFile(file, root, self._job.part_size) as state:
            there = state.prepare()
        left = len(spans)

        def piece(number: int) -> None:
            nonlocal left
            with StagedFile(file, root, self._job.part_size) as state:
                state.open()
                self._bring(state, number, there=there)
                with self._lock:
                    left -= 1
                    last = not left
                if last:
                    state.complete()

        for number in range(len(spans)):
            yield partial(piece, number)

    def _whole(self, file: ManifestFile, root: int) -> None:
        with StagedFile(file, root, self._job.part_size) as state:
            there = state.prepare()
            if state.spans:
                self._bring(state, 0, there=there)
            state.complete()

    def _bring(self, state: StagedFile, number: int, *, there: bool) -> None:
        length = state.spans[number][1]
        if there and state.good(number):
            self._count(length)
        else:
            for _reading in range(READINGS):
                if self._download(state, number):
                    break
                self._count(-length)
            else:
                where = f"{state.file.path} part {number + 1}"
                raise IntegrityError("the object does not match its recorded hash", where=where)
        state.written(number)

    def _download(self, state: StagedFile, number: int) -> bool:
        """Whether its bytes were right."""
        file, (offset, length) = state.file, state.spans[number]
        digest = hashlib.sha1(usedforsecurity=False)
        write = state.writer(number)
        turn = self._turns[file.path]

        def take(data: memoryview) -> None:
            digest.update(data)
            with turn:
                write(data)
            self._count(len(data), downloaded=len(data))

        if self._ask(file, offset, length, take) != file.size:
            raise IntegrityError("the object's size differs from the recorded one", where=self._place(file))
        return digest.hexdigest() == file.parts_sha1[number]

    def _ask(self, file: ManifestFile, offset: int, length: int, take: Take) -> int:
        """With podwatch's own rights: a store can be a directory that the trainer's user cannot enter."""
        store = self._store
        with own_rights().applied():
            try:
                return store.get_range(file.key, offset, length, take, file_id=file.file_id)
            except IntegrityError:
                raise
            except RemoteError as error:
                if not error.transient and store.stat(file.key, file.file_id) is None:
                    raise SaveGone("the object is not in the store any more", where=self._place(file)) from error
                raise

    def _place(self, file: ManifestFile) -> str:
        return f"{self._store.url}/{file.key}"

    def _count(self, here: int, *, downloaded: int = 0) -> None:
        with self._lock:
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
